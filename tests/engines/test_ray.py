"""The cluster equals one machine: every method, whatever is killed. All on a real local Ray with real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.engines.ray import session
from tests.engines.test_vector import LOCALS, apart, dense, federation
from tests.examples import METHODS

ray = pytest.importorskip("ray", reason="needs the extra ray")

from fedloom.engines.ray import connecting  # noqa: E402
from fedloom.engines.ray import engine as engines  # noqa: E402
from fedloom.engines.ray import pool as pools  # noqa: E402
from fedloom.engines.ray.engine import Ray  # noqa: E402
from fedloom.engines.ray.keeping import Keeping  # noqa: E402

STACK = "adabest+fedglad+dgt(alpha=0.5)"
NOT_COMPARED = {"seconds", "cluster_bytes"}


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    """Two workers for all tests of this file; runs in a session share them."""
    with session():
        yield


@pytest.fixture(autouse=True)
def _nothing_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "WHOLE", 0)


def fit(method: str, engine: str = "ray-loop", model: nn.Module | None = None, **options: Any) -> fl.Result:
    settings = {"rounds": 5, "clients_per_round": 5, "local": LOCALS["plain"], **options}
    if method == "scaffold-m":
        settings["local"] = fl.Local(steps=3, batch_size=8, lr=0.1)
    if engine.startswith("ray"):
        settings.setdefault("actors", 2)
    return fl.fit(model or dense(), settings.pop("data", federation()), method, engine=engine, **settings)


def check_same(ray_run: fl.Result, other: fl.Result, most: float = 1e-9) -> None:
    assert apart(ray_run.params, other.params) < most
    for a, b in zip(ray_run.history, other.history, strict=True):
        assert a.keys() - NOT_COMPARED == b.keys() - NOT_COMPARED
        for name in b.keys() - NOT_COMPARED:
            np.testing.assert_allclose(np.array(a[name], float), np.array(b[name], float), 1e-6, 1e-9, err_msg=name)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often rows were brought together."""
    calls: list[str] = []
    fetch = Ray.fetch

    def counted(self: Ray, asked: Any) -> Tensor:
        calls.append(asked.name)
        return fetch(self, asked)

    monkeypatch.setattr(Ray, "fetch", counted)
    return calls


def all_alike() -> None:
    """Workers whose speed nobody has measured get equal shares; they outlive a test, and so does what it measured."""
    for pool in pools._OPEN:
        for member in pool.alive():
            member.speed = None


def reads_rows(method: str) -> bool:
    return any(part.stage.reads_rows for part in fl.Method(method).pipeline().parts)


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=() if i % 3 == 0 or m is METHODS[-1] else pytest.mark.long) for i, m in enumerate(METHODS)],
)
def test_every_method(method: str, fetched: list[str]) -> None:
    check_same(fit(method), fit(method, "loop"))
    assert not fetched  # what is not declared to read rows was computed from sums


DECLARED = [method for method in METHODS if reads_rows(method)]


@pytest.mark.parametrize("method", DECLARED)
def test_what_reads_rows_says_so(method: str, fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = Ray.__init__

    def undeclared(self: Ray, pool: Any, brief: Any, data: Any, setup: Any, reads_rows: bool) -> None:
        made(self, pool, brief, data, setup, reads_rows=False)

    monkeypatch.setattr(Ray, "__init__", undeclared)
    check_same(fit(method, rounds=2), fit(method, "loop", rounds=2))
    assert fetched


def test_few_bytes_come_at_once_and_give_the_loop_s_own_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "WHOLE", 1 << 20)
    assert torch.equal(fit(STACK).params, fit(STACK, "loop").params)


@pytest.mark.parametrize("engine", ["ray-loop", "ray-vector"])
def test_the_same_bits_every_time(engine: str) -> None:
    runs = [fit(STACK, engine, model=dense(torch.float32)) for _ in range(2)]
    assert torch.equal(runs[0].params, runs[1].params)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


