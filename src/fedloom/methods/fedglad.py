"""FedGLAD. Yang, Lin, Zhao, Li, Zhou, Sun: When to Trust Aggregated Gradients: Addressing Negative Client Sampling in
Federated Learning. TMLR 2023 (Algorithm 1).

The gradient similarity-aware indicator says how much the clients of a round agree; the step is scaled by how it
compares with earlier rounds. For each group P of parameters and round t = 0, 1, ...:

    GSI = sqrt( sum_k w_k |g_kP|^2 / |g_P|^2 )                                (Eq. 9; w_k = 1/r there)
    B_P = GSI  at t = 0
    s_P = min( max( GSI / B_P, 1 - gamma t ), 1 + gamma t )
    B_P <- beta B_P + (1 - beta) GSI                                          after s_P
    g_P <- s_P g_P

What it does: it shortens the step after a sample of clients that agree too much to stand for all, and lengthens it
after a varied one.
When it helps: few clients a round, skewed data, any server optimiser; the server's rate need not be tuned again.
What it costs: no traffic; one number per group; one pass over the K x P updates.

Departures: the weighted form in the appendix prints 1/r beside weights that sum to one, and the note on Krum r for
the number kept; both would give GSI < 1 on identical clients. The released code mixes weighted means with unweighted
distances, whose radicand can turn negative. Under FedAdam the second moment takes the unscaled average (line 9
precedes the scaling). Under AdaBest and FedDyn the scaled average replaces the plain one. A group without any update
has GSI 1; one whose updates cancel exactly is left alone, as is a round with fewer than two rows. In the first round
both bounds are 1, so that every group counts as `at_bound`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.diagnose.agreement import gsi
from fedloom.method import register
from fedloom.space import GroupBy
from fedloom.stages import Rescaler, Round, Setup, State, check, scalar


@register("fedglad", paper="Yang et al., TMLR 2023")
@dataclass(frozen=True)
class Fedglad(Rescaler):
    """Scale the averaged step by how much the clients of the round agree."""

    gamma: float = 0.02
    beta: float = 0.9
    groups: GroupBy = "tensor"
    breaks_privacy = "scales the step by the lengths of single updates"

    def __post_init__(self) -> None:
        check(self.gamma >= 0, f"fedglad: gamma must be at least 0, not {self.gamma}")
        check(0 <= self.beta < 1, f"fedglad: beta must be at least 0 and below 1, not {self.beta}")

    def init(self, setup: Setup) -> State:
        groups = len(setup.space.groups(self.groups))
        unknown = torch.full((groups,), math.nan, dtype=torch.float64)
        return {"B": unknown, "gsi": unknown, "scale": torch.ones_like(unknown), "t": scalar(0)}

    def rescale(self, state: State, record: Round) -> tuple[State, Tensor]:
        updates = record.updates
        if len(updates) < 2:
            one = torch.ones_like(state["scale"])
            return {**state, "gsi": one, "scale": one}, record.scaled
        groups = updates.rows.space.groups(self.groups)
        GSI = gsi(updates.rows, updates.weights, self.groups)  # under a median, still of the mean

        t = float(state["t"])
        known = torch.isfinite(GSI)
        B = torch.where(state["B"].isnan() & known, GSI, state["B"])
        bound = self.gamma * t if t else 0.0  # at t = 0 also where gamma is infinite
        s = torch.where(known, (GSI / B).clamp(1 - bound, 1 + bound), 1.0)
        B = torch.where(known, self.beta * B + (1 - self.beta) * GSI, B)
        scaled = groups.spread(s.to(record.aggregate, non_blocking=True)) * record.aggregate
        return {**state, "B": B, "gsi": GSI, "scale": s, "t": state["t"] + 1}, scaled

    def report(self, state: State) -> dict[str, Tensor]:
        bound = self.gamma * float(state["t"] - 1) if state["t"] > 1 else 0.0
        at_bound = ((state["scale"] - 1).abs() >= bound * (1 - 1e-12)).double().mean()
        return {"gsi": state["gsi"], "B": state["B"], "scale": state["scale"], "at_bound": at_bound}
