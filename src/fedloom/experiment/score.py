"""What is read off a finished run: texts such as `mean(test_accuracy, last=10)`, applied to its history.

| score | value |
| --- | --- |
| last(key) | after the last evaluated round |
| mean(key), mean(key, last=10) | the mean over all rounds, or over the last so many that have the key |
| mean(key, works=40) | the mean over the rounds that end within the last so many works |
| max(key), min(key) | the highest, the lowest |
| argmax(key), argmin(key) | the round of the highest, the lowest |
| first(key, above=0.8) | works until the key was first at least that; looks on the way (`between_`) count, too |
| drop(key, round=40) | the value after the round before it, less the value after it |
| best(key, by=other) | the key where another one is highest: early stopping; looks on the way count, too |
| pearson(key, other) | the correlation of two keys over rounds |

Shares (accuracy, F1 and AUC) are given in percent. A key whose value is a list counts with its mean.
"""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.diagnose.skew import pearson
from fedloom.errors import ConfigError, nearest

History = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Series:
    """One key's values, in the rounds that have it."""

    key: str
    lines: list[dict[str, Any]]

    @classmethod
    def of(cls, history: History, key: str) -> "Series":
        return cls(key, [line for line in history if key in line])

    @property
    def values(self) -> list[float]:
        return [_number(line[self.key]) for line in self.lines]

    @property
    def scale(self) -> float:
        return 100.0 if is_share(self.key) else 1.0

    def extreme(self, pick: Callable[..., float]) -> dict[str, Any]:
        """The line of the highest or lowest value; what is not finite never is."""
        known = [(value, i) for i, value in enumerate(self.values) if math.isfinite(value)]
        best = pick((value for value, _ in known), default=math.nan)
        at = next((i for value, i in known if value == best), None)
        return {} if at is None else self.lines[at]


def looks(line: dict[str, Any], by: str) -> list[dict[str, Any]]:
    """A round's line, behind those of the looks on the way to it in which `by` was measured (`between_...`), one after
    each of its Works but the last.
    """
    scored = line.get(f"between_{by}")
    if not isinstance(scored, list):
        return [line]
    lists = {name: values for name, values in line.items() if name.startswith("between_") and isinstance(values, list)}
    between = {name.removeprefix("between_"): v for name, v in lists.items() if len(v) == len(scored)}
    if "works" in line:
        between["works"] = [line["works"] - left for left in range(len(scored), 0, -1)]
    return [*({**line, **{name: v[i] for name, v in between.items()}} for i in range(len(scored))), line]


def is_share(key: str) -> bool:
    """Is it a share of one, which people read in percent?"""
    return bool(re.fullmatch(r"(between_)?(test|validation|cloud)_(?!loss)\w+|fairness\.\w+", key))


def _number(value: Any) -> float:
    if isinstance(value, list):
        known = [_number(item) for item in value if item is not None]
        return statistics.fmean(known) if known else math.nan
    return math.nan if value is None else float(value)


def _last(history: History, key: str) -> float:
    series = Series.of(history, key)
    return series.scale * series.values[-1] if series.lines else math.nan


def _mean(history: History, key: str, last: int | None = None, works: int | None = None) -> float:
    series = Series.of(history, key)
    if works is not None:
        begin = max((line["works"] for line in series.lines), default=0) - works + 1e-9
        series = Series(key, [line for line in series.lines if line["works"] > begin])
    values = series.values if last is None else series.values[-last:]
    return series.scale * statistics.fmean(values) if values else math.nan


def _max(history: History, key: str) -> float:
    series = Series.of(history, key)
    return series.scale * _number(series.extreme(max).get(key))


def _min(history: History, key: str) -> float:
    series = Series.of(history, key)
    return series.scale * _number(series.extreme(min).get(key))


def _argmax(history: History, key: str) -> float:
    return _number(Series.of(history, key).extreme(max).get("round"))


def _argmin(history: History, key: str) -> float:
    return _number(Series.of(history, key).extreme(min).get("round"))


