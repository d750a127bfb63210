"""A study's storage that anyone may have written: damaged, or somebody else's."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.experiment.tune.search import Template
from fedloom.experiment.tune.study import STORAGE, Trials, open_storage

optuna = pytest.importorskip("optuna", reason="needs the extra tune")
TEMPLATE = Template.read("fedprox(mu=choice(1, 0.1, 0.01))")
TOLD: dict[str, Any] = {"number": 0, "state": "complete", "method": "m", "rounds": 3, "seconds": 0.1, "note": ""}


def trials(folder: Path) -> Trials:
    return Trials(open_storage(folder), TEMPLATE, count=3, seed=0, minimise=True)


def add(folder: Path, told: dict[str, Any], space: Any = None) -> None:
    space = space or TEMPLATE.searches["fedprox.mu"].distribution()
    value = space.choices[0] if hasattr(space, "choices") else space.low
    params, distributions = {"fedprox.mu": value}, {"fedprox.mu": space}
    trial = optuna.create_trial(value=1.0, params=params, distributions=distributions, user_attrs=told)
    trials(folder).kept.add_trial(trial)


def test_what_was_kept_is_read_back(tmp_path: Path) -> None:
    add(tmp_path, TOLD)
    best = trials(tmp_path).best
    assert best is not None
    assert best.params == {"fedprox.mu": 1}


@pytest.mark.parametrize(
    "told",
    [{}, {**TOLD, "number": "one"}, {**TOLD, "number": -1}, {**TOLD, "state": None}, {**TOLD, "seconds": "long"}],
)
def test_trials_of_somebody_else(told: dict[str, Any], tmp_path: Path) -> None:
    add(tmp_path, told)
    with pytest.raises(fl.RunError, match=r"study.db holds no trials of fedprox.*remove the folder"):
        trials(tmp_path)


def test_trials_of_another_space(tmp_path: Path) -> None:
    add(tmp_path, TOLD, optuna.distributions.FloatDistribution(0.5, 2))
    with pytest.raises(fl.RunError, match="another space to search"):
        trials(tmp_path)


def test_a_damaged_storage(tmp_path: Path) -> None:
    add(tmp_path, TOLD)
    path = tmp_path / STORAGE
    whole = path.read_bytes()
    damaged = [b"no database", whole[: len(whole) // 2], whole[:4096]]
    damaged += [whole.replace(b"complete", b"c\xffmplete"), whole.replace(b'"choices"', b'"chooces"')]
    for content in damaged:
        path.write_bytes(content)
        with suppress(fl.RunError):
            trials(tmp_path).draw(0, 1, "random")
    path.write_bytes(damaged[0])
    with pytest.raises(fl.RunError, match=r"study.db can't be opened as a study"):
        trials(tmp_path)
