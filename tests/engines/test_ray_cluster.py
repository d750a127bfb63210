"""A cluster of several nodes: nodes die, come and vanish in the middle of a run, and its result stays the same bits."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.engines.ray import session
from tests.engines.test_vector import dense, federation

ray = pytest.importorskip("ray", reason="needs the extra ray")

from ray.cluster_utils import Cluster  # noqa: E402

from fedloom.engines.ray import engine as engines  # noqa: E402
from fedloom.engines.ray import pool as pools  # noqa: E402
from fedloom.engines.ray.engine import Ray  # noqa: E402
from fedloom.engines.ray.keeping import Keeping  # noqa: E402
from fedloom.engines.ray.wire import whole_classes  # noqa: E402

pytestmark = pytest.mark.long

METHODS = {"stateful": "adabest+scaffold+fedglad+dgt(alpha=0.5)", "stateless": "fedprox(mu=0.1)"}
ROUNDS = 8


@pytest.fixture(autouse=True)
def _rows_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "WHOLE", 0)


class Nodes:
    """A head without workers, and nodes of one core each, all with processes of their own."""

    def __init__(self) -> None:
        self.cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.killed = 0

    def add(self, count: int = 1) -> list[str]:
        return [self.cluster.add_node(num_cpus=1).node_id for _ in range(count)]

    def pull_the_plug(self, node: str) -> None:
        """All processes of a node end at once."""
        workers = [m.process for pool in pools._OPEN for m in pool.members.values() if m.node == node]
        (found,) = [one for one in self.cluster.worker_nodes if one.node_id == node]
        for process in workers:
            os.kill(process, signal.SIGKILL)
        self.cluster.remove_node(found, allow_graceful=False)
        self.killed += 1

    def fit(self, method: str, **options: Any) -> fl.Result:
        settings: dict[str, Any] = {"rounds": ROUNDS, "clients_per_round": 12, **options}
        local = fl.Local(epochs=2, batch_size=8, lr=0.1)
        where = {"engine": "ray-loop", "ray_address": self.cluster.address}
        data = federation(sizes=[*range(0, 105, 5)])
        return fl.fit(dense(torch.float32), data, method, local=local, **where, **settings)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    ray.shutdown()
    found.cluster.shutdown()


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The nodes whose workers answered with clients that they had trained."""
    found: set[str] = set()
    take = Ray._take

    def taken(self: Ray, out: Any, at: Any, share: Any) -> list[int]:
        again = take(self, out, at, share)
        found.update(set() if again else {share.member.node})
        return again

    monkeypatch.setattr(Ray, "_take", taken)
    return found


def once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[Ray], None], w: int) -> None:
    """Something happens when this method is called for the first time after a Work has gone out."""
    method, armed = getattr(owner, name), [True]

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine: Ray = self if isinstance(self, Ray) else self.engine
        ready = True in engine.out and engine.out[True].work.w == w and (self is engine or self.copies)
        if armed[0] and ready:
            armed[0] = False
            act(engine)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, called)


