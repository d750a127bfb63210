"""A cohort on its way through its local steps: one matrix, and all that belongs to its rows, changed in place."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.engines.plan import Plan
from fedloom.engines.step import Optimizer, corrected
from fedloom.local import Local
from fedloom.space import Buffers


@dataclass(frozen=True)
class Asked:
    """What the clients of one or several Works are asked, a row each."""

    start: Tensor  # [K, P]
    buffers: Buffers  # [K, ...]
    rates: np.ndarray  # [S, K]
    pull: Tensor | None  # [K, 1]
    drift: Tensor | None  # [K, P]
    keys: Tensor | None  # [K, 2]
    raw: bool  # is the sum of the uncorrected gradients wanted?

    def only(self, places: np.ndarray) -> "Asked":
        """Some of the rows, in that order."""
        if len(places) == len(self.start) and (np.diff(places) == 1).all():
            return self
        there = upload(places, self.start.device)

        def pick(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[there]

        return replace(
            self,
            start=self.start[there],
            buffers={name: values[there] for name, values in self.buffers.items()},
            rates=self.rates[:, places],
            pull=pick(self.pull),
            drift=pick(self.drift),
            keys=pick(self.keys),
        )


@dataclass
class Cohort:
    """Memory for K rows, S steps and batches of B samples. It stays in place from Work to Work, so that a recorded
    step can be played again; a smaller Work fills the first rows.
    """

    x: Tensor  # [K, P]
    start: Tensor  # [K, P]
    buffers: Buffers  # [K, ...]
    total: Tensor  # [K] sum of the losses so far
    step: Tensor  # [] number of the step
    samples: Tensor  # [S, K, B] positions in the federation
    lengths: Tensor  # [S, K] of batches; 0: the client has finished
    rates: Tensor  # [S, K]
    optimizer: Optimizer
    pull: Tensor | None = None  # [K, 1]
    drift: Tensor | None = None  # [K, P]
    raw: Tensor | None = None  # [K, P] sum of the gradients before any correction
    keys: Tensor | None = None  # [K, 2]
    recorded: dict[tuple[int, int], Any] = field(default_factory=dict)  # steps, by rows and width of the batch

    @classmethod
    def of(cls, local: Local, like: Asked, rows: int, steps: int, width: int) -> "Cohort":
        """Empty memory for cohorts like this one."""
        one = like.start

        def empty(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.new_zeros((rows, *values.shape[1:]))

        x = one.new_zeros((rows, one.shape[1]))
        zeros = partial(torch.zeros, dtype=torch.int64, device=one.device)
        return cls(
            x=x,
            start=torch.zeros_like(x),
            buffers={name: values.new_zeros((rows, *values.shape[1:])) for name, values in like.buffers.items()},
            total=one.new_zeros(rows),
            step=zeros(()),
            samples=zeros((steps, rows, width)),
            lengths=zeros((steps, rows)),
            rates=one.new_zeros((steps, rows)),
            optimizer=Optimizer.of(local, x, torch.zeros((), dtype=torch.float64, device=one.device)),
            pull=empty(like.pull),
            drift=empty(like.drift),
            raw=torch.zeros_like(x) if like.raw else None,
            keys=empty(like.keys),
        )

    @property
    def room(self) -> tuple[int, int, int]:
        """Steps, rows and the width of a batch."""
        steps, rows, width = self.samples.shape
        return steps, rows, width

    def holds(self, asked: Asked, plan: Plan, width: int) -> bool:
        """Is there room for this cohort, and a place for all that it has?"""
        steps, rows, widest = self.room
        alike = [(self.pull, asked.pull), (self.drift, asked.drift), (self.keys, asked.keys)]
        return (
            len(plan.samples) <= steps
            and len(plan.order) <= rows
            and width == widest
            and all((mine is None) == (theirs is None) for mine, theirs in alike)
            and (self.raw is not None) == asked.raw
        )

    def fill(self, asked: Asked, samples: Tensor, lengths: Tensor, rates: Tensor) -> None:
        """A cohort, in the order of its plan, before its first step."""
        steps, n, width = samples.shape
        self.x[:n].copy_(asked.start)
        self.start[:n].copy_(asked.start)
        for name, values in asked.buffers.items():
            self.buffers[name][:n].copy_(values)
        for mine, theirs in ((self.pull, asked.pull), (self.drift, asked.drift), (self.keys, asked.keys)):
            if mine is not None and theirs is not None:
                mine[:n].copy_(theirs)
        for tensor in (self.total, self.step, self.raw):
            if tensor is not None:
                tensor.zero_()
        if n < len(self.x):
            self.lengths[:steps, n:] = 0
            self.rates[:steps, n:] = 0
        self.samples[:steps, :n, :width].copy_(samples)
        self.lengths[:steps, :n].copy_(lengths)
        self.rates[:steps, :n].copy_(rates)
        self.optimizer.reset()

    def changed(self) -> list[Tensor]:
        """All that a step changes."""
        steps = self.optimizer.steps if isinstance(self.optimizer.steps, Tensor) else None
        moments = [self.optimizer.first, self.optimizer.second]
        found = [self.x, self.total, self.step, self.raw, steps, *moments, *self.buffers.values()]
        return [tensor for tensor in found if tensor is not None]

    def tensors(self) -> list[Tensor]:
        """All that a step reads or changes; `over` is the way back."""
        given = (self.start, self.samples, self.lengths, self.rates, self.pull, self.drift, self.keys)
        return [*self.changed(), *(tensor for tensor in given if tensor is not None)]

    def over(self, tensors: Sequence[Tensor]) -> "Cohort":
        """The same cohort over other memory."""
        place = {id(mine): other for mine, other in zip(self.tensors(), tensors, strict=True)}

        def moved(owner: Any) -> dict[str, Any]:
            values = {f.name: getattr(owner, f.name) for f in fields(owner)}
            return {name: place[id(value)] for name, value in values.items() if id(value) in place}

        buffers = {name: place[id(values)] for name, values in self.buffers.items()}
        return replace(
            self,
            **moved(self),
            buffers=buffers,
            optimizer=replace(self.optimizer, **moved(self.optimizer)),
            recorded={},
        )

    def update(self, gradient: Tensor, lost: Tensor, rates: Tensor) -> None:
        """One step of the first rows, by their gradients [n, P]; a rate of 0 leaves a row where it is."""
        n = len(gradient)
        self.total[:n] += lost
        if self.raw is not None:
            self.raw[:n] += gradient
        x = self.x[:n]
        used = corrected(
            gradient,
            x,
            self.start[:n],
            None if self.pull is None else self.pull[:n],
            None if self.drift is None else self.drift[:n],
            self.optimizer.local.clip_norm,
        )
        self.optimizer.step(x, used, rates[:, None])
        self.step += 1


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of one dtype on a device, in one transfer."""
    if device.type == "cpu":
        return [torch.from_numpy(values) for values in arrays]
    flat = upload(np.concatenate([values.reshape(-1) for values in arrays]), device)
    pieces = torch.split(flat, [values.size for values in arrays])
    return [piece.reshape(values.shape) for piece, values in zip(pieces, arrays, strict=True)]


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """An array on a device; a GPU gets it without being waited for."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
