"""`tune`: search for the values with which methods train best, each with the same number of trials."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.console import Console

from fedloom.engines.ray import session
from fedloom.engines.ray.pool import Pool
from fedloom.engines.vector import Vector
from fedloom.errors import ConfigError, FedloomError, RunError
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import COMPARISON, CONFIG, STUDY, claim, write_text
from fedloom.experiment.run import alone, make_training, workers_for
from fedloom.experiment.tune.objective import blocks, without_test
from fedloom.experiment.tune.outcome import Row, Tuning, write_files
from fedloom.experiment.tune.plan import Plan, read_plan
from fedloom.experiment.tune.study import Trials, need_optuna, open_storage
from fedloom.experiment.tune.trial import Candidate, Part, try_out
from fedloom.federation import Federation
from fedloom.progress import Watch
from fedloom.result import Callback, Event
from fedloom.training import LOG

if TYPE_CHECKING:
    from optuna.trial import Trial

TOGETHER = 8  # trials of a batch where the vector engine trains
RUNS = 32  # that are in memory at once


@session()
def tune(
    config: RunConfig,
    methods: Sequence[str],
    folder: str | Path,
    *,
    search: Sequence[str] = (),
    grid: str | None = None,
    objective: str | None = None,
    trials: int | None = None,
    seeds: int = 1,
    sampler: str = "tpe",
    prune: bool = True,
    together: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    console: Console | None = None,
) -> Tuning:
    """Try values for the searches in each method's text and in `search` (local settings, "lr=log(0.001, 1)"), and
    leave the best of each method in `folder` as a config file. The test set takes no part.

    `grid` lays a paper's own grid over the methods: fedglad, radfed or adabest. `objective` is "train-loss" (mean over
    the first 20% of the rounds), "validation" (the metric on held-out clients) or "folds" (its mean over validation
    blocks); a trial's value is the mean over `seeds`. `together` trials are drawn at once and trained in lockstep, or
    each by a worker of a cluster.
    """
    need_optuna()
    folder = Path(folder)
    plan = Plan.of(
        config,
        methods,
        search=search,
        grid=grid,
        objective=objective,
        trials=trials,
        seeds=seeds,
        sampler=sampler,
        prune=prune,
    )
    federations = {
        (seed, inner): without_test(replace(plan.config, seed=seed), plan.objective, inner)
        for seed in range(plan.config.seed, plan.config.seed + seeds)
        for inner in blocks(plan.objective)
    }
    going_on = resume and (folder / STUDY).is_file()
    if together is None and going_on:
        together = int(read_plan(folder)["together"])
    pool = workers_for(plan.config, plan.trials * len(federations))
    plan = replace(plan, together=_together(plan, federations, together, pool))
    for kind, name in (("run", CONFIG), ("comparison", COMPARISON)):
        if (folder / name).is_file():
            raise RunError(f"{folder} holds a {kind}; choose another --out")
    if going_on:
        plan.continues(folder)
    with claim(folder, overwrite, resume):
        write_text(folder / STUDY, yaml.safe_dump(plan.data, sort_keys=False))
        return _played(plan, federations, folder, console or Console(quiet=True), pool)


def _together(plan: Plan, federations: dict[Part, Federation], wish: int | None, pool: Pool | None) -> int:
    """How many trials make a batch. Making the first run of each method also raises whatever is wrong with it."""
    (seed, _), federation = next(iter(federations.items()))
    vector = True
    for template in plan.templates:
        first = {name: search.values[0] for name, search in template.searches.items()}
        config = replace(plan.at(template, first, len(federation)), seed=seed)
        probe = make_training(config if pool is None else alone(config), federation)
        vector &= isinstance(probe.simulation.engine, Vector)
    if wish is not None and wish < 1:
        raise ConfigError(f"together must be at least 1, not {wish}")
    if pool is not None:
        return wish or -(-len(pool.alive()) // len(federations))
    return wish or (max(1, min(TOGETHER, RUNS // len(federations))) if vector else 1)


def _played(
    plan: Plan, federations: dict[Part, Federation], folder: Path, console: Console, pool: Pool | None
) -> Tuning:
    storage = open_storage(folder)
    minimise = plan.objective == "train-loss"
    every = [
        Trials(storage, template, count=plan.trials, seed=plan.config.seed, minimise=minimise)
        for template in plan.templates
    ]
    clients = len(next(iter(federations.values())))
    outcome = Tuning(folder, plan, [Row(trials) for trials in every], clients)
    left = sum(trials.count - len(trials.finished) for trials in every)
    if not left:
        console.print(f"{folder} holds a finished study: nothing is left to do", soft_wrap=True, highlight=False)
    with Watch(left * plan.config.rounds * len(federations), console) as watch, _quiet():
        progress = Progress(watch, console, plan, len(federations), pool)
        for trials in every:
            for first in range(0, trials.count, plan.together):
                candidates = _batch(plan, trials, first, federations)
                if candidates:
                    progress.batch(trials, candidates, federations)
                    write_files(outcome)
    write_files(outcome)
    return outcome


def _batch(plan: Plan, trials: Trials, first: int, federations: dict[Part, Federation]) -> list[Candidate]:
    """The trials of a batch that have not been finished."""
    finished = trials.finished
    numbers = range(first, min(first + plan.together, trials.count))
    if all(number in finished for number in numbers):
        return []
    clients = len(next(iter(federations.values())))
    drawn = zip(numbers, trials.draw(first, plan.together, plan.sampler), strict=True)
    return [_candidate(plan, trials, number, asked, clients) for number, asked in drawn if number not in finished]


def _candidate(plan: Plan, trials: Trials, number: int, asked: "Trial", clients: int) -> Candidate:
    try:
        config = plan.at(trials.template, asked.params, clients)
    except FedloomError as error:  # a combination of values that has no meaning is no reason to end the study
        refused = replace(plan.config, method=trials.template.text)
        return Candidate(number, refused, asked, plan.objective, plan.prune, "refused", str(error))
    return Candidate(number, config, asked, plan.objective, plan.prune)


class Progress:
    """Tells how the rounds come along, and what became of each trial."""

    def __init__(self, watch: Watch, console: Console, plan: Plan, runs: int, pool: Pool | None) -> None:
        self.watch, self.console, self.plan, self.runs, self.pool = watch, console, plan, runs, pool
        self.played: dict[Candidate, int] = {}  # rounds of all its runs, with those that patience spared

    def batch(self, trials: Trials, candidates: list[Candidate], federations: dict[Part, Federation]) -> None:
        for candidate in candidates:
            self.played[candidate] = 0
            self.watch.skip((self.plan.config.rounds - candidate.config.rounds) * self.runs)

        def finished(candidate: Candidate) -> None:
            trials.keep(candidate)
            self.watch.skip(candidate.config.rounds * self.runs - self.played.pop(candidate))
            self.console.print(self._line(candidate, trials), highlight=False, markup=False, soft_wrap=True)

        try_out(candidates, federations, watch=self._callback, finished=finished, pool=self.pool)

    def _callback(self, candidate: Candidate) -> Callback:
        rounds, label = candidate.config.rounds, f"trial {candidate.number + 1}: {candidate.config.method}"
        show = self.watch.callback(label, candidate.config.metric, rounds)

        def count(event: Event) -> None:
            self.played[candidate] += 1 if event.round < event.rounds else rounds - event.round + 1
            show(event)

        return count

    def _line(self, candidate: Candidate, trials: Trials) -> str:
        name = self.plan.score_name
        said = f"{name} {candidate.value:.4f}" if candidate.value is not None else ""
        if candidate.state != "complete":
            said = f"{candidate.state} {candidate.note}"
        point = ", ".join(
            f"{n}={v:.4g}" if isinstance(v, float) else f"{n}={v}" for n, v in candidate.asked.params.items()
        )
        return f"{trials.template.name} trial {candidate.number + 1}/{trials.count}: {point}: {said}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Trials that diverge are part of a search: their runs' warnings would hide what it has to say."""
    before = LOG.level
    LOG.setLevel(logging.ERROR)
    try:
        yield
    finally:
        LOG.setLevel(before)
