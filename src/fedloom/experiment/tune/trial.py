"""Points on trial: each is several runs (seeds, folds), and several points train in lockstep."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from fedloom.engines.ray.pool import Pool
from fedloom.engines.ray.whole import run_apart
from fedloom.errors import FedloomError
from fedloom.experiment.config import RunConfig
from fedloom.experiment.run import alone, make_training
from fedloom.experiment.tune.objective import Objective, Score
from fedloom.federation import Federation
from fedloom.lockstep import run_together
from fedloom.memory import Room
from fedloom.result import STOP, Callback, Event, Result, Signal
from fedloom.training import Training

if TYPE_CHECKING:
    from optuna.trial import Trial

State = Literal["complete", "pruned", "diverged", "refused"]
REPORTS = 10  # times that a trial says how good it is, for pruning
Part = tuple[int, int]  # a run of a trial: its seed and its validation block


@dataclass(eq=False)
class Candidate:
    """A point on trial. Its runs report to it, and leave when it is given up."""

    number: int
    config: RunConfig  # of a run at this point, with the rounds that it plays
    asked: "Trial"  # knows the point, and whether it is worth going on
    objective: Objective
    prunes: bool
    state: State = "complete"  # as long as nothing speaks against it
    note: str = ""
    value: float | None = None
    reported: dict[int, float] = field(default_factory=dict)  # the mean over runs, after each tenth
    seconds: float = 0.0
    _waiting: dict[int, list[float]] = field(default_factory=dict)

    def callback(self, score: Score, runs: int) -> Callback:
        """For one of its runs."""
        tenth = 0

        def judge(event: Event) -> Signal | None:
            nonlocal tenth
            score.see(event)
            if self.state != "complete":  # another run of it ended it
                return STOP
            if score.diverged:
                self.state, self.note = "diverged", f"in round {event.round} of {event.rounds}"
            elif REPORTS * event.round // event.rounds > tenth and score.value is not None:
                tenth = REPORTS * event.round // event.rounds
                self._report(tenth, score.value, runs)
            return None if self.state == "complete" else STOP

        return judge

    def _report(self, tenth: int, value: float, runs: int) -> None:
        values = self._waiting.setdefault(tenth, [])
        values.append(value)
        if len(values) < runs:
            return
        self.reported[tenth] = self.value = statistics.fmean(values)
        self.asked.report(self.value, tenth)
        if self.prunes and tenth < REPORTS and self.asked.should_prune():
            self.state, self.note = "pruned", f"after {10 * tenth}% of its rounds"


def try_out(
    candidates: Sequence[Candidate],
    federations: Mapping[Part, Federation],
    *,
    watch: Callable[[Candidate], Callback],
    finished: Callable[[Candidate], None],
    pool: Pool | None = None,
) -> None:
    """Train all runs of all candidates in lockstep, or at the workers of a pool; `finished` is told of each as soon as
    its last run has ended.
    """
    trainings: list[Training] = []
    callbacks: list[list[Callback]] = []
    owners: list[Candidate] = []
    for candidate in candidates:
        room = trainings[0].simulation.population.room if trainings else None
        on_workers = pool is not None
        made = [] if candidate.state == "refused" else _trainings(candidate, federations, room, on_workers)
        if not made:
            finished(candidate)
        for training in made:
            judge = candidate.callback(Score(candidate.objective, candidate.config.metric), len(made))
            callbacks.append([watch(candidate), judge])
            trainings.append(training)
            owners.append(candidate)
    left = {candidate.number: owners.count(candidate) for candidate in owners}

    def ended(i: int, result: Result) -> None:
        owner = owners[i]
        owner.seconds += result.history[-1]["seconds"]
        left[owner.number] -= 1
        if not left[owner.number]:
            finished(owner)

    if pool is not None and trainings:
        run_apart(pool, trainings, callbacks, ended, in_step=True)
    elif len(trainings) == 1:
        ended(0, trainings[0].run(callbacks[0]))
    elif trainings:
        run_together(trainings, callbacks, ended)


def _trainings(
    candidate: Candidate, federations: Mapping[Part, Federation], room: Room | None, on_workers: bool
) -> list[Training]:
    """The runs of a candidate; none where its values are refused, which is no reason to end the study."""
    made: list[Training] = []
    config = alone(candidate.config) if on_workers else candidate.config
    try:
        for (seed, _), federation in federations.items():
            made.append(make_training(replace(config, seed=seed), federation, room=room))
            room = room or made[0].simulation.population.room
    except FedloomError as error:
        candidate.state, candidate.note = "refused", str(error)
        return []
    return made
