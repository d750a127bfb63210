"""From some Work on, all local steps but the first have rate 0: the experiment of 2D-LRD's Fig. 2 (Mo et al., IJCNN
2021), which shows how much the later steps hurt in the end.

What it does: later steps still run, but change nothing.
When it helps: as a baseline for 2dlrd.
What it costs: nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.stages import Rate, Setup, State, Updates, Work, check, scalar


@register("first-only", paper="Mo et al., IJCNN 2021 (Fig. 2)")
@dataclass(frozen=True)
class FirstOnly(Rate):
    """Later local steps stop counting after a number of Works."""

    after: int = 100
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(self.after >= 0, f"first-only: after must be at least 0, not {self.after}")

    def init(self, setup: Setup) -> State:
        return {"works": scalar(0)}

    def heard(self, state: State, work: Work, updates: Updates) -> State:
        return {"works": state["works"] + work.share}

    def factors(self, state: State, steps: int) -> Tensor:
        factors = torch.ones(steps, dtype=torch.float64)
        if float(state["works"]) + 1e-9 >= self.after:  # shares of asynchronous Works add up to whole ones
            factors[1:] = 0.0
        return factors
