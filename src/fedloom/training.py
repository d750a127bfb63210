"""A run on its way: the loop over rounds, the history, callbacks, checkpoints."""

import copy
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.best import Best
from fedloom.checkpoint import Checkpoints, Saved, newest
from fedloom.diagnosis import Diagnosis, named
from fedloom.engines.choose import Wishes, bytes_of
from fedloom.errors import ConfigError, RunError
from fedloom.federation import Federation
from fedloom.identity import identity_of
from fedloom.local import Local, plain
from fedloom.method import Method
from fedloom.result import STOP, Callback, Event, Result
from fedloom.round import Outcome, RunState
from fedloom.simulation import Playing, Simulation, drive
from fedloom.space import Buffers, average_buffers
from fedloom.stages import Updates, Work
from fedloom.stopping import heed, terminable, undisturbed

LOG = logging.getLogger("fedloom")
BETWEEN_CHECKPOINTS = 30.0  # seconds, or more:
WRITING = 0.05  # of a run's time goes into them at most
TOLD = 10  # clients that a warning names


class Diverged(RunError):
    """More clients have diverged than a run was to bear."""


def _check_count(name: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _placed(saved: RunState, fresh: RunState, device: torch.device) -> RunState:
    """A state that was read back: checked against one of a run that begins, which also says where each tensor lives."""
    if saved.theta.shape != fresh.theta.shape or saved.theta.dtype != fresh.theta.dtype:
        raise ValueError("the model has another size")
    if {n: b.shape for n, b in saved.buffers.items()} != {n: b.shape for n, b in fresh.buffers.items()}:
        raise ValueError("the model has other buffers")
    for key, values in fresh.stages.items():
        if not saved.stages[key].keys() >= values.keys():  # a stage may learn of more, such as a queue of buffers
            raise ValueError(f"{key} knows other things")
    stages = {
        key: {n: v.to(fresh.stages[key][n].device if n in fresh.stages[key] else device) for n, v in values.items()}
        for key, values in saved.stages.items()
    }
    return replace(saved, stages=stages)


def _ignore(work: Work) -> None:
    pass


def _names(clients: Sequence[int]) -> str:
    """A few of them, in words."""
    told = ", ".join(map(str, clients[:TOLD])) + (f" and {len(clients) - TOLD} more" if len(clients) > TOLD else "")
    return f"client{'s' if len(clients) > 1 else ''} {told}"


def _nested(buffers: Buffers) -> Buffers:
    return {f"buffers/{name}": value for name, value in buffers.items()}


class Training:
    """A run on its way: the state after the last whole round, and the history. Making one checks every setting."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        method: str | Method,
        *,
        rounds: int,
        eval_every: int = 1,
        eval_last: int = 1,
        eval_between: bool = False,
        patience: int | None = None,
        min_gain: float = 0.0,
        checkpoint: str | Path | None = None,
        checkpoint_every: int | None = None,
        resume: bool = False,
        max_diverged: int | None = None,
        diagnose: str | Sequence[str] | None = None,
        engine: str = "auto",
        compile: bool | None = None,
        max_memory: int | str | None = None,
        ray_address: str | None = None,
        actors: int | None = None,
        **settings: Any,
    ) -> None:
        self.arguments = {
            "rounds": rounds,
            "eval_every": eval_every,
            "eval_last": eval_last,
            "eval_between": eval_between,
            "patience": patience,
            "min_gain": min_gain,
            "diagnose": diagnose,
            "compile": compile,
            "max_memory": max_memory,
            **settings,
        }  # to make the same run elsewhere
        if not isinstance(federation, Federation):
            raise ConfigError(f"federation must be a fl.Federation, not {type(federation).__name__}")
        rounds, eval_every, eval_last = map(plain, (rounds, eval_every, eval_last))
        checkpoint_every = plain(checkpoint_every)
        max_diverged = plain(max_diverged)
        settings = {"local": Local(), **{name: plain(value) for name, value in settings.items()}}
        if not isinstance(settings["local"], Local):
            raise ConfigError(f"local must be a fl.Local, not {type(settings['local']).__name__}")
        if not isinstance(min_gain, int | float) or not 0 <= min_gain < math.inf:
            raise ConfigError(f"min_gain must be a finite number of at least 0, not {min_gain!r}")
        _check_count("rounds", rounds)
        _check_count("eval_every", eval_every)
        _check_count("eval_last", eval_last)
        if checkpoint_every is not None:
            _check_count("checkpoint_every", checkpoint_every)
        if max_diverged is not None:
            _check_count("max_diverged", max_diverged, least=0)
        if patience is not None:
            _check_count("patience", patience)
            if federation.validation is None:
                raise ConfigError("patience needs validation data: clients or a set that is held out from training")
        if resume and checkpoint is None:
            raise ConfigError("resume=True needs checkpoint=, the folder to resume from")
        self.given, self.data = model, federation
        self.rounds, self.eval_every, self.eval_last = rounds, eval_every, eval_last
        self.checkpoint_every, self.eval_between, self.max_diverged = checkpoint_every, eval_between, max_diverged
        self.best = Best(patience, min_gain)
        if checkpoint is not None and os.path.isfile(checkpoint):  # False also where nothing may be asked
            raise RunError(f"checkpoint={str(checkpoint)!r} is a file; name a folder")
        self.diagnose = named(diagnose)
        wishes = Wishes(engine, plain(compile), bytes_of(max_memory), ray_address, plain(actors))
        self.simulation = Simulation.of(model, federation, Method(method), rounds=rounds, wishes=wishes, **settings)
        self.diagnosis = Diagnosis(self.diagnose, self.simulation, rounds)
        self.state = self.simulation.begin()
        self.checkpoints = None if checkpoint is None else Checkpoints(Path(checkpoint), self.identity)
        self.history: list[dict[str, Any]] = []
        self.label = ""  # before warnings, where several runs give them
        self.saved = time.monotonic()
        self.writing = 0.0  # seconds that the last checkpoint took
        self.played = 0.0  # seconds of this run before it
        self.trained = 0.0  # seconds that the clients of this round trained
        self.moved = 0  # bytes that went between processes before this round
        self.resumed = resume
        if resume and self.checkpoints is not None:
            self.resume(self.checkpoints)

    def run(self, callbacks: Sequence[Callback] = ()) -> Result:
        """Play the rounds that are left, with the engine of this run."""
        with self.simulation.numerics(), terminable():
            try:
                return drive(self.works(callbacks), self._train)
            except KeyboardInterrupt:
                self.save()
                raise
            except (RunError, ConnectionError):  # a cluster, or who is told of it, is gone: as much as can be kept
                with suppress(RunError):
                    self.save()
                raise

    def _train(self, work: Work) -> Updates:
        began = time.perf_counter()
        updates = self.simulation.train(work)
        self.trained += time.perf_counter() - began
        return updates

    def works(self, callbacks: Sequence[Callback] = ()) -> Playing[Result]:
        """The rounds that are left: it yields Works, and is sent what was trained. Whoever trains adds the time that it
        took to `trained`.
        """
        if not isinstance(callbacks, Sequence) or not all(callable(callback) for callback in callbacks):
            raise ConfigError("callbacks must be a list of functions of one fl.Event")
        self.prepare_folder()
        for remark in self.simulation.method.remarks:
            LOG.warning(remark)
        if self.simulation.chosen:
            LOG.info(self.simulation.chosen)
        for cost in self.diagnosis.costs:
            LOG.info(cost)
        self.save()  # what can't be made again, such as the key of a noise, is on disk before anything follows from it
        self.check_diverged()
        stopped = "patience" if self.best.tired else "rounds"
        while self.state.round < self.rounds and stopped == "rounds":
            heed()
            number = self.state.round + 1
            last = number == self.rounds
            among_last = number > self.rounds - self.eval_last
            outcome = yield from self._round(evaluate=among_last or number % self.eval_every == 0)
            if self._call(callbacks, outcome):
                stopped = "callback"
            elif self.best.tired:
                stopped = "patience"
            if stopped != "rounds" or last or self.due(self.state.round):
                self.save()
            self.check_diverged()
        return Result(self.state.theta, self.model(), self.history, stopped)

    def prepare_folder(self) -> None:
        """Make the folder of checkpoints, or refuse one that holds another run's."""
        if self.checkpoints is not None:
            if not self.resumed and newest(self.checkpoints.folder):
                folder = self.checkpoints.folder
                raise RunError(f"{folder} holds checkpoints already; pass resume=True, or choose another folder")
            self.checkpoints.begin()

    def _call(self, callbacks: Sequence[Callback], outcome: Outcome) -> bool:
        """Tell every callback; True if one wants to stop."""
        if not callbacks:
            return False
        updates = outcome.record.updates if outcome.record else None
        params, metrics = self.state.theta.clone(), dict(self.history[-1])  # a callback may do with them what it likes
        planned = self.state.round if self.best.tired else self.rounds
        event = Event(self.state.round, planned, params, metrics, updates)
        answers = [callback(event) for callback in callbacks]
        return any(answer is STOP for answer in answers)

    def round(self, evaluate: bool) -> Outcome:
        """One round, with the engine of this run."""
        return drive(self._round(evaluate), self._train)

    def _round(self, evaluate: bool) -> Playing[Outcome]:
        """Play one round and add its line to the history."""
        self.trained = 0.0
        self.between: dict[str, list[float]] = {}
        self.seen = replace(self.best)  # what is seen on the way counts when the round is over
        self.diagnosis.begin()
        self.diagnosed = 0.0
        began = time.perf_counter()
        before = self._between if evaluate and self.eval_between else _ignore
        playing = self.simulation.works(self.state, before, self._heard)
        work, waited = next(playing), 0.0
        while True:
            paused = time.perf_counter()
            updates = yield work
            waited += time.perf_counter() - paused
            try:
                work = playing.send(updates)
            except StopIteration as end:
                outcome: Outcome = end.value
                break
        measured = self.simulation.evaluate(outcome.state) if evaluate else {}
        seconds = time.perf_counter() - began - waited + self.trained - self.diagnosed
        diagnosed = self.diagnosis.measure(self.state, outcome, evaluate)
        row = {**self._row(outcome, measured, seconds), **diagnosed}
        with undisturbed():  # a round is over as a whole, or not at all
            self.state = outcome.state
            self.history.append(row)
            self.simulation.population.settle()
            self._see(measured, self.simulation.deployed(self.state), self.state.buffers)
            self.best = self.seen
        if outcome.traffic.diverged:
            self._warn("%s diverged (loss or update not finite); left out", _names(outcome.traffic.diverged))
        # Asking the device for it in every round would stop it; a round in which nobody trained has time for it.
        asked = evaluate or outcome.record is None
        if asked and not bool(torch.isfinite(self.state.theta).all()):
            self._warn("the model is no longer finite; lower a learning rate")
        if outcome.record is None:
            self._warn("no usable update came back; the model stays as it was")
        return outcome

    def _warn(self, message: str, *values: object) -> None:
        LOG.warning(f"{self.label}round %d: {message}", self.state.round, *values)

    def _row(self, outcome: Outcome, measured: Mapping[str, float], seconds: float) -> dict[str, Any]:
        traffic = outcome.traffic
        before = self.history[-1] if self.history else {}
        counts: dict[str, Any] = {
            "works": traffic.works,
            "local_steps": traffic.local_steps,
            **self.simulation.traffic_bytes(traffic, outcome.state),
            "seconds": seconds,
        }
        if (moved := self.simulation.moved) is not None:
            counts["cluster_bytes"] = moved - self.moved
            self.moved = moved
        return {
            "round": outcome.state.round,
            **{name: before.get(name, 0) + value for name, value in counts.items()},
            "asked": traffic.asked,
            "answered": traffic.answered,
            "diverged": len(traffic.diverged),
            **({"diverged_clients": list(traffic.diverged)} if traffic.diverged else {}),
            "train_loss": traffic.loss / traffic.samples if traffic.samples else float("nan"),
            **measured,
            **self.between,
            **outcome.metrics,
            **self.simulation.noted(),
        }

    def _heard(self, work: Work, updates: Updates) -> None:
        """What diagnostics take is not counted as the run's time."""
        began = time.perf_counter()
        self.diagnosis.heard(work, updates)
        self.diagnosed += time.perf_counter() - began

    def _between(self, work: Work) -> None:
        """Measure the mean of models that travel, before each Work but the first of a round."""
        if work.w == self.state.work or work.share != 1 or work.start.dim() == 1:
            return
        mean = work.start.mean(0)
        buffers = average_buffers(work.buffers, torch.ones(len(work), device=mean.device))
        measured = self.simulation.measure(mean, buffers)
        for name, value in measured.items():
            self.between.setdefault(f"between_{name}", []).append(value)
        self._see(measured, mean, buffers)

    def _see(self, measured: Mapping[str, float], theta: Tensor, buffers: Buffers) -> None:
        """Is this the best model so far?"""
        if measured and self.best.patience is not None:
            score = measured.get(f"validation_{self.simulation.evaluator.name}", -measured["validation_loss"])
            self.seen.see(score, theta, buffers)

    def model(self) -> nn.Module:
        """The deployable model, where the given one lives."""
        theta, buffers = self.best.theta, self.best.buffers
        if theta is None:
            theta, buffers = self.simulation.deployed(self.state), self.state.buffers
        deployable = copy.deepcopy(self.given)
        self.simulation.setup.space.load(deployable, theta, buffers)
        return deployable

    def due(self, round: int) -> bool:
        """Is it time for a checkpoint? Many large memories take long to write: time counts, not rounds. What this run
        played counts for that, not the clock: of runs in lockstep each has a share of the time.
        """
        if self.checkpoint_every is not None:
            return round % self.checkpoint_every == 0
        rare = self.writing <= WRITING * (self.seconds - self.played)
        return rare and time.monotonic() - self.saved >= BETWEEN_CHECKPOINTS

    @property
    def seconds(self) -> float:
        """What this run has taken so far, its share where several are trained together."""
        return float(self.history[-1]["seconds"]) if self.history else 0.0

    def save(self) -> None:
        """Put the state after the last whole round on disk."""
        if self.checkpoints is None:
            return
        began = time.monotonic()
        with undisturbed():
            self.checkpoints.save(self.snapshot(), self.simulation.population.memory)
        self.saved = time.monotonic()
        self.writing, self.played = self.saved - began, self.seconds

    def snapshot(self) -> Saved:
        """The state after the last whole round, but for what clients remember."""
        best = {} if self.best.theta is None else {"theta": self.best.theta, **_nested(self.best.buffers)}
        notes = {"score": self.best.score, "waited": self.best.waited}
        round = self.state.round
        return Saved(self.state, self.history[:round], best, notes, self.diagnosis.tensors(round))

    def check_diverged(self) -> None:
        """End a run in which too many clients diverged; what was learned without them can be resumed."""
        if self.max_diverged is None:
            return
        count = sum(line["diverged"] for line in self.history)
        if count > self.max_diverged:
            self.save()
            where = "" if self.checkpoints is None else "; the checkpoint can be resumed with a larger max_diverged"
            whose = f"{self.simulation.method}, seed {self.simulation.setup.seed}"
            raise Diverged(
                f"{count} updates had diverged by round {self.state.round}, more than "
                f"max_diverged={self.max_diverged}; under {whose}: lower a learning rate or clip local gradients{where}"
            )

    @property
    def last_safe(self) -> str:
        """What of this run is on disk, in words."""
        return "nothing of it is on disk" if self.checkpoints is None else self.checkpoints.last_safe

    def resume(self, checkpoints: Checkpoints) -> None:
        """Continue from the newest checkpoint, if there is one."""
        from safetensors import SafetensorError

        setup = self.simulation.setup
        saved = checkpoints.load(setup.device)
        if saved is None:
            return
        folder, round = checkpoints.folder, saved.state.round
        if round > self.rounds:
            raise RunError(f"{folder} is at round {round} already; rounds={self.rounds} is too few")
        try:
            self.take_up(saved)
            for key, memory in self.simulation.population.memory.items():
                memory.restore(checkpoints.remembered(key))
        except (KeyError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise RunError(f"the checkpoint of round {round} in {folder} is not one of this run: {error}") from None
        measured = any("validation_loss" in line for line in self.history)
        if self.best.patience is not None and self.best.theta is None and measured:
            raise RunError(f"{folder}: patience can't begin in round {round + 1}, no best model was kept until then")

    def take_up(self, saved: Saved) -> None:
        """Go on from where a run has come; what its clients remember is not part of it."""
        device = self.simulation.setup.device
        self.state = _placed(saved.state, self.state, device)
        self.diagnosis.restore(saved.diagnosis, saved.state.round, device)
        self.best.score, self.best.waited = saved.notes["score"], int(saved.notes["waited"])
        self.history = saved.history
        if saved.best and self.best.patience is not None:
            self.best.theta = saved.best["theta"]
            self.best.buffers = {n.removeprefix("buffers/"): b for n, b in saved.best.items() if n != "theta"}

    @cached_property
    def identity(self) -> dict[str, Any]:
        return identity_of(self.simulation, self.given, self.diagnose)
