"""A worker of the cluster: it trains its share of a Work, keeps the rows until the server has made its sums of them,
and remembers what its clients know.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.engines.ray.there import Asked, Call, Kept, answer_of, exact_sum, largest_of
from fedloom.engines.ray.wire import Packed, pack, unpack
from fedloom.engines.site import Learning, Site
from fedloom.federation import Federation
from fedloom.rows import Rows
from fedloom.stages import Setup, Updates, Work


@dataclass(frozen=True)
class Brief:
    """All that a worker must know of a run."""

    learning: Learning
    device: str  # "auto" or "cpu"
    setup: Setup  # on the CPU; its cohort is one worker's share
    carries: frozenset[str]  # what engines report that goes to the server; the rest ends with the clients' stages


class Worker:
    """One process of the cluster."""

    def __init__(self, cores: int) -> None:
        torch.set_num_threads(cores)
        self.cores = cores
        self.runs: dict[int, _Run] = {}
        self.whole: dict[int, Any] = {}  # runs that are played here from beginning to end
        self.refused: dict[int, Exception] = {}
        self.said = _Said()
        logging.getLogger("fedloom").addHandler(self.said)

    def ready(self) -> tuple[str, int]:
        """The node that it is on, and its process there."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def begin(self, number: int, brief: Brief, data: dict[str, Any]) -> dict[str, Any]:
        """Get ready for a run; which engine trains it here?"""
        torch.set_num_threads(self.cores)
        run = self.runs[number] = _Run(brief, data)
        return {"engine": run.site.engine.name, "why": run.site.why}

    def end(self, number: int) -> None:
        self.runs.pop(number, None)

    def train(
        self, number: int, common: dict[str, Any], share: dict[str, Any], whole: bool, copies: list[list[int]]
    ) -> Any:
        """Train some clients: what the server must know of each, their rows if `whole`, and what they remember, in
        pieces for those who keep the copies.
        """
        began = time.perf_counter()
        run = self.runs[number]
        reply = run.train(common, unpack(share))
        rows = run.give_up(common["serial"]) if whole else None
        reply |= {"seconds": time.perf_counter() - began, "said": self.said.taken()}
        good = reply.pop("remembered")
        return reply, rows, *(run.written(common["w"], [c for c in clients if c in good]) for clients in copies)

    def total(self, number: int, asked: Asked, weights: Packed, grid: float, alone: bool) -> Packed:
        """The weighted sum of some rows, each term rounded to a grid so coarse that sums of terms are exact: whoever
        adds them up, in whatever order, gets the same bits. A sum that is `alone` needs no more than the model's bits.
        """
        run = self.runs[number]
        total = exact_sum(run.matrices(asked), unpack(weights).to(run.device), grid)
        packed: Packed = pack(total.to(run.setup.space.dtype) if alone else total)
        return packed

    def add(self, *parts: Packed) -> Packed:
        """Sums of sums."""
        total = unpack(parts[0], own=True)
        for part in parts[1:]:
            total += unpack(part)
        packed: Packed = pack(total)
        return packed

    def each(self, number: int, asked: Asked, call: Call) -> list[Packed]:
        """What an operation says of each of some rows; row by row, so that no answer depends on which others are
        here.
        """
        run = self.runs[number]
        own = call.on(run.device)
        return [pack(answer_of(own(row, i))) for i, row in enumerate(run.rows(asked))]

    def fetch(self, number: int, asked: Asked) -> Packed:
        """Some rows themselves."""
        packed: Packed = pack(torch.cat([row.matrix for row in self.runs[number].rows(asked)]))
        return packed

    def take(self, number: int, pieces: dict[str, Any]) -> bool:
        """Remember what clients of other workers know."""
        for key, piece in unpack(pieces, own=True).items():
            self.runs[number].population.kept[key].take(piece)
        return True

    def give(self, number: int, clients: Sequence[int], before: int | None = None) -> dict[str, Any]:
        """What clients know, in all versions that are kept, or in the newest one before a Work."""
        memory = self.runs[number].population.kept
        return {
            key: pack(one.versions(clients) if before is None else one.tensors(clients, before))
            for key, one in memory.items()
        }

    def forget(self, number: int, clients: Sequence[int]) -> bool:
        """What clients that have moved away know."""
        for memory in self.runs[number].population.kept.values():
            memory.forget(clients)
        return True

    def open(self, place: int, known: dict[str, Any], data: dict[str, Any]) -> None:
        """A whole run begins here, or goes on."""
        from fedloom.engines.ray.whole import Playing

        torch.set_num_threads(self.cores)
        try:
            self.whole[place] = Playing(known["arguments"], data, known["saved"])
        except Exception as error:  # told when the run is to be played
            self.refused[place] = error

    def play(self, place: int, seconds: float, state: bool) -> dict[str, Any]:
        if place in self.refused:
            raise self.refused.pop(place)
        return {**self.whole[place].play(seconds, state), "said": self.said.taken()}

    def state(self, place: int) -> dict[str, Any]:
        state: dict[str, Any] = self.whole[place].state()
        return state

    def close(self, place: int) -> None:
        if place in self.whole:
            self.whole.pop(place).close()

    def settle(self, number: int) -> None:
        """A round is over."""
        self.runs[number].population.settle()


