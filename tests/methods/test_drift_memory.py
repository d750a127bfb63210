"""What clients remember: versions by Work (specification 11.12), and a server that falls behind its clients."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.memory import Memory
from fedloom.training import Training
from tests.methods.test_drift_reference import CLIENTS, LOCALS, linear_model, play, squared_error

LIKE = torch.zeros(3, dtype=torch.float64)


def memory() -> Memory:
    return Memory({"h": "row", "seen": "scalar"}, LIKE)


def values(*numbers: float) -> dict[str, Tensor]:
    """A row of threes and a scalar for each client."""
    column = torch.tensor(numbers, dtype=torch.float64)
    return {"h": column[:, None].expand(-1, 3).clone(), "seen": column.clone()}


def known(kept: Memory, client: int, w: int) -> float:
    """What a client knew before Work w, as the one number that `values` wrote."""
    found = kept.read(torch.tensor([client]), w)
    assert found["h"].shape == (1, 3)
    assert found["seen"].shape == (1,)
    assert found["h"].dtype == torch.float64
    assert (found["h"] == found["seen"]).all()
    return float(found["seen"])


def test_client_never_seen_reads_as_zero() -> None:
    kept = memory()
    kept.write(torch.tensor([4]), 0, values(1))
    assert known(kept, 3, 10) == 0
    assert kept.read(torch.tensor([], dtype=torch.int64), 3)["h"].shape == (0, 3)


def test_work_reads_what_is_older_than_itself() -> None:
    kept = memory()
    kept.write(torch.tensor([4]), 3, values(1))
    assert [known(kept, 4, w) for w in (2, 3, 4, 9)] == [0, 0, 1, 1]
    kept.write(torch.tensor([4]), 7, values(2))
    assert [known(kept, 4, w) for w in (4, 7, 8)] == [1, 1, 2]


def test_replayed_work_overwrites() -> None:
    """Work 7 is played again: it reads what Work 3 left, and what it writes replaces its first try."""
    kept = memory()
    kept.write(torch.tensor([4]), 3, values(1))
    kept.write(torch.tensor([4]), 7, values(2))
    for again in (20, 30):
        assert known(kept, 4, 7) == 1
        kept.write(torch.tensor([4]), 7, values(again))
        assert known(kept, 4, 8) == again
    assert known(kept, 4, 7) == 1


def test_server_that_falls_back_overtakes_what_came_after() -> None:
    """Back to Work 3 from Work 7: what Work 7 wrote belongs to a run that is no more."""
    kept = memory()
    kept.write(torch.tensor([4]), 3, values(1))
    kept.write(torch.tensor([4]), 7, values(2))
    assert known(kept, 4, 3) == 0
    kept.write(torch.tensor([4]), 3, values(5))
    assert [known(kept, 4, w) for w in (4, 7, 8)] == [5, 5, 5]


def test_clients_are_kept_apart() -> None:
    kept = memory()
    kept.write(torch.tensor([4, 1]), 0, values(1, 2))
    kept.write(torch.tensor([1]), 1, values(3))
    assert [known(kept, client, 5) for client in (0, 1, 4)] == [0, 3, 1]
    found = kept.read(torch.tensor([4, 0, 1, 4]), 1)
    assert found["seen"].tolist() == [1, 0, 2, 1]


def test_what_was_written_is_a_copy() -> None:
    kept = memory()
    written = values(1)
    kept.write(torch.tensor([4]), 0, written)
    written["h"].zero_()
    written["seen"].zero_()
    assert known(kept, 4, 1) == 1


def test_versions_survive_as_tensors() -> None:
    """What was known before a Work, whatever was written since."""
    kept, restored = memory(), memory()
    kept.write(torch.tensor([4, 1]), 3, values(1, 2))
    kept.write(torch.tensor([4, 2]), 7, values(3, 4))
    for w, clients in ((3, set()), (7, {1, 4}), (8, {1, 2, 4})):
        assert kept.known(w) == clients
        restored.restore([kept.tensors(sorted(clients), w)])
        for client in range(5):
            assert known(restored, client, 9) == known(kept, client, w)
    assert known(restored, 4, 7) == 0  # it carries the number of the Work that wrote it
    restored.restore([kept.tensors([1, 4], 7), kept.tensors([4, 2], 8)])  # the later piece wins
    assert [known(restored, client, 9) for client in (1, 2, 4)] == [2, 4, 3]
    restored.restore([])
    assert known(restored, 4, 9) == 0


METHODS = [
    "adabest(mu=0.3)",
    "adabest(mu=0.3, deploy='latest_of_all')",
    "feddyn(mu=0.1)",
    "scaffold",
    "scaffold-m",
    "radfed(redistributions=2)+adabest(mu=0.3)",
]


def training(method: str) -> Training:
    local = fl.Local(**LOCALS["steps"])
    data = fl.Federation.from_arrays(CLIENTS)
    settings: dict[str, Any] = {"clients_per_round": 3, "local": local, "loss": squared_error, "engine": "loop"}
    return Training(linear_model(), data, method, rounds=12, **settings)


@pytest.mark.parametrize("method", METHODS)
def test_round_that_is_played_again(method: str) -> None:
    """A server that lost a round plays it a second and a third time: nothing is applied twice, nothing is divided by
    t - t' = 0.
    """
    whole = play(method, None, LOCALS["steps"], rounds=12, clients_per_round=3)
    run = training(method)
    for number, wanted in enumerate(whole.path):
        for _ in range(number % 3):
            run.simulation.play(run.state)
        run.round(evaluate=False)
        assert torch.equal(run.state.theta, wanted), f"round {number + 1}"
    assert np.isfinite(run.state.theta.numpy()).all()


@pytest.mark.parametrize("method", ["adabest(mu=0.3)", "radfed(redistributions=6)+adabest(mu=0.3)"])
def test_memory_does_not_grow(method: str) -> None:
    """After a round one version per client is kept, however many Works it had."""
    run = training(method)
    for _ in range(4):
        run.round(evaluate=False)
        (kept,) = run.simulation.population.kept.values()
        assert max(map(len, kept._kept.values())) == 1
