"""FedDyn. Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic
Regularization. ICLR 2021.

Each client keeps h_k, the server h, all zero at first and in units of parameters; N clients in all, r of them sampled.

    x <- x - eta (grad L_k(x) + mu_k (x - theta) - mu_k h_k)        mu_k = mu mean(n) / n_k
    h_k <- h_k + (theta - theta_k)
    bar = mean theta_k
    h <- h + r/N (theta - bar)
    theta <- bar - h

so h stays the mean of all h_k.

What it does: it bends each client's loss so that the clients' stationary points are those of all data together.
When it helps: high participation. With few clients of many, |h| may grow without bound (AdaBest's Theorem 1: it shrinks
only if the new average points far enough against it), and the model with it.
What it costs: no traffic but one number, P numbers of memory per client and at the server, two vector additions a step.

Departures: the proximal term has the full factor mu_k, as in the authors' code; one public simulator halves it.
mu -> 0 is not FedAvg, since the server still subtracts h. A rescaled average replaces the plain one everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.methods.deploy import Deploy, Deploying, Latest
from fedloom.space import Space
from fedloom.stages import (
    Client,
    Correction,
    Info,
    Round,
    Setup,
    Stage,
    State,
    Updates,
    Wire,
    check,
    scalar,
    zeros,
)


@register("feddyn", paper="Acar et al., ICLR 2021")
def feddyn(mu: float = 0.02, deploy: Deploy = "aggregate") -> Sequence[Stage]:
    """Bend each client's loss so that all agree on where to stop."""
    stages: list[Stage] = [FedDynClient(mu), FedDynServer(deploy)]
    return [*stages, Latest()] if deploy == "latest_of_all" else stages


@dataclass(frozen=True)
class FedDynClient(Client):
    mu: float
    weights = "equal"
    remembers = {"h": "row"}
    breaks_privacy = "tells every client the mean of all sizes"

    def __post_init__(self) -> None:
        check(0 < self.mu < float("inf"), f"feddyn: mu must be above 0, not {self.mu}")

    def init(self, setup: Setup) -> State:
        return {"mean_size": scalar(setup.sizes.double().mean())}

    def send(self, state: State) -> State:
        return state

    def begin(self, memory: State, sent: State, info: Info) -> Correction:
        mu_k = self.mu * sent["mean_size"] / info.samples.double()
        return Correction(pull=mu_k, drift=-mu_k.to(memory["h"])[:, None] * memory["h"])

    def end(self, memory: State, sent: State, info: Info, updates: Updates) -> tuple[State, State]:
        return {"h": memory["h"] + updates.rows.matrix}, {}

    def wire(self, space: Space) -> Wire:
        return Wire(down=1)


@dataclass(frozen=True)
class FedDynServer(Deploying):
    deploy_as: Deploy
    weights = "equal"
    breaks_privacy = "steps by how many clients answered"

    def init(self, setup: Setup) -> State:
        margin = {"margin": torch.full_like(setup.start[0], torch.nan)}
        return {**super().init(setup), "h": zeros(setup), "population": scalar(setup.clients), **margin}

    def step(self, state: State, record: Round) -> tuple[State, Tensor]:
        bar = record.theta - record.scaled
        r = len(record.updates)
        moved = record.scaled
        if int(record.updates.counts.max()) > 1:  # a client drawn twice counts twice in bar, but has one h_k
            once = record.updates.rows.weighted_sum(torch.full((r,), 1 / r, dtype=torch.float64))
            moved = moved - record.aggregate + once
        share = r / float(state["population"])
        h = state["h"] + share * moved
        # AdaBest's Theorem 1: |h| does not grow if and only if cos(h, g) + r/(2N) |g| / |h| <= 0. No float() here: the
        # host would wait for it.
        length, step = torch.linalg.vector_norm(state["h"]), torch.linalg.vector_norm(moved)
        margin = state["h"] @ moved / (length * step) + share / 2 * step / length
        return {**self.averaged(state, bar), "h": h, "margin": margin}, bar - h

    def report(self, state: State) -> dict[str, Tensor]:
        return {"h_norm": torch.linalg.vector_norm(state["h"]), "margin": state["margin"]}
