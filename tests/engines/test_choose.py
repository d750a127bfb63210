"""Which engine `auto` takes: a fixed rule, written into the run's config."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.engines.choose import VECTOR_BELOW, VECTOR_FROM, vector_wins
from fedloom.experiment.config import RunConfig
from fedloom.experiment.run import start_run
from fedloom.local import Local
from fedloom.space import Space
from fedloom.stages import Setup


def setup(model: nn.Module, per_round: int, device: str) -> Setup:
    space, sizes = Space.of(model), torch.full((100,), 20)
    return Setup(space, 100, sizes, per_round, Local(), 0, torch.device(device), torch.zeros(space.size))


SMALL, LARGE = nn.Linear(60, 10), nn.Linear(VECTOR_BELOW, 1)
CONV, EMBEDDED, RECURRENT = nn.Conv2d(1, 2, 3), nn.Embedding(9, 3), nn.LSTM(3, 4)


@pytest.mark.parametrize(
    ("model", "per_round", "device", "wins"),
    [
        (SMALL, VECTOR_FROM, "cpu", True),
        (SMALL, VECTOR_FROM - 1, "cpu", False),
        (LARGE, 100, "cpu", False),
        (CONV, 100, "cpu", False),
        (EMBEDDED, 100, "cpu", False),
        (RECURRENT, 100, "cpu", False),
        (SMALL, 1, "cuda", True),
        (LARGE, 10, "cuda", True),
        (CONV, 10, "cuda", True),
        (RECURRENT, 10, "cuda", False),
    ],
)
def test_the_rule(model: nn.Module, per_round: int, device: str, wins: bool) -> None:
    assert vector_wins(model, setup(model, per_round, device)) is wins


@pytest.mark.parametrize(("per_round", "engine"), [(10, "vector"), (3, "loop")])
def test_the_choice_is_written_down(per_round: int, engine: str, tmp_path: Path) -> None:
    start_run(RunConfig(per_round=per_round, model="logistic", rounds=1), tmp_path / "r")
    assert fl.load_run(tmp_path / "r").config.engine == engine
