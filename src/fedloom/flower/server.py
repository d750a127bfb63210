"""The server of a real federation: `fit`, with Flower's clients in place of simulated ones."""

import errno
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedloom.checkpoint import newest
from fedloom.errors import ConfigError, ModelError, RunError, nearest
from fedloom.evaluate import Score, find_metric
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import CHECKPOINT, MARK, MODEL, write_model
from fedloom.experiment.run import recorded, standing
from fedloom.federation import Federation, Holdout
from fedloom.flower.fleet import Away, Fleet, Terms
from fedloom.flower.post import Post
from fedloom.flower.roster import ROSTER, Member, Registrar, Roster
from fedloom.flower.wire import model_digest, write_local
from fedloom.local import Local
from fedloom.method import Method, Pipeline
from fedloom.methods.attack import Attack
from fedloom.result import Callback, Event, Result
from fedloom.stages import Setup
from fedloom.task import Loss, Precision
from fedloom.training import Training

LOG = logging.getLogger("fedloom")
NEED_DATA = ("labels", "twin", "fairness", "probe")  # diagnostics that read or train on the clients' own samples


def serve(
    grid: Grid,
    model: nn.Module,
    method: str | Method = "fedavg",
    *,
    clients: int,
    rounds: int = 50,
    clients_per_round: int | float | None = None,
    local: Local | None = None,
    test: Federation | tuple[Any, Any] | None = None,
    loss: str | Loss | None = None,
    metric: str | Score = "accuracy",
    eval_every: int = 1,
    patience: int | None = None,
    evaluate_clients: bool = False,
    device: str | torch.device = "auto",
    precision: Precision = "auto",
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    folder: str | Path | None = None,
    resume: bool = False,
    max_diverged: int | None = None,
    diagnose: str | Sequence[str] | None = None,
    enrol_timeout: float = 600.0,
    round_timeout: float = 3600.0,
    min_replies: int = 1,
    max_samples: int | None = None,
) -> Result:
    """Train a model over the nodes of a Flower federation, as `fl.fit` does over simulated clients.

    It waits `enrol_timeout` seconds for `clients` nodes to introduce themselves; these are the federation for the
    whole run. Clients that are drawn but not connected, that fail, or whose reply does not fit, are left out of their
    round; it goes on without those that need more than `round_timeout` seconds. A round with fewer than `min_replies`
    good replies ends the run, which can be resumed. A client that says that it has more than `max_samples` samples
    takes no part.

    `test` is a pair (x, y), or a federation whose `test` and `validation` are used, to evaluate on; with
    `evaluate_clients` the clients that have test data score the model, too (`clients_loss`, `clients_accuracy`).
    `folder` receives what `fedloom run` writes, with a checkpoint after every round, and `resume` goes on from there.
    All other settings are those of `fl.fit`.
    """
    local = local or Local()
    _check(clients, enrol_timeout, round_timeout, min_replies, max_samples, diagnose, local)
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(callbacks, Sequence) or not all(callable(callback) for callback in callbacks):
        raise ConfigError("callbacks must be a list of functions of one fl.Event")
    if not isinstance(evaluate_clients, bool):
        raise ConfigError(f"evaluate_clients must be True or False, not {evaluate_clients!r}")
    method = Method(method)
    _refuse_tampering(method.pipeline())
    if resume and folder is None:
        raise ConfigError("resume=True needs folder=, where the run is that is to go on")
    where = _expanded(folder) if folder else None
    terms = Terms(float(round_timeout), min_replies, where is not None, evaluate_clients, find_metric(metric)[0])
    post = Post(grid)
    registrar = Registrar(post, model_digest(model), write_local(local), max_samples)
    held_out = _held_out(test)

    def prepared(roster: Roster, saving: Mapping[str, Any]) -> Training:
        def beyond(pipeline: Pipeline, setup: Setup) -> tuple[Fleet, Away, Pipeline]:
            fleet = Fleet(post, registrar, roster, terms, method.text, pipeline, setup)
            return fleet, Away(setup, fleet.accepted), fleet.pipeline

        return Training(
            model,
            Federation.elsewhere(roster.sizes, held_out),
            method,
            rounds=rounds,
            clients_per_round=clients_per_round,
            local=local,
            loss=loss,
            metric=metric,
            eval_every=eval_every,
            patience=patience,
            device=device,
            precision=precision,
            seed=seed,
            max_diverged=max_diverged,
            diagnose=diagnose,
            beyond=beyond,
            **saving,
        )

    nobody = [Member(0, local.batch_size or 1)] * clients
    prepared(Roster("", 0, nobody), {})  # bad settings are refused before anybody is waited for
    roster = None if where is None or not resume else Roster.load(where)
    if roster is None:
        _check_folder(where, resume)
        roster = registrar.enrol(clients, enrol_timeout)
    elif len(roster.members) != clients:
        raise RunError(f"{where} holds a run of {len(roster.members)} clients, not of {clients}")
    if where is None:
        return _played(prepared(roster, {}), roster, callbacks)
    before = standing(where)
    training = prepared(roster, {"checkpoint": where / CHECKPOINT, "checkpoint_every": 1, "resume": resume})
    config = _config(training, model, metric, clients)
    with recorded(where, config, training, training.data, before, False, resume) as (_, record, _):
        roster.save(where)
        result = _played(training, roster, [record, *callbacks])
        write_model(where / MODEL, result.model, len(result.history))
    return result


def _played(training: Training, roster: Roster, callbacks: Sequence[Callback]) -> Result:
    method, clients = training.simulation.method, len(roster.members)
    LOG.info("%s: %d clients, %s samples", method, clients, f"{int(roster.sizes.sum()):,}")
    return training.run([_tell, *callbacks])


