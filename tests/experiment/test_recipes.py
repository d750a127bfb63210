"""Recipes: every one reads, runs at the smallest scale, and is refused with the line if something is wrong in it."""

import csv
import io
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from rich.console import Console

import fedloom as fl
from fedloom.errors import ConfigError, DataError, RunError
from fedloom.experiment import cost as costs
from fedloom.experiment import reproduce as reproducing
from fedloom.experiment.config import RunConfig
from fedloom.experiment.cost import duration, measure, seconds_for, speed_of
from fedloom.experiment.findings import Reproduction
from fedloom.experiment.folder import claim
from fedloom.experiment.processes import side_by_side
from fedloom.experiment.recipe import Printed, Recipe, find_recipe, read_recipe, recipe_names
from fedloom.experiment.reproduce import reproduce, scaled
from fedloom.experiment.run import prepare_run, start_run, start_runs
from fedloom.experiment.score import Score
from fedloom.report import reproduction
from fedloom.report.recipe_page import listed, recipe_page

QUIET = Console(quiet=True)
# Scores that two rounds can't have: of a later round, of an accuracy that is not reached, of two points.
POOR = {"accuracy", "f1", "auc"}  # relative to nothing at all
LONGER = {"drop", "to_30", "to_70", "correlation", "switched"}
# Data, models and methods that another recipe has too.
REPEATED = {
    *("fedglad-table7", "fedglad-fig6", "fedglad-fig7", "fedglad-table14", "fedglad-fig3", "fedglad-table3"),
    *("radfed-fig2", "robustness", "2dlrd-fig2", "fedglad-table11", "stacking"),
}
SMOKE = [pytest.param(name, marks=[pytest.mark.long] if name in REPEATED else []) for name in recipe_names()]
DATA = Path(os.environ.get("FEDLOOM_DATA") or "nowhere")
SMALL = """\
title: A small table
paper: nobody
about: Digits in a few rounds.
seeds: 2
scores:
  accuracy: mean(test_accuracy, last=3)
  norm: last(theta_norm)
settings: {data: digits, clients: 10, per_round: 4, model: logistic, rounds: 6}
methods:
  FedAvg: fedavg
  RADFed: radfed(redistributions=3)
rows:
  skewed/2:
    settings: {partition: classes(per_client=2)}
    printed: {FedAvg: 50.0 ± 2.0, RADFed: [60, 62]}
  even:
    settings: {partition: iid}
    methods:
      RADFed: null
      FedAdam: {method: fedadam(lr=0.02), settings: {lr: 0.05}}
    printed:
      norm: {FedAdam: 3}
"""


def written(text: str, folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path, Reproduction]:
    folder = tmp_path_factory.mktemp("recipe")
    recipe = read_recipe(written(SMALL, folder))
    return recipe, folder, reproduce(recipe, folder / "out", console=QUIET)


# ---------------------------------------------------------------------------------------------------------------------
# The recipes of the papers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipes that need the same run share it."""
    return tmp_path_factory.mktemp("smoke")


@pytest.mark.skipif(not (DATA / "mnist.npz").is_file(), reason="needs real data in FEDLOOM_DATA (see docs/data.md)")
@pytest.mark.parametrize("name", SMOKE)
def test_every_recipe_runs(name: str, shared_runs: Path) -> None:
    recipe = find_recipe(name)
    found = reproduce(recipe, shared_runs, console=QUIET, scale="smoke")
    whys = {why for why in reproduction.reasons(found) if not why.startswith("smoke runs one row")}
    absent = ("is not on this machine", "are not on this machine", "is no folder with", "not to be had", "credentialed")
    assert all(any(words in why for words in absent) for why in whys), whys
    for cell in found.cells:
        assert cell.runs or cell.why_not
    findings = found.findings()
    left_out = {row.partition(" (")[0] for rows in reproduction.reasons(found).values() for row in rows}
    told = {f.row for f in findings} | left_out
    assert told == set(recipe.rows)  # none is hidden
    for finding in findings:
        if not finding.why_not and finding.score not in LONGER:
            assert finding.runs == 1
            assert finding.note == "" or finding.score in POOR
    if not any(cell.runs for cell in found.cells):
        pytest.skip(f"no row can be run here: {'; '.join(sorted(whys))[:300]}")


def test_every_table_and_figure_is_there() -> None:
    wanted = {f"fedglad-table{n}" for n in (1, 2, 3, 4, *range(6, 15))} | {f"fedglad-fig{n}" for n in range(3, 12)}
    wanted |= {"adabest-table2", *(f"adabest-fig{n}" for n in (1, 3, 4, 5, 6, 7))}
    wanted |= {"dgt-curves", "dgt-similarity", "dgt-conflicts"}
    wanted |= {"radfed-table3", *(f"radfed-fig{n}" for n in range(2, 8))}
    wanted |= {"2dlrd-table3", *(f"2dlrd-fig{n}" for n in (1, 2, 4, 5))}
    assert wanted <= set(recipe_names())
    assert recipe_names().index("fedglad-table2") < recipe_names().index("fedglad-table10")


