"""The figures of the reproduction: what the file says is what is drawn."""

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CURVES = """row,label,seed,round,epochs,accuracy
a,FedAvg,0,10,2.5,40.0
a,FedAvg,1,10,2.5,50.0
a,FedAvg,0,20,5.0,60.0
a,FedAvg,1,20,5.0,
a,FedAvg+DGT,0,10,2.5,45.5
b,SCAFFOLD,0,10,3.0,12.0
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("curves_figure")


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    path = tmp_path / "curves.csv"
    path.write_text(CURVES)
    return path


def test_lines(script: ModuleType, curves: Path) -> None:
    """The mean over seeds, and their lowest and highest; no mean where one of them has none."""
    found = script.read(curves, "epochs")
    assert found["a"]["FedAvg"][0] == (2.5, 45.0, 40.0, 50.0)
    x, mean, low, high = found["a"]["FedAvg"][1]
    assert (x, low, high) == (5.0, 60.0, 60.0)
    assert math.isnan(mean)
    assert found["a"]["FedAvg+DGT"] == [(2.5, 45.5, 45.5, 45.5)]
    assert found["b"] == {"SCAFFOLD": [(3.0, 12.0, 12.0, 12.0)]}


def test_drawn(script: ModuleType, curves: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = tmp_path / "figure.png"
    for labels in ([], ["FedAvg", "SCAFFOLD"]):
        monkeypatch.setattr(sys, "argv", ["", str(curves), "round", str(figure), *labels])
        script.main()
        assert figure.read_bytes().startswith(b"\x89PNG")
        figure.unlink()
    for arguments, told in (([str(tmp_path / "none.csv"), "round", "f"], "which curves"), ([], "which curves")):
        monkeypatch.setattr(sys, "argv", ["", *arguments])
        with pytest.raises(SystemExit, match=told):
            script.main()
    for over, label, told in (
        ("round", "FedAvgg", "no curve is called FedAvgg"),
        ("days", "FedAvg", "no column 'days'"),
    ):
        monkeypatch.setattr(sys, "argv", ["", str(curves), over, str(figure), label])
        with pytest.raises(SystemExit, match=told):
            script.main()


def test_more_methods_than_colours(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two lines look the same."""
    from matplotlib.axes import Axes

    drawn: dict[str, tuple[str, str]] = {}
    plot = Axes.plot

    def watched(self: Axes, *args: Any, **how: Any) -> Any:
        drawn[how["label"]] = (how["color"], how["linestyle"])
        return plot(self, *args, **how)

    monkeypatch.setattr(Axes, "plot", watched)
    curves, figure = tmp_path / "curves.csv", tmp_path / "figure.png"
    curves.write_text("row,label,seed,works,accuracy\n" + "".join(f"a,method {i},0,45,{i}\n" for i in range(9)))
    monkeypatch.setattr(sys, "argv", ["", str(curves), "works", str(figure)])
    script.main()
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert len(drawn) == len(set(drawn.values())) == 9
