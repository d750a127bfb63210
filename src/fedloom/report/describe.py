"""Runs as one JSON description: the page, the live page and the figures draw nothing else."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedloom.experiment.compare import Comparison
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import TENSORS, Run
from fedloom.experiment.run import FREE
from fedloom.method import Method
from fedloom.methods.fedglad import Fedglad
from fedloom.report.series import RunSeries, columns
from fedloom.untrusted import read_bytes

LONGEST_NAMES = 4_000_000  # bytes
Described = dict[str, Any]

# Runs that differ only in these may be averaged: what is compared, and what can't change a result.
_OVERLAID = {"method", "seed", "fold", "rounds"}
_FREE = FREE | {"diagnose"}

# Told apart with all kinds of colour vision, on white and on black; the dash says which round of the colours it is.
PALETTE = {
    "light": ["#0072b2", "#d55e00", "#00875f", "#b5478f", "#a66f00", "#3d3d3d", "#4aa3df"],
    "dark": ["#56b4e9", "#ff8a4c", "#2fc79a", "#ee9ccb", "#f0c02e", "#e8e8e8", "#9fb3ff"],
}
DASHES = ["solid", "dash", "dot", "dashdot"]


def describe_runs(found: "Comparison | Run | Iterable[Run]", labels: Sequence[str] | None = None) -> list[Described]:
    """The runs of a comparison, method by method, a single run, or any runs in the order given, each with a label of
    its own in place of its method.
    """
    if isinstance(found, Run):
        found = [found]
    if isinstance(found, Comparison):
        pairs = [(run, row.method) for row in found.rows for run in row.runs]
    else:
        runs = list(found)
        pairs = list(zip(runs, labels or [run.config.method for run in runs], strict=True))
    return [{**describe_run(run, method), "id": str(i)} for i, (run, method) in enumerate(pairs)]


def describe_run(run: Run, method: str | None = None) -> Described:
    """A run that was read whole."""
    series, names = RunSeries(run.history), tensor_names(run.folder)
    head = describe_head(run.config, str(run.folder), names, method)
    return {**head, **progress(series, run.finished), "parts": {k: columns(v) for k, v in series.parts().items()}}


def describe_head(config: RunConfig, name: str, names: Sequence[str] = (), method: str | None = None) -> Described:
    """What is known of a run before its first round."""
    settings = settings_of(config)
    return {
        "id": name,
        "method": method or config.method,
        "seed": config.seed,
        "data": config.data,
        "metric": config.metric,
        "group": group_of(config),
        "setting": setting_text(config),
        "settings": settings,
        "planned": config.rounds,
        "gamma": fedglad_gamma(config.method),
        "names": list(names),
    }


def progress(series: RunSeries, finished: bool) -> Described:
    """How far a run is, and whether its curves are thinned."""
    thinned = max(part.stride for part in (series.rounds, series.between)) > 1
    return {"finished": finished, "count": series.rounds.count, "thinned": thinned}


def settings_of(config: RunConfig) -> dict[str, str]:
    """The settings that must agree before runs are averaged."""
    return {name: str(value) for name, value in asdict(config).items() if name not in _OVERLAID | _FREE}


def group_of(config: RunConfig) -> str:
    """The same for runs whose settings agree."""
    return hashlib.sha256(json.dumps(settings_of(config)).encode()).hexdigest()[:12]


def setting_text(config: RunConfig) -> str:
    local = f"{config.steps} steps" if config.steps else f"{config.epochs} epochs"
    return f"{config.setting}, model {config.model}, lr {config.lr:g}, batch {config.batch_size}, {local}"


def fedglad_gamma(method: str) -> float | None:
    """How fast FedGLAD's bounds open, if the method holds it."""
    rescaler = Method(method).pipeline().rescaler
    return rescaler.stage.gamma if rescaler and isinstance(rescaler.stage, Fedglad) else None


def tensor_names(folder: Path) -> list[str]:
    """The names of a model's tensors; empty where the folder does not tell."""
    path = folder / TENSORS
    try:
        found = json.loads(read_bytes(path, LONGEST_NAMES, links=False))
    except (OSError, ValueError, RecursionError):
        return []
    return [str(name)[:120] for name in found] if isinstance(found, list) else []
