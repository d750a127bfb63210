"""Names with brackets, as rich's markup has them, and with :emoji: are printed as they are written."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedloom.experiment.compare import Comparison
from fedloom.experiment.findings import Cell, Reproduction
from fedloom.experiment.recipe import read_recipe
from fedloom.report import reproduction, table
from tests.command_line import fedloom

RUN = ["--clients", "8", "--per-round", "3", "--model", "logistic", "--rounds", "1"]
NAMES = ["x[/b]", "x[red]", "x:cat:"]
RECIPE = """\
title: "A [/b] table :cat:"
scores: {"score [c]": last(test_accuracy)}
seeds: 1
settings: {data: digits, model: logistic, clients: 8, per_round: 3, rounds: 1}
methods: {"FedAvg [ours]": fedavg, "FedAvg [theirs]": fedavg, "Prox [/i]": fedprox(mu=0.1)}
rows:
  "row [a]": {printed: {"FedAvg [ours]": 30}}
"""
WRITTEN = ("A [/b] table :cat:", "score [c]", "FedAvg [ours]", "FedAvg [theirs]", "Prox [/i]", "row [a]")


def shown(what: Any) -> str:
    """By a console that knows nothing of what it prints."""
    console = Console(file=io.StringIO(), width=200)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_of_a_reproduction(tmp_path: Path) -> None:
    (tmp_path / "names.yaml").write_text(RECIPE)
    recipe = read_recipe(tmp_path / "names.yaml")
    found = Reproduction(recipe, "paper", tmp_path, tuple(Cell(case, case.config) for case in recipe.cases))
    text = shown(reproduction.table(found))
    assert [name for name in WRITTEN if name not in text] == []


def test_the_table_of_a_comparison(comparison: Comparison) -> None:
    rows = [replace(row, method=method) for row, method in zip(comparison.rows, NAMES[::2], strict=True)]
    config = comparison.config.change({"data": "table(path='d[/a]/t.csv', client=who, label=y)"})
    text = shown(table.table(replace(comparison, config=config, rows=rows)))
    assert [name for name in ("d[/a]/t.csv", *NAMES[::2]) if name not in text] == []


def test_reproduce_writes_its_results(tmp_path: Path) -> None:
    (tmp_path / "names.yaml").write_text(RECIPE)
    done = fedloom("reproduce", "names.yaml", "--out", "o[/x]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [name for name in (*WRITTEN, "in o[/x]/names: result.csv") if name not in done.stdout] == []
    lines = list(csv.DictReader((tmp_path / "o[/x]/names/result.csv").open()))
    assert [line["label"] for line in lines] == list(WRITTEN[2:5])


@pytest.mark.parametrize("name", NAMES)
def test_folders(name: str, tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        done = fedloom(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"report: {name}/c/report.html" in said("compare", "fedavg", *RUN, "--seeds", "1", "--out", f"{name}/c")
    assert f"report: {name}/r/report.html" in said("run", *RUN, "--out", f"{name}/r")
    assert f"{name}/r holds a finished run" in said("run", "--resume", "--out", f"{name}/r")
    exported = f"{name}/m.safetensors"
    assert f"wrote {exported}" in said("evaluate", f"{name}/r", "--export", exported)
