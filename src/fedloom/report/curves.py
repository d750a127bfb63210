"""What figures show, computed from described runs. page.js has the same rules, for runs that a reader chooses; a test
holds the two together.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fedloom.report.describe import Described
from fedloom.report.series import NOT_FINITE, Part

QUANTILES = 200


class Group(NamedTuple):
    """The runs of one method under one setting: one curve."""

    label: str
    runs: list[Described]


class Curve(NamedTuple):
    """Mean over seeds and one standard deviation; nan is a gap."""

    x: list[float]
    mean: list[float]
    deviation: list[float]


def grouped(runs: Sequence[Described]) -> list[Group]:
    """Runs by setting and method, in the order of their first appearance; a letter tells settings apart."""
    found: dict[tuple[str, str], list[Described]] = {}
    for run in runs:
        found.setdefault((run["group"], run["method"]), []).append(run)
    settings = list(dict.fromkeys(group for group, _ in found))
    letters = {group: f" [{_letter(i)}]" if len(settings) > 1 else "" for i, group in enumerate(settings)}
    return [Group(f"{method}{letters[group]}", members) for (group, method), members in found.items()]


def _letter(i: int) -> str:
    return chr(ord("A") + i) if i < 26 else str(i + 1)


def over_seeds(runs: Sequence[Described], key: str, x: str = "works", part: str = "rounds", scale: float = 1) -> Curve:
    """Mean and deviation at each round that all runs have which came so far. One value that is not finite makes a gap:
    a seed that diverged must not leave the mean.
    """
    tables = [run["parts"][part] for run in runs if key in run["parts"][part]]
    rows = [{at: i for i, at in enumerate(table["round"])} for table in tables]
    ends = [table["round"][-1] for table in tables]
    curve = Curve([], [], [])
    for at in max((table["round"] for table in tables), key=lambda rounds: rounds[-1], default=[]):
        far = [k for k, end in enumerate(ends) if end >= at]
        if not all(at in rows[k] for k in far):
            continue
        values = [tables[k][key][rows[k][at]] for k in far]
        if None in values:
            continue
        places = [_axis(tables[k], x, rows[k][at]) for k in far]
        known = all(isinstance(value, int | float) for value in values)
        curve.x.append(statistics.fmean(places))
        curve.mean.append(scale * statistics.fmean(values) if known else math.nan)
        curve.deviation.append(scale * statistics.stdev(values) if known and len(values) > 1 else 0.0)
    return curve


def _axis(table: Part, x: str, row: int) -> float:
    names = ("uplink_bytes", "downlink_bytes") if x == "traffic" else (x,)
    values = [table[name][row] for name in names if name in table]
    return float(sum(value for value in values if isinstance(value, int | float)))


def last(run: Described, key: str) -> float | None:
    """The last value that was measured; nan if it is not finite."""
    told = [value for value in run["parts"]["rounds"].get(key, []) if value is not None]
    if not told:
        return None
    return math.nan if told[-1] == NOT_FINITE else float(told[-1])


def pairs(runs: Sequence[Described], first: str, second: str) -> list[tuple[float, float]]:
    """Two numbers of the same rounds."""
    return [
        (a, b)
        for run in runs
        for a, b in zip(run["parts"]["rounds"].get(first, []), run["parts"]["rounds"].get(second, []), strict=False)
        if isinstance(a, int | float) and isinstance(b, int | float)
    ]


def correlation(points: Sequence[tuple[float, float]]) -> float:
    """Pearson's r; nan where one of the two does not vary."""
    a, b = [p[0] for p in points], [p[1] for p in points]
    if len(points) < 2 or min(a) == max(a) or min(b) == max(b):
        return math.nan
    return statistics.correlation(a, b)


def client_scores(run: Described) -> list[float | None]:
    """The last score of each client."""
    scores = run["parts"]["scores"].get("scores", [[]])[-1]
    return [float(score) if isinstance(score, int | float) else None for score in scores]


def all_scores(runs: Sequence[Described]) -> list[float]:
    """The scores of all clients and seeds, from the worst to the best."""
    return sorted(score for run in runs for score in client_scores(run) if score is not None)


def gains(runs: Sequence[Described], baseline: Sequence[Described]) -> list[float]:
    """What each client has more than under the baseline with the same seed, from the most to the least."""
    before = {run["seed"]: client_scores(run) for run in baseline}
    found: list[float] = []
    for run in runs:
        scores, other = client_scores(run), before.get(run["seed"], [])
        if len(scores) == len(other):
            found += [a - b for a, b in zip(scores, other, strict=True) if a is not None and b is not None]
    return sorted(found, reverse=True)


def quantiles(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """A sorted curve over the share of clients in percent, at no more than some hundred places."""
    step = max(1, math.ceil(len(values) / QUANTILES))
    chosen = sorted({*range(0, len(values), step), len(values) - 1}) if values else []
    return [100 * (i + 0.5) / len(values) for i in chosen], [values[i] for i in chosen]


def bounds(run: Described) -> tuple[list[float], list[float]] | None:
    """Between which FedGLAD's scale lies: 1 - gamma t and 1 + gamma t with t = round - 1."""
    gamma = run["gamma"]
    if gamma is None or not math.isfinite(gamma):
        return None
    steps = [gamma * (at - 1) for at in run["parts"]["tensors"].get("round", [])]
    return [1 - s for s in steps], [1 + s for s in steps]


def whole_model(run: Described) -> list[float]:
    """GSI of the model as one group, in the rounds in which its tensors were measured."""
    values = run["parts"]["tensors"].get("model", [])
    return [float(v) if isinstance(v, int | float) else math.nan for v in values]


def tensor_lines(run: Described, key: str) -> Iterator[tuple[str, list[float]]]:
    """The values of one list per tensor, tensor by tensor, with its name."""
    lists: list[Any] = run["parts"]["tensors"].get(key, [])
    width = max((len(values) for values in lists if values), default=0)
    names = run["names"] if len(run["names"]) == width else [f"tensor {i}" for i in range(width)]
    for i, name in enumerate(names):
        column = [values[i] if values and i < len(values) else None for values in lists]
        yield name, [float(v) if isinstance(v, int | float) else math.nan for v in column]
