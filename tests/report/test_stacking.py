"""The study of stacked methods: equal effort for all, and effects that are those of the values."""

import importlib
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from fedloom.experiment.recipe import read_recipe
from fedloom.method import Method

ROOT = Path(__file__).parents[2]
PARTS = {"RADFed": -1.0, "2D-LRD": 0.0, "AdaBest": 2.0, "DGT": 0.5, "FedGLAD": 0.25}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("stacking")


def test_trials(script: ModuleType, tmp_path: Path) -> None:
    """All 31 unions and FedAvg, as many trials for each, and every rate as often; the best one is chosen, and one that
    diverged is not.
    """
    script.plan(tmp_path / "tuning.yaml")
    recipe = read_recipe(tmp_path / "tuning.yaml")
    rates = Counter((case.row, case.label.partition(" #")[0], case.config.lr) for case in recipe.cases)
    assert len({union for _, union, _ in rates}) == 32
    assert len(rates) == 3 * 32 * 5
    assert set(rates.values()) == {2}
    for text in {re.sub(r"=[\d.]+", "=1", case.config.method): case.config.method for case in recipe.cases}.values():
        Method(text).pipeline()
    values = {(case.row, case.label): 10.0 for case in recipe.cases if case.row == "mnist"}
    values["mnist", "DGT #7"] = 11.0
    lines = [f"{row},{label},{value if label != 'DGT #0' else ''}" for (row, label), value in values.items()]
    (tmp_path / "result.csv").write_text("\n".join(["row,label,measured", *lines]))
    script.choose(tmp_path / "result.csv", tmp_path / "stacking.yaml")
    chosen = {case.label: case for case in read_recipe(tmp_path / "stacking.yaml").cases}
    tried = {case.label: case for case in recipe.cases if case.row == "mnist"}
    assert len(chosen) == 32
    assert chosen["DGT"].config.method == tried["DGT #7"].config.method
    assert chosen["AdaBest+DGT"].config.method == tried["AdaBest+DGT #0"].config.method


def test_effects(script: ModuleType, tmp_path: Path) -> None:
    """Values that are sums of parts, and four points beyond that for RADFed with AdaBest."""
    lines = ["row,label,score,values"]
    for union in script.unions():
        names = [script.NAMES[name] for name in union]
        value = 80 + sum(PARTS[name] for name in names) + 4 * ({"RADFed", "AdaBest"} <= set(names))
        values = " ".join(str(value + shift) for shift in (-1, 0, 1))  # the seed's, the same for all
        lines.append(f"mnist,{script.label(union)},accuracy,{values}")
    (tmp_path / "result.csv").write_text("\n".join(lines))
    script.effects(tmp_path / "result.csv", tmp_path / "effects.md", tmp_path / "figure.png")
    text = (tmp_path / "effects.md").read_text()
    assert "| RADFed | -1.00 [-1.00, -1.00] | +3.00 [+3.00, +3.00] | +1.00 [+1.00, +1.00] | 8 of 16 |" in text
    assert "| DGT | +0.50 [+0.50, +0.50] | +0.50 [+0.50, +0.50] | +0.50 [+0.50, +0.50] | 16 of 16 |" in text
    together = re.findall(r"^\| beyond.*(?:\n\|.*)+", text, re.MULTILINE)[0].splitlines()
    zero = "+0.00 [+0.00, +0.00]"
    assert together[2] == f"| RADFed | {zero} | +4.00 [+4.00, +4.00] | {zero} | {zero} |"
    assert together[3] == f"| 2D-LRD |  | {zero} | {zero} | {zero} |"
    best = "RADFed+AdaBest+DGT+FedGLAD"
    assert f"| {best} | 85.75 ± 1.00 | +5.75 [+5.75, +5.75] | +3.75 [+3.75, +3.75] |" in text
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_recipe_is_what_was_chosen(script: ModuleType, tmp_path: Path) -> None:
    """From the trials in the documentation."""
    script.choose(ROOT / "docs/reproduction/stacking-tuning.csv", tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == (ROOT / "recipes/stacking.yaml").read_text()
