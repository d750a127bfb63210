"""SCAFFOLD, FedDyn, AdaBest, RADFed, FedAsync and decaying local rates in float64 NumPy, written from the equations of
the specification; the local runs are those of `tests.reference`.

A drift rule is what a client adds to its gradient and remembers; a server rule is how the cloud model moves. Both
schedules, synchronous and travelling, take any pair of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from tests import reference
from tests.reference import Array, Buffers, Client, Linear, Local, Model, Rate, Trained, constant

Presence = Callable[[int, int], bool]  # (client, Work)


def always(client: int, work: int) -> bool:
    return True


@dataclass(frozen=True)
class Problem:
    """Who takes part in which Work, with what data, from which start."""

    clients: Sequence[Client]
    start: Array
    local: Local
    cohorts: Sequence[Sequence[int]]  # Work w takes cohort w; the list repeats
    answers: Presence = always
    seed: int = 0
    model: Model = field(default_factory=Linear)
    buffers: Buffers = field(default_factory=dict)
    rate: Rate = constant  # by Work

    @property
    def sizes(self) -> Array:
        return np.array([len(y) for _, y in self.clients], dtype=np.float64)

    def cohort(self, work: int) -> Sequence[int]:
        return self.cohorts[work % len(self.cohorts)]

    def distinct(self, work: int) -> dict[int, int]:
        """Each client of the cohort once, with how often it was drawn."""
        cohort = list(self.cohort(work))
        return {k: cohort.count(k) for k in cohort}

    def train(
        self,
        work: int,
        k: int,
        start: Array,
        buffers: Buffers,
        pull: float = 0.0,
        drift: Array | float = 0.0,
        *,
        occurrence: int = 0,
        factors: Array | None = None,
    ) -> Trained | None:
        """A local run; None if the client is away or diverged. As many steps as there are factors, if given."""
        if not self.answers(k, work):
            return None
        batches = self.local.batches(len(self.clients[k][1]), self.seed, work, k, occurrence)
        factors = self.rate(work, len(batches)) if factors is None else factors[: len(batches)]
        batches = batches[: len(factors)]
        with np.errstate(all="ignore"):
            trained = reference.train(
                self.model, start, buffers, self.clients[k], self.local, batches, factors, pull, drift
            )
        return trained if np.isfinite(trained.loss) and np.isfinite(trained.end).all() else None


# ---------------------------------------------------------------------------------------------------------------------
# Drift rules: the clients' side
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What client k made of the model that it received."""

    k: int
    start: Array
    trained: Trained

    @property
    def g(self) -> Array:
        return self.start - self.trained.end


class Drift(Protocol):
    def correction(self, work: int, k: int) -> tuple[float, Array | float]:
        """(pull, drift) of client k."""
        ...

    def heard(self, work: int, answers: Sequence[Answer]) -> None:
        """After every Work: the clients remember, then the server adds up."""
        ...


class Nothing:
    """FedAvg's clients."""

    def correction(self, work: int, k: int) -> tuple[float, Array | float]:
        return 0.0, 0.0

    def heard(self, work: int, answers: Sequence[Answer]) -> None:
        pass


@dataclass
class Proximal(Nothing):
    """FedProx, anchored at the model just received."""

    mu: float

    def correction(self, work: int, k: int) -> tuple[float, Array | float]:
        return self.mu, 0.0


@dataclass
class Both:
    """Two rules at once: what they add to the gradient adds up."""

    one: Drift
    other: Drift

    def correction(self, work: int, k: int) -> tuple[float, Array | float]:
        (pull, drift), (more_pull, more_drift) = self.one.correction(work, k), self.other.correction(work, k)
        return pull + more_pull, drift + more_drift

    def heard(self, work: int, answers: Sequence[Answer]) -> None:
        self.one.heard(work, answers)
        self.other.heard(work, answers)


@dataclass
class AdaBestClients:
    """- mu_k h_k with mu_k = mu nbar / n_k; h_k <- h_k / (t - t'_k) + g_k. Work w is t = w + 1."""

    problem: Problem
    mu: float
    h: dict[int, Array] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    reported: list[float] = field(default_factory=list)  # n_k of every report so far

    def correction(self, work: int, k: int) -> tuple[float, Array | float]:
        if k not in self.h:
            return 0.0, 0.0
        nbar = sum(self.reported) / len(self.reported)
        return 0.0, -self.mu * nbar / self.problem.sizes[k] * self.h[k]

    def heard(self, work: int, answers: Sequence[Answer]) -> None:
        t = work + 1
        for answer in answers:
            k = answer.k
            before = self.h[k] / (t - self.last[k]) if k in self.h else 0.0
            self.h[k], self.last[k] = before + answer.g, t
            self.reported.append(self.problem.sizes[k])


