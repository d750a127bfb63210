"""FedAdam: the adaptive server of Reddi et al. (ICLR 2021; see adaptive.py) with

    v <- beta2 v + (1 - beta2) g^2

What it does: coordinates that rarely move get longer steps.
When it helps: skewed data with few clients a round; usually the strongest of the plain servers once lr is tuned.
What it costs: 2 P numbers at the server; nothing on the wire.

Departures: no bias correction and v = tau^2 at the start, as in the paper; FedGLAD's experiments use Adam as PyTorch
has it (beta2=0.999, tau=1e-8, v_init=0, bias_correction=True). A rescaler scales the first moment only.
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
