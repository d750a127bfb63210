"""The word that stands in place of a score says what happened: only what diverged is called so."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.experiment.config import RunConfig
from fedloom.experiment.findings import Cell, Finding, Reproduction
from fedloom.experiment.folder import Run
from fedloom.experiment.recipe import Case, Printed, Recipe
from fedloom.experiment.score import Score
from fedloom.report.reproduction import csv_text, markdown, remarks

History = list[dict[str, Any]]
CONFIG = RunConfig()


def history(*accuracies: float | None, **more: Any) -> History:
    return [{"round": i, "works": float(i), "test_accuracy": a, **more} for i, a in enumerate(accuracies, 1)]


HEALTHY = history(0.1, 0.4, 0.6)
SCALED = history(0.1, 0.4, 0.6, scale=2.0)
LOST = history(0.1, None, None, scale=None)
EVERY_OTHER = [HEALTHY[0], {"round": 2, "works": 2.0}, HEALTHY[2]]  # evaluated in every second round


def reproduction(text: str, relative_to: str | None = None, **histories: list[History]) -> Reproduction:
    """Of methods that have these histories, one for each seed."""
    cells = []
    for label, played in histories.items():
        case = Case("a", label, CONFIG, {"score": Printed(1.0)})
        runs = [Run(Path("."), CONFIG.change({"seed": seed}), lines) for seed, lines in enumerate(played)]
        cells.append(Cell(case, CONFIG, tuple(runs)))
    scores, cases = {"score": Score.read(text)}, tuple(cell.case for cell in cells)
    recipe = Recipe("r", "T", "", "", 1, None, relative_to, scores, (), None, {}, cases)
    return Reproduction(recipe, "paper", Path("."), tuple(cells))


def findings(text: str, relative_to: str | None = None, **histories: list[History]) -> dict[str, Finding]:
    return {finding.label: finding for finding in reproduction(text, relative_to, **histories).findings()}


@pytest.mark.parametrize(
    ("text", "lines", "word"),
    [
        ("last(test_accuracy)", HEALTHY, ""),
        ("last(test_accuracy)", LOST, "diverged"),
        ("mean(test_accuracy, last=2)", history(0.1, math.nan, 0.2), "diverged"),
        ("max(test_accuracy)", history(math.inf, math.nan), "diverged"),
        ("best(test_accuracy, by=scale)", LOST, "diverged"),
        ("drop(test_accuracy, round=3)", LOST, "diverged"),
        ("drop(test_accuracy, round=40)", HEALTHY, "not reached"),
        ("drop(test_accuracy, round=1)", HEALTHY, "undefined"),  # there is nothing to drop from
        ("drop(test_accuracy, round=2)", EVERY_OTHER, "undefined"),
        ("first(test_accuracy, above=0.9)", HEALTHY, "not reached"),
        ("first(test_accuracy, above=0.3)", LOST, "diverged"),
        ("pearson(test_accuracy, scale)", SCALED, "undefined"),  # one is constant
        ("last(scale)", HEALTHY, "not measured"),
    ],
)
def test_the_word_says_what_happened(text: str, lines: History, word: str) -> None:
    found = findings(text, FedAvg=[lines])["FedAvg"]
    assert (found.told, found.note) == (word == "", word)


@pytest.mark.parametrize(
    ("text", "base", "word"),
    [
        ("last(scale)", HEALTHY, "FedAvg not measured"),
        ("first(scale, above=1.5)", history(0.1, scale=1.0), "FedAvg not reached"),
        ("drop(scale, round=2)", SCALED[:1], "FedAvg not reached"),
        ("drop(scale, round=2)", SCALED[1:], "FedAvg undefined"),
        ("last(scale)", LOST, "FedAvg diverged"),
    ],
)
def test_so_does_the_word_for_what_a_score_is_relative_to(text: str, base: History, word: str) -> None:
    assert findings(text, "FedAvg", FedAvg=[base], GLAD=[SCALED])["GLAD"].note == word


def test_only_the_seeds_that_both_have_count() -> None:
    found = findings("last(test_accuracy)", "FedAvg", FedAvg=[HEALTHY, LOST], Prox=[HEALTHY])
    assert (found["FedAvg"].note, found["Prox"].note) == ("diverged", "")


def test_where_some_seeds_lack_the_key_no_remark_says_that_all_do() -> None:
    some = reproduction("last(scale)", FedAvg=[SCALED, HEALTHY])
    (found,) = some.findings()
    assert (found.note, found.values[0]) == ("not measured", 2.0)
    assert remarks(some) == []
    (said,) = remarks(reproduction("last(scale)", FedAvg=[HEALTHY, HEALTHY]))
    assert "no run has" in said


def test_the_difference_to_what_a_score_is_relative_to() -> None:
    """Formed pair by pair: of methods that rise and fall together a small difference is more than chance."""
    base, mine = np.array([50.0, 70.0, 90.0]), np.array([51.0, 71.5, 90.5])
    each = {"FedAvg": [history(a / 100) for a in base], "Prox": [history(a / 100) for a in mine]}
    found = reproduction("last(test_accuracy)", "FedAvg", **each)
    fedavg, prox = found.findings()
    assert math.isnan(fedavg.gain)
    assert prox.gain == pytest.approx((mine - base).mean())
    assert prox.gain_error == pytest.approx((mine - base).std(ddof=1) / np.sqrt(3))
    lines = list(csv.DictReader(io.StringIO(csv_text(found))))
    assert [line["gain"] for line in lines] == ["", str(prox.gain)]
    heading, _, first, second = [line for line in markdown(found, "").splitlines() if line.startswith("|")]
    assert heading.endswith("| less FedAvg |")
    assert (first.endswith("| 3 | - |"), second.endswith("| 3 | +1.00 ± 0.29 |")) == (True, True)


def test_one_pair_has_a_difference_without_an_error() -> None:
    found = findings("last(test_accuracy)", "FedAvg", FedAvg=[history(0.5), LOST], Prox=[history(0.75)])
    assert (found["Prox"].gain, found["Prox"].gain_error) == (25.0, None)
    assert "less" not in markdown(reproduction("last(test_accuracy)", FedAvg=[HEALTHY]), "")
