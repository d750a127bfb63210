"""FedAdagrad: the adaptive server of Reddi et al. (ICLR 2021; see adaptive.py) with

v <- v + g^2
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
