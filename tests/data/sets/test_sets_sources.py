"""Where files come from, that none is read unchecked, and that parsing is done once."""

import gzip
import hashlib
import http.server
import os
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedloom.data import cache
from fedloom.data.cache import cached
from fedloom.data.catalogue import FACTS, REGISTRY, load_sets, read_corpus
from fedloom.data.corpus import Corpus
from fedloom.data.files import Files, Remote, Source
from fedloom.errors import DataError
from tests.data.sets.writers import json_lines, leaf, plain_npz, put

load_sets()
SETS = [
    "mnist",
    "fashion-mnist",
    "emnist-letters",
    "emnist-byclass",
    "femnist",
    "cifar10",
    "cifar100",
    "covertype",
    "shakespeare",
    "20newsgroups",
    "agnews",
    "stackoverflow",
    "speech-commands",
    "eicu",
]


def md5(content: bytes) -> str:
    return f"md5:{hashlib.md5(content).hexdigest()}"


@pytest.fixture
def files(tmp_path: Path) -> Files:
    (tmp_path / "data").mkdir()
    return Files(tmp_path / "data", tmp_path / "cache")


@pytest.fixture
def no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("pooch.retrieve", refuse)


def test_every_set_is_in_the_catalogue() -> None:
    names = {entry.name for entry in REGISTRY.entries()}
    assert {*SETS, "digits", "synthetic"} <= names
    for entry in REGISTRY.entries():
        facts = FACTS[entry.name]
        assert entry.about
        assert facts.licence
        assert facts.embedded or facts.how.endswith(".")
        for remote in (remote for group in facts.published for remote in group):
            assert bool(remote.url) == bool(remote.checksum)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.usefixtures("no_downloads")
def test_without_file_and_network_the_error_says_how_to_get_it(name: str, files: Files) -> None:
    with pytest.raises(DataError) as caught:
        read_corpus(name, files)
    message = str(caught.value)
    assert f"the data set {name} " in message
    assert str(files.folder) in message
    assert str(files.cache) in message
    assert FACTS[name].how in message
    assert "\n" not in message


@pytest.mark.usefixtures("no_downloads")
def test_without_a_folder_the_error_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data-dir or FEDLOOM_DATA"):
        Files(None, tmp_path).find("mnist", ("mnist.npz",), (), "Get it.")


def test_a_file_that_differs_from_its_publishers_is_refused(files: Files) -> None:
    assert files.folder is not None
    path = put(files.folder / "covtype.data.gz", gzip.compress(b"1,2,3\n"))
    with pytest.raises(DataError, match=r"covtype\.data\.gz is damaged or altered: its sha256 is .* but 614360d0"):
        read_corpus("covertype", files)
    assert path.exists()


def test_a_file_in_a_subfolder_is_checked_too(files: Files) -> None:
    assert files.folder is not None
    for name in ("train", "t10k"):
        put(files.folder / "fashion-mnist" / f"{name}-images-idx3-ubyte.gz", b"")
        put(files.folder / "fashion-mnist" / f"{name}-labels-idx1-ubyte.gz", b"")
    with pytest.raises(DataError, match="8d4fb7e6c68d591d4c3dfef9ec88bf0d was expected"):
        read_corpus("fashion-mnist", files)
    for split in ("train", "test"):
        put(files.folder / "agnews" / f"{split}.csv", b'"1","a","b"\n')
    with pytest.raises(DataError, match="b1a00f826fdfbd249f79597b59e1dc12 was expected"):
        read_corpus("agnews", files)


def test_mnist_does_not_take_files_of_fashion_mnist(files: Files) -> None:
    assert files.folder is not None
    names = [remote.name for remote in FACTS["fashion-mnist"].published[0]]
    for name in names:
        put(files.folder / name, b"")
    assert files.present("fashion-mnist", (), FACTS["fashion-mnist"].published) is not None
    assert files.present("mnist", (), FACTS["mnist"].published) is None
    for name in names:
        shutil.move(files.folder / name, files.folder / Path(name).name)
    assert files.present("fashion-mnist", (), FACTS["fashion-mnist"].published) is None


def test_a_list_of_sums_beside_a_plain_file_is_obeyed(files: Files) -> None:
    assert files.folder is not None
    path = plain_npz(files.folder / "mnist.npz", (28, 28), 10)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    put(files.folder / "SHA256SUMS", f"{digest}  mnist.npz\n".encode())
    assert len(read_corpus("mnist", files).train_y) == 8
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"mnist\.npz is damaged or altered"):
        read_corpus("mnist", files)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A publisher on this computer: its address and its folder."""
    folder = tmp_path / "publisher"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/", folder
        httpd.shutdown()
        thread.join()


def test_a_download_is_checked_and_kept_in_its_folder(server: tuple[str, Path], files: Files) -> None:
    address, folder = server
    put(folder / "a.gz", b"content")
    remote = Remote("sub/a.gz", f"{address}a.gz", md5(b"content"))
    source = files.find("some", (), [[remote]], "Get it.")
    assert source.published == {"sub/a.gz": files.cache / "downloads" / "sub" / "a.gz"}
    (folder / "a.gz").unlink()
    assert files.find("some", (), [[remote]], "Get it.").paths[0].read_bytes() == b"content"  # not fetched again


def test_an_altered_download_is_refused(server: tuple[str, Path], files: Files) -> None:
    address, folder = server
    put(folder / "a.gz", b"conten")
    with pytest.raises(DataError, match=r"the data set some .*Get it\. \(the download failed: ") as caught:
        files.find("some", (), [[Remote("a.gz", f"{address}a.gz", md5(b"content"))]], "Get it.")
    assert "\n" not in str(caught.value)
    assert not (files.cache / "downloads" / "a.gz").exists()


def test_a_file_without_a_checksum_is_never_downloaded(server: tuple[str, Path], files: Files) -> None:
    address, folder = server
    put(folder / "a.gz", b"content")
    with pytest.raises(DataError, match="looked in"):
        files.find("some", (), [[Remote("a.gz", f"{address}a.gz")]], "Get it.")


@pytest.fixture
def parses(files: Files, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small mnist.npz in the folder, and a list that grows with each time it is parsed."""
    assert files.folder is not None
    plain_npz(files.folder / "mnist.npz", (28, 28), 10)
    done: list[str] = []
    make = REGISTRY.make

    def counted(call: object, source: Source) -> Corpus:
        done.append(source.name)
        return make(call, source=source)  # type: ignore[arg-type]

    monkeypatch.setattr(REGISTRY, "make", counted)
    return done