SITUATIONS: dict[str, dict[str, Any]] = {
    "vector": {"engine": "ray-vector"},
    "batch norm": {"model": Normed(), "data": federation(sizes=[0, 7, 20, 22, 54, 61, 64, 91])},
    "absent": {"availability": 0.6, "dropout_rate": 0.2},
    "diverged": {"local": fl.Local(epochs=2, batch_size=8, lr=1e160)},
    "diagnosed": {"diagnose": "gsi,similarity,divergence,twin,fairness,probe"},
    "rates": {"method": "linear+scaffold"},
    "twice": {"method": "md+adabest+krum(byzantine=0)"},
    "label flip": {"method": "attack(kind=label-flip, fraction=0.5)+scaffold"},
}


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_every_situation(situation: dict[str, Any]) -> None:
    options = dict(situation)
    method, engine = options.pop("method", STACK), options.pop("engine", "ray-loop")
    check_same(fit(method, engine, **options), fit(method, engine.removeprefix("ray-"), **options), most=1e-6)


def test_updates_are_read_in_callbacks_or_not_at_all() -> None:
    kept: list[Any] = []
    shapes: list[tuple[int, ...]] = []

    def look(event: fl.Event) -> None:
        assert event.updates is not None
        shapes.append(tuple(event.updates.rows.matrix.shape))
        kept.append(event.updates.rows.scaled(torch.ones(5)))

    fit("fedavg", rounds=2, callbacks=[look])
    assert shapes == [(5, 83), (5, 83)]
    with pytest.raises(fl.RunError, match="no longer at the workers"):
        _ = kept[0].matrix


def test_sums_move_less_than_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 clients: two workers send two sums in float64, or twenty rows."""
    data = federation(sizes=[3 * k for k in range(21)])
    wide = nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 3)).double()
    options: dict[str, Any] = {"data": data, "model": wide, "clients_per_round": 20, "rounds": 1}
    moved = []
    for method in ("fedavg", "median"):
        all_alike()
        moved.append(fit(method, **options).history[-1]["cluster_bytes"])
    sums, rows = moved
    size = 8 * sum(p.numel() for p in wide.parameters())
    assert 4 * size <= sums < 4.5 * size  # the model down and a sum up, for each worker
    assert 22 * size <= rows < 22.5 * size


class Killer:
    """Ends workers by SIGKILL at chosen moments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.killed = 0

    def before(self, owner: Any, name: str, *, when: Callable[..., bool]) -> None:
        """One worker dies when this method is called for the first time with arguments that `when` likes."""
        method, armed = getattr(owner, name), [True]

        def called(one: Any, *args: Any, **kwargs: Any) -> Any:
            if armed[0] and when(one, *args):
                armed[0] = False
                self.kill(one if isinstance(one, Ray) else one.engine)
            return method(one, *args, **kwargs)

        self.monkeypatch.setattr(owner, name, called)

    def kill(self, engine: Ray) -> None:
        member = engine.pool.alive()[self.killed % 2]
        os.kill(member.process, signal.SIGKILL)
        self.killed += 1
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{member.process}") and time.monotonic() < deadline:
            time.sleep(0.01)


def everybody_is_there(event: fl.Event | None = None) -> None:
    """Wait for whoever replaces the dead, so that there is another to be killed."""
    (pool,) = pools._OPEN
    while len(pool.members) < 2:
        pool.looked = 0.0
        pool.look()
        time.sleep(0.05)


@pytest.mark.long
def test_whoever_dies_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is killed with a share, with rows, and with memories on their way: the result is that of a quiet run."""
    method = "adabest+scaffold+fedglad+dgt(alpha=0.5)"
    quiet = fit(method, rounds=8, model=dense(torch.float32))
    killer = Killer(monkeypatch)
    killer.before(Ray, "_take", when=lambda engine, out, *rest: out.work.w == 1)
    killer.before(Ray, "total", when=lambda engine, *rest: engine.out[True].work.w == 3)
    killer.before(Keeping, "secure", when=lambda keeping: bool(keeping.copies) and keeping.engine.out[True].work.w == 5)
    disturbed = fit(method, rounds=8, model=dense(torch.float32), callbacks=[everybody_is_there])
    assert killer.killed == 3
    assert torch.equal(disturbed.params, quiet.params)


@pytest.mark.long
def test_the_same_bits_on_any_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker, two, and five, whose sums are added up by one another in a tree."""
    added: list[int] = []
    tree = Ray._tree

    def counted(self: Ray, sums: list[Any]) -> list[Any]:
        found = tree(self, sums)
        added.append(len(sums) - len(found))
        return found

    monkeypatch.setattr(engines, "FAN", 2)
    monkeypatch.setattr(Ray, "_tree", counted)
    runs = [fit("scaffold+fedglad", model=dense(torch.float32), actors=actors) for actors in (1, 2, 5)]
    assert torch.equal(runs[0].params, runs[1].params)
    assert torch.equal(runs[0].params, runs[2].params)
    assert max(added) == 3  # five sums, then three, then two


