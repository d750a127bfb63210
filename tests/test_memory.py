"""What clients remember lies on the device, in the host's memory or on disk, and reads the same from everywhere."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom import memory as memories
from fedloom.errors import RunError
from fedloom.memory import Memory, Room
from tests.engines.test_vector import apart, dense, federation

P = 1000
ROW = 8 * P


def filled(room: Room, clients: int = 200, works: int = 6) -> tuple[Memory, dict[int, float]]:
    """Random clients write, as in a run; beside it a dictionary of what each must know."""
    kept = Memory({"h": "row", "t": "scalar"}, torch.zeros(P, dtype=torch.float64), room)
    rng = np.random.default_rng(0)
    known: dict[int, float] = {}
    for w in range(works):
        chosen = torch.from_numpy(rng.choice(clients, 40, replace=False))
        values = torch.from_numpy(rng.random(40))
        rows = values[:, None] + torch.arange(P, dtype=torch.float64)
        kept.write(chosen, w, {"h": rows, "t": values})
        known |= dict(zip(chosen.tolist(), values.tolist(), strict=True))
        kept.settle()
    return kept, known


def check(kept: Memory, known: dict[int, float], clients: int = 200) -> None:
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(0))
    found = kept.read(order, w=100)
    for client, row, number in zip(order.tolist(), found["h"], found["t"].tolist(), strict=True):
        assert number == known.get(client, 0.0)
        wanted = known[client] + torch.arange(P, dtype=torch.float64) if client in known else torch.zeros(P)
        assert torch.equal(row, wanted.double())


def everything(kept: Memory) -> dict[str, torch.Tensor]:
    return kept.tensors(sorted(kept.known(100)), 100)


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each chunk that went to disk."""
    found: list[int] = []
    on_disk = Room._on_disk

    def watched(self: Room, size: int, rows: int, like: Any) -> Any:
        found.append(rows)
        return on_disk(self, size, rows, like)

    monkeypatch.setattr(Room, "_on_disk", watched)
    return found


def test_everything_in_memory(maps: list[int]) -> None:
    check(*filled(Room()))
    assert not maps


def test_the_rest_goes_to_disk(maps: list[int], tmp_path: Path) -> None:
    """A budget of 50 rows; the file has no name, so nothing is left behind however the process ends."""
    room = Room(device=50 * ROW, folder=tmp_path)
    kept, known = filled(room)
    check(kept, known)
    assert maps
    assert room.device < 50 * ROW
    assert not list(tmp_path.iterdir())


def test_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "CHUNK", 20 * ROW)
    kept, known = filled(Room())
    check(kept, known)
    sizes = [len(chunk) for chunk in kept._slabs["h"].chunks]
    assert max(sizes) == 20
    assert sum(sizes) < len(known) + 40 + 20  # one value a client, those of a Work twice, one chunk begun


def test_slots_are_used_again() -> None:
    kept = Memory({"h": "row"}, torch.zeros(3))
    for w in range(500):
        kept.write(torch.tensor([7, 8]), w, {"h": torch.full((2, 3), float(w))})
        kept.settle()
    assert kept._slots == memories.FIRST
    assert kept.read(torch.tensor([8]), 500)["h"].tolist() == [[499.0] * 3]


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    kept, known = filled(Room(device=30 * ROW, folder=tmp_path))
    other = Memory({"h": "row", "t": "scalar"}, torch.zeros(P, dtype=torch.float64), Room(device=0, folder=tmp_path))
    other.restore([everything(kept)])
    check(other, known)
    other.restore([everything(kept)])  # a second time over the first
    check(other, known)


def test_a_full_disk_is_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"the disk can't take it: .*No space left on device"):
        filled(Room(device=0, folder=tmp_path))


@pytest.mark.parametrize("method", ["adabest", "scaffold", "feddyn"])
def test_a_run_under_a_tight_budget(method: str, maps: list[int]) -> None:
    runs = [
        fl.fit(dense(), federation(), method, rounds=6, clients_per_round=4, engine="loop", max_memory=size)
        for size in (None, 100)
    ]
    assert maps
    assert apart(runs[1].params, runs[0].params) == 0


@pytest.mark.parametrize("budget", [0, 10, 16, 17, 40, 100])
def test_no_more_than_the_budget_lies_in_memory(budget: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Counted by what was allocated, not by what the room says."""
    near: dict[int, int] = {}
    empty = torch.empty

    def counted(shape: Any, **how: Any) -> torch.Tensor:
        made = empty(shape, **how)
        if made.dim() == 2:
            near[made.data_ptr()] = made.numel() * 8
        return made

    monkeypatch.setattr(memories, "CHUNK", 20 * ROW)
    monkeypatch.setattr(torch, "empty", counted)
    room = Room(device=budget * ROW, folder=tmp_path)
    kept, known = filled(room)
    check(kept, known)
    alive = sum(near[c.data_ptr()] for c in kept._slabs["h"].chunks if c.data_ptr() in near)
    assert alive <= budget * ROW
    assert room.device >= 0


def test_restoring_in_the_middle_of_a_round() -> None:
    kept, _ = filled(Room())
    saved = everything(kept)
    kept.write(torch.tensor([500]), 50, {"h": torch.ones(1, P, dtype=torch.float64), "t": torch.ones(1).double()})
    kept.restore([saved])
    kept.settle()
    assert not kept.read(torch.tensor([500]), 60)["h"].any()


def test_runs_at_the_same_time_share_one_budget(tmp_path: Path) -> None:
    from fedloom.experiment.config import RunConfig
    from fedloom.experiment.run import Job, start_runs

    rooms: list[Room] = []
    config = RunConfig(model="logistic", method="adabest", rounds=2, engine="vector", max_memory=100_000)
    init = memories.Memory.__post_init__

    def watched(self: Memory) -> None:
        rooms.append(self.room)
        init(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memories.Memory, "__post_init__", watched)
        start_runs([Job(config, tmp_path / "a"), Job(config, tmp_path / "b")])
    assert len(rooms) == 2
    assert rooms[0] is rooms[1]
