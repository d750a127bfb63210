"""A folder's samples, left on disk: where each client's are, and how some clients' are read.

Arrays that lie unpacked in an .npz file (`np.savez`) are read by slices. Packed ones and tables are read whole, and the
last few of them are kept.
"""

import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from fedloom.data.files import reading
from fedloom.data.own import read_piece
from fedloom.data.stored import Stored
from fedloom.errors import DataError
from fedloom.untrusted import open_plain

KEPT = 256 << 20  # bytes of shards that were read whole
CHUNK = 16 << 20  # bytes of samples that are looked through at once

Pair = tuple[np.ndarray, np.ndarray]  # samples and targets
Rows = Callable[[int, int], Pair]


@dataclass(frozen=True)
class Shard:
    """One file as it was when its folder was opened."""

    path: Path
    size: int
    mtime: int  # nanoseconds
    clients: int
    rows: int
    arrays: tuple[Stored, Stored] | None = None  # x and y that can be read by slices; None: both are read whole

    def check(self, place: Path | int) -> None:
        """Is it still the same file? It is asked by its path, or by a descriptor."""
        try:
            now = os.stat(place)
        except FileNotFoundError:
            raise DataError(f"{self.path} is gone since its folder was opened") from None
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime):
            raise DataError(f"{self.path} has changed since its folder was opened; open the folder again")


@dataclass(frozen=True, eq=False)
class Shards:
    """All files of a folder and the clients in them. It holds no sample, so that it can be sent to whoever trains."""

    shards: tuple[Shard, ...]
    offsets: np.ndarray  # [N + 1] rows of all files, one after the other: client k has those between two offsets
    names: np.ndarray  # [N] of the clients
    x: np.dtype[Any]
    x_shape: tuple[int, ...]  # of one sample
    y: np.dtype[Any]  # what targets become
    y_shape: tuple[int, ...]
    label: str = "label"  # of tables: the column of targets
    client: str | None = None  # and the one of clients
    chosen: np.ndarray | None = None  # [n] the clients that take part, by their numbers here; None: all

    def only(self, clients: np.ndarray) -> "Shards":
        """Some of the clients, in that order."""
        return replace(self, chosen=clients if self.chosen is None else self.chosen[clients])

    def read(self, clients: np.ndarray) -> Pair:
        """Samples and targets of these clients, one after the other."""
        clients = clients if self.chosen is None else self.chosen[clients]
        begins, ends = self.offsets[clients], self.offsets[clients + 1]
        stops = np.cumsum(ends - begins)
        x, y = self._empty(int(stops[-1]) if len(stops) else 0)
        file_of = self._file_of(clients)
        for s in np.unique(file_of).tolist():
            with self._opened(self.shards[s]) as rows:
                for k in np.flatnonzero(file_of == s).tolist():
                    begin, end, stop = int(begins[k]), int(ends[k]), int(stops[k])
                    x[stop - end + begin : stop], y[stop - end + begin : stop] = self._checked(rows, s, begin, end)
        return x, y

    def file_of(self, clients: np.ndarray) -> np.ndarray:
        """The number of the file that each client's samples are in."""
        return self._file_of(clients if self.chosen is None else self.chosen[clients])

    def _file_of(self, clients: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.searchsorted(self._first_client, clients, side="right") - 1
        return found

    def head(self, most: int) -> Pair:
        """The first so many samples, whoever has them."""
        x, y = self._empty(min(most, int(self.offsets[-1])))
        for s, first in enumerate(self._first_row[:-1].tolist()):
            end = min(len(x), int(self._first_row[s + 1]))
            if first >= end:
                break
            with self._opened(self.shards[s]) as rows:
                x[first:end], y[first:end] = self._checked(rows, s, first, end)
        return x, y

    @property
    def sample_bytes(self) -> int:
        return max(1, self.x.itemsize * math.prod(self.x_shape))

    @cached_property
    def largest(self) -> int:
        """The largest number in any sample. All of them are read for it, a few at a time."""
        found = []
        step = max(1, CHUNK // self.sample_bytes)
        for shard in self.shards:
            with self._opened(shard) as rows:
                found += [int(rows(b, min(b + step, shard.rows))[0].max()) for b in range(0, shard.rows, step)]
        return max(found)

    @cached_property
    def digest(self) -> str:
        """Tells other files: their names, their sizes and whose rows are where."""
        facts = [f"{shard.path.name} {shard.size} {shard.clients}" for shard in self.shards]
        kinds = [f"{self.x} {self.x_shape} {self.y} {self.y_shape} {self.label} {self.client}"]
        found = hashlib.sha256("\n".join([*facts, *kinds]).encode(errors="surrogateescape"))
        found.update(np.ascontiguousarray(self.offsets).tobytes())
        return found.hexdigest()

    @cached_property
    def _first_client(self) -> np.ndarray:
        """[S + 1] of each file."""
        return np.cumsum([0, *(shard.clients for shard in self.shards)])

    @cached_property
    def _first_row(self) -> np.ndarray:
        """[S + 1] of each file."""
        return np.cumsum([0, *(shard.rows for shard in self.shards)])

    def _empty(self, rows: int) -> Pair:
        return np.empty((rows, *self.x_shape), self.x), np.empty((rows, *self.y_shape), self.y)

    def _checked(self, rows: Rows, s: int, begin: int, end: int) -> Pair:
        """Rows of file s, by their numbers among all rows; each must be finite."""
        first = int(self._first_row[s])
        x, y = rows(begin - first, end - first)
        for what, values in (("samples", x), ("targets", y)):
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                bad = begin + int(np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))[0])
                client = int(np.searchsorted(self.offsets, bad, side="right")) - 1
                whose = f"client {str(self.names[client])!r}"
                raise DataError(f"{self.shards[s].path}: the {what} of {whose} hold a NaN or an infinity")
        return x, y

    @contextmanager
    def _opened(self, shard: Shard) -> Iterator[Rows]:
        """A way to read rows of a file, which must be as it was."""
        shard.check(shard.path)
        if shard.arrays is None:
            x, y = WHOLE.read(self, shard)
            yield lambda begin, end: (x[begin:end], y[begin:end])
            return
        stored_x, stored_y = shard.arrays
        with reading(shard.path), open_plain(shard.path) as file:
            shard.check(file.fileno())
            yield lambda begin, end: (stored_x.rows(file, begin, end), stored_y.rows(file, begin, end))


