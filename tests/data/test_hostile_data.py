"""Data files, archives, caches and weights that anyone may have written: bombs, links, headers that lie, pickles."""

import bz2
import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedloom as fl
from fedloom import untrusted
from fedloom.data import own
from fedloom.data.cache import FACTS, cached
from fedloom.data.corpus import Corpus
from fedloom.data.files import Files, cache_folder, open_text, read_npz, unpack
from fedloom.data.formats import tar_files, unpacked_from
from fedloom.engines import rule as rules
from fedloom.errors import DataError, ModelError
from fedloom.experiment import cost
from fedloom.experiment.track import TensorBoard
from fedloom.models.catalogue import Shape
from fedloom.models.stored import read_weights
from fedloom.models.word_vectors import vectors_of
from fedloom.population import Absence
from tests.data.sets import writers

hostile = settings(max_examples=60, deadline=3000, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb of a megabyte is quicker made than one of a quarter of a gigabyte."""
    monkeypatch.setattr(untrusted, "UNPACKED", 1 << 20)


def array(shape: tuple[int, ...], descr: str = "<f8") -> bytes:
    """An array file without an array."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue()


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


# Pickles


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    evil = np.array([Evil(owned)], dtype=object)
    np.savez(tmp_path / "a.npz", x=evil, y=evil, train_x=evil)
    np.save(tmp_path / "trace.npy", evil)
    torch.save({"weight": Evil(owned)}, tmp_path / "a.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Evil(owned)))
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(Evil(owned)))
    for read in (
        lambda: fl.Federation.from_folder(tmp_path),
        lambda: read_npz(tmp_path / "a.npz", ["train_x"]),
        lambda: Absence.of(tmp_path / "trace.npy", 0.0, 1),
        lambda: Absence.of(tmp_path / "raw.npy", 0.0, 1),
        lambda: read_weights(tmp_path / "a.pt"),
        lambda: read_weights(tmp_path / "old.pt"),
    ):
        with pytest.raises(fl.FedloomError):
            read()
    assert not owned.exists()
    pickle.loads(pickle.dumps(Evil(owned)))
    assert owned.is_dir()  # it would have


# Bombs


@pytest.mark.usefixtures("small")
def test_packed_files_that_unpack_to_far_more(tmp_path: Path) -> None:
    zeros = bytes(2 << 20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(zeros))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"x,label\n" + b"1,2\n" * (1 << 19)))
    (tmp_path / "a.tar.bz2").write_bytes(bz2.compress(bytes(512) + zeros))
    writers.tar(tmp_path / "b.tar.gz", {"unwanted": zeros, "wanted": b"x"})
    zipped(tmp_path / "a.npz", {"train_x.npy": array((1 << 18,)) + zeros})
    for read in (
        lambda: open_text(tmp_path / "a.jsonl.gz").read(),
        lambda: unpack(tmp_path / "a.tar.bz2").read(),
    ):
        with pytest.raises(OSError, match="unpacks to more than 1 MB"):
            read()
    for load in (
        lambda: fl.Federation.from_table(tmp_path / "a.csv.gz", client="x", label="label"),
        lambda: list(tar_files(tmp_path / "b.tar.gz", lambda name: name == "wanted")),
        lambda: read_npz(tmp_path / "a.npz", ["train_x"]),
    ):
        with pytest.raises(DataError, match="unpacks to more than 1 MB; unpack it, if it is not a bomb"):
            load()


@pytest.mark.usefixtures("small")
def test_a_large_file_may_come_to_much(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(2 << 20)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    with unpack(tmp_path / "a.gz") as file:
        assert file.read() == content


def test_a_tar_member_with_holes(tmp_path: Path) -> None:
    """GNU's sparse files say how large they are, and hold nothing."""
    member = tarfile.TarInfo("wanted")
    member.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[386:398], block[398:410] = b"%011o\0" % 0, b"%011o\0" % 0
    block[483:495] = b"%011o\0" % (8 << 30)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(block) + bytes(1024)))
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert archive.getmembers()[0].size == 8 << 30
    with pytest.raises(DataError, match="unpacks to more than"):
        list(tar_files(tmp_path / "a.tar.gz", lambda name: True))


