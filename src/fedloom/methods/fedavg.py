"""FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data. AISTATS 2017.

    theta_k = LocalSGD(theta)                       on each sampled client
    theta <- theta - lr * sum_k w_k (theta - theta_k)

What it does: every sampled client trains from the cloud model, and the weighted mean of their models takes its place.
When it helps: data that are alike from client to client. It is what every other method is compared with.
What it costs: P numbers down and up per client and round, nothing remembered.

Departures: none. `lr` other than 1 moves the cloud model less or more than to the mean; `weights` are by samples
unless a method of the union states equal ones.
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
