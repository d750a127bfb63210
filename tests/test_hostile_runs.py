"""Run folders that anyone may have written: truncated, flipped, swapped for pipes and links. Whatever a folder holds, a
FedloomError or a result comes out, and nothing outside of the folder is read or written.
"""

import io
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fedloom as fl
from fedloom.experiment.compare import Row
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import claim, load_run, rounds_played, write_model
from fedloom.experiment.run import prepare_run, start_run
from fedloom.experiment.score import Score
from fedloom.report.describe import describe_runs
from fedloom.report.labels import describe_labels
from fedloom.report.page import run_page
from fedloom.report.watch import Watch

TEXTS = ("last(test_accuracy)", "mean(gsi.tensor, last=2)", "drop(test_accuracy, round=2)", "argmax(gsi.model)")
SCORES = [Score.read(text) for text in (*TEXTS, "best(test_loss, by=test_accuracy)", "first(test_loss, above=1)")]
FILES = ("config.yaml", "metrics.jsonl", "model.safetensors", "partition.npz", "tensors.json")
CONFIG = RunConfig(clients=6, per_round=3, model="logistic", rounds=3, diagnose="gsi,similarity", partition="iid")
hostile = settings(max_examples=25, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, without the checkpoints, which have tests of their own."""
    folder = tmp_path_factory.mktemp("real") / "run"
    start_run(CONFIG, folder)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    (folder / "report.html").unlink(missing_ok=True)
    read_everything(folder)  # what is imported when it is first used
    return folder


@pytest.fixture
def run(real: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(real, tmp_path / "runs" / "run"))


def read_history(folder: Path) -> None:
    """What is made of a run's lines: a frame, a table's row, scores, curves, the live page."""
    with suppress(fl.FedloomError):
        found = load_run(folder)
        found.frame()
        assert isinstance(found.kept, dict)
        describe_runs(found)
        for score in SCORES:
            score.of(found.history)
        if found.history:
            row = Row("fedavg", [found], "accuracy", target=0.3)
            assert all(isinstance(value, float) for value in (row.mean, *row.tails, row.works, row.uplink))
            assert row.works_to_target is None or row.bytes_to_target is not None
    watch = Watch(folder.parent)
    watch.look()
    json.dumps(watch.snapshot(), allow_nan=False)


def read_everything(folder: Path) -> None:
    """All that a user does with a folder that somebody sent."""
    steps: list[Callable[[], object]] = [
        lambda: describe_labels([load_run(folder)]),
        lambda: load_run(folder).federation(),
        lambda: load_run(folder).model(),
        lambda: prepare_run(load_run(folder).config, folder, resume=True),
        lambda: rounds_played(folder),
    ]
    for step in steps:
        with suppress(fl.FedloomError):
            step()
    read_history(folder)


@hostile
@given(name=st.sampled_from(FILES), data=st.data())
def test_any_damage(real: Path, tmp_path: Path, name: str, data: st.DataObject) -> None:
    folder = tmp_path / "runs" / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(real, folder)
    content = bytearray((folder / name).read_bytes())
    damage = data.draw(st.sampled_from(["random", "cut", "flip", "insert"]))
    place = data.draw(st.integers(0, len(content) - 1) | st.integers(0, min(100, len(content) - 1)))
    if damage == "random":
        content = bytearray(data.draw(st.binary(max_size=100)))
    elif damage == "cut":
        del content[place:]
    elif damage == "flip":
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        content[place:place] = data.draw(st.binary(min_size=1, max_size=8))
    (folder / name).write_bytes(content)
    read_everything(folder)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@hostile
@given(data=st.data())
def test_any_line(real: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Values of every kind, in a line that is whole otherwise."""
    folder = tmp_path / "runs" / "run"
    if not folder.exists():
        shutil.copytree(real, folder)
    lines = [json.loads(line) for line in (real / "metrics.jsonl").read_text().splitlines()]
    row = data.draw(st.sampled_from(lines))
    row[data.draw(st.sampled_from(sorted(row)) | st.text(max_size=5))] = data.draw(VALUES)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read_history(folder)


LINES = {
    "a list": (b"[1]", "is no record"),
    "a number": (b"5", "is no record"),
    "nothing": (b"null", "is no record"),
    "no JSON": (b"round 1", "is no JSON"),
    "brackets": (b"[" * 100_000, "is no JSON"),
    "a text as a round": (b'{"round": "one"}', "has no number for 'round'"),
    "no number as a round": (b'{"round": NaN}', "has no number for 'round'"),
    "infinitely many Works": (b'{"works": Infinity}', "has no number for 'works'"),
    "a text as a score": (b'{"round": 1, "test_accuracy": "high"}', "has no number for 'test_accuracy'"),
    "a mapping": (b'{"round": 1, "test_accuracy": {}}', "has no number for 'test_accuracy'"),
    "a list as a score": (b'{"round": 1, "test_accuracy": [1]}', "has no number for 'test_accuracy'"),
    "a text in a list": (b'{"round": 1, "gsi.tensor": [1, ["a"]]}', "has no number for 'gsi.tensor'"),
    "a number of 4,000 digits": (b'{"round": 1, "a": ' + b"9" * 4000 + b"}", "has no number for 'a'"),
    "a number of 9,000 digits": (b'{"round": ' + b"9" * 9000 + b"}", "is no JSON"),
    "half a line": (b'{"round": 1', "is no JSON"),
    "without Works": (b'{"round": 1}', "has no 'works'"),
    "another encoding": ('{"é": 1}'.encode("latin-1"), "is no JSON"),
}


@pytest.mark.parametrize("name", LINES)
def test_hostile_lines_are_refused(name: str, run: Path) -> None:
    line, words = LINES[name]
    (run / "metrics.jsonl").write_bytes(line + b"\n")
    with pytest.raises(fl.RunError, match=f"can't be read: line 1 {words}"):
        load_run(run)


def test_a_line_that_never_ends(run: Path) -> None:
    os.truncate(run / "metrics.jsonl", 8 << 30)  # as good as nothing on the disk
    with pytest.raises(fl.RunError, match="more than 32 MB"):
        load_run(run)


def test_a_line_that_was_cut_off_is_left_out(run: Path) -> None:
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole[:-20])
    assert len(load_run(run).history) == 2
    (run / "metrics.jsonl").write_bytes(whole[:-1])
    assert len(load_run(run).history) == 3