def test_an_archive_never_writes_where_it_likes(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("../../up", "/tmp/absolute", "x/../../up", "good"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
        for name, kind in (("good2", tarfile.SYMTYPE), ("good3", tarfile.LNKTYPE), ("good4", tarfile.CHRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    with unpacked_from(path, ["good", "up"]) as files:
        assert [file.read_bytes() for file in files] == [b"abc", b"abc"]
        folder = files[0].parent
        assert sorted(file.name for file in folder.iterdir()) == ["good", "up"]
    assert not folder.exists()
    for name in ("good2", "good3", "good4"):
        with pytest.raises(DataError, match=f"has no {name}"), unpacked_from(path, [name]):
            pass
    assert [name for name, _ in tar_files(path, lambda name: name.startswith("good"))] == ["good"]


# Headers that lie


@pytest.mark.parametrize("shape", [(10**15, 2), (2**62, 2), (-3, 2), (3, 2)])
def test_arrays_that_are_not_there(shape: tuple[int, ...], tmp_path: Path) -> None:
    zipped(tmp_path / "a.npz", {"x.npy": array(shape), "y.npy": array((3,), "<i8") + bytes(24)})
    with pytest.raises(DataError, match=r"a.npz is damaged"):
        fl.Federation.from_folder(tmp_path)
    (tmp_path / "t.npy").write_bytes(array(shape))
    with pytest.raises(DataError, match="can't be read"):
        Absence.of(tmp_path / "t.npy", 0.0, 3)


@pytest.mark.parametrize(
    "member",
    [
        b"",
        b"no array",
        b"\x93NUMPY\x01\x00\x10\x00{'descr': ((((( \n",
        b"\x93NUMPY\x09\x00",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
    ],
)
def test_members_that_are_no_arrays(member: bytes, tmp_path: Path) -> None:
    zipped(tmp_path / "a.npz", {"x.npy": member, "y.npy": member})
    zipped(tmp_path / "b.npz", {"train_x": member})
    with pytest.raises(DataError):
        fl.Federation.from_folder(tmp_path)
    with pytest.raises(DataError):
        read_npz(tmp_path / "b.npz", ["train_x"])


@pytest.mark.parametrize("sizes", [(2**32 - 1, 28, 28), (2**32 - 1,) * 200, (0, 28, 28)])
def test_idx_files_that_say_what_they_like(sizes: tuple[int, ...], tmp_path: Path) -> None:
    files, _ = writers.mnist_files(tmp_path)
    header = bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)
    files[writers.MNIST[0]].write_bytes(gzip.compress(header + bytes(100)))
    with pytest.raises(DataError, match="cut off or too long"):
        writers.read_published("mnist", files)


def test_hdf5_that_leads_elsewhere(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(784 * 8))
    whole = writers.hdf5(tmp_path / "whole.h5", {"w": {"pixels": np.zeros((1, 784)), "label": np.zeros(1, np.int64)}})
    layout = h5py.VirtualLayout((1, 784), "f8")
    layout[:] = h5py.VirtualSource(whole, "examples/w/pixels", (1, 784))
    attacks: dict[str, Callable[[Any], None]] = {
        "raw bytes of another file": lambda user: user.create_dataset(
            "pixels", (1, 784), "f8", external=[(str(secret), 0, 784 * 8)]
        ),
        "a link to another file": lambda user: user.__setitem__(
            "pixels", h5py.ExternalLink(str(whole), "examples/w/pixels")
        ),
        "parts of another file": lambda user: user.create_virtual_dataset("pixels", layout),
        "a link": lambda user: user.__setitem__("pixels", h5py.SoftLink("/examples/w/label")),
        "nothing, but much of it": lambda user: user.create_dataset("pixels", (1 << 40, 784), "f8", chunks=(1, 784)),
        "a group": lambda user: user.create_group("pixels"),
    }
    for name, attack in attacks.items():
        path = tmp_path / f"{name}.h5"
        with h5py.File(path, "w") as file:
            user = file.create_group("examples/w")
            user["label"] = np.zeros(1, np.int64)
            attack(user)
        files = {"fed_emnist_train.h5": path, "fed_emnist_test.h5": whole}
        with pytest.raises(DataError, match=r"of this file|in another file|unpacks to more"):
            writers.read_published("femnist", files)
    with h5py.File(tmp_path / "users.h5", "w") as file:
        file["examples"] = h5py.ExternalLink(str(whole), "examples")
    with pytest.raises(DataError, match="no group of this file"):
        writers.read_published("femnist", {"fed_emnist_train.h5": tmp_path / "users.h5", "fed_emnist_test.h5": whole})


@pytest.mark.usefixtures("small")
def test_a_parquet_of_very_many_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = pyarrow.table({"x": pyarrow.array(np.zeros(1 << 20)), "label": pyarrow.array(np.zeros(1 << 20))})
    parquet.write_table(rows, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 17
    with pytest.raises(DataError, match="unpacks to more than"):
        fl.Federation.from_folder(tmp_path)


# Values


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.full((3, 2), np.nan)}, "NaN or an infinity"),
        ({"y": np.array([0, 1, 2**63], np.uint64)}, "labels go up to"),
        ({"y": np.array([0.5, np.inf, 1])}, "NaN or an infinity"),
        ({"offsets": np.array([0, 2**63 + 5, 3], np.uint64)}, "offsets must rise"),
        ({"offsets": np.array([0, -1, 3])}, "offsets must rise"),
        ({"offsets": np.array([0, 9])}, "offsets must rise"),
        ({"offsets": np.array([0, 3]), "names": np.array(7)}, ""),
        ({"offsets": np.array([0, 1, 3]), "names": np.array([["a", "b", "c"]])}, "2 clients have 3 names"),
        ({"x": np.zeros((3, 2), "c16")}, "numbers were expected"),
        ({"x": np.zeros(3, [("a", "i4")])}, "numbers were expected"),
        ({"y": np.zeros(3, "M8[s]")}, "numbers were expected"),
    ],
)
def test_values_that_are_none(arrays: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    writers.npz(tmp_path / "a.npz", **{"x": np.zeros((3, 2)), "y": np.array([0, 1, 1]), **arrays})
    if not words:
        assert fl.Federation.from_folder(tmp_path).names.tolist() == ["7"]  # type: ignore[union-attr]
        return
    with pytest.raises(DataError, match=words):
        fl.Federation.from_folder(tmp_path)


def test_a_table_of_very_many_columns() -> None:
    """Looking for names that stand there twice took the square of their number: an hour for these."""
    names = [f"x{i}" for i in range(300_000)]
    assert own._twice(names) is None
    assert own._twice([*names, "x7"]) == "x7"


def test_labels_of_a_text_that_no_number_holds(tmp_path: Path) -> None:
    path = tmp_path / "agnews.csv.gz"
    path.write_bytes(gzip.compress(b"split,label,text\ntrain,99999999999999999999,a\ntest,1,b\n"))
    with pytest.raises(DataError, match=r"agnews.csv.gz is damaged"):
        writers.read("agnews", path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"play": ' + "9" * 5000, "null", '{"play": 1}', "\x00", "\ufeff{}"])
def test_lines_of_json_that_are_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "shakespeare.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DataError):
        writers.read("shakespeare", path)
    writers.put(tmp_path / "all_data" / "a.json", text.encode())
    with pytest.raises(DataError):
        writers.read_published("shakespeare", {"shakespeare/all_data": tmp_path / "all_data"})


KINDS = {"npz": None, "idx": None, "tar": None, "hdf5": "h5py", "parquet": "pyarrow", "csv": None}  # what they need


def original(folder: Path, kind: str) -> tuple[Path, Callable[[], object]]:
    """A file of a kind that is whole, and how it is read."""
    if kind == "npz":
        path = writers.plain_npz(folder / "mnist.npz", (28, 28), 10)
        return path, lambda: writers.read("mnist", path)
    if kind == "idx":
        files, _ = writers.mnist_files(folder)
        return files[writers.MNIST[1]], lambda: writers.read_published("mnist", files)
    if kind == "tar":
        content, _ = writers.cifar_records(2, [np.zeros(2), np.zeros(2)])
        path = writers.tar(folder / "c.tar.gz", {"train.bin": content, "test.bin": content})
        return path, lambda: writers.read_published("cifar100", {"cifar-100-binary.tar.gz": path})
    if kind == "hdf5":
        users = {"w": {"pixels": np.zeros((2, 784)), "label": np.zeros(2, np.int64)}}
        path = writers.hdf5(folder / "a.h5", users)
        both = {"fed_emnist_train.h5": path, "fed_emnist_test.h5": path}
        return path, lambda: writers.read_published("femnist", both)
    mine = folder / "own"
    mine.mkdir()
    if kind == "parquet":
        import pandas as pd

        pd.DataFrame({"x": [1.0, 2.0], "label": [0, 1]}).to_parquet(mine / "a.parquet")
    else:
        (mine / "a.csv").write_text("x,label\n1,0\n2,1\n")
    return next(mine.iterdir()), lambda: fl.Federation.from_folder(mine)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Callable[[], object], bytes]]:
    kinds = [kind for kind, package in KINDS.items() if package is None or find_spec(package)]
    made = {kind: original(tmp_path_factory.mktemp(kind), kind) for kind in kinds}
    for _, read in made.values():
        read()
    return {kind: (path, read, path.read_bytes()) for kind, (path, read) in made.items()}


