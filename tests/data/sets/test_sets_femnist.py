"""FEMNIST as LEAF, as TensorFlow Federated and in the plain layout."""

from pathlib import Path

import numpy as np
import pytest

from fedloom.errors import DataError
from tests.data.sets.writers import hdf5, images, leaf, leaf_files, plain_npz, read, read_published, tar


def test_femnist_as_leaf_writes_it(tmp_path: Path) -> None:
    files, grey = leaf_files(tmp_path)
    corpus = read_published("femnist", files)
    assert np.array_equal(corpus.train_x, grey[:5].reshape(5, 1, 28, 28))
    assert corpus.train_y.tolist() == [0, 61, 10, 5, 6]
    assert corpus.owner is not None
    assert corpus.test_owner is not None
    assert corpus.owners is not None
    assert corpus.owners[corpus.owner].tolist() == ["f0_1"] * 3 + ["f0_2"] * 2
    assert corpus.owners[corpus.test_owner].tolist() == ["f0_2", "f0_9", "f0_9"]
    assert corpus.classes == 62


@pytest.mark.parametrize("archived", [False, True])
def test_femnist_as_tensorflow_federated_has_it(archived: bool, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    grey = images(5, 28, 28)
    pixels, labels = (grey / 255).astype(np.float32), np.array([3, 4, 5, 6, 7], dtype=np.int32)
    names = ("fed_emnist_train.h5", "fed_emnist_test.h5")
    train = {"w1": {"pixels": pixels[:2], "label": labels[:2]}, "w2": {"pixels": pixels[2:4], "label": labels[2:4]}}
    paths = [hdf5(tmp_path / names[0], train), hdf5(tmp_path / names[1], {"w1": {"pixels": pixels[4:], "label": [7]}})]
    files = dict(zip(names, paths, strict=True))
    if archived:
        contents = {name: path.read_bytes() for name, path in files.items()}
        files = {"fed_emnist.tar.bz2": tar(tmp_path / "fed_emnist.tar.bz2", contents, "w:bz2")}
    corpus = read_published("femnist", files)
    assert np.array_equal(corpus.train_x[:, 0], grey[:4])
    assert corpus.train_y.tolist() == [3, 4, 5, 6]
    assert corpus.owner is not None
    assert corpus.test_owner is not None
    assert corpus.owner.tolist() == [0, 0, 1, 1]
    assert corpus.test_owner.tolist() == [0]


def test_femnist_in_the_plain_layout(tmp_path: Path) -> None:
    owners = {"train_owner": np.arange(8) % 2, "test_owner": np.arange(4) % 2, "owners": np.array(["a", "b"])}
    corpus = read("femnist", plain_npz(tmp_path / "femnist.npz", (28, 28), 62, **owners))
    assert corpus.owner is not None
    assert corpus.owner.tolist() == [0, 1] * 4
    wrong = plain_npz(tmp_path / "wrong.npz", (28, 28), 62, **{**owners, "train_owner": np.arange(8)})
    with pytest.raises(DataError, match="train_owner holds the label 2, but 0 to 1"):
        read("femnist", wrong)
    with pytest.raises(DataError, match="has no array 'train_owner'"):
        read("femnist", plain_npz(tmp_path / "less.npz", (28, 28), 62))


@pytest.mark.parametrize(
    ("users", "words"),
    [
        ({"u": ([[0.5] * 783], [1])}, "needs 1 images of 784 pixels"),
        ({"u": ([[1.5] * 784], [1])}, r"pixels in \[0, 1\]"),
        ({"u": ([[0.5] * 784], [62])}, "the label 62"),
        ({"u": ([[0.5] * 784, [0.5] * 3], [1, 2])}, "images of different sizes"),
        ({"u": ([[0.5] * 784], [1, 2])}, "1 samples but 2 targets"),
    ],
)
def test_femnist_of_another_shape(
    users: dict[str, tuple[list[object], list[object]]], words: str, tmp_path: Path
) -> None:
    files, _ = leaf_files(tmp_path)
    path = leaf(tmp_path / "train" / "a_0.json", users)
    with pytest.raises(DataError, match=words) as caught:
        read_published("femnist", files)
    assert str(path) in str(caught.value)
