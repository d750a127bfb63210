"""The clients' side of a Work: who answers, what each client's memory adds to its gradient, what it remembers after.

A simulation keeps all clients in one `Population`; a cluster keeps one per worker, a real federation one per client.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import ConfigError, DataError
from fedloom.keys import answer_rng
from fedloom.memory import Memory, Remembering, Room
from fedloom.method import Part
from fedloom.stages import Client, Info, Setup, State, Updates, Work, as_sent
from fedloom.untrusted import open_plain

Availability = float | Callable[[int, int], bool] | np.ndarray | str | Path | None


@dataclass(frozen=True)
class Absence:
    """Which of the asked clients do not answer.

    `availability` is the share of the time that a client is there, a function of (client, Work number), or a table of
    client x time that repeats (an array, or a file of it: .npy, or .csv with a line per client). `dropout_rate` is the
    share of the clients that are there but fail.
    """

    availability: Availability = None
    dropout_rate: float = 0.0

    @classmethod
    def of(cls, availability: Any, dropout_rate: float, clients: int) -> "Absence":
        if not isinstance(dropout_rate, int | float) or not 0 <= dropout_rate < 1:
            raise ConfigError(f"dropout_rate must be at least 0 and below 1, not {dropout_rate!r}")
        if isinstance(availability, str | Path):
            availability = _read_trace(Path(availability))
        if isinstance(availability, np.ndarray):
            if availability.ndim != 2 or len(availability) != clients or not availability.shape[1]:
                raise DataError(
                    f"the availability table must have one line for each of the {clients} clients and a column for "
                    f"each time, not the shape {availability.shape}"
                )
            if not np.isin(availability, (0, 1)).all():
                raise DataError("the availability table must hold 0 (away) and 1 (there) only")
            availability = availability.astype(bool)
        elif isinstance(availability, int | float):
            if not 0 < availability <= 1:
                raise ConfigError(f"availability must be above 0 and at most 1, not {availability!r}")
        elif availability is not None and not callable(availability):
            kind = type(availability).__name__
            raise ConfigError(f"availability must be a fraction, a function, an array or a file, not a {kind}")
        return cls(availability, float(dropout_rate))

    def answers(self, seed: int, w: int, client: int, occurrence: int) -> bool:
        there, fails = answer_rng(seed, w, client, occurrence).random(2)
        if isinstance(self.availability, np.ndarray):
            here = bool(self.availability[client, w % self.availability.shape[1]])
        elif callable(self.availability):
            here = bool(self.availability(client, w))
        else:
            here = self.availability is None or there < float(self.availability)  # type: ignore[arg-type]
        return here and fails >= self.dropout_rate

    @property
    def nobody_is_away(self) -> bool:
        return self.availability is None and self.dropout_rate == 0


def _read_trace(path: Path) -> np.ndarray:
    try:
        with open_plain(path) as file:
            if path.suffix == ".npy":
                return np.lib.format.read_array(file, allow_pickle=False)
            return np.loadtxt(file, delimiter=",", ndmin=2)
    except (OSError, ValueError, MemoryError) as error:
        raise DataError(f"the availability trace {path} can't be read: {error}") from None


class Population:
    """All clients of a simulation."""

    def __init__(self, parts: Sequence[Part[Client]], setup: Setup, absence: Absence, room: Room | None = None) -> None:
        self.parts = parts
        self.setup = setup
        self.absence = absence
        self.room = room or Room()
        self.kept = {p.key: Memory(p.stage.remembers, setup.start, self.room) for p in parts if p.stage.remembers}
        self.known: tuple[Work, dict[str, State]] | None = None  # what was read for the Work that is out

    @property
    def memory(self) -> Mapping[str, Remembering]:
        """By client stage, for checkpoints."""
        return self.kept

    def prepare(self, work: Work) -> Work:
        """The part of a Work that is answered, with what the client stages add to the gradient."""
        work = self.present(work)
        known = self._read(work)
        pull: Tensor | None = None
        drift: Tensor | None = None
        for part in self.parts:
            correction = part.stage.begin(dict(known[part.key]), dict(work.sent[part.key]), self._info(work))
            pull = _plus(pull, correction.pull)
            drift = _plus(drift, correction.drift)
        prepared = replace(work, pull=pull, drift=drift)
        self.known = (prepared, known)
        return prepared

    def finish(self, work: Work, updates: Updates) -> Updates:
        """Let each client remember, and add what it sends up; a client that diverged keeps what it knew."""
        good = updates.finite.nonzero().flatten()
        everybody = len(good) == len(updates)
        read = self.known[1] if self.known is not None and self.known[0] is work else self._read(work)
        self.known = None
        up: dict[str, State] = {}
        for part in self.parts:
            known = read[part.key]
            memory, up[part.key] = part.stage.end(known, dict(work.sent[part.key]), self._info(work), updates)
            if part.stage.remembers and work.commit:
                if not everybody:
                    memory = {name: values[good.to(values.device)] for name, values in memory.items()}
                self.kept[part.key].write(work.clients[good], work.w, memory)
        return replace(updates, sent={key: as_sent(values, self.setup.space) for key, values in up.items()})

    def present(self, work: Work) -> Work:
        if self.absence.nobody_is_away:
            return work
        asked = zip(work.clients.tolist(), work.occurrence.tolist(), strict=True)
        there = [self.absence.answers(self.setup.seed, work.w, client, i) for client, i in asked]
        return work if all(there) else work.only(torch.tensor(there).nonzero().flatten())

    def _read(self, work: Work) -> dict[str, State]:
        """What each stage's clients remember."""
        return {
            part.key: self.kept[part.key].read(work.clients, work.w) if part.key in self.kept else {}
            for part in self.parts
        }

    def _info(self, work: Work) -> Info:
        return Info(work.w, work.clients, self.setup.sizes[work.clients], work.start, work.rates)

    def settle(self) -> None:
        """A round is over."""
        for memory in self.kept.values():
            memory.settle()


def _plus(a: Tensor | None, b: Any) -> Tensor | None:
    return b if a is None else a if b is None else a + b
