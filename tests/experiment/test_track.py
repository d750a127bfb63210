"""Trackers: what each package reads back is what metrics.jsonl holds, and no tracker ends a run."""

import dataclasses
import json
import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.cli import main
from fedloom.experiment.compare import compare
from fedloom.experiment.config import RunConfig
from fedloom.experiment.run import start_run
from fedloom.experiment.track import TRACKERS, flat, tracked

SMALL = RunConfig(model="logistic", clients=10, per_round=4, rounds=3, method="fedadam")
Steps = dict[int, dict[str, float]]  # what was logged in each round


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path) -> Steps:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["round"]: flat(row) for row in rows}


def from_tensorboard(folder: Path) -> tuple[Steps, dict[str, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    steps: Steps = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in steps.setdefault(event.step, {})  # nothing twice
            steps[event.step][name] = event.value
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    return steps, {name: value.string_value for name, value in found.items()}


def from_mlflow(folder: Path) -> tuple[Steps, dict[str, str], str]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'fedloom'")
    (run,) = client.search_runs([experiment.experiment_id])
    steps: Steps = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            assert name not in steps.setdefault(metric.step, {})
            steps[metric.step][name] = metric.value
    return steps, run.data.params, run.info.status


def from_wandb(folder: Path) -> list[tuple[str, Steps, dict[str, Any]]]:
    """Each of the offline files: the run's id, its steps and its config."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]
    from wandb.sdk.internal.datastore import DataStore

    found = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))  # type: ignore[no-untyped-call]
        name, steps, config = "", {}, {}
        while (data := store.scan_data()) is not None:  # type: ignore[no-untyped-call]
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                name = record.run.run_id
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                steps[items.pop("_step")] = {k: v for k, v in items.items() if not k.startswith("_")}
        found.append((name, steps, config))
    return found


def test_flat() -> None:
    line = {
        "round": 2,
        "gsi": [0.5, None, [1, 2.5]],
        "loss": float("nan"),
        "far": float("inf"),
        "name": "x",
        "ok": True,
    }
    assert flat(line) == {"round": 2, "gsi/0": 0.5, "gsi/2/0": 1, "gsi/2/1": 2.5}
    assert flat({"a(b)=1": torch.tensor(1.0).numpy()[()], "none": None}) == {"a_b__1": 1.0}


@needs("tensorboard")
@needs("mlflow")
@needs("wandb")
@pytest.mark.long
def test_all_read_back_what_was_written_also_after_a_crash(tmp_path: Path) -> None:
    """Round 3 is logged, then lost by the run, whose checkpoint is of round 2, and played again."""
    config = dataclasses.replace(SMALL, rounds=5, checkpoint_every=2)

    def crash(event: fl.Event) -> None:
        if event.round == 3:
            raise RuntimeError("power cut")

    folder = tmp_path / "run"
    known = dataclasses.asdict(config)
    with pytest.raises(RuntimeError, match="power cut"), tracked(list(TRACKERS), folder, known) as tell:
        start_run(config, folder, callbacks=[*tell, crash])
    first = written(folder)
    assert list(first) == [1, 2, 3]
    assert from_mlflow(folder)[2] == "KILLED"
    with tracked(list(TRACKERS), folder, known, resume=True) as tell:
        start_run(config, folder, resume=True, callbacks=tell)
    lines = written(folder)
    assert list(lines) == [1, 2, 3, 4, 5]

    steps, settings = from_tensorboard(folder)
    assert steps.keys() == lines.keys()
    for number, line in lines.items():
        assert steps[number] == pytest.approx(line, rel=1e-6)  # it keeps 32 bits
    assert settings["method"] == "fedadam"

    steps, settings, status = from_mlflow(folder)
    assert steps == {**lines, 3: first[3]}  # what was logged first stays
    assert (settings["method"], settings["per_round"], status) == ("fedadam", "4", "FINISHED")

    before, after = from_wandb(folder)
    assert before[0] == after[0]  # parts of one run
    assert before[1] == first
    assert after[1] == {number: line for number, line in lines.items() if number >= 3}
    assert before[2]["method"] == after[2]["method"] == "fedadam"


@needs("tensorboard")
@needs("mlflow")
@needs("wandb")
def test_a_tracker_that_fails_is_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name in ("tensorboard", "wandb"):
        (tmp_path / name).write_text("a file where the tracker's folder should be")
    federation = fl.load("digits", clients=10)
    with caplog.at_level(logging.WARNING, "fedloom"), tracked(list(TRACKERS), tmp_path, {}) as tell:
        result = fl.fit(fl.model("logistic", federation), federation, rounds=3, callbacks=tell)
    assert len(result.history) == 3
    said = [record.getMessage() for record in caplog.records if "is left out from here on" in record.getMessage()]
    assert sorted(line.partition(" is left")[0] for line in said) == ["MLflow", "TensorBoard", "Weights & Biases"]


@needs("tensorboard")
def test_a_run_that_stops_early_is_closed(tmp_path: Path) -> None:
    federation = fl.load("digits", clients=10)

    def enough(event: fl.Event) -> Any:
        return fl.STOP if event.round == 2 else None

    with fl.track.TensorBoard(tmp_path, {"lr": 0.1, "loss": None}) as tracker:
        result = fl.fit(fl.model("logistic", federation), federation, rounds=9, callbacks=[tracker, enough])
        assert tracker.opened
    closed = not tracker.opened
    assert closed
    steps, _ = from_tensorboard(tmp_path)
    assert {n: line["train_loss"] for n, line in steps.items()} == pytest.approx(
        {row["round"]: row["train_loss"] for row in result.history}, rel=1e-6
    )


@needs("tensorboard")
def test_a_run_out_of_patience_is_closed(tmp_path: Path) -> None:
    federation = fl.load("digits", clients=10, validation=2)
    tracker = fl.track.TensorBoard(tmp_path, {"patience": 3})
    settings: dict[str, Any] = {"rounds": 90, "patience": 3, "local": fl.Local(lr=1e-9), "callbacks": [tracker]}
    result = fl.fit(fl.model("logistic", federation), federation, **settings)
    assert result.stopped == "patience"
    assert not tracker.opened
    assert set(from_tensorboard(tmp_path)[0]) == {row["round"] for row in result.history}


@needs("tensorboard")
def test_every_run_of_a_comparison_is_tracked(tmp_path: Path) -> None:
    from rich.console import Console

    done = compare(
        SMALL, ["fedavg", "fedadam"], tmp_path / "c", seeds=2, console=Console(quiet=True), track=["tensorboard"]
    )
    runs = [run for row in done.rows for run in row.runs]
    assert len(runs) == 4
    for run in runs:
        steps, settings = from_tensorboard(run.folder)
        assert steps[3] == pytest.approx(written(run.folder)[3], rel=1e-6)
        assert settings["method"] == run.config.method


@pytest.fixture
def fedloom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), capsys.readouterr().err

    return call


@needs("tensorboard")
def test_tracking_is_no_part_of_a_run(tmp_path: Path, fedloom: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--clients", "10", "--per-round", "4", "--model", "logistic", "--rounds", "2"]
    assert fedloom("run", *small, "--out", "plain")[0] == 0
    assert fedloom("run", *small, "--out", "told", "--track", "TensorBoard, tensorboard")[0] == 0
    for name in ("config.yaml", "model.safetensors"):
        assert Path("plain", name).read_bytes() == Path("told", name).read_bytes()
    assert from_tensorboard(tmp_path / "told")[0][2]["round"] == 2
    assert fedloom("run", *small, "--out", "told", "--resume")[0] == 0  # without it: the same run
    code, complaint = fedloom("run", *small, "--out", "x", "--track", "tensorbord")
    assert (code, "unknown tracker 'tensorbord': did you mean tensorboard?" in complaint) == (2, True)
    code, complaint = fedloom("compare", "fedavg", "--out", "x", "--track", "neptune")
    assert (code, "choose from mlflow, tensorboard, wandb" in complaint) == (2, True)
    assert not Path("x").exists()
    monkeypatch.setattr("fedloom.experiment.track.find_spec", lambda name: None)
    code, complaint = fedloom("run", *small, "--out", "x", "--track", "wandb")
    assert (code, "pip install 'fedloom[track]'" in complaint) == (2, True)
