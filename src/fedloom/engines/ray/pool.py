"""The workers of a cluster: started, watched, replaced. One pool serves all runs of a session."""

import itertools
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from fedloom.engines.ray.connecting import connect, import_ray, last_line
from fedloom.engines.ray.worker import Worker
from fedloom.errors import RunError

LOG = logging.getLogger("fedloom")
STARTS = 60.0  # seconds that workers have to start
LOOKS = 2.0  # seconds between two looks at what the cluster has
EMPTY = 30.0  # seconds that a cluster without any worker is waited for
HEAD = 20.0  # seconds that a silent head node is waited for: a minute after its end, Ray ends every process
WATCH = 5.0  # seconds of waiting after which the head node is looked at


class Lost(Exception):
    """Workers have died; those who are left are the pool's members."""


@dataclass
class Member:
    """One worker."""

    number: int  # a replacement takes the number of who has died
    handle: Any
    node: str
    process: int
    uid: int  # no other worker has it, ever
    speed: float | None = None  # steps per second, as measured
    runs: set[int] = field(default_factory=set)  # that it is ready for


class Pool:
    """Workers, one per GPU or per core, or as many as were asked for."""

    def __init__(self, address: str | None, actors: int | None, gpus: bool) -> None:
        self.ray = import_ray()
        self.asked, self.address = actors, address
        self.owns = connect(self.ray, address)
        host, _, port = self.ray.get_runtime_context().gcs_address.rpartition(":")
        self.head = host.strip("[]"), int(port)
        self.headless = False  # its head node is gone
        has = self.ray.cluster_resources()
        self.gpus = gpus and has.get("GPU", 0) >= 1
        self.cores = 1
        if not self.gpus and actors:
            self.cores = max(1, int(has.get("CPU", 1) // actors))
        self.demand: dict[str, float] = {"num_gpus": 1, "num_cpus": 0} if self.gpus else {"num_cpus": self._cpus(has)}
        self.members: dict[int, Member] = {}
        self.starting: dict[int, tuple[Any, Any]] = {}  # handle, and what it will answer once it is there
        self.gone = False  # it had no worker for too long
        self.uids = itertools.count()
        self.looked = 0.0
        self.run = 0  # numbers given to runs
        self._start()

    def __str__(self) -> str:
        """The workers that are there, in words."""
        count, nodes = len(self.members), len({member.node for member in self.members.values()})
        kind = "a GPU" if self.gpus else "one core" if self.cores == 1 else f"{self.cores} cores"
        return f"{count} worker{'s' * (count > 1)} with {kind} each on {nodes} node{'s' * (nodes > 1)}"

    def _cpus(self, has: dict[str, float]) -> float:
        """Of Ray's cores; more workers than cores share them."""
        return min(1.0, has.get("CPU", 1.0) / self.asked) if self.asked and self.cores == 1 else float(self.cores)

    def _wanted(self) -> int:
        """As many as were asked for, or as the cluster has room for."""
        if self.asked:
            return self.asked
        has = self.ray.cluster_resources()
        return max(1, int(has.get("GPU", 0) if self.gpus else has.get("CPU", 1) // self.cores))

    def _start(self) -> None:
        deadline, full = time.monotonic() + STARTS, 0
        while len(self.members) < self._wanted() and full < 3 and time.monotonic() < deadline:
            self._spawn()
            self._admit(timeout=1.0)
            if not self.starting:  # others have the rest of the cluster
                full += 1
                time.sleep(0.2)
        if not self.members:
            raise RunError(
                f"no worker has started within {STARTS:.0f} s: the cluster has "
                f"{self.ray.cluster_resources()}, of which {self.ray.available_resources()} are free"
            )
        if len(self.members) < self._wanted():
            text = "%d of %d workers have started; the others join when there is room for them"
            LOG.warning(text, len(self.members), self._wanted())

    def _spawn(self) -> None:
        """Start what is missing, under the lowest numbers that are free, as far as there is room; or one at least."""
        actor = self.ray.remote(Worker)
        kind, each = ("GPU", 1.0) if self.gpus else ("CPU", self.demand["num_cpus"])
        room = int(self.ray.available_resources().get(kind, 0.0) / each + 1e-9) - len(self.starting)
        if not self.members and not self.starting:
            room = max(room, 1)
        missing = min(self._wanted() - len(self.members) - len(self.starting), room)
        number = 0
        while missing > 0:
            if number not in self.members and number not in self.starting:
                handle = actor.options(**self.demand, scheduling_strategy="SPREAD").remote(self.cores)
                self.starting[number] = (handle, handle.ready.remote())
                missing -= 1
            number += 1

    def _admit(self, timeout: float) -> None:
        """Take in the workers that have started."""
        if not self.starting:
            return
        numbers = {ref: number for number, (_, ref) in self.starting.items()}
        done, _ = self.ray.wait(list(numbers), num_returns=len(numbers), timeout=timeout)
        for ref in done:
            handle, _ = self.starting.pop(numbers[ref])
            try:
                node, process = self.ray.get(ref)
                self.members[numbers[ref]] = Member(numbers[ref], handle, node, process, next(self.uids))
            except self.ray.exceptions.RayError as error:
                if "ModuleNotFoundError" in str(error):
                    raise RunError(f"a node of the cluster can't import fedloom: {last_line(error)}") from None
                LOG.info("a worker did not start: %s", last_line(error))

    def look(self) -> None:
        """Replace who has died, and use what the cluster has gained; nobody is waited for."""
        if time.monotonic() - self.looked < LOOKS:
            return
        self.looked = time.monotonic()
        with self._cluster():
            self._spawn()
            self._admit(timeout=0)

    def alive(self) -> list[Member]:
        """The members in order; an empty cluster is waited for, but not for long."""
        deadline = time.monotonic() + (0.0 if self.gone else EMPTY)
        while not self.members:
            with self._cluster():
                self._spawn()
                self._admit(timeout=1.0)
            if not self.members and time.monotonic() > deadline:
                self.gone = True  # who asks again is not kept waiting
                raise RunError(f"the cluster has had no worker for {EMPTY:.0f} s; the run can be resumed")
        return [self.members[number] for number in sorted(self.members)]

    @contextmanager
    def _cluster(self) -> Iterator[None]:
        """A cluster that is gone is no fault of the run."""
        self._check_head()
        try:
            yield
        except (self.ray.exceptions.RaySystemError, ConnectionError, TimeoutError) as error:
            raise RunError(f"the cluster does not answer any more ({last_line(error)}); resume the run later") from None

    def _check_head(self) -> None:
        """Whoever asks Ray itself waits until the process is ended."""
        deadline = time.monotonic() + HEAD
        while True:
            try:
                socket.create_connection(self.head, timeout=WATCH).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    self.headless = True
                    raise RunError(
                        f"the cluster's head node at {self.head[0]}:{self.head[1]} does not answer any more "
                        f"({error.strerror or error}); resume the run when there is a cluster again"
                    ) from None
            time.sleep(0.5)

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """What was asked for, or `Lost`. An error of our own is raised as it was at the worker."""
        errors = self.ray.exceptions
        try:
            return self._waited(list(refs))
        except errors.RayTaskError as error:
            cause = error.cause
            if _is_lost(cause, errors):
                self._bury()
                raise Lost(_brief(cause)) from None
            if isinstance(cause, errors.RayError):  # what was sent can't be read there
                raise RunError(f"a worker can't go on: {last_line(cause)}") from None
            raise cause from None
        except errors.RayError as error:
            if not _is_lost(error, errors):
                raise RunError(f"the cluster has failed: {last_line(error)}") from None
            self._bury(getattr(error, "actor_id", None))
            raise Lost(_brief(error)) from None

    def _waited(self, refs: list[Any]) -> list[Any]:
        """However long it takes, as long as the cluster is there."""
        while True:
            with suppress(self.ray.exceptions.GetTimeoutError):
                found: list[Any] = self.ray.get(refs, timeout=WATCH)
                return found
            self._check_head()

    def _bury(self, actor_id: str | None = None) -> None:
        """Leave out the members that are no more: a dead one answers at once, with an error."""
        pings = {member.handle.ready.remote(): member for member in self.members.values()}
        done = self.ray.wait(list(pings), num_returns=len(pings), timeout=1.0)[0] if pings else []
        for ref in done:
            member = pings[ref]
            try:
                self.ray.get(ref)
            except self.ray.exceptions.RayError as error:
                LOG.warning("worker %d is gone (%s); its clients are trained elsewhere", member.number, _brief(error))
                self._drop(member)
        named = [m for m in self.members.values() if actor_id and m.handle._actor_id.hex() == actor_id]
        for member in named:  # unavailable, if not dead: it is not waited for
            LOG.warning("worker %d does not answer; its clients are trained elsewhere", member.number)
            self._drop(member)
        self.looked = 0.0

    def _drop(self, member: Member) -> None:
        self.members.pop(member.number, None)
        with suppress(Exception):
            self.ray.kill(member.handle)

    def close(self) -> None:
        """Let the workers go, and Ray too where it was started here."""
        for handle in [m.handle for m in self.members.values()] + [handle for handle, _ in self.starting.values()]:
            with suppress(Exception):
                if not self.headless:
                    self.ray.kill(handle)
        self.members.clear()
        self.starting.clear()
        if self.owns:
            self.ray.shutdown()


def _is_lost(error: BaseException, errors: Any) -> bool:
    """Is it a worker, or what lay there, that is no more?"""
    kinds = ("RayActorError", "ObjectLostError", "NodeDiedError", "WorkerCrashedError", "OutOfMemoryError")
    return isinstance(error, tuple(getattr(errors, kind) for kind in kinds if hasattr(errors, kind)))


def _brief(error: BaseException) -> str:
    """Ray tells much; what happened is enough."""
    return type(error).__name__


_OPEN: list[Pool] = []
_DEPTH = [0]


@contextmanager
def session() -> Iterator[None]:
    """Runs in it share their workers, which go when the outermost session ends."""
    _DEPTH[0] += 1
    try:
        yield
    finally:
        _DEPTH[0] -= 1
        if not _DEPTH[0]:
            close_pools()


def close_pools() -> None:
    while _OPEN:
        _OPEN.pop().close()


def pool_for(address: str | None, actors: int | None, gpus: bool) -> Pool:
    """The workers of this session: those that are there, if they are what is wanted."""
    for pool in _OPEN:
        if (pool.address, pool.asked) == (address, actors) and (gpus or not pool.gpus) and pool.ray.is_initialized():
            return pool
    close_pools()
    _OPEN.append(Pool(address, actors, gpus))
    return _OPEN[-1]
