"""The server's side of a round in float64 NumPy, written from algorithms.md; it shares no line with the library.

    answers -> update rules, in order -> weights -> aggregator -> rescaler -> server -> what the clients' rule observes

Letters are the papers'. `g_k` is start minus end, `rows` stacks them to [K, P], a group is a slice of the P columns.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
from scipy.stats import norm

from tests.reference import Array, Averaging, Buffers, Client, Local, Model, Rate, constant, train

Groups = Literal["model", "layer", "tensor"]
Numbers = dict[str, float | list[float]]


@dataclass(frozen=True)
class TwoLayers:
    """(x A' + a) . w + b with the loss 0.5 (.. - y)^2; the parameters are A [hidden, features], a, w, b.

    Four tensors in two layers, so that every way of grouping is another one.
    """

    features: int
    hidden: int

    @property
    def sizes(self) -> list[int]:
        return [self.hidden * self.features, self.hidden, self.hidden, 1]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def groups(self, by: Groups) -> list[slice]:
        ends = np.cumsum(self.sizes).tolist()
        chosen = {"model": ends[-1:], "layer": ends[1::2], "tensor": ends}[by]
        return [slice(begin, end) for begin, end in zip([0, *chosen[:-1]], chosen, strict=True)]

    def forward_backward(self, params: Array, buffers: Buffers, x: Array, y: Array) -> tuple[Array, Array, Buffers]:
        first, shift, w, b = np.split(params, np.cumsum(self.sizes)[:-1])
        matrix = first.reshape(self.hidden, self.features)
        u = x @ matrix.T + shift
        residual = u @ w + b - y
        d_output = residual / len(x)
        d_u = np.outer(d_output, w)
        gradient = np.concatenate([(d_u.T @ x).ravel(), d_u.sum(0), u.T @ d_output, [d_output.sum()]])
        return 0.5 * residual**2, gradient, buffers


@dataclass(frozen=True)
class Answers:
    """What came back, one line per client (or per travelling model, which no client owns)."""

    clients: list[int]
    rows: Array  # [K, P]
    samples: Array  # [K]
    norms: Array  # [K] FedNova's a_k
    owners: list[int]  # whose memory a server rule keeps: the client's, or the slot's
    change: Array  # [K, P] what SCAFFOLD's clients send up; zeros elsewhere
    counts: Array  # [K] how often each was drawn, where clients remember

    def only(self, keep: Sequence[int]) -> "Answers":
        chosen = list(keep)
        return Answers(
            [self.clients[k] for k in chosen],
            self.rows[chosen],
            self.samples[chosen],
            self.norms[chosen],
            [self.owners[k] for k in chosen],
            self.change[chosen],
            self.counts[chosen],
        )


def plain_answers(rows: Array) -> Answers:
    """Rows without a story: client k sent the k-th."""
    names, ones = list(range(len(rows))), np.ones(len(rows))
    return Answers(names, rows, ones, ones, names, np.zeros_like(rows), ones)


# ---------------------------------------------------------------------------------------------------------------------
# Clipping, 2.13 DGT and 3.5 Krum
# ---------------------------------------------------------------------------------------------------------------------


class UpdateRule(Protocol):
    def apply(self, answers: Answers, weights: Array) -> Answers: ...

    def report(self) -> Numbers: ...


@dataclass
class Clip:
    norm: float
    clipped: list[bool] = field(default_factory=list)

    def apply(self, answers: Answers, weights: Array) -> Answers:
        lengths = [math.sqrt(float(row @ row)) for row in answers.rows]
        self.clipped = [length > self.norm for length in lengths]
        short = [
            row * (self.norm / length) if long else row
            for row, length, long in zip(answers.rows, lengths, self.clipped, strict=True)
        ]
        return replace(answers, rows=np.array(short))

    def report(self) -> Numbers:
        return {"clip.clipped": float(np.mean(self.clipped))}


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def tailor(g: Array, pop: Array, baseline: float, max_scale: float | None = None) -> Array:
    """Eq. 7 as corrected: g turned within the plane of g and POP until its cosine with POP is the baseline."""
    phi = min(1.0, max(-1.0, cosine(g, pop)))
    if phi >= baseline:
        return g
    root, target = math.sqrt(1 - phi**2), math.sqrt(1 - baseline**2)
    a2 = np.linalg.norm(g) * (baseline * root - phi * target) / (np.linalg.norm(pop) * target)
    out: Array = g + a2 * pop
    if max_scale is not None and np.linalg.norm(out) > max_scale * np.linalg.norm(g):
        out = out * (max_scale * np.linalg.norm(g) / np.linalg.norm(out))
    return out


@dataclass
class Dgt:
    """Algorithm 2, all clients from the original vectors."""

    groups: Sequence[slice]
    alpha: float = 0.99
    max_scale: float | None = None
    baseline: dict[tuple[int, int], float] = field(default_factory=dict)  # PhiT by owner and group; 0 at the start
    calibrated: list[bool] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)

    def apply(self, answers: Answers, weights: Array) -> Answers:
        rows, out = answers.rows, answers.rows.copy()
        self.calibrated, self.cosines = [], []
        for p, group in enumerate(self.groups):
            for k, owner in enumerate(answers.owners):
                g = rows[k, group]
                pop = sum((weights[j] * rows[j, group] for j in range(len(rows)) if j != k), np.zeros_like(g))
                if not np.any(g) or not np.any(pop):
                    continue
                phi, baseline = cosine(g, pop), self.baseline.get((owner, p), 0.0)
                target = min(baseline, 1 - 1e-6)
                out[k, group] = tailor(g, pop, target, self.max_scale)
                self.baseline[owner, p] = self.alpha * baseline + (1 - self.alpha) * phi
                self.calibrated.append(phi < target)
                self.cosines.append(phi)
        return replace(answers, rows=out)

    def report(self) -> Numbers:
        if not self.cosines:
            return {}
        return {"dgt.calibrated": float(np.mean(self.calibrated)), "dgt.cosine": float(np.mean(self.cosines))}


def krum_scores(rows: Array, byzantine: int) -> Array:
    """For each row the sum of the squared distances to its r - f - 2 nearest others."""
    r = len(rows)
    scores = np.zeros(r)
    for i in range(r):
        squares = sorted(float(np.sum((rows[i] - rows[j]) ** 2)) for j in range(r) if j != i)
        scores[i] = sum(squares[: r - byzantine - 2])
    return scores


@dataclass
class Krum:
    byzantine: int = 1
    keep: int | None = None
    kept: int = 0

    def apply(self, answers: Answers, weights: Array) -> Answers:
        r = len(answers.rows)
        self.kept = r
        if r < 2 * self.byzantine + 3:
            return answers
        self.kept = min(r, r - self.byzantine if self.keep is None else self.keep)
        order = np.argsort(krum_scores(answers.rows, self.byzantine), kind="stable")
        return answers.only(sorted(order[: self.kept].tolist()))

    def report(self) -> Numbers:
        return {"krum.kept": float(self.kept)}


# ---------------------------------------------------------------------------------------------------------------------
# Aggregators: the rows that count, their weights, and the average
# ---------------------------------------------------------------------------------------------------------------------


class Aggregator(Protocol):
    def combine(self, answers: Answers, weights: Array) -> tuple[Array, Array, Array]: ...


def weighted(rows: Array, weights: Array) -> Array:
    return sum((w * row for w, row in zip(weights, rows, strict=True)), np.zeros(rows.shape[1]))


class Mean:
    def combine(self, answers: Answers, weights: Array) -> tuple[Array, Array, Array]:
        return answers.rows, weights, weighted(answers.rows, weights)


def step_norm(local: Local, factors: Array, pull: float) -> float:
    """a_k: how far a number goes whose gradient is 1 everywhere, through the same rates, momentum and pull."""
    x, buffer = 0.0, 0.0
    for factor in factors:
        gradient = 1.0 + pull * x
        buffer = local.momentum * buffer + gradient
        x -= local.lr * float(factor) * (gradient + local.momentum * buffer if local.nesterov else buffer)
    return -x


class FedNova:
    """2.9: theta <- theta - tau_eff sum_k p_k G_k / a_k with tau_eff = sum_k p_k a_k."""

    def combine(self, answers: Answers, weights: Array) -> tuple[Array, Array, Array]:
        tau_eff = float(weights @ answers.norms)
        rows = answers.rows * (tau_eff / answers.norms)[:, None]
        return rows, weights, weighted(rows, weights)


@dataclass(frozen=True)
class Ida:
    """2.10: weights proportional to one over the distance to the plain mean."""

    norm: int = 1

    def combine(self, answers: Answers, weights: Array) -> tuple[Array, Array, Array]:
        rows = answers.rows
        distance = np.linalg.norm(rows - rows.mean(0), ord=self.norm, axis=1)
        inverse = np.ones(len(rows)) if not distance.any() else 1 / distance
        alpha = inverse / inverse.sum()
        return rows, alpha, weighted(rows, alpha)


class Median:
    def combine(self, answers: Answers, weights: Array) -> tuple[Array, Array, Array]:
        rows = answers.rows
        return rows, np.full(len(rows), 1 / len(rows)), np.median(rows, axis=0)


@dataclass(frozen=True)
class TrimmedMean:
    cut: Callable[[int], int]  # how many of r rows go on either side

    def combine(self, answers: Answers, weights: Array) -> tuple[Array, Array, Array]:
        rows, r = answers.rows, len(answers.rows)
        middle = np.sort(rows, axis=0)[self.cut(r) : r - self.cut(r)]
        return rows, np.full(r, 1 / r), middle.mean(0)


# ---------------------------------------------------------------------------------------------------------------------
# 2.14 FedGLAD
# ---------------------------------------------------------------------------------------------------------------------


def gsi(rows: Array, weights: Array) -> float:
    """Eq. 9 with weights."""
    return math.sqrt(float(weights @ (rows**2).sum(1)) / float(np.sum(weighted(rows, weights) ** 2)))


@dataclass
class FedGlad:
    """Algorithm 1, lines 9 to 17. `t` counts the rounds that were rescaled."""

    groups: Sequence[slice]
    gamma: float = 0.02
    beta: float = 0.9
    t: int = 0
    b: dict[int, float] = field(default_factory=dict)  # B_P by group
    seen: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def rescale(self, rows: Array, weights: Array, aggregate: Array) -> Array:
        self.seen, self.scales = [], []
        scaled = aggregate.copy()
        if len(rows) < 2:
            return scaled
        for p, group in enumerate(self.groups):
            part = rows[:, group]
            if not part.any():
                found = 1.0
            elif not weighted(part, weights).any():
                self.seen.append(math.inf)
                self.scales.append(1.0)
                continue
            else:
                found = gsi(part, weights)
            b = self.b.setdefault(p, found)
            s = found / b
            if math.isfinite(self.gamma):
                s = min(max(s, 1 - self.gamma * self.t), 1 + self.gamma * self.t)
            self.b[p] = self.beta * b + (1 - self.beta) * found
            scaled[group] = s * aggregate[group]
            self.seen.append(found)
            self.scales.append(s)
        self.t += 1
        return scaled

    def report(self) -> Numbers:
        return {"fedglad.gsi": self.seen, "fedglad.scale": self.scales} if self.seen else {}


# ---------------------------------------------------------------------------------------------------------------------
# Servers: from the average and the rescaled average
# ---------------------------------------------------------------------------------------------------------------------


class Server(Protocol):
    def step(self, theta: Array, g: Array, scaled: Array, share: float) -> Array:
        """`share` is r/N."""
        ...


class PlainServer(Protocol):
    def step(self, theta: Array, g: Array) -> Array: ...


@dataclass
class Descent:
    """A server that knows one average only: the rescaled one."""

    inner: PlainServer = field(default_factory=Averaging)

    def step(self, theta: Array, g: Array, scaled: Array, share: float) -> Array:
        return self.inner.step(theta, scaled)


@dataclass
class TwoMoments:
    """2.8 under 2.14: m from the rescaled average, v from the plain one."""

    second: Literal["adam", "yogi", "adagrad"] = "adam"
    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    m: Array | float = 0.0
    v: Array | float | None = None

    def step(self, theta: Array, g: Array, scaled: Array, share: float) -> Array:
        v: Array | float = self.tau**2 if self.v is None else self.v
        self.m = self.beta1 * self.m - (1 - self.beta1) * scaled
        if self.second == "adam":
            self.v = self.beta2 * v + (1 - self.beta2) * g**2
        elif self.second == "yogi":
            self.v = v - (1 - self.beta2) * g**2 * np.sign(v - g**2)
        else:
            self.v = v + g**2
        return theta + self.lr * self.m / (np.sqrt(self.v) + self.tau)


@dataclass
class AdaBestServer:
    """2.6: h = beta (bar_before - bar), theta = bar - h; bar starts at theta_0. Section 11.6: bar = theta - s g."""

    start: Array
    beta: float
    bar: Array | None = None

    def step(self, theta: Array, g: Array, scaled: Array, share: float) -> Array:
        before = self.start if self.bar is None else self.bar
        self.bar = theta - scaled
        return self.bar - self.beta * (before - self.bar)


@dataclass
class FedDynServer:
    """2.5: h <- h + (r/N)(theta - bar), theta = bar - h."""

    h: Array | float = 0.0

    def step(self, theta: Array, g: Array, scaled: Array, share: float) -> Array:
        self.h = self.h + share * scaled
        return theta - scaled - self.h


# ---------------------------------------------------------------------------------------------------------------------
# The clients' side: what is added to the local gradient, what is remembered
# ---------------------------------------------------------------------------------------------------------------------


class ClientRule(Protocol):
    def correction(self, k: int, samples: int) -> tuple[float, Array | float]:
        """pull and drift"""
        ...

    def remember(self, k: int, w: int, samples: int, g: Array, mean_gradient: Array) -> Array | float:
        """After Work w; returns what is sent up."""
        ...

    def heard(self, sizes: Sequence[int]) -> None: ...

    def observe(self, averaged: Answers) -> None: ...


@dataclass
class Pull:
    """FedProx; 0: FedAvg."""

    mu: float = 0.0

    def correction(self, k: int, samples: int) -> tuple[float, Array | float]:
        return self.mu, 0.0

    def remember(self, k: int, w: int, samples: int, g: Array, mean_gradient: Array) -> Array | float:
        return 0.0

    def heard(self, sizes: Sequence[int]) -> None:
        pass

    def observe(self, averaged: Answers) -> None:
        pass


@dataclass
class AdaBestClients(Pull):
    """2.6: drift -mu_k h_k with mu_k = mu nbar/n_k; h_k <- h_k/(t - t'_k) + g_k."""

    h: dict[int, Array] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    reports: list[int] = field(default_factory=list)

    def correction(self, k: int, samples: int) -> tuple[float, Array | float]:
        if k not in self.h:
            return 0.0, 0.0
        return 0.0, -self.mu * float(np.mean(self.reports)) / samples * self.h[k]

    def remember(self, k: int, w: int, samples: int, g: Array, mean_gradient: Array) -> Array | float:
        self.h[k] = g if k not in self.h else self.h[k] / (w - self.last[k]) + g
        self.last[k] = w
        return 0.0

    def heard(self, sizes: Sequence[int]) -> None:
        self.reports += list(sizes)


@dataclass
class FedDynClients(Pull):
    """2.5: pull alpha_k and drift -alpha_k h_k with alpha_k = alpha mean(n)/n_k; h_k <- h_k + g_k."""

    mean_size: float = 1.0
    h: dict[int, Array] = field(default_factory=dict)

    def correction(self, k: int, samples: int) -> tuple[float, Array | float]:
        alpha = self.mu * self.mean_size / samples
        return alpha, -alpha * self.h.get(k, np.zeros(1))

    def remember(self, k: int, w: int, samples: int, g: Array, mean_gradient: Array) -> Array | float:
        self.h[k] = self.h.get(k, np.zeros_like(g)) + g
        return 0.0


@dataclass
class Scaffold(Pull):
    """2.3: drift c - c_k; c_k becomes the mean raw gradient. Section 11.3: only what was averaged moves c."""

    population: int = 0
    c: Array | float = 0.0
    c_k: dict[int, Array] = field(default_factory=dict)

    def correction(self, k: int, samples: int) -> tuple[float, Array | float]:
        return 0.0, self.c - self.c_k.get(k, np.zeros(1))

    def remember(self, k: int, w: int, samples: int, g: Array, mean_gradient: Array) -> Array | float:
        change: Array = mean_gradient - self.c_k.get(k, np.zeros(1))
        self.c_k[k] = mean_gradient
        return change

    def observe(self, averaged: Answers) -> None:
        self.c = self.c + averaged.change.sum(0) / self.population


# ---------------------------------------------------------------------------------------------------------------------
# Hostile clients
# ---------------------------------------------------------------------------------------------------------------------


def hostile_set(seed: int, population: int, number: int) -> set[int]:
    """Rebuilt from the documented key."""
    order = np.random.default_rng(np.random.SeedSequence((seed, 2))).permutation(population)
    return {int(k) for k in order[:number]}


def little_is_enough(r: int, f: int) -> float:
    """z_max of Baruch et al.: m supporters make a majority with the f attackers; not below 0."""
    m = max(math.floor(r / 2 + 1) - f, 1)
    return max(0.0, float(norm.ppf((r - f - m) / (r - f))))


@dataclass(frozen=True)
class Hostile:
    """What hostile clients make of their updates in one Work."""

    kind: Literal["sign-flip", "scale", "noise", "alie"]
    clients: set[int]
    s: float | None = None
    seed: int = 0

    def poison(self, rows: Array, cohort: Sequence[int], work: int) -> Array:
        bad = [place for place, k in enumerate(cohort) if k in self.clients]
        good = [place for place, k in enumerate(cohort) if k not in self.clients]
        out = rows.copy()
        for place in bad:
            g = rows[place]
            if self.kind == "sign-flip":
                out[place] = -(self.s or 1.0) * g
            elif self.kind == "scale":
                out[place] = (self.s or 10.0) * g
            elif self.kind == "noise":
                key = (work, cohort[place], list(cohort[:place]).count(cohort[place]), 3)
                n = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key)).standard_normal(len(g))
                out[place] = (self.s or 10.0) * math.sqrt(float(g @ g)) * n / math.sqrt(float(n @ n))
            elif len(good) >= 2:
                honest = rows[good]
                mean = honest.sum(0) / len(good)
                std = np.sqrt(((honest - mean) ** 2).sum(0) / len(good))
                out[place] = mean - (self.s or little_is_enough(len(rows), len(bad))) * std
        return out


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Recipe:
    """A union of methods, in the order of section 1.3. It holds the state of one run: make a fresh one for each."""

    clients: ClientRule = field(default_factory=Pull)
    updates: Sequence[UpdateRule] = ()
    aggregator: Aggregator = field(default_factory=Mean)
    rescaler: FedGlad | None = None
    server: Server = field(default_factory=Descent)
    weights: Literal["samples", "equal"] = "samples"
    rate: Rate = constant
    redistributions: int | None = None  # RADFed's S
    hostile: Hostile | None = None
    once: bool = False  # clients remember: who stands twice in a cohort trains once and counts twice

    def share(self, answers: Answers) -> Array:
        mass = answers.counts * (answers.samples if self.weights == "samples" else 1.0)
        share: Array = mass / mass.sum()
        return share