@pytest.mark.parametrize(
    ("recipe", "row", "label", "mean", "sd"),
    [  # some of what the papers print, typed in again from them
        ("fedglad-table1", "mnist", "FedAvg+FedGLAD", 79.71, 0.49),
        ("fedglad-table7", "cifar10", "FedAdam", 79.97, 1.30),
        ("adabest-table2", "cifar10/10%/alpha=0.3", "AdaBest", 84.15, 0.36),
        ("adabest-table2", "emnist-l/1%/alpha=0.03", "SCAFFOLD", 93.99, 0.16),
        ("radfed-table3", "covfeat-l", "RADFedm", 5.29, None),
        ("2dlrd-table3", "agnews", "2D-LRD", 87.9, None),
        ("fedglad-table13", "mnist", "FedAvg", np.mean([78.29, 77.77, 78.44]), np.std([78.29, 77.77, 78.44], ddof=1)),
    ],
)
def test_printed_numbers(recipe: str, row: str, label: str, mean: float, sd: float | None) -> None:
    (case,) = (c for c in find_recipe(recipe).cases if c.row == row and c.label == label)
    (printed,) = case.printed.values()
    assert printed.mean == pytest.approx(mean)
    assert printed.sd == (None if sd is None else pytest.approx(sd))


# ---------------------------------------------------------------------------------------------------------------------
# A recipe of one's own
# ---------------------------------------------------------------------------------------------------------------------


def test_measured_beside_printed(done: tuple[Recipe, Path, Reproduction]) -> None:
    recipe, _, found = done
    by_name = {(f.row, f.label, f.score): f for f in found.findings()}
    assert set(by_name) == {
        *(
            (row, label, score)
            for row, label in [("skewed/2", "FedAvg"), ("skewed/2", "RADFed")]
            for score in recipe.scores
        ),
        *(("even", label, score) for label in ("FedAvg", "FedAdam") for score in recipe.scores),
    }
    first = by_name["skewed/2", "FedAvg", "accuracy"]
    cell = next(c for c in found.cells if c.case.row == "skewed/2" and c.case.label == "FedAvg")
    assert [run.config.seed for run in cell.runs] == [0, 1]
    tails = [100 * np.mean([line["test_accuracy"] for line in run.history[-3:]]) for run in cell.runs]
    assert first.mean == pytest.approx(np.mean(tails))
    assert first.sd == pytest.approx(np.std(tails, ddof=1))
    assert first.difference == pytest.approx(np.mean(tails) - 50)
    assert first.deviations == pytest.approx((np.mean(tails) - 50) / 2)
    assert by_name["skewed/2", "RADFed", "accuracy"].printed == Printed(61, 2**0.5)
    travelled = next(c for c in found.cells if c.case.label == "RADFed")
    assert [len(run.history) for run in travelled.runs] == [2, 2]  # as many Works as six rounds
    assert by_name["even", "FedAdam", "norm"].printed == Printed(3)
    adam = next(c for c in found.cells if c.case.label == "FedAdam")
    assert adam.runs[0].config.lr == 0.05


def test_results_read_back(done: tuple[Recipe, Path, Reproduction], tmp_path: Path) -> None:
    _, _, found = done
    lines = list(csv.DictReader(io.StringIO(reproduction.csv_text(found))))
    for line, finding in zip(lines, found.findings(), strict=True):
        assert float(line["measured"]) == finding.mean
        assert (line["row"], line["label"]) == (finding.row, finding.label)
    text = reproduction.markdown(found, "fedloom reproduce small.yaml")
    assert text.count("\n| skewed/2 | FedAvg |") == 2
    assert "fedloom reproduce small.yaml" in text


def test_what_was_done_is_not_done_again(done: tuple[Recipe, Path, Reproduction]) -> None:
    recipe, folder, found = done
    runs = [run.folder for cell in found.cells for run in cell.runs]
    before = {path: (path / "metrics.jsonl").stat().st_mtime_ns for path in runs}
    shutil.rmtree(runs[0])
    again = reproduce(recipe, folder / "out", console=QUIET)
    assert [f.mean for f in again.findings()] == [f.mean for f in found.findings()]
    after = {path: (path / "metrics.jsonl").stat().st_mtime_ns for path in runs}
    assert {path for path in runs if before[path] != after[path]} == {runs[0]}


def test_what_was_done_keeps_no_checkpoint(done: tuple[Recipe, Path, Reproduction], tmp_path: Path) -> None:
    """With more rounds it would be another run; one that was started by hand may go on."""
    recipe, _, found = done
    apart = reproduce(recipe, tmp_path / "out", console=QUIET, rows=["even"], seeds=1, processes=2)
    runs = [run for each in (found, apart) for cell in each.cells for run in cell.runs]
    for run in runs:
        assert (run.folder / "model.safetensors").is_file()
        assert not (run.folder / "checkpoint").exists()
    start_run(runs[0].config, tmp_path / "by hand")
    assert (tmp_path / "by hand" / "checkpoint").is_dir()


