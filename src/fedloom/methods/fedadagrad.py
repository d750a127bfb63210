"""FedAdagrad: the adaptive server of Reddi et al. (ICLR 2021; see adaptive.py) with

    v <- v + g^2

What it does: steps shrink for good in coordinates that have moved much.
When it helps: sparse averages, short runs.
What it costs: 2 P numbers at the server; nothing on the wire.

Departures: no bias correction and v = tau^2 at the start, as in the paper; FedGLAD's experiments use Adam as PyTorch
has it (beta2=0.999, tau=1e-8, v_init=0, bias_correction=True). A rescaler scales the first moment only.
"""

from dataclasses import dataclass

from torch import Tensor

from fedloom.method import register
from fedloom.methods.adaptive import Adaptive


@register("fedadagrad", paper="Reddi et al., ICLR 2021")
@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """The server's steps shrink as squared averages add up."""

    lr: float = 0.01
    beta1: float = 0.0
    tau: float = 1e-3
    bias_correction: bool = False
    v_init: float | None = None  # tau^2

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square
