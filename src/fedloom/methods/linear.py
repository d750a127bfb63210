"""The learning rate inside each local run: up from 0 over the first steps, then down to 0 in a straight line.

With T steps and w = ceil(warmup * T) of them to warm up:

    factor(j) = j / w                    for j < w
    factor(j) = (T - j) / (T - w)        after that

FedGLAD's text experiments train so (warmup 0.06). A run of T steps warms up for T - 1 of them at most: with one step
the rate would otherwise be 0 for ever.

What it does: every local run starts and ends gently.
When it helps: Adam on text models.
What it costs: nothing; the server must know how many steps each client takes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.stages import Rate, State, check


@register("linear")
@dataclass(frozen=True)
class Linear(Rate):
    """Warm up, then decay to 0 within each local run."""

    warmup: float = 0.06
    by_length = True
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(0 <= self.warmup < 1, f"linear: warmup must be at least 0 and below 1, not {self.warmup}")

    def factors(self, state: State, steps: int) -> Tensor:
        w = min(math.ceil(self.warmup * steps), steps - 1)
        j = torch.arange(steps, dtype=torch.float64)
        return torch.where(j < w, j / max(w, 1), (steps - j) / (steps - w))
