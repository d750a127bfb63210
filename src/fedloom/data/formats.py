"""File formats that several data sets share. Each parser checks what it reads; none of them ever unpickles."""

import json
import math
import re
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from fedloom.data.corpus import Corpus
from fedloom.data.files import Source, open_text, read_npz, reading, unpack
from fedloom.errors import DataError
from fedloom.untrusted import most_unpacked, open_plain, too_much

SPLITS = ("train", "test")
ARRAYS = ("train_x", "train_y", "test_x", "test_y")
Pair = tuple[np.ndarray, np.ndarray]  # samples and targets
Texts = tuple[list[str], np.ndarray]  # texts and labels

LONGEST = 32  # characters of a word; what follows is cut off
_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")
_IDX_BYTES = b"\x00\x00\x08"  # an array of unsigned bytes; the number of axes follows
_CIFAR = (3, 32, 32)


def checked_labels(path: Path, what: str, y: np.ndarray, classes: int) -> np.ndarray:
    """Labels as int64, once each is known to be a class."""
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"{path}: {what} is {y.dtype} {list(y.shape)}, but one whole number a sample was expected")
    outside = (y < 0) | (y >= classes)
    if outside.any():
        raise DataError(f"{path}: {what} holds the label {y[outside][0]}, but 0 to {classes - 1} were expected")
    return y.astype(np.int64)


def checked_images(path: Path, what: str, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if x.dtype != np.uint8 or x.shape[1:] != shape or not x.ndim or not len(x):
        wanted = " x ".join(map(str, shape))
        raise DataError(f"{path}: {what} is {x.dtype} {list(x.shape)}, but uint8 images of {wanted} were expected")
    return x


def checked_pair(path: Path, what: str, pair: Pair, shape: tuple[int, ...], classes: int) -> Pair:
    """Images and their labels, as many of the one as of the other."""
    x, y = checked_images(path, f"{what}_x", pair[0], shape), checked_labels(path, f"{what}_y", pair[1], classes)
    if len(x) != len(y):
        raise DataError(f"{path}: {len(x)} images but {len(y)} labels for {what}")
    return x, y


def positive(**values: int | None) -> None:
    """Refuse a parameter that is below 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise DataError(f"{name} must be at least 1, not {value}")


def size_notes(train: int, test: int, published: tuple[int, int]) -> tuple[str, ...]:
    """What to say of a copy that is not as large as the published one."""
    if (train, test) == published:
        return ()
    return (f"{train:,} training and {test:,} test samples, of {published[0]:,} and {published[1]:,} published",)


def plain_images(path: Path, shape: tuple[int, ...], classes: int) -> tuple[Pair, Pair]:
    """Training and test images of an .npz file in the plain layout."""
    found = read_npz(path, ARRAYS)
    train, test = (
        checked_pair(path, split, (found[f"{split}_x"], found[f"{split}_y"]), shape, classes) for split in SPLITS
    )
    return train, test


def read_idx(file: IO[bytes], path: Path) -> np.ndarray:
    """An array in the format of MNIST's files: magic, number of axes, big-endian sizes, bytes."""
    with reading(path):
        magic = file.read(4)
        if magic[:3] != _IDX_BYTES or len(magic) < 4:
            raise DataError(f"{path} is no idx file of bytes: it begins with {magic.hex() or 'nothing'}")
        shape = tuple(np.frombuffer(file.read(4 * magic[3]), dtype=">u4").tolist())
        content = np.frombuffer(file.read(min(math.prod(shape), most_unpacked(path)) + 1), dtype=np.uint8)
        if len(content) != math.prod(shape):
            raise DataError(f"{path} is cut off or too long: {len(content)} bytes of an array {list(shape)}")
        return content.reshape(shape).copy()  # to be written to


def idx_pair(images: Path, labels: Path) -> Pair:
    """Images and labels out of two idx files packed by gzip."""

    def unpacked(path: Path) -> np.ndarray:
        with reading(path), unpack(path) as file:
            return read_idx(file, path)

    return unpacked(images), unpacked(labels)


def mnist_files(source: Source, folder: str, classes: int = 10) -> tuple[Pair, Pair]:
    """MNIST's four files, or those of a data set that took over their names, in a folder."""

    def pair(split: str, prefix: str) -> Pair:
        paths = [source.published[f"{folder}{prefix}-{kind}-ubyte.gz"] for kind in ("images-idx3", "labels-idx1")]
        return checked_pair(paths[0], split, idx_pair(*paths), (28, 28), classes)

    return pair("train", "train"), pair("test", "t10k")


def cifar_images(path: Path, train: Sequence[str], test: str, label_bytes: int, classes: int) -> tuple[Pair, Pair]:
    """CIFAR's binary records: labels of one byte each, of which the last counts, then 3 x 32 x 32 pixels."""
    wanted = {*train, test}
    files = tar_files(path, lambda member: PurePosixPath(member).name in wanted)
    found = {PurePosixPath(name).name: data for name, data in files}

    def pair(split: str, names: Sequence[str]) -> Pair:
        missing = [name for name in names if name not in found]
        if missing:
            raise DataError(f"{path} has no {missing[0]}")
        content = np.frombuffer(b"".join(found[name] for name in names), dtype=np.uint8)
        width = label_bytes + math.prod(_CIFAR)
        if not len(content) or len(content) % width:
            raise DataError(f"{path}: {', '.join(names)} hold no whole records of {width} bytes")
        records = content.reshape(-1, width)
        x = np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, *_CIFAR)
        return checked_pair(path, split, (x, records[:, label_bytes - 1]), _CIFAR, classes)

    return pair("train", train), pair("test", [test])


