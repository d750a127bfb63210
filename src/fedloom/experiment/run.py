"""One run into one folder."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.checkpoint import newest, sync
from fedloom.data.load import load
from fedloom.engines.choose import Wishes
from fedloom.engines.ray import session
from fedloom.engines.ray.pool import Pool, pool_for
from fedloom.engines.ray.whole import run_apart
from fedloom.errors import FedloomError, RunError
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import (
    CHECKPOINT,
    COMPARISON,
    CONFIG,
    METRICS,
    MODEL,
    PARTITION,
    STUDY,
    TENSORS,
    InUse,
    Run,
    claim,
    is_finished,
    json_line,
    load_finished,
    load_run,
    write_model,
    write_text,
)
from fedloom.federation import Federation
from fedloom.lockstep import run_together
from fedloom.memory import Room
from fedloom.models import model as make_model
from fedloom.result import Callback, Event, Result
from fedloom.training import Training

FREE = frozenset(
    {
        "engine",
        "ray_address",
        "actors",
        "compile",
        "max_memory",
        "device",
        "precision",
        "checkpoint_every",
        "max_diverged",
        "data_dir",
    }
)
_LAST: list[Federation] = []


def load_data(**dealing: Any) -> Federation:
    """The data of a run. Those of a comparison share their samples, however they are dealt out."""
    federation = _sharing(_loaded(**dealing))
    _LAST[:] = [federation]
    return federation


@lru_cache(maxsize=16)
def _loaded(**dealing: Any) -> Federation:
    return _sharing(load(**dealing))


def _sharing(federation: Federation) -> Federation:
    """With the samples of the one before it, if they are the same."""
    for known in _LAST:
        if _same(known.x, federation.x) and _same(known.y, federation.y):
            federation = replace(federation, x=known.x, y=known.y)
        if known.test is not None and federation.test is not None:
            there = _same(known.test.x, federation.test.x) and _same(known.test.y, federation.test.y)
            if there and known.test.offsets is federation.test.offsets is None:
                federation = replace(federation, test=known.test)
    return federation


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and torch.equal(a, b))


def start_run(
    config: RunConfig,
    folder: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train as `config` says and leave everything in `folder`; nothing is written before every setting was checked."""
    (done,) = start_runs([Job(config, folder, callbacks)], overwrite=overwrite, resume=resume)
    return done


class Job(NamedTuple):
    """A run to be made."""

    config: RunConfig
    folder: Path
    callbacks: Sequence[Callback] = ()
    grows: bool = True  # it may go on with more rounds when it has finished, so its last checkpoint stays
    label: str = ""  # what it is called where its progress is told


@session()
def start_runs(
    jobs: Sequence[Job],
    *,
    overwrite: bool = False,
    resume: bool = False,
    pool: Pool | None = None,
    room: Room | None = None,
    refused: Callable[[int, FedloomError], None] | None = None,
) -> list[Run]:
    """Several runs, each into its own folder: in lockstep, or at the workers of a pool. They share one `room` for what
    their clients remember. One that can't begin keeps all from theirs; or, where `refused` is told of it, itself alone.
    """
    done: dict[int, Run] = {}
    ready: dict[int, tuple[RunConfig, Training, Federation, Standing]] = {}
    for i, job in enumerate(jobs):
        before = standing(job.folder)
        try:
            config = job.config.settled()
            found = prepare_run(config, job.folder, resume, room)
        except FedloomError as error:
            if refused is None:
                raise
            refused(i, error)
            continue
        if isinstance(found, Run):
            done[i] = found
            continue
        training, federation = found
        room = room or training.simulation.population.room
        training.label = f"{config.method}, seed {config.seed}: " if len(jobs) > 1 else ""
        ready[i] = (config, training, federation, before)
    with ExitStack() as folders:
        begun: dict[int, tuple[Training, Callback, RunConfig]] = {}
        for i, prepared in ready.items():
            try:
                begun[i] = folders.enter_context(recorded(jobs[i].folder, *prepared, overwrite, resume))
            except FedloomError as error:
                if refused is None or isinstance(error, InUse):
                    raise
                refused(i, error)
        trainings = [training for training, _, _ in begun.values()]
        callbacks = [[record, *jobs[i].callbacks] for i, (_, record, _) in begun.items()]
        places = list(begun)

        def finished(k: int, result: Result) -> None:
            i = places[k]
            sync(jobs[i].folder / METRICS)  # all of it is there when the model is
            write_model(jobs[i].folder / MODEL, result.model, len(result.history))
            if not jobs[i].grows:
                shutil.rmtree(jobs[i].folder / CHECKPOINT, ignore_errors=True)
            done[i] = Run(jobs[i].folder, begun[i][2], [json.loads(json_line(row)) for row in result.history])

        if pool is not None and trainings:
            run_apart(pool, trainings, callbacks, finished)
        elif len(trainings) == 1:
            finished(0, trainings[0].run(callbacks[0]))
        elif trainings:
            run_together(trainings, callbacks, finished)
    return [done[i] for i in sorted(done)]


