"""What makes a run this run: a checkpoint belongs to it, or to another."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.federation import Federation
from fedloom.simulation import Simulation


def identity_of(simulation: Simulation, given: nn.Module, diagnose: Sequence[str]) -> dict[str, Any]:
    """What must be the same for a checkpoint to belong to this run; engine and device may change."""
    setup = simulation.setup
    shapes = {name: list(shape) for name, shape in zip(setup.space.names, setup.space.shapes, strict=True)}
    federation = simulation.federation
    few = federation.x[:: max(1, len(federation.x) // 1000)]  # enough to tell other data, cheap enough to ask often
    shards = federation.shards
    frozen = [p for name, p in simulation.task.model.named_parameters() if name not in setup.space.names]
    absence = simulation.population.absence
    availability = absence.availability
    if isinstance(availability, np.ndarray):
        availability = hashlib.sha256(availability.tobytes()).hexdigest()
    elif callable(availability):
        availability = "a function"
    return {
        "method": simulation.method.text,
        "model": shapes,
        "frozen parameters": _digest(*frozen),
        "data": _digest(federation.y, few) + ("" if shards is None else shards.digest),
        "partition": _digest(federation.offsets, _owned(federation)),
        "preparation": str(federation.preparation),
        "availability": availability,
        "dropout_rate": absence.dropout_rate,
        "metric": simulation.evaluator.name,
        "loss": getattr(simulation.task.loss, "__qualname__", "a callable"),
        "modules": [f"{name}: {_described(module)}" for name, module in given.named_modules()],
        "per_round": setup.per_round,
        "local": asdict(setup.local),
        "seed": setup.seed,
        "diagnose": list(diagnose),
    }


def _owned(federation: Federation) -> Tensor:
    """Which samples the clients have; where these stay on disk, which of the files' clients take part."""
    if federation.shards is None:
        return federation.index
    chosen = federation.shards.chosen
    return torch.empty(0) if chosen is None else torch.from_numpy(chosen)


def _described(module: nn.Module) -> str:
    """What it is, with what it was made with: the rate of a dropout, the stride of a convolution."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{type(module).__qualname__}({module.extra_repr()})")


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
