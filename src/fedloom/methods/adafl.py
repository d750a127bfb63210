"""AdaFL's attention over clients, as FedGLAD's authors use it. Chen, Chong, Zhang et al.: Dynamic Attention-based
Communication-Efficient Federated Learning. 2021.

Every client begins with attention a_k = 1/N; r are drawn without replacement with probability a. With d_i the distance
of client i's model from the mean of those that were averaged, over the sampled set S:

    a_i <- 0.9 a_i + 0.1 (sum_{j in S} a_j) d_i / (sum_{j in S} d_j)

What it does: clients whose models stray are drawn more often.
When it helps: some clients are learned much worse than others.
What it costs: nothing on the wire; the server sees single updates.

Departures: the sum is kept at one in float64 (released code rounds and puts the rest on client 0). The original also
grows the share of clients over time, which FedGLAD did not use.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator as Rng

from fedloom.errors import MethodError
from fedloom.method import register
from fedloom.stages import Round, Sampler, Schedule, Setup, Stage, State

KEEP = 0.9


@register("adafl", paper="Chen et al., 2021")
@dataclass(frozen=True)
class Adafl(Sampler):
    """Draw more often the clients whose models stray from the mean."""

    breaks_privacy = "draws clients by their single updates"

    def init(self, setup: Setup) -> State:
        return {"a": torch.full((setup.clients,), 1 / setup.clients, dtype=torch.float64)}

    def draw(self, state: State, setup: Setup, number: int, w: int, rng: Rng) -> np.ndarray:
        a = state["a"].cpu().numpy()
        return rng.choice(setup.clients, number, replace=False, p=a / a.sum())

    def observe(self, state: State, record: Round) -> State:
        updates = record.updates
        mean = updates.rows.weighted_sum(torch.full((len(updates),), 1 / len(updates), dtype=torch.float64))
        d = updates.rows.distances(mean).cpu()
        if float(d.sum()) == 0:
            return state
        a, sampled = state["a"].clone(), updates.clients
        a[sampled] = KEEP * a[sampled] + (1 - KEEP) * a[sampled].sum() * d / d.sum()
        return {"a": a / a.sum()}

    def join(self, others: Mapping[str, Stage]) -> str | None:
        for key, stage in others.items():
            if isinstance(stage, Schedule) and stage.travels:
                name = key.partition(".")[0]
                raise MethodError(f"adafl and {name} can't be joined: under {name} no client owns a model to measure")
        return None
