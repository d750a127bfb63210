"""The stages of a round, and the records that pass between them.

    sampler -> schedule -> [ client + rate ] -> update stages -> aggregator -> rescaler -> server

A stage is a frozen dataclass of its parameters. What it knows is a `State`, a dict of tensors that the round hands in
and takes back; nothing else survives a round. One sign everywhere: an update is start minus end, and the server
descends it.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.random import Generator as Rng
from torch import Tensor

from fedloom.federation import Federation
from fedloom.local import Local
from fedloom.rows import Rows
from fedloom.space import Buffers, Space

State = dict[str, Tensor]
Weighting = Literal["samples", "equal"]
Metrics = dict[str, float | list[Any]]
Sent = Mapping[str, Tensor | Rows]


@dataclass(frozen=True)
class Setup:
    """What a stage may know when it starts."""

    space: Space
    clients: int  # N, the population
    sizes: Tensor  # [N] samples of each client
    per_round: int  # clients that a Work asks for
    local: Local
    seed: int
    device: torch.device
    start: Tensor  # [P] the model before the first round
    stages: "tuple[Stage, ...]" = ()  # all stages of the round, the asking one among them


@dataclass(frozen=True)
class Work:
    """What a cohort of K clients is asked to do. Every correction in the papers is affine in the local model:

        gradient used = gradient + pull_k * (x - start_k) + drift_k

    so Work is data, and whoever trains it knows no method. The server fills in all but `pull` and `drift`, which the
    clients' side adds from what was `sent` and from what each client remembers.
    """

    w: int  # number of this Work, counted over the whole run
    clients: Tensor  # [K]
    occurrence: Tensor  # [K] 0 for the first time that a client stands in this Work, 1 for the second
    counts: Tensor  # [K] how often the sampler drew it, where a client is trained once for several draws
    start: Tensor  # [P] for all, or [K, P]
    buffers: Buffers  # as `start`: for all, or stacked [K, ...]
    rates: Tensor  # [steps] for all, or [K, steps]; learning rate of each local step
    max_steps: int | None = None
    sent: Mapping[str, State] = field(default_factory=dict)  # by client stage
    wants: frozenset[str] = frozenset()  # what the engine must report beside the update
    share: float = 1.0  # of a full cohort: asynchronous schedules ask for one client of many
    commit: bool = True  # False: a probe, which leaves the clients' memory as it was
    slots: Tensor | None = None  # [K] place of each client in the cohort that was asked; None: 0..K-1
    pull: Tensor | None = None  # [K]
    drift: Tensor | None = None  # [K, P]

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def places(self) -> Tensor:
        return torch.arange(len(self)) if self.slots is None else self.slots

    def only(self, keep: Tensor) -> "Work":
        """The part of this Work for the clients at these positions."""
        own = self.start.dim() == 2
        return replace(
            self,
            clients=self.clients[keep],
            occurrence=self.occurrence[keep],
            counts=self.counts[keep],
            start=self.start[keep.to(self.start.device)] if own else self.start,
            buffers={n: b[keep.to(b.device)] for n, b in self.buffers.items()} if own else self.buffers,
            rates=self.rates[keep] if self.rates.dim() == 2 else self.rates,
            slots=self.places[keep],
            pull=None if self.pull is None else self.pull[keep.to(self.pull.device)],
            drift=None if self.drift is None else self.drift[keep.to(self.drift.device)],
        )


@dataclass(frozen=True)
class Updates:
    """What came back: one row per client that answered."""

    clients: Tensor  # [K]
    slots: Tensor  # [K] place in the cohort that was asked
    counts: Tensor  # [K]
    samples: Tensor  # [K] samples that the client has
    steps: Tensor  # [K] local steps taken
    loss: Tensor  # [K] mean training loss over the samples seen
    finite: Tensor  # [K] False: loss or update holds NaN or infinity
    rows: Rows  # [K, P] start minus end
    buffers: Buffers  # stacked [K, ...]
    sent: Mapping[str, Sent] = field(default_factory=dict)  # by client stage: what its `end` sent up, [K, P] as Rows
    extra: State = field(default_factory=dict)  # what the Work wanted, [K, ...] each
    owner: Tensor | None = None  # [K] who a server-side memory of a row belongs to; None: the client
    weights: Tensor = field(default_factory=lambda: torch.empty(0))  # [K] averaging weights, set by the round

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def owners(self) -> Tensor:
        return self.clients if self.owner is None else self.owner

    @property
    def up(self) -> Mapping[str, State]:
        """By client stage: what its `end` sent up, [K, ...] each. `total_up` is enough for most, and moves less."""
        return {
            stage: {n: v.matrix if isinstance(v, Rows) else v for n, v in values.items()}
            for stage, values in self.sent.items()
        }

    def total_up(self, name: str) -> Tensor | None:
        """The sum over clients of what a client stage of any method sent up under this name; None: there is no such."""
        found = next((values[name] for values in self.sent.values() if name in values), None)
        if isinstance(found, Rows):
            return found.weighted_sum(torch.ones(len(found)))
        return None if found is None else found.sum(0)

    def only(self, keep: Tensor) -> "Updates":
        """The rows at these positions."""

        def pick(values: Tensor) -> Tensor:
            return values[keep.to(values.device)]

        def choose(values: Tensor | Rows) -> Tensor | Rows:
            return values.select(keep) if isinstance(values, Rows) else pick(values)

        return replace(
            self,
            **{name: pick(getattr(self, name)) for name in _PER_CLIENT},
            rows=self.rows.select(keep),
            buffers={n: pick(b) for n, b in self.buffers.items()},
            sent={stage: {n: choose(v) for n, v in values.items()} for stage, values in self.sent.items()},
            extra={n: pick(v) for n, v in self.extra.items()},
            weights=pick(self.weights) if len(self.weights) else self.weights,
            owner=None if self.owner is None else pick(self.owner),
        )


def as_sent(values: State, space: Space) -> Sent:
    """What is as long as the model goes through the operations on rows, as the update itself does."""
    return {n: Rows(v, space) if v.dim() == 2 and v.shape[1] == space.size else v for n, v in values.items()}


_PER_CLIENT = ("clients", "slots", "counts", "samples", "steps", "loss", "finite")


@dataclass(frozen=True)
class Round:
    """One aggregation, as far as it has come: each later stage reads what the earlier ones filled in."""

    number: int  # 0 first
    theta: Tensor  # [P] the cloud model that the round started from
    received: Updates  # what the schedule brought
    updates: Updates  # what was averaged: after every update stage
    aggregate: Tensor  # [P] the average
    scaled: Tensor  # [P] the average after the rescaler
    after: Tensor  # [P] the cloud model that the next round starts from


class Wire(NamedTuple):
    """Numbers that a stage sends per client beside the model."""

    down: int = 0
    up: int = 0


class Stage:
    """What all stages share. `before_round` precedes the first Work of a round, `heard` follows every Work, `observe`
    follows the server step.
    """

    kind: ClassVar[str]
    weights: ClassVar[Weighting | None] = None  # "equal": this method's paper averages with equal weights
    wants: ClassVar[frozenset[str]] = frozenset()  # of the engine: "mean_gradient", "final_score", "step_norm"

    @property
    def breaks_privacy(self) -> str | None:
        """Why no differential privacy can be claimed beside it, as words that follow its name; None: it acts at a
        client before its update is clipped, or reads nothing but models that were released.
        """
        return "does not say whether it reads single updates (breaks_privacy)"

    @property
    def reads_rows(self) -> bool:
        """Does it read whole updates of single clients (`rows.matrix`)? A cluster then sends them up at once. Sums,
        norms, distances and mixtures of rows do not count: a cluster answers them without moving rows.
        """
        return False

    @property
    def surveys(self) -> bool:
        """Does it need to hear every client at the starting model, untrained, before the first round?"""
        return False

    def join(self, others: Mapping[str, "Stage"]) -> str | None:
        """Refuse a union (by name of method and stage) that has no meaning; return a remark on one of no use."""
        return None

    def tamper(self, federation: Federation, setup: Setup) -> Federation:
        """The data that clients train on, where hostile ones have changed theirs; asked once, before a run begins."""
        return federation

    def init(self, setup: Setup) -> State:
        return {}

    def before_round(self, state: State) -> State:
        return state

    def heard(self, state: State, work: Work, updates: Updates) -> State:
        return state

    def observe(self, state: State, record: Round) -> State:
        return state

    def report(self, state: State) -> Mapping[str, Tensor]:
        """Numbers for the round's metrics."""
        return {}

    def wire(self, space: Space) -> Wire:
        return Wire()


