"""Files that grow, shrink, break and lie: what is whole is read once, what is wrong is listed, nothing else happens."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import RunError
from fedloom.experiment.config import RunConfig
from fedloom.report.series import columns
from fedloom.report.tail import Tail
from fedloom.report.watch import Watch, run_folders


def test_only_whole_lines_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")
    tail = Tail(path)
    assert tail.read() == (False, [b"one"])
    assert tail.read() == (False, [])
    append(path, b"o\nthree\n")
    assert tail.read() == (False, [b"two", b"three"])
    append(path, b"f")
    append(path, b"our")
    assert tail.read() == (False, [])
    append(path, b"\n")
    assert tail.read() == (False, [b"four"])


@pytest.mark.parametrize(
    "new", [b"x\n", b"other one, longer than before\n", b"1\n2\n3\n4"], ids=["short", "long", "same"]
)
@pytest.mark.parametrize("rename", [True, False])
def test_a_file_that_was_written_over_is_read_anew(tmp_path: Path, new: bytes, rename: bool) -> None:
    path, beside = tmp_path / "lines", tmp_path / "beside"
    path.write_bytes(b"a\nb\nc\nd")
    tail = Tail(path)
    assert tail.read() == (False, [b"a", b"b", b"c"])
    (beside if rename else path).write_bytes(new)
    if rename:
        os.replace(beside, path)
    os.utime(path, ns=(1, 1))  # clocks of file systems are coarse
    assert tail.read() == (True, new.split(b"\n")[:-1])


def test_lines_longer_than_a_block_and_too_long(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"x" * (3 << 20) + b"\ny\n")
    assert [len(line) for line in Tail(path).read()[1]] == [3 << 20, 1]
    with pytest.raises(RunError, match="a line of more than 2 MB"):
        Tail(path, longest=2 << 20).read()


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def make_run(folder: Path, rounds: int = 3, **settings: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(RunConfig().change(settings).yaml())
    (folder / "metrics.jsonl").write_text("".join(line(r) for r in range(1, rounds + 1)))
    return folder


def line(r: int) -> str:
    return json.dumps({"round": r, "works": float(r), "test_accuracy": r / 100}) + "\n"


def test_runs_come_grow_and_go(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    assert watch.look() is None
    a = make_run(tmp_path / "deep" / "er" / "a")
    make_run(tmp_path / "b", seed=1)
    told = watch.look()
    assert told is not None
    assert [run["id"] for run in told["new"]] == ["b", "deep/er/a"]
    assert told["new"][1]["parts"]["rounds"]["test_accuracy"] == [0.01, 0.02, 0.03]
    assert watch.look() is None

    append(a / "metrics.jsonl", (line(4) + line(5)[:9]).encode())
    told = watch.look()
    assert told is not None
    (grown,) = told["grown"]
    assert (grown["id"], grown["count"], grown["finished"]) == ("deep/er/a", 4, False)
    assert grown["parts"] == {"rounds": {"keep": 3, "columns": {"round": [4], "works": [4.0], "test_accuracy": [0.04]}}}

    append(a / "metrics.jsonl", line(5)[9:].encode())
    (a / "model.safetensors").write_text("weights")
    told = watch.look()
    assert told is not None
    assert (told["grown"][0]["count"], told["grown"][0]["finished"]) == (5, True)

    (a / "metrics.jsonl").write_text(line(1))  # begun again
    told = watch.look()
    assert told is not None
    assert told["grown"][0]["parts"]["rounds"] == {"keep": 1, "columns": {}}
    assert watch.runs["deep/er/a"].described()["parts"]["rounds"]["round"] == [1]

    shutil.rmtree(tmp_path / "b")
    told = watch.look()
    assert told is not None
    assert told["gone"] == ["b"]
    everything = watch.snapshot()
    assert [run["id"] for run in everything["runs"]] == ["deep/er/a"]
    assert everything["runs"][0]["parts"]["rounds"] == columns(watch.runs["deep/er/a"].series.parts()["rounds"])


HOSTILE = {
    "no yaml": ("config.yaml", b"data: [", "expected"),
    "no settings": ("config.yaml", b"- 1\n- 2\n", "expected lines"),
    "binary yaml": ("config.yaml", bytes(range(256)), ""),
    "unknown setting": ("config.yaml", b"dat: x", "did you mean data"),
    "python objects": ("config.yaml", b"data: !!python/object/apply:os.system ['touch owned']", "constructor"),
    "references": ("config.yaml", b"data: &a [x, x]\nmodel: &b [*a, *a]\nmethod: [*b, *b]", "refers to itself"),
    "deep yaml": ("config.yaml", b"data: " + b"[" * 20_000, "nested"),
    "wide yaml": ("config.yaml", b"data: [" + b"a," * 200_000 + b"]", "long"),
    "long yaml": ("config.yaml", b"# x\n" * 400_000, "longer than 1 MB"),
    "no json": ("metrics.jsonl", b"{}\nround 1\n{}\n", "line 2 of metrics.jsonl is no JSON"),
    "binary": ("metrics.jsonl", b"\x00\xff\xfe\n", "line 1"),
    "deep json": ("metrics.jsonl", b"[" * 200_000 + b"\n", "line 1"),
    "a list": ("metrics.jsonl", b"[1, 2]\n", "line 1 of metrics.jsonl is no record"),
    "a huge number": ("metrics.jsonl", b'{"round": ' + b"9" * 10_000 + b"}\n", "line 1"),
    "a huge line": ("metrics.jsonl", b'{"a": "' + b"x" * (33 << 20) + b'"}\n', "more than 32 MB"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_broken_folders_are_listed_and_the_others_go_on(tmp_path: Path, name: str) -> None:
    file, content, reason = HOSTILE[name]
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad")
    (bad / file).write_bytes(content)
    watch = Watch(tmp_path)
    told = watch.look()
    assert told is not None
    assert [run["id"] for run in told["new"]] == ["good"]
    (broken,) = told["unreadable"]
    assert broken["id"] == "bad"
    assert reason in broken["reason"]
    assert str(tmp_path) not in broken["reason"]
    assert not (tmp_path / "owned").exists()
    assert watch.look() is None  # it is not read again before it changes
    append(good / "metrics.jsonl", line(4).encode())
    told = watch.look()
    assert told is not None
    assert [run["id"] for run in told["grown"]] == ["good"]
    shutil.rmtree(bad)
    make_run(bad)
    told = watch.look()
    assert told is not None
    assert ([run["id"] for run in told["new"]], told["unreadable"]) == (["bad"], [])


def test_a_run_that_breaks_leaves_the_list(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    watch = Watch(tmp_path)
    watch.look()
    append(run / "metrics.jsonl", b"no json\n")
    told = watch.look()
    assert told is not None
    assert (told["gone"], told["unreadable"][0]["reason"]) == (["run"], "line 4 of metrics.jsonl is no JSON")


def test_links_and_pipes_are_left_alone(tmp_path: Path) -> None:
    outside = make_run(tmp_path / "outside" / "secret")
    root = tmp_path / "runs"
    make_run(root / "mine")
    (root / "folder").symlink_to(outside.parent)
    (root / "files").mkdir()
    for file in ("config.yaml", "metrics.jsonl"):
        (root / "files" / file).symlink_to(outside / file)
    half = make_run(root / "half")
    (half / "metrics.jsonl").unlink()
    (half / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    pipe = make_run(root / "pipe")
    (pipe / "metrics.jsonl").unlink()
    os.mkfifo(pipe / "metrics.jsonl")
    loop = root / "loop"
    loop.mkdir()
    (loop / "again").symlink_to(root)
    assert [name for name, _ in run_folders(root)] == ["mine"]
    with pytest.raises(OSError, match="symbolic links"):
        Tail(root / "files" / "metrics.jsonl").read()
    with pytest.raises(OSError, match="no plain file"):
        Tail(pipe / "metrics.jsonl").read()
