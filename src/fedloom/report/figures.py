"""The figures of the page for a paper: PNG and SVG, legible in one column."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.data.partition.heatmap import ticks
from fedloom.errors import RunError
from fedloom.experiment.compare import Comparison
from fedloom.experiment.folder import Run
from fedloom.report import curves
from fedloom.report.curves import Group
from fedloom.report.describe import DASHES, PALETTE, Described, describe_runs
from fedloom.report.labels import describe_labels
from fedloom.report.series import TENSORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, DPI = 3.5, 2.5, 300  # inches; one column of a paper
MOST_LINES = 12  # more tensors than that are a heat map
LEGEND = 52  # characters in a line of a legend
STYLE: Any = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "lines.linewidth": 1.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text, for whoever edits the figure
    "svg.hashsalt": "fedloom",  # the same figure is the same file
    "text.parse_math": False,  # a $ in the name of a method is a $
}
_DASHES = dict(zip(DASHES, ("-", "--", ":", "-."), strict=True))
_TITLES = {"test_loss": "test loss", "train_loss": "training loss"}

Drawing = Callable[["Axes"], None]


def write(
    found: "Comparison | Run | Iterable[Run]",
    folder: str | Path,
    labels: Sequence[str] | None = None,
    also: Sequence[str] = (),
) -> list[Path]:
    """Draw whatever the runs have measured, each figure as .png and .svg; `also` are further metrics to draw as curves.
    Returns the files.
    """
    from matplotlib import rc_context

    folder = Path(folder)
    runs = _listed(found)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with rc_context(STYLE):
            described = describe_runs(found if isinstance(found, Comparison) else runs, labels)
            for name, figure in _figures(described, runs, also):
                for ending in ("png", "svg"):
                    path = folder / f"{name}.{ending}"
                    figure.savefig(path, dpi=DPI, metadata={"Date": None} if ending == "svg" else None)
                    written.append(path)
    except OSError as error:
        raise RunError(f"the figures can't be written to {folder}: {error.strerror or error}") from None
    return written


def _listed(found: "Comparison | Run | Iterable[Run]") -> list[Run]:
    if isinstance(found, Comparison):
        return [run for row in found.rows for run in row.runs]
    return [found] if isinstance(found, Run) else list(found)


def _figures(described: list[Described], runs: Sequence[Run], also: Sequence[str]) -> "Iterable[tuple[str, Figure]]":
    groups = curves.grouped(described)
    for key in also:
        if _measured(groups, key):
            yield key.replace(".", "_"), _curves(groups, key, "works", key, 1)
    for key in dict.fromkeys([*(f"test_{run['metric']}" for run in described), "test_loss", "train_loss"]):
        scale = 1 if key in _TITLES else 100
        if _measured(groups, key):
            title = _TITLES.get(key, f"{key.replace('_', ' ')}, %")
            yield key, _curves(groups, key, "works", title, scale)
            if scale == 100:
                yield f"{key}_by_bytes", _curves(groups, key, "traffic", title, scale)
    if _measured(groups, "uplink_bytes"):
        yield "bytes", _bars(groups)
    yield from _agreement(groups)
    yield from _fairness(groups)
    for i, table in enumerate(describe_labels(runs)):
        if "shares" in table:
            yield f"labels{i + 1 if i else ''}", _labels(table)


def _measured(groups: Sequence[Group], key: str) -> bool:
    return any(curves.last(run, key) is not None for group in groups for run in group.runs)


def _look(i: int) -> dict[str, Any]:
    palette = PALETTE["light"]
    return {"color": palette[i % len(palette)], "linestyle": _DASHES[DASHES[i // len(palette) % len(DASHES)]]}


def _figure(draw: Drawing, legend: int = 0, height: float = HEIGHT) -> "Figure":
    """`legend`: how many lines of text stand below."""
    from matplotlib.figure import Figure  # without pyplot, which would keep the figure and look for a display

    figure = Figure(figsize=(WIDTH, height + 0.14 * legend), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    handles, labels = axes.get_legend_handles_labels()
    if legend and handles:
        short = max(map(len, labels)) < LEGEND // 2 - 4
        figure.legend(
            handles, labels, loc="outside lower left", ncols=2 if short else 1, frameon=False, markerscale=1.6
        )
    return figure


def _named(
    groups: Sequence[Group], note: Callable[[Group], str] = lambda group: "", most: int = LEGEND
) -> tuple[list[str], int]:
    """The labels of a legend, and how many lines they take."""
    texts = [wrapped(f"{group.label}{note(group)}", most) for group in groups]
    lines = sum(text.count("\n") + 1 for text in texts)
    return texts, lines


def wrapped(text: str, most: int) -> str:
    """A method's text in lines, broken after a sign of it where that can be.

    >>> wrapped("radfed(redistributions=5)+dgt+fedglad", 30)
    'radfed(redistributions=5)+dgt+\\nfedglad'
    """
    lines = [""]
    for piece in re.split(r"(?<=[+,( ])", text):
        if lines[-1] and len(lines[-1]) + len(piece) > most:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1]) > most:
            lines[-1:] = [lines[-1][:most], lines[-1][most:]]
    return "\n".join(lines)


def _curves(groups: Sequence[Group], key: str, x: str, title: str, scale: float) -> "Figure":
    names, lines = _named(groups)

    def draw(axes: "Axes") -> None:
        for i, (group, name) in enumerate(zip(groups, names, strict=True)):
            curve = curves.over_seeds(group.runs, key, x, scale=scale)
            if not curve.x:
                continue
            place = [at / 1e6 for at in curve.x] if x == "traffic" else curve.x
            low = [m - d for m, d in zip(curve.mean, curve.deviation, strict=True)]
            high = [m + d for m, d in zip(curve.mean, curve.deviation, strict=True)]
            if any(curve.deviation):
                axes.fill_between(place, low, high, color=_look(i)["color"], alpha=0.18, linewidth=0)
            axes.plot(place, curve.mean, label=name, marker="." if len(place) == 1 else "", **_look(i))
        axes.set_xlabel("uplink + downlink, MB" if x == "traffic" else "works")
        axes.set_ylabel(title)

    return _figure(draw, lines)


def _bars(groups: Sequence[Group]) -> "Figure":
    names, lines = _named(groups, most=24)

    def average(group: Group, key: str) -> float:
        values = [value for run in group.runs if (value := curves.last(run, key)) is not None]
        return sum(values) / len(values) / 1e6 if values else 0.0

    def draw(axes: "Axes") -> None:
        up = [average(group, "uplink_bytes") for group in groups]
        down = [average(group, "downlink_bytes") for group in groups]
        places = range(len(groups))
        axes.barh(places, up, color=PALETTE["light"][0], label="uplink")
        axes.barh(places, down, left=up, color="#8fc1e3", label="downlink")
        axes.set_yticks(places, names, fontsize=6.5)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlabel("MB of a run")

    return _figure(draw, 1, height=0.7 + 0.16 * lines + 0.06 * len(groups))


def _agreement(groups: Sequence[Group]) -> "Iterable[tuple[str, Figure]]":
    """GSI per tensor of each method's first run, GSI against labels, the last similarity matrix of each method."""
    for i, group in enumerate(groups):
        run = group.runs[0]
        for key in run["parts"]["tensors"]:
            if key in TENSORS:
                yield f"{key.replace('.', '_')}_{i + 1}", _tensors(run, key, group.label)
        if run["parts"]["matrices"].get("round"):
            yield f"similarity_{i + 1}", _similarity(run, group.label)
    points = [(group, curves.pairs(group.runs, "labels.similarity", "gsi.model")) for group in groups]
    points = [(group, pairs) for group, pairs in points if len(pairs) > 1]
    if points:
        yield "gsi_labels", _scatter(points)