def same(one: Corpus, other: Corpus) -> bool:
    arrays, others = one.arrays(), other.arrays()
    return one.facts() == other.facts() and all(
        np.array_equal(arrays[name], others[name]) and arrays[name].dtype == others[name].dtype for name in arrays
    )


def entries(files: Files) -> list[Path]:
    return sorted((files.cache / "parsed").iterdir())


def test_the_second_time_a_set_comes_from_the_cache(files: Files, parses: list[str]) -> None:
    first, second = read_corpus("mnist", files), read_corpus("mnist", files)
    assert parses == ["mnist"]
    assert same(first, second)
    assert second.train_x.flags.writeable


def test_other_parameters_are_another_entry(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.folder is not None
    rows = [{"play": "P", "role": "R", "text": "to be or not to be"}]
    json_lines(files.folder / "shakespeare.jsonl.gz", rows)
    short, long = (read_corpus(f"shakespeare(length={length})", files) for length in (3, 5))
    assert short.train_x.shape[1] == 3
    assert long.train_x.shape[1] == 5
    assert same(short, read_corpus("shakespeare(length=3)", files))
    assert len(entries(files)) == 2
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    read_corpus("shakespeare(length=3)", files)
    assert len(entries(files)) == 3


@pytest.mark.parametrize("damage", ["cut off", "emptied", "removed", "facts", "other facts"])
def test_a_damaged_entry_is_parsed_again(damage: str, files: Files, parses: list[str]) -> None:
    first = read_corpus("mnist", files)
    array, facts = entries(files)[0] / "train_x.npy", entries(files)[0] / "facts.json"
    if damage == "removed":
        array.unlink()
    elif damage == "facts":
        facts.write_text(facts.read_text()[:20])
    elif damage == "other facts":
        facts.write_text('{"arrays": ["train_x"], "colour": 3}')
    else:
        array.write_bytes(array.read_bytes()[: 900 if damage == "cut off" else 0])
    assert same(first, read_corpus("mnist", files))
    assert len(parses) == 2
    assert same(first, read_corpus("mnist", files))
    assert len(parses) == 2  # the entry is whole again


def test_a_cache_that_cannot_be_written_warns(files: Files, parses: list[str]) -> None:
    put(files.cache / "parsed", b"a file where a folder should be")
    with pytest.warns(UserWarning, match="mnist could not be kept in the cache"):
        corpus = read_corpus("mnist", files)
    assert len(corpus.train_y) == 8
    assert parses == ["mnist"]


def test_a_file_that_was_touched_is_parsed_again(files: Files, parses: list[str]) -> None:
    assert files.folder is not None
    read_corpus("mnist", files)
    os.utime(files.folder / "mnist.npz", ns=(1, 1))
    read_corpus("mnist", files)
    assert len(parses) == 2


def test_a_file_that_was_changed_deep_in_a_folder_is_parsed_again(files: Files) -> None:
    assert files.folder is not None
    train, test = (files.folder / "femnist" / split / "all.json" for split in ("train", "test"))
    leaf(train, {"u": ([[0.5] * 784], [1])})
    leaf(test, {"u": ([[0.5] * 784], [2])})
    assert read_corpus("femnist", files).train_y.tolist() == [1]
    stamp = train.parent.stat()
    leaf(train, {"u": ([[0.5] * 784], [7])})
    os.utime(train.parent, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert read_corpus("femnist", files).train_y.tolist() == [7]


def test_a_large_set_comes_from_the_cache_in_less_than_a_second(tmp_path: Path) -> None:
    source = put(tmp_path / "a", b"")
    large = Corpus(np.ones((130_000, 1, 28, 28), np.uint8), np.zeros(130_000, np.int64))  # 102 MB
    cached(tmp_path, "large", [source], lambda: large)

    def parse() -> Corpus:
        raise AssertionError("it should lie in the cache")

    durations = []
    for _ in range(3):
        start = time.perf_counter()
        assert len(cached(tmp_path, "large", [source], parse).train_y) == 130_000
        durations.append(time.perf_counter() - start)
    assert min(durations) < 1
    shutil.rmtree(tmp_path)
