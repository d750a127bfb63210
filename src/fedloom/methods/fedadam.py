"""FedAdam: the adaptive server of Reddi et al. (ICLR 2021; see adaptive.py) with

v <- beta2 v + (1 - beta2) g^2
"""

from dataclasses import dataclass

from torch import Tensor

from fedloom.method import register
from fedloom.methods.adaptive import Adaptive


@register("fedadam", paper="Reddi et al., ICLR 2021")
@dataclass(frozen=True)
class FedAdam(Adaptive):
    """Adam at the server: each coordinate has its own step."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    bias_correction: bool = False
    v_init: float | None = None  # tau^2

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square
