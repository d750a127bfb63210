"""Federated regression in float64 NumPy, written from the equations; it shares no line with the library it checks.

The sign is that of the papers' pseudo-gradient: g_k = start - end, and the server descends the average of the g_k.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Buffers = Mapping[str, Array]
Client = tuple[Array, Array]  # x [n, d], y [n]
Rate = Callable[[int, int], Array]  # (Work t, steps T) -> the T factors on the local learning rate


def make_clients(sizes: Sequence[int], features: int, seed: int = 0) -> list[Client]:
    """Clients that disagree: each has its own true weights and its own shift of x."""
    rng = np.random.default_rng(seed)
    clients: list[Client] = []
    for size in sizes:
        x = rng.normal(size=(size, features)) + rng.normal(size=features)
        y = x @ rng.normal(size=features) + rng.normal() + 0.1 * rng.normal(size=size)
        # Values that float32 holds exactly, so that one reference serves both precisions.
        clients.append((x.astype(np.float32).astype(np.float64), y.astype(np.float32).astype(np.float64)))
    return clients


# ---------------------------------------------------------------------------------------------------------------------
# Models: losses [n], the gradient of their mean [P], and the buffers after the forward pass.
# ---------------------------------------------------------------------------------------------------------------------


class Model(Protocol):
    def forward_backward(self, params: Array, buffers: Buffers, x: Array, y: Array) -> tuple[Array, Array, Buffers]: ...


class Linear:
    """x.w + b with the loss 0.5 (x.w + b - y)^2; the parameters are w, then b."""

    def forward_backward(self, params: Array, buffers: Buffers, x: Array, y: Array) -> tuple[Array, Array, Buffers]:
        residual = x @ params[:-1] + params[-1] - y
        gradient = np.append(x.T @ residual, residual.sum()) / len(x)
        return 0.5 * residual**2, gradient, buffers


@dataclass(frozen=True)
class NormalisedLinear:
    """Batch norm before a linear layer, and a linear layer without bias before it if `hidden` is not 0.

    Parameters: A [hidden, d] if there is one, then gamma, beta, w, b. The statistics of the batch are functions of A,
    and the gradient goes through them.
    """

    features: int
    hidden: int = 0
    momentum: float = 0.1
    eps: float = 1e-5

    @property
    def width(self) -> int:
        return self.hidden or self.features

    def split(self, params: Array) -> tuple[Array, Array, Array, Array, float]:
        before = self.hidden * self.features
        gamma, beta, w = params[before:-1].reshape(3, self.width)
        return params[:before].reshape(self.hidden, self.features), gamma, beta, w, float(params[-1])

    def forward_backward(self, params: Array, buffers: Buffers, x: Array, y: Array) -> tuple[Array, Array, Buffers]:
        first, gamma, beta, w, b = self.split(params)
        n = len(x)
        u = x @ first.T if self.hidden else x
        mean, variance = u.mean(0), u.var(0)
        deviation = np.sqrt(variance + self.eps)
        normal = (u - mean) / deviation
        z = gamma * normal + beta
        residual = z @ w + b - y

        d_output = residual / n
        d_z = np.outer(d_output, w)
        d_normal = d_z * gamma
        # du/dA passes through u itself, through its mean and through its variance.
        d_u = (d_normal - d_normal.mean(0) - normal * (d_normal * normal).mean(0)) / deviation
        gradient = np.concatenate(
            [
                (d_u.T @ x).ravel() if self.hidden else np.empty(0),
                (d_z * normal).sum(0),
                d_z.sum(0),
                z.T @ d_output,
                [d_output.sum()],
            ]
        )
        keep = 1 - self.momentum
        after = {
            "running_mean": keep * buffers["running_mean"] + self.momentum * mean,
            "running_var": keep * buffers["running_var"] + self.momentum * variance * n / (n - 1),
            "num_batches_tracked": buffers["num_batches_tracked"] + 1,
        }
        return 0.5 * residual**2, gradient, after

    def start_buffers(self) -> Buffers:
        return {
            "running_mean": np.zeros(self.width),
            "running_var": np.ones(self.width),
            "num_batches_tracked": np.zeros(()),
        }


# ---------------------------------------------------------------------------------------------------------------------
# Local training
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = None
    lr: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    clip_norm: float | None = None
    last_batch: Literal["keep", "drop", "bootstrap"] = "keep"
    shuffle: bool = True

    def batches(self, samples: int, seed: int, work: int, client: int, occurrence: int) -> list[NDArray[np.int64]]:
        """Rebuilt from the documented key: a permutation per epoch, or the samples in their order, cut into batches."""
        if self.batch_size is None:
            return [np.arange(samples)] * (self.steps or self.epochs)
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(work, client, occurrence)))
        batches: list[NDArray[np.int64]] = []
        epoch = 0
        while len(batches) < self.steps if self.steps is not None else epoch < self.epochs:
            order = rng.permutation(samples) if self.shuffle else np.arange(samples)
            cut = [order[i : i + self.batch_size] for i in range(0, samples, self.batch_size)]
            missing = self.batch_size - len(cut[-1])
            if missing and self.last_batch == "drop":
                cut.pop()
            elif missing and self.last_batch == "bootstrap":
                cut[-1] = np.concatenate([cut[-1], rng.integers(0, samples, missing)])
            batches += cut
            epoch += 1
        return batches[: self.steps]


@dataclass
class Optimizer:
    """PyTorch's SGD, Adam and AdamW with their default constants."""

    local: Local
    step: int = 0
    momentum: Array | None = None
    first: Array | float = 0.0
    second: Array | float = 0.0

    def move(self, x: Array, gradient: Array, rate: float) -> Array:
        local = self.local
        self.step += 1
        if local.optimizer == "adamw":
            x = (1 - rate * local.weight_decay) * x
        else:
            gradient = gradient + local.weight_decay * x
        if local.optimizer != "sgd":
            self.first = 0.9 * self.first + 0.1 * gradient
            self.second = 0.999 * self.second + 0.001 * gradient**2
            first = self.first / (1 - 0.9**self.step)
            second = self.second / (1 - 0.999**self.step)
            return x - rate * first / (np.sqrt(second) + 1e-8)
        self.momentum = gradient if self.momentum is None else local.momentum * self.momentum + gradient
        if local.nesterov:
            return x - rate * (gradient + local.momentum * self.momentum)
        return x - rate * self.momentum


