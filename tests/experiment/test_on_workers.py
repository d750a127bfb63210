"""Whole runs at the workers of a cluster: compare and tune give what they give on one machine. On a real local Ray."""

import io
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fedloom as fl
from fedloom.engines.ray import pool as pools
from fedloom.engines.ray import session
from fedloom.experiment.compare import Comparison, compare
from fedloom.experiment.config import RunConfig
from fedloom.experiment.tune import tune
from fedloom.training import Diverged

pytest.importorskip("ray", reason="needs the extra ray")

SMALL = RunConfig(clients=8, per_round=3, rounds=6, epochs=2, batch_size=16, model="logistic", engine="loop")
ON_RAY = SMALL.change({"engine": "ray-loop", "actors": 2})
METHODS = ["fedavg", "adabest", "radfed(redistributions=2)"]
QUIET = Console(quiet=True)


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    with session():
        yield


def params(comparison: Comparison) -> list[dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return [load_file(run.folder / "model.safetensors") for row in comparison.rows for run in row.runs]


def check_same(one: Comparison, other: Comparison) -> None:
    for a, b in zip(params(one), params(other), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)
    for row, same in zip(one.rows, other.rows, strict=True):
        assert row.finals == same.finals
        for run, twin in zip(row.runs, same.runs, strict=True):
            assert [line["train_loss"] for line in run.history] == [line["train_loss"] for line in twin.history]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(SMALL, METHODS, tmp_path_factory.mktemp("alone") / "out", seeds=2, console=QUIET)


def test_a_comparison(alone: Comparison, tmp_path: Path) -> None:
    found = compare(ON_RAY, METHODS, tmp_path / "out", seeds=2, console=QUIET)
    check_same(found, alone)
    assert found.config.engine == "ray-loop"  # as it was asked for
    assert found.rows[0].runs[0].config.engine == "loop"  # what trained it
    again = compare(ON_RAY, METHODS, tmp_path / "out", seeds=2, console=QUIET, resume=True)
    check_same(again, alone)


@pytest.mark.parametrize("config", [SMALL, ON_RAY], ids=["here", "there"])
def test_runs_out_of_patience(config: RunConfig, tmp_path: Path) -> None:
    """Nothing gains at this rate, so every run ends in its second round. The last word is of the last of them."""
    said = io.StringIO()
    impatient = config.change({"validation": 2, "patience": 1, "lr": 1e-9, "rounds": 60})
    found = compare(impatient, METHODS, tmp_path / "out", seeds=2, console=Console(file=said, width=200))
    assert [len(run.history) for row in found.rows for run in row.runs] == [2] * 6
    assert re.search(r" seed [01]: round 2/2  accuracy 0\.\d+.*\n$", said.getvalue())
    assert said.getvalue().count("round 2/2") == 1


@pytest.mark.long
def test_a_worker_dies(tmp_path: Path) -> None:
    slow = ON_RAY.change({"rounds": 60, "checkpoint_every": 5})
    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not killed:
            lines = list((tmp_path / "out").rglob("metrics.jsonl"))
            if any(len(path.read_text().splitlines()) > 10 for path in lines):
                member = pools._OPEN[0].members[0]
                os.kill(member.process, signal.SIGKILL)
                killed.append(member.process)
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    found = compare(slow, ["adabest", "fedavg"], tmp_path / "out", seeds=1, console=QUIET)
    thread.join()
    assert killed
    quiet = compare(SMALL.change({"rounds": 60}), ["adabest", "fedavg"], tmp_path / "quiet", seeds=1, console=QUIET)
    check_same(found, quiet)


def test_a_run_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    wild = ON_RAY.change({"lr": 1e30, "max_diverged": 0})
    with pytest.raises(Diverged, match="more than max_diverged=0"):
        compare(wild, METHODS, tmp_path / "out", seeds=1, console=QUIET)
    assert len(list((tmp_path / "out").rglob("metrics.jsonl"))) == 3


def test_few_runs_are_split(tmp_path: Path) -> None:
    found = compare(ON_RAY, ["fedavg"], tmp_path / "out", seeds=1, console=QUIET)
    assert found.rows[0].runs[0].config.engine == "ray"
    assert found.rows[0].runs[0].history[-1]["cluster_bytes"] > 0


def test_a_study(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the extra tune")
    options: dict[str, Any] = {"search": ["lr=log(0.01, 1)"], "trials": 2, "seeds": 2, "sampler": "random"}
    here = tune(SMALL, ["fedavg", "fedprox(mu=choice(0.01, 1))"], tmp_path / "here", together=2, **options)
    there = tune(ON_RAY, ["fedavg", "fedprox(mu=choice(0.01, 1))"], tmp_path / "there", together=2, **options)
    for a, b in zip(here.rows, there.rows, strict=True):
        values = [[(t.params, t.value, t.user_attrs["state"]) for t in row.trials.finished.values()] for row in (a, b)]
        assert values[0] == values[1]


def test_bad_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(fl.ConfigError, match="actors must be"):
        compare(ON_RAY.change({"actors": -1}), METHODS, tmp_path / "out", seeds=1, console=QUIET)
    assert not (tmp_path / "out").exists()
