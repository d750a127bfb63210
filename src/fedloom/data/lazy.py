"""A folder whose samples stay on disk, as a federation: only what is needed to plan a run is read.

That is of each file how many samples each client has and what they are called, all targets once (to count classes; they
are not kept), and a few samples to try a model on. The test set is read whole.
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.data.files import reading
from fedloom.data.own import SPARSE, check_names, data_files, read_piece
from fedloom.data.partition.base import REGISTRY, load_partitioners
from fedloom.data.partition.natural import Natural
from fedloom.data.pieces import Piece, check_alike, check_arrays, check_members, kind_of, shard_clients
from fedloom.data.shards import Shard, Shards, native
from fedloom.data.split import split_clients
from fedloom.data.stored import find_array, read_array
from fedloom.data.transforms import Preparation, augmentations
from fedloom.errors import DataError
from fedloom.federation import NO_TARGET, Federation, Holdout
from fedloom.keys import check_seed
from fedloom.spec import Call, parse_one
from fedloom.untrusted import check_zip, open_plain

HEAD = 1000  # samples that are kept
HEAD_BYTES = 64 << 20  # or fewer, where they are large
DISTINCT = 1 << 20  # targets that are told apart


def is_lazy(call: Call) -> bool:
    """Does the text of a data set ask for samples that stay on disk?"""
    return call.named.get("lazy") is True


def load_lazily(
    call: Call,
    partition: str | Path | None,
    clients: int | None,
    seed: int,
    *,
    validation: int,
    augment: str | None,
    unfit: Mapping[str, Any],
) -> Federation:
    """What `load` does, for clients that keep the samples they have. `unfit` are settings that would need them all."""
    for name, value in unfit.items():
        if value is not None and value is not False:
            raise DataError(f"{name}={value}: it needs all samples, but these stay on disk (lazy=True); leave lazy out")
    path, label, client = (call.named.get(name) for name in ("path", "label", "client"))
    federation = open_folder(Path(str(path)), label=label or "label", client=client)
    chosen = _natural(federation.sizes.numpy(), str(partition or "natural"), clients, seed)
    if len(chosen) < len(federation):
        federation = federation.only(torch.from_numpy(chosen))
    federation = split_clients(federation, validation=validation, seed=seed)
    return replace(federation, preparation=replace(federation.preparation, augment=augmentations(augment)))


def _natural(sizes: np.ndarray, partition: str, clients: int | None, seed: int) -> np.ndarray:
    """The clients that the partition leaves."""
    load_partitioners()
    way = None if partition.endswith(".npz") else REGISTRY.make(REGISTRY.complete(parse_one(partition)))
    if not isinstance(way, Natural) or way.max_rate is not None:
        raise DataError(
            f"partition={partition}: with lazy=True the samples stay on disk with the clients that have them; "
            "choose natural (without max_rate, which counts labels)"
        )
    if clients is not None and clients < 1:
        raise DataError(f"the number of clients must be a whole number of at least 1, not {clients!r}")
    check_seed(seed)
    return way.choose(sizes, None, clients, np.random.default_rng(seed))[0]


def open_folder(folder: Path, *, label: str = "label", client: str | None = None) -> Federation:
    """A federation over a folder's files, with its samples left there."""
    train, held = data_files(folder.absolute())
    shards, sizes, names, targets = [], [], [], _Targets()
    first: Piece | None = None
    for path in train:
        shard, piece = _open_shard(path, label, client)
        first = first or _without_rows(piece)
        check_alike(first, piece)
        targets.see(piece.y, "training", path)
        shards.append(shard)
        sizes.append(np.bincount(piece.owner))
        names += piece.names
    assert first is not None  # nosec B101  # for the type checker
    check_names(folder, names)
    pieces = [] if held is None else [read_piece(path, label, client) for path in held]
    for piece, path in zip(pieces, held or (), strict=True):
        check_alike(first, piece)
        targets.see(piece.y, "test", path)
    found = Shards(
        tuple(shards),
        np.concatenate([[0], np.cumsum(np.concatenate(sizes))]),
        np.array(names),
        native(first.x.dtype),
        first.x.shape[1:],
        targets.dtype,
        first.y.shape[1:],
        label,
        client,
    )
    return _federation(found, targets.classes(), pieces)


