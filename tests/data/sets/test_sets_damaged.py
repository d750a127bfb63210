"""Files that are cut off or of another format: one sentence that names the file."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedloom.errors import DataError
from tests.data.sets import writers
from tests.data.sets.writers import (
    MNIST,
    cifar_records,
    cut_off,
    hdf5,
    idx,
    images,
    leaf_files,
    mnist_files,
    nist_archive,
    packed,
    plain_npz,
    put,
    read,
    read_published,
    tar,
)


def _damaged_mnist(folder: Path) -> tuple[str, dict[str, Path], Path]:
    files, _ = mnist_files(folder)
    return "mnist", files, cut_off(files[MNIST[0]])


def _short_mnist(folder: Path) -> tuple[str, dict[str, Path], Path]:
    files, _ = mnist_files(folder)
    return "mnist", files, put(files[MNIST[0]], packed(idx(images(6, 28, 28))[:-9]))


def _no_idx(folder: Path) -> tuple[str, dict[str, Path], Path]:
    files, _ = mnist_files(folder)
    return "mnist", files, put(files[MNIST[1]], packed(b"\x00\x00\x0d\x01 other numbers"))


def _damaged_zip(folder: Path) -> tuple[str, dict[str, Path], Path]:
    path = cut_off(nist_archive(folder / "gzip.zip", "letters", 1)[0])
    return "emnist-letters", {"gzip.zip": path}, path


def _damaged_tar(folder: Path) -> tuple[str, dict[str, Path], Path]:
    content, _ = cifar_records(40, [np.zeros(40), np.zeros(40)])
    path = cut_off(tar(folder / "c.tar.gz", {"train.bin": content, "test.bin": content}))
    return "cifar100", {"cifar-100-binary.tar.gz": path}, path


def _no_tar(folder: Path) -> tuple[str, dict[str, Path], Path]:
    path = put(folder / "c.tar.gz", b"<html>not found</html>")
    return "cifar10", {"cifar-10-binary.tar.gz": path}, path


def _damaged_json(folder: Path) -> tuple[str, dict[str, Path], Path]:
    files, _ = leaf_files(folder)
    return "femnist", files, cut_off(folder / "test" / "a_0.json")


def _no_leaf(folder: Path) -> tuple[str, dict[str, Path], Path]:
    files, _ = leaf_files(folder)
    return "femnist", files, writers.json_file(folder / "test" / "a_0.json", [1, 2])


def _empty_folder(folder: Path) -> tuple[str, dict[str, Path], Path]:
    files, _ = leaf_files(folder)
    (folder / "test" / "a_0.json").unlink()
    return "femnist", files, folder / "test"


def _damaged_hdf5(folder: Path) -> tuple[str, dict[str, Path], Path]:
    pixels = (images(50, 28, 28) / 255).astype(np.float32)
    path = hdf5(folder / "a.h5", {f"w{n}": {"pixels": pixels, "label": np.zeros(50, int)} for n in range(5)})
    files = {"fed_emnist_train.h5": path, "fed_emnist_test.h5": path}
    return "femnist", files, cut_off(path)


def _other_hdf5(folder: Path) -> tuple[str, dict[str, Path], Path]:
    path = hdf5(folder / "a.h5", {"w": {"other": np.zeros(3)}})
    return "femnist", {"fed_emnist_train.h5": path, "fed_emnist_test.h5": path}, path


Damage = Callable[[Path], tuple[str, dict[str, Path], Path]]
DAMAGES: list[Damage] = [
    _damaged_mnist,
    _short_mnist,
    _no_idx,
    _damaged_zip,
    _damaged_tar,
    _no_tar,
    _damaged_json,
    _no_leaf,
    _empty_folder,
    _damaged_hdf5,
    _other_hdf5,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_gives_one_sentence_that_names_it(damage: Damage, tmp_path: Path) -> None:
    if "hdf5" in damage.__name__:
        pytest.importorskip("h5py")
    name, files, path = damage(tmp_path)
    with pytest.raises(DataError) as caught:
        read_published(name, files)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_npz(tmp_path: Path) -> None:
    path = cut_off(plain_npz(tmp_path / "mnist.npz", (28, 28), 10))
    with pytest.raises(DataError, match="damaged or of another format") as caught:
        read("mnist", path)
    assert str(path) in str(caught.value)


def test_an_npz_with_objects_is_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    np.savez(path, train_x=np.array([{"a": 1}], dtype=object), train_y=[0], test_x=[0], test_y=[0])
    with pytest.raises(DataError, match="pickle"):
        read("mnist", path)


def test_hdf5_without_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    files = {name: tmp_path / name for name in ("fed_emnist_train.h5", "fed_emnist_test.h5")}
    with pytest.raises(DataError, match=r"fedloom\[tff\]"):
        read_published("femnist", files)


def test_an_npz_without_an_array(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, train_x=images(2, 28, 28))
    with pytest.raises(DataError, match="has no array 'train_y'; it needs train_x, train_y, test_x, test_y"):
        read("mnist", put(tmp_path / "mnist.npz", buffer.getvalue()))
