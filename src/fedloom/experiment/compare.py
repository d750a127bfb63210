"""Many methods on equal terms: the same data, the same models to start from, the same number of Works."""

import hashlib
import logging
import math
import re
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedloom.engines.ray import session
from fedloom.engines.ray.pool import Pool
from fedloom.engines.vector import Vector
from fedloom.errors import ConfigError, RunError
from fedloom.evaluate import METRICS
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import COMPARISON, CONFIG, STUDY, Run, claim, write_text
from fedloom.experiment.processes import check_processes, side_by_side
from fedloom.experiment.run import Job, alone, is_over, load_data, prepare_run, start_runs, workers_for
from fedloom.experiment.score import looks
from fedloom.experiment.statistics import Paired, compare_all
from fedloom.experiment.track import tracked
from fedloom.method import Method
from fedloom.progress import Watch
from fedloom.simulation import cohort_size
from fedloom.training import Diverged

LOG = logging.getLogger("fedloom")
TOGETHER = 64  # runs that are in memory at once
LAST = 10  # works whose mean is told beside the last round
BASELINE_SHARE = 0.95  # without a target: how soon is a method as good as this share of the baseline's end?


@dataclass(frozen=True)
class Row:
    """One method's line of the table, over all seeds."""

    method: str
    runs: list[Run]
    metric: str
    target: float | None = None
    gain: Paired | None = None  # over the baseline, in the metric after the last round; None: it is the baseline

    @property
    def finals(self) -> list[float]:
        return [_final(run, self.metric) for run in self.runs]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.finals)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds (n - 1); None for a single seed, or where one has diverged."""
        known = all(map(math.isfinite, self.finals))
        return statistics.stdev(self.finals) if known and len(self.finals) > 1 else None

    @property
    def tails(self) -> list[float]:
        """The mean over the last works, of each seed: a single round may be lucky. Works, since methods that average
        seldom have few rounds in them.
        """
        return [_tail(run, self.metric) for run in self.runs]

    @property
    def works_to_target(self) -> float | None:
        """Works until the target was first reached, on average over seeds; None if a seed never reached it."""
        return self._to_target("works")

    @property
    def bytes_to_target(self) -> float | None:
        """Bytes that went over the wire until then, both ways."""
        up, down = self._to_target("uplink_bytes"), self._to_target("downlink_bytes")
        return None if up is None or down is None else up + down

    def _to_target(self, count: str) -> float | None:
        reached = [_reached(run, self.metric, self.target) for run in self.runs]
        return None if None in reached else statistics.fmean(line[count] for line in reached if line is not None)

    @property
    def works(self) -> float:
        return statistics.fmean(run.history[-1]["works"] for run in self.runs)

    @property
    def uplink(self) -> float:
        return statistics.fmean(run.history[-1]["uplink_bytes"] for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`."""

    folder: Path
    config: RunConfig
    rows: list[Row]
    target: float | None  # None: the baseline, a share of whose end it would be, has diverged
    seeds: int


def rounds_for(method: Method, config: RunConfig, clients: int) -> int:
    """How many aggregations cost as many Works per client slot as `config.rounds` synchronous rounds."""
    works = works_of_round(method, config, clients)
    rounds = int(config.rounds / works + 1e-9)
    if not rounds:
        raise ConfigError(f"{method} averages once in {works:g} Works; --rounds {config.rounds} is too few for it")
    return rounds


def works_of_round(method: Method, config: RunConfig, clients: int) -> float:
    """How many Works per client slot come before an aggregation."""
    return method.pipeline().schedule.stage.works(cohort_size(config.per_round, clients))


