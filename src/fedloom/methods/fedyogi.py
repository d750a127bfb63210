"""FedYogi: the adaptive server of Reddi et al. (ICLR 2021; see adaptive.py) with

    v <- v - (1 - beta2) g^2 sign(v - g^2)

What it does: as FedAdam, but a burst of large averages does not shorten the steps for long.
When it helps: where FedAdam does, on averages that vary much.
What it costs: 2 P numbers at the server; nothing on the wire.

Departures: no bias correction and v = tau^2 at the start, as in the paper; FedGLAD's experiments use Adam as PyTorch
has it (beta2=0.999, tau=1e-8, v_init=0, bias_correction=True). A rescaler scales the first moment only.
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
