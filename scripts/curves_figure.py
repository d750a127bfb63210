"""Draw the curves of docs/reproduction, a panel for each row:

    python scripts/curves_figure.py CURVES.csv epochs FIGURE.png [LABEL ...]

The file has the columns row, label, seed, accuracy and the one to draw over (round, epochs). A line is the mean over
seeds, the band about it their lowest and highest. A method and its unions (FedAvg, FedAvg+DGT) share a colour;
the union is dashed. Methods beyond the colours there are have those of the first, dotted. Without labels all are drawn.
"""

import csv
import math
import statistics
import sys
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from fedloom.report.describe import PALETTE
from fedloom.report.figures import DPI, STYLE


class Point(NamedTuple):
    x: float
    mean: float
    low: float
    high: float


Curves = dict[str, dict[str, list[Point]]]  # by row: by label


def read(path: Path, over: str) -> Curves:
    """A run without a value (it diverged) counts as nan, which leaves a gap in the mean."""
    found: dict[str, dict[str, dict[float, list[float]]]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            own = found.setdefault(line["row"], {}).setdefault(line["label"], {})
            own.setdefault(float(line[over]), []).append(float(line["accuracy"] or math.nan))
    return {
        row: {label: [_point(x, at[x]) for x in sorted(at)] for label, at in own.items()} for row, own in found.items()
    }


def _point(x: float, values: list[float]) -> Point:
    known = [value for value in values if value == value] or [math.nan]
    return Point(x, statistics.fmean(values), min(known), max(known))


def draw(curves: Curves, over: str, path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for own in curves.values() for label in own))
    bases = list(dict.fromkeys(label.partition("+")[0] for label in labels))
    palette = PALETTE["light"]
    colours = dict(zip(bases, cycle(palette), strict=False))
    again = bases[len(palette) :]
    with rc_context(STYLE):
        figure = Figure(figsize=(2.4 * len(curves), 2.5), layout="constrained")
        axes = figure.subplots(1, len(curves), squeeze=False)[0]
        for axis, (row, own) in zip(axes, curves.items(), strict=True):
            for label, points in own.items():
                base, _, joined = label.partition("+")
                x, mean, low, high = zip(*points, strict=True)
                style = "--" if joined else ":" if base in again else "-"
                axis.plot(x, mean, label=label, color=colours[base], linestyle=style)
                axis.fill_between(x, low, high, color=colours[base], alpha=0.12, linewidth=0)
            axis.set_title(row)
            axis.set_xlabel(over)
        axes[0].set_ylabel("accuracy, %")
        told = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(list(told.values()), list(told), loc="outside lower center", ncols=len(told))
        figure.savefig(path, dpi=DPI)


def main() -> None:
    if len(sys.argv) < 4 or not Path(sys.argv[1]).is_file():
        sys.exit("which curves? python scripts/curves_figure.py CURVES.csv round FIGURE.png [LABEL ...]")
    source, over, figure, *labels = sys.argv[1:]
    try:
        curves = read(Path(source), over)
    except KeyError as missing:
        sys.exit(f"{source} has no column {missing}")
    if unknown := set(labels) - {label for own in curves.values() for label in own}:
        sys.exit(f"no curve is called {', '.join(sorted(unknown))}")
    chosen = {row: {label: own[label] for label in labels or own if label in own} for row, own in curves.items()}
    draw(chosen, over, Path(figure))


if __name__ == "__main__":
    main()
