"""FedAvgM. Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. 2019.

    m <- momentum * m + g
    theta <- theta - lr * m

Without the factor (1 - momentum) on g that some papers print: the rates tuned for FedGLAD belong to this form.

What it does: averages of several rounds add up, so that the noise of single samples of clients cancels.
When it helps: few clients a round. momentum = 0 is FedAvg with that lr.
What it costs: P numbers at the server; nothing on the wire.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.stages import Round, Server, Setup, State, check, zeros


@register("fedavgm", paper="Hsu et al., 2019")
@dataclass(frozen=True)
class FedAvgM(Server):
    """The server descends with momentum."""

    lr: float = 1.0
    momentum: float = 0.9
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(0 < self.lr < float("inf"), f"fedavgm: lr must be above 0, not {self.lr}")
        check(0 <= self.momentum < 1, f"fedavgm: momentum must be at least 0 and below 1, not {self.momentum}")

    def init(self, setup: Setup) -> State:
        return {"m": zeros(setup)}

    def step(self, state: State, record: Round) -> tuple[State, Tensor]:
        m = self.momentum * state["m"] + record.scaled
        return {"m": m}, record.theta - self.lr * m

    def report(self, state: State) -> dict[str, Tensor]:
        return {"momentum_norm": torch.linalg.vector_norm(state["m"])}
