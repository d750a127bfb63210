"""What one file of a user's folder holds, and which files go together."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedloom.data.files import array_of, open_npz, reading
from fedloom.errors import DataError

TABLES = (".csv", ".csv.gz", ".parquet")
KINDS = (".npz", *TABLES)


@dataclass(frozen=True)
class Piece:
    """Some clients' samples: what one file holds."""

    x: np.ndarray
    y: np.ndarray
    owner: np.ndarray  # position in `names`
    names: list[str]
    columns: tuple[str, ...] = ()

    def by_client(self) -> "Piece":
        """The same samples, one client after the other."""
        if (np.diff(self.owner) >= 0).all():
            return self
        order = np.argsort(self.owner, kind="stable")
        return replace(self, x=self.x[order], y=self.y[order], owner=self.owner[order])


def name_of(path: Path) -> str:
    """What a client is called whose file this is."""
    return path.name.removesuffix(kind_of(path))


def kind_of(path: Path) -> str:
    return next((kind for kind in KINDS if path.name.endswith(kind)), "")


def read_arrays(path: Path) -> Piece:
    with reading(path), open_npz(path) as archive:
        check_members(path, archive.files)
        x, y = array_of(archive, "x", path), array_of(archive, "y", path)
        offsets = array_of(archive, "offsets", path) if "offsets" in archive.files else None
        names = array_of(archive, "names", path) if "names" in archive.files else None
    check_arrays(path, x, y)
    offsets, told = shard_clients(path, len(x), offsets, names)
    return Piece(x, y, np.repeat(np.arange(len(told)), np.diff(offsets)), told)


class Array(Protocol):
    """An array, or what is known of one."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def check_members(path: Path, members: Collection[str]) -> None:
    for wanted in ("x", "y"):
        if wanted not in members:
            raise DataError(f"{path} has no array {wanted!r}; a client's file needs x and y")


def check_arrays(path: Path, x: Array, y: Array) -> None:
    """Refuse what is no list of samples and one of as many targets."""
    for kind, values in (("x", x), ("y", y)):
        known = values.dtype.kind in ("biuf" if kind == "x" else "biufU")
        if not known or (values.dtype.kind == "f" and values.dtype.itemsize > 8):
            raise DataError(f"{path}: {kind} holds {values.dtype}, but numbers were expected")
    if not x.shape or not y.shape or x.shape[0] != y.shape[0] or not x.shape[0]:
        raise DataError(f"{path}: x and y must have one entry per sample, but their shapes are {x.shape} and {y.shape}")


def shard_clients(
    path: Path, samples: int, offsets: np.ndarray | None, names: np.ndarray | None
) -> tuple[np.ndarray, list[str]]:
    """Where each client's samples begin and end, and what the clients are called."""
    if offsets is None:
        return np.array([0, samples]), [name_of(path)]
    whole = offsets.ndim == 1 and offsets.dtype.kind in "iu" and len(offsets) > 1
    if not whole or offsets[0] != 0 or offsets[-1] != samples or (np.diff(offsets.astype(np.int64)) < 1).any():
        raise DataError(
            f"{path}: offsets must rise from 0 to the number of samples, {samples}, one step for each client"
        )
    clients = len(offsets) - 1
    with reading(path):  # bytes may be no text
        told = [] if names is None else names.astype(str).ravel().tolist()
    told = told or [f"{name_of(path)}/{j}" for j in range(clients)]
    if len(told) != clients:
        raise DataError(f"{path}: {clients} clients have {len(told)} names")
    return offsets.astype(np.int64), told


def check_alike(first: Piece, other: Piece) -> None:
    """Two clients whose data can't stand in one array are told apart here, before NumPy makes them alike."""
    sorts = {"f": "numbers", "i": "whole numbers", "u": "whole numbers"}
    for what, mine, theirs in (
        ("columns", list(first.columns), list(other.columns)),
        ("the shape of a sample", first.x.shape[1:], other.x.shape[1:]),
        ("the type of samples", first.x.dtype, other.x.dtype),
        ("the shape of a target", first.y.shape[1:], other.y.shape[1:]),
        ("targets", sorts.get(first.y.dtype.kind, "texts"), sorts.get(other.y.dtype.kind, "texts")),
    ):
        if mine != theirs:
            who = f"clients {first.names[0]!r} and {other.names[0]!r}"
            raise DataError(f"{who} disagree about {what}: {mine} and {theirs}")
