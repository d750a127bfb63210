"""RADFed's COVCLS and COVFEAT at Covertype's full size, within their times."""

import time
from pathlib import Path

import numpy as np
import pytest

from fedloom.data.partition import PartitionReport, Pool, partition

FILE = Path(__file__).parents[3].parent / "shared" / "data" / "covertype.npz"


@pytest.fixture(scope="module")
def covertype() -> Pool:
    """The two classes with 211,560 and 280,440 rows, resampled from the copy at hand, and the 39 binary columns."""
    if not FILE.exists():
        pytest.skip(f"needs the Covertype table {FILE}")
    with np.load(FILE) as data:
        x = np.concatenate([data["train_x"], data["test_x"]])[:, 10:]
        y = np.concatenate([data["train_y"], data["test_y"]]).astype(np.int64)
    x, y = x[y < 2], y[y < 2]
    x = x[:, np.ptp(x, axis=0) > 0]
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.choice(np.flatnonzero(y == c), n) for c, n in enumerate((211_560, 280_440))])
    assert x.shape[1] == 39
    return Pool(y[rows], features=x[rows])


def test_by_classes(covertype: Pool) -> None:
    start = time.perf_counter()
    deal = partition("quadratic", covertype, 100, 0)
    assert time.perf_counter() - start < 30  # one second, on an idle machine
    report = PartitionReport("quadratic", deal, covertype.labels)
    assert report.histogram.sum(axis=0).tolist() == [211_560, 280_440]
    assert sorted(deal.index.tolist()) == list(range(492_000))


@pytest.mark.long
def test_by_classes_and_features(covertype: Pool) -> None:
    start = time.perf_counter()
    deal = partition("quadratic(theta=0.1)", covertype, 100, 0)
    assert time.perf_counter() - start < 300  # ten seconds, on an idle machine
    assert deal.remarks == ()  # the solver reached its tolerance
    assert sorted(deal.index.tolist()) == list(range(492_000))
    assert abs(PartitionReport("", deal, covertype.labels).c_score - 0.68) < 0.1  # Table I, COVFEAT
