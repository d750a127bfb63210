"""A server and its clients in one process: the real apps, over a grid that copies every message as a wire does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

import fedloom as fl
from fedloom.flower import LocalGrid, client_app, serve


def mlp(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(7)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.ReLU(), nn.Linear(8, 3)).double()


def clients(count: int = 5) -> fl.Federation:
    """Clients with 9, 12, 15, ... samples each, of classes that differ, and a test set."""
    rng = torch.Generator().manual_seed(3)
    pairs = []
    for k in range(count):
        x = torch.randn(9 + 3 * k, 5, generator=rng, dtype=torch.float64) + 0.3 * k
        pairs.append((x, (x.sum(1).abs().long() + k) % 3))
    x = torch.randn(40, 5, generator=rng, dtype=torch.float64)
    return fl.Federation.from_arrays(pairs, test=(x, x.sum(1).abs().long() % 3), classes=3)


def app_for(federation: fl.Federation, memory: Path, model: Callable[[], nn.Module] = mlp, **options: Any) -> ClientApp:
    """Client k of a federation at the node with partition-id k."""

    def data(context: Context) -> tuple[Any, Any]:
        return federation.client(int(context.node_config["partition-id"]))

    return client_app(lambda context: model(), data, memory=memory, **options)


def served(
    method: str, memory: Path, *, grid: LocalGrid | None = None, model: Callable[[], nn.Module] = mlp, **options: Any
) -> fl.Result:
    """The method over in-process nodes."""
    data = options.pop("data", None) or clients()
    grid = grid or LocalGrid.of_app(app_for(data, memory, model), len(data))
    settings = {"clients": len(data), "test": data, "rounds": 4, "clients_per_round": 3, **options}
    settings.setdefault("local", LOCAL)
    return serve(grid, model(), method, **settings)


def simulated(method: str, *, model: Callable[[], nn.Module] = mlp, **options: Any) -> fl.Result:
    """The same by the simulator."""
    data = options.pop("data", None) or clients()
    settings = {"rounds": 4, "clients_per_round": 3, "engine": "loop", **options}
    settings.setdefault("local", LOCAL)
    return fl.fit(model(), data, method, **settings)


LOCAL = fl.Local(epochs=2, batch_size=4, lr=0.05)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative difference."""
    return float((a - b).norm() / b.norm())
