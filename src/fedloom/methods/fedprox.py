"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020.

Each client minimises L_k(x) + mu/2 |x - theta|^2, so its gradient is

    grad L_k(x) + mu (x - theta)

What it does: local models stay near the one that they started from.
When it helps: many local steps, or clients that do very unequal amounts of work. mu = 0 is FedAvg.
What it costs: one vector addition a step; nothing on the wire, nothing remembered.

Departures: none; the pull acts on every trainable tensor, batch norm's scale and shift included.
"""

from dataclasses import dataclass

import torch

from fedloom.method import register
from fedloom.stages import Client, Correction, Info, State, check


@register("fedprox", paper="Li et al., MLSys 2020")
@dataclass(frozen=True)
class FedProx(Client):
    """Pull each client's model towards the one that it received."""

    mu: float = 0.01
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(0 <= self.mu < float("inf"), f"fedprox: mu must be at least 0, not {self.mu}")

    def begin(self, memory: State, sent: State, info: Info) -> Correction:
        return Correction(pull=torch.full((len(info.clients),), self.mu, dtype=torch.float64))