@pytest.mark.parametrize("told", ["²", "9" * 5000, "-1", "1e3", "", "०"])
def test_rounds_that_are_no_number(told: str, run: Path) -> None:
    path = run / "model.safetensors"
    save_file(load_file(path), path, {"rounds": told})
    assert rounds_played(run) is None
    read_everything(run)


def other_partition(path: Path, **changes: Any) -> None:
    arrays = {**np.load(path, allow_pickle=False), **changes}
    with path.open("wb") as file:
        np.savez(file, **arrays)


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": np.array([0, -5, 1437])},
        {"offsets": np.array([0, 2**62, 1437])},
        {"offsets": np.array([0, 1437.0])},
        {"index": np.arange(1437) + 10**12},
        {"index": np.arange(1437) - 1},
        {"index": np.zeros(1437, np.int64)},
        {"names": np.array(["a"])},
        {"text": np.array([["iid"]])},
        {"data": np.array(["x", "y"])},
        {"remarks": np.array([1.0])},
        {"text": np.array(b"iid")},
    ],
    ids=str,
)
def test_partitions_that_contradict_themselves(changes: dict[str, Any], run: Path) -> None:
    load_run(run).federation()
    other_partition(run / "partition.npz", **changes)
    with pytest.raises(fl.DataError):
        load_run(run).federation()


