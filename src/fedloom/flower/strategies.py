"""Flower's own strategies over a federation, with the history of `fl.fit`, so that both kinds stand in one table
(see `fedloom.flower.table`).

>>> import fedloom as fl
>>> from flwr.serverapp.strategy import FedAvg
>>> federation = fl.load("digits", partition="classes(per_client=2)", clients=5)
>>> model, local = fl.model("mlp", federation), fl.Local(lr=0.1)
>>> theirs = fit_strategy(FedAvg(fraction_evaluate=0.0), model, federation, rounds=2, local=local)
>>> ours = fl.fit(model, federation, "fedavg", rounds=2, clients_per_round=5, local=local)
>>> round(ours.history[-1]["train_loss"], 4) == round(theirs.history[-1]["train_loss"], 4)
True
"""

import copy
import logging
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from fedloom.errors import ConfigError, FedloomError, RunError
from fedloom.evaluate import Score
from fedloom.federation import Federation
from fedloom.flower.grid import LocalGrid, nodes_of
from fedloom.local import Local
from fedloom.result import STOP, Callback, Event, Result
from fedloom.round import Traffic
from fedloom.task import Loss, Precision

# isort: split
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedloom.flower.nodes import Nodes

LOG = logging.getLogger("fedloom")


def fit_strategy(
    strategy: Strategy,
    model: nn.Module,
    federation: Federation,
    rounds: int = 50,
    local: Local | None = None,
    *,
    loss: str | Loss | None = None,
    metric: str | Score = "accuracy",
    eval_every: int = 1,
    engine: str = "auto",
    device: str | torch.device = "auto",
    precision: Precision = "auto",
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train a model over a federation by one of Flower's strategies, or by your own.

    The result and its history are those of `fl.fit`, where the arguments are explained. How many clients take part is
    the strategy's own matter (`fraction_train`, `min_train_nodes`). Bytes are those of the arrays in messages to train
    and in their replies; a strategy that also evaluates at its clients (`fraction_evaluate`) sends more, and what it
    found stands in the lines as `clients_*`. A strategy remembers what it has learned: use a new one for each run.
    """
    _check(strategy, federation, rounds, eval_every, callbacks)
    nodes = nodes_of(
        model,
        federation,
        local,
        engine=engine,
        rounds=rounds,
        clients_per_round=_cohort(strategy, len(federation)),
        loss=loss,
        metric=metric,
        device=device,
        precision=precision,
        seed=seed,
    )
    return _Playing(strategy, model, nodes, rounds, eval_every, callbacks).run(seed)


@dataclass
class _Playing:
    """A run on its way. Flower's loop calls `after_round` between two rounds, which writes the history."""

    strategy: Strategy
    given: nn.Module
    nodes: Nodes
    rounds: int
    eval_every: int
    callbacks: Sequence[Callback]
    history: list[dict[str, Any]] = field(default_factory=list)
    arrays: ArrayRecord = field(default_factory=ArrayRecord)
    returned: ArrayRecord | None = None  # the strategy's own, by which a round without new ones is known
    began: float = 0.0

    def run(self, seed: int) -> Result:
        grid = _Counting.of_nodes(self.nodes)
        name = type(self.strategy).__name__
        stopped = "rounds"
        with _seeded(seed), _quiet():
            try:
                start = ArrayRecord(self.given.state_dict())
                found = self.strategy.start(
                    grid, start, self.rounds, evaluate_fn=lambda round, arrays: self.after_round(round, arrays, grid)
                )
                for line in self.history:
                    measured = found.evaluate_metrics_clientapp.get(line["round"], MetricRecord())
                    line |= {f"clients_{key}": value for key, value in measured.items()}
            except _Stop:
                stopped = "callback"
            except FedloomError:
                raise
            except Exception as error:
                raise RunError(f"round {len(self.history) + 1}: Flower's {name} failed: {error}") from error
        if stopped == "rounds" and len(self.history) < self.rounds:
            raise RunError(f"Flower's {name} ended after {len(self.history)} of {self.rounds} rounds")
        theta, buffers = self.nodes.layout.read(self.arrays)
        trained = copy.deepcopy(self.given)
        self.nodes.layout.space.load(trained, theta, buffers)
        return Result(theta, trained, self.history, stopped)

    def after_round(self, round: int, arrays: ArrayRecord, grid: "_Counting") -> MetricRecord | None:
        """Before the first round and after each."""
        if round > 0:
            self._check_trained(round, arrays, grid)
            measured = self._measure(arrays) if round % self.eval_every == 0 or round == self.rounds else {}
            self.history.append(self._row(round, grid, measured))
        self.arrays = ArrayRecord(dict(arrays.items()))  # a strategy may change its own
        self.returned = arrays
        if round > 0 and self.callbacks:
            self._call(round)
        self.nodes.traffic = Traffic()
        grid.clear()
        self.began = time.perf_counter()
        return None

    def _check_trained(self, round: int, arrays: ArrayRecord, grid: "_Counting") -> None:
        name = type(self.strategy).__name__
        if arrays is self.returned:
            if grid.reasons:
                asked = self.nodes.traffic.asked
                raise RunError(
                    f"round {round}: {len(grid.reasons)} of {asked} clients answered with an error, and Flower's "
                    f"{name} returned no arrays; the first says: {grid.reasons[0]}"
                )
            said = "asked no client to train" if not self.nodes.traffic.asked else "returned no arrays"
            raise RunError(f"round {round}: Flower's {name} {said}; its aggregate_train must return the next model")
        try:
            self.nodes.layout.read(arrays)
        except ValueError as error:
            raise RunError(f"round {round}: Flower's {name} returned arrays that are no such model: {error}") from None

    def _measure(self, arrays: ArrayRecord) -> dict[str, float]:
        simulation = self.nodes.simulation
        theta, buffers = self.nodes.layout.read(arrays)
        if not bool(torch.isfinite(theta).all()):
            LOG.warning("round %d: the model is no longer finite; lower a learning rate", len(self.history) + 1)
        found: dict[str, float] = {}
        with simulation.numerics():
            for prefix in ("test", "validation"):
                holdout = getattr(simulation.federation, prefix)
                if holdout is not None:
                    found |= simulation.evaluator.measure(theta, buffers, holdout, prefix)
        return found

    def _row(self, round: int, grid: "_Counting", measured: Mapping[str, float]) -> dict[str, Any]:
        """As `fl.fit` writes it: counts add up over rounds."""
        traffic, number = self.nodes.traffic, self.nodes.layout.space.dtype.itemsize
        before = self.history[-1] if self.history else {}
        counts = {
            "works": traffic.works,
            "local_steps": traffic.local_steps,
            "uplink_bytes": grid.up + traffic.answered * number,  # the number of samples, as fl.fit counts it
            "downlink_bytes": grid.down,
            "seconds": time.perf_counter() - self.began,
        }
        return {
            "round": round,
            **{name: before.get(name, 0) + value for name, value in counts.items()},
            "asked": traffic.asked,
            "answered": traffic.answered,
            "diverged": len(traffic.diverged),
            **({"diverged_clients": list(traffic.diverged)} if traffic.diverged else {}),
            "train_loss": traffic.loss / traffic.samples if traffic.samples else float("nan"),
            **measured,
        }

    def _call(self, round: int) -> None:
        params = self.nodes.layout.read(self.arrays)[0]
        event = Event(round, self.rounds, params, dict(self.history[-1]), None)
        answers = [callback(event) for callback in self.callbacks]
        if any(answer is STOP for answer in answers):
            raise _Stop


class _Stop(Exception):
    """A callback has seen enough."""


class _Counting(LocalGrid):
    """A grid that counts what goes over it to be trained, and hears what nodes complain of."""

    up, down = 0, 0
    reasons: tuple[str, ...] = ()

    def clear(self) -> None:
        self.up, self.down, self.reasons = 0, 0, ()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        replies = super().send_and_receive(sent, timeout=timeout)
        self.down += sum(_bytes(message) for message in sent)
        self.up += sum(_bytes(reply) for reply in replies if reply.has_content() and _trains(reply))
        self.reasons += tuple(reply.error.reason or "" for reply in replies if reply.has_error())
        return replies


def _trains(message: Message) -> bool:
    return message.metadata.message_type == "train"


def _bytes(message: Message) -> int:
    """Of all numbers in its arrays."""
    if not _trains(message):
        return 0
    records = [record for record in message.content.values() if isinstance(record, ArrayRecord)]
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for record in records for a in record.values())