@pytest.mark.parametrize("processes", [None, 2])
def test_one_by_one(processes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one cohort by default, in one process or in several; or each run for itself, with the same results."""
    recipe = read_recipe(written(SMALL, tmp_path))
    sizes: list[int] = []

    def counted(jobs: Any, **settings: Any) -> Any:
        sizes.append(len(jobs))
        return start_runs(jobs, **settings)

    def counted_apart(groups: Any, *rest: Any, **settings: Any) -> Any:
        sizes.extend(map(len, groups))
        return side_by_side(groups, *rest, **settings)

    monkeypatch.setattr(reproducing, "start_runs", counted)
    monkeypatch.setattr(reproducing, "side_by_side", counted_apart)
    found = []
    for lockstep in (True, False):
        out, settings = tmp_path / str(lockstep), {"engine": "vector"}
        again = reproduce(
            recipe, out, console=QUIET, rows=["even"], settings=settings, lockstep=lockstep, processes=processes
        )
        found.append([finding.mean for finding in again.findings() if finding.told])
        if not lockstep:
            assert set(sizes) == {1}
        else:
            assert max(sizes) > 1
        sizes.clear()
    assert found[0]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_runs_with_the_same_clients_are_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary is made of the texts of the clients that train, so that the models of two folds may differ."""
    folds = SMALL.replace("seeds: 2", "seeds: 1\nfolds: 5").replace("settings: {data", "settings: {pooled: true, data")
    seen: list[list[int | None]] = []

    def looked_at(groups: Any, *rest: Any, **settings: Any) -> dict[int, Any]:
        seen.extend([job.config.fold for job in group] for group in groups)
        return {}

    monkeypatch.setattr(reproducing, "side_by_side", looked_at)
    reproduce(read_recipe(written(folds, tmp_path)), tmp_path / "out", console=QUIET, rows=["skewed/2"], processes=5)
    assert seen == [[fold, fold] for fold in range(5)]  # two methods


def test_a_row_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe(written(SMALL, tmp_path))
    started = start_runs

    def stop_soon(jobs: Any, **settings: Any) -> Any:
        def interrupt(event: Any) -> None:
            if event.round == 4:
                raise KeyboardInterrupt

        return started([job._replace(callbacks=[*job.callbacks, interrupt]) for job in jobs], **settings)

    monkeypatch.setattr(reproducing, "start_runs", stop_soon)
    with pytest.raises(KeyboardInterrupt):
        reproduce(recipe, tmp_path / "out", console=QUIET, rows=["even"])
    monkeypatch.setattr(reproducing, "start_runs", started)
    whole = reproduce(recipe, tmp_path / "whole", console=QUIET, rows=["even"])
    resumed = reproduce(recipe, tmp_path / "out", console=QUIET, rows=["even"])
    assert [f.mean for f in resumed.findings() if f.runs] == [f.mean for f in whole.findings() if f.runs]


def test_relative_differences(tmp_path: Path) -> None:
    recipe = read_recipe(written(SMALL.replace("seeds: 2", "seeds: 2\nrelative_to: FedAvg"), tmp_path))
    found = reproduce(recipe, tmp_path / "out", console=QUIET, rows=["skewed"])
    by_label = {c.case.label: np.mean([*c.values(recipe, "accuracy").values()]) for c in found.cells if c.runs}
    told = {f.label: f for f in found.findings() if f.score == "accuracy" and f.runs}
    assert told["FedAvg"].mean == pytest.approx(by_label["FedAvg"])
    assert told["RADFed"].mean == pytest.approx(100 * (by_label["RADFed"] / by_label["FedAvg"] - 1))
    assert not [f for f in found.findings() if f.row == "even"]
    assert reproduction.reasons(found) == {"not chosen by --rows": ["even"]}


def test_relative_to_the_same_seeds(tmp_path: Path) -> None:
    """Where runs are missing, on either side, those that both methods have are compared."""
    recipe = read_recipe(written(SMALL.replace("seeds: 2", "seeds: 3\nrelative_to: FedAvg"), tmp_path))
    found = reproduce(recipe, tmp_path / "out", console=QUIET, rows=["skewed"])
    fedavg, radfed = (
        next(c for c in found.cells if c.runs and c.case.label == label) for label in ("FedAvg", "RADFed")
    )
    base, mine = ([*cell.values(recipe, "accuracy").values()] for cell in (fedavg, radfed))
    assert len(set(base)) == 3
    for kept, others, shared in (((0, 1, 2), (1, 2), (1, 2)), ((1,), (0, 1, 2), (1,)), ((0,), (2,), ())):
        cells = tuple(
            replace(cell, runs=tuple(cell.runs[i] for i in own)) for cell, own in ((fedavg, kept), (radfed, others))
        )
        told = {f.label: f for f in replace(found, cells=cells).findings() if f.score == "accuracy"}
        assert told["FedAvg"].mean == pytest.approx(np.mean([base[i] for i in kept]))
        if not shared:
            assert (told["RADFed"].told, told["RADFed"].note) == (False, "no FedAvg")
            continue
        wanted = np.mean([mine[i] for i in shared]) / np.mean([base[i] for i in shared]) - 1
        assert told["RADFed"].mean == pytest.approx(100 * wanted)
        assert told["RADFed"].runs == len(shared)


def test_relative_to_what_diverged(tmp_path: Path) -> None:
    recipe = read_recipe(written(SMALL.replace("seeds: 2", "seeds: 2\nrelative_to: FedAvg"), tmp_path))
    found = reproduce(recipe, tmp_path / "out", console=QUIET, rows=["skewed"])
    base = next(cell for cell in found.cells if cell.runs and cell.case.label == "FedAvg")
    lost = replace(base.runs[1], history=[{**line, "test_accuracy": math.nan} for line in base.runs[1].history])
    cells = tuple(replace(c, runs=(base.runs[0], lost)) if c is base else c for c in found.cells)
    told = {f.label: f for f in replace(found, cells=cells).findings() if f.score == "accuracy"}
    assert (told["FedAvg"].told, told["FedAvg"].note) == (False, "diverged")
    assert (told["RADFed"].told, told["RADFed"].note) == (False, "FedAvg diverged")
    radfed = replace(cells[1], runs=cells[1].runs[:1])
    told = {f.label: f for f in replace(found, cells=(cells[0], radfed)).findings() if f.score == "accuracy"}
    assert told["RADFed"].told  # the run beside it is whole


def test_some_methods_now_and_others_later(tmp_path: Path) -> None:
    """What was run before is told beside what is run now; without what it is relative to, a method has no score."""
    recipe = read_recipe(written(SMALL.replace("seeds: 2", "seeds: 1\nrelative_to: FedAvg"), tmp_path))
    first = reproduce(recipe, tmp_path / "out", console=QUIET, rows=["skewed"], methods=["RADFed"])
    assert [len(cell.runs) for cell in first.cells] == [0, 1, 0, 0]
    (told,) = (f for f in first.findings() if f.score == "accuracy")
    assert (told.label, told.told, told.note) == ("RADFed", False, "no FedAvg")
    missing = reproduction.reasons(first)
    assert missing == {"not chosen by --methods": ["skewed/2 (FedAvg)"], "not chosen by --rows": ["even"]}
    second = reproduce(recipe, tmp_path / "out", console=QUIET, rows=["skewed"], methods=["FedAvg"])
    assert [len(cell.runs) for cell in second.cells] == [1, 1, 0, 0]
    whole = reproduce(recipe, tmp_path / "whole", console=QUIET, rows=["skewed"])
    assert [f.mean for f in second.findings()] == pytest.approx([f.mean for f in whole.findings()])


@pytest.mark.parametrize("processes", [None, 2])
def test_progress_names_rows_and_methods_as_the_recipe_does(tmp_path: Path, processes: int | None) -> None:
    """Two rows may have the same method, and a method may be pages long."""
    recipe = read_recipe(written(SMALL.replace("seeds: 2", "seeds: 1\nfolds: 5"), tmp_path))
    said = io.StringIO()
    console = Console(file=said, width=200)
    asked: dict[str, Any] = {"rows": ["skewed"], "only_folds": [3], "settings": {"pooled": True}}
    reproduce(recipe, tmp_path / "out", console=console, processes=processes, **asked)
    last = said.getvalue().splitlines()[-1]
    assert re.match(r"skewed/2, (FedAvg|RADFed), seed 0, fold 3: round [26]/[26]  accuracy 0", last), said.getvalue()


def test_a_row_by_its_whole_name_is_that_row_alone(tmp_path: Path) -> None:
    recipe = read_recipe(written(SMALL.replace("  even:\n", "  skewed:\n"), tmp_path))
    for asked, chosen in (("skewed", ["skewed"]), ("2", ["skewed/2"]), ("skewed/2", ["skewed/2"])):
        found = reproduce(recipe, tmp_path / str(chosen), console=QUIET, rows=[asked], seeds=1)
        assert list(dict.fromkeys(f.row for f in found.findings() if f.runs)) == chosen


def test_a_method_that_a_recipe_does_not_have(tmp_path: Path) -> None:
    recipe = read_recipe(written(SMALL, tmp_path))
    with pytest.raises(ConfigError, match="small has no method 'RADFad': did you mean RADFed"):
        reproduce(recipe, tmp_path / "out", console=QUIET, methods=["RADFad"])
    assert not (tmp_path / "out").exists()
    found = reproduce(recipe, tmp_path / "out", console=QUIET, seeds=1, methods=["RADFed"])  # one row has none of it
    assert {cell.case.row for cell in found.cells if cell.runs} == {"skewed/2"}


def test_one_methods_problem_is_not_the_others(tmp_path: Path) -> None:
    text = SMALL.replace("  FedAvg: fedavg\n", "  FedAvg: fedavg\n  Forced: fixed(cohorts=[[99]])\n")
    recipe = read_recipe(written(text, tmp_path))
    found = reproduce(recipe, tmp_path / "out", console=QUIET, seeds=1, rows=["even"])
    told = reproduction.reasons(found)
    (why,) = (why for why in told if "99" in why)
    assert told[why] == ["even (Forced)"]
    assert all(cell.runs for cell in found.cells if cell.case.row == "even" and cell.case.label != "Forced")
    shown = {tuple(line[:4]) for line in reproduction.grid(found)[1]}
    assert ("even", "Forced", "accuracy", "not run") in shown


@pytest.mark.parametrize("how", [{"lockstep": True}, {"lockstep": False}, {"processes": 1}, {"processes": 2}], ids=str)
def test_one_seeds_problem_is_not_the_others(how: dict[str, Any], tmp_path: Path) -> None:
    """Seeds 0 and 2 deal a client less than a batch, of which nothing is left; and a method asks for a client that is
    not there.
    """
    text = """
title: t
seeds: 4
scores: {accuracy: last(test_accuracy)}
settings: {
  data: digits, model: logistic, clients: 20, rounds: 2, partition: "dirichlet(alpha=0.1, sigma=1.0)", batch_size: 8,
  last_batch: drop
}
methods: {A: fedavg, B: fedprox(mu=0.1), C: {method: "fixed(cohorts=[[99]])", settings: {last_batch: keep}}}
rows: {r: {}}
"""
    recipe = read_recipe(written(text, tmp_path))
    found = reproduce(recipe, tmp_path / "out", console=QUIET, settings={"engine": "vector"}, **how)
    seeds = {cell.case.label: [run.config.seed for run in cell.runs] for cell in found.cells}
    possible = [seed for seed in range(4) if min(fl.load(**asked(seed)).sizes) >= 8]
    assert 0 < len(possible) < 4
    assert seeds == {"A": possible, "B": possible, "C": []}
    whys = {cell.case.label: cell.why_not for cell in found.cells}
    assert "drop" in whys["A"]
    assert whys["A"] == whys["B"]
    assert "no client 99" in whys["C"]


def asked(seed: int) -> dict[str, Any]:
    return {"name": "digits", "partition": "dirichlet(alpha=0.1, sigma=1.0)", "clients": 20, "seed": seed}


def test_missing_data_are_said(tmp_path: Path) -> None:
    text = SMALL.replace("partition: iid}", f"partition: iid, data: cifar100, data_dir: {tmp_path}}}")
    found = reproduce(read_recipe(written(text, tmp_path)), tmp_path / "out", console=QUIET, seeds=1)
    (why,) = reproduction.reasons(found)
    assert "cifar100" in why
    assert [cell.runs for cell in found.cells if cell.case.row == "even"] == [(), ()]
    assert reproduction.reasons(found)[why] == ["even"]


def test_some_folds_now_and_others_later(tmp_path: Path) -> None:
    text = SMALL.replace("seeds: 2", "seeds: 1\nfolds: 3").replace("test_accuracy, last=3", "test_accuracy")
    recipe = read_recipe(written(text, tmp_path))

    def played(**asked: Any) -> list[int | None]:
        found = reproduce(recipe, tmp_path / "out", console=QUIET, rows=["skewed"], methods=["FedAvg"], **asked)
        return [run.config.fold for cell in found.cells for run in cell.runs]

    assert played(only_folds=[2]) == [2]
    assert len(list((tmp_path / "out" / "runs").glob("*/*"))) == 1
    assert played(only_folds=[2, 0, 2]) == [0, 2]
    with pytest.raises(ConfigError, match="small has folds 0 to 2: there is no fold 3"):
        played(only_folds=[1, 3])
    plain = read_recipe(written(SMALL, tmp_path))
    with pytest.raises(ConfigError, match="small does not hold clients out in folds: there is no fold 0"):
        reproduce(plain, tmp_path / "out", console=QUIET, only_folds=[0])


def test_folds(tmp_path: Path) -> None:
    text = SMALL.replace("seeds: 2", "seeds: 1\nfolds: 2").replace("test_accuracy, last=3", "test_accuracy")
    found = reproduce(read_recipe(written(text, tmp_path)), tmp_path / "out", console=QUIET, rows=["skewed"])
    runs = [run for cell in found.cells for run in cell.runs]
    assert [(run.config.seed, run.config.fold) for run in runs] == [(0, 0), (0, 1)] * 2
    assert len({run.folder for run in runs}) == 4


def test_looks_on_the_way_count(tmp_path: Path) -> None:
    """Of RADFed with three redistributions each round has two looks on the way and one at the average."""
    text = SMALL.replace("seeds: 2", "seeds: 1\nfolds: 1").replace(
        "mean(test_accuracy, last=3)", "best(test_accuracy, by=validation_accuracy)"
    )
    text = text.replace("rounds: 6", "rounds: 24, eval_between: true")
    asked: dict[str, Any] = {"rows": ["skewed"], "methods": ["RADFed"]}
    found = reproduce(read_recipe(written(text, tmp_path)), tmp_path / "out", console=QUIET, **asked)
    (run,) = (run for cell in found.cells for run in cell.runs)
    looks: list[tuple[float, float]] = []
    for line in run.history:
        between = [line["between_validation_accuracy"], line["between_test_accuracy"]]
        assert [len(values) for values in between] == [2, 2]
        looks += [*zip(*between, strict=True), (line["validation_accuracy"], line["test_accuracy"])]
    assert len(looks) == 24
    best = looks.index(max(looks, key=lambda look: look[0]))
    assert best % 3 != 2  # on the way
    (measured,) = (f.mean for f in found.findings() if (f.label, f.score) == ("RADFed", "accuracy"))
    assert measured == pytest.approx(100 * looks[best][1])


def test_runs_stay_where_they_are(done: tuple[Recipe, Path, Reproduction]) -> None:
    """Results of one release are found by the next one, though it may have further settings."""
    _, folder, _ = done
    places = {path.parent.relative_to(folder / "out" / "runs").as_posix() for path in folder.glob("out/runs/*/*")}
    assert places == {
        "digits-logistic-fedavg-b9e141104d",
        "digits-logistic-fedavg-49c9a33b5b",
        "digits-logistic-radfed_redistributions=3-b068f8e9-955df19482",
        "digits-logistic-fedadam_lr=0.02-d1739803-0261785fce",
    }


def test_a_forced_round(tmp_path: Path) -> None:
    text = SMALL.replace("seeds: 2", "seeds: 1\nforce: {round: 5, cohort: one-class}")
    text = text.replace("rounds: 6", "rounds: 6, diagnose: labels")
    text = text.replace("norm: last(theta_norm)", "norm: argmin(labels.similarity)")
    found = reproduce(read_recipe(written(text, tmp_path)), tmp_path / "out", console=QUIET, rows=["skewed"])
    told = {f.label: f.mean for f in found.findings() if f.score == "norm" and f.runs}
    assert told["FedAvg"] == 5


# ---------------------------------------------------------------------------------------------------------------------
# Scales and costs
# ---------------------------------------------------------------------------------------------------------------------


def test_scales() -> None:
    recipe = find_recipe("adabest-table2")
    case = next(c for c in recipe.cases if c.row == "cifar10/10%/alpha=0.3" and c.label == "AdaBest")
    paper, quick, smoke = (scaled(recipe, case, scale) for scale in ("paper", "quick", "smoke"))
    assert (paper.rounds, quick.rounds, smoke.rounds) == (1200, 120, 2)
    assert quick.samples is None
    assert smoke.samples == 60
    assert scaled(recipe, case, "paper", rounds=7).rounds == 7
    with pytest.raises(ConfigError, match="unknown scale 'tiny'"):
        scaled(recipe, case, "tiny")


def test_a_row_that_takes_days_wants_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducing, "LONGEST_WITHOUT_GPU", 0.0)
    monkeypatch.setattr(reproducing, "find_device", lambda device: torch.device("cpu"))
    recipe = read_recipe(written(SMALL, tmp_path))
    found = reproduce(recipe, tmp_path / "out", console=QUIET)
    assert all("it needs a GPU: about" in cell.why_not for cell in found.cells)
    asked = reproduce(recipe, tmp_path / "out", console=QUIET, seeds=1, settings={"device": "cpu"})
    assert all(cell.runs for cell in asked.cells)