class Whole:
    """The files that were read whole last, as far as there is room."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: OrderedDict[tuple[object, ...], Pair] = OrderedDict()
        self.lock = Lock()  # also while a file is read: another thread may be about to ask for the same one

    def read(self, shards: Shards, shard: Shard) -> Pair:
        with self.lock:
            key = (shard.path, shard.size, shard.mtime, shards.label, shards.client)
            if key not in self.kept:
                self.kept[key] = _whole(shards, shard)
            self.kept.move_to_end(key)
            pair = self.kept[key]
            while self.kept and sum(x.nbytes + y.nbytes for x, y in self.kept.values()) > self.most:
                self.kept.popitem(last=False)
            return pair


WHOLE = Whole(KEPT)


def _whole(shards: Shards, shard: Shard) -> Pair:
    """All samples of a file, one client after the other."""
    piece = read_piece(shard.path, shards.label, shards.client).by_client()
    found = (native(piece.x.dtype), piece.x.shape[1:], piece.y.shape[1:])
    alike = found == (shards.x, shards.x_shape, shards.y_shape) and piece.y.dtype.kind in "iuf"
    if not alike or len(piece.x) != shard.rows or len(piece.names) != shard.clients:
        raise DataError(f"{shard.path} does not hold what it held when its folder was opened")
    return piece.x, piece.y


def native(kind: np.dtype[Any]) -> np.dtype[Any]:
    """The same numbers with the bytes in this machine's order."""
    return kind.newbyteorder("=")