def _first(history: History, key: str, above: float) -> float:
    seen = (look for line in history for look in looks(line, key) if key in look)
    return _number(next((look for look in seen if _number(look[key]) >= above), {}).get("works"))


def _drop(history: History, key: str, round: int) -> float:
    series = Series.of(history, key)
    before = [value for line, value in zip(series.lines, series.values, strict=True) if line["round"] < round]
    at = [value for line, value in zip(series.lines, series.values, strict=True) if line["round"] == round]
    return series.scale * (before[-1] - at[0]) if before and at else math.nan


def _best(history: History, key: str, by: str) -> float:
    found = [look for line in history for look in looks(line, by)]
    return Series.of(history, key).scale * _number(Series.of(found, by).extreme(max).get(key))


def _pearson(history: History, key: str, other: str) -> float:
    pairs = [(_number(line[key]), _number(line[other])) for line in history if key in line and other in line]
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    return pearson([a for a, _ in known], [b for _, b in known]) if known else math.nan


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError
    return float(text)


def _key(text: str) -> str:
    if not text:
        raise ValueError
    return text


FUNCTIONS: dict[
    str, tuple[Callable[..., float], int, dict[str, Callable[[str], Any]]]
] = {  # function, keys, named values
    "last": (_last, 1, {}),
    "mean": (_mean, 1, {"last": _count, "works": _count}),
    "max": (_max, 1, {}),
    "min": (_min, 1, {}),
    "argmax": (_argmax, 1, {}),
    "argmin": (_argmin, 1, {}),
    "first": (_first, 1, {"above": _finite}),
    "drop": (_drop, 1, {"round": _count}),
    "best": (_best, 1, {"by": _key}),
    "pearson": (_pearson, 2, {}),
}
NEEDED = {"first": "above", "drop": "round", "best": "by"}


@dataclass(frozen=True)
class Score:
    """A score by its text.

    >>> Score.read("mean(test_accuracy, last=2)").of([{"test_accuracy": a} for a in (0.1, 0.5, 0.7)])
    60.0
    """

    text: str
    function: Callable[..., float]
    keys: tuple[str, ...]
    named: tuple[tuple[str, Any], ...]

    @classmethod
    def read(cls, text: str) -> "Score":
        found = re.fullmatch(r"\s*([a-z]+)\((.*)\)\s*", text) if isinstance(text, str) else None
        if not found:
            raise ConfigError(f"{text!r} is no score: expected one such as mean(test_accuracy, last=10)")
        if found[1] not in FUNCTIONS:
            raise ConfigError(f"unknown score {found[1]!r}: {nearest(found[1], FUNCTIONS)}")
        function, keys, kinds = FUNCTIONS[found[1]]
        parts = [part.strip() for part in found[2].split(",")]
        pairs = [re.split(r"\s*=\s*", part, maxsplit=1) for part in parts if "=" in part]
        named: dict[str, str] = dict(pairs)
        if len(named) < len(pairs):
            raise ConfigError(f"{text}: a value is given twice")
        plain = tuple(part for part in parts if "=" not in part)
        for name in named:
            if name not in kinds:
                raise ConfigError(f"{text}: {found[1]} has no {name!r}: {nearest(name, kinds)}")
        needed = NEEDED.get(found[1])
        if len(plain) != keys or not all(plain) or (needed and needed not in named):
            wanted = f"{keys} key{'s' * (keys > 1)}" + (f" and {needed}=" if needed else "")
            raise ConfigError(f"{text}: {found[1]} needs {wanted}")
        try:
            values = tuple((name, kinds[name](value)) for name, value in named.items())
        except ValueError:
            raise ConfigError(f"{text}: what stands after = has no meaning there") from None
        return cls(text, function, plain, values)

    def measured(self, history: History) -> bool:
        """Has the run what it reads?"""
        read = (*self.keys, *(value for _, value in self.named if isinstance(value, str)))
        return all(any(key in line for line in history) for key in read)

    def of(self, history: History) -> float:
        """nan where the run has not measured it, or never reached it."""
        return self.function(history, *self.keys, **dict(self.named))
