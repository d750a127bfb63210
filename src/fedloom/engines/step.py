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
    """A local optimiser's state; it is made anew for every Work."""

    local: Local
    steps: int = 0
    first: Tensor | None = None  # momentum, or Adam's first moment
    second: Tensor | None = None

    def step(self, x: Tensor, gradient: Tensor, rate: float | Tensor) -> Tensor:
        """The next x from a corrected, clipped gradient. `rate` is a number, or [K, 1] for a matrix."""
        local = self.local
        self.steps += 1
        if local.optimizer == "adamw":
            x = x - rate * local.weight_decay * x
        elif local.weight_decay:
            gradient = gradient + local.weight_decay * x
        if local.optimizer == "sgd":
            return x - rate * self._momentum(gradient)
        return x - rate * self._adam(gradient)

    def _momentum(self, gradient: Tensor) -> Tensor:
        local = self.local
        if not local.momentum:
            return gradient
        self.first = gradient if self.first is None else local.momentum * self.first + gradient
        return gradient + local.momentum * self.first if local.nesterov else self.first

    def _adam(self, gradient: Tensor) -> Tensor:
        b1, b2 = ADAM_BETAS
        if self.first is None or self.second is None:
            self.first, self.second = torch.zeros_like(gradient), torch.zeros_like(gradient)
        self.first = b1 * self.first + (1 - b1) * gradient
        self.second = b2 * self.second + (1 - b2) * gradient.square()
        scale = (self.second / (1 - b2**self.steps)).sqrt() + ADAM_EPS
        return self.first / (1 - b1**self.steps) / scale


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
    optimizer = Optimizer(replace(local, weight_decay=0.0))
    for rate in rates:
        x = optimizer.step(x, 1 + (pull or 0.0) * x, rate)
    return -float(x)
