"""Which engine trains a run, and how: a fixed rule, decided before the first round, written into the run's config."""

import logging
import os
import re
import shutil
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from fedloom.engines.dense import COMPILE as COMPILE_DENSE
from fedloom.engines.dense import dense, is_the_same, saved
from fedloom.engines.fused import is_fusible
from fedloom.engines.graph import rows_of_recordings
from fedloom.engines.loop import Loop
from fedloom.engines.plan import width_of
from fedloom.engines.rule import rule
from fedloom.engines.threads import Threads, draws_itself
from fedloom.engines.trial import mixes_samples, trial
from fedloom.engines.vector import Vector, never
from fedloom.errors import ConfigError, nearest
from fedloom.federation import Federation
from fedloom.memory import Room
from fedloom.models.recurrent import is_recurrent
from fedloom.stages import Setup, Updates, Work
from fedloom.task import Task

ENGINES = ("auto", "loop", "vector", "ray", "ray-loop", "ray-vector")
LOG = logging.getLogger("fedloom")
MATRICES = 12  # of [K, P] that a step may hold at once

# What compiling costs and saves, in seconds, as measured on an H200 and on two cores (benchmarks/README.md).
COMPILE = 6.0
COMPILE_PER_TENSOR = 0.5
SAVED_PER_TENSOR = 8e-6  # in a recorded step
SAVED_PER_BYTE = 1.3e-12  # of activations and, twice, of the matrix: four passes at 3 TB/s
FUSE_PER_LAYER = 0.6  # a convolution, its norm and their gradients
SAVED_BY_FUSING = {"auto": 1e-12, "bf16": 2.4e-12}  # for a byte of activations
SAVED_ON_CPU = 5e-4  # in a step, by less Python
SAVED_PER_BYTE_ON_CPU = 4e-10  # of the matrix: four passes at 10 GB/s


class Engine(Protocol):
    """Trains every client of a Work from its start, by the one local step."""

    @property
    def name(self) -> str: ...

    @property
    def compile(self) -> bool: ...

    def train(self, work: Work) -> Updates: ...


def bytes_of(size: int | str | None) -> int | None:
    """A number of bytes, or a text such as "500MB" or "1.5 GB".

    >>> bytes_of("1.5 GB")
    1500000000
    """
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        return size
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)B?", str(size)) if isinstance(size, str) else None
    count = int(float(found[1]) * 1000 ** " kMGT".index(found[2] or " ")) if found else 0
    if count < 1:
        raise ConfigError(f"max_memory must be a number of bytes, or a text such as '8GB', not {size!r}")
    return count


