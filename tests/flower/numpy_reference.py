"""Softmax regression on a few clients in float64 NumPy, and Flower's strategies as recursions over what clients send.

A model is one vector: the weights [classes, features] row by row, then the biases.
"""

from collections.abc import Callable, Sequence

import numpy as np

Model = np.ndarray
Clients = Sequence[tuple[np.ndarray, np.ndarray]]
FEATURES, CLASSES = 4, 3


def clients(count: int = 7, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients of unequal sizes, whose labels and inputs are unlike."""
    rng = np.random.default_rng(seed)
    made = []
    for k in range(count):
        n = 4 + 3 * k
        x = rng.normal(size=(n, FEATURES)) + rng.normal(size=FEATURES)
        made.append((x, rng.integers(0, CLASSES, n)))
    return made


def descend(start: Model, x: np.ndarray, y: np.ndarray, steps: int, lr: float, mu: float = 0.0) -> Model:
    """Full-batch steps on the mean cross-entropy + mu/2 |theta - start|^2."""
    theta = start.copy()
    for _ in range(steps):
        weights, bias = theta[: CLASSES * FEATURES].reshape(CLASSES, FEATURES), theta[CLASSES * FEATURES :]
        scores = x @ weights.T + bias
        chances = np.exp(scores - scores.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        chances[np.arange(len(y)), y] -= 1
        error = chances / len(y)
        theta -= lr * (np.concatenate([(error.T @ x).reshape(-1), error.sum(0)]) + mu * (theta - start))
    return theta


Combine = Callable[[Model, np.ndarray, np.ndarray], Model]  # of theta, what came back [K, P], and the shares [K]


def play(
    start: Model, data: Sequence[tuple[np.ndarray, np.ndarray]], combine: Combine, rounds: int, mu: float
) -> Model:
    sizes = np.array([len(y) for _, y in data], dtype=np.float64)
    theta = start
    for _ in range(rounds):
        ends = np.stack([descend(theta, x, y, steps=2, lr=0.3, mu=mu) for x, y in data])
        theta = combine(theta, ends, sizes / sizes.sum())
    return theta


def mean(theta: Model, ends: np.ndarray, shares: np.ndarray) -> Model:
    return np.asarray(shares @ ends)


def median(theta: Model, ends: np.ndarray, shares: np.ndarray) -> Model:
    return np.asarray(np.median(ends, axis=0))


def trimmed(theta: Model, ends: np.ndarray, shares: np.ndarray) -> Model:
    """Without the lowest and the highest of seven in each coordinate."""
    return np.asarray(np.sort(ends, axis=0)[1:-1].mean(0))


def krum(theta: Model, ends: np.ndarray, shares: np.ndarray) -> Model:
    """The model with the least sum of squared distances to its n - f - 2 nearest others, f = 1."""
    squares = np.square(ends[:, None] - ends[None]).sum(2)
    scores = [np.sort(np.delete(row, i))[: len(ends) - 3].sum() for i, row in enumerate(squares)]
    return np.asarray(ends[int(np.argmin(scores))])


def momentum(lr: float, beta: float) -> Combine:
    """FedAvgM: m <- beta m + g; theta <- theta - lr m."""
    kept: list[np.ndarray] = [np.zeros(1)]

    def step(theta: Model, ends: np.ndarray, shares: np.ndarray) -> Model:
        kept[0] = beta * kept[0] + (theta - shares @ ends)
        return np.asarray(theta - lr * kept[0])

    return step


def adaptive(kind: str, lr: float, beta1: float, beta2: float, tau: float, v: float, exponent: int | None) -> Combine:
    """Reddi et al.'s Algorithm 2 from v on; with `exponent` e, the bias of both moments is corrected as in step t + e
    of Adam.
    """
    kept: list[np.ndarray] = [np.zeros(1), np.full(1, v)]
    rounds = [0]

    def step(theta: Model, ends: np.ndarray, shares: np.ndarray) -> Model:
        delta = shares @ ends - theta
        square = delta**2
        m = beta1 * kept[0] + (1 - beta1) * delta
        second = {
            "adam": beta2 * kept[1] + (1 - beta2) * square,
            "yogi": kept[1] - (1 - beta2) * square * np.sign(kept[1] - square),
            "adagrad": kept[1] + square,
        }[kind]
        kept[:] = [m, second]
        rounds[0] += 1
        rate = lr
        if exponent is not None:
            t = rounds[0] + exponent
            rate *= np.sqrt(1 - beta2**t) / (1 - beta1**t)
        return np.asarray(theta + rate * m / (np.sqrt(second) + tau))

    return step
