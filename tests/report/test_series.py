"""Histories as columns: thinned alike whether read at once or line by line, and nothing but numbers."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.report.series import KEYS, POINTS, Point, RunSeries, Thinned, columns, number, tail


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 12))
def test_thinning_is_even_and_keeps_both_ends(count: int, most: int, every: int) -> None:
    thinned: Thinned[int] = Thinned(most)
    for i in range(count):
        thinned.add(i, known=int(i % every == 0))
    kept = thinned.points()
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert len(kept) <= most + 2
    # from each stretch of `stride` the last of those that tell most
    for start in range(0, count, thinned.stride):
        stretch = range(start, min(start + thinned.stride, count))
        told = [i for i in stretch if i % every == 0] or list(stretch)
        assert told[-1] in kept
    assert thinned.stride == 1 or -(-count // (thinned.stride // 2)) > most  # no thinner than needed


def test_evaluated_rounds_survive_thinning() -> None:
    rows = [
        {"round": r, "train_loss": 1.0 / r, **({"test_loss": 2.0 / r} if r % 10 == 0 else {})} for r in range(1, 5001)
    ]
    points = RunSeries(rows).parts()["rounds"]
    evaluated = [p["round"] for p in points if "test_loss" in p]
    assert POINTS / 4 < len(evaluated) <= POINTS + 1
    assert all(r % 10 == 0 for r in evaluated)
    assert points[-1]["round"] == 5000
    assert len(points) <= POINTS + 2


def test_a_tail_turns_the_old_into_the_new() -> None:
    """As page.js applies it, through every thinning on the way."""
    series = RunSeries()
    page: dict[str, dict[str, list[Any]]] = {}
    told: dict[str, list[Point]] = series.parts()
    for r in range(1, 2 * POINTS + 40):
        row: dict[str, Any] = {"round": r, "works": float(r), "loss": None if r % 7 == 0 else 1 / r}
        row |= {"gsi.tensor": [1.0, float(r)]} if r > 50 else {}
        row |= {"between_x": [0.5, 0.25]} if r > 20 else {}
        series.add(row)
        if r % 13:
            continue
        now = series.parts()
        for name, points in now.items():
            change = tail(told[name], points)
            if change is not None:
                assert len(change["columns"].get("round", [])) + change["keep"] == len(points)
                page[name] = applied(page.get(name, {}), change)
        told = now
        assert page == {name: columns(points) for name, points in now.items() if points}
    assert tail(told["rounds"], told["rounds"]) is None


def applied(part: dict[str, list[Any]], change: dict[str, Any]) -> dict[str, list[Any]]:
    follow = max(map(len, change["columns"].values()), default=0)
    names = dict.fromkeys([*part, *change["columns"]])
    before = {name: (part.get(name, []) + [None] * change["keep"])[: change["keep"]] for name in names}
    return {name: before[name] + change["columns"].get(name, [None] * follow) for name in names}


def test_values_between_two_aggregations_lie_between_them() -> None:
    rows = [
        {"round": r, "works": 5.0 * r, "uplink_bytes": 100 * r, "between_acc": [0.1, 0.2, 0.3, None]} for r in (1, 2)
    ]
    points = columns(RunSeries(rows).parts()["between"])
    assert points["works"] == [1, 2, 3, 4, 6, 7, 8, 9]
    assert points["round"] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.2, 1.4, 1.6, 1.8])
    assert points["uplink_bytes"] == [20, 40, 60, 80, 120, 140, 160, 180]
    assert points["between_acc"] == [0.1, 0.2, 0.3, "nan"] * 2


def test_a_value_after_every_work_of_a_round() -> None:
    rows = [{"round": r, "works": 4.0 * r, "between_divergence_models": [0.1, 0.2, 0.3, 0.4]} for r in (1, 2)]
    points = columns(RunSeries(rows).parts()["between"])
    assert points["works"] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "row",
    [
        {"round": 1, "__proto__": 1.0, "constructor": 2.0},
        {"round": None, "works": "many", "loss": True},
        {"round": 1, "loss": 10**400, "acc": -(10**60)},
        {"round": 1, "gsi.tensor": [[1.0], "x"], "fedglad.scale": [], "fedglad.B": None},
        {"round": 1, "similarity.matrix": [[1.0, 2.0], [3.0]], "clients": ["a"]},
        {"round": 1, "similarity.matrix": [1.0, 2.0]},
        {"round": 1, "similarity.matrix": [[1.0]], "clients": {"a": 1}},
        {"round": 1, "fairness.scores": {"a": 1}, "between_a": [None, {}], "between_b": 3},
        {"round": 1, "x" * 81: 1.0, "a<b": 1.0, "": 1.0},
        {},
        {"round": 1e300, "seconds": math.inf, "works": math.nan},
        {f"key{i}": 1.0 for i in range(KEYS + 50)},
    ],
)
def test_hostile_rows_become_numbers_or_nothing(row: dict[str, Any]) -> None:
    series = RunSeries([{"round": 1, "works": 1.0}, row, {"round": 3, "works": 3.0}])
    parts = {name: columns(points) for name, points in series.parts().items()}
    json.dumps(parts, allow_nan=False)
    assert "__proto__" not in parts["rounds"]
    assert len(parts["rounds"]) <= KEYS
    assert len(parts["rounds"]["round"]) == 3
    assert parts["matrices"].get("clients", [None]) == [None]
    for values in parts["rounds"].values():
        assert all(v is None or v == "nan" or isinstance(v, int | float) for v in values)


def test_numbers_for_a_page() -> None:
    assert [number(v) for v in (1 / 3, 12345678, None, math.nan, 1e-300)] == [0.333333, 12345678, "nan", "nan", 1e-300]


def test_large_lists_are_kept_small() -> None:
    rows = [
        {
            "round": r,
            "gsi.tensor": [1.0] * 900,
            "similarity.matrix": [[0.5] * 50] * 50,
            "fairness.scores": [0.5] * 100_000,
        }
        for r in range(1, 31)
    ]
    parts = RunSeries(rows).parts()
    assert len(parts["tensors"]) * 900 < 20_000
    assert len(parts["matrices"]) * 50 * 50 <= 65_000
    assert len(parts["scores"][0]["scores"]) == 20_000
