"""Which engine `auto` takes: a fixed rule, written into the run's config."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli import app
from fedloom.engines import rule as rules
from fedloom.engines.choose import vector_wins
from fedloom.engines.rule import Measured, Rule, fitted
from fedloom.engines.vector import Vector
from fedloom.experiment.config import RunConfig
from fedloom.experiment.run import start_run
from fedloom.local import Local
from fedloom.models.recurrent import LSTMLayer
from fedloom.space import Space
from fedloom.stages import Setup
from fedloom.training import Training


def setup(model: nn.Module, per_round: int, device: str) -> Setup:
    space, sizes = Space.of(model), torch.full((100,), 20)
    return Setup(space, 100, sizes, per_round, Local(), 0, torch.device(device), torch.zeros(space.size))


SMALL, LARGE = nn.Linear(60, 10), nn.Linear(Rule().vector_below, 1)
CONV, EMBEDDED, RECURRENT, OURS = nn.Conv2d(1, 2, 3), nn.Embedding(9, 3), nn.LSTM(3, 4), LSTMLayer(3, 4)


@pytest.mark.parametrize(
    ("model", "per_round", "device", "wins"),
    [
        (SMALL, Rule().vector_from, "cpu", True),
        (SMALL, Rule().vector_from - 1, "cpu", False),
        (LARGE, 100, "cpu", False),
        (CONV, 100, "cpu", False),
        (EMBEDDED, 100, "cpu", False),
        (RECURRENT, 100, "cpu", False),
        (OURS, 100, "cpu", False),
        (SMALL, 1, "cuda", True),
        (LARGE, 10, "cuda", True),
        (CONV, 10, "cuda", True),
        (RECURRENT, 10, "cuda", False),
        (OURS, 10, "cuda", True),
    ],
)
def test_the_rule(model: nn.Module, per_round: int, device: str, wins: bool) -> None:
    found, why = vector_wins(model, setup(model, per_round, device))
    assert found is wins
    assert why


@pytest.mark.parametrize(("name", "compiles"), [("lstm(hidden=4)", False), ("logistic", True)])
def test_recurrent_nets_are_not_compiled(name: str, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody asks for it."""
    monkeypatch.setattr("fedloom.engines.choose.worth_compiling", lambda *_: True)
    data = fl.Federation.from_tensor(torch.randn(12, 5, 2), torch.arange(12) % 3, [0, 4, 8, 12], classes=3)
    model = fl.model(name, data)
    for asked, wanted in ((None, compiles), (True, True), (False, False)):
        engine = Training(model, data, "fedavg", rounds=1, engine="vector", compile=asked).simulation.engine
        assert isinstance(engine, Vector)
        assert engine.compile is wanted


@pytest.mark.parametrize(("per_round", "engine"), [(10, "vector"), (3, "loop")])
def test_the_choice_is_written_down(per_round: int, engine: str, tmp_path: Path) -> None:
    start_run(RunConfig(per_round=per_round, model="logistic", rounds=1), tmp_path / "r")
    assert fl.load_run(tmp_path / "r").config.engine == engine


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    rules.rule.cache_clear()
    yield tmp_path / "cache"
    rules.rule.cache_clear()


def measured(*wins: tuple[int, int, bool]) -> list[Measured]:
    return [Measured(clients, parameters, 100.0, 200.0 if won else 50.0) for clients, parameters, won in wins]


def test_the_rule_is_fitted_to_what_was_measured() -> None:
    sizes = (500, 5_000, 50_000)
    always = measured(*((clients, size, True) for clients in rules.COHORTS for size in sizes))
    never = measured(*((clients, size, False) for clients in rules.COHORTS for size in sizes))
    some = measured(*((c, size, c >= 8 and size < 50_000) for c in rules.COHORTS for size in sizes))
    nearly = [one._replace(vector=99.0) if one[:2] == (8, 5_000) else one for one in some]
    assert fitted(always) == Rule(vector_from=2, vector_below=50_001)
    assert fitted(never).vector_below == 0
    assert fitted(some) == Rule(vector_from=8, vector_below=5_001)
    assert fitted(nearly) == Rule(vector_from=8, vector_below=5_001)  # one that is slower by a hair decides nothing


def test_bench_writes_the_rule_and_runs_follow_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "COHORTS", (2, 4))
    monkeypatch.setattr(rules, "HIDDEN", (4, 8))
    done = CliRunner().invoke(app, ["bench", "--seconds", "0.02"])
    assert done.exit_code == 0, done.output
    assert done.output.count("samples/s") == 4
    assert (cache / rules.FILE).is_file()
    rules.save(Rule(vector_from=3, vector_below=700, shared_from=5))
    assert rules.rule() == Rule(3, 700, 5)
    assert vector_wins(SMALL, setup(SMALL, 3, "cpu"))[0]
    assert not vector_wins(SMALL, setup(SMALL, 2, "cpu"))[0]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"machine": "another", "rule": {}}', '{"rule": {"vector_from": "x"}}']
)
def test_a_spoilt_or_foreign_rule_is_left_alone(text: str, cache: Path) -> None:
    cache.mkdir()
    (cache / rules.FILE).write_text(text)
    assert rules.rule() == Rule()
