"""What makes runs fast on a GPU changes no result: graphs, compiled steps, pieces, lockstep, memory elsewhere."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.engines.vector import Vector
from fedloom.errors import RunError
from fedloom.lockstep import run_together
from fedloom.memory import Memory, Room
from fedloom.models.catalogue import Shape
from fedloom.training import Training
from tests.examples import STACK
from tests.models.making import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OFFSETS = [0, 90, 130, 170, 175, 265, 300, 340]  # sizes 90, 40, 40, 5, 90, 35, 40
LOCAL = fl.Local(epochs=2, batch_size=16, lr=0.05, momentum=0.5)


def pictures() -> fl.Federation:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (OFFSETS[-1], 3, 16, 16), generator=generator).byte()
    y = torch.randint(0, 5, (OFFSETS[-1],), generator=generator)
    return fl.Federation.from_tensor(x, y, OFFSETS, test=(x, y)).images((0.5,) * 3, (0.3,) * 3, augment="crop+flip")


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 8, 5), *([nn.BatchNorm2d(8)] if norm else []), nn.ReLU(), nn.MaxPool2d(2)]
    layers = [*first, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 5)]
    return nn.Sequential(*layers).double()


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.cpu() - b.cpu()).norm() / b.cpu().norm())


@pytest.mark.parametrize(
    ("method", "norm"), [("fedavg", True), ("fedavg", False), ("adabest+fedprox(mu=0.1)", False), (STACK, False)]
)
def test_loop_graph_and_compiled_agree(method: str, norm: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Unequal sizes, short batches, dropout and augmentation by key."""
    settings: dict[str, Any] = {"rounds": 4, "clients_per_round": 6, "local": LOCAL, "device": "cuda"}
    if norm:
        settings["local"] = fl.Local(epochs=2, batch_size=16, lr=0.05, last_batch="bootstrap")
    loop, graph, compiled = (
        fl.fit(network(norm), pictures(), method, engine=engine, compile=way, precision="fp32", **settings)
        for engine, way in (("loop", None), ("vector", False), ("vector", True))
    )
    assert "torch.compile" not in caplog.text
    assert apart(graph.params, loop.params) < 1e-9
    assert apart(compiled.params, loop.params) < 1e-9


def test_every_recording_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """As in long runs: also for the clients that go on when most have finished."""
    settings: dict[str, Any] = {"rounds": 3, "clients_per_round": 7, "local": LOCAL, "device": "cuda"}
    plain = fl.fit(network(), pictures(), "fedavg", engine="loop", **settings)
    run = Training(network(), pictures(), "fedavg", engine="vector", compile=True, **settings)
    engine = run.simulation.engine
    assert isinstance(engine, Vector)
    engine.gains = lambda rows, width, room: True
    found = run.run()
    assert len({rows for cohort in engine.kept for rows, _ in cohort.recorded}) >= 3
    assert "torch.compile" not in caplog.text
    assert apart(found.params, plain.params) < 1e-9


@pytest.mark.parametrize("name", ["char-lstm(hidden=8)", "bilstm(hidden=8, dropout=0.2)"])
def test_recurrent_nets_of_a_cohort(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, top, shape, generator=generator) for top, shape in ((20, (340, 9)), (5, (340,))))
    data = fl.Federation.from_tensor(x, y, OFFSETS, test=(x, y), classes=5)
    model = make(name, Shape((9,), 5, tokens=20)).double()
    settings: dict[str, Any] = {"rounds": 4, "clients_per_round": 6, "local": LOCAL, "device": "cuda"}
    loop, vector = (fl.fit(model, data, engine=engine, precision="fp32", **settings) for engine in ("loop", "vector"))
    assert apart(vector.params, loop.params) < 1e-9


def test_memory_that_really_runs_out(caplog: pytest.LogCaptureFixture) -> None:
    """A few hundred megabytes are left for a cohort that wants gigabytes: it is halved until it fits."""
    x, y = torch.randn(640, 3, 32, 32), torch.randint(0, 10, (640,))
    data = fl.Federation.from_tensor(x, y, list(range(0, 641, 64)), classes=10)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 256, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    settings: dict[str, Any] = {"rounds": 2, "clients_per_round": 10, "local": fl.Local(batch_size=64, lr=0.1)}
    settings |= {"device": "cuda", "precision": "fp32", "engine": "vector", "max_memory": "100GB"}
    whole = fl.fit(model, data, **settings)
    assert "do not fit" not in caplog.text
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        with caplog.at_level(logging.WARNING, "fedloom"):
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.5e9) / total)
            halved = fl.fit(model, data, **settings)
            assert "do not fit into memory together" in caplog.text
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 5e7) / total)
            with pytest.raises(RunError, match="a single client's training does not fit into the memory of cuda"):
                fl.fit(model, data, **settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert apart(halved.params, whole.params) < 1e-5


def training(method: str, data: fl.Federation | None = None, **more: Any) -> Training:
    settings: dict[str, Any] = {"rounds": 6, "clients_per_round": 5, "local": LOCAL, "precision": "fp32"}
    settings |= {"device": "cuda", "engine": "vector"}
    return Training(network(), data or pictures(), method, **{**settings, **more})


def test_lockstep_on_the_device() -> None:
    methods = ["fedavg", "adabest", "scaffold+fedadam", "radfed(redistributions=2)+dgt+fedglad", "fedasync"]
    data = pictures()
    alone, together = (
        [training(method, data, seed=seed, rounds=4) for seed, method in enumerate(methods)] for _ in range(2)
    )
    wanted = [run.run() for run in alone]
    assert together[0].simulation.federation.x is together[1].simulation.federation.x
    found = run_together(together, [[] for _ in methods])
    for method, one, other in zip(methods, wanted, found, strict=True):
        assert apart(other.params, one.params) < 1e-9, method


# Beside the one check for diverged clients, stages that report a number of the round read it back.
WAITS = {"fedavg": 1, "fedprox(mu=0.1)": 1, "fedavgm": 2, "adabest": 2, "fedglad": 2, "dgt": 2}


@pytest.mark.parametrize(("method", "most"), WAITS.items())
def test_the_host_waits_once_for_a_work(method: str, most: int) -> None:
    run = training(method)
    for _ in range(3):
        run.round(evaluate=False)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.round(evaluate=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    assert len(waits) <= most, waits


def test_rows_on_the_device_in_pinned_memory_and_on_disk(tmp_path: Path) -> None:
    like = torch.zeros(1000, device="cuda")
    room = Room(device=20 * 4000, host=40 * 4000, folder=tmp_path)
    kept = Memory({"h": "row"}, like, room)
    for w, clients in enumerate(torch.arange(200).reshape(5, 40)):
        kept.write(clients, w, {"h": clients[:, None].float().cuda() + like})
        kept.settle()
    chunks = kept._slabs["h"].chunks
    assert [chunk.is_cuda for chunk in chunks].count(True) == 1
    assert any(chunk.is_pinned() for chunk in chunks)
    assert not chunks[-1].is_cuda
    order = torch.randperm(250)
    found = kept.read(order, 100)["h"]
    assert found.is_cuda
    assert torch.equal(found[:, 7].cpu(), torch.where(order < 200, order, 0).float())


@pytest.mark.parametrize("method", ["adabest", "scaffold"])
def test_a_tight_budget_on_the_device(method: str) -> None:
    runs = [training(method, max_memory=size).run() for size in (None, 200_000)]
    assert apart(runs[1].params, runs[0].params) < 1e-9
