"""A Work, split over the workers of a cluster.

Each worker trains its share with an engine of its own and keeps the rows; the server's mathematics is done where they
are, and sums come back. What clients remember stays with the worker at which they are at home, and a copy with the next
one. Whoever dies is replaced: its share is trained again, from what its clients knew before.
"""

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pickle import PicklingError  # nosec B403  # nothing is read by it here
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data.shards import Shards
from fedloom.engines.ray.answers import Out, updates_of
from fedloom.engines.ray.keeping import Keeping
from fedloom.engines.ray.placement import homes, rounded, share_out
from fedloom.engines.ray.pool import Lost, Member, Pool
from fedloom.engines.ray.spread import joined
from fedloom.engines.ray.there import Asked, Call
from fedloom.engines.ray.wire import pack, size_of, unpack, whole_classes
from fedloom.engines.ray.worker import Brief
from fedloom.errors import ConfigError, RunError
from fedloom.stages import Setup, Updates, Work

LOG = logging.getLogger("fedloom")
WHOLE = 1 << 20  # bytes of all rows below which they come at once: asking twice would take longer
FAN = 8  # sums that one process adds up
TRIES = 5  # deaths in one Work after which it is not tried again
STEADY = 0.7  # of a worker's speed that is kept when it is measured anew


@dataclass(frozen=True)
class _Share:
    """What a worker was asked, and what it will answer."""

    member: Member
    copies: dict[int, list[int]]  # by worker: clients of whom it keeps a copy
    refs: Sequence[Any]  # the answer, rows, and a piece of memory for each of those workers