def _federation(shards: Shards, classes: int | None, test: list[Piece]) -> Federation:
    x, y = shards.head(max(2, min(HEAD, HEAD_BYTES // shards.sample_bytes)))
    holdout = None
    if test:
        held_x = np.concatenate([piece.x for piece in test]).astype(shards.x, copy=False)
        held_y = np.concatenate([piece.y for piece in test]).astype(shards.y)
        holdout = Holdout(torch.from_numpy(held_x), torch.from_numpy(held_y))
    pixels = shards.x == np.uint8 and x.ndim == 4
    federation = Federation.on_disk(shards, torch.from_numpy(x), torch.from_numpy(y), classes, holdout, "folder")
    return replace(federation, preparation=Preparation(pixels))


def _open_shard(path: Path, label: str, client: str | None) -> tuple[Shard, Piece]:
    """A file without its samples: x has no rows, or is not kept."""
    with reading(path):
        stat = path.stat()
    if kind_of(path) != ".npz":
        piece = read_piece(path, label, client).by_client()
        return Shard(path, stat.st_size, stat.st_mtime_ns, len(piece.names), len(piece.y)), piece
    with reading(path):
        check_zip(path)
        with open_plain(path) as file, zipfile.ZipFile(file) as archive:
            members = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
            check_members(path, members)
            x, y = find_array(archive, file, "x", path), find_array(archive, file, "y", path)
            check_arrays(path, x, y)
            targets = read_array(archive, "y")
            offsets, names = (read_array(archive, n) if n in members else None for n in ("offsets", "names"))
        bounds, told = shard_clients(path, x.shape[0], offsets, names)
        owner = np.repeat(np.arange(len(told)), np.diff(bounds))
        piece = Piece(np.empty((0, *x.shape[1:]), x.dtype), targets, owner, told)
    slices = None if x.begin is None or y.begin is None else (x, y)
    return Shard(path, stat.st_size, stat.st_mtime_ns, len(told), x.shape[0], slices), piece


def _without_rows(piece: Piece) -> Piece:
    """What others are compared with."""
    return replace(piece, x=piece.x[:0].copy(), y=piece.y[:0].copy(), owner=piece.owner[:0], names=piece.names[:1])


@dataclass
class _Targets:
    """What all targets are, found file by file: the same as `own` and `Federation.build` find in one array."""

    floats: bool = False
    only_zeros_and_ones: bool = True
    largest: int | None = None
    smallest: int | None = None
    distinct: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    told: dict[str, bool] = field(default_factory=dict)  # does a set hold any target?

    def see(self, y: np.ndarray, what: str, path: Path) -> None:
        if y.dtype.kind not in "iuf":
            raise DataError(
                f"{path}: the targets are texts or truth values, which are only numbered once all of them were read; "
                "number them from 0, or leave lazy out"
            )
        self.floats = y.dtype.kind == "f"
        if self.floats:
            with np.errstate(over="ignore"):
                if not np.isfinite(y.astype(np.float32)).all():
                    raise DataError(f"{path}: the targets hold a NaN or an infinity")
            self.only_zeros_and_ones &= bool(np.isin(y, (0.0, 1.0)).all())
            if not self.only_zeros_and_ones:
                return
        elif y.size and len(self.distinct) < DISTINCT:
            self.distinct = np.union1d(self.distinct, y.astype(np.int64))
        told = y.astype(np.int64) if y.ndim == 1 else y[y != NO_TARGET].astype(np.int64)
        self.told[what] = self.told.get(what, False) or bool(told.size)
        if told.size:
            self.largest = max(int(told.max()), int(told.max()) if self.largest is None else self.largest)
            self.smallest = min(int(told.min()), int(told.min()) if self.smallest is None else self.smallest)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32 if self.floats and not self.only_zeros_and_ones else np.int64)

    def classes(self) -> int | None:
        """How many there are; None where the targets are no labels."""
        if self.dtype == np.float32:
            return None
        if self.largest is None or self.smallest is None or not all(self.told.values()):
            raise DataError("a set holds no target at all")
        few = not self.floats and len(self.distinct) < DISTINCT
        if few and self.distinct.max() > SPARSE * len(self.distinct):
            count = len(self.distinct)
            raise DataError(f"the labels go up to {self.distinct.max()}, but only {count} occur; number them from 0")
        return None if self.smallest < 0 else 1 + self.largest
