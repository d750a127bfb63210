"""The Works of one or several runs as one cohort: what its clients are asked, row under row, and what came out."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.engines.answer import answer, step_norms
from fedloom.engines.cohort import Asked
from fedloom.engines.plan import keys_of
from fedloom.space import Buffers
from fedloom.stages import Setup, State, Updates, Work

if TYPE_CHECKING:
    from fedloom.engines.vector import Vector

Parts = Sequence[tuple["Vector", Work]]  # runs and their Works
Clients = Sequence[tuple["Vector", Work, int]]  # the run that each client trains for, its Work and its place there


def positions_of(clients: Clients) -> Iterator[np.ndarray]:
    """Where each client's samples are; neighbours of one run are asked for together."""
    for _, rows in groupby(clients, key=lambda row: id(row[0])):
        group = list(rows)
        yield from group[0][0].federation.positions([int(work.clients[k]) for _, work, k in group])


class Done(NamedTuple):
    """What came out, a row for each client."""

    rows: Tensor  # [K, P]
    buffers: Buffers  # [K, ...]
    losses: Tensor  # [K]
    raw: Tensor | None  # [K, P]
    score: Tensor | None  # [K]

    @classmethod
    def like(cls, asked: Asked, scored: bool) -> "Done":
        start = asked.start
        return cls(
            torch.empty_like(start, memory_format=torch.contiguous_format),
            {n: torch.empty_like(b, memory_format=torch.contiguous_format) for n, b in asked.buffers.items()},
            start.new_zeros(len(start)),
            torch.zeros_like(start, memory_format=torch.contiguous_format) if asked.raw else None,
            start.new_zeros(len(start), dtype=torch.float64) if scored else None,
        )

    def answer(self, setup: Setup, work: Work, steps: Sequence[int], at: slice) -> Updates:
        extra: State = {}
        if self.raw is not None and "mean_gradient" in work.wants:
            extra["mean_gradient"] = self.raw[at]
        if self.score is not None and "final_score" in work.wants:
            extra["final_score"] = self.score[at]
        if "step_norm" in work.wants:
            extra["step_norm"] = step_norms(setup.local, work, steps[at])
        buffers = {name: values[at] for name, values in self.buffers.items()}
        return answer(work, setup, self.rows[at], buffers, self.losses[at], steps[at], extra)


def slices_of(parts: Parts) -> list[slice]:
    """Where the rows of each Work stand."""
    ends = np.cumsum([len(work) for _, work in parts]).tolist()
    return [slice(end - len(work), end) for end, (_, work) in zip(ends, parts, strict=True)]


def asked_of(parts: Parts) -> Asked:
    """Works, row under row. A correction that only some of them have is zero for the others."""
    works = [work for _, work in parts]
    like = works[0].start
    device, size = like.device, like.shape[-1]

    def stacked(values: Sequence[Tensor]) -> Tensor:
        return values[0] if len(values) == 1 else torch.cat(list(values))

    def rows(work: Work, one: Tensor) -> Tensor:
        return one if work.start.dim() == 2 else one.expand(len(work), *one.shape)

    rates = np.zeros((max(work.rates.shape[-1] for work in works), sum(len(work) for work in works)))
    for work, at in zip(works, slices_of(parts), strict=True):
        own = work.rates.numpy()
        rates[: own.shape[-1], at] = own.T if own.ndim == 2 else own[:, None]
    pull = drift = None
    if any(work.pull is not None for work in works):
        none = [like.new_zeros(len(work)) if work.pull is None else work.pull for work in works]
        pull = stacked([values.to(like, non_blocking=not values.is_cuda) for values in none])[:, None]
    if any(work.drift is not None for work in works):
        drift = stacked([like.new_zeros(len(work), size) if work.drift is None else work.drift for work in works])
    found = [keys_of(one.setup, one.federation, one.task.model, work) for one, work in parts]
    words = [own for own in found if own is not None]
    return Asked(
        start=stacked([rows(work, work.start) for work in works]),
        buffers={name: stacked([rows(work, work.buffers[name]) for work in works]) for name in works[0].buffers},
        rates=rates,
        pull=pull,
        drift=drift,
        keys=stacked(words).to(device) if words else None,
        raw=any("mean_gradient" in work.wants for work in works),
    )
