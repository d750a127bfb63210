"""Which engine trains a run: a fixed rule, decided before the first round and written into the run's config."""

import logging
import os
from typing import Protocol

import torch
from torch import nn

from fedloom.engines.loop import Loop
from fedloom.engines.threads import Threads, draws_itself
from fedloom.engines.vector import Vector, mixes_samples, refusal
from fedloom.errors import ConfigError, nearest
from fedloom.federation import Federation
from fedloom.models.recurrent import LSTMLayer
from fedloom.stages import Setup, Updates, Work
from fedloom.task import Task

ENGINES = ("auto", "loop", "vector")
LOG = logging.getLogger("fedloom")
VECTOR_FROM = 6  # clients in a round, and
VECTOR_BELOW = 30_000  # parameters: on a CPU one matrix pays only where a step is too short for its calls
SHARED_FROM = 4_000_000  # rows x batch x parameters of a step: below, threads wait for each other
MATRICES = 12  # of [K, P] that a step may hold at once


class Engine(Protocol):
    """Trains every client of a Work from its start, by the one local step."""

    @property
    def name(self) -> str: ...

    def train(self, work: Work) -> Updates: ...


def choose_engine(name: str, task: Task, federation: Federation, setup: Setup) -> Engine:
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}: {nearest(str(name), ENGINES)}")
    chosen = ("vector" if vector_wins(task.model, setup) else "loop") if name == "auto" else name
    if chosen == "vector":
        why = refusal(task, federation, setup)
        if not why:
            mixes = mixes_samples(task, federation)
            graphs = setup.device.type == "cuda"
            return _on_cores(Vector(task, federation, setup, mixes, graphs, _rows_that_fit(setup)))
        if name == "vector":
            LOG.warning("engine=vector: %s; clients are trained one after the other instead (engine=loop)", why)
    return _on_cores(Loop(task, federation, setup))


def _on_cores(engine: Loop | Vector) -> Engine:
    """On a CPU each core takes a share of the clients, where a step is long enough and the model does not draw from the
    one generator of all.
    """
    setup = engine.setup
    cores = min(torch.get_num_threads(), setup.per_round)
    if setup.device.type != "cpu" or cores < 2:
        return engine
    rows = setup.per_round // cores if isinstance(engine, Vector) else 1
    batch = setup.local.batch_size or int(setup.sizes.max())
    if rows * batch * setup.space.size < SHARED_FROM or draws_itself(engine.task, engine.federation):
        return engine
    return Threads.of(engine, cores)


def _rows_that_fit(setup: Setup) -> int:
    """A quarter of the memory for matrices: the cohort, its start, gradients, moments, corrections. Of all memory, not
    of what is free at the moment, so that the same run is cut into the same pieces.
    """
    if setup.device.type == "cuda":
        memory = torch.cuda.get_device_properties(setup.device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, int(memory) // 4 // (MATRICES * setup.space.size * setup.space.dtype.itemsize))


def vector_wins(model: nn.Module, setup: Setup) -> bool:
    """Is a cohort faster as one matrix? On a GPU always but for LSTMs, whose fused kernel is as fast. On a CPU for many
    clients with a small dense model: large products gain nothing there, grouped convolutions lose to a loop, and
    recurrent nets to PyTorch's own kernel.
    """
    if any(isinstance(module, LSTMLayer | nn.RNNBase | nn.RNNCellBase) for module in model.modules()):
        return False
    if setup.device.type == "cuda":
        return True
    dense = not any(isinstance(module, nn.modules.conv._ConvNd | nn.Embedding) for module in model.modules())
    return dense and setup.per_round >= VECTOR_FROM and setup.space.size < VECTOR_BELOW
