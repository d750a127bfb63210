"""The comparison as a table: in the terminal, and as CSV, Markdown and LaTeX."""

import csv
import io
import math
import re
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedloom.experiment.compare import LAST, Comparison, Row
from fedloom.experiment.folder import write_text


def size(count: float) -> str:
    """Bytes for people: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def spread(values: list[float]) -> str:
    """Mean and standard deviation in percent."""
    mean = statistics.fmean(values)
    if not all(map(math.isfinite, values)):
        return "diverged"
    deviation = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * mean:.2f}{deviation}"


def difference(row: Row) -> str:
    """To the baseline, with its interval."""
    gain = row.gain
    if gain is None or math.isnan(gain.mean):
        return "-"
    bounds = "" if math.isnan(gain.low) else f" [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]"
    return f"{100 * gain.mean:+.2f}{bounds}"


def verdict(row: Row) -> str:
    """The corrected p-value, or why there is none."""
    if row.gain is None:
        return "-"
    return row.gain.why if row.gain.p is None else f"{row.gain.p:.4f}"


def cells(row: Row) -> list[str]:
    works, sent = row.works_to_target, row.bytes_to_target
    never = "-" if row.target is None else "not reached"
    return [
        row.method,
        spread(row.finals),
        spread(row.tails),
        difference(row),
        verdict(row),
        never if works is None else f"{works:.1f}",
        never if sent is None else size(sent),
        f"{row.works:.0f}",
        size(row.uplink),
    ]


def headings(comparison: Comparison) -> list[str]:
    over = f", mean ± sd of {comparison.seeds} seeds" if comparison.seeds > 1 else ""
    target = "the target" if comparison.target is None else f"{100 * comparison.target:.1f} %"
    return [
        "method",
        f"test {comparison.config.metric} %{over}",
        f"mean of the last {LAST} works %",
        "difference, 95% interval",
        "p (Wilcoxon, Holm)",
        f"works to {target}",
        f"bytes to {target}",
        "works",
        "uplink",
    ]


IN_THE_TERMINAL = (0, 1, 3, 4, 5, 8)


def table(comparison: Comparison) -> Table:
    """For the terminal; the best mean stands out."""
    shown = Table(title=Text(comparison.config.setting, "table.title"))
    heads = headings(comparison)
    for i in IN_THE_TERMINAL:
        shown.add_column(Text(heads[i]), justify="right" if i else "left", overflow="fold")
    means = [row.mean for row in comparison.rows if not math.isnan(row.mean)]
    for row in comparison.rows:
        told = cells(row)
        best = means and row.mean == max(means)
        shown.add_row(*(Text(told[i]) for i in IN_THE_TERMINAL), style="bold" if best else "")
    return shown


def remarks(comparison: Comparison) -> list[str]:
    """Methods that had nothing to average in some rounds: their model stood still, however good it looks. Methods that
    average too seldom to come to all of the works.
    """
    told = []
    wanted = comparison.config.rounds
    for row in comparison.rows:
        first = row.runs[0]
        each = first.history[-1]["works"] / len(first.history)
        planned = first.config.rounds * each
        if planned < wanted - 1e-6:
            told.append(f"{row.method}: {planned:g} works instead of {wanted}, since it averages once in {each:g}")
        lines = [line for run in row.runs for line in run.history]
        idle = sum(line["answered"] <= line["diverged"] for line in lines)
        if idle:
            told.append(f"{row.method}: in {idle} of {len(lines)} rounds no client sent a finite update")
    return told


def csv_text(comparison: Comparison) -> str:
    """One line per method and seed."""
    metric = comparison.config.metric
    counts = ("works", "local_steps", "uplink_bytes", "downlink_bytes")
    lines: list[list[Any]] = [["method", "seed", f"test_{metric}", f"test_{metric}_last_{LAST}_works", *counts]]
    for row in comparison.rows:
        for run, final, tail in zip(row.runs, row.finals, row.tails, strict=True):
            last = run.history[-1]
            lines.append([row.method, run.config.seed, final, tail, *(last[name] for name in counts)])
    return _csv(lines)


def summary_csv(comparison: Comparison) -> str:
    """One line per method, in numbers; what is not known is empty."""
    heads = [
        "method",
        "seeds",
        "mean",
        "sd",
        f"mean_last_{LAST}_works",
        "difference",
        "low",
        "high",
        "wins",
        "p",
        "tested",
    ]
    lines: list[list[Any]] = [[*heads, "works_to_target", "bytes_to_target", "target", "works", "uplink_bytes"]]
    for row in comparison.rows:
        gain = row.gain
        told = [gain.mean, gain.low, gain.high, gain.wins, gain.p, gain.why or "yes"] if gain else [None] * 6
        reached = [row.works_to_target, row.bytes_to_target, comparison.target, row.works, row.uplink]
        means = [row.mean, row.deviation, statistics.fmean(row.tails)]
        lines.append([row.method, len(row.runs), *means, *told, *reached])
    return _csv(lines)


def _csv(lines: list[list[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for line in lines:
        writer.writerow(["" if value is None or value != value else value for value in line])
    return out.getvalue()


def markdown(comparison: Comparison) -> str:
    """A table for a README or a pull request."""
    lines = [headings(comparison), ["---"] * len(headings(comparison)), *(cells(row) for row in comparison.rows)]
    table = "".join("| " + " | ".join(_bar(cell) for cell in line) + " |\n" for line in lines)
    return table + "".join(f"\n{_bar(remark)}\n" for remark in remarks(comparison))


def _bar(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("\n", " ")


def latex(comparison: Comparison) -> str:
    """A table for a paper: booktabs, the best mean in bold."""
    heads = headings(comparison)
    means = [row.mean for row in comparison.rows if not math.isnan(row.mean)]
    lines = [r"\begin{tabular}{l" + "r" * (len(heads) - 1) + "}", r"\toprule", _tex_line(heads), r"\midrule"]
    for row in comparison.rows:
        told = [escaped(cell) for cell in cells(row)]
        if means and row.mean == max(means):
            told[1] = rf"\textbf{{{told[1]}}}"
        lines.append(" & ".join(told) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    about = f"{comparison.config.setting}; model {comparison.config.model}".replace("\n", " ")
    return f"% {about}\n% needs \\usepackage{{booktabs}}\n" + "\n".join(lines) + "\n"


def _tex_line(line: list[str]) -> str:
    return " & ".join(escaped(cell) for cell in line) + r" \\"


_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
}


def escaped(text: str) -> str:
    r"""A text as LaTeX prints it.

    >>> escaped("50% of a_b")
    '50\\% of a\\_b'
    """
    plain = "".join(_SPECIAL.get(c, c) for c in text.replace("\n", " "))
    return re.sub(r"(?<![\w)=(])([+-])(?=\d)", r"$\1$", plain)  # a minus, not a hyphen


def write_tables(comparison: Comparison, folder: Path) -> None:
    """table.csv (every run), summary.csv, table.md and table.tex."""
    texts = {
        "table.csv": csv_text(comparison),
        "summary.csv": summary_csv(comparison),
        "table.md": markdown(comparison),
        "table.tex": latex(comparison),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
