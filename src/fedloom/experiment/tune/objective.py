"""What a trial is judged by, on which clients: never on the test set, which the runs of a study are not even given."""

import math
from dataclasses import replace
from typing import Literal

import torch

from fedloom.data.split import FOLDS
from fedloom.errors import ConfigError, nearest
from fedloom.experiment.compare import rounds_for
from fedloom.experiment.config import RunConfig
from fedloom.experiment.run import load_data
from fedloom.federation import Federation
from fedloom.method import Method
from fedloom.result import Event

Objective = Literal["train-loss", "validation", "folds"]
OBJECTIVES: tuple[Objective, ...] = ("train-loss", "validation", "folds")
FIRST = 0.2  # share of the rounds that the training loss is averaged over (FedGLAD)
HELD_OUT = 0.1  # share of clients that validate where their number is not given (AdaBest)


def choose_objective(wish: str | None, config: RunConfig, searches_local: bool) -> Objective:
    """The one that was asked for, or the one that the held-out clients allow. Local settings are not judged by the
    training loss unless it is asked for: longer local training lowers it whether or not the model gets better.
    """
    if wish is not None and wish not in OBJECTIVES:
        raise ConfigError(f"unknown objective {wish!r}: {nearest(wish, OBJECTIVES)}")
    for known in OBJECTIVES:
        if wish == known:
            return known
    if config.fold is not None:
        return "folds"
    return "validation" if config.validation or searches_local else "train-loss"


def hold_out(config: RunConfig, objective: Objective) -> RunConfig:
    """The settings with the clients held out that the objective needs."""
    if objective == "folds":
        return config if config.fold is not None else replace(config, fold=0)
    if objective == "validation" and not config.validation and config.fold is None:
        return replace(config, validation=max(1, round(HELD_OUT * len(load_data(**config.dealing)))))
    return config


def blocks(objective: Objective) -> range:
    """The inner validation blocks over which a trial's score is averaged."""
    return range(FOLDS - 1 if objective == "folds" else 1)


def without_test(config: RunConfig, objective: Objective, inner: int = 0) -> Federation:
    """The data of one run of a trial."""
    federation = replace(load_data(**config.dealing, inner=inner), test=None)
    return replace(federation, validation=None) if objective == "train-loss" else federation


def rounds_of(config: RunConfig, objective: Objective, clients: int) -> int:
    """How many aggregations a trial plays: all that `config.rounds` Works are worth, or the first of them."""
    rounds = rounds_for(Method(config.method), config, clients)
    return math.ceil(FIRST * rounds) if objective == "train-loss" else rounds


class Score:
    """The value of one run so far: the mean training loss, or the newest metric on validation clients."""

    def __init__(self, objective: Objective, metric: str) -> None:
        self.objective, self.metric = objective, metric
        self.value: float | None = None
        self.diverged = False
        self._sum, self._rounds = 0.0, 0

    def see(self, event: Event) -> None:
        """A loss that is not finite although clients answered, or a metric that is undefined, ends the run."""
        seen = self._loss(event) if self.objective == "train-loss" else self._measured(event)
        if seen is not None:
            self.value, self.diverged = seen, not math.isfinite(seen)
        self.diverged |= 0 < event.metrics["answered"] <= event.metrics["diverged"]  # nobody has anything to average
        if event.round == event.rounds:
            self.diverged |= self.value is None or not bool(torch.isfinite(event.params).all())

    def _loss(self, event: Event) -> float | None:
        if not event.metrics["answered"]:
            return None
        self._sum, self._rounds = self._sum + event.metrics["train_loss"], self._rounds + 1
        return self._sum / self._rounds

    def _measured(self, event: Event) -> float | None:
        loss: float | None = event.metrics.get("validation_loss")
        metric: float | None = event.metrics.get(f"validation_{self.metric}")
        if metric is None and loss is not None:  # targets that are no labels
            return -loss
        return metric
