"""The comparison as a table: in the terminal, and as CSV."""

import csv
import io
import math

from rich.table import Table

from fedloom.experiment.compare import Comparison, Row


def size(count: float) -> str:
    """Bytes for people: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def spread(row: Row) -> str:
    """Mean and standard deviation in percent where the metric is a share."""
    if math.isnan(row.mean):
        return "diverged"
    deviation = "" if row.deviation is None else f" ± {100 * row.deviation:.2f}"
    return f"{100 * row.mean:.2f}{deviation}"


def cells(row: Row) -> list[str]:
    reached = row.works_to_target
    return [
        row.method,
        spread(row),
        "not reached" if reached is None else f"{reached:.1f}",
        f"{row.works:.0f}",
        size(row.uplink),
    ]


def headings(comparison: Comparison) -> list[str]:
    over = f", mean ± sd of {comparison.seeds} seeds" if comparison.seeds > 1 else ""
    return [
        "method",
        f"test {comparison.config.metric} %{over}",
        f"works to {100 * comparison.target:.1f} %",
        "works",
        "uplink",
    ]


def table(comparison: Comparison) -> Table:
    """For the terminal; the best mean stands out."""
    config = comparison.config
    shown = Table(title=config.setting)
    for i, heading in enumerate(headings(comparison)):
        shown.add_column(heading, justify="right" if i else "left", overflow="fold")
    means = [row.mean for row in comparison.rows if not math.isnan(row.mean)]
    for row in comparison.rows:
        shown.add_row(*cells(row), style="bold" if means and row.mean == max(means) else "")
    return shown


def csv_text(comparison: Comparison) -> str:
    """One line per method and seed."""
    out = io.StringIO()
    writer = csv.writer(out)
    metric = comparison.config.metric
    writer.writerow(["method", "seed", f"test_{metric}", "works", "local_steps", "uplink_bytes", "downlink_bytes"])
    for row in comparison.rows:
        for run, final in zip(row.runs, row.finals, strict=True):
            last = run.history[-1]
            counts = [last[name] for name in ("works", "local_steps", "uplink_bytes", "downlink_bytes")]
            writer.writerow([row.method, run.config.seed, final, *counts])
    return out.getvalue()