class Sampler(Stage):
    """Who takes part?"""

    kind = "sampler"

    def draw(self, state: State, setup: Setup, number: int, w: int, rng: Rng) -> np.ndarray:
        """About `number` clients for Work w, in random order; a client may stand in it twice."""
        raise NotImplementedError


class Draw(NamedTuple):
    """The clients that were drawn for the next Work."""

    clients: Tensor  # [K]
    occurrence: Tensor  # [K]
    counts: Tensor  # [K]
    share: float  # of a full cohort

    def first(self, number: int) -> "Draw":
        return Draw(self.clients[:number], self.occurrence[:number], self.counts[:number], self.share)


class Cohorts(NamedTuple):
    """What a schedule works with: the cloud model, a way to draw clients, and a way to ask them."""

    theta: Tensor
    buffers: Buffers
    space: Space
    draw: Callable[..., Draw]  # draw(number=per_round)
    rng: Callable[[], Rng]  # what the schedule itself may draw from for the next Work
    ask: Callable[[Draw, Tensor, Buffers], Work]  # ask(draw, start, buffers): [P], or [K, P] with stacked buffers


Collected = Generator[Work, Updates, tuple[State, Updates]]


class Schedule(Stage):
    """How do models travel before they are averaged?"""

    kind = "schedule"
    travels: ClassVar[bool] = False  # True: a row belongs to a travelling model, not to one client

    def works(self, per_round: int) -> float:
        """Works per client slot that one aggregation costs."""
        return 1.0

    def collect(self, state: State, cohorts: Cohorts) -> Collected:
        """Yield Works, be sent Updates, return what is to be averaged: rows are theta minus end."""
        raise NotImplementedError


