"""AD, all-decreasing: what 2D-LRD (Mo et al., IJCNN 2021) is compared with.

Every local step has the rate eta_0 factor^d, with d from Pflug's diagnostic (see pflug.py).

What it does: all local steps get shorter, early and late ones alike.
When it helps: as a baseline for 2dlrd.
What it costs: one number down.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.methods.pflug import Pflug
from fedloom.stages import State, check


@register("decay-all", paper="Mo et al., IJCNN 2021 (AD)")
@dataclass(frozen=True)
class DecayAll(Pflug):
    """Decay the rate of all local steps when training is stationary."""

    factor: float = 0.8
    window: int = 50

    def __post_init__(self) -> None:
        check(0 < self.factor <= 1, f"decay-all: factor must be above 0 and at most 1, not {self.factor}")
        self.check_window("decay-all")

    def factors(self, state: State, steps: int) -> Tensor:
        return torch.full((steps,), self.factor ** float(state["d"]), dtype=torch.float64)
