"""Mixing: the server moves only part of the way, theta <- alpha mean + (1 - alpha) theta (RADFed-m).

What it does: the cloud model keeps a share of what it was.
When it helps: averages that are noisy from round to round. alpha = 1 is plain averaging.
What it costs: nothing.
"""

from dataclasses import dataclass

from torch import Tensor

from fedloom.method import register
from fedloom.stages import Round, Server, State, check


@register("mixing", paper="Xue et al. (RADFed), 2021")
@dataclass(frozen=True)
class Mixing(Server):
    """Mix the average into the cloud model."""

    alpha: float = 0.9
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(0 < self.alpha <= 1, f"mixing: alpha must be above 0 and at most 1, not {self.alpha}")

    def step(self, state: State, record: Round) -> tuple[State, Tensor]:
        return state, record.theta - self.alpha * record.scaled
