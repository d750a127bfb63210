"""The one local step, on a flat vector [P] or a cohort's matrix [K, P]. Every engine calls it.

raw gradient -> + pull * (x - start) + drift -> clip -> + weight decay -> momentum or Adam -> rate
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.local import Local

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


@dataclass
class Optimizer:
    """A local optimiser's state, changed in place; its rows may be more than those that still step."""

    local: Local
    first: Tensor | None  # momentum, or Adam's first moment
    second: Tensor | None
    steps: int | Tensor = 0  # a tensor where steps are recorded and played again

    @classmethod
    def of(cls, local: Local, like: Tensor, steps: int | Tensor = 0) -> "Optimizer":
        adam = local.optimizer != "sgd"
        first = torch.zeros_like(like) if adam or local.momentum else None
        return cls(local, first, torch.zeros_like(like) if adam else None, steps)

    def step(self, x: Tensor, gradient: Tensor, rate: float | Tensor) -> None:
        """Move x, in place, by a corrected, clipped gradient. `rate` is a number, or [n, 1] for the first n rows."""
        local = self.local
        self.steps += 1
        if local.optimizer == "adamw":
            x.mul_(1 - rate * local.weight_decay)
        elif local.weight_decay:
            gradient = gradient + local.weight_decay * x
        if self.first is not None:
            first = self.first if x.dim() < 2 else self.first[: len(x)]
            gradient = self._adam(gradient, first) if self.second is not None else self._momentum(gradient, first)
        if isinstance(rate, Tensor):
            x.addcmul_(gradient, rate, value=-1)
        else:
            x.sub_(gradient, alpha=rate)

    def reset(self) -> None:
        """As before the first step."""
        for tensor in (self.first, self.second, self.steps):
            if isinstance(tensor, Tensor):
                tensor.zero_()

    def _momentum(self, gradient: Tensor, first: Tensor) -> Tensor:
        first.mul_(self.local.momentum).add_(gradient)
        return gradient + self.local.momentum * first if self.local.nesterov else first

    def _adam(self, gradient: Tensor, first: Tensor) -> Tensor:
        b1, b2 = ADAM_BETAS
        assert self.second is not None  # nosec B101  # for the type checker
        second = self.second if gradient.dim() < 2 else self.second[: len(gradient)]
        first.mul_(b1).add_(gradient * (1 - b1))
        second.mul_(b2).add_(gradient.square() * (1 - b2))
        scale = (second / (1 - b2**self.steps)).sqrt() + ADAM_EPS
        return first / (1 - b1**self.steps) / scale


def corrected(
    gradient: Tensor, x: Tensor, start: Tensor, pull: float | Tensor | None, drift: Tensor | None, clip: float | None
) -> Tensor:
    """The gradient that the local optimiser sees. `pull` is a number, or [K, 1] for a matrix."""
    if pull is not None:
        gradient = gradient + pull * (x - start)
    if drift is not None:
        gradient = gradient + drift
    if clip is not None:
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        gradient = gradient * (clip / norm.clamp(min=clip))
    return gradient


def step_norm(local: Local, rates: Sequence[float], pull: float | None) -> float:
    """How far a local run goes under a gradient of 1, through the same rates, momentum and pull (FedNova's a_k)."""
    x = torch.zeros((), dtype=torch.float64)
    optimizer = Optimizer.of(replace(local, weight_decay=0.0), x)
    for rate in rates:
        optimizer.step(x, 1 + (pull or 0.0) * x, rate)
    return -float(x)