class Ray:
    """Trains the clients of a Work on a cluster."""

    name = "ray"
    compile = False  # each worker decides for itself

    def __init__(self, pool: Pool, brief: Brief, data: dict[str, Any], setup: Setup, reads_rows: bool) -> None:
        self.pool, self.brief, self.setup, self.reads_rows = pool, brief, setup, reads_rows
        pool.run += 1
        self.number = pool.run
        self.data = data
        self.shards: Shards | None = data["shards"]
        self.serials = itertools.count()
        self.out: dict[bool, Out] = {}  # the last Work, and the last probe
        self.moved = 0  # bytes between processes
        self.last_put: tuple[Tensor | None, Any] = (None, None)
        self.keeping = Keeping(self, [part for part in brief.learning.clients if part.stage.remembers])
        weakref.finalize(self, _end, pool, self.number)

    def train(self, work: Work) -> Updates:
        """Every client of the Work, each where there is time for it, or where its memory is."""
        self.keeping.secure()
        self.pool.look()
        self.keeping.heal()
        size = len(work) * self.setup.space.size * self.setup.space.dtype.itemsize
        out = Out(next(self.serials), work, None, self.reads_rows or size <= WHOLE)
        out.common = self._common(work, out.serial)
        self.out[work.commit] = out
        self._train(out, range(len(work)))
        return updates_of(self, out)

    def members(self) -> list[Member]:
        """All workers, ready for this run."""
        last: Lost | None = None
        for _ in range(TRIES):
            members = self.pool.alive()
            new = [member for member in members if self.number not in member.runs]
            if not new:
                return members
            first = not any(self.number in member.runs for member in members)
            try:
                told = self.pool.get([member.handle.begin.remote(self.number, *self._known) for member in new])
            except Lost as death:
                last = death
                continue
            for member in new:
                member.runs.add(self.number)
            if first:
                LOG.info("%s, each with engine %s (%s)", self.pool, told[0]["engine"], told[0]["why"])
        raise RunError(
            f"workers die as soon as they are given the run (the last: {last}); perhaps its data do not fit into their "
            "memory. The run can be resumed"
        )

    @cached_property
    def _known(self) -> tuple[Any, Any]:
        """What a worker must know of this run, and its data, put where all of them find it."""
        brief, ray = self.brief, self.pool.ray
        with whole_classes(
            ray,
            [*brief.learning.model.modules(), brief.learning.loss, *(part.stage for part in brief.learning.clients)],
        ):
            return _sent(ray, brief), ray.put(self.data)

    def _train(self, out: Out, positions: Sequence[int]) -> None:
        waiting = list(positions)
        while waiting:
            members = self.members()
            shares = self._shares(out.work, waiting, members)
            try:
                self.keeping.bring(out.work, shares)
                refs = {number: self._send(out, number, at) for number, at in shares.items()}
            except Lost as death:
                self._count(out, death)
                continue
            waiting = []
            for number, at in shares.items():
                waiting += self._take(out, at, refs[number])

    def _send(self, out: Out, number: int, at: Sequence[int]) -> "_Share":
        part = out.work.only(torch.tensor(at, dtype=torch.int64))
        own = part.start.dim() == 2
        share = pack(
            {
                "at": torch.tensor(at, dtype=torch.int64),
                "clients": part.clients,
                "occurrence": part.occurrence,
                "counts": part.counts,
                "start": part.start if own else None,
                "buffers": part.buffers if own else None,
                "rates": part.rates if part.rates.dim() == 2 else None,
                "known": self.keeping.known(part.w, part.clients.tolist()),
            }
        )
        self.moved += size_of(share) + self._shared
        member = self.pool.members[number]
        copies = self.keeping.partners(member, part.clients.tolist()) if part.commit else {}
        train = member.handle.train.options(num_returns=2 + len(copies))
        refs = train.remote(self.number, out.common, share, out.whole, list(copies.values()))
        return _Share(member, copies, refs)

    def _take(self, out: Out, at: Sequence[int], share: "_Share") -> list[int]:
        """One worker's answer; the positions that are to be trained again, if it has died."""
        try:
            reply, rows = self.pool.get(share.refs[:2])
        except Lost as death:
            self._count(out, death)
            return list(at)
        for level, line in reply["said"]:
            LOG.log(level, "%s", line)
        self.moved += size_of(reply) + size_of(rows)
        self._measure(share.member, out.work, at, reply["seconds"])
        for i, position in enumerate(at):
            out.where[position] = share.member.uid
            out.replies[position] = {"of": reply, "rows": rows, "place": i}
        clients = out.work.clients[torch.tensor(at, dtype=torch.int64)]
        good = set(clients[unpack(reply["finite"])].tolist())
        for (partner, theirs), piece in zip(share.copies.items(), share.refs[2:], strict=True):
            self.keeping.copy(out.work.w, share.member, partner, [c for c in theirs if c in good], piece)
        return []

    def _count(self, out: Out, death: Lost) -> None:
        out.deaths += 1
        if out.deaths > TRIES:
            raise RunError(
                f"workers died {out.deaths} times while they trained one cohort (the last: {death}); perhaps a share "
                "does not fit into their memory. The run can be resumed"
            )

    def recover(self, out: Out) -> None:
        """Train again what was with workers that are no more."""
        alive = {member.uid for member in self.pool.members.values()}
        lost = [position for position, uid in out.where.items() if uid not in alive]
        if lost:
            self.train_again(out, lost)

    def train_again(self, out: Out, positions: Sequence[int]) -> None:
        """What clients knew before this Work is still there: nothing older is forgotten before the copies are safe."""
        self._train(out, positions)

    def _shares(self, work: Work, positions: Sequence[int], members: Sequence[Member]) -> dict[int, list[int]]:
        """Who trains which positions."""
        costs = [float(steps) for steps in self._steps(work, positions)]
        shares = share_out(costs, self._speeds(members), self._near(work.clients.numpy()[list(positions)], members))
        return {
            member.number: [positions[k] for k in share] for member, share in zip(members, shares, strict=True) if share
        }

    def _near(self, clients: np.ndarray, members: Sequence[Member]) -> list[list[int]] | None:
        """Which workers remember each client, or have its file at hand."""
        if not self.keeping.memory and self.shards is None:
            return None
        place = {member.uid: i for i, member in enumerate(members)}
        near = [[place[uid] for uid in self.keeping.holders.get(c, []) if uid in place] for c in clients.tolist()]
        if self.shards is not None:
            numbers = [member.number for member in members]
            files = homes(self.shards.file_of(clients), numbers).tolist()
            near = [known or [numbers.index(number)] for known, number in zip(near, files, strict=True)]
        return near

    def _steps(self, work: Work, positions: Sequence[int]) -> list[int]:
        sizes = self.setup.sizes[work.clients[torch.tensor(list(positions), dtype=torch.int64)]].tolist()
        return [max(1, min(self.setup.local.count_steps(n), work.max_steps or 1 << 62)) for n in sizes]

    def _speeds(self, members: Sequence[Member]) -> list[float]:
        known = [member.speed for member in members]
        if any(speed is None for speed in known):
            return [1.0] * len(members)
        return rounded([speed or 1.0 for speed in known])

    def _measure(self, member: Member, work: Work, at: Sequence[int], seconds: float) -> None:
        now = sum(self._steps(work, at)) / max(seconds, 1e-9)
        member.speed = now if member.speed is None else STEADY * member.speed + (1 - STEADY) * now

    def _common(self, work: Work, serial: int) -> Any:
        own = work.start.dim() == 2
        common = {
            "serial": serial,
            "w": work.w,
            "start": None if own else pack(work.start),
            "buffers": None if own else pack(work.buffers),
            "rates": pack(work.rates) if work.rates.dim() == 1 else None,
            "max_steps": work.max_steps,
            "sent": pack({key: dict(values) for key, values in work.sent.items()}),
            "wants": work.wants,
            "share": work.share,
            "commit": work.commit,
        }
        self._shared = size_of(common)
        return self.pool.ray.put(common)

    def put(self, vector: Tensor) -> Any:
        """A vector that every worker will read, perhaps for more than one operation."""
        if self.last_put[0] is vector:
            return self.last_put[1]
        self.moved += vector.numel() * vector.element_size() * len(self.pool.members)
        self.last_put = (vector, self.pool.ray.put(pack(vector)))
        return self.last_put[1]

    def total(self, asked: Asked, weights: Tensor, grid: float) -> Tensor:
        def call(member: Member, part: Asked, places: Tensor) -> Any:
            alone = len(places) == len(asked.at)
            return member.handle.total.remote(self.number, part, pack(weights[places]), grid, alone)

        if not len(asked.at):
            return torch.zeros(self.setup.space.size, dtype=torch.float64)
        found = self._ask(asked, call, self._tree)
        self.moved += sum(size_of(part) for _, part in found)
        total: Tensor = unpack(found[0][1], own=True)
        for _, part in found[1:]:
            total += unpack(part)
        return total

    def each(self, asked: Asked, op: Call) -> Tensor:
        def call(member: Member, part: Asked, places: Tensor) -> Any:
            return member.handle.each.remote(self.number, part, op.only(places.tolist()))

        found = self._ask(asked, call)
        self.moved += sum(size_of(values) for _, values in found)
        answers = [(at, pack(torch.stack(unpack(values)))) for at, values in found]
        return joined(answers, asked.at)

    def fetch(self, asked: Asked) -> Tensor:
        """The rows themselves, brought together."""
        found = self._ask(asked, lambda member, part, places: member.handle.fetch.remote(self.number, part))
        self.moved += sum(size_of(values) for _, values in found)
        return joined(found, asked.at)

    def _ask(
        self,
        asked: Asked,
        call: Callable[[Member, Asked, Tensor], Any],
        reduce: Callable[[list[Any]], list[Any]] = lambda refs: refs,
    ) -> list[tuple[tuple[int, ...], Any]]:
        """Every worker that has some of the rows; from the start where one of them dies."""
        out = next((one for one in self.out.values() if one.serial == asked.serial), None)
        if out is None:
            raise RunError("these updates are no longer at the workers: read them before the next Work is trained")
        while True:
            self.recover(out)
            by_member: dict[int, list[int]] = {}
            for i, position in enumerate(asked.at):
                by_member.setdefault(out.where[position], []).append(i)
            refs, parts = [], []
            members = {member.uid: member for member in self.pool.members.values()}
            for uid, places in by_member.items():
                at = tuple(asked.at[i] for i in places)
                there = torch.tensor(places, dtype=torch.int64)
                part = replace(asked, at=at, changes=tuple(change.only(places) for change in asked.changes))
                refs.append(call(members[uid], part, there))
                parts.append(at)
            try:
                answers = self.pool.get(reduce(refs))
            except Lost as death:
                self._count(out, death)
                continue
            return list(zip(parts, answers, strict=False))

    def _tree(self, sums: list[Any]) -> list[Any]:
        """Many sums: added up by the workers, a few at a time."""
        handles = itertools.cycle(member.handle for member in self.pool.members.values())
        while len(sums) > FAN:
            self.moved += self.setup.space.size * 8 * len(sums)
            sums = [next(handles).add.remote(*sums[i : i + FAN]) for i in range(0, len(sums), FAN)]
        return sums


def _sent(ray: Any, brief: Brief) -> Any:
    """A brief, as an object of the cluster's; whatever of it can't travel is named."""
    try:
        return ray.put(brief)
    except (TypeError, PicklingError):  # Ray tells on many lines
        stages = {part.key: part.stage for part in brief.learning.clients}
        for name, value in {"the model": brief.learning.model, "the loss": brief.learning.loss, **stages}.items():
            try:
                ray.cloudpickle.dumps(value)
            except Exception as error:  # whatever its own code raises
                raise ConfigError(
                    f"{name} can't be sent to workers: {error}; leave out locks, open files and the like"
                ) from None
        raise


def _end(pool: Pool, number: int) -> None:
    """Let the workers forget a run that nobody has any more."""
    for member in pool.members.values():
        if number in member.runs and pool.ray.is_initialized():
            member.runs.discard(number)
            member.handle.end.remote(number)
