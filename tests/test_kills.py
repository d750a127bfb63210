"""Real runs are killed at random moments, also while they write a checkpoint, and resumed: the end is the same."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import ENV, fedloom, fedloom_alone

ROUNDS = 12
SETTINGS = [
    "--clients",
    "12",
    "--per-round",
    "6",
    "--model",
    "mlp(hidden=[300])",
    "--epochs",
    "2",
    "--batch-size",
    "16",
]
METHODS = {
    "stateful": "adabest(beta=0.9)+fedglad+dgt",
    "travelling": "radfed(redistributions=2)+scaffold+importance",
    "queue": "fedasync(staleness=poly, max_staleness=5)+2dlrd(window=3)",
}
FAST = {0}  # of the thirty; the others take minutes
TRIALS = [pytest.param(seed, id=str(seed), marks=[] if seed in FAST else [pytest.mark.long]) for seed in range(30)]


@dataclass
class Run:
    """`fedloom run`, which may be killed in a process of its own, and finished in this one, which has started."""

    folder: Path
    kind: str
    every: int  # rounds between checkpoints

    @property
    def arguments(self) -> list[str]:
        settings = ["run", *SETTINGS, "--method", METHODS[self.kind], "--rounds", str(ROUNDS)]
        return [*settings, "--checkpoint-every", str(self.every), "--out", str(self.folder)]

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fedloom", *self.arguments]
        return subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, *more: str, by: Callable[..., subprocess.CompletedProcess[str]] = fedloom) -> str:
        done = by(*self.arguments, *more)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    @property
    def rounds(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    @property
    def writing(self) -> bool:
        """Is something half written?"""
        return any((self.folder / "checkpoint").glob("**/.*.part"))

    def history(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Look all the time: a write lasts milliseconds."""
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    known: dict[str, Run] = {}

    def find(kind: str) -> Run:
        if kind not in known:
            known[kind] = Run(tmp_path_factory.mktemp(kind) / "whole", kind, every=5)
            known[kind].finish()
        return known[kind]

    return find


def assert_same(run: Run, whole: Run) -> None:
    assert (run.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert run.history() == whole.history()
    last = [max((one.folder / "checkpoint").glob("round-*")) / "tensors.safetensors" for one in (run, whole)]
    one, other = (load_file(path) for path in last)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) or bool(one[name].isnan().all()) for name in one)
    assert not run.writing  # nothing half written is left


@pytest.mark.parametrize("seed", TRIALS)
def test_killed_run_ends_as_if_nothing_had_happened(
    seed: int, undisturbed: Callable[[str], Run], tmp_path: Path
) -> None:
    draw = random.Random(seed)
    kind, in_a_write = [*METHODS][seed % 3], seed % 2 == 0
    run = Run(tmp_path / "killed", kind, every=draw.choice([1, 2, 3]))
    process = run.start()
    after = draw.randrange(1, ROUNDS - 3)
    wait_for(lambda: run.rounds >= after, process)
    if in_a_write:
        wait_for(lambda: run.writing, process)
    time.sleep(draw.random() * (0.005 if in_a_write else 0.1))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (run.folder / "model.safetensors").exists()
    run.finish("--resume")
    assert_same(run, undisturbed(kind))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) for kind in ("queue", "stateful", "travelling")]
)
def test_told_to_stop_it_saves_the_last_whole_round(
    kind: str, undisturbed: Callable[[str], Run], tmp_path: Path
) -> None:
    run = Run(tmp_path / "told", kind, every=1000)  # so that only the signal can have saved it
    process = run.start()
    wait_for(lambda: run.rounds >= 5, process)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "fedloom: terminated; continue with --resume"
    done = run.rounds
    said = run.finish("--resume", by=fedloom_alone)
    assert f"round {done}/" not in said  # no round is played twice
    assert_same(run, undisturbed(kind))


def test_finished_run_says_so(undisturbed: Callable[[str], Run]) -> None:
    whole = undisturbed("stateful")
    before = (whole.folder / "model.safetensors").stat().st_mtime_ns
    assert "holds a finished run: nothing is left to do" in whole.finish("--resume")
    assert (whole.folder / "model.safetensors").stat().st_mtime_ns == before
