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
    gains = [np.asarray(scores, dtype=float) - np.asarray(baseline, dtype=float) for scores in others]
    whole = [gain for gain in gains if np.isfinite(gain).all()]
    tested = bool(whole) and enough(len(baseline), len(whole))
    corrected = iter(holm([wilcoxon(gain) for gain in whole]) if tested else [])
    found = []
    for gain in gains:
        if not np.isfinite(gain).all():
            found.append(Paired(math.nan, math.nan, math.nan, int((gain > 0).sum()), len(gain), None, "diverged"))
            continue
        low, high = interval(gain)
        p = next(corrected) if tested else None
        why = "" if tested else TOO_FEW
        found.append(Paired(float(gain.mean()), low, high, int((gain > 0).sum()), len(gain), p, why))
    return found


def enough(seeds: int, methods: int) -> bool:
    """Could a test find anything? The smallest p-value that so many seeds allow is 2 / 2^seeds, before its correction
    for the number of methods.
    """
    return methods * 2.0 ** (1 - seeds) <= LEVEL


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