Standing = tuple[str | None, bool]


def standing(folder: Path) -> Standing:
    """How far a run has come: its newest checkpoint, and whether it has finished."""
    return newest(folder / CHECKPOINT), is_finished(folder)


@contextmanager
def recorded(
    folder: Path,
    config: RunConfig,
    training: Training,
    federation: Federation,
    before: Standing,
    overwrite: bool,
    resume: bool,
) -> Iterator[tuple[Training, Callback, RunConfig]]:
    """A run's folder, with all that is known before the first round, and a callback that writes its history. `before`
    is how far it had come when the training was made.
    """
    engine = training.simulation.engine
    config = replace(config, engine=engine.name, compile=engine.compile)
    with claim(folder, overwrite, resume):
        if resume and standing(folder) != before:
            raise InUse(f"{folder} was in use by another fedloom until now; the same command goes on")
        (folder / MODEL).unlink(missing_ok=True)  # it has finished when there is one
        write_text(folder / CONFIG, config.yaml())
        write_text(folder / TENSORS, json.dumps(training.simulation.setup.space.names))
        if federation.report is not None:
            federation.report.save(folder / PARTITION)
        write_text(folder / METRICS, "".join(json_line(row) for row in training.history))
        metrics = (folder / METRICS).open("a", buffering=1)

        def record(event: Event) -> None:
            try:
                metrics.write(json_line(event.metrics))
            except OSError as error:
                raise RunError(f"{folder / METRICS} can't be written: {error.strerror}; {training.last_safe}") from None

        try:
            yield training, record, config
        finally:
            with suppress(OSError):  # it tries again what could not be written
                metrics.close()


def prepare_run(
    config: RunConfig, folder: Path, resume: bool, room: Room | None = None
) -> Run | tuple[Training, Federation]:
    """What there is to do: a run that has finished already, or training that is ready to start. Writes nothing, and
    raises whatever a run would be refused for.
    """
    config = config.settled()
    if resume and is_over(folder, config.rounds):
        return _same_settings(load_finished(folder), config)
    if (folder / COMPARISON).is_file():
        raise RunError(f"{folder} holds a comparison; choose another --out")
    if (folder / STUDY).is_file():
        raise RunError(f"{folder} holds a study; choose another --out")
    federation = load_data(**config.dealing)
    saving = {"checkpoint": folder / CHECKPOINT, "checkpoint_every": config.checkpoint_every, "resume": resume}
    return make_training(config, federation, room=room, **saving), federation


def is_over(folder: Path, rounds: int) -> bool:
    """A run that has finished and can't go on, or is not asked to: with more rounds, and its last checkpoint."""
    return is_finished(folder) and not (rounds > load_run(folder).config.rounds and newest(folder / CHECKPOINT))


def workers_for(config: RunConfig, runs: int) -> Pool | None:
    """The workers at which so many runs are played, one each; None: there is no cluster, or there are fewer runs than
    workers, so that it is faster to split their cohorts.
    """
    wishes = Wishes(config.engine, ray_address=config.ray_address, actors=config.actors)
    if not wishes.on_ray:
        return None
    pool = pool_for(wishes.ray_address, wishes.actors, gpus=not config.device.startswith("cpu"))
    return pool if runs >= max(2, len(pool.alive())) else None


def alone(config: RunConfig) -> RunConfig:
    """The same run for one worker: with the engine that would train its share."""
    local = {"ray": "auto"}.get(config.engine, config.engine.removeprefix("ray-"))
    return replace(config, engine=local, ray_address=None, actors=None)


def make_training(config: RunConfig, federation: Federation, **more: Any) -> Training:
    """Training as `config` says; `more` is for what belongs to a folder or a device rather than to the settings."""
    return Training(
        make_model(config.model, federation, config.seed, config.data_dir),
        federation,
        config.method,
        rounds=config.rounds,
        clients_per_round=config.per_round,
        local=config.local,
        loss=config.loss,
        metric=config.metric,
        eval_every=config.eval_every,
        eval_last=config.eval_last,
        eval_between=config.eval_between,
        patience=config.patience,
        diagnose=config.diagnose,
        engine=config.engine,
        compile=config.compile,
        max_memory=config.max_memory,
        ray_address=config.ray_address,
        actors=config.actors,
        device=config.device,
        precision=config.precision,
        seed=config.seed,
        availability=config.availability,
        dropout_rate=config.dropout_rate,
        max_diverged=config.max_diverged,
        **more,
    )


def _same_settings(run: Run, config: RunConfig) -> Run:
    """A finished run stands for other settings only if they can't have changed its result."""
    then, now = asdict(run.config), asdict(config)
    changed = [
        f"{name} was {then[name]}, now {now[name]}" for name in now if name not in FREE and then[name] != now[name]
    ]
    if changed:
        raise RunError(f"{run.folder} holds a finished run with other settings: {'; '.join(changed)}")
    return run
