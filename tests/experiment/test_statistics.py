"""Tests of significance against SciPy, and tables that parse back."""

import csv
import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedloom.experiment.compare import Comparison, Row, gains
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import Run
from fedloom.experiment.statistics import TOO_FEW, compare_all, enough, holm
from fedloom.report.table import cells, csv_text, escaped, headings, latex, markdown, remarks, summary_csv, table

NASTY = r"fedprox(mu=0.1)+2dlrd & 50% $x$ #1 a_b {c} ~^\ | <i>*</i> ''"


def scores(seeds: int, methods: int) -> list[list[float]]:
    rng = np.random.default_rng(seeds)
    return [(0.5 + 0.1 * m + 0.05 * rng.normal(size=seeds)).tolist() for m in range(methods)]


def test_mean_and_interval_are_those_of_the_paired_t_test() -> None:
    baseline, *others = scores(7, 4)
    for found, own in zip(compare_all(baseline, others), others, strict=True):
        tested = stats.ttest_rel(own, baseline)
        low, high = tested.confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9)
        assert found.mean == pytest.approx(np.mean(own) - np.mean(baseline))
        assert found.wins == sum(a > b for a, b in zip(own, baseline, strict=True))


@pytest.mark.parametrize("seeds", [6, 9, 12])
def test_p_values_are_those_of_wilcoxon_corrected_by_holm(seeds: int) -> None:
    baseline, *others = scores(seeds, 2)
    (found,) = compare_all(baseline, others)
    assert found.p == pytest.approx(stats.wilcoxon(others[0], baseline).pvalue)
    baseline, *others = scores(12, 5)
    raw = [stats.wilcoxon(own, baseline).pvalue for own in others]
    ranked = sorted(range(4), key=lambda i: raw[i])
    expected = {i: max(min(1.0, (4 - r) * raw[ranked[r]]) for r in range(ranked.index(i) + 1)) for i in ranked}
    for i, found in enumerate(compare_all(baseline, others)):
        assert found.p == pytest.approx(expected[i])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_never_lowers_and_keeps_the_order(p_values: list[float]) -> None:
    corrected = holm(p_values)
    assert all(c >= p for c, p in zip(corrected, p_values, strict=True))
    order = np.argsort(p_values, kind="stable")
    assert all(np.diff(np.asarray(corrected)[order]) >= 0)
    assert min(corrected) == pytest.approx(min(1.0, len(p_values) * min(p_values)))


def test_too_few_seeds_are_said_to_be_too_few() -> None:
    assert [enough(n, 1) for n in (5, 6)] == [False, True]  # 2/2^5 = 0.0625
    assert [enough(n, 8) for n in (8, 9)] == [False, True]
    baseline, *others = scores(3, 3)
    for found in compare_all(baseline, others):
        assert found.p is None
        assert found.why == TOO_FEW
        assert found.low < found.mean < found.high
    (single,) = compare_all([0.5], [[0.7]])
    assert single.mean == pytest.approx(0.2)
    assert math.isnan(single.low)


def test_what_diverged_is_not_tested_and_spoils_nobody_else() -> None:
    baseline, good, bad = scores(8, 3)
    bad[2] = math.nan
    found, diverged = compare_all(baseline, [good, bad])
    assert found.p == pytest.approx(2 * stats.wilcoxon(good, baseline).pvalue)  # of two, whatever became of the other
    assert diverged.why == "diverged"
    assert compare_all(good, [good])[0].p == 1.0  # nothing differs
    assert {one.why for one in compare_all(bad, [good, baseline])} == {"the baseline diverged"}


def test_ties_are_ties() -> None:
    """Differences of shares k / n differ in their last bits; ranks must not be made of that."""
    right = np.array([300, 301, 299, 310, 290, 305])
    signs = np.array([1, 1, 1, 1, -1, -1])
    (found,) = compare_all((right / 360).tolist(), [((right + signs) / 360).tolist()])
    assert found.p == pytest.approx(stats.wilcoxon(signs).pvalue)


def comparison_of(methods: list[str], seeds: int, target: float = 0.6) -> Comparison:
    config = RunConfig()
    rows = []
    for m, (method, finals) in enumerate(zip(methods, scores(seeds, len(methods)), strict=True)):
        runs = []
        for seed, final in enumerate(finals):
            climbing = [final * t / 20 for t in range(1, 21)]
            history = [
                {
                    "works": t,
                    "local_steps": 9 * t,
                    "uplink_bytes": 1000 * t,
                    "downlink_bytes": 500 * t,
                    "test_accuracy": a,
                    "answered": 4,
                    "diverged": 0,
                }
                for t, a in enumerate(climbing, 1)
            ]
            runs.append(Run(Path(f"{m}-{seed}"), replace(config, seed=seed), history))
        rows.append(Row(method, runs, "accuracy", target))
    rows = [replace(row, gain=gain) for row, gain in zip(rows, gains(rows), strict=True)]
    return Comparison(Path("."), config, rows, target, seeds)


