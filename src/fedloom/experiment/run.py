"""One run into one folder."""

from collections.abc import Sequence
from pathlib import Path

from fedloom.data.catalogue import load
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import (
    CHECKPOINT,
    CONFIG,
    METRICS,
    MODEL,
    Run,
    claim,
    json_line,
    load_run,
    write_model,
    write_partition,
    write_text,
)
from fedloom.models import model as make_model
from fedloom.training import Callback, Event, Training


def start_run(
    config: RunConfig,
    folder: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train as `config` says and leave everything in `folder`; nothing is written before every setting was checked."""
    if resume and (folder / MODEL).exists():
        return load_run(folder)
    federation = load(config.data, config.partition, config.clients, config.seed)
    training = Training(
        make_model(config.model, federation, config.seed),
        federation,
        config.method,
        rounds=config.rounds,
        clients_per_round=config.per_round,
        local=config.local,
        loss=None,
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
    claim(folder, overwrite, resume)
    write_text(folder / CONFIG, config.yaml())
    write_partition(folder, federation)
    write_text(folder / METRICS, "".join(json_line(row) for row in training.history))
    with (folder / METRICS).open("a", buffering=1) as metrics:

        def record(event: Event) -> None:
            metrics.write(json_line(event.metrics))

        result = training.run([record, *callbacks])
    write_model(folder / MODEL, result.model)
    return load_run(folder)
