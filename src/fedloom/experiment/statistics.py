"""Is a difference between methods more than chance? Runs with the same seed share data and starting model: pairs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05
TOO_FEW = "too few seeds to test"


@dataclass(frozen=True)
class Paired:
    """The differences of a method to the baseline, seed by seed."""

    mean: float
    low: float  # 95% interval of the mean by Student's t; nan for a single seed
    high: float
    wins: int  # seeds on which it is better
    seeds: int
    p: float | None  # of Wilcoxon's signed-rank test, corrected for the number of methods; None: not tested
    why: str = ""  # it was not tested


def compare_all(baseline: Sequence[float], others: Sequence[Sequence[float]]) -> list[Paired]:
    """Every other method's scores [seeds] against those of the baseline; p-values are corrected together.

    >>> compare_all([0.5, 0.6], [[0.7, 0.7]])[0].why
    'too few seeds to test'
    """
    # Rounded, since the last bits of two equal differences of shares differ, and ranks would be made of that.
    gains = [np.round(np.asarray(scores, dtype=float) - np.asarray(baseline, dtype=float), 12) for scores in others]
    whole = [bool(np.isfinite(gain).all()) for gain in gains]
    tested = enough(len(baseline), len(gains))
    # One that diverged counts among the tests: how many there are is settled before their outcome.
    corrected = holm([wilcoxon(gain) if good else 1.0 for gain, good in zip(gains, whole, strict=True)])
    blamed = "diverged" if np.isfinite(baseline).all() else "the baseline diverged"
    found = []
    for gain, good, p in zip(gains, whole, corrected, strict=True):
        wins = int((gain > 0).sum())
        if not good:
            found.append(Paired(math.nan, math.nan, math.nan, wins, len(gain), None, blamed))
            continue
        low, high = interval(gain)
        found.append(
            Paired(float(gain.mean()), low, high, wins, len(gain), p if tested else None, "" if tested else TOO_FEW)
        )
    return found


def enough(seeds: int, methods: int) -> bool:
    """Could a test find anything? The smallest p-value that so many seeds allow is 2 / 2^seeds, before its correction
    for the number of methods.
    """
    return methods > 0 and methods * 2.0 ** (1 - seeds) <= LEVEL


def interval(gain: np.ndarray) -> tuple[float, float]:
    """Of the mean, 95%, by Student's t."""
    n = len(gain)
    if n < 2:
        return math.nan, math.nan
    from scipy import stats  # slow to import

    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * statistics.stdev(gain.tolist()) / math.sqrt(n)
    return float(gain.mean()) - half, float(gain.mean()) + half


def wilcoxon(gain: np.ndarray) -> float:
    """The two-sided p-value of the signed-rank test; 1 where nothing differs."""
    from scipy import stats

    return float(stats.wilcoxon(gain).pvalue) if gain.any() else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = highest
    return corrected