def _expanded(folder: str | Path) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"folder={str(folder)!r}: {error}") from None


def _refuse_tampering(pipeline: Pipeline) -> None:
    for part in pipeline.parts:
        if isinstance(part.stage, Attack) and part.stage.how == "label-flip":
            raise ConfigError("attack: label-flip changes the clients' data, which stay with them; choose another kind")


def _check_folder(where: Path | None, resume: bool) -> None:
    """Before anybody is waited for: refuse a folder that can't be written to, or that holds something else than what is
    left by a server that was ended before its first round.
    """
    if where is None:
        return
    try:
        where.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in where.iterdir()}
        if not os.access(where, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        raise RunError(f"{where} can't be written to: {getattr(error, 'strerror', error)}") from None
    if there and not resume:
        raise RunError(f"{where} is not empty; choose another folder, or resume the run that is in it")
    if there and (newest(where / CHECKPOINT) or MARK not in there):
        raise RunError(f"{where} is not empty, but holds no {ROSTER} of a run to resume; choose another folder")


def _check(
    clients: Any,
    enrol_timeout: Any,
    round_timeout: Any,
    min_replies: Any,
    max_samples: Any,
    diagnose: str | Sequence[str] | None,
    local: Any,
) -> None:
    for name, value in (("clients", clients), ("min_replies", min_replies), ("max_samples", max_samples)):
        if value is None and name == "max_samples":
            continue
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
    for name, value in (("enrol_timeout", enrol_timeout), ("round_timeout", round_timeout)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e9:
            raise ConfigError(f"{name} must be a number of seconds above 0, not {value!r}")
    if not isinstance(local, Local):
        raise ConfigError(f"local must be a fl.Local, not {type(local).__name__}")
    from fedloom.diagnosis import named

    for name in set(named(diagnose)) & set(NEED_DATA):
        raise ConfigError(f"diagnose={name} reads the clients' data, which stay with them")


def _held_out(test: Any) -> Federation | None:
    if test is None or isinstance(test, Federation):
        return test
    if not isinstance(test, tuple | list):
        raise ConfigError(f"test must be a pair (x, y) or a fl.Federation, not {type(test).__name__}")
    held = Holdout.of(test, "test")
    offsets = torch.tensor([0, len(held.x)])
    federation = Federation.build(held.x, held.y, torch.arange(len(held.x)), offsets, test=held)
    return federation


def _config(training: Training, model: nn.Module, metric: str | Score, clients: int) -> RunConfig:
    """The settings as a run's folder tells them; data and model are known to the app alone."""
    setup = training.simulation.setup
    known = {
        "data": "flower",
        "clients": clients,
        "per_round": setup.per_round,
        "model": type(model).__name__,
        "method": training.simulation.method.text,
        "rounds": training.rounds,
        "metric": find_metric(metric)[0],
        "eval_every": training.eval_every,
        "patience": training.best.patience,
        "seed": setup.seed,
        **asdict(setup.local),
    }
    return RunConfig().change(known)


def _tell(event: Event) -> None:
    """A line for every round: in a deployment it stands in `flwr log`."""
    row = event.metrics
    parts = [f"{row['answered']} of {row['asked']} answered"]
    names = [n for n in row if n.endswith("_loss") or n.startswith(("test_", "clients_", "validation_"))]
    parts += [f"{n.replace('_', ' ')} {row[n]:.4f}" for n in names if isinstance(row[n], float)]
    LOG.info("round %d of %d: %s", event.round, event.rounds, ", ".join(parts))


SETTINGS: Mapping[str, type | tuple[type, ...]] = {
    "method": str,
    "clients": int,
    "rounds": int,
    "clients_per_round": (int, float),
    "metric": str,
    "loss": str,
    "eval_every": int,
    "patience": int,
    "evaluate_clients": bool,
    "device": str,
    "precision": str,
    "seed": int,
    "folder": str,
    "resume": bool,
    "max_diverged": int,
    "diagnose": str,
    "enrol_timeout": (int, float),
    "round_timeout": (int, float),
    "min_replies": int,
    "max_samples": int,
}


def server_app(
    model: nn.Module | Callable[[Context], nn.Module],
    *,
    test: Any = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> ServerApp:
    """A Flower ServerApp that serves a method.

    Its settings are those of `serve`; each may be given here, and the run's config (`[tool.flwr.app.config]`, or
    `flwr run --run-config`) wins: `method`, `clients`, `rounds`, `clients-per-round`, `lr`, `batch-size` and so on.
    `model` and `test` may be functions of Flower's Context.
    """
    app = ServerApp()
    settled({}, settings)

    def main(grid: Grid, context: Context) -> None:
        log_to_stdout()
        known = settled(context.run_config, settings)
        made = model if isinstance(model, nn.Module) else model(context)
        held = test(context) if callable(test) else test
        serve(grid, made, test=held, callbacks=callbacks, **known)

    app.main()(main)
    return app


def settled(run_config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `serve` from a run's config, in which names have hyphens; those of local training go together."""
    merged = {**defaults, **{name.replace("-", "_"): value for name, value in run_config.items()}}
    local = dict(asdict(merged.pop("local"))) if isinstance(merged.get("local"), Local) else {}
    for name in Local.names():
        if name in merged:
            local[name] = merged.pop(name)
    for name, value in merged.items():
        if name not in SETTINGS:
            known = [n.replace("_", "-") for n in (*SETTINGS, *Local.names())]
            raise ConfigError(f"unknown setting {name!r}: {nearest(name.replace('_', '-'), known)}")
        kind = SETTINGS[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{name.replace('_', '-')} has a value of another kind: {value!r}")
    return {**merged, "local": Local(**local)}


def log_to_stdout() -> None:
    """Flower gathers what an app prints."""
    if not LOG.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)
