"""Runs side by side: the same as one after the other, whatever happens to a process."""

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.errors import ConfigError
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import is_finished
from fedloom.experiment.processes import check_processes, side_by_side
from fedloom.experiment.run import Job, start_run
from fedloom.result import Event

CONFIG = RunConfig(data="digits", clients=10, per_round=4, model="logistic", rounds=20, checkpoint_every=1)
METHODS = ["fedavg", "adabest", "fedavg(lr=1e39)", "radfed(redistributions=4)"]


def jobs_in(folder: Path) -> list[Job]:
    return [Job(replace(CONFIG, method=method), folder / str(i)) for i, method in enumerate(METHODS)]


def same(folder: Path, whole: Path) -> None:
    for i in range(len(METHODS)):
        if i != 2:
            a, b = fl.load_run(folder / str(i)), fl.load_run(whole / str(i))
            assert [row | {"seconds": 0} for row in a.history] == [row | {"seconds": 0} for row in b.history]
            assert (folder / str(i) / "model.safetensors").read_bytes() == (
                whole / str(i) / "model.safetensors"
            ).read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    for i, job in enumerate(jobs_in(folder)):
        if i != 2:
            start_run(job.config, job.folder)
    return folder


def test_processes_that_are_killed(tmp_path: Path, whole: Path) -> None:
    """Both that are at work die in the third round; the others are not concerned, and the same call goes on. A method
    that fails is told, and keeps nobody from the rest.
    """
    heard: list[Event] = []

    def kill(event: Event) -> None:
        heard.append(event)
        if len(heard) == 3:
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGKILL)

    jobs = jobs_in(tmp_path)
    jobs[2] = jobs[2]._replace(config=replace(jobs[2].config, max_diverged=2))
    first, *rest = jobs
    groups = [[first._replace(callbacks=[kill])], *([job] for job in rest)]
    problems = side_by_side(groups, 2, resume=True)
    assert not multiprocessing.active_children()
    assert "signal 9" in str(problems[first.folder])
    assert "max_diverged=2" in str(problems[jobs[2].folder]) or "signal 9" in str(problems[jobs[2].folder])
    assert not is_finished(first.folder)
    assert is_finished(jobs[3].folder)
    problems = side_by_side([[job] for job in jobs], 1, resume=True)
    assert list(problems) == [jobs[2].folder]
    assert "max_diverged=2" in str(problems[jobs[2].folder])
    same(tmp_path, whole)


@pytest.mark.long
def test_told_to_stop(tmp_path: Path, whole: Path) -> None:
    """What was played is safe, and nobody is left behind."""

    def stop(event: Event) -> None:
        if event.round == 5:
            raise KeyboardInterrupt

    jobs = [job for i, job in enumerate(jobs_in(tmp_path)) if i != 2]
    with pytest.raises(KeyboardInterrupt):
        side_by_side([[jobs[0]._replace(callbacks=[stop]), jobs[1]], [jobs[2]]], 2, resume=True)
    assert not multiprocessing.active_children()
    rounds: list[int] = []
    assert not side_by_side(
        [[job._replace(callbacks=[lambda event: rounds.append(event.round)])] for job in jobs], 1, resume=True
    )
    assert len(rounds) < sum(len(fl.load_run(job.folder).history) for job in jobs)
    same(tmp_path, whole)


def test_the_end_of_patience_is_heard(tmp_path: Path) -> None:
    """Nothing gains at this rate: the second round is the last, and none is planned behind it."""
    heard: list[Event] = []
    config = replace(CONFIG, clients=8, validation=2, patience=1, lr=1e-9)
    assert not side_by_side([[Job(config, tmp_path / "0", [heard.append])]], 1, resume=True)
    assert [(event.round, event.rounds) for event in heard] == [(1, 20), (2, 2)]


def test_whoever_has_nothing_to_do_leaves_by_itself(tmp_path: Path) -> None:
    """A process that is ended leaves locks and files of its libraries behind, and warnings of them."""
    children: list[multiprocessing.process.BaseProcess] = []
    jobs = [
        job._replace(callbacks=[lambda event: children.extend(multiprocessing.active_children())])
        for job in jobs_in(tmp_path)
    ]
    assert not side_by_side([jobs[:1], jobs[1:2]], 2, resume=True)
    assert len(set(children)) == 2
    assert {child.exitcode for child in children} == {0}


def test_who_can_t_begin_is_heard(tmp_path: Path) -> None:
    first, second, *_ = jobs_in(tmp_path)
    second.folder.write_text("no folder")
    heard: list[Job] = []
    problems = side_by_side([[first, second]], 1, resume=True, refused=heard.append)
    assert [job.folder for job in heard] == list(problems) == [second.folder]
    assert is_finished(first.folder)


def test_numbers_without_meaning() -> None:
    for processes in (0, -1, 100_000):
        with pytest.raises(ConfigError, match="processes must be between 1 and 256"):
            check_processes(processes, CONFIG)
    with pytest.raises(ConfigError, match="engine=ray has workers of its own"):
        check_processes(2, replace(CONFIG, engine="ray"))
    check_processes(None, replace(CONFIG, engine="ray"))