def test_every_run_and_every_method_read_back_from_csv() -> None:
    comparison = comparison_of(["fedavg", NASTY, 'quoted "x", y'], 8, target=0.55)
    every = list(csv.DictReader(io.StringIO(csv_text(comparison))))
    assert [(line["method"], int(line["seed"])) for line in every[8:16]] == [(NASTY, seed) for seed in range(8)]
    for line, final in zip(every[8:16], comparison.rows[1].finals, strict=True):
        assert float(line["test_accuracy"]) == final
        assert float(line["test_accuracy_last_10_works"]) == pytest.approx(final * np.mean(np.arange(11, 21)) / 20)
    summary = list(csv.DictReader(io.StringIO(summary_csv(comparison))))
    assert [line["method"] for line in summary] == ["fedavg", NASTY, 'quoted "x", y']
    assert float(summary[1]["p"]) == comparison.rows[1].gain.p  # type: ignore[union-attr]
    assert summary[0]["p"] == ""
    best = comparison.rows[2]
    reached = [next(t for t in range(1, 21) if final * t / 20 >= 0.55) for final in best.finals]
    assert float(summary[2]["works_to_target"]) == pytest.approx(np.mean(reached))
    assert float(summary[2]["bytes_to_target"]) == pytest.approx(1500 * np.mean(reached))


def test_a_target_that_is_reached_on_the_way() -> None:
    """After two of a round's four Works; bytes are the round's."""
    line = {"works": 4, "uplink_bytes": 40, "downlink_bytes": 20, "test_accuracy": 0.1}
    run = Run(Path("r"), RunConfig(), [{**line, "between_test_accuracy": [0.2, 0.7, 0.3]}])
    row = Row("radfed(redistributions=4)", [run], "accuracy", 0.6)
    assert row.works_to_target == 2
    assert row.bytes_to_target == 60


def test_markdown_has_one_cell_for_each_heading() -> None:
    lines = markdown(comparison_of(["fedavg", NASTY], 3)).splitlines()
    for line in lines:
        assert len(re.split(r"(?<!\\)\|", line)) == 2 + 9
    assert "too few seeds to test" in lines[3]
    assert NASTY.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*") in lines[3]


def balanced(text: str) -> bool:
    """Braces and dollars that LaTeX reads come in pairs."""
    text = re.sub(r"\\[\\{}$%&#_]", "", text)
    depth = 0
    for c in text:
        depth += (c == "{") - (c == "}")
        if depth < 0:
            return False
    return depth == 0 and text.count("$") % 2 == 0


def test_latex_is_balanced_and_escaped() -> None:
    comparison = comparison_of(["fedavg", NASTY], 6)
    text = latex(comparison)
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert body[0] == r"\begin{tabular}{lrrrrrrrr}"
    assert body[-1] == r"\end{tabular}"
    for line in body:
        assert balanced(line)
        if line.endswith(r"\\"):
            assert len(re.findall(r"(?<!\\)&", line)) == len(headings(comparison)) - 1
            assert not re.search(r"(?<!\\)[%#_~^<>|\"]", line.replace(r"\%", ""))
    assert r"\textbf{" in text
    assert "±" not in text


@given(st.text(max_size=40))
def test_any_text_is_escaped(text: str) -> None:
    shown = escaped(text)
    assert balanced(shown)
    assert not re.search(r"(?<!\\)[%#_&~^]", shown.replace(r"\\", ""))


def test_a_minus_is_a_minus() -> None:
    assert escaped("-0.50 [-1.0, +2.0]") == "$-$0.50 [$-$1.0, $+$2.0]"
    assert escaped("fedadam(lr=1e-3)+2dlrd(c=-1)") == "fedadam(lr=1e-3)+2dlrd(c=-1)"


def test_the_terminal_shows_the_test(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    comparison = comparison_of(["fedavg", "fedadam"], 6)
    Console(width=160).print(table(comparison))
    shown = capsys.readouterr().out
    gain = comparison.rows[1].gain
    assert gain is not None
    assert f"{gain.p:.4f}" in shown
    assert f"{100 * gain.mean:+.2f} [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]" in shown
    assert cells(comparison.rows[0])[3] == "-"


def test_the_last_works_are_the_same_for_methods_that_average_seldom() -> None:
    def run(step: float, evaluated: int) -> Run:
        lines = [{"works": step * (t + 1)} for t in range(round(40 / step))]
        for t in range(evaluated - 1, len(lines), evaluated):
            lines[t]["test_accuracy"] = step * (t + 1) / 40
        return Run(Path("."), RunConfig(), lines)

    def tail(*settings: Any) -> float:
        return Row("fedavg", [run(*settings)], "accuracy").tails[0]

    assert tail(1.0, 1) == pytest.approx(np.mean(np.arange(31, 41)) / 40)
    assert tail(5.0, 1) == pytest.approx((35 + 40) / 80)
    assert tail(20.0, 1) == 1.0
    assert tail(0.1, 1) == pytest.approx(np.mean(np.arange(301, 401)) / 400)
    assert tail(1.0, 40) == 1.0


def test_what_diverged_stands_in_every_export() -> None:
    comparison = comparison_of(["fedavg", "bad"], 2)
    bad = comparison.rows[1]
    runs = [replace(run, history=[{**line, "test_accuracy": None} for line in run.history]) for run in bad.runs]
    for order in (1, -1):
        rows = [comparison.rows[0], replace(bad, runs=runs)][::order]
        target = None if order < 0 else comparison.target
        rows = [replace(row, gain=gain, target=target) for row, gain in zip(rows, gains(rows), strict=True)]
        lost = replace(comparison, rows=rows, target=target)
        assert "diverged" in markdown(lost)
        assert "nan" not in markdown(lost) + latex(lost) + csv_text(lost) + summary_csv(lost)
        assert len(list(csv.DictReader(io.StringIO(summary_csv(lost))))) == 2


def test_who_had_nothing_to_average_is_told() -> None:
    comparison = comparison_of(["fedavg", "bad"], 2)
    runs = comparison.rows[1].runs
    for line in runs[0].history[:3]:
        line["answered"] = line["diverged"] = 4
    assert remarks(comparison) == ["bad: in 3 of 40 rounds no client sent a finite update"]