def test_costs_come_true(tmp_path: Path) -> None:
    """Within a factor: machines are noisy."""
    config = RunConfig(clients=10, per_round=4, model="mlp", rounds=30, epochs=4, partition="iid", engine="loop")
    said = seconds_for(config)
    ready = prepare_run(config, tmp_path, resume=False)
    assert not hasattr(ready, "history")
    taken = ready[0].run().history[-1]["seconds"]
    assert taken / 5 < said < 5 * taken
    assert measure(config).clients == 10
    longer = RunConfig(**{**config.__dict__, "rounds": 300})
    assert seconds_for(longer) == pytest.approx(10 * said)
    assert speed_of(config) == speed_of(longer)


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 89, 100, 3600, 36000, 9e5)] == [
        "0 s",
        "89 s",
        "2 min",
        "60 min",
        "10 h",
        "10 days",
    ]


def test_the_list(done: tuple[Recipe, Path, Reproduction], capsys: pytest.CaptureFixture[str]) -> None:
    recipe, _, _ = done
    Console(width=200).print(listed([recipe], True, None, QUIET))
    shown = capsys.readouterr().out
    assert "A small table (nobody)" in shown
    assert " 8 " in shown  # runs
    assert "RADFed: radfed(redistributions=3)  (printed: accuracy 61 ± 1.41421)" in recipe_page(recipe)


