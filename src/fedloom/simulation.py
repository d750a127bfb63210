"""A run, put together: everything that `fit` needs to play rounds, checked before the first one."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedloom.engines.choose import Engine, Wishes, choose_engine
from fedloom.engines.site import set_threads
from fedloom.errors import ConfigError, DataError, ModelError, RunError, out_of_memory
from fedloom.evaluate import Evaluator, Score, find_metric
from fedloom.federation import Federation
from fedloom.keys import check_seed
from fedloom.local import Local
from fedloom.memory import Room
from fedloom.method import Method, Pipeline
from fedloom.population import Absence, Availability, Population
from fedloom.round import Outcome, RunState, Traffic, begin_run, play_round
from fedloom.space import Buffers, buffers_of
from fedloom.stages import Metrics, Setup, Updates, Work
from fedloom.task import Loss, Precision, Task, check_fit, computed_in, takes_channels_last

Returned = TypeVar("Returned")
Playing = Generator[Work, Updates, Returned]
Beyond = Callable[[Pipeline, Setup], tuple[Engine, Population, Pipeline]]


def drive(playing: Playing[Returned], train: Callable[[Work], Updates]) -> Returned:
    """Train whatever is asked for, to the end."""
    updates: Any = None  # nothing is sent before the first Work
    while True:
        try:
            work = playing.send(updates)
        except StopIteration as end:
            returned: Returned = end.value
            return returned
        updates = train(work)


@contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    """A device whose memory does not hold even one client is a matter of settings, not a fault."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise RunError(
            f"a single client's training does not fit into the memory of {device} ({str(error).partition('.')[0]}); "
            "choose a smaller batch_size or model, or another device"
        ) from None


