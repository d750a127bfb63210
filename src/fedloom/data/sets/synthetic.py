"""Synthetic(alpha, beta): Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous
networks. MLSys 2020 (FedProx).

Client k draws u ~ N(0, alpha) and B ~ N(0, beta), then W [features, classes] and b [classes] ~ N(u, 1) and v [features]
~ N(B, 1). Its samples are x ~ N(v, diag(j^-1.2)), y = argmax softmax(W'x + b). alpha and beta are the standard
deviations of u and B, as in the released code (the paper's N(0, alpha) reads as a variance). A client has
floor(LogNormal(4, 2)) + 50 samples, as released, or exactly `samples`; the last tenth is for the test, but at least one
sample for training. There are 30 clients unless another number is asked for. What a client gets depends on the seed
and its number, not on how many clients there are.
"""

import os

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Source
from fedloom.data.formats import Pair, positive
from fedloom.errors import DataError

CLIENTS = 30
FEWEST = 50  # samples of a client
BLOCK = 1024  # clients that share a stream of random numbers
ROWS = 1 << 14  # samples that are labelled at once, which bounds the memory


@dataset("synthetic", samples=None, classes=10, licence="none needed", embedded=True, natural=True, paper="FedProx")
def synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    features: int = 60,
    classes: int = 10,
    samples: int | None = None,
    *,
    source: Source,
) -> Corpus:
    """made-up classes whose model and inputs differ between clients (FedProx: Li et al. 2020)"""
    positive(features=features, classes=classes, samples=samples, clients=source.clients)
    if not 0 <= alpha < np.inf or not 0 <= beta < np.inf:
        raise DataError(f"synthetic: alpha and beta must be 0 or larger, not {alpha} and {beta}")
    clients = CLIENTS if source.clients is None else source.clients
    _check_memory(clients * (samples or FEWEST), features, clients)  # before so many sizes are drawn
    blocks = range(-(-clients // BLOCK))
    sizes = np.concatenate([_sizes(source.seed, block, samples) for block in blocks])[:clients]
    train = np.maximum(9 * sizes // 10, 1)
    _check_memory(int(sizes.sum()), features, clients)
    (x, y), (test_x, test_y) = _drawn(source.seed, sizes, train, alpha, beta, features, classes)
    numbers = np.arange(clients)
    return Corpus(
        x,
        y,
        test_x,
        test_y,
        classes=classes,
        owner=np.repeat(numbers, train),
        test_owner=np.repeat(numbers, sizes - train),
        owners=numbers.astype(f"U{len(str(clients))}"),
        columns=tuple(f"x{j}" for j in range(1, features + 1)),
        numeric=features,
    )


def _drawn(
    seed: int, sizes: np.ndarray, train: np.ndarray, alpha: float, beta: float, features: int, classes: int
) -> list[Pair]:
    """Training and test samples of all clients; only one block of clients lies in memory besides."""
    counts = (int(train.sum()), int((sizes - train).sum()))
    pairs = [(np.empty((n, features), dtype=np.float32), np.empty(n, dtype=np.int64)) for n in counts]
    done = [0, 0]
    for block in range(-(-len(sizes) // BLOCK)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        made, labels = _block(seed, block, sizes[part], alpha, beta, features, classes)
        tested = _places(sizes[part]) >= np.repeat(train[part], sizes[part])
        for which, chosen in enumerate((~tested, tested)):
            rows = slice(done[which], done[which] + int(chosen.sum()))
            pairs[which][0][rows], pairs[which][1][rows] = made[chosen], labels[chosen]
            done[which] = rows.stop
    return pairs


def _sizes(seed: int, block: int, samples: int | None) -> np.ndarray:
    if samples is not None:
        return np.full(BLOCK, samples, dtype=np.int64)
    return np.floor(_stream(seed, block, 0).lognormal(4, 2, BLOCK)).astype(np.int64) + FEWEST


def _block(
    seed: int, block: int, sizes: np.ndarray, alpha: float, beta: float, features: int, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Samples and labels of a block's first clients; all are drawn what they are, so that their number is no matter."""
    stream, normal = _stream(seed, block, 1), np.float32
    u = alpha * stream.standard_normal((BLOCK, 1), dtype=normal)
    centre = beta * stream.standard_normal((BLOCK, 1), dtype=normal)
    v = stream.standard_normal((BLOCK, features), dtype=normal) + centre
    bias = stream.standard_normal((BLOCK, classes), dtype=normal) + u
    weight = stream.standard_normal((BLOCK, features, classes), dtype=normal) + u[:, :, None]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    spread = np.arange(1, features + 1, dtype=np.float64) ** -0.6  # the root of j^-1.2
    x = _stream(seed, block, 2).standard_normal((len(owner), features), dtype=normal)
    x *= spread.astype(normal)
    y = np.empty(len(owner), dtype=np.int64)
    for start in range(0, len(owner), ROWS):
        rows = slice(start, start + ROWS)
        x[rows] += v[owner[rows]]
        scores = np.einsum("nf,nfc->nc", x[rows], weight[owner[rows]]) + bias[owner[rows]]
        y[rows] = scores.argmax(1)  # the softmax keeps the order
    return x, y


def _stream(seed: int, block: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(block, purpose)))


def _places(sizes: np.ndarray) -> np.ndarray:
    """Of each sample its place among its client's."""
    places: np.ndarray = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return places


def _check_memory(samples: int, features: int, clients: int) -> None:
    if not hasattr(os, "sysconf"):
        return
    needed, there = samples * (4 * features + 16), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise DataError(
            f"synthetic: {clients:,} clients have {samples:,} samples, which need {needed / 1e9:.0f} GB of memory; "
            "ask for fewer, as with samples=10"
        )
