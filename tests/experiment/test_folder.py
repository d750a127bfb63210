"""What a run folder says of a run, whatever happened to it: lost lines, a full disk, another process, a dead parent."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedloom as fl
from fedloom.errors import RunError
from fedloom.experiment import run as running
from fedloom.experiment.config import RunConfig
from fedloom.experiment.findings import Cell
from fedloom.experiment.folder import InUse
from fedloom.experiment.recipe import find_recipe
from fedloom.experiment.reproduce import reproduce
from fedloom.experiment.run import Job, start_run, start_runs
from fedloom.experiment.score import Score
from tests.command_line import ENV, fedloom

SMALL = RunConfig(clients=8, per_round=3, model="logistic", rounds=4)
RECIPE = """
title: t
seeds: 2
scores: {a: last(test_accuracy)}
settings: {data: digits, clients: 8, per_round: 3, model: logistic, rounds: 4}
methods: {A: fedavg, B: fedadam}
rows: {r: {}}
"""


def test_scores_that_are_all_undefined(tmp_path: Path) -> None:
    """Validation clients with one class have no AUC. Then the first model that was looked at is kept, and told of."""
    settings = ["--clients", "10", "--partition", "classes(per_client=1)", "--validation", "1", "--metric", "auc"]
    settings += ["--patience", "3", "--per-round", "3", "--rounds", "20", "--model", "logistic", "--eval-every", "2"]
    done = fedloom("run", *settings, "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = fl.load_run(tmp_path / "r")
    assert [line["validation_auc"] for line in run.history if "validation_auc" in line] == [None] * 4
    assert run.kept["round"] == 2
    measured = fedloom("evaluate", "r", cwd=tmp_path).stdout
    assert float(measured.partition("test_auc ")[2].split()[0]) == pytest.approx(run.kept["test_auc"], abs=1e-4)


def test_the_best_look_was_on_the_way(tmp_path: Path) -> None:
    """Under patience it is the model that is kept, and what the folder, the command and a resumed run say of it."""

    def stop(event: fl.Event) -> None:
        if event.round == 2:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"validation": 2, "method": "radfed(redistributions=4)", "rounds": 12, "patience": 6}
    config = replace(SMALL, eval_between=True, **settings)
    with pytest.raises(KeyboardInterrupt):
        start_run(config, tmp_path / "r", callbacks=[stop])
    run = start_run(config, tmp_path / "r", resume=True)
    whole = start_run(config, tmp_path / "whole")
    assert [line["between_validation_accuracy"] for line in run.history] == [
        line["between_validation_accuracy"] for line in whole.history
    ]
    scores = [s for line in run.history for s in [*line["between_validation_accuracy"], line["validation_accuracy"]]]
    best = scores.index(max(scores))
    line = run.history[best // 4]
    assert best % 4 != 3  # on the way
    assert len(scores) - 1 - best >= 6
    assert run.kept["round"] == line["round"]
    assert run.kept["test_accuracy"] == line["between_test_accuracy"][best % 4]
    measured = fedloom("evaluate", "r", cwd=tmp_path).stdout
    assert float(measured.partition("test_accuracy ")[2].split()[0]) == pytest.approx(
        run.kept["test_accuracy"], abs=1e-4
    )
    assert Score.read("best(test_accuracy, by=validation_accuracy)").of(run.history) == pytest.approx(
        100 * run.kept["test_accuracy"]
    )


def test_patience_does_not_begin_in_the_middle(tmp_path: Path) -> None:
    """The best model of the rounds before is not known."""

    def stop(event: fl.Event) -> None:
        if event.round == 3:
            raise KeyboardInterrupt

    config = replace(SMALL, validation=2, rounds=9)
    with pytest.raises(KeyboardInterrupt):
        start_run(config, tmp_path / "r", callbacks=[stop])
    with pytest.raises(RunError, match="patience can't begin in round 4"):
        start_run(replace(config, patience=2), tmp_path / "r", resume=True)
    assert len(start_run(config, tmp_path / "r", resume=True).history) == 9


def test_patience_does_not_begin_anew_without_the_best_model(tmp_path: Path) -> None:
    """Rounds without it keep no model: which was the best before them is not known any more."""
    config = replace(SMALL, validation=2)
    start_run(replace(config, rounds=3, patience=3), tmp_path / "r")
    start_run(replace(config, rounds=5), tmp_path / "r", resume=True)
    with pytest.raises(RunError, match="patience can't begin in round 6"):
        start_run(replace(config, rounds=7, patience=9), tmp_path / "r", resume=True)
    assert len(start_run(replace(config, rounds=7), tmp_path / "r", resume=True).history) == 7


@pytest.mark.parametrize("processes", [None, 1])
def test_a_folder_that_is_none_keeps_no_other_run_from_its_own(tmp_path: Path, processes: int | None) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe, options = find_recipe(str(tmp_path / "r.yaml")), {"engine": "vector"}

    def cells(processes: int | None = None) -> dict[str, Cell]:
        quiet = Console(quiet=True)
        done = reproduce(recipe, tmp_path / "o", console=quiet, processes=processes, settings=options)
        return {cell.case.label: cell for cell in done.cells}

    folders = [run.folder for cell in cells().values() for run in cell.runs]
    for folder in folders:
        shutil.rmtree(folder)
    folders[1].write_text("no folder")
    found = cells(processes)
    assert [run.folder for run in found["A"].runs] == folders[:1]
    assert [run.folder for run in found["B"].runs] == folders[2:]
    assert f"{folders[1]} is a file" in found["A"].why_not


def test_a_finished_run_that_lost_lines_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe, quiet = find_recipe(str(tmp_path / "r.yaml")), Console(quiet=True)
    whole = reproduce(recipe, tmp_path / "o", console=quiet)
    runs = {cell.case.label: cell.runs for cell in whole.cells}
    for label, lines in (("A", 2), ("B", 0)):
        metrics = runs[label][1].folder / "metrics.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:lines]))
    again = {cell.case.label: cell for cell in reproduce(recipe, tmp_path / "o", console=quiet).cells}
    assert "has 2 lines, but the run played 4 rounds" in again["A"].why_not
    assert "is empty although the run has finished" in again["B"].why_not
    assert [len(cell.runs) for cell in again.values()] == [1, 1]
    shutil.rmtree(runs["A"][1].folder)
    mended = {cell.case.label: cell for cell in reproduce(recipe, tmp_path / "o", console=quiet).cells}
    assert not mended["A"].why_not
    assert [run.history[-1]["train_loss"] for run in mended["A"].runs] == [
        run.history[-1]["train_loss"] for run in runs["A"]
    ]


def test_a_metrics_file_that_can_t_be_read_is_its_row_s_own_problem(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe, quiet = find_recipe(str(tmp_path / "r.yaml")), Console(quiet=True)
    first = reproduce(recipe, tmp_path / "o", console=quiet).cells[0].runs[0]
    (first.folder / "metrics.jsonl").write_text("{}\n" * 4)
    cells = reproduce(recipe, tmp_path / "o", console=quiet).cells
    assert "line 1 has no 'round'" in cells[0].why_not
    assert len(cells[1].runs) == 2


@pytest.mark.parametrize("grows", [True, False])
def test_another_process_finishes_the_run_between_reading_and_locking(
    grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = running.recorded

    def late(*given: Any) -> Any:
        monkeypatch.setattr(running, "recorded", recorded)
        start_runs([Job(SMALL, tmp_path / "r", grows=grows)])
        return recorded(*given)

    monkeypatch.setattr(running, "recorded", late)
    with pytest.raises(InUse, match="was in use by another fedloom until now"):
        start_runs([Job(SMALL, tmp_path / "r", grows=grows)], resume=True)
    assert fl.load_run(tmp_path / "r").finished
    assert len(start_run(SMALL, tmp_path / "r", resume=True).history) == 4


def test_a_model_that_can_t_be_written_is_its_run_s_own_problem(tmp_path: Path) -> None:
    """In lockstep; a folder stands in its way."""

    def block(event: fl.Event) -> None:
        (tmp_path / "0/.model.safetensors.part").mkdir(exist_ok=True)

    config = replace(SMALL, engine="vector")
    jobs = [Job(replace(config, rounds=2 if seed == 0 else 6, seed=seed), tmp_path / str(seed)) for seed in range(3)]
    with pytest.raises(RunError, match="can't be written"):
        start_runs([jobs[0]._replace(callbacks=[block]), *jobs[1:]])
    assert [fl.load_run(tmp_path / str(seed)).finished for seed in range(3)] == [False, True, True]
    shutil.rmtree(tmp_path / "0/.model.safetensors.part")
    assert len(start_run(jobs[0].config, jobs[0].folder, resume=True).history) == 2


def test_a_full_disk_says_what_is_safe(tmp_path: Path) -> None:
    """Files of more than 12 kB can't be written: the metrics come to that first."""
    command = [sys.executable, "-m", "fedloom", "run", "--model", "logistic", "--clients", "8", "--per-round", "3"]
    done = subprocess.run(
        [*command, "--rounds", "300", "--out", "r"],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 10, 12 << 10)),
    )
    assert done.returncode == 2, done.stderr
    assert "r/metrics.jsonl can't be written: File too large; the last checkpoint, of round " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_whose_parent_is_killed_saves_what_it_played(tmp_path: Path) -> None:
    settings = ["--data", "digits", "--model", "logistic", "--clients", "8", "--per-round", "3", "--seeds", "1"]
    settings += ["--rounds", "200000", "--processes", "1"]
    command = [sys.executable, "-m", "fedloom", "compare", "fedavg", *settings]
    parent = subprocess.Popen([*command, "--out", "c"], cwd=tmp_path, env=ENV, stderr=subprocess.DEVNULL)
    folder, deadline = tmp_path / "c/fedavg/seed-0", time.monotonic() + 60
    try:
        while not (folder / "metrics.jsonl").is_file() or (folder / "metrics.jsonl").stat().st_size < 20_000:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    saved = 0
    while not saved:  # it notices with the next round
        assert time.monotonic() < deadline
        time.sleep(0.1)
        saved = max(int(path.name[6:]) for path in (folder / "checkpoint").glob("round-*"))
    assert saved >= 20
    played = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert saved == len(played)
