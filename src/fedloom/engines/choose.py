"""Which engine trains a run: a fixed rule, decided before the first round and written into the run's config."""

from typing import Protocol

from fedloom.engines.loop import Loop
from fedloom.errors import ConfigError, nearest
from fedloom.federation import Federation
from fedloom.stages import Setup, Updates, Work
from fedloom.task import Task

ENGINES = ("auto", "loop")


class Engine(Protocol):
    """Trains every client of a Work from its start, by the one local step."""

    @property
    def name(self) -> str: ...

    def train(self, work: Work) -> Updates: ...


def choose_engine(name: str, task: Task, federation: Federation, setup: Setup) -> Engine:
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}: {nearest(str(name), ENGINES)}")
    return Loop(task, federation, setup)