@pytest.mark.long
def test_a_share_that_is_trained_twice_is_remembered_where_it_was_trained_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three workers one dies with rows whose memories are copied already: the second home must not forget them."""
    method = "adabest+scaffold+fedglad+dgt(alpha=0.5)"
    options: dict[str, Any] = {"rounds": 6, "clients_per_round": 6, "model": dense(torch.float32)}
    quiet = fit(method, **options, actors=3)
    killer = Killer(monkeypatch)
    killer.before(Ray, "total", when=lambda engine, *rest: engine.out[True].work.w == 1)
    assert torch.equal(fit(method, **options, actors=3).params, quiet.params)
    assert killer.killed == 1


@pytest.mark.long
def test_a_worker_that_dies_while_memories_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkpoint reads them, and a run that resumes puts them back: both from, or to, whoever is left."""
    whole = fit(STACK, rounds=4)
    killer = Killer(monkeypatch)
    killer.before(Keeping, "_read", when=lambda keeping, *rest: True)
    killer.before(Keeping, "_restore", when=lambda keeping, *rest: True)
    fit(STACK, rounds=2, checkpoint=tmp_path)
    assert killer.killed == 1
    everybody_is_there()
    resumed = fit(STACK, rounds=4, checkpoint=tmp_path, resume=True)
    assert killer.killed == 2
    assert torch.equal(resumed.params, whole.params)


class Fatal(nn.Linear):
    """Its weights can't be taken to another process: that one ends."""

    home: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if os.getpid() != self.home:
            os._exit(1)


@pytest.mark.long
def test_workers_that_die_as_soon_as_they_begin() -> None:
    model = Fatal(6, 3).double()
    model.home = os.getpid()
    with pytest.raises(fl.RunError, match="die as soon as they are given the run"):
        fit("fedavg", model=model)


def test_a_run_is_resumed_anywhere(tmp_path: Path) -> None:
    whole = fit(STACK, "loop", rounds=6)
    for first, second in (("ray-loop", "loop"), ("loop", "ray-loop"), ("ray-loop", "ray-loop")):
        folder = tmp_path / f"{first}-{second}"
        fit(STACK, first, rounds=3, checkpoint=folder)
        resumed = fit(STACK, second, rounds=6, checkpoint=folder, resume=True)
        assert apart(resumed.params, whole.params) < 1e-9
        assert len(resumed.history) == 6


def test_samples_on_disk(tmp_path: Path) -> None:
    """Workers read the clients that they train; the result is that of samples in memory."""
    data = federation()
    for shard, clients in enumerate(([0, 1, 2], [3, 4], [5, 6])):
        pairs = [data.client(k) for k in clients]
        offsets = np.cumsum([0, *(len(y) for _, y in pairs)])
        x, y = (torch.cat([pair[i] for pair in pairs]).numpy() for i in (0, 1))
        np.savez(tmp_path / f"{shard}.npz", x=x, y=y, offsets=offsets)
    lazy = fl.Federation.from_folder(tmp_path, lazy=True)
    here = fl.Federation.from_folder(tmp_path)
    for method in ("fedavg", "adabest+krum(byzantine=0)"):
        check_same(fit(method, data=lazy, rounds=3), fit(method, "loop", data=here, rounds=3))


def test_a_slow_worker_gets_less() -> None:
    shares: list[list[int]] = []

    def slow(event: fl.Event) -> None:
        (pool,) = pools._OPEN
        first, second = pool.alive()
        first.speed, second.speed = 10.0, 40.0  # as if they had been measured
        assert event.updates is not None
        where = event.updates.rows.engine.out[True].where  # type: ignore[attr-defined]
        shares.append([list(where.values()).count(member.uid) for member in (first, second)])

    data = federation(sizes=[4 * k for k in range(21)])
    fit("fedavg", rounds=1, callbacks=[everybody_is_there])
    all_alike()
    fit("fedavg", rounds=2, data=data, clients_per_round=20, callbacks=[slow])
    assert shares == [[10, 10], [4, 16]]