@dataclass(frozen=True)
class Simulation:
    """A method, a federation and an engine."""

    method: Method
    pipeline: Pipeline
    setup: Setup
    task: Task
    federation: Federation  # on the device
    engine: Engine
    population: Population
    evaluator: Evaluator
    chosen: str  # which engine by which rule; empty: the one that was asked for

    @classmethod
    def of(
        cls,
        model: nn.Module,
        federation: Federation,
        method: Method,
        *,
        rounds: int,
        wishes: Wishes,
        local: Local,
        room: Room | None = None,
        clients_per_round: int | float | None = None,
        loss: str | Loss | None = None,
        metric: str | Score = "accuracy",
        device: str | torch.device = "auto",
        precision: Precision = "auto",
        seed: int = 0,
        availability: Availability = None,
        dropout_rate: float = 0.0,
        beyond: Beyond | None = None,
    ) -> "Simulation":
        """`beyond` brings clients that are not simulated here: an engine that asks them, their side of a Work, and the
        stages as such clients play them.
        """
        place = find_device(device)
        task = Task.of(model, loss, place, precision)
        name, score = find_metric(metric)
        check_seed(seed)
        moved = federation.to(place, task.space.dtype)
        pipeline = method.pipeline()
        _check_buffers(pipeline, task.model)
        setup = Setup(
            space=task.space,
            clients=len(federation),
            sizes=federation.sizes,
            per_round=cohort_size(clients_per_round, len(federation)),
            local=local,
            seed=seed,
            device=place,
            start=task.space.flatten(task.model),
            stages=tuple(part.stage for part in pipeline.parts),
        )
        if len(moved.x):
            check_fit(task, moved, local)
            task = replace(task, channels_last=takes_channels_last(task, moved))
        for part in pipeline.parts:
            before, moved = moved, part.stage.tamper(moved, setup)
            if before.shards is not None and moved is not before:
                raise DataError(
                    f"{part.key} changes the clients' data, but these stay on disk (lazy=True); leave lazy out"
                )
        absence = Absence.of(availability, dropout_rate, len(federation))
        engine: Engine
        population: Population
        if beyond is not None:
            engine, population, pipeline = beyond(pipeline, setup)
            why = ""
        elif wishes.on_ray:
            from fedloom.engines.ray import spread_out

            engine, population = spread_out(
                model, loss, precision, moved, pipeline, setup, wishes, absence, rounds, str(device)
            )
            why = ""
        else:
            with guarded(place):
                engine, why = choose_engine(wishes, task, moved, setup, rounds)
            population = Population(pipeline.clients, setup, absence, room or wishes.room(place))
        return cls(
            method,
            pipeline,
            setup,
            task,
            moved,
            engine,
            population,
            Evaluator(task, moved.preparation, name, score),
            f"engine {engine.name}: {why}" if wishes.engine == "auto" and beyond is None else "",
        )

    def begin(self) -> RunState:
        return begin_run(self.pipeline, self.setup, buffers_of(self.task.model))

    def works(
        self,
        state: RunState,
        before: Callable[[Work], None] = lambda work: None,
        after: Callable[[Work, Updates], None] = lambda work, updates: None,
    ) -> Playing[Outcome]:
        """One round: it yields every Work as the clients see it, and is sent what they trained. `before` sees a Work
        when it is asked, `after` what the server received from it.
        """
        playing = play_round(self.pipeline, self.setup, state, after)
        work = next(playing)
        while True:
            before(work)
            prepared = self.population.prepare(work)
            updates = self.population.finish(prepared, (yield prepared))
            try:
                work = playing.send(updates)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome

    def play(self, state: RunState) -> Outcome:
        """One round, trained by this simulation's own engine."""
        return drive(self.works(state), self.train)

    def train(self, work: Work) -> Updates:
        with guarded(self.setup.device):
            return self.engine.train(work)

    @property
    def moved(self) -> int | None:
        """Bytes that went from process to process so far; None: there is only one."""
        return getattr(self.engine, "moved", None)

    def noted(self) -> Metrics:
        """What the engine has to say of the round that is over, where its clients are real ones."""
        noted = getattr(self.engine, "noted", None)
        return {} if noted is None else noted()

    def deployed(self, state: RunState) -> Tensor:
        """The model that users get [P]."""
        server = self.pipeline.server
        return server.stage.deploy(state.stages[server.key], state.theta)

    def evaluate(self, state: RunState) -> dict[str, float]:
        """Test and validation metrics of the deployable model, and of the cloud model where it is another."""
        deployed, test = self.deployed(state), self.federation.test
        found = self.measure(deployed, state.buffers)
        if test is not None and deployed is not state.theta:
            found |= self.evaluator.measure(state.theta, state.buffers, test, "cloud")
        ask_clients = getattr(self.engine, "evaluate", None)
        if ask_clients is not None:
            found |= ask_clients(state.round, deployed, state.buffers)
        return found

    def measure(self, flat: Tensor, buffers: Buffers) -> dict[str, float]:
        """Test and validation metrics of a model [P]."""
        holdouts = {"test": self.federation.test, "validation": self.federation.validation}
        known = {prefix: holdout for prefix, holdout in holdouts.items() if holdout is not None}
        parts = [self.evaluator.measure(flat, buffers, holdout, prefix) for prefix, holdout in known.items()]
        return {name: value for part in parts for name, value in part.items()}

    def traffic_bytes(self, traffic: Traffic, state: RunState) -> Mapping[str, int]:
        """Bytes on the wire: the model and its buffers both ways, and what the stages add."""
        space = self.setup.space
        extra = [part.stage.wire(space) for part in self.pipeline.parts]
        buffers = sum(b.numel() * b.element_size() for b in state.buffers.values())
        down = (space.size + sum(wire.down for wire in extra)) * space.dtype.itemsize + buffers
        up = (space.size + sum(wire.up for wire in extra)) * space.dtype.itemsize + buffers
        if self.pipeline.weights == "samples":
            up += space.dtype.itemsize  # the number of samples
        return {"uplink_bytes": up * traffic.answered, "downlink_bytes": down * traffic.asked}

    @contextmanager
    def numerics(self) -> Iterator[None]:
        """The precision and the threads that suit this run; all settings are put back after it."""
        threads = torch.get_num_threads()
        with computed_in(self.task.precision):
            set_threads(self.setup)
            try:
                yield
            finally:
                torch.set_num_threads(threads)


def _check_buffers(pipeline: Pipeline, model: nn.Module) -> None:
    """Buffers are averaged beside the aggregator; one that goes on without updates has none to average."""
    buffer = next(iter(buffers_of(model)), None)
    if buffer is not None and not pipeline.aggregator.stage.needs_updates:
        method = pipeline.aggregator.key.partition(".")[0]
        raise ModelError(
            f"{method} covers parameters only, but {type(model).__name__} has buffers ({buffer}), whose average would "
            "stay bare; use a model without batch norm"
        )


def find_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"unknown device {device!r}: choose auto, cpu or cuda") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={str(device)!r} was asked for, but PyTorch finds no CUDA device here")
    return found


def cohort_size(wanted: int | float | None, clients: int) -> int:
    """A count, or a fraction in (0, 1] of all clients; None: 10, or all where there are fewer."""
    if wanted is None:
        return min(10, clients)
    if isinstance(wanted, bool) or not isinstance(wanted, int | float):
        raise ConfigError(f"clients_per_round must be a count or a fraction, not {wanted!r}")
    if isinstance(wanted, float):
        if not 0 < wanted <= 1:
            raise ConfigError(f"clients_per_round={wanted!r}: a fraction lies in (0, 1], a count is a whole number")
        return max(1, int(wanted * clients + 1e-9))
    if not 0 < wanted <= clients:
        raise ConfigError(f"clients_per_round={wanted} must be between 1 and the number of clients, {clients}")
    return wanted
