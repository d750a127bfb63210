"""Stacked against alone: all unions of the five methods on three data sets, with equal works and equal tuning effort.

    python scripts/stacking.py plan tuning.yaml               a recipe of all trials
    fedloom reproduce tuning.yaml --processes 16
    python scripts/stacking.py choose runs/reproduce/tuning/result.csv src/fedloom/recipes/stacking.yaml
    fedloom reproduce stacking --processes 16
    python scripts/stacking.py effects runs/reproduce/stacking/result.csv effects.md stacking.png

Every union has as many trials as every other, however many values it has to choose: each local rate of the grid twice,
everything else drawn at random from its grid. The trial with the highest accuracy on held-out clients is repeated with
all seeds, and judged by the test set. `effects` reads what each method adds in the company of all others.
"""

import csv
import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedloom.experiment.statistics import interval
from fedloom.report.describe import PALETTE
from fedloom.report.figures import DPI, STYLE

WORKS, TAIL, TRIALS, SEEDS = 240, 40, 10, 5
GRIDS: dict[str, dict[str, list[Any]]] = {
    "radfed": {"redistributions": [2, 5, 10, 20]},
    "2dlrd": {"c": [0.1, 0.2, 0.4], "window": [10, 25, 50]},
    "adabest": {"beta": [0.6, 0.8, 0.9, 0.96], "mu": [0.002, 0.02]},
    "dgt": {"alpha": [0.5, 0.9, 0.99]},
    "fedglad": {"gamma": [0.01, 0.02, 0.05]},
}
NAMES = {"radfed": "RADFed", "2dlrd": "2D-LRD", "adabest": "AdaBest", "dgt": "DGT", "fedglad": "FedGLAD"}
SHARED = {"clients": 100, "validation": 10, "per_round": 10, "rounds": WORKS, "batch_size": 50, "eval_every": 5}
ROWS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "mnist": (
        {"data": "mnist", "partition": "fednlp(alpha=0.1)", "model": "mlp(hidden=[100, 100])", "epochs": 2},
        [0.01, 0.03, 0.1, 0.2, 0.4],
    ),
    "cifar10": (
        {"data": "cifar10", "partition": "dirichlet(alpha=0.3)", "model": "lenet5", "epochs": 2},
        [0.01, 0.02, 0.05, 0.1, 0.2],
    ),
    "covertype": (
        {
            "data": "covertype",
            "partition": "quadratic(mu=1.0, lam=0.1)",
            "standardise": "global",
            "model": "mlp(hidden=[64, 64])",
            "epochs": 2,
        },
        [0.03, 0.1, 0.2, 0.3, 0.5],
    ),
}


def unions() -> list[tuple[str, ...]]:
    """None of the methods, each alone, and every union of them."""
    return [some for n in range(len(GRIDS) + 1) for some in itertools.combinations(GRIDS, n)]


def label(union: Iterable[str]) -> str:
    return "+".join(NAMES[name] for name in union) or "FedAvg"


def drawn(union: Sequence[str], rates: list[float], chance: random.Random) -> list[dict[str, Any]]:
    """The trials of a union, as methods of a recipe."""
    trials = []
    for i in range(TRIALS):
        calls = [] if "adabest" in union else ["fedavg"]
        for name in union:
            values = {key: chance.choice(choices) for key, choices in GRIDS[name].items()}
            calls.append(f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})")
        settings: dict[str, Any] = {"lr": rates[i % len(rates)]}
        trials.append(
            {"method": "+".join(calls), "settings": settings | ({"eval_every": 1} if "radfed" in union else {})}
        )
    return trials


def all_trials() -> Iterator[tuple[str, tuple[str, ...], list[dict[str, Any]]]]:
    """The trials of every union in every row, always the same ones."""
    for row, (_, rates) in ROWS.items():
        chance = random.Random(row)  # nosec B311  # nothing secret is drawn
        for union in unions():
            yield row, union, drawn(union, rates, chance)


def recipe(title: str, about: str, scores: dict[str, str], seeds: int, methods: dict[str, dict[str, Any]]) -> str:
    rows = {row: {"settings": ROWS[row][0], "methods": own} for row, own in methods.items()}
    head = {"title": title, "paper": "the study of docs/stacking.md", "about": about, "seeds": seeds, "scores": scores}
    first = next(iter(next(iter(methods.values()))))  # every row has its own methods, under the same labels
    body = {"settings": SHARED, "methods": {first: "fedavg"}, "rows": rows}
    return yaml.safe_dump(head | body, sort_keys=False, width=116, allow_unicode=True)


def plan(target: Path) -> None:
    methods: dict[str, dict[str, Any]] = {}
    for row, union, trials in all_trials():
        for i, trial in enumerate(trials):
            methods.setdefault(row, {})[f"{label(union)} #{i}"] = trial
    scores = {"validation": f"mean(validation_accuracy, works={TAIL})"}
    about = f"{TRIALS} trials of every union of the five methods, for the recipe stacking."
    target.write_text(recipe("Stacked against alone: trials", about, scores, 1, methods))


def read(source: Path) -> list[dict[str, str]]:
    with source.open() as file:
        return list(csv.DictReader(file))