@dataclass(frozen=True)
class Trained:
    """What a client has after its local run."""

    end: Array
    buffers: Buffers
    loss: float  # mean over the samples seen
    mean_gradient: Array  # of the raw gradients along the path
    steps: int


def train(
    model: Model,
    start: Array,
    buffers: Buffers,
    client: Client,
    local: Local,
    batches: Sequence[NDArray[np.int64]],
    factors: Array,
    pull: float = 0.0,
    drift: Array | float = 0.0,
) -> Trained:
    """Raw gradient -> + pull (x - start) + drift -> clip -> weight decay -> momentum or Adam -> rate."""
    x, optimizer = start, Optimizer(local)
    seen: list[Array] = []
    gradients: list[Array] = []
    for batch, factor in zip(batches, factors, strict=True):
        losses, gradient, buffers = model.forward_backward(x, buffers, client[0][batch], client[1][batch])
        seen.append(losses)
        gradients.append(gradient)
        used = gradient + pull * (x - start) + drift
        if local.clip_norm is not None:
            used = used * min(1.0, local.clip_norm / float(np.linalg.norm(used)))
        x = optimizer.move(x, used, local.lr * float(factor))
    return Trained(x, buffers, float(np.concatenate(seen).mean()), np.mean(gradients, axis=0), len(gradients))


def constant(work: int, steps: int) -> Array:
    return np.ones(steps)


def exponential(decay: float) -> Rate:
    """decay^t in Work t, the first one undecayed."""
    return lambda work, steps: np.full(steps, decay**work)


def linear(warmup: float) -> Rate:
    """j/w for the first w = ceil(warmup T) steps of a local run (at most T - 1), then (T - j)/(T - w)."""

    def factors(work: int, steps: int) -> Array:
        w = min(math.ceil(warmup * steps), steps - 1)
        return np.array([j / w if j < w else (steps - j) / (steps - w) for j in range(steps)])

    return factors


# ---------------------------------------------------------------------------------------------------------------------
# The server's rules
# ---------------------------------------------------------------------------------------------------------------------


class Server(Protocol):
    def step(self, theta: Array, g: Array) -> Array: ...


@dataclass
class Averaging:
    """FedAvg: theta <- theta - lr g."""

    lr: float = 1.0

    def step(self, theta: Array, g: Array) -> Array:
        return theta - self.lr * g


@dataclass
class Momentum:
    """FedAvgM: m <- beta m + g; theta <- theta - lr m."""

    lr: float = 1.0
    beta: float = 0.9
    m: Array | float = 0.0

    def step(self, theta: Array, g: Array) -> Array:
        self.m = self.beta * self.m + g
        return theta - self.lr * self.m


