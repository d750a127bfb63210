"""One round: the pipeline of stages, as a generator that yields Work and is sent Updates. It trains nothing itself.

    play = play_round(pipeline, setup, state)
    work = next(play)
    while True:
        work = play.send(engine(work))

StopIteration brings the Outcome.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.random import Generator as Rng
from torch import Tensor

from fedloom.keys import sampler_rng, schedule_rng
from fedloom.method import Pipeline
from fedloom.space import Buffers, average_buffers
from fedloom.stages import Cohorts, Draw, Metrics, Round, Setup, State, Updates, Work


@dataclass(frozen=True)
class RunState:
    """Everything that a run knows between two rounds, but for the clients' memory."""

    round: int  # rounds done
    work: int  # Works done
    theta: Tensor  # [P] the cloud model
    buffers: Buffers
    stages: Mapping[str, State]


@dataclass(frozen=True)
class Traffic:
    """What the Works of one round added up to."""

    works: float = 0.0  # per client slot
    asked: int = 0
    answered: int = 0
    diverged: tuple[int, ...] = ()
    local_steps: int = 0
    samples: int = 0
    loss: float = 0.0  # summed over samples

    def plus(self, work: Work, updates: Updates) -> "Traffic":
        good, samples, loss = updates.finite.numpy(), updates.samples.numpy(), updates.loss.numpy()
        return Traffic(
            self.works + work.share,
            self.asked + len(work),
            self.answered + len(updates),
            self.diverged + tuple(updates.clients.numpy()[~good].tolist()),
            self.local_steps + int(updates.steps.numpy().sum()),
            self.samples + int(samples[good].sum()),
            self.loss + float((loss[good] * samples[good]).sum()),
        )


@dataclass(frozen=True)
class Outcome:
    """A finished round: the new state, what led to it (None: nothing was averaged), its traffic and metrics."""

    state: RunState
    record: Round | None
    traffic: Traffic
    metrics: Metrics


def begin_run(pipeline: Pipeline, setup: Setup, buffers: Buffers) -> RunState:
    """The state before the first round."""
    stages = {part.key: part.stage.init(setup) for part in pipeline.parts}
    return RunState(0, 0, setup.start, buffers, stages)


def _ignore(work: Work, updates: Updates) -> None:
    pass


def play_round(
    pipeline: Pipeline, setup: Setup, state: RunState, heard: Callable[[Work, Updates], None] = _ignore
) -> Generator[Work, Updates, Outcome]:
    """One aggregation. `heard` is told what the server received from each Work."""
    desk = _Desk(pipeline, setup, state, heard)
    yield from desk.survey()
    updates = received = yield from desk.collect()
    for part in pipeline.updates:
        if not len(updates):
            break
        desk.stages[part.key], updates = part.stage.apply(desk.stages[part.key], updates)
        updates = desk.weigh(updates)
    if not len(updates) and pipeline.aggregator.stage.needs_updates:
        # Nobody is left: the model and what the stages know of it stay as they were.
        kept = replace(state, round=state.round + 1, work=desk.work, stages=desk.stages)
        return Outcome(kept, None, desk.traffic, desk.report())

    updates, aggregate = pipeline.aggregator.stage.combine(desk.stages[pipeline.aggregator.key], updates)
    record = Round(state.round, state.theta, received, updates, aggregate, scaled=aggregate, after=state.theta)
    if pipeline.rescaler:
        key = pipeline.rescaler.key
        desk.stages[key], scaled = pipeline.rescaler.stage.rescale(desk.stages[key], record)
        record = replace(record, scaled=scaled)
    key = pipeline.server.key
    desk.stages[key], after = pipeline.server.stage.step(desk.stages[key], record)
    record = replace(record, after=after)
    for part in pipeline.parts:
        desk.stages[part.key] = part.stage.observe(desk.stages[part.key], record)

    buffers = average_buffers(updates.buffers, updates.weights)
    done = RunState(state.round + 1, desk.work, after, buffers, desk.stages)
    return Outcome(done, record, desk.traffic, desk.report())


def probe(pipeline: Pipeline, setup: Setup, state: RunState, clients: Tensor) -> Work:
    """What these clients would be asked if they all took part in the next round; it leaves no trace in their memory."""
    nothing = torch.zeros_like(clients)
    draw = Draw(clients, nothing, torch.ones_like(clients), 0.0)
    return replace(_Desk(pipeline, setup, state).ask(draw, state.theta, state.buffers), commit=False)


