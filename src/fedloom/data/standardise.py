"""Columns with mean 0 and standard deviation 1: over all training clients (RADFed's -G), or each client's own (-L)."""

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedloom.errors import DataError, nearest
from fedloom.federation import Federation, Holdout

Standardisation = Literal["global", "local"]


def standardise(federation: Federation, how: Standardisation, columns: int | None = None) -> Federation:
    """The federation with its first `columns` columns standardised (None: all of them).

    "global" takes mean and deviation from the training clients' samples together. "local" takes those of each client
    alone, held-out ones included; it needs a test set that belongs to clients. A column without variation only loses
    its mean.

    >>> federation = Federation.from_arrays([([[1.0], [3.0]], [0, 1]), ([[5.0], [9.0]], [0, 1])])
    >>> standardise(federation, "local").x.flatten().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    if how not in get_args(Standardisation):
        raise DataError(f"unknown way to standardise {how!r}: {nearest(str(how), get_args(Standardisation))}")
    if federation.shards is not None:
        raise DataError("standardise: it changes all samples, but these stay on disk (lazy=True); change the files")
    x = federation.x
    if not x.is_floating_point() or x.dim() != 2:
        raise DataError(f"only a table of numbers can be standardised, not samples of shape {tuple(x.shape[1:])}")
    width = x.shape[1] if columns is None else columns
    if not 0 < width <= x.shape[1]:
        raise DataError(f"columns={columns}: the samples have {x.shape[1]} columns")
    parts = {"test": federation.test, "validation": federation.validation}
    if how == "global":
        mean, std = _moments(x[federation.index, :width], torch.zeros(len(federation.index), dtype=torch.int64), 1)
        changed = _shifted(x, width, mean, std)
        held = {n: part and replace(part, x=_shifted(part.x, width, mean, std)) for n, part in parts.items()}
    else:
        changed = _by_client(x, federation.index, federation.offsets, width)
        held = {name: part and _held_out(part, width, name) for name, part in parts.items()}
    return replace(federation, x=changed, test=held["test"], validation=held["validation"])


def _held_out(part: Holdout, width: int, what: str) -> Holdout:
    if part.offsets is None:
        raise DataError(
            f"standardise='local': the {what} set belongs to no client; hold clients out instead, as with fold=0"
        )
    return replace(part, x=_by_client(part.x, torch.arange(len(part.x)), part.offsets, width))


def _by_client(x: Tensor, index: Tensor, offsets: Tensor, width: int) -> Tensor:
    clients = len(offsets) - 1
    owner = torch.repeat_interleave(torch.arange(clients), offsets[1:] - offsets[:-1])
    done = x.clone()  # samples that nobody owns stay as they are
    for column in range(width):  # one at a time: a million clients' numbers as float64 would fill the memory
        chosen = x[index, column].double()[:, None]
        mean, std = _moments(chosen, owner, clients)
        done[index, column] = ((chosen - mean[owner]) / std[owner])[:, 0].to(x.dtype)
    return done


def _moments(x: Tensor, owner: Tensor, owners: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [owners, columns], in two passes; no variation counts as deviation 1."""
    count = torch.bincount(owner, minlength=owners).double()[:, None]
    sums = torch.zeros(owners, x.shape[1], dtype=torch.float64)
    mean = sums.index_add(0, owner, x.double()) / count
    squares = sums.index_add(0, owner, (x.double() - mean[owner]).square()) / count
    std = squares.sqrt()
    flat = std <= 1e-12 * mean.abs().clamp(min=1.0)
    return mean, std.masked_fill(flat, 1.0)


def _shifted(x: Tensor, width: int, mean: Tensor, std: Tensor) -> Tensor:
    return _changed(x, width, (x[:, :width].double() - mean) / std)


def _changed(x: Tensor, width: int, values: Tensor) -> Tensor:
    return torch.cat([values.to(x.dtype), x[:, width:]], 1)