def wait_for_a_worker_on(node: str) -> None:
    (pool,) = pools._OPEN
    pool._bury()  # whoever has nothing to do may be dead for a while before somebody sees it
    deadline = time.monotonic() + 60
    while node not in {member.node for member in pool.members.values()}:
        assert time.monotonic() < deadline, "nobody uses the new node"
        pool.looked = 0.0
        pool.look()
        time.sleep(0.05)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_nodes_die_in_the_middle_of_a_round(
    method: str, nodes: Nodes, trained_on: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a share, with rows, with memories on their way; after each death a new node joins, and is used."""
    nodes.add(3)
    quiet = nodes.fit(method)
    added: list[str] = []

    def die(engine: Ray) -> None:
        nodes.pull_the_plug(engine.pool.alive()[nodes.killed % 3].node)

    def join(event: fl.Event) -> None:
        if len(added) < nodes.killed:
            added.extend(nodes.add())
            wait_for_a_worker_on(added[-1])

    once(monkeypatch, Ray, "_take", die, w=1)
    once(monkeypatch, Ray, "total", die, w=3)
    if method == METHODS["stateful"]:
        once(monkeypatch, Keeping, "secure", die, w=5)
    else:
        once(monkeypatch, Ray, "total", die, w=5)
    disturbed = nodes.fit(method, callbacks=[join])
    assert nodes.killed == 3
    assert set(added) <= trained_on
    assert torch.equal(disturbed.params, quiet.params)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_cluster_that_shrinks_goes_on(method: str, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.add(3)
    quiet = nodes.fit(method)

    def die(engine: Ray) -> None:
        nodes.pull_the_plug(engine.pool.alive()[0].node)

    once(monkeypatch, Ray, "total", die, w=2)
    once(monkeypatch, Ray, "_take", die, w=4)
    disturbed = nodes.fit(method)
    assert (nodes.killed, len(nodes.cluster.worker_nodes)) == (2, 1)
    assert torch.equal(disturbed.params, quiet.params)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_cluster_without_nodes_ends_the_run(
    method: str, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In bounded time, and with a checkpoint that another day's nodes go on from."""
    nodes.add(2)
    quiet = nodes.fit(method)
    monkeypatch.setattr(pools, "EMPTY", 5.0)

    def die(engine: Ray) -> None:
        for member in engine.pool.alive():
            nodes.pull_the_plug(member.node)

    once(monkeypatch, Ray, "_take", die, w=4)
    began = time.monotonic()
    with pytest.raises(fl.RunError, match=r"the cluster has had no worker|remembers was lost"):
        nodes.fit(method, checkpoint=tmp_path, checkpoint_every=1)
    assert time.monotonic() - began < 60
    nodes.add(1)
    resumed = nodes.fit(method, checkpoint=tmp_path, resume=True)
    assert torch.equal(resumed.params, quiet.params)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_head_node_that_dies_ends_the_run(
    method: str, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before Ray ends the process, a minute later."""
    nodes.add(2)
    quiet = nodes.fit(method)
    monkeypatch.setattr(pools, "HEAD", 3.0)
    died: list[float] = []

    def die(event: fl.Event) -> None:
        if event.round == 4:
            nodes.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
            died.append(time.monotonic())
            time.sleep(pools.LOOKS)  # the next round looks at the cluster

    with pytest.raises(fl.RunError, match=r"head node at .* does not answer any more"):
        nodes.fit(method, checkpoint=tmp_path, checkpoint_every=1, callbacks=[die])
    assert time.monotonic() - died[0] < 30
    assert not ray.is_initialized()
    nodes.cluster.shutdown()
    other = Nodes()
    try:
        other.add(1)
        resumed = other.fit(method, checkpoint=tmp_path, resume=True)
    finally:
        other.cluster.shutdown()
    assert torch.equal(resumed.params, quiet.params)


RUN = ["--clients", "12", "--per-round", "6", "--model", "mlp(hidden=[300])", "--epochs", "6", "--batch-size", "8"]
RUN += ["--rounds", "6", "--method", METHODS["stateful"], "--engine", "ray-loop", "--actors", "2"]


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """`fedloom run` in a process group of its own, as a terminal has it."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "STARTED_BY": str(folder)}
    command = [sys.executable, "-m", "fedloom", "run", *RUN, "--out", str(folder), *more]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, start_new_session=True, **pipes)


def left_of(folder: Path) -> list[str]:
    """Processes that a run has started, and that are still there."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"STARTED_BY={folder}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append((place / "cmdline").read_text())
    return found


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = start(folder)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_stop_it_saves_and_leaves_nobody_behind(
    number: signal.Signals, whole_run: bytes, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(folder, "--checkpoint-every", "1000")
    lines = folder / "metrics.jsonl"
    while not lines.exists() or lines.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(0.1)  # into the next round
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # all of Ray's processes hear it, too
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    said = "interrupted" if number == signal.SIGINT else "terminated"
    first, *progress, last = err.splitlines()
    assert first.startswith("2 workers with one core each on 1 node")
    assert all(line.startswith("adabest") for line in progress)
    assert last == f"fedloom: {said}; continue with --resume"
    deadline = time.monotonic() + 10
    while left_of(folder):
        assert time.monotonic() < deadline, left_of(folder)
        time.sleep(0.1)
    again = start(folder, "--resume")
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert (folder / "model.safetensors").read_bytes() == whole_run


def memory_of(process: int | str) -> dict[str, int]:
    """Bytes by kind, as the system counts them."""
    lines = [line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) == 3 and line[2] == "kB"}


def measure(node_total: float) -> dict[str, int]:
    """What processes have for themselves, and what the object store holds."""
    (pool,) = pools._OPEN
    found = {f"worker {m.number}": memory_of(m.process)["RssAnon"] for m in pool.alive()}
    used = node_total - ray.available_resources().get("object_store_memory", 0.0)
    return {"driver": memory_of("self")["RssAnon"], **found, "store": int(used)}


def test_memory_stays_flat_over_500_rounds() -> None:
    seen: dict[int, dict[str, int]] = {}

    def look(event: fl.Event) -> None:
        if event.round in (100, 500):
            time.sleep(1.5)  # the store's use is told once a second
            seen[event.round] = measure(ray.cluster_resources()["object_store_memory"])

    wide = nn.Sequential(nn.Linear(6, 6000), nn.Tanh(), nn.Linear(6000, 3))
    options: dict[str, Any] = {"local": fl.Local(steps=2, batch_size=8, lr=0.01), "eval_every": 500}
    with session():
        method = "adabest+scaffold+dgt(alpha=0.5)"
        fl.fit(wide, federation(), method, rounds=500, engine="ray", actors=2, callbacks=[look], **options)
    for what, early in seen[100].items():
        sys.stdout.write(f"{what}: {early / 1e6:.1f} MB after 100 rounds, {seen[500][what] / 1e6:.1f} MB after 500\n")
        assert seen[500][what] < early + 20e6, what


CLIENTS, ROWS, WIDTH, FILES = 100_000, 4, 256, 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 410 MB in all."""
    place = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(WIDTH, 3)).astype(np.float32)
    each = CLIENTS // FILES
    for f in range(FILES):
        x = rng.normal(size=(each * ROWS, WIDTH)).astype(np.float32)
        offsets = np.arange(0, each * ROWS + 1, ROWS)
        np.savez(place / f"part-{f:03d}.npz", x=x, y=(x @ truth).argmax(1), offsets=offsets)
    return place


