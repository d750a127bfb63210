"""Measured beside printed: for the terminal, as Markdown and as CSV."""

import csv
import html
import io
import math
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fedloom.experiment.config import RunConfig
from fedloom.experiment.findings import Finding, Reproduction
from fedloom.experiment.folder import Run, write_text
from fedloom.report.describe import group_of
from fedloom.report.figures import write as draw
from fedloom.report.page import runs_page

HEADINGS = ["row", "method", "score", "measured", "printed", "diff.", "in sd", "runs"]  # sd: as printed
ALWAYS = {"row", "method", "score", "measured", "printed"}


def number(value: float, sd: float | None = None, sign: str = "") -> str:
    """With as many digits as papers print."""
    if math.isnan(value):
        return "-"
    digits = 2 if abs(value) < 1000 else 0
    return f"{value:{sign}.{digits}f}" + ("" if sd is None else f" ± {sd:.{digits}f}")


def grid(found: Reproduction) -> tuple[list[str], list[list[str]]]:
    """Headings, and the cells below them; without columns in which nothing stands."""
    heads = [*HEADINGS, f"less {found.recipe.relative_to}"]
    lines = [_cells(finding) for finding in found.findings()]
    told = [i for i in range(len(heads)) if heads[i] in ALWAYS or any(line[i] != "-" for line in lines)]
    return [heads[i] for i in told], [[line[i] for i in told] for line in lines]


def _cells(finding: Finding) -> list[str]:
    printed = finding.printed
    measured = number(finding.mean, finding.sd) if finding.told else finding.note or "-"
    return [
        finding.row,
        finding.label,
        finding.score,
        measured,
        "-" if printed is None else number(printed.mean, printed.sd),
        "-" if math.isnan(finding.difference) else f"{finding.difference:+.2f}",
        "-" if math.isnan(finding.deviations) else f"{finding.deviations:+.1f}",
        str(finding.runs),
        number(finding.gain, finding.gain_error, "+"),
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


def remarks(found: Reproduction) -> list[str]:
    """Whatever was not run or not measured, and why."""
    lines = [f"not run: {', '.join(whom)}: {why}" for why, whom in reasons(found).items()]
    unmeasured: dict[str, list[str]] = {}
    for finding in found.findings():
        if finding.note == "not measured" and not finding.values:  # else some runs have it
            unmeasured.setdefault(finding.score, []).append(f"{finding.row} ({finding.label})")
    for score, whom in unmeasured.items():
        text = found.recipe.scores[score].text
        lines.append(f"not measured: {', '.join(whom)}: no run has what the score {score}, {text}, reads")
    return lines


def table(found: Reproduction) -> Table:
    shown = Table(title=Text(f"{found.recipe.title}{_size(found)}", "table.title"))
    heads, lines = grid(found)
    for i, heading in enumerate(heads):
        shown.add_column(Text(heading), justify="left" if i < 3 else "right", overflow="fold")
    before = ""
    for row, *others in lines:
        shown.add_row(*map(Text, ("" if row == before else row, *others)))
        before = row
    return shown


def _size(found: Reproduction) -> str:
    return {"smoke": " (scale smoke: figures mean nothing)", "quick": " (a tenth of the rounds)"}.get(found.scale, "")


def markdown(found: Reproduction, command: str) -> str:
    recipe = found.recipe
    lines = [f"# {recipe.title} ({recipe.paper})", "", recipe.about, "", f"`{command}`", ""]
    heads, told = grid(found)
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in (heads, ["---"] * len(heads), *told))
    lines += [f"| {' | '.join(line)} |" for line in escaped]
    for remark in remarks(found):
        lines += ["", remark]
    return "\n".join(lines) + "\n"


def csv_text(found: Reproduction) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = ["recipe", "scale", "row", "label", "method", "score", "measured", "sd", "runs", "printed", "printed_sd"]
    writer.writerow([*heads, "difference", "gain", "gain_error", "note", "not_run", "values"])
    methods = {(cell.case.row, cell.case.label): cell.config.method for cell in found.cells}
    for f in found.findings():
        printed = (None, None) if f.printed is None else (f.printed.mean, f.printed.sd)
        who = [found.recipe.name, found.scale, f.row, f.label, methods[f.row, f.label], f.score]
        values = " ".join(f"{value:.6g}" for value in f.values)
        gain = (f.gain, f.gain_error)
        told = [*who, f.mean, f.sd, f.runs, *printed, f.difference, *gain, f.note, f.why_not, values]
        writer.writerow(["" if value is None or value != value else value for value in told])
    return out.getvalue()


def write(found: Reproduction, command: str, figures: bool = False) -> list[Path]:
    """result.csv, result.md and, where Plotly is installed, report.html into the recipe's folder. Returns the files."""
    folder: Path = found.folder
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"result.csv": csv_text(found), "result.md": markdown(found, command)}
    runs, labels = drawn(found)
    with suppress(ModuleNotFoundError):
        texts["report.html"] = page(found, runs, labels)
    for name, text in texts.items():
        write_text(folder / name, text)
    drawings = draw(runs, folder / "figures", labels, found.recipe.plots) if figures and runs else []
    return [*(folder / name for name in texts), *drawings]


def drawn(found: Reproduction) -> tuple[list[Run], list[str]]:
    """All runs with the labels of their methods. What a label sets for itself is no setting of its row. Rows that have
    all settings in common differ in their methods: there a label tells its row, too.
    """
    runs, rows, labels = [], [], []
    of_row: dict[str, RunConfig] = {}
    for cell in found.cells:
        for run in cell.runs:
            common, own = of_row.setdefault(cell.case.row, run.config), run.config
            config = replace(common, method=own.method, seed=own.seed, fold=own.fold, rounds=own.rounds)
            runs.append(replace(run, config=config))
            rows.append(cell.case.row)
            labels.append(cell.case.label)
    groups = Counter(group_of(config) for config in of_row.values())
    told = [groups[group_of(of_row[row])] > 1 for row in rows]
    return runs, [f"{label}, {row}" if tell else label for label, row, tell in zip(labels, rows, told, strict=True)]


def page(found: Reproduction, runs: list[Run], labels: list[str]) -> str:
    """The table and all curves as one HTML page."""
    heads, told = grid(found)
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in heads)
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in told]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    missing = "".join(f"<p>{html.escape(remark)}</p>" for remark in remarks(found))
    top = (
        f"<p>{html.escape(found.recipe.about)} ({html.escape(found.recipe.paper)})</p><section><h2>Measured beside "
        f'printed{html.escape(_size(found))}</h2><div class="wide"><table class="findings">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{missing}</section>"
    )
    return runs_page(found.recipe.title, runs, labels, top)
