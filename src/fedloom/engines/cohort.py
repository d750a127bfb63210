"""A cohort on its way through its local steps: one matrix, and all that belongs to its rows, changed in place."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedloom.engines.plan import Plan
from fedloom.engines.step import Optimizer, corrected
from fedloom.space import Buffers


@dataclass
class Cohort:
    """K rows. Everything keeps its place in memory from Work to Work, so that a recorded step can be played again."""

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
    recorded: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = field(default_factory=dict)  # by rows and batch

    def tensors(self) -> list[Tensor | None]:
        """All that a step changes."""
        steps = self.optimizer.steps if isinstance(self.optimizer.steps, Tensor) else None
        moments = [self.optimizer.first, self.optimizer.second]
        return [self.x, self.total, self.step, self.raw, steps, *moments, *self.buffers.values()]

    @property
    def shape(self) -> tuple[object, ...]:
        """Cohorts of one shape may use each other's memory."""
        optional = (self.pull, self.drift, self.raw, self.keys)
        return (*self.x.shape, self.samples.shape[2], *(tensor is None for tensor in optional))

    def take_over(self, other: "Cohort") -> bool:
        """Another cohort's content into this one's memory; False where it does not fit."""
        steps = len(other.samples)
        if self.shape != other.shape or steps > len(self.samples):
            return False
        for name in ("x", "start", "total", "step", "pull", "drift", "raw", "keys"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None:
                mine.copy_(theirs)
        for name, values in other.buffers.items():
            self.buffers[name].copy_(values)
        for name in ("samples", "lengths", "rates"):
            getattr(self, name)[:steps].copy_(getattr(other, name))
        self.optimizer.reset()
        return True

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
        x.copy_(self.optimizer.step(x, used, rates[:, None]))
        self.step += 1


def lay_out(plan: Plan, rates: Tensor, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Samples [S, K, B], lengths [S, K], rates [S, K] on a device; `rates` are [S], or [K, S] in the plan's order."""
    steps = len(plan.samples)
    lengths = torch.from_numpy(plan.lengths).to(device)
    own = rates.T if rates.dim() == 2 else rates[:, None]
    table = own[:steps].to(device, dtype).expand(steps, len(plan.steps)) * (lengths > 0)
    return torch.from_numpy(plan.samples).to(device), lengths, table


def widths(plan: Plan, s: int, n: int) -> set[int]:
    return set(np.unique(plan.lengths[s, :n]).tolist())
