"""FedNova. Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization. NeurIPS 2020.

With a_k how far client k's local run goes under a gradient of 1, and p_k = n_k / sum n:

    tau_eff = sum_k p_k a_k
    theta <- theta - tau_eff sum_k p_k (theta - theta_k) / a_k

What it does: clients that took more steps do not pull harder.
When it helps: clients of very different size or speed.
What it costs: three numbers up.

Departures: a_k comes from the recursion itself (same rates, momentum and pull), which gives the paper's closed forms
for plain, momentum and proximal SGD and is right for their mixtures too. Rows are scaled by tau_eff / a_k and keep
their weights, so that a rescaler sees a plain average. Adam has no such a_k and is refused; weight decay and clipping
are left out of a_k, as in the paper.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.space import Space
from fedloom.stages import Aggregator, Setup, State, Updates, Wire, check


@register("fednova", paper="Wang et al., NeurIPS 2020")
@dataclass(frozen=True)
class FedNova(Aggregator):
    """Weigh each client by its data, not by how many steps it took."""

    wants = frozenset({"step_norm"})
    breaks_privacy = "stretches updates by how many steps single clients took, and averages without noise"

    def init(self, setup: Setup) -> State:
        optimizer = setup.local.optimizer
        check(optimizer == "sgd", f"fednova refuses optimizer={optimizer!r}: its steps have no common length")
        return {}

    def combine(self, state: State, updates: Updates) -> tuple[Updates, Tensor]:
        a, p = updates.extra["step_norm"].cpu(), updates.weights.double().cpu()
        tau_eff = (p * a).sum() / p.sum()
        scale = torch.where(a > 0, tau_eff / a, 0.0)  # a run at rate zero went nowhere
        rows = updates.rows.scaled(scale)
        return replace(updates, rows=rows), rows.weighted_sum(updates.weights)

    def wire(self, space: Space) -> Wire:
        return Wire(up=2)
