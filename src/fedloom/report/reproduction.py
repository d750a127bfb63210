"""Measured beside printed: for the terminal, as Markdown and as CSV."""

import csv
import io
import math
from pathlib import Path

from rich.table import Table

from fedloom.experiment.folder import write_text
from fedloom.experiment.reproduce import Finding, Reproduction

HEADINGS = ["row", "method", "score", "measured", "printed", "difference", "in printed sd", "runs"]


def number(value: float, sd: float | None = None) -> str:
    """With as many digits as papers print."""
    if math.isnan(value):
        return "-"
    digits = 2 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}" + ("" if sd is None else f" ± {sd:.{digits}f}")


def cells(finding: Finding) -> list[str]:
    printed = finding.printed
    if finding.why_not and not finding.runs:
        measured = "not run"
    else:
        measured = "not reached" if math.isnan(finding.mean) else number(finding.mean, finding.sd)
    return [
        finding.row,
        finding.label,
        finding.score,
        measured,
        "-" if printed is None else number(printed.mean, printed.sd),
        "-" if math.isnan(finding.difference) else f"{finding.difference:+.2f}",
        "-" if math.isnan(finding.deviations) else f"{finding.deviations:+.1f}",
        str(finding.runs),
    ]


def reasons(found: Reproduction) -> dict[str, list[str]]:
    """Why rows, or methods in them, were not run: from the reason to whom it concerns."""
    told: dict[str, list[str]] = {}
    by_row: dict[str, list[tuple[str, str]]] = {}
    for cell in found.cells:
        by_row.setdefault(cell.case.row, []).append((cell.case.label, cell.why_not))
    for row, labels in by_row.items():
        if len({why for _, why in labels}) == 1:
            labels = [("", labels[0][1])]
        for label, why in labels:
            if why:
                told.setdefault(why, []).append(f"{row} ({label})" if label else row)
    return told


def table(found: Reproduction) -> Table:
    size = "" if found.scale == "paper" else f" (scale {found.scale}: figures mean nothing)"
    size = " (a tenth of the rounds)" if found.scale == "quick" else size
    shown = Table(title=f"{found.recipe.title}{size}")
    for i, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="left" if i < 3 else "right", overflow="fold")
    before = ""
    for finding in found.findings():
        told = cells(finding)
        shown.add_row("" if finding.row == before else told[0], *told[1:])
        before = finding.row
    return shown


def markdown(found: Reproduction, command: str) -> str:
    recipe = found.recipe
    lines = [f"# {recipe.title} ({recipe.paper})", "", recipe.about, "", f"`{command}`", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "| " + " | ".join(["---"] * len(HEADINGS)) + " |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(f)) + " |" for f in found.findings()]
    for why, whom in reasons(found).items():
        lines += ["", f"Not run: {', '.join(whom)}: {why}"]
    return "\n".join(lines) + "\n"


def csv_text(found: Reproduction) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = ["recipe", "scale", "row", "label", "method", "score", "measured", "sd", "runs", "printed", "printed_sd"]
    writer.writerow([*heads, "difference", "not_run"])
    methods = {(cell.case.row, cell.case.label): cell.config.method for cell in found.cells}
    for f in found.findings():
        printed = (None, None) if f.printed is None else (f.printed.mean, f.printed.sd)
        who = [found.recipe.name, found.scale, f.row, f.label, methods[f.row, f.label], f.score]
        told = [*who, f.mean, f.sd, f.runs, *printed, f.difference, f.why_not]
        writer.writerow(["" if value is None or value != value else value for value in told])
    return out.getvalue()


def write(found: Reproduction, command: str) -> None:
    """result.csv and result.md into the recipe's folder."""
    folder: Path = found.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "result.csv", csv_text(found))
    write_text(folder / "result.md", markdown(found, command))
