"""What clients remember, on a cluster: each client's at two workers, either of which may train it.

A Work's memories are copied from worker to worker while the server steps. Nothing older is forgotten, and no other Work
begins, before the copies are there: so whoever dies, its share can be trained again from what its clients knew before,
or what they know now is still somewhere. The server itself keeps the copies of a worker that is alone.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedloom.engines.ray.placement import homes
from fedloom.engines.ray.pool import Lost, Member
from fedloom.engines.ray.wire import pack, unpack
from fedloom.errors import RunError
from fedloom.memory import Memory
from fedloom.method import Part
from fedloom.stages import Client, State, Work

if TYPE_CHECKING:
    from fedloom.engines.ray.engine import Ray

LOG = logging.getLogger("fedloom")
PORTION = 1 << 26  # bytes of memory that travel at once
TRIES = 5  # deaths while memories are copied, read or put back, after which that is given up
SERVER = -1  # in place of a worker: the server


@dataclass(frozen=True)
class _Copy:
    """Memories on their way from one worker to the next."""

    clients: list[int]
    home: int
    to: int
    done: Any  # what the receiver answers; or the memories themselves, for the server


class Keeping:
    """Which workers hold what which clients remember."""

    def __init__(self, engine: "Ray", parts: Sequence[Part[Client]]) -> None:
        self.engine = engine
        like = engine.setup.start.cpu()
        self.own = {part.key: Memory(part.stage.remembers, like) for part in parts}
        self.memory = {key: Remembered(self, key) for key in self.own}
        self.holders: dict[int, list[int]] = {}  # by client: workers (by their identity), its home first
        self.copies: list[_Copy] = []
        self.first: dict[int, int] = {}  # by client: the first Work that it remembers
        self.last: dict[int, int] = {}
        self.seen: frozenset[int] = frozenset()  # the workers when copies were last looked after

    @property
    def row_bytes(self) -> int:
        return sum(memory.row_bytes for memory in self.own.values())

    def bring(self, work: Work, shares: dict[int, list[int]]) -> None:
        """Let each worker have the memories of those that it is about to train."""
        if not self.memory:
            return
        clients = work.clients.tolist()
        for number, at in shares.items():
            member = self.engine.pool.members[number]
            wanted = {clients[k] for k in at}
            away = [c for c in wanted if c in self.holders and member.uid not in self.holders[c]]
            self._move(away, member)
            for client in away:
                self.holders[client].insert(0, member.uid)

    def _move(self, clients: Iterable[int], to: Member) -> None:
        """Copy memories to a worker, from whoever holds them."""
        sources: dict[int, list[int]] = {}
        alive = self._alive()
        for client in clients:
            held = [uid for uid in self.holders[client] if uid == SERVER or uid in alive]
            if not held:
                raise RunError(
                    f"what client {client} remembers was lost: all workers that held it died at once; resume the run "
                    "from its last checkpoint"
                )
            sources.setdefault(held[0], []).append(client)
        some = max(1, PORTION // max(self.row_bytes, 1))
        for uid, theirs in sources.items():
            for i in range(0, len(theirs), some):
                piece = self._given(uid, theirs[i : i + some])
                self.engine.pool.get([to.handle.take.remote(self.engine.number, piece)])
                self.engine.moved += self.row_bytes * len(theirs[i : i + some])

    def _given(self, uid: int, clients: list[int]) -> Any:
        if uid == SERVER:
            return {key: pack(memory.versions(clients)) for key, memory in self.own.items()}
        return self._alive()[uid].handle.give.remote(self.engine.number, clients)

    def _alive(self) -> dict[int, Member]:
        return {member.uid: member for member in self.engine.pool.members.values()}

    def _next(self, uid: int) -> Member | None:
        """Who keeps the copies of a worker: the next one on another node, or the next one; None: it is alone."""
        members = self.engine.pool.alive()
        places = [member.uid for member in members]
        turn = places.index(uid) if uid in places else 0
        others = [members[(turn + k) % len(members)] for k in range(1, len(members))]
        here = members[turn].node
        return next((member for member in others if member.node != here), others[0] if others else None)

    def known(self, w: int, clients: Sequence[int]) -> list[int]:
        """Those of whom something from before a Work must be at whoever trains them."""
        return [client for client in clients if client in self.holders and self.first[client] < w]

    def partners(self, member: Member, clients: Sequence[int]) -> dict[int, list[int]]:
        """Who keeps the copies of what these clients will remember at a worker: who has them now, or the next one."""
        found: dict[int, list[int]] = {}
        if not self.memory:
            return found
        to = self._next(member.uid)
        usual, alive = SERVER if to is None else to.uid, self._alive()
        for client in dict.fromkeys(clients):
            others = [uid for uid in self.holders.get(client, []) if uid in alive and uid != member.uid]
            found.setdefault(others[0] if others else usual, []).append(client)
        return found

    def copy(self, w: int, member: Member, partner: int, clients: list[int], piece: Any) -> None:
        """What clients have just remembered at a worker goes to another one, too. Where the Work was trained before,
        by somebody who has died since, the copy of that time counts no longer.
        """
        again = set(clients)
        left = [replace(one, clients=[c for c in one.clients if c not in again]) for one in self.copies]
        self.copies = [one for one in left if one.clients]
        for client in clients:
            self.first.setdefault(client, w)
            self.last[client] = w
        for one in self.memory.values():
            one.changed.update(clients)
        if clients:
            self._copy(member, partner, clients, piece)

    def _copy(self, member: Member, partner: int, clients: list[int], piece: Any) -> None:
        to = None if partner == SERVER else self._alive().get(partner) or self._next(member.uid)
        done = piece if to is None else to.handle.take.remote(self.engine.number, piece)
        self.copies.append(_Copy(clients, member.uid, SERVER if to is None else to.uid, done))
        self.engine.moved += self.row_bytes * len(clients)

    def secure(self) -> None:
        """Wait until every memory of the last Work lies at two workers; what was lost before is trained again."""
        while self.copies:
            one = self.copies.pop(0)
            try:
                (found,) = self.engine.pool.get([one.done])
            except Lost:
                home = self._alive().get(one.home)
                if home is not None:
                    piece = home.handle.give.remote(self.engine.number, one.clients)
                    to = self._next(home.uid)
                    self._copy(home, SERVER if to is None else to.uid, one.clients, piece)
                    continue
                out = self.engine.out[True]
                theirs = set(one.clients)
                again = [k for k, client in enumerate(out.work.clients.tolist()) if client in theirs]
                self.engine.train_again(out, again)
                continue
            if one.to == SERVER:
                for key, values in unpack(found, own=True).items():
                    self.own[key].take(values)
            self._settled(one)

    def _settled(self, copy: _Copy) -> None:
        """Both have it: whoever held older values may forget them."""
        stale: dict[int, list[int]] = {}
        for client in copy.clients:
            for uid in self.holders.get(client, []):
                if uid not in (copy.home, copy.to):
                    stale.setdefault(uid, []).append(client)
            self.holders[client] = [copy.home, copy.to]
        alive = self._alive()
        for uid, clients in stale.items():
            if uid == SERVER:
                for memory in self.own.values():
                    memory.forget(clients)
            elif uid in alive:
                alive[uid].handle.forget.remote(self.engine.number, clients)

    def heal(self) -> None:
        """After a death: what has only one holder left is copied again."""
        now = frozenset(self._alive())
        if now == self.seen or not self.holders:
            self.seen = now
            return
        for _ in range(TRIES):
            self.engine.members()
            with suppress(Lost):  # another one: once more
                self._heal()
                self.seen = frozenset(self._alive())
                return
        raise RunError("workers die again and again while memories are copied; the run can be resumed")

    def _heal(self) -> None:
        alive = self._alive()
        single: dict[int, list[int]] = {}
        for client, holders in self.holders.items():
            held = [uid for uid in holders if uid in alive or uid == SERVER]
            self.holders[client] = held or holders  # nobody: told when it is asked for
            if len(held) == 1:
                single.setdefault(held[0], []).append(client)
        for uid, clients in single.items():
            to = self._next(uid)
            if to is None or to.uid == uid:
                continue
            self._move(clients, to)
            for client in clients:
                self.holders[client].append(to.uid)

    def settle(self) -> None:
        """A round is over, and all of it in two places: older values may go."""
        if not self.memory:
            return
        self.secure()
        for member in self.engine.pool.members.values():
            if self.engine.number in member.runs:
                member.handle.settle.remote(self.engine.number)
        for memory in self.own.values():
            memory.settle()

    def read(self, key: str, clients: Sequence[int], w: int) -> State:
        """What clients knew before a Work, brought to the server; from whoever else has it, where a holder dies."""
        for _ in range(TRIES):
            self.secure()
            with suppress(Lost):
                return self._read(key, clients, w)
        raise RunError("workers die again and again while their clients' memories are read; the run can be resumed")

    def _read(self, key: str, clients: Sequence[int], w: int) -> State:
        alive = self._alive()
        by_holder: dict[int, list[int]] = {}
        for client in clients:
            held = [uid for uid in self.holders[client] if uid == SERVER or uid in alive]
            if not held:
                raise RunError(f"what client {client} remembers was lost with the workers that held it")
            by_holder.setdefault(held[0], []).append(client)
        found: list[State] = []
        for uid, theirs in by_holder.items():
            if uid == SERVER:
                found.append(self.own[key].tensors(theirs, w))
                continue
            (piece,) = self.engine.pool.get([alive[uid].handle.give.remote(self.engine.number, theirs, w)])
            found.append(unpack(piece[key], own=True))
        return {name: torch.cat([piece[name] for piece in found]) for name in found[0]}

    def restore(self, key: str, pieces: Iterable[State]) -> None:
        """Put memories from a checkpoint where they belong."""
        for piece in pieces:
            where = self.own[key].checked(piece)
            for _ in range(TRIES):
                with suppress(Lost):
                    self._restore(key, piece, where)
                    break
            else:
                raise RunError("workers die again and again while memories are put back; resume the run later")

    def _restore(self, key: str, piece: State, where: Tensor) -> None:
        members = self.engine.members()
        clients = where[:, 0].numpy()
        at_home = homes(clients, [member.number for member in members]) if len(clients) else clients
        for member in members:
            own = torch.from_numpy(np.flatnonzero(at_home == member.number))
            part = {key: pack({name: values[own] for name, values in piece.items()})}
            to = self._next(member.uid)
            holders = [member.uid, SERVER if to is None else to.uid]
            asked = [m.handle.take.remote(self.engine.number, part) for m in (member, to) if m is not None]
            self.engine.pool.get(asked)
            if to is None:
                self.own[key].take(unpack(part[key], own=True))
            for client, w in where[own].tolist():
                self.holders[client] = list(holders)
                self.first[client] = self.last[client] = w


class Remembered:
    """What the clients of one stage remember, as a checkpoint sees it."""

    def __init__(self, keeping: Keeping, key: str) -> None:
        self.keeping, self.key = keeping, key
        self.changed: set[int] = set()  # clients that wrote since the last checkpoint

    @property
    def row_bytes(self) -> int:
        return self.keeping.own[self.key].row_bytes

    def known(self, w: int) -> set[int]:
        return {client for client, first in self.keeping.first.items() if first < w}

    def saved(self, w: int) -> None:
        self.changed = {client for client in self.changed if self.keeping.last[client] >= w}

    def tensors(self, clients: Sequence[int], w: int) -> State:
        return self.keeping.read(self.key, clients, w)

    def restore(self, pieces: Iterable[State]) -> None:
        self.keeping.restore(self.key, pieces)
        self.changed.clear()