class Correction(NamedTuple):
    """What a client stage adds to each local gradient."""

    pull: Tensor | None = None  # [K]
    drift: Tensor | None = None  # [K, P]


class Info(NamedTuple):
    """What the clients' side knows of a Work."""

    w: int
    clients: Tensor  # [K]
    samples: Tensor  # [K]
    start: Tensor  # [P], or [K, P]
    rates: Tensor  # [steps], or [K, steps]


class Client(Stage):
    """How is the local gradient corrected, and what does a client remember?"""

    kind = "client"
    remembers: ClassVar[Mapping[str, Literal["row", "scalar"]]] = {}

    def send(self, state: State) -> State:
        """What every client of the next Work is told beside the model."""
        return {}

    def begin(self, memory: State, sent: State, info: Info) -> Correction:
        """Before local training. `memory` holds [K, P] or [K] tensors, zero for a client that was never seen."""
        return Correction()

    def end(self, memory: State, sent: State, info: Info, updates: Updates) -> tuple[State, State]:
        """After local training: what each client remembers from now on, and what it sends up beside its update. This
        is the place to read rows that the stage wants of the engine: on a cluster they go no farther.
        """
        return memory, {}


class Rate(Stage):
    """Which learning rate has local step j? As a factor on the local learning rate."""

    kind = "rate"
    by_length: ClassVar[bool] = False  # True: a shorter local run has other rates, not just fewer of them

    def factors(self, state: State, steps: int) -> Tensor:
        """[steps]"""
        raise NotImplementedError

    def limit(self, state: State) -> int | None:
        """At most so many local steps from now on."""
        return None


class Update(Stage):
    """What happens to each client's update before averaging?"""

    kind = "update"
    rank: ClassVar[int] = 50  # update stages act in this order, not in that of the text

    @property
    def compares(self) -> bool:
        """Does it need several updates to do anything?"""
        return True

    def intercept(self, state: State, work: Work, updates: Updates) -> tuple[State, Updates]:
        """May change what a Work brings, before it is counted and before any stage hears of it. Then a model that
        travels on is a changed one.
        """
        return state, updates

    def apply(self, state: State, updates: Updates) -> tuple[State, Updates]:
        """May change rows, or drop some."""
        raise NotImplementedError


class Aggregator(Stage):
    """How are updates averaged?"""

    kind = "aggregator"
    needs_updates: ClassVar[bool] = True  # False: a round goes on although nobody answered

    def combine(self, state: State, updates: Updates) -> tuple[Updates, Tensor]:
        """The updates with the weights that were used, and their average [P]."""
        raise NotImplementedError


class Rescaler(Stage):
    """How long is the averaged step?"""

    kind = "rescaler"

    def rescale(self, state: State, record: Round) -> tuple[State, Tensor]:
        raise NotImplementedError


class Server(Stage):
    """How does the server step?"""

    kind = "server"

    def step(self, state: State, record: Round) -> tuple[State, Tensor]:
        """The next cloud model from `record.aggregate` and `record.scaled`."""
        raise NotImplementedError

    def deploy(self, state: State, theta: Tensor) -> Tensor:
        """The model that users get."""
        return theta


@dataclass(frozen=True)
class Weights(Stage):
    """By what are clients weighed? Written, it wins over what the methods of a union state."""

    by: Weighting
    kind = "weights"
    breaks_privacy = None  # noise itself refuses weights by samples


SINGLE = ("sampler", "schedule", "rate", "aggregator", "rescaler", "server", "weights")


def check(holds: bool, message: str) -> None:
    """Refuse a stage's parameter."""
    if not holds:
        from fedloom.errors import MethodError

        raise MethodError(message)


def zeros(setup: Setup) -> Tensor:
    """A vector [P] of zeros where the model lives."""
    return torch.zeros_like(setup.start)


def scalar(value: Any) -> Tensor:
    """A counter or measure as state: float64 on the CPU."""
    return torch.tensor(float(value), dtype=torch.float64)
