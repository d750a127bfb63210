"""Who trains whom: where clients are at home, and how unequal clients are shared out."""

from collections.abc import Sequence

import numpy as np

NEAR = 1.25  # a worker that has the data takes up to so much of an even share


def homes(clients: np.ndarray, members: Sequence[int]) -> np.ndarray:
    """The member at which each client is at home: the one that scores highest with it. Whoever joins or leaves changes
    the homes of its own clients only.

    >>> homes(np.arange(6), [0, 1, 2]).tolist()
    [1, 0, 0, 0, 0, 0]
    >>> homes(np.arange(6), [0, 2]).tolist()
    [2, 0, 0, 0, 0, 0]
    """
    table = np.stack([_mixed(_mixed(clients.astype(np.uint64)) ^ np.uint64(m + 1)) for m in members])
    found: np.ndarray = np.asarray(members)[table.argmax(0)]
    return found


def _mixed(words: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every bit of the outcome depends on every bit of a word."""
    z = words + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def share_out(
    costs: Sequence[float], speeds: Sequence[float], near: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """Positions for each worker: the longest first, to whoever would be done with it soonest. `near` says which workers
    have what a position needs; one of them takes it, unless that is clearly more than its part.

    >>> share_out([1, 5, 3, 2], speeds=[1, 1])
    [[0, 1], [2, 3]]
    >>> share_out([1, 1, 1, 1], speeds=[1, 1], near=[[0], [0, 1], [0], []])
    [[0, 2], [1, 3]]
    """
    shares: list[list[int]] = [[] for _ in speeds]
    busy = np.zeros(len(speeds))
    even = NEAR * sum(costs) / max(sum(speeds), 1e-12)
    pace = np.asarray(speeds, dtype=np.float64)
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):
        done = busy + costs[k] / pace
        chosen = int(done.argmin())
        if near is not None and near[k]:
            nearest = min(near[k], key=lambda worker: float(done[worker]))
            if done[nearest] <= max(even, costs[k] / pace[nearest]):
                chosen = nearest
        shares[chosen].append(k)
        busy[chosen] = done[chosen]
    return [sorted(share) for share in shares]


def rounded(speeds: Sequence[float]) -> list[float]:
    """Relative to the median, in powers of two: workers that are about as fast count as equal, so that a run on equal
    machines is cut into the same pieces every time.

    >>> rounded([100, 110, 40])
    [1.0, 1.0, 0.5]
    """
    usual = float(np.median(speeds))
    return [float(2.0 ** np.rint(np.log2(speed / usual))) for speed in speeds]