@pytest.mark.long
def test_a_worker_that_is_really_slow() -> None:
    """One worker is stopped three quarters of the time: its part shrinks, whatever it was."""
    shares: list[int] = []
    over = threading.Event()

    def watch(event: fl.Event) -> None:
        (pool,) = pools._OPEN
        assert event.updates is not None
        where = event.updates.rows.engine.out[True].where  # type: ignore[attr-defined]
        shares.append(list(where.values()).count(pool.alive()[0].uid))

    def hinder(process: int) -> None:
        while not over.is_set():
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.03)
            os.kill(process, signal.SIGCONT)
            time.sleep(0.01)

    fit("fedavg", rounds=1, callbacks=[everybody_is_there])
    thread = threading.Thread(target=hinder, args=(pools._OPEN[0].alive()[0].process,))
    thread.start()
    try:
        data = federation(sizes=[4 * k for k in range(21)])
        local = fl.Local(epochs=60, batch_size=1, lr=0.001)
        fit("fedavg", rounds=10, data=data, local=local, clients_per_round=20, callbacks=[watch])
    finally:
        over.set()
        thread.join()
    assert max(shares[-3:]) <= 7  # of twenty; four would be even


def test_an_error_of_a_worker_is_told_as_it_is() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(outputs) == 8:
            raise ValueError("this loss does not like eights")
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(ValueError, match="does not like eights"):
        fit("fedavg", loss=loss)
    fit("fedavg", rounds=1)  # the workers are still there


def test_what_can_t_be_sent_is_named() -> None:
    lock = Lock()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        with lock:
            return nn.functional.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(fl.ConfigError, match=r"the loss can't be sent to workers: cannot pickle '_thread.lock' object"):
        fit("fedavg", loss=loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "loop", "actors": 2}, "ray_address and actors are for engine=ray"),
        ({"engine": "ray", "actors": 0}, "actors must be a whole number of at least 1"),
        ({"engine": "ray", "ray_address": ""}, "ray_address must be 'auto' or a text"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fl.ConfigError, match=message):
        fl.fit(dense(), federation(), **options)


def outside(code: str) -> tuple[str, float]:
    """What a process of its own prints, and how long it takes."""
    lines = ["import torch, fedloom as fl", "from torch import nn", "x = torch.randn(4, 3)", code]
    data = "fl.Federation.from_arrays([(x, [0, 1, 0, 1])])"
    env = {**os.environ, "PYTHONPATH": str(Path(fl.__file__).parent.parent)}
    began = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines).replace("DATA", data)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    return (run.stdout + run.stderr).strip(), time.monotonic() - began


def test_without_ray() -> None:
    code = "import sys; sys.modules['ray'] = None\nfl.fit(nn.Linear(3, 2), DATA, engine='ray')"
    said, _ = outside(code)
    assert said.endswith("engine=ray needs Ray, the extra `ray`: pip install 'fedloom[ray]'")


@pytest.mark.parametrize("address", ["127.0.0.1:1", pytest.param("nobody.invalid:6379", marks=pytest.mark.long)])
def test_an_address_where_nobody_is(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "ANSWERS", 3.0)
    with pytest.raises(fl.RunError, match=f"no Ray cluster answers at {address}"):
        connecting.check_address(address)


@pytest.mark.parametrize(
    ("meant", "kind", "message"),
    [
        ("ray://127.0.0.1:10001", fl.ConfigError, "RAY_ADDRESS='ray://127.0.0.1:10001': start the run on a node"),
        ("127.0.0.1:1", fl.RunError, "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_auto_is_what_the_environment_says(
    meant: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to itself, Ray would try for half a minute or longer, and not be usable again in this process."""
    monkeypatch.setenv("RAY_ADDRESS", meant)
    monkeypatch.setattr(connecting, "ANSWERS", 3.0)
    with pytest.raises(kind, match=message):
        connecting.check_address("auto")


def test_the_wait_for_an_address_is_short() -> None:
    assert connecting.ANSWERS <= 25
