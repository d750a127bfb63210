"""What clients remember between rounds.

Each value carries the number of the Work that wrote it, and older ones are kept: a Work reads the newest value that is
older than itself, and a Work that is played again overwrites what it wrote the first time. So a server that resumes
behind its clients does not apply a memory twice. Once a round is over, the newest value is enough.

Rows lie where there is room: on the device, then in the host's memory, then on disk.
"""

import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import RunError
from fedloom.stages import State

CHUNK = 1 << 28  # bytes that are asked for at once, at most
FIRST = 16  # slots to begin with; they double until a chunk is full


@dataclass
class Room:
    """Bytes that are left for what clients remember, in each place."""

    device: int = 1 << 62
    host: int = 1 << 62
    folder: Path | None = None  # for what fits into neither; None: that of temporary files

    def chunk(self, rows: int, like: Tensor) -> Tensor:
        """Memory for so many rows, in the nearest place where there is room."""
        size = rows * max(like.numel(), 1) * like.element_size()
        if size <= self.device:
            self.device -= size
            return torch.empty((rows, *like.shape), dtype=like.dtype, device=like.device)
        if like.is_cuda and size <= self.host:
            self.host -= size
            return torch.empty((rows, *like.shape), dtype=like.dtype, pin_memory=True)
        return self._on_disk(size, rows, like)

    def _on_disk(self, size: int, rows: int, like: Tensor) -> Tensor:
        """A file without a name: it is gone with the process, however that ends."""
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix="fedloom-memory-") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # now, not in the middle of a write
                flat = torch.from_file(file.name, shared=True, size=rows * max(like.numel(), 1), dtype=like.dtype)
        except OSError as error:
            raise RunError(
                f"what clients remember needs {size / 1e9:.2f} GB more than memory holds, and the disk can't take it: "
                f"{error}"
            ) from None
        return flat.reshape(rows, *like.shape)