@dataclass(frozen=True)
class Seen:
    """Where a run stands after a round, and what was averaged in it."""

    params: Array
    clients: list[int]
    rows: Array
    weights: Array
    numbers: Numbers


def federate(
    model: Model,
    start: Array,
    clients: Sequence[Client],
    cohorts: Sequence[Sequence[int]],
    rounds: int,
    local: Local,
    recipe: Recipe,
    *,
    seed: int = 0,
) -> list[Seen]:
    """Work w takes the w-th cohort of the list, which repeats."""
    theta, work, seen = start, 0, list[Seen]()
    for _ in range(rounds):
        works = recipe.redistributions or 1
        starts: Array | None = None
        for s in range(works):
            cohort = cohorts[(work + s) % len(cohorts)]
            models = np.tile(theta, (len(cohort), 1)) if starts is None else starts
            answers = _ask(model, models, clients, cohort, work + s, local, recipe, seed)
            starts = models[: len(answers.rows)] - answers.rows  # in a first Work all start from theta
        work += works
        assert starts is not None
        if recipe.redistributions is not None:
            answers = replace(answers, rows=theta - starts, owners=list(range(len(starts))))

        for rule in recipe.updates:
            answers = rule.apply(answers, recipe.share(answers))
        rows, weights, g = recipe.aggregator.combine(answers, recipe.share(answers))
        scaled = g if recipe.rescaler is None else recipe.rescaler.rescale(rows, weights, g)
        theta = recipe.server.step(theta, g, scaled, float(answers.counts.sum()) / len(clients))
        recipe.clients.observe(answers)
        numbers: Numbers = {}
        for rule in recipe.updates:
            numbers |= rule.report()
        if recipe.rescaler is not None:
            numbers |= recipe.rescaler.report()
        seen.append(Seen(theta, answers.clients, rows, weights, numbers))
    return seen