def _tensors(run: Described, key: str, label: str) -> "Figure":
    lines = list(curves.tensor_lines(run, key))
    rounds = run["parts"]["tensors"]["round"]
    bounds = curves.bounds(run) if key == "fedglad.scale" else None

    def draw_lines(axes: "Axes") -> None:
        for i, (name, values) in enumerate(lines):
            axes.plot(rounds, values, label=_short(name), **_look(i))
        if key == "gsi.tensor" and (model := curves.whole_model(run)):
            axes.plot(rounds, model, label="whole model", color="#888888", linewidth=2.2, zorder=1)
        for edge in bounds or ():
            axes.plot(rounds, edge, color="#888888", linestyle="--", linewidth=0.8)
        axes.set_xlabel("round")
        axes.set_ylabel(key)
        axes.set_title(_short(label), loc="left")

    def draw_map(axes: "Axes") -> None:
        picture = axes.pcolormesh(rounds, range(len(lines)), [values for _, values in lines], shading="nearest")
        axes.invert_yaxis()
        axes.set(xlabel="round", ylabel="tensor")
        axes.set_title(_short(label), loc="left")
        axes.figure.colorbar(picture, ax=axes, label=key)

    if len(lines) > MOST_LINES:
        return _figure(draw_map)
    return _figure(draw_lines, len(lines) + 1)


