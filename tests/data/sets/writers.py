"""Small files in the publishers' own formats, written from their descriptions."""

import gzip
import io
import json
import struct
import tarfile
import wave
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.catalogue import REGISTRY, find_dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Source

MNIST = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz")
MNIST_FILES = (*MNIST, "t10k-labels-idx1-ubyte.gz")
RANDOM = np.random.default_rng(7)


def read(text: str, plain: Path | None = None, clients: int | None = None, seed: int = 0) -> Corpus:
    """What the maker of a data set reads out of a plain file, or makes up."""
    call = find_dataset(text)
    return REGISTRY.make(call, source=Source(call.name, plain, clients=clients, seed=seed))


def read_published(text: str, published: Mapping[str, Path]) -> Corpus:
    """What the maker of a data set reads out of the publisher's files."""
    call = find_dataset(text)
    return REGISTRY.make(call, source=Source(call.name, published=published))


def images(n: int, *shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, (n, *shape), dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def packed(content: bytes) -> bytes:
    return gzip.compress(content)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def tar(path: Path, files: Mapping[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def hdf5(path: Path, users: Mapping[str, Mapping[str, Any]]) -> Path:
    import h5py

    with h5py.File(path, "w") as file:
        for user, arrays in users.items():
            for name, array in arrays.items():
                file.create_dataset(f"examples/{user}/{name}", data=array)
    return path


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()


def json_file(path: Path, content: Any) -> Path:
    return put(path, json.dumps(content).encode())


def json_lines(path: Path, rows: list[Any]) -> Path:
    return put(path, packed("".join(json.dumps(row) + "\n" for row in rows).encode()))


def leaf(path: Path, users: Mapping[str, tuple[list[Any], list[Any]]]) -> Path:
    """LEAF's layout: users, num_samples and user_data in one JSON file."""
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    counts = [len(y) for _, y in users.values()]
    return json_file(path, {"users": list(users), "num_samples": counts, "user_data": data})


def npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def plain_npz(path: Path, shape: tuple[int, ...], classes: int, **other: np.ndarray) -> Path:
    """train_x, train_y, test_x, test_y, unless others are given."""
    arrays: dict[str, np.ndarray] = {
        "train_x": images(8, *shape),
        "train_y": np.arange(8, dtype=np.uint8) % classes,
        "test_x": images(4, *shape),
        "test_y": np.arange(4, dtype=np.uint8) % classes,
    }
    return npz(path, **{**arrays, **other})


def cut_off(path: Path, share: float = 0.6) -> Path:
    """The same file without its end."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


def mnist_files(folder: Path, prefix: str = "") -> tuple[dict[str, Path], list[np.ndarray]]:
    arrays = [images(6, 28, 28), np.arange(6), images(3, 28, 28), np.arange(3)]
    contents = [packed(idx(array)) for array in arrays]
    return {prefix + n: put(folder / prefix / n, c) for n, c in zip(MNIST_FILES, contents, strict=True)}, arrays


def nist_archive(path: Path, split: str, first: int) -> tuple[Path, list[np.ndarray]]:
    """NIST's zip: idx files packed by gzip in a folder gzip/, every image transposed."""
    arrays = [images(30, 28, 28), np.arange(30) % 26 + first, images(26, 28, 28), np.arange(26) + first]
    kinds = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
    with zipfile.ZipFile(path, "w") as archive:
        for kind, array in zip(kinds, arrays, strict=True):
            stored = array.transpose(0, 2, 1) if array.ndim == 3 else array
            archive.writestr(f"gzip/emnist-{split}-{kind}-ubyte.gz", packed(idx(stored)))
    return path, arrays


def cifar_records(n: int, labels: list[np.ndarray]) -> tuple[bytes, np.ndarray]:
    x = images(n, 3, 32, 32)
    columns = [label[:, None].astype(np.uint8) for label in labels]
    return np.concatenate([*columns, x.reshape(n, -1)], axis=1).tobytes(), x


def leaf_files(folder: Path) -> tuple[dict[str, Path], np.ndarray]:
    """Two JSON files for training, one for the test, with a writer who is in it alone."""
    grey = images(8, 784)
    rows = (grey / 255).tolist()
    leaf(folder / "train" / "a_0.json", {"f0_1": (rows[:3], [0, 61, 10])})
    leaf(folder / "train" / "a_1.json", {"f0_2": (rows[3:5], [5, 6])})
    leaf(folder / "test" / "a_0.json", {"f0_2": (rows[5:6], [36]), "f0_9": (rows[6:], [1, 2])})
    return {"femnist/train": folder / "train", "femnist/test": folder / "test"}, grey
