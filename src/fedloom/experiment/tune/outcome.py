"""What a study leaves behind: trials.csv, best.yaml, a table, and the command that comes next."""

import csv
import io
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from fedloom.experiment.compare import rounds_for, slug
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import write_text
from fedloom.experiment.tune.plan import Plan
from fedloom.experiment.tune.study import Trials
from fedloom.method import Method

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

TRIALS_FILE, BEST = "trials.csv", "best.yaml"
SHOWN = 5  # trials in the table of a single method


@dataclass(frozen=True)
class Row:
    """One method's line of the table."""

    trials: Trials

    @property
    def best(self) -> "FrozenTrial | None":
        return self.trials.best

    @property
    def value(self) -> float | None:
        """The objective of the best trial; None if every one diverged."""
        return None if self.best is None else self.best.value

    @property
    def point(self) -> dict[str, Any]:
        """The values of the best trial."""
        return {} if self.best is None else dict(self.best.params)

    def config(self, plan: Plan) -> RunConfig | None:
        """The settings with which the best point trains in full; its rounds are still those of a comparison."""
        return None if self.best is None else self.trials.template.fill(self.point, plan.config)


@dataclass(frozen=True)
class Tuning:
    """The outcome of `tune`."""

    folder: Path
    plan: Plan
    rows: list[Row]
    clients: int  # that train

    def configs(self) -> dict[str, RunConfig]:
        """By the name of their files: settings that `fedloom run` trains each method's best with, in full."""
        found = [config for row in self.rows if (config := row.config(self.plan)) is not None]
        settled = [
            config.change({"rounds": rounds_for(Method(config.method), config, self.clients)}) for config in found
        ]
        alone = len(self.rows) == 1
        files = [
            BEST if alone else f"best-{i}-{slug(row.trials.template.name)}.yaml"
            for i, row in enumerate(self.rows, 1)
            if row.config(self.plan) is not None
        ]
        return dict(zip(files, settled, strict=True))

    def described(self, row: Row, trial: "FrozenTrial") -> str:
        """A trial's method, and its local settings."""
        local = [f"{name}={_short(trial.params[name])}" for name in row.trials.template.local]
        return ", ".join([str(trial.user_attrs["method"]), *local])

    @property
    def next_commands(self) -> list[str]:
        """Train the best on the test set: one run, a comparison, or one run each where local settings differ."""
        configs = self.configs()
        if len(configs) > 1 and not self.plan.templates[0].local:
            texts = " ".join(shlex.quote(config.method) for config in configs.values())
            return [f"fedloom compare --config {shlex.quote(str(self.folder / BEST))} {texts}"]
        return [f"fedloom run --config {shlex.quote(str(self.folder / name))} --out {_out(name)}" for name in configs]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _out(name: str) -> str:
    return shlex.quote(f"runs/{Path(name).stem}")


def write_files(tuning: Tuning) -> None:
    """trials.csv, and a config file for each method's best so far."""
    write_text(tuning.folder / TRIALS_FILE, csv_text(tuning))
    for name, config in tuning.configs().items():
        write_text(tuning.folder / name, config.yaml())
    if len(tuning.rows) > 1 and not tuning.plan.templates[0].local:  # what all have in common, for a comparison
        write_text(tuning.folder / BEST, tuning.plan.config.yaml())


def csv_text(tuning: Tuning) -> str:
    """One line per trial."""
    names = list(dict.fromkeys(name for row in tuning.rows for name in row.trials.distributions))
    out = io.StringIO()
    writer = csv.writer(out)
    score = tuning.plan.score_name.replace(" ", "_")
    writer.writerow(["method", "trial", "state", score, *names, "rounds", "seconds", "note"])
    for row in tuning.rows:
        for number, trial in row.trials.finished.items():
            told = trial.user_attrs
            value = trial.value if trial.value is not None and math.isfinite(trial.value) else ""
            point = [str(trial.params[name]) if name in trial.params else "" for name in names]
            counts = [told["rounds"], told["seconds"], told["note"]]
            writer.writerow([told["method"], number + 1, told["state"], value, *point, *counts])
    return out.getvalue()


def table(tuning: Tuning) -> Table:
    """The best trials of one method, or the best trial of each of several."""
    several = len(tuning.rows) > 1
    shown = Table(title=tuning.plan.config.setting)
    for i, heading in enumerate(["method", tuning.plan.score_name, "trial", "trials"]):
        shown.add_column(heading, justify="right" if i else "left", overflow="fold")
    for row in tuning.rows:
        ended = _counts(row.trials)
        for trial in row.trials.ranked[: 1 if several else SHOWN]:
            number = str(trial.user_attrs["number"] + 1)
            shown.add_row(tuning.described(row, trial), f"{trial.value:.4f}", number, ended)
        if row.best is None:
            shown.add_row(row.trials.template.text, "diverged", "", ended)
    return shown


def _counts(trials: Trials) -> str:
    """How many, and what became of those that did not run to their ends."""
    states = [trial.user_attrs["state"] for trial in trials.finished.values()]
    others = [f"{states.count(state)} {state}" for state in ("pruned", "diverged", "refused") if state in states]
    return f"{len(states)} ({', '.join(others)})" if others else str(len(states))
