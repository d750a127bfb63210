"""Sets of images, each out of a small file in the plain layout and in its publisher's format."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.errors import DataError
from tests.data.sets.writers import (
    cifar_records,
    mnist_files,
    nist_archive,
    plain_npz,
    read,
    read_published,
    tar,
)

PLAIN = {
    "mnist": ((28, 28), 10),
    "fashion-mnist": ((28, 28), 10),
    "emnist-letters": ((28, 28), 26),
    "emnist-byclass": ((28, 28), 62),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_layout(name: str, tmp_path: Path) -> None:
    shape, classes = PLAIN[name]
    path = plain_npz(tmp_path / f"{name}.npz", shape, classes)
    corpus = read(name, path)
    wanted = np.load(path)["train_x"]
    wanted = wanted[:, None] if len(shape) == 2 else wanted.transpose(0, 3, 1, 2)
    assert np.array_equal(corpus.train_x, wanted)
    assert corpus.train_x.dtype == np.uint8
    assert corpus.train_x.flags.c_contiguous
    assert corpus.train_y.dtype == np.int64
    assert corpus.test_y is not None
    assert corpus.test_y.tolist() == [0, 1, 2, 3]
    assert corpus.classes == classes
    assert len(corpus.class_names) in (0, classes)
    assert len(corpus.mean) == len(corpus.std) == {"cifar10": 3, "cifar100": 3, "emnist-letters": 1}.get(name, 0)
    assert len(corpus.notes) == 1  # that it is not the whole set


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    ("array", "value", "words"),
    [
        ("train_x", np.zeros((8, 5), np.uint8), "uint8 [8, 5], but uint8 images of"),
        ("train_x", np.zeros((8, 28, 28), np.float64), "train_x is float64"),
        ("test_x", np.zeros((0, 28, 28), np.uint8), "test_x is uint8 [0, "),
        ("train_x", np.uint8(3), "train_x is uint8 []"),
        ("train_y", np.full(8, 200, np.uint8), "the label 200, but 0 to"),
        ("test_y", np.array([0, 1, -1, 0]), "the label -1, but 0 to"),
        ("train_y", np.zeros((8, 1), np.uint8), "one whole number a sample"),
        ("train_y", np.zeros(8), "one whole number a sample"),
        ("train_y", np.zeros(5, np.uint8), "8 images but 5 labels"),
    ],
)
def test_another_shape_is_refused(name: str, array: str, value: np.ndarray, words: str, tmp_path: Path) -> None:
    path = plain_npz(tmp_path / f"{name}.npz", PLAIN[name][0], PLAIN[name][1], **{array: value})
    with pytest.raises(DataError) as caught:
        read(name, path)
    assert str(path) in str(caught.value)
    if len(PLAIN[name][0]) == 2:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_raw_pixels_of_mnist(tmp_path: Path) -> None:
    """A model reads what the file holds, 0 to 255; else a 255th of it."""
    path = plain_npz(tmp_path / "mnist.npz", (28, 28), 10)
    wanted = torch.from_numpy(np.load(path)["train_x"][:, None].astype(np.float64))
    for text, factor in (("mnist(raw=true)", 1.0), ("mnist", 1 / 255)):
        federation = fl.load(text, partition="iid", clients=2, data_dir=tmp_path)
        seen = federation.preparation.clean(federation.x, torch.float64)
        assert torch.allclose(seen, factor * wanted, rtol=1e-15, atol=0)


def test_mnist_as_published(tmp_path: Path) -> None:
    files, arrays = mnist_files(tmp_path)
    corpus = read_published("mnist", files)
    assert np.array_equal(corpus.train_x[:, 0], arrays[0])
    assert corpus.train_y.tolist() == arrays[1].tolist()
    assert corpus.test_x is not None
    assert np.array_equal(corpus.test_x[:, 0], arrays[2])
    assert corpus.train_x.flags.writeable


def test_fashion_mnist_as_published_lies_in_a_folder_of_its_own(tmp_path: Path) -> None:
    files, arrays = mnist_files(tmp_path, "fashion-mnist/")
    corpus = read_published("fashion-mnist", files)
    assert np.array_equal(corpus.train_x[:, 0], arrays[0])
    assert corpus.class_names[9] == "ankle boot"


def test_emnist_letters_as_published_are_made_upright_and_counted_from_0(tmp_path: Path) -> None:
    path, arrays = nist_archive(tmp_path / "gzip.zip", "letters", first=1)
    corpus = read_published("emnist-letters", {"gzip.zip": path})
    assert np.array_equal(corpus.train_x[:, 0], arrays[0])
    assert corpus.train_y.tolist() == (arrays[1] - 1).tolist()
    assert corpus.test_y is not None
    assert corpus.test_y.tolist() == list(range(26))


def test_the_first_letters_only(tmp_path: Path) -> None:
    path, arrays = nist_archive(tmp_path / "gzip.zip", "letters", first=1)
    corpus = read_published("emnist-letters(letters=10)", {"gzip.zip": path})
    kept = arrays[0][arrays[1] <= 10]
    assert np.array_equal(corpus.train_x[:, 0], kept)
    assert corpus.classes == 10
    assert corpus.class_names == tuple("ABCDEFGHIJ")
    assert (*corpus.mean, *corpus.std) == pytest.approx(((kept / 255).mean(), (kept / 255).std()))
    for wrong in (1, 27, -3):
        with pytest.raises(DataError, match="between 2 and 26"):
            read_published(f"emnist-letters(letters={wrong})", {"gzip.zip": path})


def test_emnist_byclass_as_published(tmp_path: Path) -> None:
    path, arrays = nist_archive(tmp_path / "gzip.zip", "byclass", first=0)
    corpus = read_published("emnist-byclass", {"gzip.zip": path})
    assert np.array_equal(corpus.train_x[:, 0], arrays[0])
    assert corpus.train_y.tolist() == arrays[1].tolist()
    assert corpus.class_names[10] + corpus.class_names[36] == "Aa"
    with pytest.raises(DataError, match="has no emnist-letters-train-images"):
        read_published("emnist-letters", {"gzip.zip": path})


def test_cifar10_as_published(tmp_path: Path) -> None:
    parts = [cifar_records(4, [np.arange(4) + part]) for part in range(6)]
    names = [*(f"cifar-10-batches-bin/data_batch_{n}.bin" for n in range(1, 6)), "cifar-10-batches-bin/test_batch.bin"]
    contents = dict(zip(names, (content for content, _ in parts), strict=True))
    path = tar(tmp_path / "cifar-10-binary.tar.gz", {**contents, "cifar-10-batches-bin/readme.html": b"x"})
    corpus = read_published("cifar10", {path.name: path})
    assert np.array_equal(corpus.train_x, np.concatenate([x for _, x in parts[:5]]))
    assert corpus.train_y.tolist() == [label + part for part in range(5) for label in range(4)]
    assert corpus.test_x is not None
    assert np.array_equal(corpus.test_x, parts[5][1])


def test_cifar100_as_published_has_the_fine_labels(tmp_path: Path) -> None:
    coarse, fine = np.arange(5), np.array([99, 0, 7, 50, 98])
    (train, x), (test, _) = cifar_records(5, [coarse, fine]), cifar_records(5, [coarse, fine])
    path = tar(tmp_path / "c.tar.gz", {"cifar-100-binary/train.bin": train, "cifar-100-binary/test.bin": test})
    corpus = read_published("cifar100", {"cifar-100-binary.tar.gz": path})
    assert np.array_equal(corpus.train_x, x)
    assert corpus.train_y.tolist() == fine.tolist()


def test_cifar_without_a_batch_or_with_half_a_record(tmp_path: Path) -> None:
    content, _ = cifar_records(2, [np.zeros(2), np.zeros(2)])
    path = tar(tmp_path / "c.tar.gz", {"train.bin": content})
    with pytest.raises(DataError, match=r"c\.tar\.gz has no test\.bin"):
        read_published("cifar100", {"cifar-100-binary.tar.gz": path})
    path = tar(tmp_path / "c.tar.gz", {"train.bin": content[:-1], "test.bin": content})
    with pytest.raises(DataError, match="no whole records of 3074 bytes"):
        read_published("cifar100", {"cifar-100-binary.tar.gz": path})
