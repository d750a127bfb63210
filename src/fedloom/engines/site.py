"""Where clients train, if not beside the server: a worker of a cluster, or a real client's own machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedloom.engines.choose import Engine, Wishes, choose_engine, device_memory
from fedloom.federation import Federation
from fedloom.method import Part
from fedloom.population import Absence, Population
from fedloom.stages import Client, Setup, Updates, Work
from fedloom.task import Loss, Precision, Task, set_precision, takes_channels_last

ONE_THREAD_BELOW = 20_000_000  # parameters x batch: below, a step is too short to be shared among threads


@dataclass(frozen=True)
class Learning:
    """What clients learn, and how."""

    model: nn.Module
    loss: str | Loss | None
    precision: Precision
    clients: Sequence[Part[Client]]  # the stages that act at a client
    wishes: Wishes
    rounds: int = 1  # that there will be, as far as anybody knows
    neighbours: int = 1  # sites that share a machine's memory


class Site:
    """An engine, and the clients' side of a Work, on one device."""

    def __init__(self, learning: Learning, device: torch.device, setup: Setup, federation: Federation) -> None:
        self.setup = setup = replace(setup, device=device, start=setup.start.to(device))
        set_precision(learning.precision)
        set_threads(setup)
        task = Task.of(learning.model, learning.loss, device, learning.precision)
        federation = federation.to(device, task.space.dtype)
        self.task = task = replace(task, channels_last=takes_channels_last(task, federation))
        wishes = learning.wishes
        if wishes.max_memory is None and device.type == "cpu":
            wishes = replace(wishes, max_memory=max(1, device_memory(device) // 2 // learning.neighbours))
        self.engine: Engine
        self.engine, self.why = choose_engine(wishes, task, federation, setup, learning.rounds)
        room = wishes.room(device)
        room.host //= learning.neighbours
        self.population = Population(learning.clients, setup, Absence(), room)

    def train(self, work: Work, pull: float = 0.0) -> Updates:
        """Train the clients of a Work, pulled to its start by so much more; they remember it."""
        prepared = self.population.prepare(work)
        if pull:
            own = torch.full((len(prepared),), pull, dtype=torch.float64)
            prepared = replace(prepared, pull=own if prepared.pull is None else prepared.pull.cpu() + own)
        return self.population.finish(prepared, self.engine.train(prepared))


def set_threads(setup: Setup) -> None:
    """On a CPU small steps run on one thread, since several would mostly wait for each other."""
    batch = setup.local.batch_size or int(setup.sizes.max())
    if setup.space.size * batch < ONE_THREAD_BELOW:
        torch.set_num_threads(1)