def _scatter(points: "Sequence[tuple[Group, list[tuple[float, float]]]]") -> "Figure":
    r = {group.label: curves.correlation(pairs) for group, pairs in points}
    groups = [group for group, _ in points]
    names, lines = _named(groups, lambda g: "" if math.isnan(r[g.label]) else f" (r = {r[g.label]:.2f})")

    def draw(axes: "Axes") -> None:
        for i, ((_, pairs), name) in enumerate(zip(points, names, strict=True)):
            x, y = [a for a, _ in pairs], [b for _, b in pairs]
            axes.scatter(x, y, s=6, alpha=0.6, linewidths=0, color=_look(i)["color"], label=name)
        axes.set_xlabel("label similarity of the cohort")
        axes.set_ylabel("GSI")

    return _figure(draw, lines)


def _similarity(run: Described, label: str) -> "Figure":
    part = run["parts"]["matrices"]
    matrix, clients, at = part["matrix"][-1], part["clients"][-1], part["round"][-1]

    def draw(axes: "Axes") -> None:
        cells = [[v if isinstance(v, int | float) else math.nan for v in line] for line in matrix]
        picture = axes.imshow(cells, cmap="RdBu_r", vmin=-1, vmax=1)
        axes.grid(False)
        shown = range(0, len(matrix), max(1, math.ceil(len(matrix) / 12)))
        names = [str(clients[k]) if clients else f"#{k}" for k in shown]
        axes.set_xticks(shown, names)
        axes.set_yticks(shown, names)
        axes.set(xlabel="client", ylabel="client")
        axes.set_title(f"{_short(label, 34)}, round {at}", loc="left")
        axes.figure.colorbar(picture, ax=axes, label="cosine")

    return _figure(draw, height=2.8)


def _fairness(groups: Sequence[Group]) -> "Iterable[tuple[str, Figure]]":
    having = [group for group in groups if curves.all_scores(group.runs)]
    if not having:
        return
    names, lines = _named(having)

    def draw(axes: "Axes") -> None:
        for group, name in zip(having, names, strict=True):
            axes.plot(*curves.quantiles(curves.all_scores(group.runs)), label=name, **_look(groups.index(group)))
        axes.set(xlabel="clients, %", ylabel="score of a client")

    yield "fairness", _figure(draw, lines)
    others = [(group, curves.gains(group.runs, having[0].runs)) for group in having[1:]]
    others = [(group, gains) for group, gains in others if gains]
    if others:
        names, lines = _named([group for group, _ in others])

        def draw_gains(axes: "Axes") -> None:
            axes.axhline(0, color="#444444", linewidth=0.8)
            for (group, gains), name in zip(others, names, strict=True):
                axes.plot(*curves.quantiles(gains), label=name, **_look(groups.index(group)))
            axes.set(xlabel="clients, %", ylabel=f"gain over {_short(having[0].label, 22)}")

        yield "fairness_gains", _figure(draw_gains, lines)


def _labels(table: dict[str, Any]) -> "Figure":
    def draw(axes: "Axes") -> None:
        picture = axes.imshow(table["shares"], aspect="auto", interpolation="nearest", vmin=0, vmax=1, origin="lower")
        axes.grid(False)
        few = range(0, len(table["classes"]), max(1, math.ceil(len(table["classes"]) / 20)))
        clients = ticks(len(table["sizes"]), 8)
        axes.set_xticks(clients, [str(k) for k in clients])
        axes.set_yticks(few, [_short(table["classes"][k], 16) for k in few])
        axes.set(xlabel="client", ylabel="class")
        axes.set_title(f"{_short(table['partition'], 34)}, seed {table['seed']}", loc="left")
        axes.figure.colorbar(picture, ax=axes, label="share of its samples")

    return _figure(draw, height=2.8)


def _short(text: str, most: int = 46) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