def test_what_is_not_there_is_looked_for_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows and recipes want it."""
    asked = []

    def load(**dealing: Any) -> NoReturn:
        asked.append(dealing)
        raise DataError("there is no such thing here: look elsewhere")

    monkeypatch.setattr(costs, "load_data", load)
    recipe = read_recipe(written(SMALL.replace("per_round: 4", "batch_size: 7"), tmp_path))
    Console(width=200).print(listed([recipe, recipe], True, None, QUIET))
    assert capsys.readouterr().out.count("there is no such thing here") == 2
    assert len(asked) == 1


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong is told with its line
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("title: A small", "tittle: A small", 1, "unknown key 'tittle': did you mean title?"),
        ("seeds: 2", "seeds: 0", 4, "seeds must be a whole number"),
        ("seeds: 2", "seeds: two", 4, "seeds must be a whole number"),
        ("mean(test", "meen(test", 6, "unknown score 'meen': did you mean mean"),
        ("last=3", "lst=3", 6, "mean has no 'lst': did you mean last?"),
        ("per_round: 4", "per_rounds: 4", 8, "unknown setting 'per_rounds': did you mean per_round"),
        ("per_round: 4", "per_round: many", 8, "per_round must be"),
        ("rounds: 6", "rounds: 6, seed: 3", 8, "a recipe does not set seed"),
        ("  FedAvg: fedavg", "  FedAvg: fedavgg", 10, "fedavgg"),
        ("  RADFed: radfed(redistributions=3)", "  RADFed: radfed(redistribution=3)", 11, "redistribution"),
        ("    settings: {partition: classes(per_client=2)}", "    setings: {}", 14, "did you mean settings?"),
        ("FedAvg: 50.0 ± 2.0", "FedAvgg: 50.0 ± 2.0", 15, "unknown key 'FedAvgg': did you mean FedAvg?"),
        ("FedAvg: 50.0 ± 2.0", "FedAvg: about 50", 15, "'about 50' is no printed result"),
        ("      norm: {FedAdam: 3}", "      normm: {FedAdam: 3}", 22, "did you mean norm?"),
        ("      norm: {FedAdam: 3}", "      norm: {RADFed: 3}", 22, "unknown key 'RADFed'"),
        ("      RADFed: null", "      RADFed: null\n      RADFed: dgt", 20, "'RADFed' is set twice"),
        ("settings: {lr: 0.05}", "settings: {lr: fast}", 20, "lr must be a number"),
        ("settings: {lr: 0.05}", "setings: {lr: 0.05}", 20, "did you mean settings?"),
        ("seeds: 2", "relative_to: FedProx", 4, "row skewed/2 has no method 'FedProx'"),
        ("seeds: 2", "force: {round: 0, cohort: one-class}", 4, "expected {round: 40"),
        ("seeds: 2", "scales: {small: {}}", 4, "unknown key 'small'"),
        ("seeds: 2", "scales: {smoke: {lrr: 1}}", 4, "unknown setting 'lrr'"),
        ("seeds: 2", "seeds: [", 6, "expected"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(old: str, new: str, line: int, message: str, tmp_path: Path) -> None:
    assert old in SMALL
    path = written(SMALL.replace(old, new, 1), tmp_path)
    with pytest.raises(ConfigError) as told:
        read_recipe(path)
    assert f"{path}, line {line}: " in str(told.value)
    assert message in str(told.value)


def test_what_is_missing(tmp_path: Path) -> None:
    for text in (
        "",
        "title: x",
        SMALL.replace("scores:", "plots:").replace("  accuracy: mean(test_accuracy, last=3)\n", ""),
    ):
        with pytest.raises(ConfigError):
            read_recipe(written(text, tmp_path))
    with pytest.raises(ConfigError, match="did you mean adabest-table2"):
        find_recipe("adabest-tabel2")
    with pytest.raises(ConfigError, match="can't be read"):
        find_recipe(str(tmp_path / "none.yaml"))
    recipe = read_recipe(written(SMALL, tmp_path))
    with pytest.raises(ConfigError, match="has no row 'odd': the rows are skewed/2, even"):
        reproduce(recipe, tmp_path / "out", console=QUIET, rows=["odd"])
    with pytest.raises(ConfigError, match="does not hold clients out"):
        reproduce(recipe, tmp_path / "out", console=QUIET, folds=2)


# ---------------------------------------------------------------------------------------------------------------------
# Scores
# ---------------------------------------------------------------------------------------------------------------------

HISTORY = json.loads(
    """[
    {"round": 1, "works": 3, "test_accuracy": 0.2, "validation_accuracy": 0.5, "g": [1, 2], "a": 1, "b": 2,
     "between_s": [3, 8, null], "between_v": [2, 6, 9], "s": 1, "v": 1, "between_t": 3},
    {"round": 2, "works": 6, "g": [3, null], "a": 2, "b": 1,
     "between_s": [4, 7], "between_v": [null, 10], "s": 2, "v": 2, "t": 1},
    {"round": 3, "works": 9, "test_accuracy": 0.6, "validation_accuracy": 0.9, "g": null, "a": 4, "b": 0},
    {"round": 4, "works": 12, "test_accuracy": 0.5, "validation_accuracy": 0.8, "a": 3, "b": null}
]"""
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("last(test_accuracy)", 50),
        ("mean(test_accuracy)", 130 / 3),
        ("mean(test_accuracy, last=2)", 55),
        ("mean(test_accuracy, works=3)", 50),
        ("mean(test_accuracy, works=4)", 55),
        ("mean(nothing, works=4)", math.nan),
        ("max(test_accuracy)", 60),
        ("min(test_accuracy)", 20),
        ("argmax(test_accuracy)", 3),
        ("argmin(a)", 1),
        ("first(test_accuracy, above=0.5)", 9),
        ("first(test_accuracy, above=0.7)", math.nan),
        ("first(v, above=6)", 1),
        ("first(v, above=10)", 5),
        ("drop(test_accuracy, round=4)", 10),
        ("drop(test_accuracy, round=2)", math.nan),
        ("best(test_accuracy, by=validation_accuracy)", 60),
        ("best(a, by=b)", 1),
        ("best(s, by=v)", 7),
        ("best(v, by=s)", 6),
        ("best(s, by=b)", 1),
        ("best(v, by=t)", 2),
        ("pearson(a, b)", np.corrcoef([1, 2, 4], [2, 1, 0])[0, 1]),
        ("max(g)", 3),
        ("last(nothing)", math.nan),
        ("max(nothing)", math.nan),
    ],
)
def test_scores(text: str, value: float) -> None:
    assert Score.read(text).of(HISTORY) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    "text", ["", "last", "last()", "last(a, b)", "first(a)", "drop(a)", "mean(a, last=x)", "pearson(a)", 3]
)
def test_scores_that_are_none(text: Any) -> None:
    with pytest.raises(ConfigError):
        Score.read(text)


# ---------------------------------------------------------------------------------------------------------------------
# What a hostile user does
# ---------------------------------------------------------------------------------------------------------------------


def test_rows_may_be_called_anything(tmp_path: Path) -> None:
    text = (
        SMALL.partition("rows:")[0]
        + """rows:
  10: {settings: {clients: 12, partition: iid}, printed: {FedAvg: 50, 2: 60}}
  0.5: {settings: {partition: iid}}
  yes: {settings: {partition: iid, lr: 0.05}}
