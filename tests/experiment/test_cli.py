"""The command line as a user meets it: exit codes, one sentence on stderr, real processes where it is about those."""

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import fedloom as fl
from fedloom.cli import main
from fedloom.experiment.config import RunConfig
from fedloom.experiment.run import start_run
from tests.command_line import ENV, fedloom, fedloom_alone

SMALL = ["--clients", "10", "--per-round", "4", "--model", "logistic", "--rounds", "4"]


def test_run_leaves_a_whole_folder(tmp_path: Path) -> None:
    done = fedloom_alone("run", *SMALL, "--method", "fedprox(mu=0.1)+fedadam", "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "r"
    found = {p.name for p in folder.iterdir()}
    files = {"config.yaml", "metrics.jsonl", "model.safetensors", "checkpoint", "partition.npz", "report.html"}
    files.add("tensors.json")
    assert found == {*files, ".fedloom"}
    assert [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert "round 4/4" in done.stderr  # progress as plain lines where there is no terminal

    run = fl.load_run(folder)
    assert run.finished
    assert repr(run).startswith(f"Run({folder}: fedprox(mu=0.1)+fedadam on digits, rounds 4, test_loss ")
    assert len(repr(run)) < len(str(folder)) + 150  # and not all of its history
    federation = run.federation()
    assert len(federation) == 10
    model = run.model()
    with torch.no_grad():
        assert federation.test is not None
        right = (model(federation.test.x).argmax(1) == federation.test.y).double().mean()
    assert float(right) == run.history[-1]["test_accuracy"]

    again = fedloom("run", "--config", "r/config.yaml", "--out", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()

    measured = fedloom("evaluate", "r", "--metric", "f1", "--export", "m.pt2", cwd=tmp_path)
    assert measured.returncode == 0, measured.stderr
    assert "test_f1" in measured.stdout
    program = torch.export.load(tmp_path / "m.pt2").module()
    assert torch.equal(program(federation.test.x), model(federation.test.x))
    weights = fedloom("evaluate", "r", "--export", "m.safetensors", cwd=tmp_path)
    assert weights.returncode == 0
    assert load_file(tmp_path / "m.safetensors").keys() == model.state_dict().keys()

    refused = fedloom("run", *SMALL, "--out", "r", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    assert "--overwrite" in refused.stderr
    finished = fedloom("run", "--out", "r", "--resume", cwd=tmp_path)
    assert finished.returncode == 0
    assert "finished" in finished.stdout


def test_compare(tmp_path: Path) -> None:
    arguments = ["compare", *SMALL, "--seeds", "2", "--out", "c", "fedavg", "fedprox(mu=0.1)"]
    done = fedloom(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedprox(mu=0.1)" in done.stdout
    assert "±" in done.stdout
    assert "report.html" in done.stdout
    runs = [fl.load_run(p.parent) for p in sorted((tmp_path / "c").glob("*/*/config.yaml"))]
    assert len(runs) == 4
    assert {run.history[-1]["works"] for run in runs} == {4.0}
    lines = (tmp_path / "c/table.csv").read_text().splitlines()
    assert len(lines) == 5
    again = fedloom("compare", "--resume", "--out", "c", cwd=tmp_path)  # the folder knows what is compared
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "c/table.csv").read_text().splitlines() == lines
    mixed = fedloom("compare", "fedavg", "--lr", "0.5", "--resume", "--out", "c", cwd=tmp_path)
    assert mixed.returncode == 2
    assert "lr was 0.1, now 0.5" in mixed.stderr
    assert yaml.safe_load((tmp_path / "c/comparison.yaml").read_text())["lr"] == 0.1  # nothing was written
    assert fedloom("run", "--out", "c", "--resume", cwd=tmp_path).returncode == 2
    assert "holds a comparison" in fedloom("evaluate", "c", cwd=tmp_path).stderr


def test_interrupted_run_is_resumable(tmp_path: Path) -> None:
    arguments = ["--clients", "10", "--model", "mlp", "--method", "fedadam", "--rounds", "200"]
    whole = fedloom("run", *arguments, "--out", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    heard = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # also where it was ignored before
    )
    program = f"{heard}; from fedloom.cli import main; main()"
    command = [sys.executable, "-c", program, "run", *arguments, "--out", "cut"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "cut/metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130, message
    assert "resume" in message
    assert 3 <= metrics.read_text().count("\n") < 200
    resumed = fedloom("run", "--out", "cut", "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    changed = fedloom("run", *arguments, "--lr", "0.5", "--out", "cut", "--resume", cwd=tmp_path)
    assert changed.returncode == 2
    assert "lr was 0.1, now 0.5" in changed.stderr


def test_damaged_model_is_made_again(tmp_path: Path) -> None:
    config = RunConfig(model="logistic", rounds=2)
    start_run(config, tmp_path / "r")
    model = tmp_path / "r/model.safetensors"
    whole = model.read_bytes()
    for damage in (bytes(50), whole[:-1], b""):
        model.write_bytes(damage)
        start_run(config, tmp_path / "r", resume=True)
        assert model.read_bytes() == whole


def test_resume_of_nothing(tmp_path: Path) -> None:
    """Nothing says what was to be run: not the defaults, at any rate."""
    refused = fedloom("run", "--resume", "--out", "r", cwd=tmp_path)
    assert refused.returncode == 2
    assert "r holds no run to resume; repeat the command that was to begin it" in refused.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("how", ["--one-by-one", pytest.param("--lockstep", marks=pytest.mark.long)])
def test_method_that_diverges_does_not_end_the_others(how: str, tmp_path: Path) -> None:
    arguments = [*SMALL, "--engine", "vector", "--seeds", "1", "--max-diverged", "3", how, "--out", "c"]
    ended = fedloom("compare", "fedavg(lr=1e39)", "fedavg", *arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert "more than max_diverged=3" in ended.stderr
    assert "the other runs go on" in ended.stderr
    assert fl.load_run(tmp_path / "c/fedavg/seed-0").finished


def test_resume_refuses_another_run(tmp_path: Path) -> None:
    assert fedloom("run", *SMALL, "--out", "r", cwd=tmp_path).returncode == 0
    (tmp_path / "r/model.safetensors").unlink()
    refused = fedloom("run", "--out", "r", "--resume", "--method", "fedadam", "--rounds", "9", cwd=tmp_path)
    assert refused.returncode == 2
    assert 'method was "fedavg", now "fedadam"' in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--method", "fedprx"], "did you mean fedprox"),
        (["run", "--method", "fedadam+fedavgm"], "fedadam and fedavgm both fill the server stage"),
        (["run", "--lr", "fast"], "--lr"),
        (["run", "--lr", "-1"], "lr must be"),
        (["run", "--optimizer", "rmsprop"], "'sgd' or 'adam' or 'adamw'"),
        (["run", "--per-round", "21"], "between 1 and the number of clients, 20"),
        (["run", "--per-round", "x"], "per_round must be a whole number or a number"),
        (["run", "--clients", "9999"], "can't share"),
        (["run", "--overwrite", "--resume"], "exclude each other"),
        (["run", "--config", "missing.yaml"], "missing.yaml can't be read"),
        (["run", "--config", "broken.yaml"], "broken.yaml, line 3:"),
        (["run", "--config", "typo.yaml"], "typo.yaml, line 2: unknown setting 'lrr': did you mean lr"),
        (["run", "--config", "kind.yaml"], "kind.yaml, line 2: rounds must be a whole number, not 'many'"),
        (["run", "--config", "twice.yaml"], "twice.yaml, line 2: 'lr' is set twice"),
        (["run", "--config", "list.yaml"], "list.yaml: expected lines"),
        (["compare"], "name at least one method"),
        (["compare", "fedavg", "radfed", "--rounds", "3"], "radfed averages once in 15 Works; --rounds 3 is too few"),
        (["run", "--config", "cycle.yaml"], "cycle.yaml, line 1: this refers to itself"),
        (["run", "--config", "huge.yaml"], "huge.yaml, line 1: a whole number of more than 63 bits"),
        (["run", "--config", "tag.yaml"], "tag.yaml: this is no YAML"),
        (["run", "--method", f"fedprox(mu={10**30})"], "more than 63 bits"),
        (["run", "--out", "x" * 300], "File name too long"),
        (["compare", "fedavg", "fedavg"], "twice"),
        (["compare", "fedavg", "--data", "digit"], "did you mean digits"),
        (["compare", "fedavg", "fixed(cohorts=[[99]])"], "no client 99 among 20"),
        (["compare", "fedavg", "scaffold-m", "--momentum", "0.9"], "scaffold-m refuses local momentum"),
        (["compare", "fedavg", "--seeds", "0"], "seeds must be at least 1"),
        (["compare", "fedavg", "--method", "fedprox"], "No such option"),
        (["evaluate", "nowhere"], "no run folder"),
        (["walk"], "No such command"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken.yaml").write_text("lr: 0.1\nrounds: 3\n\tmethod: fedavg\n")
    (tmp_path / "typo.yaml").write_text("rounds: 3\nlrr: 0.1\n")
    (tmp_path / "kind.yaml").write_text("lr: 0.1\nrounds: many\n")
    (tmp_path / "twice.yaml").write_text("lr: 0.1\nlr: 0.2\n")
    (tmp_path / "list.yaml").write_text("- lr\n")
    (tmp_path / "cycle.yaml").write_text("lr: &a [*a]\n")
    (tmp_path / "huge.yaml").write_text(f"rounds: 0x{'f' * 9000}\n")
    (tmp_path / "tag.yaml").write_text('lr: !!int ""\n')
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert words in said.err
    assert said.err.startswith("fedloom: ")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert sorted(tmp_path.iterdir()) == before  # nothing was written


def test_overwrite_leaves_strange_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.tex").write_text("x")
    refused = fedloom("run", *SMALL, "--out", "precious", "--overwrite", cwd=tmp_path)
    assert refused.returncode == 2
    assert "not written by fedloom" in refused.stderr
    (tmp_path / "precious/config.yaml").write_text("lr: 1\n")  # many programs have a file of that name
    assert fedloom("run", *SMALL, "--out", "precious", "--overwrite", cwd=tmp_path).returncode == 2
    assert (tmp_path / "precious/thesis.tex").exists()


def test_one_run_per_folder_at_a_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from fedloom.cli import main; main()", "run", "--rounds", "9999", "--out", "r"]
    first = subprocess.Popen(command, cwd=tmp_path, env=ENV, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (tmp_path / "r/metrics.jsonl").exists():
            time.sleep(0.01)
        assert (tmp_path / "r/metrics.jsonl").exists()  # else the second would be the first, and run for long
        for how in ("--resume", "--overwrite"):
            second = fedloom("run", "--rounds", "9999", "--out", "r", how, cwd=tmp_path)
            assert second.returncode == 2
            assert "in use by another fedloom" in second.stderr
        assert (tmp_path / "r/metrics.jsonl").exists()
    finally:
        first.kill()
        first.wait()


def test_a_model_that_diverged_is_called_so(tmp_path: Path) -> None:
    broken = "fedavg(lr=1e300)"
    done = fedloom("compare", *SMALL, "--seeds", "1", "--out", "c", broken, "fedavg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "diverged" in done.stdout
    assert "no longer finite" in done.stderr
    page = (tmp_path / "c/report.html").read_text()
    assert 'class="best"><td><i class="key" data-series="1">' in page  # the second row, not the dead one


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("partition.npz", b""),
        ("partition.npz", b"PK\x03\x04"),
        ("metrics.jsonl", b"\xff\xfe"),
        ("model.safetensors", b"{}"),
    ],
)
def test_damaged_files_are_named(
    name: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_run(RunConfig(clients=10, per_round=4, model="logistic", rounds=2), tmp_path / "r")
    (tmp_path / "r" / name).write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["fedloom", "evaluate", str(tmp_path / "r")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert re.search(f"{name} (can't be read|is damaged)", capsys.readouterr().err)


def test_method_as_a_list_in_a_config(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"method": [{"fedprox": {"mu": 0.1}}, "fedadam"], "rounds": 1}))
    done = fedloom("run", "--config", "c.yaml", "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert fl.load_run(tmp_path / "r").config.method == "fedprox(mu=0.1)+fedadam"


@pytest.mark.parametrize(
    ("start", "arguments"),
    [
        (fedloom_alone, ["data", "digits"]),
        (fedloom, ["methods"]),
        (fedloom, ["data"]),
        (fedloom, ["models"]),
        (fedloom, ["--help"]),
        (fedloom, ["run", "--help"]),
        (fedloom, []),
    ],
)
def test_lists_and_help(
    start: Callable[..., subprocess.CompletedProcess[str]], arguments: list[str], tmp_path: Path
) -> None:
    done = start(*arguments, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(done.stdout) > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "mnits"], "unknown data set 'mnits'"),
        (["data", "digits", "--partition", "dirichlet(alpha=-1)"], "alpha"),
        (["data", "digits", "--clients", "9999"], "9999 clients can't share 1437 samples"),
        (["data", "digits", "--data-dir", "nowhere"], "nowhere does not exist"),
        (["data", "digits", "--clients", "5", "--plot", "map.xyz"], "map.xyz"),
        (["data", "femnist", "--data-dir", "."], "femnist is not on this machine"),
        (["run", "--data", "cifar100", "--data-dir", "."], "cifar100 is not on this machine"),
        (["run", "--fold", "9"], "fold=9"),
        (["run", "--augment", "flip"], "only images can be augmented"),
        (["run", "--standardise", "locale"], "standardise must be 'global' or 'local'"),
        (["run", "--partition", "natural"], "no clients of its own"),
        (["run", "--loss", "hinged"], "unknown loss 'hinged'"),
        (["run", "--model", "lenet5"], "lenet5 reads images"),
        (["run", "--data", "table(path='t.csv', client=a, label=b)"], "t.csv is no file"),
    ],
)
def test_bad_data_settings(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: a new one takes seconds to import everything."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "127.0.0.1:9")
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert message in said
    assert said.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}  # nothing was written


def test_a_run_repeats_from_its_config_and_its_partition(tmp_path: Path) -> None:
    """What a folder says is enough to run the same again, held-out clients included."""
    settings = ["--partition", "dirichlet(alpha=0.3)", "--clients", "12", "--validation", "3", "--rounds", "2"]
    done = fedloom("run", *settings, "--standardise", "global", "--out", "first", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = fedloom(
        "run", "--config", "first/config.yaml", "--partition", "first/partition.npz", "--out", "second", cwd=tmp_path
    )
    assert again.returncode == 0, again.stderr
    rows = [fl.load_run(tmp_path / name).history for name in ("first", "second")]
    for a, b in zip(*rows, strict=True):
        assert {n: v for n, v in a.items() if n != "seconds"} == {n: v for n, v in b.items() if n != "seconds"}
    assert "validation_accuracy" in rows[0][-1]
    assert len(fl.load_run(tmp_path / "first").federation()) == 12


def test_data_is_dealt_out_and_drawn(tmp_path: Path) -> None:
    done = fedloom("data", "digits", "--partition", "classes(2)", "--clients", "20", "--plot", "map.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "C-score" in done.stdout
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_goes_on_with_more_rounds(tmp_path: Path) -> None:
    """As if it had been asked for them at once, alone and in a comparison, also when it is cut off on the way."""
    settings = ["--clients", "10", "--per-round", "4", "--model", "logistic"]
    method = ["--method", "adabest(beta=0.9)"]
    whole = fedloom("run", *settings, *method, "--rounds", "6", "--out", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert fedloom("run", *settings, *method, "--rounds", "3", "--out", "r", cwd=tmp_path).returncode == 0
    shutil.copytree(tmp_path / "r", tmp_path / "cut")
    more = fedloom("run", "--resume", "--rounds", "6", "--out", "r", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert "round 6," in more.stdout
    check_same_run(tmp_path / "r", tmp_path / "whole")
    assert "nothing is left to do" in fedloom("run", "--resume", "--out", "r", cwd=tmp_path).stdout
    fewer = fedloom("run", "--resume", "--rounds", "5", "--out", "r", cwd=tmp_path)
    assert fewer.returncode == 2
    assert "holds a finished run with other settings: rounds was 6, now 5" in fewer.stderr

    killed = fl.load_run(tmp_path / "cut").config.change({"rounds": 6})

    def kill(event: fl.Event) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start_run(killed, tmp_path / "cut", resume=True, callbacks=[kill])
    assert not fl.load_run(tmp_path / "cut").finished  # no model of three rounds beside a history of four
    assert fedloom("run", "--resume", "--out", "cut", cwd=tmp_path).returncode == 0
    check_same_run(tmp_path / "cut", tmp_path / "whole")

    shutil.rmtree(tmp_path / "r/checkpoint")
    lost = fedloom("run", "--resume", "--rounds", "7", "--out", "r", cwd=tmp_path)
    assert lost.returncode == 2
    assert "rounds was 6, now 7" in lost.stderr
    assert fl.load_run(tmp_path / "r").finished

    both = ["compare", "fedavg", "adabest(beta=0.9)", *settings, "--seeds", "1", "--out", "c"]
    assert fedloom(*both, "--rounds", "3", cwd=tmp_path).returncode == 0
    grown = fedloom("compare", "--resume", "--rounds", "6", "--out", "c", cwd=tmp_path)
    assert grown.returncode == 0, grown.stderr
    check_same_run(next((tmp_path / "c").glob("adabest*/seed-0")), tmp_path / "whole")


def check_same_run(folder: Path, other: Path) -> None:
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    for line, same in zip(fl.load_run(folder).history, fl.load_run(other).history, strict=True):
        assert line | {"seconds": 0} == same | {"seconds": 0}


def test_a_method_that_can_t_use_all_works_says_so(tmp_path: Path) -> None:
    methods = ["fedavg", "radfed(redistributions=3)", "fedasync"]
    done = fedloom("compare", *methods, *SMALL, "--seeds", "1", "--out", "c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = "radfed(redistributions=3): 3 works instead of 4, since it averages once in 3"
    assert told in done.stdout
    assert done.stdout.count("works instead of") == 1
    assert f"\n{told}\n" in (tmp_path / "c/table.md").read_text()


def test_arguments_have_help() -> None:
    """Typer and click of some versions don't get on, and forget it."""
    for command, words in (("compare", "the first is the baseline"), ("reproduce", "or a YAML file")):
        assert words in " ".join(fedloom(command, "--help").stdout.split())


def test_fewer_clients_than_a_round_asks_by_default(tmp_path: Path) -> None:
    rows = [f"{'abcde'[i % 5]},{i},{i % 2}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["who,age,died", *rows]))
    data = ["--data", "table(path='t.csv', client=who, label=died)", "--model", "logistic", "--rounds", "2"]
    done = fedloom("run", *data, "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert fl.load_run(tmp_path / "r").history[-1]["asked"] == 5
    refused = fedloom("run", *data, "--per-round", "9", "--out", "n", cwd=tmp_path)
    assert refused.returncode == 2
    assert "must be between 1 and the number of clients, 5" in refused.stderr


def test_changed_data_are_noticed(tmp_path: Path) -> None:
    """Old positions would hand rows to the wrong clients."""
    rows = [f"{'abcde'[i % 5]},{i},{i % 2}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["who,age,died", *rows]))
    data = ["--data", "table(path='t.csv', client=who, label=died)", "--fold", "0", "--model", "logistic"]
    done = fedloom("run", *data, "--per-round", "2", "--rounds", "1", "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "elsewhere").mkdir()
    assert fedloom("evaluate", "../r", cwd=tmp_path / "elsewhere").returncode == 0  # paths hold from everywhere
    (tmp_path / "t.csv").write_text("\n".join(["who,age,died", *reversed(rows)]))
    again = fedloom("evaluate", "r", cwd=tmp_path)
    assert again.returncode == 2
    assert "deals out other data" in again.stderr


def test_without_a_test_set(tmp_path: Path) -> None:
    done = fedloom("run", *SMALL, "--pooled", "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train_loss" in done.stdout
    assert "diverged" not in done.stdout
    refused = fedloom("compare", "fedavg", *SMALL, "--pooled", "--out", "c", cwd=tmp_path)
    assert refused.returncode == 2
    assert "there is no test set to compare on" in refused.stderr


def test_a_recurrent_model_is_exported(tmp_path: Path) -> None:
    """As a program that reads a batch of any size."""
    tokens = np.random.default_rng(0).integers(0, 9, (50, 6))
    for part, clients in (("train", 4), ("test", 1)):
        (tmp_path / "clients" / part).mkdir(parents=True)
        for k in range(clients):
            mine = tokens[10 * k : 10 * k + 10]
            np.savez(tmp_path / "clients" / part / f"{k}.npz", x=mine, y=mine[:, 0] % 2)
    data = ["--data", "folder(path=clients)", "--model", "lstm(hidden=4, embedding=3)", "--per-round", "2"]
    done = fedloom("run", *data, "--rounds", "1", "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = fedloom("evaluate", "r", "--export", "m.pt2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    program = torch.export.load(tmp_path / "m.pt2").module()
    model = fl.load_run(tmp_path / "r").model().eval()
    for size in (2, 7):
        batch = torch.from_numpy(tokens[:size])
        assert torch.allclose(program(batch), model(batch), atol=1e-6)


def test_a_comparison_with_a_method_that_diverges(tmp_path: Path) -> None:
    done = fedloom("compare", "fedavg", "fedavg(lr=1e39)", *SMALL, "--seeds", "2", "--out", "c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "diverged" in done.stdout
    for name in ("table.csv", "summary.csv", "table.md", "table.tex", "report.html"):
        assert (tmp_path / "c" / name).stat().st_size
    turned = fedloom("compare", "fedavg(lr=1e39)", "fedavg", *SMALL, "--seeds", "2", "--out", "t", cwd=tmp_path)
    assert turned.returncode == 0, turned.stderr
    assert "the baseline diverged" in (tmp_path / "t/table.md").read_text()
    assert "nan" not in (tmp_path / "t/table.md").read_text()
    history = tmp_path / "c/fedavg/seed-0/metrics.jsonl"
    history.write_text("".join(history.read_text().splitlines(keepends=True)[:1]))
    cut = fedloom("compare", "--resume", "--out", "c", cwd=tmp_path)
    assert cut.returncode == 2
    assert "has 1 lines, but the run played" in cut.stderr
    far = fedloom("compare", "fedavg", *SMALL, "--target", "90", "--out", "far", cwd=tmp_path)
    assert far.returncode == 2
    assert "a share such as 0.9" in far.stderr


def test_patience_tells_of_the_model_that_is_kept(tmp_path: Path) -> None:
    settings = ["--clients", "20", "--fold", "0", "--patience", "2", "--rounds", "30", "--model", "logistic"]
    done = fedloom("run", *settings, "--per-round", "3", "--out", "p", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = float(done.stdout.partition("test_accuracy ")[2].partition(",")[0])
    measured = fedloom("evaluate", "p", cwd=tmp_path)
    assert said == pytest.approx(float(measured.stdout.partition("test_accuracy ")[2].partition("\n")[0]), abs=1e-4)


def test_fewer_rounds_than_were_played_are_refused(tmp_path: Path) -> None:
    assert fedloom("run", *SMALL, "--out", "r", cwd=tmp_path).returncode == 0
    (tmp_path / "r/model.safetensors").unlink()
    done = fedloom("run", "--resume", "--out", "r", "--rounds", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "rounds=1 is too few" in done.stderr


@pytest.mark.parametrize("apart", [[], pytest.param(["--processes", "3"], marks=pytest.mark.long)])
def test_a_recipe_that_is_stopped_tells_what_is_finished(tmp_path: Path, apart: list[str]) -> None:
    (tmp_path / "r.yaml").write_text(
        "title: t\nscores: {a: last(test_accuracy)}\nseeds: 2\nmethods: {A: fedavg}\n"
        "settings: {data: digits, clients: 12, model: logistic, rounds: 2}\n"
        "rows: {short: {printed: {A: 50}}, long: {settings: {rounds: 1000000}}}\n"
    )
    program = "from fedloom.cli import main; main()"
    command = [sys.executable, "-c", program, "reproduce", "r.yaml", "--out", "o", *apart]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=ENV, **streams)
    deadline = time.monotonic() + 60

    def begun() -> bool:
        runs = (tmp_path / "o/runs").glob("*/*/metrics.jsonl")
        return sum(run.read_text().count("\n") >= 3 for run in runs) == 2

    while time.monotonic() < deadline and not (begun() and len([*tmp_path.glob("o/runs/*/*/model.safetensors")]) == 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    told, message = process.communicate(timeout=60)
    assert process.returncode == 130, message
    assert "the same command goes on" in message
    assert "not run: long: not finished" in told
    with (tmp_path / "o/r/result.csv").open() as file:
        short, long = csv.DictReader(file)
    assert (short["row"], short["runs"], len(short["values"].split())) == ("short", "2", 2)
    assert (long["row"], long["runs"], long["measured"]) == ("long", "0", "")


def test_a_terminal_without_signs(tmp_path: Path) -> None:
    plain = {**ENV, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    command = [sys.executable, "-c", "from fedloom.cli import main; main()", "compare", "fedavg", "dgt", *SMALL]
    done = subprocess.run([*command, "--seeds", "2"], cwd=tmp_path, env=plain, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "±" in (tmp_path / "runs/compare/table.md").read_text(encoding="utf-8")


def test_reproduce_and_recipes(tmp_path: Path) -> None:
    settings = "settings: {data: digits, clients: 12, model: logistic, rounds: 2}\n"
    recipe = f"title: t\nscores: {{a: last(test_accuracy)}}\n{settings}"
    (tmp_path / "r.yaml").write_text(recipe + "methods: {A: fedavg}\nrows: {x: {printed: {A: 50}}}\n")
    done = fedloom("reproduce", "r.yaml", "--out", "o", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "o/r").iterdir()} == {"result.csv", "result.md", "report.html"}
    assert "fedloom reproduce r.yaml --out o" in (tmp_path / "o/r/result.md").read_text()
    (tmp_path / "bad.yaml").write_text(recipe.replace("rounds", "round") + "methods: {A: fedavg}\nrows: {x: {}}\n")
    for command, message in (
        (["reproduce", "bad.yaml"], "bad.yaml, line 3: unknown setting 'round'"),
        (["reproduce", "fedgled-table1"], "did you mean fedglad-table1"),
        (["reproduce", "r.yaml", "--device", "cdua"], "unknown device"),
    ):
        refused = fedloom(*command, cwd=tmp_path)
        assert refused.returncode == 2
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
    listed = fedloom("recipes", "--no-cost", cwd=tmp_path)
    assert "adabest-table2" in listed.stdout
    assert "FedAvg: fedavg(lr=0.5)" in fedloom("recipes", "fedglad-table1", cwd=tmp_path).stdout