@dataclass(frozen=True)
class Wishes:
    """What a user may say about how cohorts are trained."""

    engine: str = "auto"
    compile: bool | None = None  # None: by the rule
    max_memory: int | None = None  # bytes of the device for cohorts and what clients remember; None: half of all
    ray_address: str | None = None  # of a cluster; None: a local one is started
    actors: int | None = None  # workers of the cluster; None: one per GPU, or per core

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"unknown engine {self.engine!r}: {nearest(str(self.engine), ENGINES)}")
        if not isinstance(self.compile, bool | None):
            raise ConfigError(f"compile must be True, False or None, not {self.compile!r}")
        if not self.on_ray and (self.ray_address is not None or self.actors is not None):
            raise ConfigError(f"ray_address and actors are for engine=ray, not for engine={self.engine}")
        if self.actors is not None and (type(self.actors) is not int or self.actors < 1):
            raise ConfigError(f"actors must be a whole number of at least 1, not {self.actors!r}")
        if not isinstance(self.ray_address, str | None) or self.ray_address == "":
            raise ConfigError(f"ray_address must be 'auto' or a text such as '10.0.0.1:6379', not {self.ray_address!r}")

    @property
    def on_ray(self) -> bool:
        return self.engine.startswith("ray")

    def budget(self, device: torch.device) -> int:
        """Bytes for cohorts; as many again for what clients remember. Of all memory, not of what is free at the moment,
        so that the same run is cut into the same pieces.
        """
        return (self.max_memory or device_memory(device) // 2) // 2

    def room(self, device: torch.device) -> Room:
        """For what clients remember; runs at the same time share one."""
        return Room(self.budget(device), device_memory(torch.device("cpu")) // 4)


def choose_engine(wishes: Wishes, task: Task, federation: Federation, setup: Setup, rounds: int) -> tuple[Engine, str]:
    """An engine, and why it was chosen."""
    name = wishes.engine
    wins, why = vector_wins(task.model, setup) if name == "auto" else (name == "vector", "as asked")
    compiled = None if name == "vector" else _compiled_loop(wishes, task, federation, setup, rounds, wins)
    if compiled is not None:
        return _on_cores(compiled), "a dense net on a CPU, compiled"
    if wins:
        tried = trial(task, federation, setup)
        if not tried.why_not:
            batch = _batch(setup)
            row = MATRICES * setup.space.size * setup.space.dtype.itemsize + batch * tried.activations * 3 // 2
            fits = wishes.budget(setup.device) // row
            wanted, stays = wishes.compile, federation.shards is None  # samples that stay where a recording found them
            if not stays:
                fits = min(fits, wishes.budget(setup.device) // _largest_client(federation))
                if wanted:
                    LOG.warning("compile: the samples are on disk, so steps run without it")
            graphs = stays and setup.device.type == "cuda"
            fused = graphs and is_fusible(task)
            if fused and wanted is None:
                wanted = worth_fusing(task, setup, tried.activations, rounds)
            gains = never  # of a recurrent net every step in time would be compiled anew
            if stays and wanted is not False and not fused and not is_recurrent(task.model):
                gains = partial(worth_compiling, setup, tried.activations, rounds)
            if wanted is None:
                wanted = any(gains(setup.per_round, width, setup.per_round) for width in _sizes_by_width(setup))
            engine = _on_cores(
                Vector(
                    task,
                    federation,
                    setup,
                    mixes=mixes_samples(task, federation),
                    graphs=graphs,
                    fused=fused and wanted,
                    compile=stays and wanted,
                    gains=gains,
                    together=max(1, fits),
                )
            )
            return engine, f"{why}, compiled" if engine.compile else why
        why = tried.why_not
        if name == "vector":
            LOG.warning("engine=vector: %s; clients are trained one after the other instead", tried.why_not)
    return _on_cores(Loop(task, federation, setup)), why


def _compiled_loop(
    wishes: Wishes, task: Task, federation: Federation, setup: Setup, rounds: int, vector: bool
) -> Loop | None:
    """Clients one after the other by compiled code, where the model is a dense net and the run saves twice what
    compiling costs, compared with the engine that it would have else.
    """
    if setup.device.type != "cpu" or wishes.compile is False:
        return None
    found = dense(task, federation, setup.local)
    if isinstance(found, str):
        if wishes.compile and wishes.engine == "loop":
            LOG.warning("compile: %s, so steps run without it", found)
        return None
    asked = wishes.compile and wishes.engine == "loop"
    least = 0.0 if wishes.compile else 2 * COMPILE_DENSE
    if not asked and rounds * setup.per_round * saved(found, federation, setup, vector) <= least:
        return None
    return Loop(task, federation, setup, dense=found) if is_the_same(found, task, federation) else None


def worth_compiling(setup: Setup, activations: int, rounds: int, rows: int, width: int, room: int) -> bool:
    """Will a run save at least twice what compiling costs, if the step of so many rows of a cohort, with batches of
    this width, is compiled? On a CPU that takes a C++ compiler.
    """
    tensors, matrix = len(setup.space.names), rows * setup.space.size * setup.space.dtype.itemsize
    if setup.device.type == "cuda":
        touched = rows * width * activations + 2 * matrix
        saved = tensors * SAVED_PER_TENSOR + touched * SAVED_PER_BYTE
    elif shutil.which("g++"):
        saved = SAVED_ON_CPU + matrix * SAVED_PER_BYTE_ON_CPU
    else:
        return False
    return rounds * usual_steps(setup, rows, width, room) * saved > 2 * (COMPILE + tensors * COMPILE_PER_TENSOR)


def worth_fusing(task: Task, setup: Setup, activations: int, rounds: int) -> bool:
    """Will a run save at least twice what it costs to compile the fused kernels?"""
    layers = sum(isinstance(module, nn.Conv2d) for module in task.model.modules())
    steps = sum(map(setup.local.count_steps, setup.sizes.tolist())) / len(setup.sizes)
    seen = rounds * setup.per_round * steps * min(_batch(setup), int(setup.sizes.max()))
    return seen * activations * SAVED_BY_FUSING[task.precision] > 2 * layers * FUSE_PER_LAYER


def usual_steps(setup: Setup, rows: int, width: int, room: int) -> int:
    """How many steps of a cohort are played by the recording for `rows`, where `room` clients are asked and those with
    batches of this width step together. One that is the n-th of m by its size is larger than all but an n-th part of
    them.
    """
    local, sizes = setup.local, _sizes_by_width(setup).get(width, setup.sizes[:0])
    asked = room * len(sizes) / len(setup.sizes)

    def until(n: int) -> int:
        """Steps that more than n clients take."""
        if n >= asked:
            return 0
        return local.count_steps(int(sizes.double().quantile(1 - n / asked, interpolation="lower")))

    fewer = [size for size in rows_of_recordings(room) if size < rows]
    return until(fewer[-1] if fewer else 0) - until(rows)


def _sizes_by_width(setup: Setup) -> dict[int, Tensor]:
    """Clients' sizes, by how many places their longest batch gets."""
    widths = {
        size: width_of(max(setup.local.batch_lengths(size), default=0), _batch(setup))
        for size in set(setup.sizes.tolist())
    }
    of_each = torch.tensor([widths[size] for size in setup.sizes.tolist()])
    return {width: setup.sizes[of_each == width] for width in set(widths.values())}


def _batch(setup: Setup) -> int:
    return setup.local.batch_size or int(setup.sizes.max())


def _largest_client(federation: Federation) -> int:
    """Bytes of its samples."""
    one = federation.x[:1].nbytes + federation.y[:1].nbytes
    return max(1, int(federation.sizes.max()) * one)


def _on_cores(engine: Loop | Vector) -> Engine:
    """On a CPU each core takes a share of the clients, where a step is long enough and the model does not draw from the
    one generator of all.
    """
    setup = engine.setup
    cores = min(torch.get_num_threads(), setup.per_round)
    if setup.device.type != "cpu" or cores < 2:
        return engine
    if isinstance(engine, Loop) and engine.dense is not None:  # threads wait for nobody in there
        return Threads.of(engine, cores)
    rows = setup.per_round // cores if isinstance(engine, Vector) else 1
    if rows * _batch(setup) * setup.space.size < rule().shared_from or draws_itself(engine.task, engine.federation):
        return engine
    return Threads.of(engine, cores)


def device_memory(device: torch.device) -> int:
    """All memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def has(model: nn.Module, *kinds: type[nn.Module]) -> bool:
    return any(isinstance(module, kinds) for module in model.modules())


def vector_wins(model: nn.Module, setup: Setup) -> tuple[bool, str]:
    """Is a cohort faster as one matrix, and why? On a GPU always but for PyTorch's own recurrent layers, which `vmap`
    can't batch. On a CPU for many clients with a small dense model: large products gain nothing there, grouped
    convolutions lose to a loop, and recurrent nets to PyTorch's own kernel.
    """
    if has(model, nn.RNNBase, nn.RNNCellBase) or (setup.device.type == "cpu" and is_recurrent(model)):
        return False, "PyTorch's kernel for recurrent nets takes one client at a time"
    if setup.device.type == "cuda":
        return True, "on a GPU the whole cohort is one matrix"
    if has(model, nn.modules.conv._ConvNd, nn.Embedding):
        return False, "on a CPU convolutions and embeddings are faster client by client"
    known = rule()
    few, small = setup.per_round < known.vector_from, setup.space.size < known.vector_below
    if few or not small:
        what = f"{setup.per_round} clients a round are few" if few else f"{setup.space.size:,} parameters are many"
        return False, f"{what} for one matrix on a CPU"
    return True, "a small dense model of many clients is faster as one matrix"
