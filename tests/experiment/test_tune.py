"""Tuning: searches as text, the papers' grids, objectives without the test set, studies that survive a kill."""

import csv
import dataclasses
import io
import itertools
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import fedloom as fl
from fedloom.cli import main
from fedloom.experiment.config import RunConfig, read_config
from fedloom.experiment.run import load_data, make_training, start_run

optuna = pytest.importorskip("optuna", reason="Optuna is not installed (pip install 'fedloom[tune]')")

from fedloom.experiment.tune import Tuning, objective, tune  # noqa: E402
from fedloom.experiment.tune.plan import Plan  # noqa: E402
from fedloom.experiment.tune.search import Search, Template, read_local  # noqa: E402

SMALL = RunConfig(model="logistic", clients=10, per_round=4, rounds=10)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def points(folder: Path) -> list[tuple[str, str, str]]:
    """In the order of their numbers: the point, what became of it, and its value."""
    return [(row["method"], row["state"], row["train_loss"]) for row in rows(folder)]


# The text form


def test_searches_are_read_from_the_text_of_a_method() -> None:
    text = (
        "fedprox(mu=choice(1, 0.1)) + 2dlrd(log(0.1, 0.9), window=integer(5, 50)) + uniform+fedadam( lr = log(1e-4,1) )"
    )
    template = Template.read(text)
    assert template.searches == {
        "fedprox.mu": Search("choice", (1, 0.1)),
        "2dlrd.c": Search("log", (0.1, 0.9)),
        "2dlrd.window": Search("integer", (5, 50)),
        "fedadam.lr": Search("log", (1e-4, 1.0)),
    }
    assert Template.read(template.text) == template
    assert template.name == "fedprox+2dlrd+uniform+fedadam"
    point = {"fedprox.mu": 1, "2dlrd.c": 0.2, "2dlrd.window": 7, "fedadam.lr": 0.5}
    assert template.fill(point, SMALL).method == "fedprox(mu=1.0)+2dlrd(c=0.2, window=7)+uniform+fedadam(lr=0.5)"


