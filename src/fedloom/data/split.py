"""Clients that are held out: for validation (AdaBest), or by client in folds (RADFed)."""

from dataclasses import replace

import numpy as np
import torch

from fedloom.errors import DataError
from fedloom.federation import Federation
from fedloom.keys import split_rng
from fedloom.local import plain

FOLDS = 5


def split_clients(
    federation: Federation,
    *,
    validation: int = 0,
    fold: int | None = None,
    inner: int = 0,
    folds: int = FOLDS,
    seed: int = 0,
) -> Federation:
    """Hold clients out, by chance.

    `validation=10` makes ten clients the validation clients and trains on the others. `fold=f` cuts the clients, in
    random order, into `folds` blocks: block f is the test set, as many clients as the first block has, taken from the
    front of the rest, are for validation, and the others train. `inner` takes the validation clients from the next
    such block instead, and so on, for tuning.

    >>> federation = Federation.from_arrays([([[float(k)]], [k % 2]) for k in range(10)])
    >>> split = split_clients(federation, fold=0)
    >>> len(split), len(split.validation.offsets) - 1, len(split.test.offsets) - 1
    (6, 2, 2)
    """
    validation, fold, inner, folds = plain(validation), plain(fold), plain(inner), plain(folds)
    for what, number in (("validation", validation), ("fold", fold), ("inner", inner), ("folds", folds)):
        if (number is None and what != "fold") or not isinstance(number, int | None) or isinstance(number, bool):
            raise DataError(f"{what} must be a whole number, not {number!r}")
    order = split_rng(plain(seed)).permutation(len(federation))
    if fold is None:
        if inner:
            raise DataError("inner belongs to a split into folds: say which fold")
        return _by_count(federation, order, validation)
    if federation.shards is not None:
        raise DataError(
            "a split into folds holds two fifths of all samples in memory, but these stay on disk (lazy=True); hold a "
            "few clients out with validation, or put a test set into the folder"
        )
    if validation:
        raise DataError("a split into folds has validation clients of its own: leave out validation, or fold")
    if folds < 2 or not 0 <= fold < folds or not 0 <= inner < folds - 1:
        raise DataError(
            f"fold={fold}, inner={inner}: of {folds} folds the test block is one of 0 to {folds - 1}, and the "
            f"validation block one of 0 to {folds - 2}"
        )
    if len(federation) < 3 or len(federation) < folds:
        raise DataError(f"{len(federation)} clients are too few for {folds} folds")
    blocks = np.array_split(order, folds)
    rest = np.concatenate([block for f, block in enumerate(blocks) if f != fold])
    first = inner * len(blocks[0])
    chosen = rest[first : first + len(blocks[0])]
    if not len(chosen) or len(chosen) == len(rest):
        raise DataError(f"{len(federation)} clients in {folds} folds leave nobody to train or to validate")
    training = np.setdiff1d(rest, chosen)
    return replace(
        federation.only(torch.from_numpy(training)),
        validation=federation.held_out(torch.from_numpy(np.sort(chosen))),
        test=federation.held_out(torch.from_numpy(np.sort(blocks[fold]))),
    )


def _by_count(federation: Federation, order: np.ndarray, validation: int) -> Federation:
    if validation < 0:
        raise DataError(f"validation must be a number of clients, not {validation}")
    if validation >= len(federation):
        raise DataError(f"{validation} of {len(federation)} clients can't be held out: nobody would train")
    if not validation:
        return federation
    held, training = np.sort(order[:validation]), np.sort(order[validation:])
    chosen = federation.held_out(torch.from_numpy(held))
    return replace(federation.only(torch.from_numpy(training)), validation=chosen)
