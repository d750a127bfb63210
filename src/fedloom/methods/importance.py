"""Importance sampling by gradient norm, the sampler of RADFed-i. Xue, Klabjan, Luo: Aggregation Delayed Federated
Learning. 2021.

    draw clients with probability proportional to p, without replacement
    p_new = mean over the client's batches of |gradient at its final local weights|^2
    p_k <- (1 - gamma) p_k + gamma p_new

What it does: clients that the model fits badly are drawn more often.
When it helps: a few clients are much harder than the rest.
What it costs: one number up per client, one more pass over the client's data without training.

Departures: the paper leaves the first scores open and its code asks all clients once (`start="full"`); by default they
are one, and a client that was never seen is set to the mean of the scores seen. Averages stay unweighted, as in the
paper: there is no correction for how likely a client was.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.random import Generator as Rng

from fedloom.method import register
from fedloom.space import Space
from fedloom.stages import Sampler, Setup, State, Updates, Wire, Work, check


@register("importance", paper="Xue et al. (RADFed), 2021")
@dataclass(frozen=True)
class Importance(Sampler):
    """Draw more often the clients whose gradients are large."""

    gamma: float = 0.9
    start: Literal["ones", "full"] = "ones"
    weights = "equal"
    wants = frozenset({"final_score"})
    breaks_privacy = "draws clients by their single gradients"

    def __post_init__(self) -> None:
        check(0 < self.gamma <= 1, f"importance: gamma must be above 0 and at most 1, not {self.gamma}")

    @property
    def surveys(self) -> bool:
        return self.start == "full"

    def init(self, setup: Setup) -> State:
        return {
            "p": torch.ones(setup.clients, dtype=torch.float64),
            "seen": torch.zeros(setup.clients, dtype=torch.bool),
        }

    def draw(self, state: State, setup: Setup, number: int, w: int, rng: Rng) -> np.ndarray:
        p = state["p"].cpu().numpy()
        # A score of zero must not keep a cohort from being filled.
        p = np.maximum(p, 1e-12 * p.max()) if p.max() > 0 else np.ones_like(p)
        return rng.choice(setup.clients, number, replace=False, p=p / p.sum())

    def heard(self, state: State, work: Work, updates: Updates) -> State:
        p, seen = state["p"].clone(), state["seen"].clone()
        scores = updates.extra["final_score"].to(p)
        usable = torch.isfinite(scores)  # the square of a large gradient may overflow
        clients, scores = updates.clients[usable], scores[usable]
        if work.max_steps == 0:  # the survey's scores stand as they are
            p[clients] = scores
        else:
            p[clients] = (1 - self.gamma) * p[clients] + self.gamma * scores
        seen[clients] = True
        if bool(seen.any()):
            p[~seen] = p[seen].mean()
        return {"p": p, "seen": seen}

    def wire(self, space: Space) -> Wire:
        return Wire(up=1)