def _check(strategy: Any, federation: Any, rounds: Any, eval_every: Any, callbacks: Any) -> None:
    if not isinstance(strategy, Strategy):
        kind = strategy.__name__ if isinstance(strategy, type) else type(strategy).__name__
        raise ConfigError(f"strategy must be an object of flwr.serverapp.strategy, such as FedAvg(), not {kind}")
    for name, value in (("rounds", rounds), ("eval_every", eval_every)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
    if not isinstance(callbacks, Sequence) or not all(callable(callback) for callback in callbacks):
        raise ConfigError("callbacks must be a list of functions of one fl.Event")
    if not isinstance(federation, Federation):
        raise ConfigError(f"federation must be a fl.Federation, not {type(federation).__name__}")
    inner = getattr(strategy, "strategy", strategy)  # of a wrapper, such as those for differential privacy
    for name in ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes"):
        least = getattr(inner, name, 0)
        if least > len(federation):  # Flower would wait for further nodes for ever
            raise ConfigError(
                f"{type(strategy).__name__} waits for {name}={least} nodes, but the federation has "
                f"{len(federation)} clients; lower it"
            )


def _cohort(strategy: Strategy, clients: int) -> int:
    """How many clients a round will train, as far as a strategy tells: by it the engine is chosen."""
    inner = getattr(strategy, "strategy", strategy)
    wanted = int(clients * getattr(inner, "fraction_train", 1.0))
    return min(clients, max(1, wanted, getattr(inner, "min_train_nodes", 1)))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Flower draws nodes from Python's generator and noise from NumPy's, those of the whole process."""
    kept, noise = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(np.random.SeedSequence(seed).generate_state(1))
    try:
        yield
    finally:
        random.setstate(kept)
        np.random.set_state(noise)


@contextmanager
def _quiet() -> Iterator[None]:
    """Flower logs several lines a round; the history says the same."""
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        log.setLevel(level)