def tar_files(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Name and content of the wanted files of a tar archive, in its order; nothing is unpacked to disk."""
    with reading(path), _open_tar(path) as archive:
        for member in _plain_members(archive, path):
            file = archive.extractfile(member) if wanted(member.name) else None
            if file is not None:
                yield member.name, file.read()


@contextmanager
def _open_tar(path: Path) -> Iterator[tarfile.TarFile]:
    """Read from its beginning to its end, which bounds what is unpacked."""
    with unpack(path) as file, tarfile.open(fileobj=file, mode="r|", bufsize=1 << 20) as archive:
        yield archive


def _plain_members(archive: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    """Its files, without links and devices; one with holes may say that it is larger than anything that was packed."""
    for member in archive:
        if member.isfile():
            if not 0 <= member.size <= most_unpacked(path):
                raise too_much(path)
            yield member


@contextmanager
def unpacked_from(path: Path, names: Sequence[str]) -> Iterator[list[Path]]:
    """The named files of a tar archive, laid out in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        with reading(path), _open_tar(path) as archive:
            for member in _plain_members(archive, path):
                name = PurePosixPath(member.name).name
                file = archive.extractfile(member) if name in names else None
                if file is not None:
                    with (Path(folder) / name).open("wb") as target:
                        shutil.copyfileobj(file, target)
        missing = [name for name in names if not (Path(folder) / name).exists()]
        if missing:
            raise DataError(f"{path} has no {missing[0]}")
        yield [Path(folder) / name for name in names]


def leaf_users(folder: Path) -> Iterator[tuple[Path, str, Any, Any]]:
    """File, user, samples and targets out of LEAF's JSON files (users, user_data: {user: {x, y}})."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder} has no .json files, which LEAF's scripts write there")
    for path in files:
        with reading(path), open_plain(path) as file:
            content = json.load(file)
        if not isinstance(content, dict) or not isinstance(content.get("user_data"), dict):
            raise DataError(f"{path} is no file of LEAF: it has no user_data")
        for user, data in content["user_data"].items():
            if not isinstance(data, dict) or not all(isinstance(data.get(key), list) for key in "xy"):
                raise DataError(f"{path}: the user {user!r} has no lists x and y")
            if len(data["x"]) != len(data["y"]):
                raise DataError(f"{path}: the user {user!r} has {len(data['x'])} samples but {len(data['y'])} targets")
            yield path, user, data["x"], data["y"]


def hdf5_users(path: Path, names: Sequence[str], most: int | None = None) -> Iterator[tuple[str, list[np.ndarray]]]:
    """User and named arrays out of TensorFlow Federated's HDF5 files (examples/USER/NAME)."""
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path}: reading HDF5 needs h5py; install it with pip install 'fedloom[tff]'") from None
    with reading(path):
        try:
            with open_plain(path), h5py.File(path, "r") as file:
                users = _own_group(file, "examples", path)
                for user in islice(users, most):
                    found = _own_group(users, user, path)
                    yield user, [_own_array(found, name, path) for name in names]
        except TypeError as error:  # how the HDF5 library reports some kinds of damage
            raise DataError(f"{path} is damaged or of another format: {error}") from None


def _own_group(above: Any, name: str, path: Path) -> Any:
    import h5py

    if not isinstance(above.get(name, getlink=True), h5py.HardLink) or above.get(name, getclass=True) is not h5py.Group:
        raise DataError(f"{path}: {name!r} is no group of this file")
    return above[name]


