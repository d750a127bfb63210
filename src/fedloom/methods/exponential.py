"""The local learning rate falls by a constant factor with every Work: lr * decay^t, the first one undecayed.

What it does: local training calms down at the same pace for every method and schedule.
When it helps: long runs; AdaBest's experiments use 0.998.
What it costs: nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.stages import Rate, Setup, State, Updates, Work, check, scalar


@register("exponential")
@dataclass(frozen=True)
class Exponential(Rate):
    """The local learning rate decays from round to round."""

    decay: float = 0.998
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(0 < self.decay <= 1, f"exponential: decay must be above 0 and at most 1, not {self.decay}")

    def init(self, setup: Setup) -> State:
        return {"works": scalar(0)}

    def heard(self, state: State, work: Work, updates: Updates) -> State:
        return {"works": state["works"] + work.share}

    def factors(self, state: State, steps: int) -> Tensor:
        t = torch.floor(state["works"] + 1e-9)  # shares of asynchronous Works add up to whole ones
        return (self.decay**t).expand(steps)

    def report(self, state: State) -> dict[str, Tensor]:
        return {"factor": self.factors(state, 1)[0]}