class _Desk:
    """The server's desk during one round: it writes Works, reads what comes back, and lets every stage hear of it."""

    def __init__(
        self,
        pipeline: Pipeline,
        setup: Setup,
        state: RunState,
        listener: Callable[[Work, Updates], None] = _ignore,
    ) -> None:
        self.pipeline = pipeline
        self.setup = setup
        self.theta, self.buffers = state.theta, state.buffers
        self.stages = {part.key: part.stage.before_round(state.stages[part.key]) for part in pipeline.parts}
        self.listener = listener
        self.work = state.work
        self.traffic = Traffic()
        self.wants = frozenset().union(*(part.stage.wants for part in pipeline.parts))

    def collect(self) -> Generator[Work, Updates, Updates]:
        key, schedule = self.pipeline.schedule.key, self.pipeline.schedule.stage
        cohorts = Cohorts(self.theta, self.buffers, self.setup.space, self.draw, self.rng, self.ask)
        collecting = schedule.collect(self.stages[key], cohorts)
        work = next(collecting)
        while True:
            updates = self.receive(work, (yield work))
            try:
                work = collecting.send(updates)
            except StopIteration as end:
                self.stages[key], updates = end.value
                return self.weigh(updates)

    def draw(self, number: int | None = None) -> Draw:
        """The sampler's clients for the next Work: `number` of them, or a full cohort."""
        key, sampler = self.pipeline.sampler.key, self.pipeline.sampler.stage
        full = self.setup.per_round
        drawn = sampler.draw(
            self.stages[key], self.setup, number or full, self.work, sampler_rng(self.setup.seed, self.work)
        )
        return _places(drawn, once=self.pipeline.stateful, share=1.0 if number is None else number / full)

    def rng(self) -> Rng:
        return schedule_rng(self.setup.seed, self.work)

    def survey(self) -> Generator[Work, Updates, None]:
        """Let the stages that want it hear every client at the starting model, before anything is trained."""
        surveying = [part for part in self.pipeline.parts if part.stage.surveys]
        if not surveying or self.work:
            return
        for clients in torch.split(torch.arange(self.setup.clients), self.setup.per_round):
            ones = torch.ones_like(clients)
            work = self.ask(Draw(clients, torch.zeros_like(clients), ones, 0.0), self.theta, self.buffers)
            untrained = replace(work, w=0, rates=work.rates[..., :0], max_steps=0, commit=False)
            self.work = 0  # a survey is no Work: it costs none, and the first one draws as without it
            updates = yield untrained
            updates = updates.only(updates.finite.nonzero().flatten())
            for part in surveying:
                self.stages[part.key] = part.stage.heard(self.stages[part.key], untrained, updates)

    def ask(self, draw: Draw, start: Tensor, buffers: Buffers) -> Work:
        """The next Work; the rate stage says how fast its clients learn."""
        limit = self.pipeline.rate.stage.limit(self.stages[self.pipeline.rate.key])
        work = Work(
            w=self.work,
            clients=draw.clients,
            occurrence=draw.occurrence,
            counts=draw.counts,
            start=start,
            buffers=buffers,
            rates=self.rates(draw.clients, limit),
            max_steps=limit,
            sent={part.key: part.stage.send(self.stages[part.key]) for part in self.pipeline.clients},
            wants=self.wants,
            share=draw.share,
        )
        self.work += 1
        return work

    def rates(self, clients: Tensor, limit: int | None) -> Tensor:
        """[steps] for all, or [K, steps] where a client's rates depend on how long its own run is."""
        key, rate = self.pipeline.rate.key, self.pipeline.rate.stage
        local = self.setup.local
        steps = [min(local.count_steps(n), limit or 1 << 62) for n in self.setup.sizes[clients].tolist()]
        if not rate.by_length:
            return local.lr * rate.factors(self.stages[key], max(steps, default=1))
        table = torch.zeros(len(steps), max(steps, default=1), dtype=torch.float64)
        for row, n in zip(table, steps, strict=True):
            row[:n] = local.lr * rate.factors(self.stages[key], n)
        return table

    def receive(self, work: Work, updates: Updates) -> Updates:
        """Let hostile clients have their way, count what came back, leave out what diverged, and tell every stage."""
        for part in self.pipeline.updates:
            self.stages[part.key], updates = part.stage.intercept(self.stages[part.key], work, updates)
        self.listener(work, updates)
        self.traffic = self.traffic.plus(work, updates)
        if not bool(updates.finite.all()):
            updates = updates.only(updates.finite.nonzero().flatten())
        for part in self.pipeline.parts:
            self.stages[part.key] = part.stage.heard(self.stages[part.key], work, updates)
        return updates

    def weigh(self, updates: Updates) -> Updates:
        """Set the averaging weights: by samples or equal, a client as often as it was drawn."""
        mass = updates.counts.double()
        if self.pipeline.weights == "samples":
            mass = mass * updates.samples
        return replace(updates, weights=(mass / mass.sum()).to(self.setup.device, non_blocking=True))

    def report(self) -> Metrics:
        found: Metrics = {}
        for part in self.pipeline.parts:
            for name, value in part.stage.report(self.stages[part.key]).items():
                found[f"{part.key.partition('.')[0]}.{name}"] = value.tolist()
        return found


def _places(drawn: np.ndarray, once: bool, share: float) -> Draw:
    """Number the occurrences; `once`: a client drawn twice stands once, with a count of two."""
    seen: dict[int, int] = {}
    clients, occurrence = [], []
    for client in drawn.tolist():
        times = seen.get(client, 0)
        seen[client] = times + 1
        if not (once and times):
            clients.append(client)
            occurrence.append(times)
    counts = [seen[c] for c in clients] if once else [1] * len(clients)
    places = torch.tensor([clients, occurrence, counts], dtype=torch.int64)
    return Draw(places[0], places[1], places[2], share)