def choose(source: Path, target: Path) -> None:
    """The recipe of the best trials. A trial that diverged has no value, and loses."""
    found: dict[tuple[str, str], float] = {}
    for line in read(source):
        found[line["row"], line["label"]] = float(line["measured"] or "-inf")
    methods: dict[str, dict[str, Any]] = {}
    for row, union, trials in all_trials():
        values = [found.get((row, f"{label(union)} #{i}"), -float("inf")) for i in range(TRIALS)]
        if max(values) > -float("inf"):
            methods.setdefault(row, {})[label(union)] = trials[values.index(max(values))]
    about = (
        f"All unions of the five methods, each with the best of {TRIALS} trials by held-out clients (the local rate and"
        f" every parameter of its own), {WORKS} works of 10 of 100 clients. Nobody has printed this. "
        f"scripts/stacking.py draws the trials, chooses, and reads effects off the result."
    )
    scores = {"accuracy": f"mean(test_accuracy, works={TAIL})", "end": "last(test_accuracy)"}
    target.write_text(recipe("Stacked against alone", about, scores, SEEDS, methods))


Values = dict[str, np.ndarray]  # by union: the accuracy of each seed


def effects(source: Path, target: Path, figure: Path) -> None:
    """Tables of what was measured, and of what each method adds."""
    values: dict[str, Values] = {}
    for line in read(source):
        if line["score"] == "accuracy" and line["values"]:
            runs = np.array([float(value) for value in line["values"].split()])
            values.setdefault(line["row"], {})[line["label"]] = runs
    lines = []
    for row, by_union in values.items():
        lines += [f"## {row}", "", *ranking(by_union), "", *added(by_union), "", *together(by_union), ""]
    target.write_text("\n".join(lines))
    draw(values, figure)


def draw(values: dict[str, Values], path: Path) -> None:
    """A panel for each data set, a line for each union: its gain over FedAvg with a 95% interval."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(3.4 * len(values), 5.2), layout="constrained")
        for axis, (row, by_union) in zip(
            figure.subplots(1, len(values), squeeze=False)[0], values.items(), strict=True
        ):
            gains = {name: runs - by_union["FedAvg"] for name, runs in by_union.items() if name != "FedAvg"}
            ranked = sorted(gains, key=lambda name: float(gains[name].mean()))
            for y, name in enumerate(ranked):
                low, high = interval(gains[name])
                axis.plot([low, high], [y, y], color=PALETTE["light"][0], linewidth=1)
                axis.plot(gains[name].mean(), y, "o", color=PALETTE["light"][0], markersize=3)
            axis.axvline(0, color="grey", linewidth=0.5)
            axis.set_yticks(range(len(ranked)), [_short(name) for name in ranked], fontsize=5, family="monospace")
            axis.set_title(row)
            axis.set_xlabel("points over FedAvg")
        figure.savefig(path, dpi=DPI)


def _short(name: str) -> str:
    """Which parts a union has, in columns: R L A D G."""
    parts = name.split("+")
    return " ".join(letter if part in parts else "·" for letter, part in zip("RLADG", NAMES.values(), strict=True))


def shown(gains: np.ndarray) -> str:
    """The mean of differences, one for each seed, with its interval."""
    low, high = interval(gains)
    return f"{gains.mean():+.2f} [{low:+.2f}, {high:+.2f}]"


def ranking(by_union: Values) -> list[str]:
    base, seeds = by_union["FedAvg"], len(by_union["FedAvg"])
    lines = [f"| union | accuracy, mean ± sd of {seeds} seeds | over FedAvg | over the best part alone |"]
    lines += ["| --- | --- | --- | --- |"]
    for name, runs in sorted(by_union.items(), key=lambda pair: -np.nan_to_num(pair[1].mean(), nan=-1)):
        parts = [by_union[part] for part in name.split("+") if "+" in name and part in by_union]
        best = max(parts, key=lambda one: one.mean()) if parts else None
        over = "-" if name == "FedAvg" else shown(runs - base)
        beyond = "" if best is None else shown(runs - best)
        lines.append(f"| {name} | {runs.mean():.2f} ± {runs.std(ddof=1):.2f} | {over} | {beyond} |")
    return lines


def added(by_union: Values) -> list[str]:
    """What a method adds: to nothing, to all others, and on average over all companies that it can have."""
    lines = ["| method | alone | added to the other four | mean over all 16 companies | companies in which it helps |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for name in GRIDS:
        others = [union for union in unions() if name not in union]
        gains = {union: by_union[label(joined(union, name))] - by_union[label(union)] for union in others}
        mean = np.mean(list(gains.values()), axis=0)
        helps = sum(bool(gain.mean() > 0) for gain in gains.values())
        cells = [shown(gains[()]), shown(gains[max(others, key=len)]), shown(mean), f"{helps} of {len(others)}"]
        lines.append(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
    return lines


def together(by_union: Values) -> list[str]:
    """What two methods have together beyond what each adds without the other, over the eight companies of both."""
    names = list(GRIDS)
    lines = ["| beyond their sum | " + " | ".join(NAMES[name] for name in names[1:]) + " |"]
    lines += ["| --- " * len(names) + "|"]
    for i, one in enumerate(names[:-1]):
        cells = []
        for other in names[1:]:
            if names.index(other) <= i:
                cells.append("")
                continue
            companies = [union for union in unions() if one not in union and other not in union]
            found = [
                by_union[label(joined(union, one, other))]
                - by_union[label(joined(union, one))]
                - by_union[label(joined(union, other))]
                + by_union[label(union)]
                for union in companies
            ]
            cells.append(shown(np.mean(found, axis=0)))
        lines.append(f"| {NAMES[one]} | " + " | ".join(cells) + " |")
    return lines


def joined(union: Sequence[str], *more: str) -> tuple[str, ...]:
    return tuple(name for name in GRIDS if name in {*union, *more})


def main() -> None:
    match sys.argv[1:]:
        case ["plan", target]:
            plan(Path(target))
        case ["choose", source, target]:
            choose(Path(source), Path(target))
        case ["effects", source, target, figure]:
            effects(Path(source), Path(target), Path(figure))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
