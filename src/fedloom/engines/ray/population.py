"""The clients of a run on a cluster, as the server sees them."""

from collections.abc import Mapping

from fedloom.engines.ray.engine import Ray
from fedloom.memory import Remembering
from fedloom.population import Absence, Population
from fedloom.stages import Setup, Updates, Work


class Scattered(Population):
    """Who answers is decided here; what clients do and remember is the workers' business."""

    def __init__(self, engine: Ray, setup: Setup, absence: Absence) -> None:
        super().__init__([], setup, absence)
        self.engine = engine

    @property
    def memory(self) -> Mapping[str, Remembering]:
        return self.engine.keeping.memory

    def prepare(self, work: Work) -> Work:
        return self.present(work)

    def finish(self, work: Work, updates: Updates) -> Updates:
        return updates

    def settle(self) -> None:
        self.engine.keeping.settle()