def test_what_only_looks_like_a_search_stays() -> None:
    template = Template.read("adabest(deploy='aggregate', beta=choice(0.9, 1.0)) + md")
    assert list(template.searches) == ["adabest.beta"]
    assert template.fill({"adabest.beta": 0.9}, SMALL).method == "adabest(deploy='aggregate', beta=0.9)+md"
    with pytest.raises(fl.MethodError, match="deploy"):  # quoted: a text, which deploy refuses
        Template.read("adabest(deploy='log(1, 2)')").fill({}, SMALL)
    texts = Template.read("""fedasync(staleness=choice('constant', "hinge"))""").searches["fedasync.staleness"]
    assert texts.values == ("constant", "hinge")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fedadam(rate=log(0.1, 1))", "no parameter 'rate'"),
        ("fedadm(lr=log(0.1, 1))", "did you mean"),
        ("fedadam(lr=choice())", "nothing to choose from"),
        ("fedadam(lr=choice(1, 1.0))", "1.0 stands there twice"),
        ("fedadam(lr=choice([1], 2))", "not lists"),
        ("fedadam(lr=log(0, 1))", "begins above 0"),
        ("fedadam(lr=log(1, 0.1))", "from a lower to a higher"),
        ("fedadam(lr=uniform(1))", "between two numbers"),
        ("fedadam(lr=uniform(0, inf))", "both finite"),
        ("radfed(redistributions=integer(1, 2.5))", "between two whole numbers"),
        ("fedadam(lr=log(low=0.1, high=1))", "no parameters with names"),
        ("fedadam(lr=2*log(0.1, 1))", "must be the whole value"),
        ("fedadam(lr=log(0.1, 1)+1)", "must be the whole value"),
        ("fixed(cohorts=[[choice(1, 2)]])", "must be the whole value"),
        ("fedadam(lr=choice(log(0.1, 1), 2))", "holds plain values"),
        ("fedadam(lr=log(0.1, 1)", "is missing"),
        ("fedadam(lr=log(0.1, 1), lr=0.1)", "given twice"),
        ("fedadam(log(0.1, 1), lr=0.1)", "given twice"),
        ("fedadam(lr=linear(0.1, 1))", "is no value"),
        ("fedprox(mu=choice(0.1, 1)) + fedprox(mu=1)", "stands there twice"),
        ("fedadam(lr=choice(0.1, -1))", r"fedadam.lr can't be -1: .*above 0"),
        ("fedadam(lr=choice(0.1, fast))", "fedadam.lr can't be 'fast'"),
        ("fedprox(mu=uniform(-1, 1))", r"fedprox.mu can't be -1.0"),
        ("radfed(redistributions=choice(5, 120))", "can't be 120: .* averages once in 120 Works"),
        ("fedadam(lr=log(0.1, 1))+fedavgm", "both fill the server stage"),
        ("fedavg", "nothing is searched"),
    ],
)
def test_bad_searches_are_refused_before_anything_is_written(method: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(fl.FedloomError, match=words):
        tune(SMALL, [method], tmp_path / "t")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"search": ["rounds=integer(1, 5)"]}, "'rounds' is no local setting"),
        ({"search": ["lrr=log(0.1, 1)"]}, "did you mean lr"),
        ({"search": ["lr"]}, "expected setting=search"),
        ({"search": ["lr=log(0.1, 1)", "lr=log(0.1, 2)"]}, "searched twice"),
        ({"search": ["lr=0.1"]}, "is no search|plain values|expected a name"),
        ({"search": ["epochs=choice(0, 1)"]}, "epochs can't be 0: epochs must be a whole number of at least 1"),
        ({"objective": "test"}, "unknown objective 'test'"),
        ({"sampler": "tpee"}, "did you mean tpe"),
        ({"grid": "fedglat"}, "did you mean fedglad"),
        ({"trials": 0}, "trials must be at least 1"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"together": 0}, "together must be at least 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(fl.FedloomError, match=words):
        tune(SMALL, ["fedprox(mu=choice(0.1, 1))"], tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


def test_without_optuna_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(fl.ConfigError, match=r"pip install 'fedloom\[tune\]'"):
        tune(SMALL, ["fedprox(mu=choice(0.1, 1))"], tmp_path / "t")


# The papers' grids

RATES = [0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
TINY = [1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12]
S = [10, 15, 20, 22, 25, 28, 30, 50, 80, 100, 120]


@pytest.mark.parametrize(
    ("grid", "method", "expected"),
    [
        ("fedglad", "fedavg", {"fedavg.lr": RATES}),
        ("fedglad", "fedprox", {"fedprox.mu": [1, 0.1, 0.01, 0.001], "fedavg.lr": RATES}),
        ("fedglad", "scaffold+fedglad", {"fedavg.lr": RATES}),
        ("fedglad", "fedprox(mu=1)+fedavg(lr=2)", {}),
        ("fedglad", "fedavgm", {"fedavgm.lr": [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 1, 2, 3, 4, 5]}),
        ("fedglad", "fedadam", {"fedadam.lr": [b * k for b in (1e-3, 1e-2) for k in (1, 2, 3, 4, 5)]}),
        ("fedglad", "fedprox+fedadam(lr=1)", {"fedprox.mu": [1, 0.1, 0.01, 0.001]}),
        ("radfed", "radfed", {"radfed.redistributions": S}),
        ("radfed", "radfedi", {"radfedi.redistributions": S, "radfedi.gamma": [0.6, 0.7, 0.8, 0.9, 0.95]}),
        ("radfed", "fedprox", {"fedprox.mu": TINY}),
        ("radfed", "fedasync", {"fedasync.rho": TINY, "fedasync.alpha": [0.3, 0.6, 0.9]}),
        (
            "radfed",
            "fedadam(lr=0.1)",
            {"fedadam.tau": [1e-2, 1e-4, 1e-8], "fedadam.v_init": [0, 1e-1, 1e-2, 1e-3]},
        ),
        ("adabest", "adabest", {"adabest.beta": [0.94, 0.96, 0.98, 1]}),
        ("adabest", "feddyn", {"feddyn.mu": [0.002, 0.02, 0.2]}),
    ],
)
def test_grids_of_the_papers(grid: str, method: str, expected: dict[str, list[float]]) -> None:
    plan = Plan.of(dataclasses.replace(SMALL, rounds=120), [method, "krum(byzantine=integer(1, 2))"], grid=grid)
    found = {name: list(search.values) for name, search in plan.templates[0].searches.items()}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-12)
    assert plan.trials == max(2, math.prod(len(values) for values in expected.values()))


def test_a_grid_depends_on_participation_and_on_the_kind_of_data() -> None:
    from fedloom.experiment.tune.grids import find_grid

    assert find_grid("adabest", text=False, share=0.01)["adabest"]["beta"] == (0.2, 0.4, 0.6)
    assert find_grid("adabest", text=False, share=0.1)["adabest"]["beta"] == (0.94, 0.96, 0.98, 1.0)
    assert find_grid("fedglad", text=True, share=0.1)["fedadam"]["lr"][:6] == (1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 1e-4)


# Objectives


def values(done: Tuning) -> list[float | None]:
    return [trial.value for trial in done.rows[0].trials.finished.values()]


def fitted(config: RunConfig, federation: fl.Federation, rounds: int, **settings: Any) -> list[dict[str, Any]]:
    """A run through the public functions alone."""
    return fl.fit(
        fl.model(config.model, federation, config.seed),
        federation,
        config.method,
        rounds,
        config.per_round,
        config.local,
        engine=config.engine,
        seed=config.seed,
        **settings,
    ).history


def test_train_loss_is_the_mean_over_the_first_fifth_of_the_rounds(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, rounds=12, engine="loop")
    done = tune(config, ["fedadam(lr=choice(0.01, 0.1))"], tmp_path / "t", seeds=2)
    for lr, value in zip((0.01, 0.1), values(done), strict=True):
        losses = []
        for seed in (0, 1):
            federation = fl.load("digits", "classes(per_client=2)", clients=10, seed=seed)
            seeded = dataclasses.replace(config, method=f"fedadam(lr={lr})", seed=seed)
            losses += [row["train_loss"] for row in fitted(seeded, federation, 3)]  # 20% of 12, rounded up
        assert value == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_validation_is_the_last_metric_on_held_out_clients(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, clients=20, engine="loop")
    done = tune(config, ["fedavg"], tmp_path / "t", search=["lr=choice(0.01, 0.5)"])
    assert done.plan.objective == "validation"  # a local setting is not judged by the loss of local training
    assert done.plan.config.validation == 2
    for lr, value in zip((0.01, 0.5), values(done), strict=True):
        federation = fl.load("digits", "classes(per_client=2)", clients=20, validation=2)
        assert value == fitted(dataclasses.replace(config, lr=lr), federation, 10)[-1]["validation_accuracy"]
    best = read_config(tmp_path / "t/best.yaml")
    assert (best["lr"], best["validation"], best["rounds"]) == (0.5, 2, 10)


def test_a_trial_out_of_patience_has_the_value_of_its_last_round(tmp_path: Path) -> None:
    """Its seeds end in different tenths, at which they are looked at; progress is told to the very end."""
    config = dataclasses.replace(SMALL, clients=20, validation=2, rounds=300, patience=2, engine="loop")
    said = io.StringIO()
    searched: dict[str, Any] = {"search": ["lr=choice(1e-9, 0.5)"], "objective": "validation", "seeds": 2}
    done = tune(config, ["fedavg"], tmp_path / "t", console=Console(file=said, width=200), **searched)
    lengths = []
    for lr, value in zip((1e-9, 0.5), values(done), strict=True):
        ends = []
        for seed in (0, 1):
            federation = fl.load("digits", "classes(per_client=2)", clients=20, validation=2, seed=seed)
            history = fitted(dataclasses.replace(config, lr=lr, seed=seed), federation, 300, patience=2, eval_every=30)
            ends.append(history[-1]["validation_accuracy"])
            lengths.append(len(history))
        assert value == pytest.approx(sum(ends) / 2, rel=1e-12)
    assert lengths[:2] == [90, 90]
    assert lengths[2] != lengths[3] < 300
    assert f"round {max(lengths)}/{max(lengths)}  " in said.getvalue()


def test_folds_average_over_the_inner_validation_blocks(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, fold=1, per_round=3, rounds=4, engine="loop")
    done = tune(config, ["fedavg(lr=choice(0.5, 1))"], tmp_path / "t")
    assert done.plan.objective == "folds"
    whole = fl.load("digits", "classes(per_client=2)", clients=10)
    for lr, value in zip((0.5, 1), values(done), strict=True):
        seeded = dataclasses.replace(config, method=f"fedavg(lr={lr})")
        splits = [fl.split_clients(whole, fold=1, inner=inner, seed=0) for inner in range(4)]
        scores = [fitted(seeded, split, 4)[-1]["validation_accuracy"] for split in splits]
        assert value == pytest.approx(sum(scores) / 4, rel=1e-12)


class Forbidden:
    """A test set that nothing may be asked of."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the test set was read: {name}")


@pytest.mark.parametrize("aim", ["train-loss", "validation", "folds"])
def test_the_test_set_is_never_read(aim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def study(folder: Path) -> list[float | None]:
        config = dataclasses.replace(SMALL, per_round=3)
        return values(tune(config, ["fedadam(lr=log(1e-3, 1))"], folder, objective=aim, trials=1))

    clean = study(tmp_path / "clean")

    def poisoned(**dealing: Any) -> fl.Federation:
        return dataclasses.replace(load_data(**dealing), test=Forbidden())  # type: ignore[arg-type]

    monkeypatch.setattr(objective, "load_data", poisoned)
    assert study(tmp_path / "poisoned") == clean
    with pytest.raises(AssertionError, match="the test set was read"):  # an ordinary run does read it
        make_training(SMALL, poisoned(**SMALL.settled().dealing))


# Studies


def test_a_better_rate_than_the_default_is_found(tmp_path: Path) -> None:
    config = RunConfig(model="logistic", rounds=40)
    done = tune(config, ["fedadam(lr=log(1e-4, 1))"], tmp_path / "t", trials=10)
    tuned = RunConfig().change(read_config(tmp_path / "t/best.yaml"))
    assert tuned.method == f"fedadam(lr={done.rows[0].point['fedadam.lr']!r})"
    scores = {}
    for name, settings in (("tuned", tuned), ("default", dataclasses.replace(config, method="fedadam"))):
        scores[name] = start_run(settings, tmp_path / name).history[-1]["test_accuracy"]
    assert scores["tuned"] > scores["default"] + 0.02
    assert done.next_commands == [f"fedloom run --config {tmp_path}/t/best.yaml --out runs/best"]


def test_several_methods_have_a_line_each(tmp_path: Path) -> None:
    methods = [
        "fedadam(lr=log(1e-3, 1))",
        "fedprox(mu=choice(1, 0.1, 0.01))",
        "fedavg",
        "radfed(redistributions=integer(1, 5))",
    ]
    done = tune(SMALL, methods, tmp_path / "t", trials=4, objective="validation")
    assert [len(row.trials.finished) for row in done.rows] == [4, 3, 1, 4]
    (command,) = done.next_commands
    assert command.startswith(f"fedloom compare --config {tmp_path}/t/best.yaml 'fedadam(lr=")
    assert len(list((tmp_path / "t").glob("best-*.yaml"))) == 4
    travelled = RunConfig().change(read_config(next((tmp_path / "t").glob("best-*-radfed.yaml"))))
    redistributions = done.rows[3].point["radfed.redistributions"]
    assert travelled.rounds == 10 // redistributions  # a run of as many Works
    assert {row["rounds"] for row in rows(tmp_path / "t") if row["method"].startswith("fedprox")} == {"10"}
    assert all(
        int(r["rounds"]) == 10 // int(r["radfed.redistributions"])
        for r in rows(tmp_path / "t")
        if "radfed" in r["method"]
    )


def test_batches_in_lockstep_equal_trials_one_by_one(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, engine="vector")
    found = []
    for together in (1, 6):
        method = "fedprox(mu=uniform(0, 1))+fedadam(lr=log(1e-3, 0.1))"
        options = {"sampler": "random", "prune": False, "trials": 6, "seeds": 2, "objective": "validation"}
        done = tune(config, [method], tmp_path / str(together), together=together, **options)  # type: ignore[arg-type]
        found.append({n: (t.params, t.value) for n, t in done.rows[0].trials.finished.items()})
    assert found[0].keys() == found[1].keys() == set(range(6))
    for number, (point, value) in found[0].items():
        assert found[1][number][0] == point
        assert found[1][number][1] == pytest.approx(value, abs=1e-5)


def test_trials_that_are_behind_are_pruned_but_not_the_first_five(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, rounds=50)
    rates = "fedadam(lr=choice(1e-6, 0.1, 0.09, 0.11, 0.08, 2e-6, 0.095, 1e-5))"
    done = tune(config, [rates], tmp_path / "t", together=1)
    told = {row["fedadam.lr"]: row for row in rows(tmp_path / "t")}
    assert [told[lr]["state"] for lr in ("1e-06", "0.1", "0.09", "0.11", "0.08")] == ["complete"] * 5
    assert told["2e-06"]["state"] == told["1e-05"]["state"] == "pruned"
    assert told["0.095"]["state"] == "complete"
    pruned = done.rows[0].trials.finished[5]
    assert max(pruned.intermediate_values) < 10
    assert told["2e-06"]["note"] == f"after {10 * max(pruned.intermediate_values)}% of its rounds"


def test_divergence_is_the_worst_value_and_a_refusal_no_end(tmp_path: Path) -> None:
    methods = ["fedadam(lr=choice(1e38, 0.1))", "fedasync(staleness=choice(constant, poly), a=choice(None, 0.5))"]
    done = tune(SMALL, methods, tmp_path / "t")
    wild, tame = done.rows[0].trials.finished.values()
    assert (wild.value, wild.user_attrs["state"]) == (math.inf, "diverged")
    assert done.rows[0].best is not None
    assert math.isfinite(tame.value or math.nan)
    assert done.rows[0].point == {"fedadam.lr": 0.1}
    states = [
        (r["fedasync.staleness"], r["fedasync.a"], r["state"]) for r in rows(tmp_path / "t") if r["fedasync.staleness"]
    ]
    assert states == [
        ("constant", "None", "complete"),
        ("constant", "0.5", "refused"),
        ("poly", "None", "complete"),
        ("poly", "0.5", "complete"),
    ]
    refused = done.rows[1].trials.finished[1]
    assert "a belongs to staleness" in refused.user_attrs["note"]
    alone = tune(SMALL, ["fedadam(lr=choice(1e38, 2e38))"], tmp_path / "lost")
    assert alone.rows[0].best is None
    assert alone.next_commands == []
    assert not (tmp_path / "lost/best.yaml").exists()


def test_a_finite_space_is_never_tried_twice(tmp_path: Path) -> None:
    grid = "fedprox(mu=choice(0.1, 0.2, 0.3))+fedavg(lr=choice(0.5, 1))"
    tune(SMALL, [grid], tmp_path / "some", trials=5)
    assert len({row["method"] for row in rows(tmp_path / "some")}) == 5
    tune(SMALL, [grid], tmp_path / "all", trials=50)
    expected = [f"fedprox(mu={mu})+fedavg(lr={lr})" for mu, lr in itertools.product((0.1, 0.2, 0.3), (0.5, 1.0))]
    assert [row["method"] for row in rows(tmp_path / "all")] == expected


def test_half_a_batch_goes_on_as_if_it_were_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a study stops, the trials that are drawn afterwards are those of the study that did not stop."""
    from fedloom.experiment.tune.study import Trials

    method, options = ["fedadam(lr=log(1e-4, 1))"], {"together": 3, "trials": 8}
    tune(SMALL, method, tmp_path / "whole", **options)  # type: ignore[arg-type]
    whole, keep = points(tmp_path / "whole"), Trials.keep
    for stop in (1, 4):
        kept = 0

        def keep_some(self: Trials, candidate: Any, stop: int = stop) -> None:
            nonlocal kept
            if kept == stop:
                raise KeyboardInterrupt
            kept += 1
            keep(self, candidate)

        monkeypatch.setattr(Trials, "keep", keep_some)
        with pytest.raises(KeyboardInterrupt):
            tune(SMALL, method, tmp_path / f"{stop}", **options)  # type: ignore[arg-type]
        monkeypatch.setattr(Trials, "keep", keep)
        tune(SMALL, method, tmp_path / f"{stop}", resume=True, **options)  # type: ignore[arg-type]
        assert points(tmp_path / f"{stop}") == whole
    tune(SMALL, method, tmp_path / "4", resume=True, trials=12)  # more of them
    assert points(tmp_path / "4")[:8] == whole
    assert len(points(tmp_path / "4")) == 12


def test_another_study_is_refused_in_the_same_folder(tmp_path: Path) -> None:
    method, folder = ["fedadam(lr=choice(0.1, 0.2, 0.3))"], tmp_path / "t"
    tune(SMALL, method, folder, trials=2)
    with pytest.raises(fl.RunError, match="continue it with --resume or replace it with --overwrite"):
        tune(SMALL, method, folder, trials=2)
    for config, options, words in (
        (dataclasses.replace(SMALL, lr=0.5), {"trials": 2}, "lr was 0.1, now 0.5"),
        (SMALL, {"trials": 1}, "trials was 2, now 1"),
        (SMALL, {"trials": 3}, "2 trials were drawn, 3 are the whole grid"),
        (SMALL, {"trials": 2, "seeds": 2}, "seeds was 1, now 2"),
        (SMALL, {"trials": 2, "search": ["lr=choice(1, 2)"]}, r"search was \[\], now \['lr=choice\(1, 2\)'\]"),
    ):
        with pytest.raises(fl.RunError, match=words):
            tune(config, method, folder, resume=True, **options)
    with pytest.raises(fl.RunError, match=r"methods was \['fedadam"):
        tune(SMALL, ["fedadam(lr=choice(0.1, 0.2, 0.4))"], folder, resume=True, trials=2)
    before = points(folder)
    tune(dataclasses.replace(SMALL, checkpoint_every=3), method, folder, resume=True, trials=2)
    assert points(folder) == before
    plan = yaml.safe_load((folder / "tune.yaml").read_text())
    del plan["shuffle"]  # as written by a release that did not know it
    (folder / "tune.yaml").write_text(yaml.safe_dump(plan))
    tune(SMALL, method, folder, resume=True, trials=2)
    with pytest.raises(fl.RunError, match="shuffle was True, now False"):
        tune(dataclasses.replace(SMALL, shuffle=False), method, folder, resume=True, trials=2)
    with pytest.raises(fl.RunError, match="holds a study"):
        start_run(SMALL, folder, resume=True)
    with pytest.raises(fl.RunError, match=r"holds a study; train its best.yaml"):
        fl.load_run(folder)
    tune(SMALL, ["fedprox(mu=choice(0.1, 1))"], folder, overwrite=True)
    assert [row["fedprox.mu"] for row in rows(folder)] == ["0.1", "1"]
    (folder / "tune.yaml").write_text("trials: [")
    with pytest.raises(fl.RunError, match="can't be read as the plan of a study"):
        tune(SMALL, ["fedprox(mu=choice(0.1, 1))"], folder, resume=True)


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fedloom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line in this process: its exit code, and what it said."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return call


SOURCE = str(Path(fl.__file__).parent.parent)
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": SOURCE}


@pytest.mark.long
def test_a_study_that_was_killed_is_resumed(tmp_path: Path, fedloom: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["tune", "fedadam(lr=log(1e-4, 1))", "--clients", "10", "--per-round", "4", "--model", "logistic"]
    arguments += ["--rounds", "100", "--trials", "12", "--together", "2", "--out", "cut"]
    command = [sys.executable, "-c", "from fedloom.cli import main; main()"]
    process = subprocess.Popen([*command, *arguments], cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if re.match(r"fedadam trial \d+/12", line) and int(line.split()[2].partition("/")[0]) >= 3:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    found = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/cut/study.db").trials
    assert 2 <= len(found) < 12
    assert {trial.state.name for trial in found} <= {"COMPLETE", "PRUNED"}
    monkeypatch.chdir(tmp_path)
    code, told, _ = fedloom("tune", "--resume", "--out", "cut")
    assert code == 0
    assert "next: fedloom run --config cut/best.yaml" in told
    longer = dataclasses.replace(SMALL, rounds=100)
    tune(longer, ["fedadam(lr=log(1e-4, 1))"], tmp_path / "whole", trials=12, together=2)
    assert points(tmp_path / "cut") == points(tmp_path / "whole")


def test_command_line(tmp_path: Path, fedloom: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--clients", "10", "--per-round", "4", "--model", "logistic", "--rounds", "10"]
    code, told, _ = fedloom("tune", "fedavg", "--grid", "fedglad", "--seeds", "2", *small, "--no-prune", "--out", "t")
    assert code == 0
    assert [row["state"] for row in rows(Path("t"))] == ["complete"] * 11
    assert "next: fedloom run --config t/best.yaml --out runs/best" in told
    code, _, complaint = fedloom("tune", "--resume", "--out", "t", "--lr", "0.7")
    assert (code, "lr was 0.1, now 0.7" in complaint) == (2, True)
    code, again, _ = fedloom("tune", "--resume", "--out", "t")
    assert (code, again) == (0, told)
    code, _, complaint = fedloom("tune")
    assert (code, "name at least one method" in complaint) == (2, True)
    code, _, complaint = fedloom("tune", "fedavg", "--search", "lr=log(0, 1)")
    assert (code, "lr=log" in complaint or "log(0, 1): a logarithmic scale begins above 0" in complaint) == (2, True)
    assert complaint.count("\n") == 1


def test_local_searches_are_read() -> None:
    found = read_local(
        ["lr=log(0.001, 1)", "epochs = choice(1, 5)", "optimizer=choice(sgd, adam)", "batch_size=choice(None, 8)"]
    )
    assert {name: str(search) for name, search in found.items()} == {
        "lr": "log(0.001, 1.0)",
        "epochs": "choice(1, 5)",
        "optimizer": "choice('sgd', 'adam')",
        "batch_size": "choice(None, 8)",
    }
