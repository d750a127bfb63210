"""One table of runs by Fedloom's methods and by Flower's strategies: that of `fedloom compare`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedloom.errors import ConfigError
from fedloom.experiment.compare import BASELINE_SHARE, Comparison, Row, gains
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import Run
from fedloom.federation import Federation
from fedloom.result import Result


def side_by_side(
    results: Mapping[str, Result | Sequence[Result]],
    federation: Federation,
    metric: str = "accuracy",
    target: float | None = None,
) -> Comparison:
    """Results of `fl.fit` and of `fit_strategy` over one federation, under names of your choice. The first is the
    baseline. Several results of a name are those of several seeds, the same for all names.

    >>> import fedloom as fl
    >>> from fedloom.report.table import csv_text
    >>> federation = fl.load("digits", partition="classes(per_client=2)", clients=5)
    >>> model = fl.model("mlp", federation)
    >>> results = {text: fl.fit(model, federation, text, rounds=1) for text in ("fedavg", "fedadam")}
    >>> len(csv_text(side_by_side(results, federation)).splitlines())
    3
    """
    lists = {name: [found] if isinstance(found, Result) else list(found) for name, found in results.items()}
    if not lists or not all(lists.values()):
        raise ConfigError("there is nothing to compare: give at least one result for each name")
    seeds = len(next(iter(lists.values())))
    for name, found in lists.items():
        if len(found) != seeds:
            raise ConfigError(f"{name} has {len(found)} results, but the first has {seeds}: give one per seed")
        if any(f"test_{metric}" not in result.history[-1] for result in found):
            raise ConfigError(f"{name} ends without test_{metric}: run it on data with a test set, metric={metric!r}")
    rows = [Row(name, [_run(name, k, one) for k, one in enumerate(found)], metric) for name, found in lists.items()]
    if target is None and math.isfinite(rows[0].mean):
        target = BASELINE_SHARE * rows[0].mean
    rows = [replace(row, target=target, gain=gain) for row, gain in zip(rows, gains(rows), strict=True)]
    setting = RunConfig(
        data=federation.name,
        partition=federation.report.text if federation.report is not None else "as given",
        clients=len(federation),
        per_round=rows[0].runs[0].history[-1]["asked"],
        metric=metric,
    )
    return Comparison(Path(), setting, rows, target, seeds)


def _run(name: str, seed: int, result: Result) -> Run:
    """As if it had been read from a folder. The name is no method's text, so that it can't be one."""
    return Run(Path(), RunConfig(method=name, seed=seed), result.history)