@session()
def compare(
    config: RunConfig,
    methods: Sequence[str],
    folder: Path,
    *,
    seeds: int,
    console: Console,
    target: float | None = None,
    overwrite: bool = False,
    resume: bool = False,
    lockstep: bool = True,
    processes: int | None = None,
    track: Sequence[str] = (),
) -> Comparison:
    """Run every method with every seed; finished runs are read back under `resume`. Seed s also deals out the data
    and draws the starting model, the same for all methods. In `lockstep`, runs that the vector engine trains share
    their cohorts; with `processes` so many are at work at a time, each in a process of its own. On a cluster each run
    is played by one worker, if there are enough of them. `track` names the trackers that hear of every round.
    """
    if seeds < 1:
        raise ConfigError(f"seeds must be at least 1, not {seeds}")
    if target is not None and not (math.isfinite(target) and (target <= 1 or config.metric not in METRICS)):
        raise ConfigError(f"target must be a share such as 0.9 of {config.metric}, not {target}")
    texts = [Method(text).text for text in methods]
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise ConfigError(f"{twice} stands in the comparison twice")
    check_processes(processes, config)
    config = config.settled()
    federation = load_data(**config.dealing)
    if federation.test is None:
        raise ConfigError("there is no test set to compare on; hold clients out with --fold 0, or leave out --pooled")
    clients = len(federation)
    pool = workers_for(config, len(texts) * seeds)
    asked, config = config, config if pool is None else alone(config)
    plans = [replace(config, method=text, rounds=rounds_for(Method(text), config, clients)) for text in texts]
    if (folder / CONFIG).is_file():
        raise RunError(f"{folder} holds a run; choose another --out")
    if (folder / STUDY).is_file():
        raise RunError(f"{folder} holds a study; choose another --out")
    every = range(config.seed, config.seed + seeds)
    runs_of = {
        plan: [(replace(plan, seed=seed), folder / slug(plan.method) / f"seed-{seed}") for seed in every]
        for plan in plans
    }
    vector = True
    for planned in runs_of.values():  # whatever is wrong comes out before anything is written
        for k, (seeded, where) in enumerate(planned):
            if k == 0 or (resume and is_over(where, seeded.rounds)):
                ready = prepare_run(seeded, where, resume)
                vector &= isinstance(ready, Run) or isinstance(ready[0].simulation.engine, Vector)
    works = {plan: plan.rounds * works_of_round(Method(plan.method), plan, clients) for plan in plans}
    with (
        claim(folder, overwrite, resume),
        Watch(sum(works.values()) * seeds, console, "works") as progress,
        ExitStack() as trackers,
    ):
        write_text(folder / COMPARISON, _described(asked, texts, seeds, target))
        jobs = []
        for plan, planned in runs_of.items():
            for seeded, where in planned:
                if resume and is_over(where, seeded.rounds):
                    progress.skip(works[plan])
                label = f"{plan.method} seed {seeded.seed}"
                tell = trackers.enter_context(tracked(track, where, asdict(seeded), title=label, resume=resume))
                jobs.append(Job(seeded, where, [progress.callback(label, config.metric, works[plan]), *tell]))
        if processes:
            _apart(jobs, processes, resume)
        at_once = TOGETHER if pool is not None or (lockstep and vector) else 1
        runs = _run_all([jobs[i : i + at_once] for i in range(0, len(jobs), at_once)], resume or bool(processes), pool)
        rows = [Row(plan.method, runs[i * seeds : (i + 1) * seeds], config.metric) for i, plan in enumerate(plans)]
    goal = target
    if target is None and math.isfinite(rows[0].mean):
        goal = BASELINE_SHARE * rows[0].mean
    rows = [replace(row, target=goal, gain=gain) for row, gain in zip(rows, gains(rows), strict=True)]
    return Comparison(folder, asked, rows, goal, seeds)


def _apart(jobs: Sequence[Job], processes: int, resume: bool) -> None:
    """Finish all of them side by side; what is wrong with one does not keep the others from theirs."""
    left = [job for job in jobs if not (resume and is_over(job.folder, job.config.rounds))]
    for error in side_by_side([[job] for job in left], processes, resume=resume).values():
        raise error


def _run_all(portions: Sequence[Sequence[Job]], resume: bool, pool: Pool | None) -> list[Run]:
    """One portion after the other; a run in which too many clients diverged does not keep the rest from theirs."""
    runs: list[Run] = []
    diverged: list[Diverged] = []
    for i, portion in enumerate(portions):
        try:
            runs += start_runs(portion, resume=resume, pool=pool)
        except Diverged as error:
            diverged.append(error)
            if i + 1 < len(portions):
                LOG.warning("%s; the other runs go on", error)
    if diverged:
        raise diverged[0]
    return runs


def gains(rows: Sequence[Row]) -> list[Paired | None]:
    """Of each method over the first, seed by seed."""
    return [None, *compare_all(rows[0].finals, [row.finals for row in rows[1:]])]


def _described(config: RunConfig, methods: list[str], seeds: int, target: float | None) -> str:
    """Everything needed to repeat a comparison, as YAML."""
    import yaml

    settings = {name: value for name, value in asdict(config).items() if name != "method"}
    return yaml.safe_dump({"methods": methods, "seeds": seeds, "target": target, **settings}, sort_keys=False)


def slug(text: str) -> str:
    """A method as a folder name: readable, and different for different methods."""
    plain = re.sub(r"[^A-Za-z0-9.=+-]+", "_", text).strip("_")
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return plain if plain == text else f"{plain[:60]}-{digest}"


def _final(run: Run, metric: str) -> float:
    value = run.kept.get(f"test_{metric}")
    return float("nan") if value is None else float(value)


def _tail(run: Run, metric: str) -> float:
    begin = run.history[-1]["works"] - LAST + 1e-9
    lines = [line for line in run.history if f"test_{metric}" in line]
    values = [line[f"test_{metric}"] for line in lines if line["works"] > begin or line is lines[-1]]
    return statistics.fmean(float("nan") if value is None else value for value in values) if values else float("nan")


def _reached(run: Run, metric: str, target: float | None) -> dict[str, Any] | None:
    """The first line at or above the target, looks on the way included; bytes are those of the whole round."""
    for look in (look for line in run.history for look in looks(line, f"test_{metric}")):
        value = look.get(f"test_{metric}")
        if target is not None and value is not None and value >= target:
            return look
    return None