def _ask(
    model: Model,
    starts: Array,
    clients: Sequence[Client],
    cohort: Sequence[int],
    work: int,
    local: Local,
    recipe: Recipe,
    seed: int,
) -> Answers:
    """One Work: every client trains from its start with the batches of its key."""
    rows, norms, change = [], [], []
    counts = np.ones(len(cohort))
    if recipe.once:
        drawn, cohort = list(cohort), list(dict.fromkeys(cohort))
        counts = np.array([drawn.count(k) for k in cohort], dtype=np.float64)
    sizes = [len(clients[k][1]) for k in cohort]
    for place, k in enumerate(cohort):
        pull, drift = recipe.clients.correction(k, sizes[place])
        batches = local.batches(sizes[place], seed, work, k, list(cohort[:place]).count(k))
        factors = recipe.rate(work, len(batches))
        trained = train(model, starts[place], {}, clients[k], local, batches, factors, pull, drift)
        g = starts[place] - trained.end
        sent = recipe.clients.remember(k, work, sizes[place], g, trained.mean_gradient)
        rows.append(g)
        norms.append(step_norm(local, factors, pull))
        change.append(np.zeros_like(g) + sent)
    recipe.clients.heard(sizes)
    names, samples = list(cohort), np.array(sizes, dtype=np.float64)
    received = np.array(rows) if recipe.hostile is None else recipe.hostile.poison(np.array(rows), cohort, work)
    return Answers(names, received, samples, np.array(norms), names, np.array(change), counts)


def final_score(model: Model, params: Array, client: Client, batch_size: int | None) -> float:
    """RADFed-i: the mean over the minibatches, in stored order, of the squared norm of their gradients."""
    x, y = client
    length = batch_size or len(y)
    scores = []
    for i in range(0, len(y), length):
        _, gradient, _ = model.forward_backward(params, {}, x[i : i + length], y[i : i + length])
        scores.append(float(gradient @ gradient))
    return float(np.mean(scores))


def urns(sizes: Sequence[int], r: int) -> Array:
    """Fraboni's algorithm 1: [r, N] probability of client k in urn j; the largest clients are poured first."""
    p = np.array(sizes, dtype=np.float64) / sum(sizes)
    table = np.zeros((r, len(sizes)))
    level = 0.0
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        mass = r * p[k]
        while mass > 1e-12:
            j = min(int(level + 1e-9), r - 1)
            poured = mass if j == r - 1 else min(mass, j + 1 - level)
            table[j, k] += poured
            level += poured
            mass -= poured
    return table
