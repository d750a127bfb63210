"""Runs in lockstep give what they give one after the other, and really share their cohorts."""

import csv
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli import app
from fedloom.engines import vector
from fedloom.engines.cohort import Asked
from fedloom.engines.joined import Parts, asked_of
from fedloom.engines.vector import Vector
from fedloom.lockstep import alike, run_together
from fedloom.stages import Updates, Work
from fedloom.training import Training
from tests.engines.test_vector import apart, dense, federation
from tests.examples import METHODS

DATA = federation()
LOCAL = fl.Local(epochs=2, batch_size=8, lr=0.1)


def training(
    method: str = "fedavg", model: nn.Module | None = None, data: fl.Federation = DATA, **more: Any
) -> Training:
    settings: dict[str, Any] = {"rounds": 4, "clients_per_round": 4, "local": LOCAL, "engine": "vector"}
    return Training(dense() if model is None else model, data, method, **{**settings, **more})


def rows_of(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many Works were trained at once, each time."""
    found: list[int] = []
    together = Vector.train_together

    def watched(self: Vector, parts: Sequence[tuple[Vector, Work]]) -> list[Updates]:
        found.append(len(parts))
        return together(self, parts)

    monkeypatch.setattr(Vector, "train_together", watched)
    return found


def test_every_method_beside_every_other(joined: list[int]) -> None:
    """All methods at once: corrections, travelling models, single clients, more Works in a round than others."""
    chosen = [method for method in METHODS if method != "scaffold-m"]  # wants equal numbers of steps
    alone = [training(method).run() for method in chosen]
    joined.clear()
    together = run_together([training(method) for method in chosen], [[] for _ in chosen])
    assert joined[0] == len(chosen)
    for method, one, other in zip(chosen, alone, together, strict=True):
        assert apart(other.params, one.params) < 1e-9, method
        assert [row["round"] for row in other.history] == [row["round"] for row in one.history]
        for a, b in zip(rows_of(one.history), rows_of(other.history), strict=True):
            assert a.keys() == b.keys()
            assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-9), method
            assert b["works"] == a["works"]


def test_seeds_lengths_and_callbacks(joined: list[int]) -> None:
    """Different seeds, numbers of rounds and clients, rates; one run is stopped by its callback."""
    kinds: list[dict[str, Any]] = [
        {"seed": 0, "rounds": 6},
        {"seed": 1, "rounds": 2, "clients_per_round": 7},
        {"seed": 2, "rounds": 5, "dropout_rate": 0.5},
        {"seed": 3, "rounds": 6, "local": fl.Local(epochs=2, batch_size=8, lr=0.3)},
    ]
    stop = [[], [], [], [lambda event: fl.STOP if event.round == 3 else None]]
    alone = [training("adabest", **kind).run(own) for kind, own in zip(kinds, stop, strict=True)]
    joined.clear()
    together = run_together([training("adabest", **kind) for kind in kinds], stop)
    assert [len(result.history) for result in together] == [6, 2, 5, 3]
    assert together[3].stopped == "callback"
    assert joined[0] == 4
    for one, other in zip(alone, together, strict=True):
        assert apart(other.params, one.params) < 1e-9


def test_runs_that_differ_are_trained_apart(joined: list[int]) -> None:
    other_model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()  # the same shapes
    frozen = [dense(), dense()]
    for k, model in enumerate(frozen):
        model[0].weight.requires_grad_(False).fill_(k)  # type: ignore[index]
    runs = [
        training(),
        training("adabest", seed=5),
        training(model=other_model),
        training(local=fl.Local(epochs=2, batch_size=8, lr=0.1, momentum=0.5)),
        training(data=federation()),
        training(loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none")),
        training(engine="loop"),
        training(model=frozen[0]),
        training(model=frozen[1]),
    ]
    assert alike(runs[0], runs[1])
    assert not any(alike(runs[0], run) for run in runs[2:])
    assert not alike(runs[7], runs[8])
    joined.clear()
    results = run_together(runs, [[] for _ in runs])
    assert joined[0] == 2
    assert set(joined) == {1, 2}
    assert all(len(result.history) == 4 for result in results)


def test_time_is_shared_out() -> None:
    began = time.perf_counter()
    results = run_together([training(seed=seed) for seed in range(4)], [[], [], [], []])
    seconds = [result.history[-1]["seconds"] for result in results]
    assert 0 < sum(seconds) <= time.perf_counter() - began
    assert max(seconds) < 3 * min(seconds)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    def fail(event: fl.Event) -> None:
        if event.round == 3:
            raise OSError("the disk is gone")

    folders = [tmp_path / str(seed) for seed in range(3)]
    runs = [training(seed=seed, rounds=6, checkpoint=folder) for seed, folder in enumerate(folders)]
    ended: list[int] = []
    with pytest.raises(OSError, match="the disk is gone"):
        run_together(runs, [[], [fail], []], lambda i, result: ended.append(i))
    assert ended == [0, 2]
    assert [run.state.round for run in runs] == [6, 3, 6]
    assert training(seed=1, rounds=6, checkpoint=folders[1], resume=True).state.round == 3


class Scale(nn.Module):
    """Two of these look the same."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.linear = factor, nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.linear(x)  # type: ignore[no-any-return]


def test_models_that_only_look_alike() -> None:
    assert alike(training(model=Scale(1.0)), training(model=Scale(1.0)))
    assert not alike(training(model=Scale(1.0)), training(model=Scale(3.0)))


def test_works_that_do_not_fit_together(joined: list[int]) -> None:
    """Of five runs of four clients, two fit; a device that has no room even for their starts takes them in halves."""
    wanted = [training("adabest", seed=seed).run() for seed in range(5)]
    runs = [training("adabest", seed=seed) for seed in range(5)]
    lead = runs[0].simulation.engine
    assert isinstance(lead, Vector)
    lead.together = 8
    joined.clear()
    for one, other in zip(wanted, run_together(runs, [[] for _ in runs]), strict=True):
        assert apart(other.params, one.params) < 1e-9
    assert set(joined) == {2, 1}


def test_memory_that_runs_out_before_a_step(monkeypatch: pytest.MonkeyPatch, joined: list[int]) -> None:
    def tight(parts: Parts) -> Asked:
        if len(parts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return asked_of(parts)

    wanted = [training(seed=seed).run() for seed in range(5)]
    monkeypatch.setattr(vector, "asked_of", tight)
    found = run_together([training(seed=seed) for seed in range(5)], [[] for _ in range(5)])
    assert max(joined) == 5
    for one, other in zip(wanted, found, strict=True):
        assert apart(other.params, one.params) < 1e-9


def test_an_interrupt_saves_every_run(tmp_path: Path) -> None:
    def interrupt(event: fl.Event) -> None:
        if event.round == 3:
            raise KeyboardInterrupt

    whole = [training("adabest", seed=seed).run() for seed in (0, 1)]
    folders = [tmp_path / str(seed) for seed in (0, 1)]
    runs = [training("adabest", seed=seed, checkpoint=folder) for seed, folder in enumerate(folders)]
    with pytest.raises(KeyboardInterrupt):
        run_together(runs, [[], [interrupt]])
    again = [training("adabest", seed=seed, checkpoint=f, resume=True) for seed, f in enumerate(folders)]
    assert [run.state.round for run in again] == [3, 3]
    for one, other in zip(whole, run_together(again, [[], []]), strict=True):
        assert apart(other.params, one.params) < 1e-9


def compare(folder: Path, *more: str) -> list[dict[str, str]]:
    asked = ["compare", "fedavg", "adabest", "radfed(redistributions=2)", "--data", "digits", "--clients", "20"]
    asked += ["--partition", "classes(per_client=2)", "--per-round", "6", "--model", "logistic", "--rounds", "4"]
    done = CliRunner().invoke(app, [*asked, "--seeds", "2", "--engine", "vector", "--out", str(folder), *more])
    assert done.exit_code == 0, done.output
    return list(csv.DictReader((folder / "table.csv").open()))


def test_compare_in_lockstep(tmp_path: Path, joined: list[int]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        together = compare(tmp_path / "together")
        assert max(joined) == 6
        joined.clear()
        alone = compare(tmp_path / "alone", "--one-by-one")
        assert set(joined) == {1}
    finally:
        torch.set_num_threads(threads)
    assert together == alone
    for path in sorted((tmp_path / "alone").glob("*/seed-*/metrics.jsonl")):
        other = tmp_path / "together" / path.relative_to(tmp_path / "alone")
        pairs = zip(path.read_text().splitlines(), other.read_text().splitlines(), strict=True)
        for a, b in ((json.loads(a), json.loads(b)) for a, b in pairs):
            assert b["test_accuracy"] == a["test_accuracy"]
            assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-4)
    assert len(list((tmp_path / "together").glob("*/seed-*/model.safetensors"))) == 6
