"""A recipe: one table or figure of a paper as settings, methods and the numbers that were printed. A YAML file:

    title: AdaBest, Table 2
    paper: Varno et al., ECCV 2022
    about: what is measured, and what was chosen because it is not printed
    seeds: 5                                     # repetitions at the paper's size
    scores: {accuracy: last(test_accuracy)}      # what is read off a run (fedloom.experiment.score)
    settings: {epochs: 5, lr: 0.1}               # of every run, as in a config file
    methods: {FedAvg: fedavg, AdaBest: adabest}  # label: method, or {method: ..., settings: ...}
    rows:
      cifar10/10%:
        settings: {data: cifar10}
        printed: {FedAvg: 79.74 ± 0.07, AdaBest: 84.15 ± 0.36}    # of the first score, or by score

Optional: `folds` (clients are held out in so many folds, each with every seed), `relative_to` (results of all other
labels are relative differences to that label's, in percent), `plots` (further metrics to draw), `force` (a round whose
clients are those with the most of one class), `scales` (settings that replace others at a scale), and in a row
`methods` that replace, add or, with null, leave out, and `join`, a method that all of its methods are joined with.
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.data.split import FOLDS
from fedloom.errors import ConfigError, FedloomError, nearest
from fedloom.experiment.config import RunConfig, lines_of
from fedloom.experiment.score import Score
from fedloom.experiment.yaml_file import Places, read_yaml
from fedloom.method import Method

KEYS: tuple[str, ...] = ("title", "paper", "about", "seeds", "folds", "relative_to", "scores", "plots", "settings")
KEYS += ("methods", "force", "rows", "scales")
ROW_KEYS = ("settings", "methods", "join", "printed")
SCALES = ("smoke", "quick", "paper")
NOT_HERE = ("method", "seed", "fold", "device", "engine")  # settings that a recipe does not hold


@dataclass(frozen=True)
class Printed:
    """A number as the paper prints it."""

    mean: float
    sd: float | None = None

    @classmethod
    def read(cls, value: Any) -> "Printed":
        """A number, "mean ± sd", or a list of the values of single seeds."""
        if isinstance(value, list) and len(value) > 1 and all(map(_is_number, value)):
            return cls(statistics.fmean(value), statistics.stdev(value))
        if _is_number(value):
            return cls(float(value))
        number = r"[+-]?(?:\d+\.?\d*|\.\d+)"
        found = re.fullmatch(rf"\s*({number})\s*±\s*({number})\s*", value) if isinstance(value, str) else None
        if not found:
            raise ConfigError(f"{value!r} is no printed result: a number, 'mean ± sd' or a list of numbers")
        return cls(float(found[1]), float(found[2]))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Case:
    """One method in one row."""

    row: str
    label: str
    config: RunConfig  # at the paper's size
    printed: Mapping[str, Printed] = field(default_factory=dict)  # by score


@dataclass(frozen=True)
class Recipe:
    """A recipe, read and checked."""

    name: str
    title: str
    paper: str
    about: str
    seeds: int
    folds: int | None
    relative_to: str | None
    scores: Mapping[str, Score]
    plots: tuple[str, ...]
    force: int | None  # the round whose clients are those with the most of one class
    scales: Mapping[str, Mapping[str, Any]]
    cases: tuple[Case, ...]

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(case.row for case in self.cases))


def recipe_folder() -> Path:
    """Beside the package in a checkout, inside of it once installed."""
    here = Path(__file__).resolve()
    places = (here.parents[1] / "recipes", here.parents[3] / "recipes")
    return next((place for place in places if place.is_dir()), places[0])


def recipe_names() -> list[str]:
    def by_number(name: str) -> list[Any]:
        return [int(part) if part.isdigit() else part for part in re.split(r"(?<=[a-z])(\d+)$", name)]

    return sorted((path.stem for path in recipe_folder().glob("*.yaml")), key=by_number)


def find_recipe(name: str) -> Recipe:
    """By name, or a file of one's own."""
    if name.endswith((".yaml", ".yml")):
        return read_recipe(Path(name))
    if name not in recipe_names():
        raise ConfigError(f"unknown recipe {name!r}: {nearest(name, recipe_names())}")
    return read_recipe(recipe_folder() / f"{name}.yaml")


def read_recipe(path: Path) -> Recipe:
    """A recipe file; whatever is wrong with it is told with its line."""
    if path.stem == "runs":
        raise ConfigError(f"{path}: a recipe can't be called runs, since that is where its runs lie")
    return _Reader(path, *read_yaml(path)).recipe()