def array_bytes(shape: tuple[int, ...], content: bytes = b"") -> bytes:
    """An array file whose header says what it likes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": shape})
    return header.getvalue() + content


@pytest.mark.parametrize("shape", [(10**15,), (2**62, 4), (-1,)])
def test_a_partition_whose_header_lies(shape: tuple[int, ...], run: Path) -> None:
    arrays = dict(np.load(run / "partition.npz"))
    with zipfile.ZipFile(run / "partition.npz", "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"{name}.npy", array_bytes(shape) if name == "index" else content.getvalue())
    with pytest.raises(fl.DataError, match="damaged"):
        load_run(run).federation()


def test_a_whole_page_of_a_damaged_run(run: Path) -> None:
    """The page itself once: it is large."""
    (run / "tensors.json").write_bytes(b"[" * 100_000)
    (run / "partition.npz").write_bytes(b"PK")
    assert "The labels can't be counted" in run_page(load_run(run))


def test_weights_of_another_shape_or_name(run: Path) -> None:
    path = run / "model.safetensors"
    weights = load_file(path)
    first = next(iter(weights))
    for changed in ({**weights, first: weights[first][..., :-1].contiguous()}, {"x": weights[first]}, {}):
        save_file(changed, path)
        with pytest.raises(fl.RunError, match=r"model.safetensors can't be read"):
            load_run(run).model()
    header = json.dumps({first: {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(fl.RunError, match=r"model.safetensors can't be read"):
        load_run(run).model()
    path.write_bytes((1 << 62).to_bytes(8, "little"))
    with pytest.raises(fl.RunError, match=r"model.safetensors can't be read"):
        load_run(run).model()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_no_pipe_is_waited_for(name: str, kind: str, run: Path) -> None:
    (run / name).unlink()
    if kind == "pipe":
        os.mkfifo(run / name)
    elif kind == "folder":
        (run / name).mkdir()
    else:
        (run / name).symlink_to("/dev/zero")
    read_everything(run)


OPENED: list[str] = []
_watching = False


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path = Path(os.fsdecode(arguments[0]))
        follows = not (arguments[2] or 0) & os.O_NOFOLLOW
        OPENED.append(str(path.resolve() if follows else path.parent.resolve() / path.name))


sys.addaudithook(_note)  # for as long as Python runs: it can't be taken away


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Every file that Python opens meanwhile, where it really lies."""
    global _watching
    OPENED.clear()
    _watching = True
    try:
        yield OPENED
    finally:
        _watching = False


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_not_read(name: str, run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.move(run / name, outside / name)
    (run / name).symlink_to(outside / name)
    with opened_files() as opened:
        read_everything(run)
        assert any(str(run) in path for path in opened) or name == "config.yaml"  # the hook sees what is read
    assert [path for path in opened if str(outside) in path] == []


@pytest.mark.parametrize(
    "name",
    [
        ".fedloom",
        "config.yaml",
        "metrics.jsonl",
        "partition.npz",
        "tensors.json",
        "checkpoint",
        ".model.safetensors.part",
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_out_of_the_folder_is_not_written_through(name: str, overwrite: bool, run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    target = outside / "round-00000001" / "mine" if name == "checkpoint" else outside / "mine"
    target.parent.mkdir(parents=True)
    target.write_text("precious")
    (run / "model.safetensors").unlink()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside if name == "checkpoint" else target)
    if not overwrite and name != ".fedloom":
        (run / ".fedloom").touch()
    refused = not overwrite or name == ".fedloom"
    with pytest.raises(fl.RunError) if refused else nullcontext():
        start_run(CONFIG, run, overwrite=overwrite, resume=not overwrite)
    assert target.read_text() == "precious"
    assert [path for path in outside.rglob("*") if path.is_file()] == [target]


def test_a_folder_is_claimed_although_it_is_a_link_itself(tmp_path: Path) -> None:
    """Where the user says that runs shall lie is the user's own business."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    with claim(tmp_path / "runs", overwrite=False, resume=False):
        write_model(tmp_path / "runs" / "model.safetensors", fl.model("mlp", fl.load("digits", clients=2)))
    assert (tmp_path / "disk" / "model.safetensors").is_file()
