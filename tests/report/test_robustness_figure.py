"""The figure of the robustness experiment: what the table says is what is drawn."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "recipe,scale,row,label,method,score,measured,sd,runs\n"
LINES = [
    ("noise/30%", "DGT", "accuracy", "41.5", "2.5"),
    ("noise/10%", "DGT", "accuracy", "71.5", "1.5"),
    ("noise/10%", "DGT+krum", "accuracy", "88.0", ""),
    ("noise/10%", "DGT+krum", "length", "3.0", "0.1"),
    ("noise/10%", "2D-LRD", "accuracy", "", ""),
    ("alie/10%", "DGT", "accuracy", "60.0", "0.5"),
    ("honest/0%", "DGT", "accuracy", "90.0", "0.2"),
]


def result(folder: Path) -> Path:
    path = folder / "result.csv"
    body = "".join(f"robustness,paper,{row},{label},m,{score},{mean},{sd},3\n" for row, label, score, mean, sd in LINES)
    path.write_text(HEAD + body)
    return path


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("robustness_figure")


def test_lines(script: ModuleType, tmp_path: Path) -> None:
    """By share, from the run without an attack on; what diverged and other scores are left out."""
    assert script.read(result(tmp_path)) == {
        ("noise", "no defence"): {"DGT": [(0, 90.0, 0.2), (10, 71.5, 1.5), (30, 41.5, 2.5)]},
        ("noise", "krum"): {"DGT": [(10, 88.0, 0.0)]},
        ("alie", "no defence"): {"DGT": [(0, 90.0, 0.2), (10, 60.0, 0.5)]},
    }


def test_drawn(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["", str(result(tmp_path))])
    script.main()
    assert (tmp_path / "robustness.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "nothing.csv")])
    with pytest.raises(SystemExit, match="which result"):
        script.main()