@dataclass(frozen=True)
class _Reader:
    path: Path
    values: dict[str, Any]
    places: Places

    def recipe(self) -> Recipe:
        values = self.values
        self.known(values, KEYS)
        for key in ("title", "scores", "methods", "rows"):
            if not values.get(key):
                raise ConfigError(f"{self.path}: {key} is missing")
        scores = {name: self.told(Score.read, text, "scores", name) for name, text in self.mapping("scores").items()}
        cases = tuple(case for name in self.mapping("rows") for case in self.row(name, scores))
        relative_to = values.get("relative_to")
        if not isinstance(relative_to, str | None):
            raise self.error(f"relative_to must be the label of a method, not {relative_to!r}", "relative_to")
        plots = values.get("plots") or []
        if not isinstance(plots, list) or not all(isinstance(key, str) for key in plots):
            raise self.error(f"plots must be a list of metrics, such as [theta_norm], not {plots!r}", "plots")
        for row in self.mapping("rows"):
            if row not in {case.row for case in cases}:
                raise self.error("this row has no method left", "rows", row)
        for row in dict.fromkeys(case.row for case in cases):
            if relative_to is not None and relative_to not in {case.label for case in cases if case.row == row}:
                raise self.error(f"row {row} has no method {relative_to!r}", "relative_to")
        return Recipe(
            name=self.path.stem,
            title=str(values["title"]),
            paper=str(values.get("paper", "")),
            about=str(values.get("about", "")),
            seeds=self.count("seeds", 1),
            folds=self.count("folds", None, FOLDS),
            relative_to=relative_to,
            scores=scores,
            plots=tuple(plots),
            force=self.forced(),
            scales=self.scaled(),
            cases=cases,
        )

    def row(self, name: str, scores: Mapping[str, Score]) -> Iterable[Case]:
        row = self.mapping("rows", name)
        self.known(row, ROW_KEYS, "rows", name)
        base = self.settings(RunConfig(), "settings")
        base = self.settings(base, "rows", name, "settings")
        own = self.mapping("rows", name, "methods")
        joined = [self.told(Method, row["join"], "rows", name, "join")] if "join" in row else []
        methods: dict[str, tuple[str, ...]] = {label: ("methods", label) for label in self.mapping("methods")}
        methods |= {label: ("rows", name, "methods", label) for label in own}
        printed = self.printed(name, scores, {label for label in methods if own.get(label, "") is not None})
        for label, at in methods.items():
            value = self.mapping(*at[:-1])[label]
            if value is None:
                continue
            config, text = base, value
            if isinstance(value, dict):
                self.known(value, ("method", "settings"), *at)
                config, text = self.settings(base, *at, "settings"), value.get("method")
            method = self.told(Method, text, *at)
            for other in joined:
                method = self.told(method.__add__, other, "rows", name, "join")
            told = {score: values[label] for score, values in printed.items() if label in values}
            yield Case(name, label, config.change({"method": method.text}), told)

    def printed(self, row: str, scores: Mapping[str, Score], labels: set[str]) -> dict[str, dict[str, Printed]]:
        at = ("rows", row, "printed")
        values = self.mapping(*at)
        if values and not all(isinstance(value, dict) for value in values.values()):
            values = {next(iter(scores)): values}  # of the first score
        else:
            self.known(values, tuple(scores), *at)
        found = {}
        for score, by_label in values.items():
            below = (*at, score) if (*at, score) in self.places else at
            self.known(by_label, tuple(labels), *below)
            found[score] = {label: self.told(Printed.read, value, *below, label) for label, value in by_label.items()}
        return found

    def settings(self, base: RunConfig, *at: str) -> RunConfig:
        """The settings at this place over others."""
        values = self.mapping(*at)
        lines = lines_of(self.places, *at)
        for name in values:
            if name in NOT_HERE:
                raise ConfigError(f"{lines.get(str(name), '')}a recipe does not set {name}")
        return base.change(values, where=lines)

    def scaled(self) -> dict[str, Mapping[str, Any]]:
        scales = self.mapping("scales")
        self.known(scales, SCALES, "scales")
        for scale in scales:
            self.settings(RunConfig(), "scales", scale)
        return {scale: self.mapping("scales", scale) for scale in scales}

    def forced(self) -> int | None:
        force = self.mapping("force")
        if not force:
            return None
        self.known(force, ("round", "cohort"), "force")
        at = force.get("round")
        if force.get("cohort") != "one-class" or not isinstance(at, int) or isinstance(at, bool) or at < 1:
            raise self.error("expected {round: 40, cohort: one-class}", "force")
        return at

    def count(self, key: str, default: int | None, most: int = 1_000_000) -> Any:
        value = self.values.get(key, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and 1 <= value <= most):
            raise self.error(f"{key} must be a whole number from 1 to {most:,}, not {value!r}", key)
        return value

    def mapping(self, *at: str) -> dict[str, Any]:
        """What stands at a place, which must be empty or a mapping of texts."""
        value: Any = self.values
        for key in at:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(f"expected lines of the form 'name: value', not {value!r}", *at)
        return {str(key): inner for key, inner in value.items()}

    def known(self, values: Mapping[str, Any], valid: Iterable[str], *at: str) -> None:
        for name in values:
            if str(name) not in valid:
                raise self.error(f"unknown key {name!r}: {nearest(str(name), valid)}", *at, str(name))

    def told(self, read: Any, value: Any, *at: str) -> Any:
        """What was read from a value; an error gets its place."""
        try:
            return read(value)
        except FedloomError as error:
            raise self.error(str(error), *at) from None

    def error(self, message: str, *at: str) -> ConfigError:
        return ConfigError(f"{self.places.get(at, f'{self.path}: ')}{message}")