@hostile
@given(data=st.data())
def test_any_damage(originals: dict[str, tuple[Path, Callable[[], object], bytes]], data: st.DataObject) -> None:
    path, read, whole = originals[data.draw(st.sampled_from(sorted(originals)))]
    content, end = bytearray(whole), len(whole) - 1
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, end) | st.integers(0, min(200, end)) | st.integers(max(0, end - 200), end))
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, end) | st.just(end + 1))])
    try:
        with suppress(DataError):
            read()
    finally:
        path.write_bytes(whole)


# Pipes, names, environment


def test_no_pipe_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mnist.npz")
    os.mkfifo(tmp_path / "trace.csv")
    os.mkfifo(tmp_path / "weights.pt")
    os.mkfifo(tmp_path / "vectors.txt")
    shape = Shape((4,), 2, tokens=3, words=("", "a", "b"), files=Files(tmp_path, tmp_path))
    for read in (
        lambda: fl.load("mnist", data_dir=tmp_path / "nowhere"),
        lambda: fl.Federation.from_folder(tmp_path),
        lambda: read_npz(tmp_path / "mnist.npz", ["x"]),
        lambda: fl.load("digits", partition=tmp_path / "mnist.npz"),
        lambda: Absence.of(tmp_path / "trace.csv", 0.0, 1),
        lambda: read_weights(tmp_path / "weights.pt"),
        lambda: vectors_of("vectors.txt", shape),
        lambda: vectors_of(str(tmp_path / "vectors.txt"), shape),
    ):
        with pytest.raises(fl.FedloomError):
            read()


