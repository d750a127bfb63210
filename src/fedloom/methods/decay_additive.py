"""AT, additive tuning: what 2D-LRD (Mo et al., IJCNN 2021) is compared with.

The first local step keeps eta_0, all later ones have eta_0 (1 - c d), with d from Pflug's diagnostic (see pflug.py).
The paper does not say what happens at c d >= 1: `at_end="switch"` goes on with one step a round, as 2D-LRD does;
`at_end="zero"` leaves the later steps at rate 0.

What it does: late local steps get shorter, all by the same factor.
When it helps: as a baseline for 2dlrd.
What it costs: one number down.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.methods.pflug import Pflug
from fedloom.methods.two_d_lrd import ALMOST_ONE
from fedloom.stages import State, check


@register("decay-additive", paper="Mo et al., IJCNN 2021 (AT)")
@dataclass(frozen=True)
class DecayAdditive(Pflug):
    """Decay the rate of all local steps but the first when training is stationary."""

    c: float = 0.2
    window: int = 50
    at_end: Literal["switch", "zero"] = "switch"

    def __post_init__(self) -> None:
        check(0 <= self.c < float("inf"), f"decay-additive: c must be at least 0, not {self.c}")
        self.check_window("decay-additive")

    def factors(self, state: State, steps: int) -> Tensor:
        later = max(0.0, 1 - self.c * float(state["d"]))
        factors = torch.full((steps,), later, dtype=torch.float64)
        factors[0] = 1.0
        return factors

    def limit(self, state: State) -> int | None:
        return 1 if self.at_end == "switch" and self.c * float(state["d"]) >= ALMOST_ONE else None
