"""One run into one folder."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from fedloom.data.load import load
from fedloom.errors import RunError
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import (
    CHECKPOINT,
    COMPARISON,
    CONFIG,
    METRICS,
    MODEL,
    PARTITION,
    Run,
    claim,
    is_finished,
    json_line,
    load_run,
    write_model,
    write_text,
)
from fedloom.federation import Federation
from fedloom.models import model as make_model
from fedloom.training import Callback, Event, Training

load_data = lru_cache(maxsize=4)(load)  # the runs of a comparison share their data


def start_run(
    config: RunConfig,
    folder: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train as `config` says and leave everything in `folder`; nothing is written before every setting was checked."""
    config = config.settled()
    ready = prepare_run(config, folder, resume)
    if isinstance(ready, Run):
        return ready
    training, federation = ready
    config = replace(config, engine=training.simulation.engine.name)
    with claim(folder, overwrite, resume):
        write_text(folder / CONFIG, config.yaml())
        if federation.report is not None:
            federation.report.save(folder / PARTITION)
        write_text(folder / METRICS, "".join(json_line(row) for row in training.history))
        with (folder / METRICS).open("a", buffering=1) as metrics:

            def record(event: Event) -> None:
                metrics.write(json_line(event.metrics))

            result = training.run([record, *callbacks])
        write_model(folder / MODEL, result.model)
        return Run(folder, config, [json.loads(json_line(row)) for row in result.history])


def prepare_run(config: RunConfig, folder: Path, resume: bool) -> Run | tuple[Training, Federation]:
    """What there is to do: a run that has finished already, or training that is ready to start. Writes nothing, and
    raises whatever a run would be refused for.
    """
    config = config.settled()
    if resume and is_finished(folder):
        return _same_settings(load_run(folder), config)
    if (folder / COMPARISON).is_file():
        raise RunError(f"{folder} holds a comparison; choose another --out")
    federation = load_data(**config.dealing)
    training = Training(
        make_model(config.model, federation, config.seed, config.data_dir),
        federation,
        config.method,
        rounds=config.rounds,
        clients_per_round=config.per_round,
        local=config.local,
        loss=config.loss,
        metric=config.metric,
        eval_every=config.eval_every,
        engine=config.engine,
        device=config.device,
        precision=config.precision,
        seed=config.seed,
        availability=config.availability,
        dropout_rate=config.dropout_rate,
        checkpoint=folder / CHECKPOINT,
        checkpoint_every=config.checkpoint_every,
        resume=resume,
    )
    return training, federation


def _same_settings(run: Run, config: RunConfig) -> Run:
    """A finished run stands for other settings only if they can't have changed its result."""
    if not run.history:
        raise RunError(f"{run.folder / METRICS} is empty although the run has finished; remove the folder to repeat it")
    then, now = asdict(run.config), asdict(config)
    free = {"engine", "device", "precision", "checkpoint_every", "data_dir"}
    changed = [
        f"{name} was {then[name]}, now {now[name]}" for name in now if name not in free and then[name] != now[name]
    ]
    if changed:
        raise RunError(f"{run.folder} holds a finished run with other settings: {'; '.join(changed)}")
    return run