class _Run:
    """A run, as one worker sees it."""

    def __init__(self, brief: Brief, data: dict[str, Any]) -> None:
        self.brief = brief
        cuda = brief.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        self.site = Site(brief.learning, self.device, brief.setup, federation_of(data))
        self.setup, self.population = self.site.setup, self.site.population
        self.kept: dict[bool, Kept] = {}  # of the last Work, and of the last probe

    def train(self, common: dict[str, Any], share: dict[str, Any]) -> dict[str, Any]:
        work = self._work(common, share)
        for memory in self.population.kept.values():
            memory.check_known(share["known"], work.w)
        updates = self.site.train(work)
        rows = {"": updates.rows.matrix} | {
            f"{stage}/{name}": values.matrix
            for stage, sent in updates.sent.items()
            for name, values in sent.items()
            if isinstance(values, Rows)
        }
        kept = self.kept.get(work.commit)
        if kept is None or kept.serial != common["serial"]:
            kept = self.kept[work.commit] = Kept(common["serial"])
        kept.add(share["at"].tolist(), rows)
        return self._reply(updates, work.commit)

    def _work(self, common: dict[str, Any], share: dict[str, Any]) -> Work:
        """The Work of this share. A model for all, and what the server sends, come once for all workers of a node."""
        own = share["start"] is not None
        start, buffers = (share["start"], share["buffers"]) if own else unpack([common["start"], common["buffers"]])
        rates = share["rates"]
        return Work(
            w=common["w"],
            clients=share["clients"],
            occurrence=share["occurrence"],
            counts=share["counts"],
            start=start.to(self.device),
            buffers={name: values.to(self.device) for name, values in buffers.items()},
            rates=unpack(common["rates"]) if rates is None else rates,
            max_steps=common["max_steps"],
            sent=self._sent(unpack(common["sent"])),
            wants=common["wants"],
            share=common["share"],
            commit=common["commit"],
        )

    def _sent(self, sent: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Vectors where the model is; numbers stay on the host."""
        return {
            key: {n: v.to(self.device) if v.dim() else v for n, v in values.items()} for key, values in sent.items()
        }

    def _reply(self, updates: Updates, commit: bool) -> dict[str, Any]:
        """What the server must know of each client, beside its rows."""
        up = {
            stage: {n: largest_of(v.matrix) if isinstance(v, Rows) else pack(v) for n, v in values.items()}
            for stage, values in updates.sent.items()
        }
        carried = {n: v for n, v in updates.extra.items() if n in self.brief.carries}
        good = set(updates.clients[updates.finite].tolist()) if self.population.kept and commit else set()
        return {
            "steps": pack(updates.steps),
            "loss": pack(updates.loss),
            "finite": pack(updates.finite),
            "largest": largest_of(updates.rows.matrix),
            "buffers": pack(updates.buffers),
            "sent": up,
            "extra": pack(carried),
            "remembered": good,
        }

    def written(self, w: int, clients: Sequence[int]) -> dict[str, Any] | None:
        """What these clients remember of a Work, for whoever keeps a copy."""
        if not clients:
            return None
        return {key: pack(memory.tensors(clients, w + 1)) for key, memory in self.population.kept.items()}

    def rows(self, asked: Asked) -> Iterator[Rows]:
        """Rows one by one, with what the server has asked to be done to them."""
        kept = next(one for one in self.kept.values() if one.serial == asked.serial)
        changes = [change.on(self.device) for change in asked.changes]
        for i, position in enumerate(asked.at):
            row = Rows(kept.row(asked.name, position), self.setup.space)
            for change in changes:
                row = change(row, i)
            yield row

    def matrices(self, asked: Asked) -> Iterator[Tensor]:
        """The same rows, all at once where nothing is to be done to them."""
        if asked.changes:
            yield from (row.matrix for row in self.rows(asked))
            return
        kept = next(one for one in self.kept.values() if one.serial == asked.serial)
        places = [kept.places[position] for position in asked.at]
        rows = kept.rows[asked.name]
        yield rows if places == list(range(len(rows))) else rows[torch.tensor(places, device=rows.device)]

    def give_up(self, serial: int) -> dict[str, Any]:
        """All rows of a share, which are then kept no longer."""
        (commit,) = [commit for commit, kept in self.kept.items() if kept.serial == serial]
        return {name: pack(rows) for name, rows in self.kept.pop(commit).rows.items()}


class _Said(logging.Handler):
    """What was logged, to be said again at the driver."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))

    def taken(self) -> list[tuple[int, str]]:
        lines, self.lines = self.lines, []
        return lines


def data_of(federation: Federation) -> dict[str, Any]:
    """A federation's training data, as they travel; what is held out stays with the server, and what is on disk is
    read by whoever trains it.
    """
    tensors = {name: getattr(federation, name) for name in ("x", "y", "index", "offsets")}
    plain = ("classes", "preparation", "shards")
    return {**pack(tensors), **{name: getattr(federation, name) for name in plain}}


def federation_of(data: dict[str, Any]) -> Federation:
    tensors = {name: unpack(data[name]) for name in ("x", "y", "index", "offsets")}
    return Federation(**tensors, **{name: data[name] for name in ("classes", "preparation", "shards")})
