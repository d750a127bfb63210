"""Central differential privacy for clients. McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent
Language Models. ICLR 2018 (DP-FedAvg); accounted for as in Mironov, Talwar, Zhang: Rényi Differential Privacy of the
Sampled Gaussian Mechanism. 2019.

With g_k the updates that were received and clipped to a norm of C (`clip(norm=C)`, which must stand beside it):

    g = (sum_k g_k + N(0, (multiplier C)^2 I)) / m

    m = rate N               under bernoulli(rate)
    m = clients per round    under other samplers

What it does: whoever sees the models, and all of them, can hardly tell whether any one client took part; how hardly is
`epsilon` at `delta`, in every round's metrics.
When it helps: a model that is to be handed out must not tell what single clients hold.
What it costs: accuracy, the less the more clients a round has: the noise in g has a standard deviation of
multiplier C / m in every coordinate. A normal number per parameter and round.

m is fixed, whoever answers: one client more or less moves the sum by C at most, and nothing else. So a round in which
nobody answers is averaged too, and is noise alone. Weights are equal.

epsilon: under `bernoulli` the sampled Gaussian mechanism, once a round, for one client added or removed. Under other
samplers who takes part counts as known, and it is that of the client which was asked most often, for its update in
place of none. What each method does to this, and what epsilon does not cover: docs/privacy.md.

Departures: the paper also bounds layers one by one and weighs clients by samples up to a cap; here the whole update has
one norm and all weigh the same. The key of the noise is kept in the checkpoints, so that a round which is played again
after a crash releases the same model again; whoever has a checkpoint can take the noise off. With `seed` the key
follows from it: for tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.errors import MethodError
from fedloom.keys import noise_key, noise_rng
from fedloom.method import register
from fedloom.methods.bernoulli import Bernoulli
from fedloom.methods.clip import Clip
from fedloom.methods.defaults import Synchronous
from fedloom.methods.fixed import Fixed
from fedloom.privacy import accounting, epsilon
from fedloom.stages import (
    Aggregator,
    Round,
    Schedule,
    Setup,
    Stage,
    State,
    Update,
    Updates,
    Weights,
    Work,
    check,
    scalar,
)

NOT_COVERED = (
    "noise: epsilon speaks of the models; train_loss, diverged, the share clipped and every other metric come from "
    "clients' data without noise, so don't hand them out with the models"
)
MOST = 1e6  # more would overflow in the account
AGAINST = "; sampling helps only against those who don't know the run's seed"
FOR_TESTS = "; whoever knows noise's seed can take the noise off, so it is for tests"


@register("noise", paper="McMahan et al., ICLR 2018")
@dataclass(frozen=True)
class Noise(Aggregator):
    """Add normal noise to the sum of clipped updates: differential privacy for clients."""

    multiplier: float
    delta: float = 1e-5
    seed: int | None = None
    weights = "equal"
    needs_updates = False
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(0 <= self.multiplier <= MOST, f"noise: multiplier must be between 0 and {MOST:g}, not {self.multiplier}")
        check(0 < self.delta < 1, f"noise: delta must be between 0 and 1, not {self.delta}")
        check(self.seed is None or self.seed >= 0, f"noise: seed must be at least 0, not {self.seed}")

    def join(self, others: Mapping[str, Stage]) -> str | None:
        for key, stage in others.items():
            name = key.partition(".")[0]
            why = stage.breaks_privacy
            if isinstance(stage, Weights) and stage.by == "samples":
                why = "weighs clients by their samples, where noise needs equal weights"
            elif isinstance(stage, Update) and not isinstance(stage, Clip) and stage.rank >= Clip.rank:
                why = why or "changes updates after they were clipped"
            elif isinstance(stage, Schedule) and not isinstance(stage, Synchronous):
                why = why or "may ask a client more than once in a round, of which no epsilon is known"
            elif isinstance(stage, Fixed):
                why = _uncounted(stage)
            if why is not None:
                raise MethodError(f"noise and {name} can't be joined: {name} {why}")
        sampled = any(isinstance(stage, Bernoulli) for stage in others.values())
        return NOT_COVERED + AGAINST * sampled + FOR_TESTS * (self.seed is not None)

    def init(self, setup: Setup) -> State:
        accounting()
        clip = next((stage for stage in setup.stages if isinstance(stage, Clip)), None)
        if clip is None:
            raise MethodError(
                "noise needs clip(norm=...) beside it: no noise covers a client whose update may be of any length"
            )
        sampler = next((stage for stage in setup.stages if isinstance(stage, Bernoulli)), None)
        return {
            "key": torch.tensor(noise_key(self.seed)),
            "deviation": scalar(self.multiplier * clip.norm),
            "m": scalar(_expected(setup)),
            "rate": scalar("nan" if sampler is None else sampler.rate),
            "asked": torch.zeros(setup.clients if sampler is None else 0, dtype=torch.int64),  # how often, each client
            "round": torch.tensor(0),  # averages released
        }

    def heard(self, state: State, work: Work, updates: Updates) -> State:
        once = len(set(work.clients.tolist())) == len(work)
        check(once, f"noise: a client was drawn twice for Work {work.w}, and would count twice; take another sampler")
        if not len(state["asked"]):
            return state
        return {**state, "asked": state["asked"].index_add(0, work.clients, torch.ones_like(work.clients))}

    def combine(self, state: State, updates: Updates) -> tuple[Updates, Tensor]:
        m = float(state["m"])
        total = updates.rows.weighted_sum(torch.ones(len(updates)))
        rng = noise_rng(state["key"].tolist(), int(state["round"]))
        noise = torch.from_numpy(float(state["deviation"]) * rng.standard_normal(len(total)))
        weighed = replace(updates, weights=torch.full_like(updates.weights, 1 / m))
        return weighed, (total + noise.to(total)) / m

    def observe(self, state: State, record: Round) -> State:
        return {**state, "round": state["round"] + 1}

    def report(self, state: State) -> dict[str, Tensor]:
        rate = float(state["rate"])
        if len(state["asked"]):
            spent = epsilon(self.multiplier, self.delta, int(state["asked"].max()))
        else:
            spent = epsilon(self.multiplier, self.delta, int(state["round"]), rate)
        return {"epsilon": scalar(spent), "delta": scalar(self.delta)}


def _expected(setup: Setup) -> float:
    """m: how many clients a round is expected to have."""
    for stage in setup.stages:
        if isinstance(stage, Bernoulli):
            return stage.rate * setup.clients
        if isinstance(stage, Fixed):
            listed = len(stage.cohorts[0])
            same = stage.works is None or listed == setup.per_round
            check(
                same,
                f"noise divides by one number of clients, but fixed lists cohorts of {listed} and other rounds have "
                f"clients_per_round={setup.per_round}: make them equal",
            )
            return float(listed)
    return float(setup.per_round)


def _uncounted(fixed: Fixed) -> str | None:
    """Why a list of cohorts has no fixed denominator, or lets a client count twice."""
    if len({len(cohort) for cohort in fixed.cohorts}) > 1:
        return "lists cohorts of unequal length, where noise divides by one number of clients"
    if any(len(set(cohort)) < len(cohort) for cohort in fixed.cohorts):
        return "lists a client twice in a cohort, which would then count twice"
    return None
