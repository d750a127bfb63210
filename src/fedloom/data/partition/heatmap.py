"""A partition as a picture: the share of each class, client by client."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedloom.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS = 200  # more would be narrower than a line
FORMATS = (".png", ".svg", ".pdf")


def chosen(clients: int) -> np.ndarray:
    """The clients that are drawn: all, or evenly chosen ones."""
    return np.unique(np.linspace(0, clients - 1, min(clients, CLIENTS)).round().astype(np.int64))


def draw(text: str, clients: np.ndarray, of: int, table: np.ndarray, class_names: Sequence[str]) -> "Figure":
    """table: [len(clients), classes] counts."""
    from matplotlib.figure import Figure  # without pyplot, which would keep the figure and look for a display

    shares = (table / np.maximum(table.sum(axis=1, keepdims=True), 1)).T  # [classes, clients]
    K, N = shares.shape
    figure = Figure(figsize=(min(12.0, max(5.0, 2.5 + 0.09 * N)), min(9.0, max(3.0, 1.6 + 0.25 * K))))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    picture = axes.imshow(shares, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=1)
    shown = f"{N} of {of:,} clients, evenly chosen" if of > N else f"{of:,} clients"
    axes.set_title(f"{text}: {shown}", fontsize=11)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    columns, rows = ticks(N, 12), ticks(K, 30)
    axes.set_xticks(columns, [str(clients[k]) for k in columns])
    named = class_names if len(class_names) == K else [str(c) for c in range(K)]
    axes.set_yticks(rows, [shortened(named[c]) for c in rows], fontsize=8)
    figure.colorbar(picture, ax=axes, label="share of the client's samples")
    return figure


def ticks(count: int, most: int) -> list[int]:
    """At most this many positions, evenly spaced by a round step."""
    step = next(s for e in range(20) for s in (10**e, 2 * 10**e, 5 * 10**e) if count <= s * most)
    return list(range(0, count, step))


def shortened(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def write(figure: "Figure", path: Path) -> None:
    if path.suffix.lower() not in FORMATS:
        raise DataError(f"a plot can be written as {', '.join(FORMATS)}, not as {path.name!r}")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise DataError(f"the plot could not be written to {path}: {error.strerror or error}") from error