def _own_array(above: Any, name: str, path: Path) -> np.ndarray:
    """An array that lies in the file itself: HDF5 could let it lie in any other, or leave it out and say how large."""
    import h5py

    if name not in above:
        raise DataError(f"{path} has no {name!r} in {above.name!r}")
    if (
        not isinstance(above.get(name, getlink=True), h5py.HardLink)
        or above.get(name, getclass=True) is not h5py.Dataset
    ):
        raise DataError(f"{path}: {name!r} is no array of this file")
    found = above[name]
    if found.is_virtual or found.external:
        raise DataError(f"{path}: {name!r} lies in another file")
    if found.nbytes > most_unpacked(path):
        raise too_much(path)
    return np.asarray(found[()])


class Owners:
    """Numbers natural clients in the order in which they turn up."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, name: str) -> int:
        return self._places.setdefault(name, len(self._places))

    def names(self) -> np.ndarray:
        return np.array(list(self._places), dtype=np.str_)


def csv_texts(path: Path, classes: int) -> tuple[Texts, Texts]:
    """Training and test texts of a .csv.gz file in the plain layout: columns split, label and text."""
    import pandas as pd

    with reading(path):
        with open_text(path) as file:
            table = pd.read_csv(file, dtype=str, keep_default_na=False)
        missing = [name for name in ("split", "label", "text") if name not in table.columns]
        if missing:
            raise DataError(f"{path} has no column {missing[0]!r}; it needs split, label and text")
        strange = table["split"][~table["split"].isin(SPLITS)]
        if len(strange):
            raise DataError(f"{path}: the split {strange.iloc[0]!r} is neither train nor test")
        labels = table["label"].to_numpy().astype(np.int64)
    parts = [table["split"] == split for split in SPLITS]
    train, test = (
        (table["text"][part].tolist(), checked_labels(path, "label", labels[part.to_numpy()], classes))
        for part in parts
    )
    for split, (texts, _) in zip(SPLITS, (train, test), strict=True):
        if not texts:
            raise DataError(f"{path} has no row of the split {split}")
    return train, test


def text_corpus(
    train: Texts, test: Texts, names: tuple[str, ...], length: int, vocabulary: int, tokenizer: str | None
) -> Corpus:
    """Texts as token ids [n, length], padded with 0 on the right: words of our own, or a tokenizer's pieces."""
    positive(length=length, vocabulary=vocabulary)
    known, most = {"": 0}, vocabulary
    if tokenizer is None:
        train_x, test_x = (word_ids(texts, length, known) for texts, _ in (train, test))
    else:
        split, most = load_tokenizer(tokenizer)
        train_x, test_x = (split(texts, length) for texts, _ in (train, test))
    words = np.array(list(known), dtype=np.str_) if tokenizer is None else None
    return Corpus(
        train_x, train[1], test_x, test[1], classes=len(names), class_names=names, words=words, vocabulary=most
    )


def word_ids(texts: Sequence[str], length: int, known: dict[str, int]) -> np.ndarray:
    """Lower case; a word or a punctuation mark is a token. New ones are added to `known`."""
    rows = np.zeros((len(texts), length), dtype=np.int32)
    for row, text in zip(rows, texts, strict=True):
        found = islice(_WORD.finditer(text.lower()), length)
        ids = [known.setdefault(word.group()[:LONGEST], len(known)) for word in found]
        row[: len(ids)] = ids
    return rows


def load_tokenizer(name: str) -> tuple[Callable[[list[str], int], np.ndarray], int]:
    """A Hugging Face tokenizer from a folder or the hub, as a function to ids [n, length], and how many ids it has."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DataError(f"tokenizer={name!r} needs transformers; install it: pip install 'fedloom[text]'") from None
    try:
        local = Path(name).is_dir() or not _hub_answers()
        # Whose tokenizer, and which state of it, is the user's choice; no code of it is run.
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False)  # nosec B615
    except Exception as error:  # a tokenizer's files may be wrong in many ways
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"tokenizer={name!r} is no folder with a tokenizer and not to be had: {reason}") from None
    if tokenizer.pad_token_id != 0:
        raise DataError(f"tokenizer={name!r} pads with the id {tokenizer.pad_token_id}, but padding must be 0 here")

    def split(texts: list[str], length: int) -> np.ndarray:
        ids = tokenizer(texts, truncation=True, max_length=length, padding="max_length")["input_ids"]
        return np.array(ids, dtype=np.int32).reshape(len(texts), length)

    return split, len(tokenizer)


def _hub_answers() -> bool:
    """Asked once, because the hub's client tries for most of a minute."""
    from huggingface_hub import constants

    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=10).close()  # nosec B310  # asked only whether it answers
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
