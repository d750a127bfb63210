"""Every data set by name."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedloom.data.digits import load_digits
from fedloom.data.partition import Deal
from fedloom.data.partition import partition as deal_out
from fedloom.errors import DataError, nearest
from fedloom.federation import Federation, Holdout

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # train_x, train_y, test_x, test_y


@dataclass(frozen=True)
class Dataset:
    """An entry of the catalogue."""

    name: str
    about: str
    samples: tuple[int, int]  # train, test
    classes: int
    licence: str
    read: Callable[[], Arrays]


CATALOGUE = {
    "digits": Dataset(
        "digits",
        "handwritten digits, 8 x 8 pixels (UCI; comes with scikit-learn)",
        (1437, 360),
        10,
        "CC BY 4.0",
        load_digits,
    ),
}


def find_dataset(name: str) -> Dataset:
    if name not in CATALOGUE:
        raise DataError(f"unknown data set {name!r}: {nearest(str(name), CATALOGUE)}")
    return CATALOGUE[name]


def load(name: str, partition: str = "iid", clients: int = 100, seed: int = 0) -> Federation:
    """A data set, dealt out to clients; its test set is held out.

    >>> federation = load("digits", partition="classes(per_client=2)", clients=20, seed=0)
    >>> len(federation), federation.classes
    (20, 10)
    """
    dataset = find_dataset(name)
    arrays = dataset.read()
    return assemble(dataset, arrays, deal_out(partition, arrays[1], clients, seed))


def assemble(dataset: Dataset, arrays: Arrays, dealt: Deal) -> Federation:
    """A federation over a data set's arrays, by the positions that each client owns."""
    train_x, train_y, test_x, test_y = arrays
    return Federation.build(
        torch.from_numpy(train_x),
        torch.from_numpy(train_y),
        torch.from_numpy(np.concatenate(dealt)),
        torch.tensor(np.cumsum([0, *(len(mine) for mine in dealt)])),
        test=Holdout(torch.from_numpy(test_x), torch.from_numpy(test_y)),
        classes=dataset.classes,
        name=dataset.name,
    )
