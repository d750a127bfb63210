"""What a round does where no method says otherwise: FedAvg, taken apart."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator as Rng
from torch import Tensor

from fedloom.stages import (
    Aggregator,
    Cohorts,
    Collected,
    Rate,
    Round,
    Sampler,
    Schedule,
    Server,
    Setup,
    Stage,
    State,
    Updates,
    check,
)


@dataclass(frozen=True)
class Uniform(Sampler):
    """Clients are drawn uniformly, without replacement."""

    breaks_privacy = None

    def draw(self, state: State, setup: Setup, number: int, w: int, rng: Rng) -> np.ndarray:
        return rng.choice(setup.clients, number, replace=False)


@dataclass(frozen=True)
class Synchronous(Schedule):
    """Every model is averaged after one client."""

    breaks_privacy = None

    def collect(self, state: State, cohorts: Cohorts) -> Collected:
        updates = yield cohorts.ask(cohorts.draw(), cohorts.theta, cohorts.buffers)
        return state, updates


@dataclass(frozen=True)
class Constant(Rate):
    """One learning rate for every step of every round."""

    breaks_privacy = None

    def factors(self, state: State, steps: int) -> Tensor:
        return torch.ones(steps, dtype=torch.float64)


@dataclass(frozen=True)
class Mean(Aggregator):
    """The weighted sum of the updates."""

    breaks_privacy = "averages without noise"

    def combine(self, state: State, updates: Updates) -> tuple[Updates, Tensor]:
        return updates, updates.rows.weighted_sum(updates.weights)


@dataclass(frozen=True)
class Sgd(Server):
    """theta <- theta - lr * g."""

    lr: float = 1.0
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(0 < self.lr < float("inf"), f"the server's lr must be above 0, not {self.lr}")

    def step(self, state: State, record: Round) -> tuple[State, Tensor]:
        return state, record.theta - self.lr * record.scaled


DEFAULTS: dict[str, Stage] = {
    "sampler": Uniform(),
    "schedule": Synchronous(),
    "rate": Constant(),
    "aggregator": Mean(),
    "server": Sgd(),
}
