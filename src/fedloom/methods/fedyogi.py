"""FedYogi: the adaptive server of Reddi et al. (ICLR 2021; see adaptive.py) with

v <- v - (1 - beta2) g^2 sign(v - g^2)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.methods.adaptive import Adaptive


@register("fedyogi", paper="Reddi et al., ICLR 2021")
@dataclass(frozen=True)
class FedYogi(Adaptive):
    """As FedAdam, with a second moment that grows and shrinks slowly."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    bias_correction: bool = False
    v_init: float | None = None  # tau^2

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