@dataclass
class FedDynClients:
    """alpha_k (x - start) - alpha_k h_k with alpha_k = mu mean(n) / n_k over all N; h_k <- h_k + g_k."""

    problem: Problem
    mu: float
    h: Array = field(init=False)  # [N, P]

    def __post_init__(self) -> None:
        self.h = np.zeros((len(self.problem.clients), len(self.problem.start)))

    def correction(self, work: int, k: int) -> tuple[float, Array | float]:
        alpha = float(self.mu * self.problem.sizes.mean() / self.problem.sizes[k])
        return alpha, -alpha * self.h[k]

    def heard(self, work: int, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.h[answer.k] += answer.g


@dataclass
class Scaffold:
    """+ c - c_k; c_k is the mean raw gradient of the last local run, and c takes 1/N of its change."""

    problem: Problem
    c: Array = field(init=False)
    c_k: Array = field(init=False)  # [N, P]

    def __post_init__(self) -> None:
        self.c = np.zeros_like(self.problem.start)
        self.c_k = np.zeros((len(self.problem.clients), len(self.c)))

    def correction(self, work: int, k: int) -> tuple[float, Array | float]:
        return 0.0, self.c - self.c_k[k]

    def heard(self, work: int, answers: Sequence[Answer]) -> None:
        change = np.zeros_like(self.c)
        for answer in answers:
            change += answer.trained.mean_gradient - self.c_k[answer.k]
            self.c_k[answer.k] = answer.trained.mean_gradient
        self.c = self.c + change / len(self.problem.clients)


@dataclass
class ScaffoldM(Scaffold):
    """c from the models alone: c <- (N - r)/N c + 1/N sum_k (start - end_k) / (sum of the rates)."""

    printed: bool = False  # with the paper's misprint, (N - 1)/N

    def heard(self, work: int, answers: Sequence[Answer]) -> None:
        everybody = len(self.problem.clients)
        rebuilt = np.zeros_like(self.c)
        for answer in answers:
            rates = self.problem.local.lr * self.problem.rate(work, answer.trained.steps)
            rebuilt += answer.g / rates.sum()
            self.c_k[answer.k] += -self.c + answer.g / rates.sum()
        kept = everybody - (1 if self.printed else len(answers))
        if answers:
            self.c = kept / everybody * self.c + rebuilt / everybody


# ---------------------------------------------------------------------------------------------------------------------
# Server rules
# ---------------------------------------------------------------------------------------------------------------------


class Server(Protocol):
    h: Array | float

    def step(self, theta: Array, rows: Array, weights: Array) -> tuple[Array, Array]:
        """(bar, the next theta) from rows [r, P] of start minus end."""
        ...


@dataclass
class Averaging:
    """theta <- bar."""

    h: Array | float = 0.0

    def step(self, theta: Array, rows: Array, weights: Array) -> tuple[Array, Array]:
        bar = theta - weights @ rows
        return bar, bar


@dataclass
class Mixing:
    """theta <- alpha bar + (1 - alpha) theta."""

    alpha: float
    h: Array | float = 0.0

    def step(self, theta: Array, rows: Array, weights: Array) -> tuple[Array, Array]:
        bar = theta - weights @ rows
        return bar, self.alpha * bar + (1 - self.alpha) * theta


@dataclass
class Stepping:
    """Any rule of `tests.reference` on the average row."""

    rule: reference.Server
    h: Array | float = 0.0

    def step(self, theta: Array, rows: Array, weights: Array) -> tuple[Array, Array]:
        g = weights @ rows
        return theta - g, self.rule.step(theta, g)


@dataclass
class AdaBestServer:
    """h = beta (bar' - bar), theta <- bar - h, where bar' is the bar before, at first `bar`."""

    beta: float
    bar: Array
    h: Array | float = 0.0

    def step(self, theta: Array, rows: Array, weights: Array) -> tuple[Array, Array]:
        bar = theta - weights @ rows
        self.h = self.beta * (self.bar - bar)
        self.bar = bar
        return bar, bar - self.h


@dataclass
class FedDynServer:
    """h <- h + 1/N sum_k g_k, theta <- bar - h; with equal weights the sum is r (theta - bar)."""

    clients: int
    h: Array | float = 0.0

    def step(self, theta: Array, rows: Array, weights: Array) -> tuple[Array, Array]:
        bar = theta - weights @ rows
        self.h = self.h + rows.sum(0) / self.clients
        return bar, bar - self.h


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """Where a run stands after a round: the cloud model, and the other three that may be deployed."""

    cloud: Array
    aggregate: Array
    latest_of_all: Array
    running_mean: Array
    h: Array | float
    buffers: Buffers
    works: int = 0  # played so far

    def deployed(self, where: str) -> Array:
        model: Array = getattr(self, where)
        return model


@dataclass
class Diary:
    """What the deployable models need to know of a run."""

    problem: Problem
    latest: Array = field(init=False)  # [N, P] each client's latest model, the start if never seen
    bars: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.latest = np.tile(self.problem.start, (len(self.problem.clients), 1))

    def heard(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.latest[answer.k] = answer.trained.end

    def point(self, theta: Array, server: Server, buffers: Buffers, works: int) -> Point:
        start = self.problem.start
        bar = self.bars[-1] if self.bars else start
        running = np.mean(self.bars, axis=0) if self.bars else start
        return Point(theta, bar, self.latest.mean(0), running, server.h, buffers, works)


def synchronous(problem: Problem, rounds: int, drift: Drift, server: Server) -> list[Point]:
    """Every client trains once per Work, however often it was drawn, and is weighed by how often. Equal weights."""
    theta, buffers, diary, points = problem.start, problem.buffers, Diary(problem), list[Point]()
    for w in range(rounds):
        counts, answers = list[int](), list[Answer]()
        for k, count in problem.distinct(w).items():
            trained = problem.train(w, k, theta, buffers, *drift.correction(w, k))
            if trained is not None:
                counts.append(count)
                answers.append(Answer(k, theta, trained))
        drift.heard(w, answers)
        diary.heard(answers)
        if answers:
            weights = np.array(counts) / sum(counts)
            bar, theta = server.step(theta, np.array([a.g for a in answers]), weights)
            diary.bars.append(bar)
            buffers = merge([a.trained.buffers for a in answers], weights)
        points.append(diary.point(theta, server, buffers, w + 1))
    return points


def radfed(
    problem: Problem,
    rounds: int,
    redistributions: int,
    drift: Drift,
    server: Server,
    away: Literal["even", "fewer"] = "even",
    weights: Literal["equal", "samples"] = "equal",
) -> list[Point]:
    """The i-th travelling model goes to the i-th client of each Work; averaged after `redistributions` of them."""
    theta, buffers, diary, points = problem.start, problem.buffers, Diary(problem), list[Point]()
    w = 0
    for _ in range(rounds):
        m = len(problem.cohort(w))
        models, carried = [theta] * m, [buffers] * m
        moved, samples = [0] * m, [0.0] * m
        travelling = list(range(m))
        for played in range(2 * redistributions):
            if played >= redistributions:
                if away == "fewer":
                    break
                travelling = [i for i in travelling if moved[i] < redistributions]
                if not travelling:
                    break
            cohort = list(problem.cohort(w))
            if away == "fewer":
                travelling = travelling[: len(cohort)]
                going = travelling
            elif played >= redistributions or len(cohort) < len(travelling):
                chosen = sorted(travelling, key=lambda i: (moved[i], i))[: len(cohort)]
                going = sorted(chosen)  # the least moved go; the lowest of them to the first client
            else:
                going = travelling
            answers, stuck = list[Answer](), list[int]()
            for place, i in enumerate(going):
                k = cohort[place]
                occurrence = cohort[:place].count(k)
                trained = problem.train(w, k, models[i], carried[i], *drift.correction(w, k), occurrence=occurrence)
                if trained is None:
                    stuck.append(i)
                    continue
                answers.append(Answer(k, models[i], trained))
                models[i], carried[i] = trained.end, trained.buffers
                moved[i] += 1
                samples[i] += problem.sizes[k]
            drift.heard(w, answers)
            diary.heard(answers)
            if away == "fewer" and len(stuck) < len(travelling):
                travelling = [i for i in travelling if i not in stuck]
            w += 1
        averaged = [i for i in (travelling if away == "fewer" else range(m)) if moved[i]]
        if averaged:
            mass = np.array([1.0 if weights == "equal" else samples[i] for i in averaged])
            mass = mass / mass.sum()
            bar, theta = server.step(theta, np.array([theta - models[i] for i in averaged]), mass)
            diary.bars.append(bar)
            buffers = merge([carried[i] for i in averaged], mass)
        points.append(diary.point(theta, server, buffers, w))
    return points


def merge(stacked: Sequence[Buffers], weights: Array) -> Buffers:
    """Float buffers: the weighted mean; the counter: the largest."""
    merged: dict[str, Array] = {}
    for name in stacked[0]:
        values = np.array([buffers[name] for buffers in stacked])
        counter = name == "num_batches_tracked"
        merged[name] = values.max(0) if counter else np.average(values, axis=0, weights=weights)
    return merged


# ---------------------------------------------------------------------------------------------------------------------
# FedAsync
# ---------------------------------------------------------------------------------------------------------------------


def poly(u: int, a: float = 0.5) -> float:
    return float((u + 1.0) ** -a)


def hinge(u: int, a: float = 10.0, b: float = 4.0) -> float:
    return 1.0 if u <= b else 1.0 / (a * (u - b) + 1.0)


@dataclass(frozen=True)
class Mixed:
    """Where an asynchronous run stands after one client."""

    params: Array
    buffers: Buffers
    staleness: int


def fedasync(
    problem: Problem,
    rounds: int,
    alpha: float,
    s: Callable[[int], float],
    max_staleness: int,
    drift: Drift | None = None,
) -> list[Mixed]:
    """Each Work is one client, which starts from a model drawn out of the last max_staleness + 1, newest first."""
    theta, buffers, states = problem.start, problem.buffers, list[Mixed]()
    drift = drift or Nothing()
    queue = [(theta, buffers)]
    for w in range(rounds):
        rng = np.random.default_rng(np.random.SeedSequence(problem.seed, spawn_key=(w, 0)))
        u = int(rng.integers(0, len(queue)))
        k, (old, old_buffers) = problem.cohort(w)[0], queue[u]
        trained = problem.train(w, k, old, old_buffers, *drift.correction(w, k))
        if trained is not None:
            drift.heard(w, [Answer(k, old, trained)])
            mixed = alpha * s(u)
            theta, buffers = (1 - mixed) * theta + mixed * trained.end, trained.buffers
            queue = [(theta, buffers), *queue][: max_staleness + 1]
        states.append(Mixed(theta, buffers, u))
    return states


# ---------------------------------------------------------------------------------------------------------------------
# Rates that decay with the phase of the run
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Pflug:
    """d grows when the sum of products of consecutive updates is negative, at the earliest `window` rounds after it
    grew the last time.
    """

    window: int
    d: int = 0
    total: float = 0.0
    r: int = 0
    grown: int = 0
    last: Array | None = None

    def see(self, u: Array) -> None:
        self.r += 1
        self.total += 0.0 if self.last is None else float(u @ self.last)
        self.last = u
        if self.r > self.window + self.grown and self.total < 0:
            self.d, self.total, self.grown = self.d + 1, 0.0, self.r


Decay = Callable[[int, int, int], Array]  # (d, rounds done, steps) -> a factor for every step that is taken


def two_dimensional(c: float) -> Decay:
    """(1 - c d)^j; from c d = 1 on a single step."""

    def factors(d: int, done: int, steps: int) -> Array:
        if c * d >= 1 - 1e-12:
            return np.ones(1)
        return np.array([(1 - c * d) ** j for j in range(steps)])

    return factors


def all_steps(factor: float) -> Decay:
    return lambda d, done, steps: np.full(steps, factor**d)


def additive(c: float, at_end: Literal["switch", "zero"]) -> Decay:
    """1 - c d for every step but the first."""

    def factors(d: int, done: int, steps: int) -> Array:
        if c * d >= 1 - 1e-12 and at_end == "switch":
            return np.ones(1)
        return np.array([1.0] + [max(0.0, 1 - c * d)] * (steps - 1))

    return factors


def first_only(after: int) -> Decay:
    """After so many rounds only the first step moves."""
    return lambda d, done, steps: np.array([1.0] + [1.0 if done < after else 0.0] * (steps - 1))


@dataclass(frozen=True)
class Decayed:
    """Where such a run stands after a round."""

    params: Array
    d: int
    pflug: float
    steps: int  # local steps of this round, over all clients


def decayed(
    problem: Problem,
    rounds: int,
    decay: Decay,
    window: int,
    weights: Literal["equal", "samples"] = "samples",
    server: Server | None = None,
) -> list[Decayed]:
    """u is the change of the cloud model, whatever the server made of the average."""
    theta, pflug, states = problem.start, Pflug(window), list[Decayed]()
    server = server or Averaging()
    for w in range(rounds):
        answers: list[Answer] = []
        for k in problem.cohort(w):
            planned = len(problem.local.batches(len(problem.clients[k][1]), problem.seed, w, k, 0))
            trained = problem.train(w, k, theta, {}, factors=decay(pflug.d, w, planned))
            if trained is not None:
                answers.append(Answer(k, theta, trained))
        if answers:
            mass = np.array([problem.sizes[a.k] if weights == "samples" else 1.0 for a in answers])
            _, after = server.step(theta, np.array([a.g for a in answers]), mass / mass.sum())
            pflug.see(after - theta)
            theta = after
        states.append(Decayed(theta, pflug.d, pflug.total, sum(a.trained.steps for a in answers)))
    return states
