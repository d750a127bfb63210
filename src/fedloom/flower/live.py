"""FedAsync with real clients: several are at work at once, and whoever is ready first is mixed in first.

The simulated schedule draws how old the model is that a client starts from. Here every client starts from the newest
model, as many are at work as a synchronous round has clients, and the age of an update is what it is: the number of
models that were made since. Where `max_staleness` is written, older ones are left out.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fedloom.method import Pipeline
from fedloom.methods.fedasync import Asynchronous
from fedloom.stages import Cohorts, Collected, Draw, Round, Setup, State


class Crew(Protocol):
    """An engine under such a schedule sends a Work of one client without waiting for it, as long as others are still to
    be sent; then it answers with whatever comes first, and says in `extra` which "work" that was, and its "start".
    """

    def busy(self) -> Set[int]: ...

    def spare(self, client: int) -> int: ...

    def note(self, kind: str, client: int, why: str) -> None: ...

    def accept(self, clients: Tensor, w: int) -> None: ...


def live(pipeline: Pipeline, crew: Crew) -> Pipeline:
    """The same stages, for clients that take their own time."""
    stage = pipeline.schedule.stage
    if not isinstance(stage, Asynchronous):
        return pipeline
    return replace(pipeline, schedule=replace(pipeline.schedule, stage=Live(stage.max_staleness, crew)))


@dataclass(frozen=True)
class Live(Asynchronous):
    crew: Crew = field(compare=False)

    def init(self, setup: Setup) -> State:
        first = torch.zeros(1, dtype=torch.int64)
        return {"since": first, "works": first[0]}  # the first Work that each model was sent with; Works so far

    def collect(self, state: State, cohorts: Cohorts) -> Collected:
        while True:
            work = cohorts.ask(self._free(cohorts), cohorts.theta, cohorts.buffers)
            state = {**state, "works": torch.tensor(work.w + 1)}
            updates = yield work
            if not len(updates):
                continue
            extra = dict(updates.extra)
            version = int(torch.searchsorted(state["since"], extra["work"], right=True)[0]) - 1
            stale = len(state["since"]) - 1 - version
            if self.max_staleness is None or stale <= self.max_staleness:
                break
            why = f"it is {stale} models old, more than max_staleness={self.max_staleness}"
            self.crew.note("refused", int(updates.clients[0]), why)
        self.crew.accept(updates.clients[updates.finite], int(extra["work"][0]))
        rebased = updates.rows.plus(cohorts.theta - extra.pop("start")[0])  # theta - x_new
        return state, replace(
            updates, rows=rebased, extra={**extra, "staleness": torch.tensor([stale], dtype=torch.float64)}
        )

    def observe(self, state: State, record: Round) -> State:
        return {**state, "since": torch.cat([state["since"], state["works"][None]])}

    def _free(self, cohorts: Cohorts) -> Draw:
        """A client that is not at work: the first that the sampler draws, or the next one after it. One that had
        two Works at once would go on from the same memory twice.
        """
        busy = self.crew.busy()
        one = cohorts.draw(1).first(1)
        if busy:
            several = cohorts.draw(len(busy) + 1)
            free = [i for i, client in enumerate(several.clients.tolist()) if client not in busy]
            if free:
                chosen = torch.tensor(free[:1])
                return Draw(several.clients[chosen], several.occurrence[chosen], several.counts[chosen], one.share)
            one = one._replace(clients=torch.tensor([self.crew.spare(int(one.clients[0]))]))
        return one
