"""2D-LRD. Mo, Chen, Li, Xu, Xue: Two-Dimensional Learning Rate Decay: Towards Accurate Federated Learning with Non-IID
Data. IJCNN 2021.

Local step j = 0, 1, ... of a round has the rate, with d from Pflug's diagnostic (see pflug.py):

    eta_0 (1 - c d)^j         while c d < 1
    one step a round at eta_0  from then on

What it does: once training is stationary, late local steps get shorter, for it is they that carry a client away; in
the end every step is averaged. The first step always keeps its full rate.
When it helps: many local steps, full participation, long runs.
What it costs: one number down. After the switch each local step is a round, and traffic grows by the old number of
steps.

Departures: the paper has full participation; with less, the change of the cloud model is still defined. After the
switch a window counts rounds that are shorter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.methods.pflug import Pflug
from fedloom.stages import State, check

ALMOST_ONE = 1 - 1e-12  # 5 x 0.2 must count as one


@register("2dlrd", paper="Mo et al., IJCNN 2021")
@dataclass(frozen=True)
class TwoDimensional(Pflug):
    """Decay the local rate by round and by step, then average after every step."""

    c: float = 0.2
    window: int = 50

    def __post_init__(self) -> None:
        check(0 <= self.c < float("inf"), f"2dlrd: c must be at least 0, not {self.c}")
        self.check_window("2dlrd")

    def factors(self, state: State, steps: int) -> Tensor:
        base = 1.0 if self.limit(state) else 1 - self.c * float(state["d"])
        return base ** torch.arange(steps, dtype=torch.float64)

    def limit(self, state: State) -> int | None:
        return 1 if self.c * float(state["d"]) >= ALMOST_ONE else None
