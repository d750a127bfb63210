"""Figures for a paper: every one is written, at the width of a column."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from fedloom.errors import RunError
from fedloom.experiment.compare import Comparison
from fedloom.report import figures


def test_every_figure(rich_comparison: Comparison, tmp_path: Path) -> None:
    hostile = replace(rich_comparison.rows[1], method="a_$very$_<long>&" + "+method(alpha=0.1)" * 9)
    comparison = replace(rich_comparison, rows=[rich_comparison.rows[0], hostile])
    written = figures.write(comparison, tmp_path / "a")
    names = {path.stem for path in written}
    assert {"test_accuracy", "test_loss", "train_loss", "test_accuracy_by_bytes", "bytes", "labels"} <= names
    assert {"gsi_labels", "gsi_tensor_1", "fedglad_scale_2", "similarity_2", "fairness", "fairness_gains"} <= names
    assert {path.suffix for path in written} == {".png", ".svg"}
    for path in written:
        if path.suffix == ".png":
            assert imread(path).shape[1] == 3.5 * 300
        else:
            ElementTree.parse(path)
    text = (tmp_path / "a" / "test_accuracy.svg").read_text()
    assert "a_$very$_&lt;long&gt;&amp;" in text


def test_a_single_run(comparison: Comparison, tmp_path: Path) -> None:
    run = replace(comparison.rows[0].runs[0], history=[])
    first = figures.write(run, tmp_path / "a")
    assert [path.name for path in first] == ["labels.png", "labels.svg"]
    again = figures.write([run], tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="can't be written"):
        figures.write(run, tmp_path / "file")
