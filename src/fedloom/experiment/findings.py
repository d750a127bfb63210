"""What a recipe came to: every score of every method in every row, measured beside printed."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import Run
from fedloom.experiment.recipe import Case, Printed, Recipe
from fedloom.experiment.score import History, Score, Series

Repeat = tuple[int, int | None]  # seed and fold


@dataclass(frozen=True)
class Cell:
    """One method in one row, as far as it was run."""

    case: Case
    config: RunConfig  # as it was run, but for seed and fold
    runs: tuple[Run, ...] = ()
    why_not: str = ""
    asked: bool = True  # False: it was not to be run this time

    def values(self, recipe: Recipe, score: str) -> dict[Repeat, float]:
        """By seed and fold."""
        return {(run.config.seed, run.config.fold): recipe.scores[score].of(run.history) for run in self.runs}

    def lost(self, recipe: Recipe, score: str) -> dict[Repeat, str]:
        """Why runs have no value, by seed and fold."""
        function = recipe.scores[score]
        lost = [run for run in self.runs if math.isnan(function.of(run.history))]
        return {(run.config.seed, run.config.fold): _why(function, run.history) for run in lost}


@dataclass(frozen=True)
class Finding:
    """A score of one method in one row, measured beside printed."""

    row: str
    label: str
    score: str
    mean: float
    sd: float | None
    runs: int  # that it is the mean of
    printed: Printed | None
    why_not: str = ""
    note: str = ""  # why there is no mean although it was run
    values: tuple[float, ...] = ()  # of the runs, by seed and fold
    gain: float = math.nan  # difference to what it is relative to, mean over the seeds and folds that both have
    gain_error: float | None = None  # its standard error; None: of one pair

    @property
    def difference(self) -> float:
        return math.nan if self.printed is None else self.mean - self.printed.mean

    @property
    def told(self) -> bool:
        return not math.isnan(self.mean)

    @property
    def deviations(self) -> float:
        """The difference in printed standard deviations."""
        return math.nan if self.printed is None or not self.printed.sd else self.difference / self.printed.sd


@dataclass(frozen=True)
class Reproduction:
    """The outcome of `reproduce`."""

    recipe: Recipe
    scale: str
    folder: Path
    cells: tuple[Cell, ...]

    def findings(self) -> list[Finding]:
        """Every score of every cell that was run or was to be run; one that nobody printed and that these runs do not
        measure is left out.
        """
        found = []
        for cell in self.cells:
            if not cell.asked and not cell.runs:
                continue
            told = [finding for score in self.recipe.scores if (finding := self._finding(cell, score)) is not None]
            found += told or [self._empty(cell, next(iter(self.recipe.scores)))]
        return found

    def _finding(self, cell: Cell, score: str) -> Finding | None:
        function, printed = self.recipe.scores[score], cell.case.printed.get(score)
        if not any(function.measured(run.history) for run in cell.runs):
            return None if printed is None else self._empty(cell, score)
        values, base = cell.values(self.recipe, score), self._base(cell)
        reference = None if base is None else base.values(self.recipe, score)
        shared = {repeat: value for repeat, value in values.items() if reference is None or repeat in reference}
        lost = cell.lost(self.recipe, score)
        base_lost = {} if base is None else base.lost(self.recipe, score)
        note = ""
        if lost:
            note = next(iter(lost.values()))
        elif not shared:
            note = f"no {self.recipe.relative_to}"
        elif whys := [why for repeat, why in base_lost.items() if repeat in shared]:
            note = f"{self.recipe.relative_to} {whys[0]}"
        mean, sd = (math.nan, None) if note else _mean(shared, reference)
        gain = (math.nan, None) if note or reference is None else _gain(shared, reference)
        case, why, runs, count = cell.case, cell.why_not, tuple(values.values()), len(shared or values)
        return Finding(case.row, case.label, score, mean, sd, count, printed, why, note, runs, *gain)

    def _empty(self, cell: Cell, score: str) -> Finding:
        printed, note = cell.case.printed.get(score), "not measured" if cell.runs else "not run"
        why = cell.why_not
        return Finding(cell.case.row, cell.case.label, score, math.nan, None, len(cell.runs), printed, why, note)

    def _base(self, cell: Cell) -> Cell | None:
        """What the results of a cell are relative to; None: nothing."""
        label = self.recipe.relative_to
        if label is None or cell.case.label == label:
            return None
        return next(c for c in self.cells if c.case.row == cell.case.row and c.case.label == label)


def _why(score: Score, history: History) -> str:
    """Why a run has no value; what is not finite is null in its history."""
    if not score.measured(history):
        return "not measured"
    named = dict(score.named)
    keys = (*score.keys, named.get("by", score.keys[0]))
    if not all(math.isfinite(value) for key in keys for value in Series.of(history, key).values):
        return "diverged"
    reached = "above" not in named and named.get("round", 0) <= history[-1]["round"]
    return "undefined" if reached else "not reached"


def _mean(values: dict[Repeat, float], reference: dict[Repeat, float] | None) -> tuple[float, float | None]:
    """Mean and deviation; or in percent of another method's mean over the same seeds and folds, and no deviation."""
    mean = statistics.fmean(values.values())
    if reference is None:
        return mean, statistics.stdev(values.values()) if len(values) > 1 else None
    base = statistics.fmean(reference[repeat] for repeat in values)
    return (100 * (mean / base - 1) if base else math.nan), None


def _gain(values: dict[Repeat, float], reference: dict[Repeat, float]) -> tuple[float, float | None]:
    """Mean difference and its standard error."""
    each = [value - reference[repeat] for repeat, value in values.items()]
    return statistics.fmean(each), statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