@dataclass
class Slab:
    """Many values of one kind, each in a slot; it grows by chunks, and a freed slot is used again."""

    like: Tensor
    room: Room
    chunks: list[Tensor] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)  # first slot of each chunk
    near: bool = False  # the first chunk lies on the device

    @property
    def most(self) -> int:
        """Rows of the largest chunk."""
        return max(1, CHUNK // (max(self.like.numel(), 1) * self.like.element_size()))

    def grow(self, begin: int, rows: int) -> None:
        """New slots, from `begin` on: in a larger first chunk while it is small and may lie on the device, or in one
        more.
        """
        each = max(self.like.numel(), 1) * self.like.element_size()
        left = self.room.device
        if self.near and len(self.chunks) == 1 and begin + rows <= self.most and rows * each <= left:
            self.room.device += begin * each
            larger = self.room.chunk(begin + rows, self.like)
            larger[:begin] = self.chunks[0]
            self.chunks[0] = larger
        else:
            self.chunks.append(self.room.chunk(rows, self.like))
            self.begins.append(begin)
            self.near = len(self.chunks) == 1 and self.room.device < left

    def read(self, slots: Sequence[int]) -> Tensor:
        """[K, ...] on the device; a slot below 0 reads as zero."""
        found = self.like.new_zeros((len(slots), *self.like.shape))
        for chunk, places, there in self._parts(slots):
            values = chunk.index_select(0, there.to(chunk.device, non_blocking=True))
            if len(places) == len(slots):
                return values.to(found.device)
            found[places.to(found.device, non_blocking=True)] = values.to(found.device)
        return found

    def write(self, slots: Sequence[int], values: Tensor) -> None:
        for chunk, places, there in self._parts(slots):
            own = values if len(places) == len(slots) else values[places.to(values.device, non_blocking=True)]
            chunk.index_copy_(0, there.to(chunk.device, non_blocking=True), own.to(chunk))

    def _parts(self, slots: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Chunk by chunk: places among the slots, and places in the chunk."""
        wanted = np.asarray(slots, dtype=np.int64)
        at = np.searchsorted(np.asarray(self.begins), wanted, side="right") - 1
        for c in np.unique(at[wanted >= 0]).tolist():
            places = np.flatnonzero(at == c)
            yield self.chunks[c], torch.from_numpy(places), torch.from_numpy(wanted[places] - self.begins[c])


class Remembering(Protocol):
    """What a checkpoint needs of a memory, wherever it lies."""

    changed: set[int]

    @property
    def row_bytes(self) -> int: ...

    def known(self, w: int) -> set[int]: ...

    def saved(self, w: int) -> None: ...

    def tensors(self, clients: Sequence[int], w: int) -> State: ...

    def restore(self, pieces: Iterable[State]) -> None: ...


@dataclass
class Memory:
    """The memory of one client stage over all clients; a client that was never seen costs nothing and reads as zero."""

    fields: Mapping[str, Literal["row", "scalar"]]
    like: Tensor  # [P] where rows live and of what kind
    room: Room = field(default_factory=Room)
    _slabs: dict[str, Slab] = field(init=False)
    _slots: int = field(default=0, init=False)
    _free: list[int] = field(default_factory=list, init=False)
    _kept: dict[int, list[tuple[int, int]]] = field(default_factory=dict, init=False)  # by client: Works and slots
    _written: set[int] = field(default_factory=set, init=False)  # clients that wrote since the last round ended
    changed: set[int] = field(default_factory=set, init=False)  # clients that wrote since the last checkpoint

    def __post_init__(self) -> None:
        scalar = torch.zeros((), dtype=torch.float64)
        self._slabs = {n: Slab(scalar if kind == "scalar" else self.like, self.room) for n, kind in self.fields.items()}

    def read(self, clients: Tensor, w: int) -> State:
        """[K, P] or [K] tensors: what each client knew before Work w."""
        slots = [self._before(client, w) for client in clients.tolist()]
        return {name: slab.read(slots) for name, slab in self._slabs.items()}

    def write(self, clients: Tensor, w: int, values: State) -> None:
        slots = []
        for client in clients.tolist():
            kept = self._kept.setdefault(client, [])
            while kept and kept[-1][0] >= w:
                self._free.append(kept.pop()[1])
            kept.append((w, self._slot()))
            slots.append(kept[-1][1])
            self._written.add(client)
            self.changed.add(client)
        for name, slab in self._slabs.items():
            slab.write(slots, values[name])

    def settle(self) -> None:
        """A round is over: nothing before the newest value will be asked for again."""
        for client in self._written:
            kept = self._kept[client]
            self._free.extend(slot for _, slot in kept[:-1])
            del kept[:-1]
        self._written.clear()

    def known(self, w: int) -> set[int]:
        """The clients that knew something before Work w."""
        return {client for client, kept in self._kept.items() if kept and kept[0][0] < w}

    def saved(self, w: int) -> None:
        """What was known before Work w is in a checkpoint."""
        self.changed = {client for client in self.changed if self._kept[client][-1][0] >= w}

    def check_known(self, clients: Sequence[int], w: int) -> None:
        """Refuse to go on where something is missing: it would read as zero."""
        for client in clients:
            if self._before(client, w) < 0:
                raise RunError(f"what client {client} knew before Work {w} was lost; resume from the last checkpoint")

    @property
    def row_bytes(self) -> int:
        """What one client takes."""
        return sum(max(slab.like.numel(), 1) * slab.like.element_size() for slab in self._slabs.values())

    def tensors(self, clients: Sequence[int], w: int) -> State:
        """What clients knew before Work w, as plain tensors on the host; each must be among the `known`."""
        self.check_known(clients, w)
        slots = [self._before(client, w) for client in clients]
        wrote = [self._kept[client][bisect_right(self._kept[client], (w - 1, 1 << 62)) - 1][0] for client in clients]
        where = torch.tensor([*zip(clients, wrote, strict=True)], dtype=torch.int64).reshape(-1, 2)
        return {"where": where, **{f"value.{name}": slab.read(slots).cpu() for name, slab in self._slabs.items()}}

    def versions(self, clients: Sequence[int]) -> State:
        """All that is kept of some clients, as `tensors` gives the newest."""
        kept = [(client, w, slot) for client in clients for w, slot in self._kept.get(client, [])]
        where = torch.tensor([place[:2] for place in kept], dtype=torch.int64).reshape(-1, 2)
        slots = [slot for _, _, slot in kept]
        return {"where": where, **{f"value.{name}": slab.read(slots).cpu() for name, slab in self._slabs.items()}}

    def take(self, piece: State) -> None:
        """Remember what `tensors` or `versions` of another memory gave, beside what is known."""
        where = piece["where"]
        for w in sorted(set(where[:, 1].tolist())):
            of = (where[:, 1] == w).nonzero().flatten()
            self.write(where[of, 0], w, {name: piece[f"value.{name}"][of] for name in self._slabs})

    def forget(self, clients: Iterable[int] | None = None) -> None:
        """What some clients know; None: what all know."""
        for client in list(self._kept) if clients is None else clients:
            self._free.extend(slot for _, slot in self._kept.pop(client, []))
            self._written.discard(client)
            self.changed.discard(client)

    def restore(self, pieces: Iterable[State]) -> None:
        """Forget everything, and remember what `tensors` gave; a later piece wins."""
        self.forget()
        for piece in pieces:
            where = self.checked(piece)
            for client in where[:, 0].tolist():
                self._free.extend(slot for _, slot in self._kept.pop(client, []))
            slots = [self._slot() for _ in range(len(where))]
            self._kept |= {client: [(w, slot)] for (client, w), slot in zip(where.tolist(), slots, strict=True)}
            for name, slab in self._slabs.items():
                slab.write(slots, piece[f"value.{name}"])
        self.changed.clear()

    def checked(self, piece: State) -> Tensor:
        """Whose values these are; refused where they are not what `tensors` would have given."""
        where = piece.get("where", torch.empty(0))
        good = where.dtype == torch.int64 and where.dim() == 2 and where.shape[1] == 2 and bool((where >= 0).all())
        good = good and len(set(where[:, 0].tolist())) == len(where)
        for name, slab in self._slabs.items():
            value = piece.get(f"value.{name}")
            good = good and value is not None and value.shape == (len(where), *slab.like.shape)
        if not good:
            raise RunError("what clients remember has another form than this method's")
        return where

    def _slot(self) -> int:
        if not self._free:
            most = min(slab.most for slab in self._slabs.values())
            rows = min(max(self._slots, FIRST), most - self._slots if self._slots < most else most)
            for slab in self._slabs.values():
                slab.grow(self._slots, rows)
            self._free.extend(reversed(range(self._slots, self._slots + rows)))
            self._slots += rows
        return self._free.pop()

    def _before(self, client: int, w: int) -> int:
        """The slot of what a client knew before Work w; -1: it knew nothing."""
        kept = self._kept.get(client, [])
        i = bisect_right(kept, (w - 1, 1 << 62))
        return kept[i - 1][1] if i else -1