"""
    )
    text = text.replace("RADFed:", "2:")
    recipe = read_recipe(written(text, tmp_path))
    assert recipe.rows == ["10", "0.5", "yes"]
    assert {c.label: c.printed["accuracy"].mean for c in recipe.cases if c.row == "10"} == {"FedAvg": 50, "2": 60}
    assert [c.config.clients for c in recipe.cases] == [12, 12, 10, 10, 10, 10]
    assert recipe.cases[-1].config.lr == 0.05
    with pytest.raises(ConfigError, match="line 14: unknown setting 'nonsense'"):
        read_recipe(written(text.replace("0.5: {settings: {", "0.5: {settings: {nonsense: 3, "), tmp_path))


def test_what_diverged_is_told(tmp_path: Path) -> None:
    text = SMALL.replace("  FedAvg: fedavg\n", "  FedAvg: fedavg\n  Bad: fedavg(lr=1e39)\n")
    text = text.replace("norm: last(theta_norm)", "norm: first(test_accuracy, above=0.99)\n  typo: last(test_acuracy)")
    text = text.replace("      norm: {FedAdam: 3}", "      typo: {FedAdam: 3}")
    found = reproduce(read_recipe(written(text, tmp_path)), tmp_path / "out", console=QUIET, seeds=2, rows=["even"])
    notes = {(f.label, f.score): f.note for f in found.findings()}
    assert notes["Bad", "accuracy"] == "diverged"
    assert notes["FedAvg", "accuracy"] == ""
    assert notes["FedAvg", "norm"] == "not reached"
    assert notes["FedAdam", "typo"] == "not measured"
    assert ("FedAvg", "typo") not in notes
    (line,) = (remark for remark in reproduction.remarks(found) if "not measured" in remark)
    assert "last(test_acuracy)" in line


def test_rows_that_were_run_before_stay_in_the_table(tmp_path: Path) -> None:
    recipe = read_recipe(written(SMALL, tmp_path))
    first = reproduce(recipe, tmp_path / "out", console=QUIET, seeds=1, rows=["skewed"])
    both = reproduce(recipe, tmp_path / "out", console=QUIET, seeds=1, rows=["even"])
    assert {f.row for f in first.findings()} == {"skewed/2"}
    assert {f.row for f in both.findings()} == {"skewed/2", "even"}
    assert reproduction.reasons(both) == {}
    assert first.folder != reproduce(recipe, tmp_path / "out", console=QUIET, scale="smoke").folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"settings": {"device": "cdua"}}, "unknown device"),
        ({"settings": {"engine": "vectr"}}, "did you mean vector"),
        ({"settings": {"data_dir": "nowhere"}}, "is no folder"),
        ({"rows": [""]}, "names no row"),
        ({"rows": ["/"]}, "names no row"),
    ],
)
def test_bad_options_are_refused_before_anything(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        reproduce(read_recipe(written(SMALL, tmp_path)), tmp_path / "out", console=QUIET, **options)
    assert not (tmp_path / "out").exists()


def test_two_at_once(tmp_path: Path) -> None:
    recipe = read_recipe(written(SMALL, tmp_path))
    first = reproduce(recipe, tmp_path / "out", console=QUIET, seeds=1, rows=["even"])
    run = first.cells[-1].runs[0].folder
    (run / "model.safetensors").unlink()
    with claim(run, overwrite=False, resume=True), pytest.raises(RunError, match="in use by another"):
        reproduce(recipe, tmp_path / "out", console=QUIET, seeds=1, rows=["even"])


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("seeds: 2", "relative_to: [FedAvg]", 4, "relative_to must be"),
        ("seeds: 2", "plots: test_loss", 4, "plots must be a list"),
        ("seeds: 2", "force: {round: true, cohort: one-class}", 4, "expected {round: 40"),
        ("seeds: 2", "folds: 9", 4, "folds must be a whole number from 1 to 5"),
        ("  even:", "  empty: {methods: {FedAvg: null, RADFed: null}}\n  even:", 16, "this row has no method left"),
        ("  even:", "  even:\n    join: krumm", 17, "krumm"),
        ("  even:", "  even:\n    join: 3", 17, "3"),
        ("  even:", "  even:\n    join: fedavgm", 17, "fedadam(lr=0.02) and fedavgm both fill the server stage"),
        ("last=3", "last=nan", 6, "has no meaning"),
        ("last=3", "last=0", 6, "has no meaning"),
        ("last=3", "last=2.5", 6, "has no meaning"),
        ("last=3", "last=3, last=4", 6, "given twice"),
        ("mean(test_accuracy, last=3)", "best(test_accuracy, by=)", 6, "has no meaning"),
        ("mean(test_accuracy, last=3)", "first(test_accuracy, above=inf)", 6, "has no meaning"),
    ],
)
def test_more_that_is_wrong(old: str, new: str, line: int, message: str, tmp_path: Path) -> None:
    test_what_is_wrong_is_told_with_its_line(old, new, line, message, tmp_path)


def test_a_row_whose_methods_are_all_joined_with_another(tmp_path: Path) -> None:
    recipe = read_recipe(written(SMALL.replace("  even:", "  even:\n    join: attack+clip(norm=1.0)"), tmp_path))
    texts = {(case.row, case.label): case.config.method for case in recipe.cases}
    assert texts["skewed/2", "FedAvg"] == "fedavg"
    assert texts["even", "FedAvg"] == "fedavg+attack+clip(norm=1.0)"
    assert texts["even", "FedAdam"] == "fedadam(lr=0.02)+attack+clip(norm=1.0)"


def test_rows_of_equal_settings_are_not_averaged(tmp_path: Path) -> None:
    """They differ in their methods only, which have the same labels."""
    text = SMALL.replace("classes(per_client=2)", "iid").replace("  even:", "  even:\n    join: krum")
    found = reproduce(read_recipe(written(text, tmp_path)), tmp_path / "out", console=QUIET, seeds=2, rounds=3)
    runs, labels = reproduction.drawn(found)
    assert labels.count("FedAvg, skewed/2") == labels.count("FedAvg, even") == 2
    methods = {label: run.config.method for run, label in zip(runs, labels, strict=True)}
    assert methods["FedAvg, skewed/2"] == "fedavg"
    assert methods["FedAvg, even"] == "fedavg+krum"


def test_a_recipe_called_runs(tmp_path: Path) -> None:
    (tmp_path / "runs.yaml").write_text(SMALL)
    with pytest.raises(ConfigError, match="can't be called runs"):
        find_recipe(str(tmp_path / "runs.yaml"))


def test_what_was_run_needs_no_data_any_more(tmp_path: Path) -> None:
    """Runs may be made where the data are, and looked at elsewhere."""
    text = SMALL.replace("data: digits", f"data: \"table(path='{tmp_path}/t.csv', client=who, label=y)\"")
    text = text.replace("partition: classes(per_client=2)", "partition: iid").replace(
        "model: logistic", "model: logistic"
    )
    rng = np.random.default_rng(0)
    lines = [f"{k % 10},{rng.normal():.3f},{k % 3}" for k in range(200)]
    (tmp_path / "t.csv").write_text("who,x,y\n" + "\n".join(lines) + "\n")
    text = text.replace("last(theta_norm)", "last(train_loss)")
    recipe = read_recipe(written(text, tmp_path))
    first = reproduce(recipe, tmp_path / "out", console=QUIET, seeds=1, rows=["skewed"])
    (tmp_path / "t.csv").unlink()
    again = reproduce(recipe, tmp_path / "out", console=QUIET, seeds=1, rows=["skewed"])
    assert [f.mean for f in again.findings() if f.told] == [f.mean for f in first.findings() if f.told]
    assert any(f.told for f in again.findings())


def test_a_method_that_needs_more_works_is_left_out_alone(tmp_path: Path) -> None:
    recipe = read_recipe(written(SMALL, tmp_path))
    found = reproduce(recipe, tmp_path / "out", console=QUIET, seeds=1, rounds=2, rows=["skewed"])
    assert {why: whom for why, whom in reproduction.reasons(found).items() if "averages once" in why} == {
        "radfed(redistributions=3) averages once in 3 Works; --rounds 2 is too few for it": ["skewed/2 (RADFed)"]
    }
    assert all(cell.runs for cell in found.cells if cell.case.label == "FedAvg" and cell.asked)
