"""Draw how accuracy falls with the share of hostile clients, from the result of `fedloom reproduce robustness`:

    python scripts/robustness_figure.py OUT/robustness/result.csv [FIGURE.png]

A column of panels for each attack, a row for each defence, a line for each method; bars are one standard deviation.
"""

import csv
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedloom.report.describe import PALETTE
from fedloom.report.figures import DPI, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALONE = "no defence"
HONEST = "honest"  # the row without an attack: where the lines of all attacks begin


class Point(NamedTuple):
    share: float  # of hostile clients, in percent
    mean: float
    sd: float


Lines = dict[tuple[str, str], dict[str, list[Point]]]  # by attack and defence: by method


def read(path: Path, score: str = "accuracy") -> Lines:
    """The lines of every panel; rows are called attack/share%, labels method+defence."""
    with path.open(newline="") as file:
        told = [row for row in csv.DictReader(file) if row["score"] == score and row["measured"]]
    attacks = dict.fromkeys(row["row"].partition("/")[0] for row in told)
    lines: Lines = {}
    for row in told:
        attack, _, share = row["row"].partition("/")
        method, _, defence = row["label"].partition("+")
        point = Point(float(share.rstrip("%")), float(row["measured"]), float(row["sd"] or 0.0))
        for panel in [name for name in attacks if name != HONEST] if attack == HONEST else [attack]:
            lines.setdefault((panel, defence or ALONE), {}).setdefault(method, []).append(point)
    return {at: {method: sorted(points) for method, points in own.items()} for at, own in lines.items()}


def draw(lines: Lines, path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    attacks, defences = (_order(at[i] for at in lines) for i in (0, 1))
    methods = _order(method for own in lines.values() for method in own)
    colours = dict(zip(methods, PALETTE["light"], strict=False))
    with rc_context(STYLE):
        size = (1.6 * len(attacks) + 0.5, 1.3 * len(defences) + 0.7)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(defences), len(attacks), sharex=True, sharey=True, squeeze=False)
        for i, defence in enumerate(defences):
            for j, attack in enumerate(attacks):
                _panel(axes[i, j], lines.get((attack, defence), {}), colours)
                axes[i, j].set_title(attack if i == 0 else "")
            axes[i, 0].set_ylabel(f"{defence}\naccuracy, %")
        for axis in axes[-1]:
            axis.set_xlabel("hostile, %")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(methods))
        figure.savefig(path, dpi=DPI)


def _panel(axis: "Axes", own: Mapping[str, list[Point]], colours: Mapping[str, str]) -> None:
    for method, points in own.items():
        x, mean, sd = zip(*points, strict=True)
        axis.errorbar(x, mean, sd, label=method, color=colours[method], marker="o", markersize=2.5, capsize=1.5)
    axis.set_ylim(0, 100)


def _order(names: Iterable[str]) -> list[str]:
    """Each once, in order of appearance."""
    return list(dict.fromkeys(names))


def main() -> None:
    if not 2 <= len(sys.argv) <= 3 or not Path(sys.argv[1]).is_file():
        sys.exit("which result? python scripts/robustness_figure.py OUT/robustness/result.csv [FIGURE.png]")
    result = Path(sys.argv[1])
    figure = Path(sys.argv[2]) if len(sys.argv) == 3 else result.with_name("robustness.png")
    draw(read(result), figure)


if __name__ == "__main__":
    main()
