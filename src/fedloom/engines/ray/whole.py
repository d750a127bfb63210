"""Whole runs, one at a worker: many small runs are faster so than one after the other, split over all workers.

Each worker plays its run for a moment, tells the lines of its history, and now and then its state, with which the
driver writes the checkpoint. A run whose worker dies goes on elsewhere from there.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

from fedloom.checkpoint import Saved
from fedloom.engines.ray.pool import Lost, Member, Pool
from fedloom.engines.ray.wire import pack, unpack, whole_classes
from fedloom.errors import RunError
from fedloom.federation import Federation, Holdout
from fedloom.result import STOP, Callback, Event, Result
from fedloom.round import RunState
from fedloom.stopping import heed, terminable, undisturbed
from fedloom.training import Training

LOG = logging.getLogger("fedloom")
MOMENT = 0.5  # seconds that a worker plays before it tells what became of it
DEATHS = 5  # of workers under one run, after which it is given up


class Playing:
    """A run at a worker."""

    def __init__(self, arguments: dict[str, Any], data: dict[str, Any], saved: dict[str, Any] | None) -> None:
        self.training = Training(federation=_whole_federation(data), **arguments)
        if saved is not None:
            self.training.take_up(_saved(saved))
            for key, memory in self.training.simulation.population.kept.items():
                memory.restore([unpack(saved["memory"][key], own=True)])
        self.told = len(self.training.history)
        self.settings = ExitStack()
        self.settings.enter_context(self.training.simulation.numerics())
        self.rounds = self.training.works()
        self.updates: Any = None  # nothing is sent before the first Work

    def play(self, seconds: float, state: bool) -> dict[str, Any]:
        """Some rounds: their lines, why the run has ended if it has, and the state where that is wanted."""
        training, began, stopped = self.training, time.monotonic(), None
        try:
            while len(training.history) == self.told or time.monotonic() - began < seconds:
                work = self.rounds.send(self.updates)
                before = time.perf_counter()
                self.updates = training.simulation.train(work)
                training.trained += time.perf_counter() - before
        except StopIteration as end:
            stopped = end.value.stopped
        lines, self.told = training.history[self.told :], len(training.history)
        return {"lines": lines, "stopped": stopped, "saved": self.state() if state or stopped else None}

    def state(self) -> dict[str, Any]:
        """All that a run knows; of what clients remember, what has changed since the last time."""
        saved = self.training.snapshot()
        work, remembered = saved.state.work, {}
        for key, memory in self.training.simulation.population.kept.items():
            remembered[key] = pack(memory.tensors(sorted(memory.changed & memory.known(work)), work))
            memory.saved(work)
        return {**_packed(saved), "memory": remembered}

    def close(self) -> None:
        self.rounds.close()
        self.settings.close()


def _packed(saved: Saved) -> dict[str, Any]:
    """But for the history, which the driver has heard of line by line."""
    state = {f.name: getattr(saved.state, f.name) for f in fields(RunState)}
    state["stages"] = {key: dict(values) for key, values in saved.state.stages.items()}
    rest = {"best": saved.best, "diagnosis": dict(saved.diagnosis)}
    return {"state": pack(state), **pack(rest), "notes": saved.notes, "history": saved.history}


def _saved(packed: dict[str, Any]) -> Saved:
    found = {name: unpack(packed[name], own=True) for name in ("state", "best", "diagnosis")}
    return Saved(RunState(**found["state"]), packed["history"], found["best"], packed["notes"], found["diagnosis"])


def _whole_data(federation: Federation) -> dict[str, Any]:
    """All of a federation, as it travels."""
    found = {f.name: getattr(federation, f.name) for f in fields(Federation) if f.name not in ("report", "names")}
    for name in ("test", "validation"):
        held = found[name]
        found[name] = None if held is None else {"x": held.x, "y": held.y, "offsets": held.offsets}
    return {name: pack(value) for name, value in found.items()}


def _whole_federation(data: dict[str, Any]) -> Federation:
    found = {name: unpack(value) for name, value in data.items()}
    for name in ("test", "validation"):
        found[name] = None if found[name] is None else Holdout(**found[name])
    return Federation(**found)


@dataclass
class _Run:
    """A run, as the driver follows it."""

    place: int
    training: Training
    callbacks: Sequence[Callback]
    member: Member | None = None
    asked: Any = None  # what its worker will answer
    lines: list[dict[str, Any]] = field(default_factory=list)  # that were not told to callbacks yet
    played: int = 0  # rounds whose lines have come
    stopped: str | None = None
    ended: bool = False
    deaths: int = 0


def run_apart(
    pool: Pool,
    trainings: Sequence[Training],
    callbacks: Sequence[Sequence[Callback]],
    finished: Callable[[int, Result], None] = lambda i, result: None,
    in_step: bool = False,
) -> list[Result]:
    """Play each run at a worker of its own; the rest is as with `run_together`. Callbacks hear of the metrics of each
    round; `in_step` they hear of the same round of all runs before the next one, as many runs as there are workers at
    a time, whatever worker is faster.
    """
    return _Apart(pool, trainings, callbacks, finished, in_step).results()


class _Apart:
    def __init__(
        self,
        pool: Pool,
        trainings: Sequence[Training],
        callbacks: Sequence[Sequence[Callback]],
        finished: Callable[[int, Result], None],
        in_step: bool,
    ) -> None:
        self.pool, self.finished, self.in_step = pool, finished, in_step
        both = zip(trainings, callbacks, strict=True)
        self.waiting = [_Run(i, one, own, played=len(one.history)) for i, (one, own) in enumerate(both)]
        self.running: list[_Run] = []
        self.done: dict[int, Result] = {}
        self.errors: list[Exception] = []
        self.data: dict[int, Any] = {}  # by federation, put where workers find it

    def results(self) -> list[Result]:
        for run in self.waiting:
            run.training.prepare_folder()
            run.training.save()
        with terminable():
            try:
                while self.waiting or self.running:
                    heed()
                    self._place()
                    self._hear()
                    self._tell()
            except BaseException:
                self._save_all()
                raise
        if self.errors:
            raise self.errors[0]
        return [self.done[i] for i in range(len(self.done))]

    def _place(self) -> None:
        """Give runs to the workers that have none."""
        self.pool.look()
        busy = {run.member.uid for run in self.running if run.member is not None}
        idle = [member for member in self.pool.alive() if member.uid not in busy]
        orphans = [run for run in self.running if run.member is None and not run.ended and run.stopped is None]
        if not self.in_step or not self.running:
            fresh, self.waiting = self.waiting[: len(idle)], self.waiting[len(idle) :]
            self.running += fresh
            orphans += fresh
        for run, member in zip(orphans, idle, strict=False):
            self._open(run, member)
            self._ask(run)

    def _open(self, run: _Run, member: Member) -> None:
        training = run.training
        if id(training.data) not in self.data:
            self.data[id(training.data)] = self.pool.ray.put(_whole_data(training.data))
        method = training.simulation.method
        arguments = {
            **training.arguments,
            "model": training.given,
            "method": method.text,
            "engine": training.simulation.engine.name,
            "device": "auto" if self.pool.gpus else "cpu",
        }
        arguments.pop("room", None)
        run.member = member
        run.played = training.state.round
        own = [*training.given.modules(), *(arguments.get(name) for name in ("loss", "metric", "availability"))]
        own += [part.stage for part in training.simulation.pipeline.parts]
        with whole_classes(self.pool.ray, own):
            known = self.pool.ray.put({"arguments": arguments, "saved": self._begun(training)})
        member.handle.open.remote(run.place, known, self.data[id(training.data)])

    def _begun(self, training: Training) -> dict[str, Any] | None:
        """From where a run goes on."""
        saved = training.snapshot()
        work = saved.state.work
        memory = {
            key: pack(kept.tensors(sorted(kept.known(work)), work))
            for key, kept in training.simulation.population.kept.items()
        }
        return {**_packed(saved), "memory": memory}

    def _ask(self, run: _Run) -> None:
        assert run.member is not None  # nosec B101  # for the type checker
        due = run.training.checkpoints is not None and run.training.due(run.played)
        run.asked = run.member.handle.play.remote(run.place, MOMENT, due)

    def _hear(self) -> None:
        """What the workers have to say; those who have died are replaced by others."""
        asked = {run.asked: run for run in self.running if run.asked is not None}
        if not asked:
            return
        done, _ = self.pool.ray.wait(list(asked), num_returns=1, timeout=1.0)
        for ref in done:
            run = asked[ref]
            run.asked = None
            try:
                (answer,) = self.pool.get([ref])
            except Lost as death:
                self._orphan(run, death)
                continue
            except Exception as error:  # of this run alone: its model, its method, its data
                self._fail(run, error)
                continue
            self._take(run, answer)
            if run.stopped is None and not run.ended:
                self._ask(run)

    def _orphan(self, run: _Run, death: Lost) -> None:
        run.member, run.deaths = None, run.deaths + 1
        if run.deaths > DEATHS:
            self._fail(run, RunError(f"workers died {run.deaths} times under this run, the last time: {death}"))

    def _take(self, run: _Run, answer: dict[str, Any]) -> None:
        for level, line in answer["said"]:
            LOG.log(level, "%s%s", run.training.label, line)
        new = [line for line in answer["lines"] if line["round"] > len(run.training.history) + len(run.lines)]
        run.lines += new
        run.stopped = answer["stopped"]
        run.played += len(answer["lines"])
        if not self.in_step:
            self._deliver(run, len(run.lines))
        saved = answer["saved"]
        if saved is not None and not run.ended:
            self._note(run.training, saved)
            run.training.save()
        if run.stopped is not None:
            self._close(run)

    def _note(self, training: Training, saved: dict[str, Any]) -> None:
        """The driver knows what the worker knew."""
        history = training.history
        training.take_up(_saved(saved))
        training.history = history
        for key, memory in training.simulation.population.kept.items():
            memory.take(unpack(saved["memory"][key], own=True))
            memory.settle()

    def _tell(self) -> None:
        """Lines to the callbacks, in step; runs that are over."""
        while self.in_step:
            active = [run for run in self.running if not run.ended]
            behind = [run for run in active if not run.lines and run.stopped is None]
            speaking = [run for run in active if run.lines]
            if behind or not speaking:
                break
            for run in speaking:
                self._deliver(run, 1)
        for run in [run for run in self.running if run.ended or (run.stopped is not None and not run.lines)]:
            self.running.remove(run)
            if not run.ended:
                self._finish(run)

    def _deliver(self, run: _Run, count: int) -> None:
        lines, run.lines = run.lines[:count], run.lines[count:]
        training = run.training
        for line in lines:
            training.history.append(line)
            tired = run.stopped == "patience" and not run.lines and line is lines[-1]
            planned = line["round"] if tired else training.rounds
            event = Event(line["round"], planned, training.state.theta, dict(line), None)
            try:
                answers = [callback(event) for callback in run.callbacks]
                training.check_diverged()
            except Exception as error:
                self._fail(run, error)
                return
            if any(answer is STOP for answer in answers):
                run.lines, run.stopped = [], "callback"
                self._close(run)
                return

    def _finish(self, run: _Run) -> None:
        training = run.training
        result = Result(training.state.theta, training.model(), training.history, run.stopped or "rounds")
        self.done[run.place] = result
        self.finished(run.place, result)

    def _fail(self, run: _Run, error: Exception) -> None:
        run.ended, run.lines = True, []
        self.errors.append(error)
        self._close(run)
        try:
            run.training.save()
        except RunError as worse:
            LOG.warning("%s%s", run.training.label, worse)
        if self.waiting or any(not other.ended for other in self.running):
            LOG.warning("%s%s; the other runs go on", run.training.label, error)

    def _close(self, run: _Run) -> None:
        if run.member is not None:
            run.member.handle.close.remote(run.place)
        run.member, run.asked = None, None

    def _save_all(self) -> None:
        """Everything that was played, also where one run can't be written."""
        with undisturbed():
            for run in self.running:
                if run.ended or run.member is None:
                    continue
                try:
                    if run.asked is not None:
                        self._take(run, self.pool.get([run.asked])[0])
                    if run.member is not None:
                        (saved,) = self.pool.get([run.member.handle.state.remote(run.place)])
                        self._note(run.training, saved)
                    run.training.save()
                except (Lost, RunError) as error:
                    LOG.warning("%s%s", run.training.label, error)
                self._close(run)


__all__ = ["Playing", "run_apart"]