@pytest.mark.parametrize("name", ["a\x00b", "a\ud800b", "x" * 5000, "/dev/zero", ""])
def test_names_that_no_file_can_have(name: str) -> None:
    for read in (
        lambda: fl.load("digits", partition=f"{name}.npz"),
        lambda: fl.load("digits", data_dir=name or "\x00"),
        lambda: fl.Federation.from_table(name, client="c", label="l"),
        lambda: fl.Federation.from_folder(name or "\x00"),
        lambda: Absence.of(name, 0.0, 1),
        lambda: fl.load_run(name),
        lambda: read_weights(Path(name)),
    ):
        with pytest.raises(fl.FedloomError):
            read()


@pytest.mark.parametrize("where", ["nowhere", "a file", "a long name"])
def test_folders_of_the_environment_that_are_none(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    place = {"nowhere": str(tmp_path / "no"), "a file": str(tmp_path / "file"), "a long name": "x" * 5000}[where]
    monkeypatch.setenv("FEDLOOM_DATA", place)
    monkeypatch.setenv("FEDLOOM_CACHE", place)
    rules.rule.cache_clear()
    assert rules.rule() == rules.Rule()
    assert len(fl.load("digits", clients=5)) == 5
    with pytest.raises(DataError, match="not on this machine"):
        Files.of().find("mnist", ("mnist.npz",), (), "Get it.")


def test_nobodys_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FEDLOOM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(DataError, match="name a folder with FEDLOOM_CACHE"):
        cache_folder()


# What Fedloom keeps for itself


@pytest.mark.parametrize(
    "damage",
    [
        "deep",
        "no mapping",
        "other names",
        "outside",
        "missing",
        "lies",
        "objects",
        "lengths",
        "owners",
        "link",
        "types",
    ],
)
def test_a_damaged_cache_is_parsed_again(damage: str, tmp_path: Path) -> None:
    made = Corpus(np.zeros((4, 2)), np.arange(4), classes=4, owner=np.array([0, 0, 1, 1]), owners=np.array(["a", "b"]))
    source = writers.put(tmp_path / "source", b"x")
    calls: list[int] = []

    def parse() -> Corpus:
        calls.append(1)
        return made

    for _ in range(2):
        cached(tmp_path / "cache", "set", [source], parse)
    assert len(calls) == 1
    (entry,) = (tmp_path / "cache").iterdir()
    facts = json.loads((entry / FACTS).read_text())
    owned = tmp_path / "owned"
    if damage == "deep":
        (entry / FACTS).write_text("[" * 100_000)
    elif damage == "no mapping":
        (entry / FACTS).write_text("5")
    elif damage == "other names":
        (entry / FACTS).write_text(json.dumps({**facts, "arrays": {"x": 1}}))
    elif damage == "outside":
        np.save(tmp_path / "outside.npy", made.train_x)
        (entry / FACTS).write_text(json.dumps({**facts, "arrays": ["../../outside"]}))
    elif damage == "missing":
        (entry / "train_x.npy").unlink()
    elif damage == "lies":
        (entry / "train_x.npy").write_bytes(array((10**15, 2)))
    elif damage == "objects":
        np.save(entry / "train_x.npy", np.array([Evil(owned)], dtype=object))
    elif damage == "lengths":
        np.save(entry / "train_y.npy", np.arange(3))
    elif damage == "owners":
        np.save(entry / "owner.npy", np.array([0, 0, 1, 99]))
    elif damage == "types":
        (entry / FACTS).write_text(json.dumps({**facts, "facts": [1]}))
    else:
        np.save(tmp_path / "outside.npy", made.train_x)
        (entry / "train_x.npy").unlink()
        (entry / "train_x.npy").symlink_to(tmp_path / "outside.npy")
    assert cached(tmp_path / "cache", "set", [source], parse) is made
    assert len(calls) == 2
    assert not owned.exists()


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"5", b'{"machine": 1}', b"\xff", b'{"sample": "x"}'])
def test_damaged_measurements_are_passed_over(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    writers.put(tmp_path / rules.FILE, content)
    rules.rule.cache_clear()
    assert rules.rule() == rules.Rule()
    assert cost._read(writers.put(tmp_path / "speed", content)) is None
    good = {"sample": 1.0, "tested": 1.0, "train": 1, "test": 1, "clients": 1}
    assert cost._read(writers.json_file(tmp_path / "speed", good)) == cost.Speed(1.0, 1.0, 1, 1, 1)
    for wrong in ("1", -1, True, None, float("inf"), [1]):
        assert cost._read(writers.json_file(tmp_path / "speed", {**good, "sample": wrong})) is None


@pytest.mark.parametrize("found", ["../../x", "a" * 31, "", "\xff", "A" * 32, "0" * 32 + "\n0"])
def test_a_trackers_run_is_continued_by_a_plain_name_only(found: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(tmp_path, resume=True)
    writers.put(tmp_path / "run_id", b"0" * 32)
    assert tracker._run_id(tmp_path) == ("0" * 32, True)
    writers.put(tmp_path / "run_id", found.encode("latin-1"))
    assert tracker._run_id(tmp_path)[1] is False


# Weights and words

SHAPE = Shape((4,), 2, tokens=3, words=("", "a", "b"))


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"a " + b"1 " * 200_000, b"a nan 1\n", b"", b"a 1e999 1\n", b"a 1\n", b"x" * (1 << 19)]
)
def test_word_vectors_that_are_none(content: bytes, tmp_path: Path) -> None:
    good = b"a 1 2\nb 3 4\n"
    path = writers.put(tmp_path / "v.txt", good)
    assert vectors_of(str(path), SHAPE).shape == (3, 2)
    writers.put(path, content)
    with pytest.raises(ModelError):
        vectors_of(str(path), SHAPE)
    whole = zipped(tmp_path / "v.zip", {"v.txt": good * 50}).read_bytes()
    for place in range(30, len(whole), 7):
        writers.put(tmp_path / "v.zip", whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with suppress(ModelError):
            vectors_of(str(tmp_path / "v.zip"), SHAPE)


@pytest.mark.usefixtures("small")
def test_word_vectors_in_a_bomb(tmp_path: Path) -> None:
    path = zipped(tmp_path / "v.zip", {"v.txt": b"a 1 2\n" + b"z 0 0\n" * 400_000})
    with pytest.raises(ModelError, match="unpacks to more than"):
        vectors_of(str(path), SHAPE)


@pytest.mark.usefixtures("small")
def test_weights_that_are_none(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "a.pt")
    assert read_weights(tmp_path / "a.pt")["weight"].shape == (3,)
    torch.save([torch.zeros(3)], tmp_path / "b.pt")
    zipped(tmp_path / "c.pt", {"archive/data.pkl": bytes(2 << 20)})
    for name, content in (("d.safetensors", (1 << 62).to_bytes(8, "little")), ("e.pt", b"PK\x03\x04"), ("f.pt", b"")):
        writers.put(tmp_path / name, content)
    for name in ("b.pt", "c.pt", "d.safetensors", "e.pt", "f.pt"):
        with pytest.raises(ModelError, match=name):
            read_weights(tmp_path / name)
