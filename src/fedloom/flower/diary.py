"""What a client remembers of a run, on its own disk.

Flower's own client state dies with the SuperNode, and every message may be answered by a new process. So what AdaBest,
SCAFFOLD and the like let a client remember is a file of the client's, one per run:

    <folder>/<run>/<client>.memory     a line of JSON with the checksum of the rest, then tensors

It is written beside, synced and renamed: whenever the process ends, the file holds what some Work left, whole. Each
value carries the number of the Work that wrote it. The server says which of these it has accepted; the client goes on
from that one and forgets those after it, which no server knows of: their answers came too late, or were lost with the
server's last rounds.
"""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fedloom.checkpoint import sync
from fedloom.errors import RunError
from fedloom.flower.wire import Order, Refused
from fedloom.memory import Memory
from fedloom.stages import State
from fedloom.untrusted import open_plain

LOG = logging.getLogger("fedloom")


class Diary:
    """One client's file, locked: whoever trains for it writes alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen, self.pages = self._read()

    @classmethod
    @contextmanager
    def open(cls, folder: Path, run: str, client: int) -> Iterator["Diary"]:
        own = folder / run
        try:
            own.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(own / f".{client}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunError(f"what the client remembers can't be kept in {own}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield cls(own / f"{client}.memory")
        finally:
            os.close(lock)

    def recall(self, order: Order, memory: Mapping[str, Memory]) -> bool:
        """Fill a memory with what the client is to go on from; False: that was lost, and it begins anew."""
        if (order.session, order.work) < self.seen:
            raise Refused(f"Work {order.work} is over: the server has asked for Work {self.seen[1]} since")
        pages = {key: _kept(self.pages.get(key), order) for key in memory}
        known = all(order.accepted in _works(page) for page in pages.values())
        if order.accepted >= 0 and not known:
            LOG.warning("what client %d remembered of Work %d is lost: it begins anew", order.client, order.accepted)
            return False
        for key, one in memory.items():
            page = pages[key]
            if page is None:
                continue
            try:
                one.take(page)
            except (KeyError, IndexError, ValueError, RuntimeError):
                raise RunError(f"{self.path} has another form than this method's; was it another model's?") from None
        return True

    def write(self, order: Order, memory: Mapping[str, Memory]) -> None:
        """Put on disk what the client knows now."""
        from safetensors.torch import save

        pages = {key: one.versions([order.client]) for key, one in memory.items()}
        tensors = {f"{key}//{name}": t.contiguous() for key, page in pages.items() for name, t in page.items()}
        content = save(tensors)
        head = {"sha256": hashlib.sha256(content).hexdigest(), "session": order.session, "work": order.work}
        beside = self.path.with_name(f".{self.path.name}.part")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(json.dumps(head).encode() + b"\n" + content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
            sync(self.path.parent)
        except OSError as error:
            raise RunError(f"what the client remembers can't be written to {self.path}: {error.strerror}") from None

    def _read(self) -> tuple[tuple[int, int], dict[str, State]]:
        """The last Work that was seen, as (session, Work), and what each stage knows."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            with open_plain(self.path, links=False) as file:
                head, content = json.loads(file.readline(1000)), file.read()
            if hashlib.sha256(content).hexdigest() != head["sha256"]:
                raise ValueError("it does not match its checksum")
            pages: dict[str, State] = {}
            for name, tensor in load(content).items():
                key, _, field = name.partition("//")
                pages.setdefault(key, {})[field] = tensor
            return (int(head["session"]), int(head["work"])), pages
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            LOG.warning("%s is damaged (%s)", self.path, error)
        return (0, -1), {}


def _works(page: State | None) -> list[int]:
    where: Any = [] if page is None else page["where"][:, 1].tolist()
    return list(where)


def _kept(page: State | None, order: Order) -> State | None:
    """What the server may still ask for: of all that it accepted, the newest before `settled`, and what came after."""
    if page is None:
        return None
    works = [w for w in _works(page) if w <= order.accepted]
    oldest = max((w for w in works if w < order.settled), default=-1)
    where: Tensor = page["where"][:, 1]
    keep = (where >= oldest) & (where <= order.accepted)
    return {name: values[keep] for name, values in page.items()}
