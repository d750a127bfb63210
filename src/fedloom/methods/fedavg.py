"""FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data. AISTATS 2017.

    theta_k = LocalSGD(theta)                       on each sampled client
    theta <- theta - lr * sum_k w_k (theta - theta_k)
"""

from collections.abc import Sequence

from fedloom.method import register
from fedloom.methods.defaults import Sgd
from fedloom.stages import Stage, Weighting, Weights


@register("fedavg", paper="McMahan et al., AISTATS 2017")
def fedavg(lr: float = 1.0, weights: Weighting | None = None, *, written: frozenset[str]) -> Sequence[Stage]:
    """Average the clients' models; fills nothing but what is written."""
    stages: list[Stage] = []
    if "lr" in written:
        stages.append(Sgd(lr))
    if weights is not None:
        stages.append(Weights(weights))
    return stages
