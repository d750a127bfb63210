"""Run a recipe: every method of every row with every seed, measured beside printed.

Runs lie in OUT/runs, named by their settings, so that recipes which need the same run share it and a run that was
interrupted goes on.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from fedloom.data.split import FOLDS
from fedloom.diagnose.skew import worst_cohort
from fedloom.engines.choose import Wishes
from fedloom.engines.ray import session
from fedloom.engines.vector import Vector
from fedloom.errors import ConfigError, FedloomError, nearest
from fedloom.experiment.compare import TOGETHER, rounds_for, slug, works_of_round
from fedloom.experiment.config import RunConfig
from fedloom.experiment.cost import duration, seconds_for
from fedloom.experiment.findings import Cell, Reproduction
from fedloom.experiment.folder import InUse, Run, is_finished, load_finished
from fedloom.experiment.processes import check_processes, side_by_side
from fedloom.experiment.recipe import SCALES, Case, Recipe
from fedloom.experiment.run import Job, alone, load_data, prepare_run, start_runs, workers_for
from fedloom.method import Method
from fedloom.progress import Watch
from fedloom.simulation import cohort_size, find_device

LONGEST_WITHOUT_GPU = 24 * 3600.0  # seconds that a row may take before somebody has to say that it shall
# Settings that are not part of a run's name: they are in the folder's, or can't change its result.
ELSEWHERE = {"seed", "fold", "device", "engine", "compile", "max_memory", "data_dir", "checkpoint_every"}
SMOKE: dict[str, Any] = {"samples": 60, "steps": 1, "epochs": 1, "patience": None}
SMOKE |= {"eval_every": 1_000_000, "eval_last": 1}


def scaled(recipe: Recipe, case: Case, scale: str, rounds: int | None = None) -> RunConfig:
    """A case's settings at a scale; `rounds` counts Works per client slot."""
    if scale not in SCALES:
        raise ConfigError(f"unknown scale {scale!r}: choose from {', '.join(SCALES)}")
    config, method = case.config, Method(case.config.method)
    per_round = cohort_size(config.per_round, config.clients or 100)
    if scale == "smoke":
        clients = None if config.clients is None else min(config.clients, 12)
        few = min(2, per_round)
        least = math.ceil(method.pipeline().schedule.stage.works(few) - 1e-9)
        batch = None if config.batch_size is None else min(config.batch_size, 4)
        config = config.change({**SMOKE, "clients": clients, "per_round": few, "batch_size": batch})
        config = replace(config, rounds=max(2, least), validation=min(config.validation, 2))
    elif scale == "quick":
        least = math.ceil(10 * method.pipeline().schedule.stage.works(per_round))
        config = replace(config, rounds=min(config.rounds, max(config.rounds // 10, least)))
    config = config.change(recipe.scales.get(scale, {}))
    return config if rounds is None else config.change({"rounds": rounds})


@session()
def reproduce(
    recipe: Recipe,
    out: Path,
    *,
    console: Console,
    scale: str = "paper",
    rows: Sequence[str] = (),
    methods: Sequence[str] = (),
    seeds: int | None = None,
    folds: int | None = None,
    only_folds: Sequence[int] = (),
    rounds: int | None = None,
    settings: Mapping[str, Any] | None = None,
    lockstep: bool = True,
    processes: int | None = None,
    play: bool = True,
) -> Reproduction:
    """Run a recipe into a folder; what the folder holds already is taken from there. Rows that can't be run are told
    with the reason; of `methods` and `only_folds`, where some are named, only those are run. In `lockstep`, runs that
    the vector engine trains share their cohorts. With `processes` so many of them play the runs side by side. Without
    `play` nothing is run: it is told what the folder holds.
    """
    chosen, labels = _chosen(recipe, rows), _labels(recipe, methods)
    options = dict(settings or {})
    Wishes(options.get("engine", "auto"))
    find_device(options.get("device", "auto"))
    if options.get("data_dir") is not None and not Path(options["data_dir"]).is_dir():
        raise ConfigError(f"--data-dir {options['data_dir']} is no folder")
    if rounds is not None and rounds < 1:
        raise ConfigError(f"rounds must be at least 1, not {rounds}")
    seeds = (recipe.seeds if scale == "paper" else 1) if seeds is None else seeds
    folds = (recipe.folds if scale == "paper" or recipe.folds is None else 1) if folds is None else folds
    if seeds < 1 or (folds is not None and not 1 <= folds <= 5):
        raise ConfigError(f"seeds must be at least 1 and folds between 1 and 5, not {seeds} and {folds}")
    if folds is not None and recipe.folds is None:
        raise ConfigError(f"{recipe.name} does not hold clients out in folds")
    by_row: dict[str, list[Cell]] = {}
    for case in recipe.cases:
        config = scaled(recipe, case, scale, rounds).change(options)
        by_row.setdefault(case.row, []).append(Cell(case, config))
    unknown = sorted(set(only_folds) - set(range(folds or 0)))
    if unknown:
        known = f"has folds 0 to {folds - 1}" if folds else "does not hold clients out in folds"
        raise ConfigError(f"{recipe.name} {known}: there is no fold {unknown[0]}")
    held_out: Sequence[int | None] = sorted(set(only_folds)) or range(folds or 0) or [None]
    repeats = [(seed, fold) for seed in range(seeds) for fold in held_out]
    check_processes(processes, next(iter(by_row.values()))[0].config)
    seen: set[tuple[str, str]] = set()
    asked: list[_Row] = []
    left_out: dict[str, str] = {}
    for row, cells in by_row.items():
        kind = (cells[0].config.data, cells[0].config.model)
        picked = [cell for cell in cells if cell.case.label in labels]
        if row not in chosen:
            left_out[row] = "not chosen by --rows"
        elif not picked:
            left_out[row] = "not chosen by --methods"
        elif scale == "smoke" and kind in seen:
            left_out[row] = "smoke runs one row of each data set and model"
        else:
            seen.add(kind)
            asked.append(_planned_row(recipe, row, picked, repeats, out))
    if play:
        done = [
            row
            for some in ([asked] if processes else [[row] for row in asked])
            for row in _run_rows(recipe, some, scale, console, lockstep, processes)
        ]
    else:
        done = [row.done({}) for row in asked]
    played = {(row.name, cell.case.label): cell for row in done for cell in row.cells}
    for row, cells in by_row.items():
        why_not = left_out.get(row, "not chosen by --methods")
        by_row[row] = [
            played.get((row, cell.case.label)) or _left_out(recipe, cell, repeats, out, why_not) for cell in cells
        ]
    folder = out / (recipe.name if scale == "paper" else f"{recipe.name}-{scale}")
    return Reproduction(recipe, scale, folder, tuple(cell for cells in by_row.values() for cell in cells))


def _left_out(recipe: Recipe, cell: Cell, repeats: list[tuple[int, int | None]], out: Path, why_not: str) -> Cell:
    """A method of a row that is not to be run: with what was run of it before, if that is all of it."""
    runs: list[Run] = []
    with suppress(FedloomError):
        jobs = [_job(recipe, cell, out, *repeat) for repeat in repeats]
        if all(is_finished(job.folder) for job in jobs):
            runs = [load_finished(job.folder) for job in jobs]
    return replace(cell, runs=tuple(runs), why_not="" if runs else why_not, asked=False)


def _chosen(recipe: Recipe, wanted: Sequence[str]) -> list[str]:
    """Rows that are named, or whose name holds every part of one of the wanted texts."""
    if not wanted:
        return recipe.rows
    found = []
    for text in wanted:
        if not text.strip("/ "):
            raise ConfigError("--rows names no row")
        parts = {part for part in text.split("/") if part}
        matching = [text] if text in recipe.rows else [row for row in recipe.rows if parts <= set(row.split("/"))]
        if not matching:
            raise ConfigError(f"{recipe.name} has no row {text!r}: the rows are {', '.join(recipe.rows)}")
        found += matching
    return found


def _labels(recipe: Recipe, wanted: Sequence[str]) -> list[str]:
    """Labels of the methods that are to be run."""
    known = list(dict.fromkeys(case.label for case in recipe.cases))
    for label in wanted:
        if label not in known:
            raise ConfigError(f"{recipe.name} has no method {label!r}: {nearest(label, known)}")
    return list(wanted) or known


class _Row(NamedTuple):
    name: str
    cells: list[Cell]
    planned: list[list[Job]]  # of each cell

    def left(self) -> list[Job]:
        """Runs that are still to be made."""
        jobs = {job.folder: job for own in self.planned for job in own}  # two labels may be the same run
        return [job for job in jobs.values() if not is_finished(job.folder)]

    def refused(self, why_not: str) -> "_Row":
        return self._replace(cells=[replace(cell, why_not=cell.why_not or why_not) for cell in self.cells])

    def done(self, problems: dict[Path, str]) -> "_Row":
        found = []
        for cell, own in zip(self.cells, self.planned, strict=True):
            runs: list[Run] = []
            missing: list[str] = []
            for job in own:
                try:
                    if is_finished(job.folder):
                        runs.append(load_finished(job.folder))
                    else:
                        missing.append(problems.get(job.folder, "not finished"))
                except FedloomError as error:  # what can't be read of one run does not keep the others from the table
                    missing.append(_told(error))
            found.append(replace(cell, runs=tuple(runs), why_not=cell.why_not or (missing[0] if missing else "")))
        return self._replace(cells=found)


def _planned_row(recipe: Recipe, row: str, cells: list[Cell], repeats: list[tuple[int, int | None]], out: Path) -> _Row:
    planned: list[list[Job]] = []
    for i, cell in enumerate(cells):
        try:
            planned.append([_job(recipe, cell, out, *repeat) for repeat in repeats])
        except FedloomError as error:  # a method that can't be planned does not keep the others from running
            planned.append([])
            cells[i] = replace(cell, why_not=_told(error))
    return _Row(row, cells, planned)


def _run_rows(
    recipe: Recipe, rows: list[_Row], scale: str, console: Console, lockstep: bool, processes: int | None
) -> Iterator[_Row]:
    """All methods of these rows: side by side, or in lockstep where they can be."""
    left: dict[Path, Job] = {}
    possible = []
    for row in rows:
        why_not = _why_not(row.left(), scale)
        if why_not:
            yield row.refused(why_not)
            continue
        console.print(f"{recipe.name}: {row.name}", highlight=False, markup=False, soft_wrap=True)
        left |= {job.folder: job for job in row.left()}
        possible.append(row)
    problems = _run(list(left.values()), console, lockstep, processes)
    for row in possible:
        yield row.done(problems)


def _why_not(left: list[Job], scale: str) -> str:
    """Why a row can't be run; nothing if it can, or has been."""
    if not left:
        return ""
    try:
        load_data(**left[0].config.dealing)
        return _too_long(left) if scale == "paper" else ""
    except FedloomError as error:
        return _told(error)


def _run(jobs: list[Job], console: Console, lockstep: bool, processes: int | None) -> dict[Path, str]:
    """Finish all of them; why those that fail did not."""
    if processes:
        return _run_apart(jobs, console, lockstep, processes)
    problems: dict[Path, str] = {}
    pool = workers_for(jobs[0].config, len(jobs)) if jobs else None
    if pool is not None:
        jobs = [job._replace(config=alone(job.config)) for job in jobs]
    kinds = {job.folder.parent: job for job in jobs}  # seeds and folds of a method are trained by the same engine
    at_once = TOGETHER if pool is not None or (lockstep and all(map(_by_vector, kinds.values()))) else 1
    with _watch(jobs, console) as watch:
        for i in range(0, len(jobs), at_once):
            some = [_watched(job, watch) for job in jobs[i : i + at_once]]

            def refused(i: int, why: FedloomError, some: Sequence[Job] = some) -> None:
                problems[some[i].folder] = _told(why)
                watch.skip(_works(some[i].config))

            try:
                start_runs(some, resume=True, pool=pool, refused=refused)
            except InUse:
                raise
            except FedloomError as error:
                for job in some:
                    problems.setdefault(job.folder, _told(error))
    return problems


def _run_apart(jobs: list[Job], console: Console, lockstep: bool, processes: int) -> dict[Path, str]:
    """Side by side, those with the most works first: the shortest fill the gaps at the end. In lockstep, what can be
    trained as one cohort is one process's, as long as there is enough for all; runs with the same clients come
    together, since a vocabulary or a scale may be made of their samples.
    """
    kinds: dict[str, list[Job]] = {}
    with _watch(jobs, console) as watch:
        for job in sorted(jobs, key=lambda job: (-_effort(job.config), job.config.seed, job.config.fold or 0)):
            kinds.setdefault(_kind(job.config), []).append(_watched(job, watch))
        size = min(TOGETHER, max(1, len(jobs) // processes)) if lockstep else 1
        groups = [own[i : i + size] for own in kinds.values() for i in range(0, len(own), size)]
        found = side_by_side(groups, processes, resume=True, refused=lambda job: watch.skip(_works(job.config)))
    for error in found.values():
        if isinstance(error, InUse):
            raise error
    return {folder: _told(error) for folder, error in found.items()}


def _kind(config: RunConfig) -> str:
    """What runs must have in common to be trained together (`lockstep.alike` looks closely)."""
    return repr((config.data, config.augment, config.model, config.loss, replace(config.local, lr=1.0)))


def _works(config: RunConfig) -> float:
    """Works per client slot of a run, all in all."""
    clients = training_clients(config) or 100
    return config.rounds * works_of_round(Method(config.method), config, clients)


def _effort(config: RunConfig) -> float:
    """Samples that a run sees, about."""
    clients = config.clients or 100
    share = cohort_size(config.per_round, clients) / clients
    return _works(config) * share * (config.epochs if config.steps is None else config.steps)


def _watch(jobs: Sequence[Job], console: Console) -> Watch:
    return Watch(sum(_works(job.config) for job in jobs), console, "works")


def _watched(job: Job, watch: Watch) -> Job:
    return job._replace(callbacks=[watch.callback(job.label, job.config.metric, _works(job.config))])


def _by_vector(job: Job) -> bool:
    """Whether a run would be trained as one matrix. One that can't begin keeps the others from nothing."""
    try:
        ready = prepare_run(job.config, job.folder, resume=True)
    except FedloomError:
        return True
    return isinstance(ready, Run) or isinstance(ready[0].simulation.engine, Vector)


def _job(recipe: Recipe, cell: Cell, out: Path, seed: int, fold: int | None) -> Job:
    """One run of a case, and where it lies."""
    config = replace(cell.config, seed=seed, fold=fold).settled()
    method = Method(config.method)
    clients = training_clients(config)
    if clients is None or recipe.force is not None:
        federation = load_data(**config.dealing)
        clients = len(federation)
        if recipe.force is not None:
            at = min(recipe.force, config.rounds) - 1
            cohort = worst_cohort(federation, cohort_size(config.per_round, clients))
            method = method + Method(f"fixed(cohorts=[{cohort}], works=[{at}])")
    rounds = rounds_for(method, config, clients)
    config = replace(config, method=method.text, rounds=rounds)
    usual = asdict(RunConfig())  # left out, so that a new setting leaves runs where they are
    settings = {name: value for name, value in asdict(config).items() if name not in ELSEWHERE and value != usual[name]}
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:10]
    place = f"{slug(config.data)[:40]}-{slug(config.model)[:30]}-{slug(method.text)[:40]}-{digest}"
    end = f"seed-{seed}" if fold is None else f"seed-{seed}-fold-{fold}"
    label = f"{cell.case.row}, {cell.case.label}, seed {seed}" + ("" if fold is None else f", fold {fold}")
    return Job(config, out / "runs" / place / end, grows=False, label=label)  # with more rounds it would lie elsewhere


def training_clients(config: RunConfig) -> int | None:
    """How many clients train, where that is known without the data."""
    if config.clients is None or config.fold is None:
        return config.clients
    blocks = [len(block) for block in np.array_split(np.arange(config.clients), FOLDS)]
    return config.clients - blocks[config.fold] - blocks[0]


def _too_long(jobs: list[Job]) -> str:
    """Why these should not be run without a GPU, unless somebody says so."""
    first = jobs[0].config
    if first.device != "auto" or find_device("auto").type != "cpu":
        return ""
    seconds = sum(seconds_for(job.config) for job in jobs)
    if seconds <= LONGEST_WITHOUT_GPU:
        return ""
    return f"it needs a GPU: about {duration(seconds)} on this CPU; --device cpu runs it all the same"


def _told(error: FedloomError) -> str:
    return " ".join(str(error).split())