@dataclass
class Adaptive:
    """FedAdam, FedYogi and FedAdagrad in the letters of Reddi et al.: Delta = -g, and theta moves along it."""

    second: Literal["adam", "yogi", "adagrad"]
    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    bias_correction: bool = False
    v_init: float | None = None
    steps: int = 0
    m: Array | float = 0.0
    v: Array | float = field(init=False)

    def __post_init__(self) -> None:
        self.v = self.tau**2 if self.v_init is None else self.v_init

    def step(self, theta: Array, g: Array) -> Array:
        self.steps += 1
        delta = -g
        self.m = self.beta1 * self.m + (1 - self.beta1) * delta
        if self.second == "adam":
            self.v = self.beta2 * self.v + (1 - self.beta2) * delta**2
        elif self.second == "yogi":
            self.v = self.v - (1 - self.beta2) * delta**2 * np.sign(self.v - delta**2)
        else:
            self.v = self.v + delta**2
        lr = self.lr
        if self.bias_correction:
            beta2 = 0.0 if self.second == "adagrad" else self.beta2
            lr *= math.sqrt(1 - beta2**self.steps) / (1 - self.beta1**self.steps)
        return theta + lr * self.m / (np.sqrt(self.v) + self.tau)


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A method, as far as this reference knows methods. `server` makes a fresh one for every run."""

    server: Callable[[], Server] = Averaging
    weights: Literal["samples", "equal"] = "samples"
    rate: Rate = constant
    pull: float = 0.0


@dataclass(frozen=True)
class State:
    """Where a run stands after a round."""

    params: Array
    buffers: Buffers
    train_loss: float  # mean over the clients' samples of the losses met in local training


def federate(
    model: Model,
    start: Array,
    clients: Sequence[Client],
    cohorts: Sequence[Sequence[int]],
    rounds: int,
    local: Local,
    rule: Rule,
    *,
    buffers: Buffers | None = None,
    seed: int = 0,
) -> list[State]:
    """The state after each round; round t takes the t-th cohort of the list, which repeats."""
    theta, server, states = start, rule.server(), list[State]()
    buffers = {} if buffers is None else buffers
    for t in range(rounds):
        cohort = cohorts[t % len(cohorts)]
        answers: list[Trained] = []
        for place, k in enumerate(cohort):
            batches = local.batches(len(clients[k][1]), seed, t, k, cohort[:place].count(k))
            factors = rule.rate(t, len(batches))
            answers.append(train(model, theta, buffers, clients[k], local, batches, factors, rule.pull))
        sizes = np.array([len(clients[k][1]) for k in cohort], dtype=np.float64)
        weights = sizes if rule.weights == "samples" else np.ones(len(cohort))
        weights = weights / weights.sum()
        aggregate = sum((w * (theta - a.end) for w, a in zip(weights, answers, strict=True)), np.zeros_like(theta))
        theta = server.step(theta, aggregate)
        buffers = _merge([a.buffers for a in answers], weights)
        train_loss = float(np.average([a.loss for a in answers], weights=sizes))
        states.append(State(theta, buffers, train_loss))
    return states


def _merge(stacked: Sequence[Buffers], weights: Array) -> Buffers:
    """Float buffers: the weighted mean, whatever the server's rule is; the counter: the largest."""
    merged: dict[str, Array] = {}
    for name in stacked[0]:
        values = np.array([buffers[name] for buffers in stacked])
        counter = name == "num_batches_tracked"
        merged[name] = values.max(0) if counter else np.average(values, axis=0, weights=weights)
    return merged


@dataclass(frozen=True)
class Controlled:
    """Where a SCAFFOLD run stands after a round."""

    params: Array
    c: Array  # [P] the server's
    c_k: Array  # [N, P] the clients'


def scaffold(
    model: Model,
    start: Array,
    clients: Sequence[Client],
    cohorts: Sequence[Sequence[int]],
    rounds: int,
    local: Local,
    *,
    seed: int = 0,
) -> list[Controlled]:
    """SCAFFOLD, option II: c_k <- c_k - c + (theta - x_K)/(K lr), which needs plain local SGD at a constant rate."""
    theta, c = start, np.zeros_like(start)
    c_k = np.zeros((len(clients), len(start)))
    states: list[Controlled] = []
    for t in range(rounds):
        cohort = cohorts[t % len(cohorts)]
        ends: list[Array] = []
        change = np.zeros_like(c)
        for k in cohort:
            batches = local.batches(len(clients[k][1]), seed, t, k, 0)
            drift = c - c_k[k]
            end = train(model, theta, {}, clients[k], local, batches, np.ones(len(batches)), drift=drift).end
            renewed = c_k[k] - c + (theta - end) / (len(batches) * local.lr)
            change = change + renewed - c_k[k]
            c_k[k] = renewed
            ends.append(end)
        theta = np.mean(ends, axis=0)
        c = c + change / len(clients)
        states.append(Controlled(theta, c, c_k.copy()))
    return states
