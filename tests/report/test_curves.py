"""What figures show, against NumPy and SciPy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from fedloom.experiment.compare import Comparison
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import Run
from fedloom.report import curves
from fedloom.report.describe import describe_run, describe_runs, fedglad_gamma, group_of
from fedloom.report.labels import describe_labels

NOWHERE = Path("/nowhere")


def run(values: list[float | None], method: str = "fedavg", seed: int = 0, **settings: Any) -> Run:
    rows = [{"round": i + 1, "works": 2.0 * i, "loss": value} for i, value in enumerate(values)]
    config = replace(RunConfig(method=method, seed=seed), **settings)
    return Run(NOWHERE, config, rows)


def test_mean_and_deviation_over_seeds() -> None:
    table = np.random.default_rng(0).normal(size=(3, 20))
    curve = curves.over_seeds(describe_runs([run(list(line), seed=i) for i, line in enumerate(table)]), "loss")
    np.testing.assert_allclose(curve.x, 2.0 * np.arange(20))
    np.testing.assert_allclose(curve.mean, table.mean(0), atol=1e-5)
    np.testing.assert_allclose(curve.deviation, table.std(0, ddof=1), atol=1e-5)


def test_a_diverged_seed_makes_a_gap_and_a_slow_one_does_not() -> None:
    diverged = curves.over_seeds(describe_runs([run([1, 2, 3]), run([1, None, 3], seed=1)]), "loss")
    assert np.isnan(diverged.mean).tolist() == [False, True, False]
    slow = curves.over_seeds(describe_runs([run([1, 2, 3]), run([3, 4], seed=1)]), "loss")
    assert slow.mean == [2, 3, 3]
    assert curves.over_seeds(describe_runs([run([1])]), "unheard of").x == []


def test_seeds_of_different_length_are_thinned_to_common_rounds() -> None:
    long, longer = run([float(i) for i in range(1500)]), run([float(i) for i in range(4000)], seed=1)
    curve = curves.over_seeds(describe_runs([long, longer]), "loss")
    assert len(curve.x) > 400
    np.testing.assert_allclose(curve.mean, np.array(curve.x) / 2, rtol=1e-5)  # both had the same value at every round


def test_runs_are_grouped_by_what_changes_their_result() -> None:
    first = run([1.0])
    for free in ({"seed": 3}, {"method": "dgt"}, {"rounds": 7}, {"engine": "loop"}, {"device": "cpu"}):
        assert group_of(replace(first.config, **free)) == group_of(first.config), free
    for told in ({"lr": 0.5}, {"data": "mnist"}, {"partition": "iid"}, {"momentum": 0.9}, {"metric": "f1"}):
        assert group_of(replace(first.config, **told)) != group_of(first.config), told
    runs = [first, run([1.0], "dgt"), run([1.0], seed=1), run([1.0], lr=0.5), run([1.0], "dgt", seed=1)]
    groups = curves.grouped(describe_runs(runs))
    assert [(g.label, [r["seed"] for r in g.runs]) for g in groups] == [
        ("fedavg [A]", [0, 1]),
        ("dgt [A]", [0, 1]),
        ("fedavg [B]", [0]),
    ]
    assert [g.label for g in curves.grouped(describe_runs(runs[:3]))] == ["fedavg", "dgt"]


def test_correlation_is_pearsons() -> None:
    a, b = np.random.default_rng(1).normal(size=(2, 30))
    expected = scipy.stats.pearsonr(a, b).statistic
    assert curves.correlation(list(zip(a.tolist(), b.tolist(), strict=True))) == pytest.approx(expected)
    assert np.isnan(curves.correlation([(1.0, 2.0), (1.0, 3.0)]))
    assert np.isnan(curves.correlation([]))


def test_gains_are_client_by_client_and_seed_by_seed() -> None:
    def scored(scores: list[float | None], seed: int, method: str = "fedavg") -> dict[str, Any]:
        return describe_run(
            Run(NOWHERE, RunConfig(seed=seed, method=method), [{"round": 1, "fairness.scores": scores}])
        )

    before = [scored([0.5, 0.25, None], 0), scored([0.125, 0.25, 0.5], 1)]
    after = [scored([0.25, 0.75, 1.0], 0, "dgt"), scored([0.25, 0.25, 0.5], 1, "dgt"), scored([1.0], 7, "dgt")]
    assert curves.gains(after, before) == [0.5, 0.125, 0, 0, -0.25]
    assert curves.all_scores(before) == [0.125, 0.25, 0.25, 0.5, 0.5]
    x, y = curves.quantiles([float(i) for i in range(1000)])
    assert len(x) <= 201
    assert (x[0], y[0], x[-1], y[-1]) == (0.05, 0.0, 99.95, 999.0)


def test_bounds_of_fedglad(rich_comparison: Comparison) -> None:
    described = describe_runs(rich_comparison)
    assert [run["gamma"] for run in described] == [None, None, 0.05, 0.05]
    low, high = curves.bounds(described[2]) or ([], [])
    for at, values in zip(
        described[2]["parts"]["tensors"]["round"], described[2]["parts"]["tensors"]["fedglad.scale"], strict=True
    ):
        assert low[at - 1] - 1e-9 <= min(values)
        assert max(values) <= high[at - 1] + 1e-9
    assert [low[0], high[-1]] == pytest.approx([1, 1 + 0.05 * 7])
    assert [name for name, _ in curves.tensor_lines(described[2], "gsi.tensor")] == ["layer.weight", "layer.bias"]
    assert fedglad_gamma("fedavg") is None
    nameless = {**described[2], "names": []}
    assert [name for name, _ in curves.tensor_lines(nameless, "gsi.tensor")] == ["tensor 0", "tensor 1"]


def test_labels_are_counted_from_the_partition(rich_comparison: Comparison, tmp_path: Path) -> None:
    first = rich_comparison.rows[0].runs[0]
    (table,) = describe_labels([run for row in rich_comparison.rows for run in row.runs])
    federation = first.federation()
    for k in range(10):
        shares = np.bincount(federation.client(k)[1].numpy(), minlength=10) / len(federation.client(k)[1])
        np.testing.assert_allclose(np.array(table["shares"])[:, k], shares, atol=6e-4)
    assert table["notes"] == []
    (none,) = describe_labels([replace(first, folder=tmp_path)])
    assert "holds no partition.npz" in none["missing"]
    away = replace(first.config, data="covertype", data_dir=str(tmp_path))
    (gone,) = describe_labels([replace(first, config=away)])
    assert "are not here" in gone["missing"]
