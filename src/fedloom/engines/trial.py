"""What is tried out before a run: can `vmap` train the model, how much memory does a sample take, do samples touch?"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.engines.dropout import keyed
from fedloom.engines.vector import Vector
from fedloom.federation import Federation
from fedloom.models.recurrent import set_fused
from fedloom.space import buffers_of
from fedloom.stages import Setup
from fedloom.task import Task, computed_in


class Trial(NamedTuple):
    """One step of two made-up clients."""

    why_not: str  # `vmap` can't train this model; empty: it can
    activations: int = 0  # bytes that a sample keeps for the backward pass


def trial(task: Task, federation: Federation, setup: Setup) -> Trial:
    engine = Vector(task, federation, setup)
    flat = task.space.flatten(task.model)
    task.model.train()
    device = flat.device
    keys = torch.zeros((2, 2), dtype=torch.int64, device=device)

    def step(width: int) -> None:
        buffers = {name: torch.stack([b, b]) for name, b in buffers_of(task.model).items()}
        samples = torch.zeros((2, width), dtype=torch.int64, device=device)
        lengths = torch.full((2,), width, device=device)
        engine.gradients(torch.stack([flat, flat]), buffers, samples, lengths, keys, 0)

    fallback: Any = torch._C._functorch  # an operation without a batching rule would run row by row
    fallback._set_vmap_fallback_enabled(False)
    try:
        few, more = _activation_bytes(partial(step, 2)), _activation_bytes(partial(step, 4))
    except Exception as error:  # a model may fail anywhere
        return Trial(f"vmap can't train this model ({' '.join(str(error).split())[:200]})")
    finally:
        fallback._set_vmap_fallback_enabled(True)
        set_fused(task.model, True)
    return Trial("", max(more - few, 0) // 4)


def _activation_bytes(run: Callable[[], Any]) -> int:
    """How much memory a computation keeps for its backward pass."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(seen.values())


def mixes_samples(task: Task, federation: Federation) -> bool:
    """Does what one sample does depend on the other samples of its batch, as under batch norm? Judged in full, whatever
    the run's precision: a product of one row is summed in another order than one of many, and to eight bits or eleven
    that alone would look like it.
    """
    for module in task.model.modules():
        keeps_statistics = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or keeps_statistics:
            return True
    task = replace(task, precision="fp32")
    task.model.train()
    flat = task.space.flatten(task.model)
    noise = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).to(flat)
    flat = flat + 0.1 * noise  # a layer that begins at zero would hide what comes before it
    x, y = federation.batch(_various(federation).to(flat.device), flat.dtype)
    key = torch.zeros(2, dtype=torch.int64, device=flat.device)
    found = []
    try:
        for n in (1, len(x)):
            buffers = buffers_of(task.model)
            with torch.no_grad(), keyed(task.model, key, 0), computed_in("fp32"):
                outputs = task.outputs(flat, buffers, x[:n])
                found.append([outputs[:1], task.loss(outputs, y[:n])[:1], *buffers.values()])
    except (RuntimeError, ValueError):
        return True
    return any(not _same(alone.double(), beside.double()) for alone, beside in zip(*found, strict=True))


def _same(alone: Tensor, beside: Tensor) -> bool:
    """Up to rounding; a sample may overflow, alone as beside others."""
    scale = float(alone.nan_to_num(0, 0, 0).abs().max()) if alone.numel() else 0.0
    return torch.allclose(alone, beside, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def _various(federation: Federation) -> Tensor:
    """Places of a few samples: beside the first, one that differs from it, one of the same target, and others."""
    x, y = federation.x[:1000].flatten(1), federation.y[:1000].reshape(len(federation.x[:1000]), -1)
    other = (x != x[0]).any(1).nonzero().flatten()[:1]
    same = (y == y[0]).all(1).nonzero().flatten()[1:2]
    spread = torch.linspace(0, len(x) - 1, 6).long()
    return torch.cat([torch.zeros(1, dtype=torch.int64), other.cpu(), same.cpu(), spread])
