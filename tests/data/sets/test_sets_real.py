"""The real files: their counts and label balance are those of the README beside them."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedloom.data.catalogue import read_corpus
from fedloom.data.corpus import Corpus
from fedloom.data.files import Files

SHARED = Path(__file__).resolve().parents[3].parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not at hand in ../shared/data")


@pytest.fixture(scope="module")
def files() -> Iterator[Files]:
    with tempfile.TemporaryDirectory() as cache:
        yield Files(SHARED, Path(cache))


def balance(y: np.ndarray | None, classes: int) -> list[int]:
    assert y is not None
    found: list[int] = np.bincount(y, minlength=classes).tolist()
    return found


def counts(corpus: Corpus) -> tuple[int, int]:
    assert corpus.test_x is not None
    assert corpus.test_y is not None
    assert len(corpus.train_x) == len(corpus.train_y)
    assert len(corpus.test_x) == len(corpus.test_y)
    return len(corpus.train_y), len(corpus.test_y)


def test_mnist(files: Files) -> None:
    corpus = read_corpus("mnist", files)
    assert counts(corpus) == (60_000, 10_000)
    assert corpus.train_x.shape[1:] == (1, 28, 28)
    assert balance(corpus.train_y, 10) == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert balance(corpus.test_y, 10) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert corpus.notes == ()


def test_fashion_mnist(files: Files) -> None:
    corpus = read_corpus("fashion-mnist", files)
    assert counts(corpus) == (60_000, 10_000)
    assert balance(corpus.train_y, 10) == [6000] * 10
    assert balance(corpus.test_y, 10) == [1000] * 10


def test_emnist_letters(files: Files) -> None:
    corpus = read_corpus("emnist-letters", files)
    assert counts(corpus) == (124_800, 20_800)
    assert balance(corpus.train_y, 26) == [4800] * 26
    assert balance(corpus.test_y, 26) == [800] * 26
    assert (*corpus.mean, *corpus.std) == pytest.approx((0.1722, 0.3309), abs=1e-4)


def test_the_first_ten_letters(files: Files) -> None:
    corpus = read_corpus("emnist-letters(letters=10)", files)
    assert counts(corpus) == (48_000, 8_000)
    assert balance(corpus.train_y, 10) == [4800] * 10
    assert corpus.classes == 10


def test_emnist_byclass(files: Files) -> None:
    corpus = read_corpus("emnist-byclass", files)
    assert counts(corpus) == (26_928, 6_721)
    both = np.array(balance(corpus.train_y, 62)) + balance(corpus.test_y, 62)
    assert both.min() > 0
    assert both.max() == 600
    assert corpus.notes  # a part of the published set


def test_cifar10(files: Files) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(SHARED / "unpack"), folder], check=True, capture_output=True)
        corpus = read_corpus("cifar10", Files(Path(folder), files.cache))
    assert counts(corpus) == (50_000, 10_000)
    assert corpus.train_x.shape[1:] == (3, 32, 32)
    assert balance(corpus.train_y, 10) == [5000] * 10
    assert balance(corpus.test_y, 10) == [1000] * 10
    assert corpus.train_x.mean((0, 2, 3)) / 255 == pytest.approx(corpus.mean, abs=1e-3)
    assert corpus.train_x[:5000].std((0, 2, 3)) / 255 == pytest.approx(corpus.std, abs=5e-3)


def test_newsgroups(files: Files) -> None:
    corpus = read_corpus("20newsgroups", files)
    assert counts(corpus) == (11_314, 7_532)
    train = [480, 584, 591, 590, 578, 593, 585, 594, 598, 597, 600, 595, 591, 594, 593, 599, 546, 564, 465, 377]
    test = [319, 389, 394, 392, 385, 395, 390, 396, 398, 397, 399, 396, 393, 396, 394, 398, 364, 376, 310, 251]
    assert balance(corpus.train_y, 20) == train
    assert balance(corpus.test_y, 20) == test
    assert corpus.words is not None
    assert corpus.words[corpus.train_x[0][:4]].tolist() == ["from", ":", "mathew", "<"]


def test_agnews(files: Files) -> None:
    corpus = read_corpus("agnews", files)
    assert counts(corpus) == (43_228, 7_600)
    assert balance(corpus.train_y, 4) == [10_503, 10_448, 10_480, 11_797]
    assert balance(corpus.test_y, 4) == [1900] * 4
    assert corpus.notes


def test_covertype(files: Files) -> None:
    corpus = read_corpus("covertype", files)
    assert corpus.train_x.shape[1] == 49
    both = np.array(balance(corpus.train_y, 2)) + balance(corpus.test_y, 2)
    with np.load(SHARED / "covertype.npz") as arrays:
        labels = np.concatenate([arrays["train_y"], arrays["test_y"]])
    assert len(labels) == 92_962
    assert both.tolist() == np.bincount(labels)[:2].tolist() == [33_894, 45_328]
    elevation = corpus.train_x[:, 0]
    assert (elevation.min(), elevation.max()) > (1800, 3000)
    assert set(np.unique(corpus.train_x[:, corpus.numeric :])) == {0, 1}
    assert (corpus.train_x[:, corpus.numeric :].sum(1) == 2).all()  # one area and one soil


def test_shakespeare(files: Files) -> None:
    corpus = read_corpus("shakespeare", files)
    assert corpus.owners is not None
    assert corpus.owner is not None
    assert len(corpus.owners) == len(np.unique(corpus.owner)) == 1_303
    assert len({name.partition(": ")[0] for name in corpus.owners.tolist()}) <= 39
    train, test = counts(corpus)
    assert train + test == 4_450_296
    assert 0.199 < test / (train + test) <= 0.2
    assert corpus.words is not None
    assert len(corpus.words) == 70
    assert corpus.notes == ("264 roles have too little text for one sample and are left out",)
    assert "".join(corpus.words[corpus.train_x[0]]).startswith("In delivering my son from me, I bury")


@pytest.mark.parametrize("name", ["mnist", "20newsgroups", "agnews", "covertype", "shakespeare"])
def test_a_second_read_gives_the_same(name: str, files: Files) -> None:
    first, second = read_corpus(name, files), read_corpus(name, files)
    for key, array in first.arrays().items():
        assert np.array_equal(array, second.arrays()[key])
    assert first.facts() == second.facts()
