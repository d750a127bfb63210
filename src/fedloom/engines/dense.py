"""Dense nets on a CPU: a client's whole local training as one call of compiled code (dense.cpp).

PyTorch's calls take longer than the arithmetic of a small net's step. The code knows SGD with clipping, momentum,
weight decay and every correction; before a run its first step is compared with the plain one.
"""

import ctypes
import hashlib
import logging
import math
import platform
import shutil
import subprocess  # nosec B404  # to call the compiler
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.data.files import cache_folder
from fedloom.engines.plan import Batches
from fedloom.engines.step import Optimizer, corrected
from fedloom.errors import RunError
from fedloom.federation import Federation
from fedloom.local import Local
from fedloom.space import Space
from fedloom.stages import Setup
from fedloom.task import Task, cross_entropy

LOG = logging.getLogger("fedloom")
SOURCE = Path(__file__).with_name("dense.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
TRIED = 64  # samples of the step that is compared, and of those whose zeros are counted

# Seconds, as measured on two cores (docs/speed.md).
COMPILE = 2.0
CLIENT, CLIENT_NUMBER = 1.5e-4, 2e-9  # of every client, and of each of its parameters: what the code is given and gives
PRODUCT = 5e-11  # of two numbers that are not zero
LOOP_STEP, LOOP_PRODUCT = 3e-4, 3e-11  # without the code, client by client, and
VECTOR_STEP, VECTOR_PRODUCT, VECTOR_NUMBER = 3e-4, 8e-11, 3e-9  # as one matrix, whose calls all its clients share

_WHOLE, _NUMBER, _PLACE = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Job(ctypes.Structure):
    """As in dense.cpp."""

    _fields_ = [
        ("depth", _WHOLE),
        ("widths", _PLACE),
        ("inputs", _PLACE),
        ("targets", _PLACE),
        ("steps", _WHOLE),
        ("samples", _PLACE),
        ("lengths", _PLACE),
        ("rates", _PLACE),
        ("pull", _NUMBER),
        ("clip", _NUMBER),
        ("decay", _NUMBER),
        ("momentum", _NUMBER),
        ("nesterov", _WHOLE),
        ("start", _PLACE),
        ("drift", _PLACE),
        ("end", _PLACE),
        ("raw", _PLACE),
        ("squares", _PLACE),
    ]


@dataclass(frozen=True)
class Dense:
    """Trains one client at a time."""

    widths: tuple[int, ...]  # of the inputs, of every layer
    local: Local

    def train(
        self,
        federation: Federation,
        start: Tensor,
        batches: Batches,
        rates: Sequence[float],
        pull: float | None = None,
        drift: Tensor | None = None,
        raw: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where a client ends [P], the sum of its losses and, if asked for, that of its gradients [P]."""
        local, summed = self.local, torch.zeros_like(start) if raw else None
        end, total = self._run(
            federation,
            start,
            batches,
            torch.tensor(rates[: len(batches.lengths)], dtype=torch.float64),
            {"drift": None if drift is None else drift.to(start.dtype), "raw": summed},
            pull=pull or 0.0,
            clip=local.clip_norm or 0.0,
            decay=local.weight_decay,
            momentum=local.momentum,
            nesterov=int(local.nesterov),
        )
        return end, start.new_tensor(total), summed

    def squares(self, federation: Federation, x: Tensor, batches: Batches) -> Tensor:
        """The squared norm of every batch's gradient at x."""
        still = torch.zeros(len(batches.lengths), dtype=torch.float64)
        found = torch.zeros_like(still)
        self._run(federation, x, batches, still, {"squares": found})
        return found

    def _run(
        self,
        federation: Federation,
        start: Tensor,
        batches: Batches,
        rates: Tensor,
        others: Mapping[str, Tensor | None],
        **settings: float,
    ) -> tuple[Tensor, float]:
        needed, places = np.unique(batches.samples, return_inverse=True)
        inputs, targets = federation.batch(torch.from_numpy(needed), start.dtype)
        tensors = {
            "widths": torch.tensor(self.widths),
            "inputs": inputs.flatten(1).to(start.dtype),
            "targets": targets.long(),
            "samples": torch.from_numpy(places).long(),
            "lengths": torch.tensor(batches.lengths, dtype=torch.int64),
            "rates": rates,
            "start": start,
            "end": torch.empty_like(start, memory_format=torch.contiguous_format),
            **{name: tensor for name, tensor in others.items() if tensor is not None},
        }
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        places_of = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        job = Job(depth=len(self.widths) - 1, steps=len(rates), **places_of, **settings)
        total = function(start.dtype)(ctypes.byref(job))
        if total < 0:
            raise RunError(f"the local training of a client with {len(needed)} samples does not fit into memory")
        return tensors["end"], total


def dense(task: Task, federation: Federation, local: Local) -> Dense | str:
    """The net as compiled code, or why that can't be."""
    widths = widths_of(task.model, task.space)
    if widths is None or widths[0] != federation.x.shape[1:].numel():
        return "the model is more than dense layers with ReLU between them"
    if task.loss is not cross_entropy or federation.y.dim() != 1 or federation.classes is None:
        return "the loss is not the cross-entropy of one label a sample"
    if task.precision == "bf16" or task.space.dtype not in (torch.float32, torch.float64):
        return "numbers are neither float32 nor float64"
    if local.optimizer != "sgd":
        return "the local optimiser is not SGD"
    if federation.preparation.augment or federation.shards is not None:
        return "samples are augmented, or on disk"
    if not len(federation.y) or not 0 <= int(federation.y.min()) <= int(federation.y.max()) < widths[-1]:
        return "some samples have no label"
    if not shutil.which("g++"):
        return "there is no C++ compiler (g++)"
    return Dense(widths, local)


def is_the_same(found: Dense, task: Task, federation: Federation) -> bool:
    """Is its first step the one of PyTorch?"""
    local, start = found.local, task.space.flatten(task.model)
    batch = np.arange(min(TRIED, len(federation.x)))
    leaf = start.clone().requires_grad_()
    inputs, targets = federation.batch(torch.from_numpy(batch), start.dtype)
    task.model.train()
    (gradient,) = torch.autograd.grad(task.losses(leaf, {}, inputs, targets).mean(), leaf)
    right = start.clone()
    Optimizer.of(local, start).step(right, corrected(gradient, right, start, None, None, local.clip_norm), 1.0)
    try:
        end = found.train(federation, start, Batches(batch, np.array([len(batch)])), [1.0])[0]
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        LOG.warning(
            "the code for dense nets can't be compiled, so steps run without it: %s",
            said.decode(errors="replace")[:200],
        )
        return False
    apart, far = float((end - right).double().norm()), float((right - start).double().norm())
    same = apart <= (1e-9 if start.dtype == torch.float64 else 1e-3) * (far + float(start.double().norm()) / 100)
    if not same:
        LOG.warning("the compiled step of this model is another one (%.2g of %.2g), so it is not used", apart, far)
    return same


def saved(found: Dense, federation: Federation, setup: Setup, vector: bool) -> float:
    """Seconds that the code takes less for a client's local training than the engine that would be taken without it.
    Products with inputs of zero cost it nothing.
    """
    steps = sum(setup.local.count_steps(size) for size in setup.sizes.tolist()) / len(setup.sizes)
    batch = min(setup.local.batch_size or math.inf, float(setup.sizes.double().mean()))
    inputs = federation.batch(torch.arange(min(TRIED, len(federation.x))), torch.float32)[0]
    share = float((inputs != 0).double().mean())
    first, *rest = [(inputs + 1) * outputs for inputs, outputs in pairwise(found.widths)]
    all_products, products = (batch * (2 * part * first + 3 * sum(rest)) for part in (1.0, share))
    step = LOOP_STEP + LOOP_PRODUCT * all_products
    if vector:
        step = VECTOR_STEP / setup.per_round + VECTOR_PRODUCT * all_products + VECTOR_NUMBER * setup.space.size
    return steps * (step - PRODUCT * products) - CLIENT - CLIENT_NUMBER * setup.space.size


def widths_of(model: nn.Module, space: Space) -> tuple[int, ...] | None:
    """Of a chain of dense layers with ReLU between them and nothing else."""
    if type(model) is not nn.Sequential:
        return None
    layers = [layer for layer in model if not (type(layer) is nn.Flatten and layer.start_dim == 1)]
    linear = [layer for layer in layers[::2] if type(layer) is nn.Linear]
    between = [layer for layer in layers[1::2] if type(layer) is nn.ReLU]
    if len(linear) != len(between) + 1 or len(linear) + len(between) != len(layers):
        return None
    shapes = [shape for layer in linear for shape in ((layer.out_features, layer.in_features), (layer.out_features,))]
    if shapes != [tuple(shape) for shape in space.shapes]:
        return None
    return linear[0].in_features, *(layer.out_features for layer in linear)


@cache
def function(dtype: torch.dtype) -> Callable[[object], float]:
    found: Any = getattr(library(), f"train_{str(dtype).removeprefix('torch.')}")
    found.argtypes, found.restype = [ctypes.POINTER(Job)], ctypes.c_double
    return cast(Callable[[object], float], found)


@cache
def library() -> ctypes.CDLL:
    """The code, compiled for this machine; kept on disk."""
    key = "\n".join([SOURCE.read_text(), *FLAGS, *processor()])
    folder = cache_folder() / "compiled"
    place = folder / f"dense-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / place.name
            order = [shutil.which("g++") or "g++", *FLAGS, str(SOURCE), "-o", str(made)]
            subprocess.run(order, check=True, capture_output=True)  # nosec B603  # no shell
            made.replace(place)
    return ctypes.CDLL(str(place))


def processor() -> list[str]:
    """What code for this machine may use: a cache can be shared with another machine."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else [platform.processor()]
    told = {line for line in lines if line.startswith(("flags", "model", "cpu family", "Features", "CPU part"))}
    return [platform.machine(), platform.system(), *sorted(told or lines)]
