"""Clipping of updates. McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models. ICLR
2018; Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning? 2019.

    g_k <- g_k min(1, norm / |g_k|)

What it does: no client moves the model further than `norm` allows.
When it helps: hostile or broken clients that send long updates; and it is what differential privacy needs before noise.
What it costs: one pass over the updates; a norm below that of honest updates slows training down, and more so for
clients whose data are unlike the others'.

It acts before krum and dgt. A travelling model (RADFed) is clipped where it is averaged, not at each client.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.stages import Setup, State, Update, Updates, Work, check, scalar


@register("clip", paper="McMahan et al., ICLR 2018")
@dataclass(frozen=True)
class Clip(Update):
    """Shorten updates that are longer than a norm."""

    norm: float
    rank = 10
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(0 < self.norm < float("inf"), f"clip: norm must be above 0, not {self.norm}")

    @property
    def compares(self) -> bool:
        return False

    def init(self, setup: Setup) -> State:
        return {"clipped": scalar("nan")}

    def heard(self, state: State, work: Work, updates: Updates) -> State:
        return {"clipped": scalar("nan")}  # where nobody answers nothing will be clipped

    def apply(self, state: State, updates: Updates) -> tuple[State, Updates]:
        lengths = updates.rows.distances(torch.zeros(updates.rows.space.size, device=updates.weights.device))
        factors = (self.norm / lengths.clamp(min=1e-300)).clamp(max=1.0)
        clipped = (factors < 1).double().mean()  # no float() here: the host would wait for it
        return {"clipped": clipped}, replace(updates, rows=updates.rows.scaled(factors))

    def report(self, state: State) -> dict[str, Tensor]:
        return {"clipped": state["clipped"]}
