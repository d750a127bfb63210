"""RADFed. Xue, Klabjan, Luo: Aggregation Delayed Federated Learning. 2021 (Algorithm 2).

m models travel over S cohorts of clients before they are averaged:

    models[1..m] = theta
    repeat S times:   U = m clients;   models[i] = ClientUpdate(U[i], models[i])
    theta <- 1/m sum_i models[i]

What it does: each model sees the data of S clients before it is averaged, so that averages are taken between models
that have seen more of all data. The rest of the round (average, server) acts once in S Works.
When it helps: very skewed data, cheap redistribution, no need for privacy between clients.
What it costs: per Work the traffic of FedAvg; m models at the server. A client receives another client's raw model.

Variants: radfedp adds FedProx's pull to the model just received, radfedm mixes the average into theta, radfeda steps
with Adam, radfedi draws clients by importance.

Departures: Algorithm 2 prints the variants over each other; line 17 lost the square root of Adam's second moment.
Where clients are away, the paper names two strategies. `away="even"`: a model whose client does not answer stays, and
models that moved fewer than S times are sent on by further Works (at most S), the least moved first. `away="fewer"`:
such a model is given up for this round, unless it is the last. Where a cohort is smaller than the number of models, the
least moved go (even), or only that many go on (fewer). A client drawn twice takes one model under a method that
remembers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.methods.fedadam import FedAdam
from fedloom.methods.fedprox import FedProx
from fedloom.methods.importance import Importance
from fedloom.methods.mixing import Mixing
from fedloom.rows import Rows
from fedloom.space import Buffers
from fedloom.stages import Cohorts, Collected, Schedule, Stage, State, Updates, as_sent, check

PAPER = "Xue et al., 2021"


@register("radfed", paper=PAPER)
@dataclass(frozen=True)
class Radfed(Schedule):
    """Let models travel over several clients before they are averaged."""

    redistributions: int = 15
    away: Literal["even", "fewer"] = "even"
    weights = "equal"
    travels = True
    reads_rows = True
    breaks_privacy = "hands one client's raw model to the next"

    def __post_init__(self) -> None:
        check(1 <= self.redistributions <= 10**6, "radfed: redistributions must be between 1 and a million")

    def works(self, per_round: int) -> float:
        return float(self.redistributions)

    def collect(self, state: State, cohorts: Cohorts) -> Collected:
        draw = cohorts.draw()
        trip = _Trip(cohorts, len(draw.clients))
        for s in range(2 * self.redistributions):
            late = trip.behind(self.redistributions)
            if s >= self.redistributions:
                if self.away == "fewer" or not len(late):
                    break
                draw = cohorts.draw(len(late))
            elif s:
                draw = cohorts.draw()
            going = (late if self.away == "even" else trip.travelling)[: len(draw.clients)]
            if self.away == "even":
                going = going.sort().values  # the least moved were chosen; each keeps its place
            updates = yield cohorts.ask(draw.first(len(going)), *trip.at(going))
            moved = going[updates.slots]
            trip.move(moved, updates)
            if self.away == "fewer" and len(moved):
                trip.travelling = moved
        return state, trip.updates(self.away == "fewer")


class _Trip:
    """m models on their way."""

    def __init__(self, cohorts: Cohorts, m: int) -> None:
        self.theta = cohorts.theta
        self.rows = Rows(torch.zeros_like(cohorts.theta).repeat(m, 1), cohorts.space)  # theta minus where each is now
        self.buffers = {name: b.expand(m, *b.shape).clone() for name, b in cohorts.buffers.items()}
        self.times = torch.zeros(m, dtype=torch.int64)  # how often each moved
        self.travelling = torch.arange(m)
        self.client = torch.zeros(m, dtype=torch.int64)
        self.samples = torch.zeros(m, dtype=torch.int64)
        self.steps = torch.zeros(m, dtype=torch.int64)
        self.loss = torch.zeros(m, dtype=torch.float64)  # summed over samples
        self.up: dict[str, State] = {}
        self.extra: State = {}

    def behind(self, times: int) -> Tensor:
        """The models that moved less often, the least moved first; ties in their order."""
        order = self.times.sort(stable=True).indices
        return order[self.times[order] < times]

    def at(self, where: Tensor) -> tuple[Tensor, Buffers]:
        there = where.to(self.theta.device)
        return self.theta - self.rows.matrix[there], {name: b[there] for name, b in self.buffers.items()}

    def move(self, where: Tensor, updates: Updates) -> None:
        there = where.to(self.theta.device)
        self.rows.matrix[there] += updates.rows.matrix
        for name, values in updates.buffers.items():
            self.buffers[name][there] = values
        self.times[where] += 1
        self.client[where] = updates.clients
        self.samples[where] += updates.samples
        self.steps[where] += updates.steps
        self.loss[where] += updates.loss * updates.samples
        for key, sent in updates.up.items():
            self._add(self.up.setdefault(key, {}), sent, where)
        self._add(self.extra, updates.extra, where)

    def _add(self, total: State, values: State, where: Tensor) -> None:
        for name, value in values.items():
            if name not in total:
                total[name] = value.new_zeros((len(self.times), *value.shape[1:]))
            total[name][where.to(value.device)] += value

    def updates(self, fewer: bool) -> Updates:
        """What is to be averaged: every model that moved, or only those still travelling."""
        slots = self.travelling if fewer else torch.arange(len(self.times))
        slots = slots[self.times[slots] > 0]
        there = slots.to(self.theta.device)
        return Updates(
            clients=self.client[slots],
            slots=slots,
            counts=torch.ones_like(slots),
            samples=self.samples[slots],
            steps=self.steps[slots],
            loss=self.loss[slots] / self.samples[slots],
            finite=torch.ones(len(slots), dtype=torch.bool),
            rows=self.rows.select(slots),
            buffers={name: b[there] for name, b in self.buffers.items()},
            sent={
                key: as_sent({n: v[there.to(v.device)] for n, v in sent.items()}, self.rows.space)
                for key, sent in self.up.items()
            },
            extra={n: v[there.to(v.device)] for n, v in self.extra.items()},
            owner=slots,
        )


@register("radfedp", paper=PAPER)
def radfedp(redistributions: int = 15, mu: float = 0.01) -> Sequence[Stage]:
    """RADFed with FedProx's pull: radfed+fedprox."""
    return [Radfed(redistributions), FedProx(mu)]


@register("radfedm", paper=PAPER)
def radfedm(redistributions: int = 15, alpha: float = 0.9) -> Sequence[Stage]:
    """RADFed that mixes the average into the cloud model: radfed+mixing."""
    return [Radfed(redistributions), Mixing(alpha)]


@register("radfeda", paper=PAPER)
def radfeda(
    redistributions: int = 15, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> Sequence[Stage]:
    """RADFed with Adam at the server: radfed+fedadam."""
    return [Radfed(redistributions), FedAdam(lr, beta1, beta2, tau)]


@register("radfedi", paper=PAPER)
def radfedi(redistributions: int = 15, gamma: float = 0.9) -> Sequence[Stage]:
    """RADFed that draws clients by importance: radfed+importance."""
    return [Radfed(redistributions), Importance(gamma)]
