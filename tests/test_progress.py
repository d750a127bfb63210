"""How a run comes along: in a terminal, in lines, after a resume, and not at all."""

import io
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

import fedloom as fl
from fedloom.progress import Watch
from fedloom.result import Event

DATA = fl.Federation.from_arrays([(torch.randn(4, 3), [0, 1, 0, 1])], test=(torch.randn(4, 3), [0, 1, 0, 1]))
SCRIPT = """
import torch, fedloom as fl
data = fl.Federation.from_arrays([(torch.randn(4, 3), [0, 1, 0, 1])])
fl.fit(torch.nn.Linear(3, 2), data, "fedprox(mu=0.5)", rounds=7, callbacks=[lambda event: print(event.round)])
"""


def event(round: int, rounds: int) -> Event:
    return Event(round, rounds, torch.zeros(1), {"test_accuracy": 0.25}, None)


def test_nothing_where_nobody_looks_on(capfd: pytest.CaptureFixture[str]) -> None:
    fl.fit(nn.Linear(3, 2), DATA, rounds=2)
    fl.fit(nn.Linear(3, 2), DATA, rounds=2, progress=False)
    assert capfd.readouterr() == ("", "")


def test_lines_if_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    def half(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return 0.5

    fl.fit(nn.Linear(3, 2), DATA, "fedprox(mu=0.5)", rounds=2, progress=True, metric=half)
    found = capfd.readouterr()
    assert found.out == ""
    assert found.err == "fedprox(mu=0.5): round 2/2  half 0.5000\n"


def test_a_bar_in_a_terminal() -> None:
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # nobody writes to it any more
        while piece := os.read(ours, 4096):
            seen += piece
    os.close(ours)
    printed, _ = run.communicate(timeout=60)
    assert run.returncode == 0
    assert b"fedprox(mu=0.5)" in seen
    assert b"7/7" in seen
    assert printed.split() == b"1 2 3 4 5 6 7".split()  # what callbacks print goes where it was sent


def test_what_is_left_of_a_run_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds 61 to 100 after a minute of loading: ten a second, whatever came before."""
    now = [1000.0]
    monkeypatch.setattr("fedloom.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    said = io.StringIO()
    with Watch(100, Console(file=said, width=200)) as watch:
        show = watch.callback("a run", "accuracy", 100)
        now[0] += 60
        for round in range(61, 101):
            show(event(round, 100))
            now[0] += 0.1
    lines = said.getvalue().splitlines()
    assert lines[0] == "a run: round 61/100  accuracy 0.2500"  # nobody knows yet
    assert lines[-1] == "a run: round 100/100  accuracy 0.2500  10.0 rounds/s  0 s left"


def test_a_day_is_told_in_some_hundred_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("fedloom.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    said = io.StringIO()
    with Watch(24 * 1800, Console(file=said, width=200)) as watch:
        show = watch.callback("a run", "accuracy", 24 * 1800)
        for round in range(1, 24 * 1800 + 1):  # two seconds each
            now[0] += 2
            show(event(round, 24 * 1800))
    lines = said.getvalue().splitlines()
    assert [line.split()[3].partition("/")[0] for line in lines[:3]] == ["3", "6", "9"]
    assert 100 < len(lines) < 300
    assert lines[-1].endswith("0.5 rounds/s  0 s left")


def test_rounds_of_different_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that averages after every work, one after 15, one that goes on at its 61st: a second a work."""
    now = [0.0]
    monkeypatch.setattr("fedloom.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    said = io.StringIO()
    with Watch(3 * 450, Console(file=said, width=200), "works") as watch:
        for name, each, first in (("radfed", 15.0, 1), ("fedavg", 1.0, 1), ("fedasync", 0.1, 601)):
            show, rounds = watch.callback(name, "accuracy", 450), round(450 / each)
            for number in range(first, rounds + 1):
                now[0] += each
                show(Event(number, rounds, torch.zeros(1), {"works": each * number}, None))
    told = [
        re.fullmatch(r"(\w+): round (\d+)/\d+    1.0 works/s  (\d+) s left", line)
        for line in said.getvalue().splitlines()
    ]
    left = {(found[1], int(found[2])): int(found[3]) for found in told if found}
    assert len(left) >= 50
    for (name, number), seconds in left.items():
        done = {"radfed": 15 * number, "fedavg": 450 + number, "fedasync": 960 + 0.1 * (number - 600)}[name]
        assert abs(1350 - done - seconds) <= 1
    assert said.getvalue().endswith("fedasync: round 4500/4500    1.0 works/s  0 s left\n")


def test_a_run_that_ends_early_leaves_less_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs of 400 works, a second each; the first is out of patience after 100, the second after 390."""
    now = [0.0]
    monkeypatch.setattr("fedloom.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    said = io.StringIO()
    with Watch(3 * 400, Console(file=said, width=200), "works") as watch:
        for name, each, end in (("fedavg", 1.0, 100), ("radfed", 10.0, 390), ("fedprox", 1.0, 400)):
            show = watch.callback(name, "accuracy", 400)
            for works in torch.arange(each, end + 1, each).tolist():
                now[0] += each
                rounds = works if works == end else 400
                show(Event(round(works / each), round(rounds / each), torch.zeros(1), {"works": works}, None))
    left = re.findall(r"(\w+): round (\d+)/\d+    1.0 works/s  (\d+) s left", said.getvalue())
    assert len(left) >= 50
    for name, number, seconds in left:
        n = int(number)
        expected = {
            "fedavg": 1200 - n if n < 100 else 800,
            "radfed": 800 - 10 * n if n < 39 else 400,
            "fedprox": 400 - n,
        }
        assert abs(int(seconds) - expected[name]) <= 1, (name, n)
    assert said.getvalue().endswith("fedprox: round 400/400    1.0 works/s  0 s left\n")


def test_a_run_that_ends_with_the_first_round_that_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on in round 51, which is its last; the other one has 50 rounds of a second."""
    now = [0.0]
    monkeypatch.setattr("fedloom.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    said = io.StringIO()
    with Watch(100 + 50, Console(file=said, width=200)) as watch:
        watch.callback("a", "accuracy", 100)(event(51, 51))
        show = watch.callback("[b]", "accuracy", 50)
        for number in range(1, 51):
            now[0] += 1
            show(event(number, 50))
    assert said.getvalue().startswith("[b]: round 5/50  accuracy 0.2500  1.0 rounds/s  45 s left\n")
    assert said.getvalue().endswith("[b]: round 50/50  accuracy 0.2500  1.0 rounds/s  0 s left\n")


def test_labels_are_no_markup() -> None:
    with Watch(2, Console(file=io.StringIO(), force_terminal=True)) as watch:
        watch.callback("FedAvg [/ours]", "accuracy", 2)(event(1, 2))


def test_out_of_patience(capfd: pytest.CaptureFixture[str]) -> None:
    """The last round is told, planned or not."""
    data = fl.Federation.from_arrays([(torch.randn(4, 3), [0, 1, 0, 1])], validation=(torch.randn(4, 3), [0, 1, 0, 1]))
    fl.fit(nn.Linear(3, 2), data, rounds=90, patience=3, local=fl.Local(lr=1e-9), progress=True)
    assert capfd.readouterr().err == "fedavg: round 4/4  \n"


def test_a_run_that_is_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fl.fit(nn.Linear(3, 2), DATA, rounds=3, checkpoint=tmp_path)
    fl.fit(nn.Linear(3, 2), DATA, rounds=5, checkpoint=tmp_path, resume=True, progress=True)
    assert capfd.readouterr().err.startswith("fedavg: round 5/5  accuracy")