def limit_memory(worker: Any, more: int) -> None:
    """The process gets so much more than it has, and not a byte beyond."""
    most = memory_of("self")["VmData"] + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def takes_all(worker: Any, size: int) -> bool:
    try:
        return bool(np.ones(size, dtype=np.uint8).all())
    except MemoryError:
        return False


def test_more_data_than_a_worker_may_hold(folder: Path) -> None:
    """The kernel refuses a worker more than a third of the data; it trains them all the same."""
    data = fl.Federation.from_folder(folder, lazy=True)
    size = CLIENTS * ROWS * WIDTH * 4
    assert len(data) == CLIENTS
    assert sum(path.stat().st_size for path in folder.iterdir()) > size
    seen: dict[int, dict[str, int]] = {}

    def look(event: fl.Event) -> None:
        if event.round in (5, 40):
            seen[event.round] = measure(ray.cluster_resources()["object_store_memory"])

    options: dict[str, Any] = {"clients_per_round": 2000, "local": fl.Local(epochs=1, batch_size=4, lr=0.1)}
    options |= {"engine": "ray", "actors": 2, "eval_every": 40}
    with session():
        fl.fit(nn.Linear(WIDTH, 3), data, rounds=1, **options)
        (pool,) = pools._OPEN
        with whole_classes(ray, [limit_memory]):
            ray.get([m.handle.__ray_call__.remote(limit_memory, size // 3) for m in pool.alive()])
            assert not any(ray.get([m.handle.__ray_call__.remote(takes_all, size) for m in pool.alive()]))
        before = [m.process for m in pool.alive()]
        result = fl.fit(nn.Linear(WIDTH, 3), data, rounds=40, callbacks=[look], **options)
        assert [m.process for m in pool.alive()] == before  # nobody had to be replaced
    assert result.history[-1]["train_loss"] < 0.5 * result.history[0]["train_loss"]
    for what, early in seen[5].items():
        sys.stdout.write(f"{what}: {early / 1e6:.1f} MB after 5 rounds, {seen[40][what] / 1e6:.1f} MB after 40\n")
        assert seen[40][what] < early + 40e6, what
