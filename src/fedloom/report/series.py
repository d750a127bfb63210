"""A history as columns that a page can hold: what is drawn, thin enough to open, read line by line or at once."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

POINTS = 600  # of a curve; more would be narrower than the pixels
NUMBERS = 12_000  # of one list per tensor, over all rounds that are kept
CELLS = 60_000  # of all similarity matrices of a run
CLIENTS = 20_000  # whose scores are kept
WIDEST = 300  # clients beside each other in a similarity matrix
KEYS = 300  # that a run may measure

AXES = ("round", "works", "local_steps", "uplink_bytes", "downlink_bytes", "seconds")
TENSORS = ("gsi.tensor", "probe.gsi", "fedglad.gsi", "fedglad.scale", "fedglad.B")
MATRIX, COHORT, SCORES = "similarity.matrix", "clients", "fairness.scores"
NOT_FINITE = "nan"  # measured, but no number; None is a round without a measurement

Point = dict[str, Any]
Part = dict[str, list[Any]]  # columns of equal length
_NAME = re.compile(r"[A-Za-z][\w.\-/ ]{0,79}")
T = TypeVar("T")


class Thinned(Generic[T]):
    """At most `most` points of a growing series, evenly spread, beside its first and its last. It comes to the same
    whether they are added today or tomorrow, so that two seeds keep the same rounds.
    """

    def __init__(self, most: int = POINTS) -> None:
        self.most, self.stride, self.count = most, 1, 0
        self._kept: list[tuple[int, int, T]] = []
        self._first: tuple[int, int, T] | None = None
        self._last: tuple[int, int, T] | None = None

    def add(self, point: T, known: int = 0) -> None:
        """`known`: how much it tells. Of neighbours the one that tells most stays: where the model is measured in
        every tenth round only, those rounds.
        """
        self._last = (self.count, known, point)
        self._first = self._first or self._last
        self.count += 1
        self._keep(self._last)
        if len(self._kept) > self.most:
            self.stride *= 2
            kept, self._kept = self._kept, []
            for entry in kept:
                self._keep(entry)

    def _keep(self, entry: tuple[int, int, T]) -> None:
        if self._kept and self._kept[-1][0] // self.stride == entry[0] // self.stride:
            if entry[1] >= self._kept[-1][1]:
                self._kept[-1] = entry
        else:
            self._kept.append(entry)

    def points(self) -> list[T]:
        ends = [entry for entry in (self._first, *self._kept, self._last) if entry is not None]
        return list({number: point for number, _, point in ends}.values())


class RunSeries:
    """What is drawn of one run. Lines of its history are added in order."""

    def __init__(self, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self.rounds: Thinned[Point] = Thinned()
        self.between: Thinned[Point] = Thinned()
        self.tensors: Thinned[Point] | None = None  # until it is known how many there are
        self.matrices: Thinned[Point] | None = None
        self._scores: tuple[Any, list[Any]] | None = None  # of the last round that has them
        self._before: dict[str, float] = {}
        self._names: set[str] = set()
        for row in history:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """One line of the history."""
        told = {key: value for key, value in row.items() if self._takes(key)}
        numbers = {key: number(value) for key, value in told.items() if is_number(value)}
        numbers.setdefault("round", self.rounds.count + 1)
        axes = {name: float(numbers[name]) for name in AXES if isinstance(numbers.get(name), int | float)}
        self.rounds.add(numbers, sum(value != NOT_FINITE for value in numbers.values()))
        lists = {key: value for key, value in told.items() if isinstance(value, list) and value}
        self._add_between(axes, lists)
        self._add_tensors(numbers, lists)
        self._add_matrix(numbers["round"], lists)
        if SCORES in lists:
            self._scores = (numbers["round"], lists[SCORES])
        self._before = axes

    def _takes(self, key: str) -> bool:
        """Names come from a file that anyone may have written."""
        if key not in self._names and (len(self._names) >= KEYS or not _NAME.fullmatch(key)):
            return False
        self._names.add(key)
        return True

    def _add_between(self, axes: Mapping[str, float], lists: Mapping[str, list[Any]]) -> None:
        """Values between two aggregations: after each Work of the round, or after each but the last."""
        found = {key: value for key, value in lists.items() if key.startswith("between_") and _all_numbers(value)}
        most = max(map(len, found.values()), default=0)
        works = round(axes.get("works", 0.0) - self._before.get("works", 0.0))
        for i in range(most):
            share = (i + 1) / (works if works >= most else most + 1)
            start = {name: self._before.get(name, 0.0) for name in axes}
            point: Point = {name: number(start[name] + share * (axes[name] - start[name])) for name in axes}
            self.between.add({**point, **{key: number(value[i]) for key, value in found.items() if i < len(value)}})

    def _add_tensors(self, numbers: Point, lists: Mapping[str, list[Any]]) -> None:
        found = {key: [number(v, 4) for v in lists[key]] for key in TENSORS if _all_numbers(lists.get(key))}
        widest = max(map(len, found.values()), default=0)
        if found and widest <= NUMBERS:
            model = {"model": numbers["gsi.model"]} if "gsi.model" in numbers else {}
            self.tensors = self.tensors or Thinned(max(20, min(POINTS, NUMBERS // widest)))
            self.tensors.add({"round": numbers["round"], **found, **model})

    def _add_matrix(self, at: Any, lists: Mapping[str, list[Any]]) -> None:
        matrix = lists.get(MATRIX)
        if matrix is None or len(matrix) > WIDEST:
            return
        if not all(_all_numbers(line) and len(line) == len(matrix) for line in matrix):
            return
        clients = lists.get(COHORT)
        named = clients if _all_numbers(clients) and clients is not None and len(clients) == len(matrix) else None
        self.matrices = self.matrices or Thinned(max(2, min(24, CELLS // len(matrix) ** 2)))
        cells = [[NOT_FINITE if v is None or not math.isfinite(v) else round(v, 3) for v in line] for line in matrix]
        self.matrices.add({"round": at, "clients": named, "matrix": cells})

    def parts(self) -> dict[str, list[Point]]:
        """Everything that is drawn, by part, point by point."""
        return {
            "rounds": self.rounds.points(),
            "between": self.between.points(),
            "tensors": self.tensors.points() if self.tensors else [],
            "matrices": self.matrices.points() if self.matrices else [],
            "scores": self._client_scores(),
        }

    def _client_scores(self) -> list[Point]:
        at, scores = self._scores or (0, [])
        some = scores[:: -(-len(scores) // CLIENTS) or 1]  # the same clients in all runs
        return [{"round": at, "scores": [number(score, 4) for score in some]}] if _all_numbers(some) else []


def columns(points: Sequence[Point]) -> Part:
    """Points as columns, None where a point lacks a value."""
    names = dict.fromkeys(name for point in points for name in point)
    return {name: [point.get(name) for point in points] for name in names}


def tail(before: Sequence[Point], now: Sequence[Point]) -> dict[str, Any] | None:
    """What turns the one into the other: how many points stay, and the columns of those that follow."""
    same = 0
    while same < min(len(before), len(now)) and before[same] == now[same]:
        same += 1
    if same == len(before) == len(now):
        return None
    return {"keep": same, "columns": columns(now[same:])}


def is_number(value: Any) -> bool:
    """A number, or the null that stands for one that was not finite."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def number(value: Any, digits: int = 6) -> int | float | str:
    """As a page needs it: few digits, `NOT_FINITE` for what is none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NOT_FINITE
    if isinstance(value, int):
        return value if abs(value) < 1 << 53 else NOT_FINITE
    return float(f"{value:.{digits}g}")


def _all_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, value))
