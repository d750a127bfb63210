"""FEMNIST: Caldas, Duddu, Wu, Li, Konecny, McMahan, Smith, Talwalkar: LEAF, a benchmark for federated settings.
arXiv:1812.01097, 2018. One client per writer of EMNIST's by-class characters.

Ink is 0 and the paper 1, as LEAF and TensorFlow Federated publish them. Their pixels are numbers in [0, 1]; they are
kept as 255 times that, rounded.
"""

from collections.abc import Iterable
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source, read_npz
from fedloom.data.formats import (
    ARRAYS,
    Owners,
    checked_labels,
    checked_pair,
    hdf5_users,
    leaf_users,
    size_notes,
    unpacked_from,
)
from fedloom.errors import DataError

SAMPLES = (671_585, 77_483)
NAMES = tuple(digits + ascii_uppercase + ascii_lowercase)
LEAF = ("femnist/train", "femnist/test")
TFF = ("fed_emnist_train.h5", "fed_emnist_test.h5")
ARCHIVE = Remote(
    "fed_emnist.tar.bz2",
    "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2",
    "sha256:fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
)
Part = tuple[Path, str, np.ndarray, np.ndarray]  # a file, a writer, the pixels, the labels
Split = tuple[np.ndarray, np.ndarray, np.ndarray]  # images, labels, writers


@dataset(
    "femnist",
    samples=SAMPLES,
    classes=62,
    licence="public domain",
    plain=("femnist.npz",),
    published=[[Remote(name) for name in LEAF], [Remote(name) for name in TFF], [ARCHIVE]],
    how=f"Get {ARCHIVE.url}, or put LEAF's train and test folders of .json files into a subfolder femnist.",
    natural=True,
)
def femnist(*, source: Source) -> Corpus:
    """handwritten characters by writer, 28 x 28 pixels (LEAF: Caldas et al. 2018)"""
    if source.plain is not None:
        train, test, owners = _plain(source.plain)
    elif LEAF[0] in source.published:
        train, test, owners = _splits(_leaf(source.published[LEAF[0]]), _leaf(source.published[LEAF[1]]))
    elif TFF[0] in source.published:
        train, test, owners = _splits(_hdf5(source.published[TFF[0]]), _hdf5(source.published[TFF[1]]))
    else:
        with unpacked_from(source.published[ARCHIVE.name], TFF) as files:
            train, test, owners = _splits(*map(_hdf5, files))
    return Corpus(
        train[0][:, None],
        train[1],
        test[0][:, None],
        test[1],
        classes=62,
        class_names=NAMES,
        owner=train[2],
        test_owner=test[2],
        owners=owners,
        notes=size_notes(len(train[1]), len(test[1]), SAMPLES),
    )


def _leaf(folder: Path) -> Iterable[Part]:
    for path, user, pixels, labels in leaf_users(folder):
        try:
            yield path, user, np.array(pixels, dtype=np.float32), np.array(labels)
        except (ValueError, TypeError):
            raise DataError(f"{path}: the writer {user!r} has images of different sizes, or no numbers") from None


def _hdf5(path: Path) -> Iterable[Part]:
    for user, (pixels, labels) in hdf5_users(path, ("pixels", "label")):
        yield path, user, pixels, labels


def _splits(train: Iterable[Part], test: Iterable[Part]) -> tuple[Split, Split, np.ndarray]:
    writers = Owners()
    found = _collected(train, writers), _collected(test, writers)
    return *found, writers.names()


def _collected(parts: Iterable[Part], writers: Owners) -> Split:
    """All writers' images one after the other, as bytes."""
    images, labels, owner = [np.zeros((0, 28, 28), np.uint8)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for path, user, pixels, targets in parts:
        n = len(targets)
        if not n:
            continue
        if pixels.shape not in ((n, 784), (n, 28, 28)) or pixels.min() < 0 or pixels.max() > 1:
            raise DataError(f"{path}: the writer {user!r} needs {n} images of 784 pixels in [0, 1]")
        images.append(np.rint(255 * pixels).astype(np.uint8).reshape(n, 28, 28))
        labels.append(checked_labels(path, f"y of the writer {user!r}", targets, 62))
        owner.append(np.full(n, writers.place(user)))
    return np.concatenate(images), np.concatenate(labels), np.concatenate(owner)


def _plain(path: Path) -> tuple[Split, Split, np.ndarray]:
    """femnist.npz: as other images, with train_owner and test_owner, positions in the names `owners`."""
    found = read_npz(path, (*ARRAYS, "train_owner", "test_owner", "owners"))
    owners = found["owners"]
    if owners.ndim != 1:
        raise DataError(f"{path}: owners has the shape {list(owners.shape)}, but a list of names was expected")

    def split(name: str) -> Split:
        x, y = checked_pair(path, name, (found[f"{name}_x"], found[f"{name}_y"]), (28, 28), 62)
        owner = checked_labels(path, f"{name}_owner", found[f"{name}_owner"], len(owners))
        if len(owner) != len(y):
            raise DataError(f"{path}: {len(y)} images but {len(owner)} owners for {name}")
        return x, y, owner

    return split("train"), split("test"), owners.astype(np.str_)
