"""One self-contained HTML page: curves and the table. It opens without a network and asks for nothing."""

import html
import math
import statistics
from collections.abc import Sequence
from typing import Any

from fedloom.experiment.compare import Comparison
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import Run
from fedloom.report.table import cells, headings

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
NOTHING_FROM_OUTSIDE = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = """
:root { color-scheme: light dark; --ink: #1b1e28; --paper: #ffffff; --line: #d7dae2; --soft: #5c6370; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ee; --paper: #14161c; --line: #363b48; --soft: #9aa1ad; } }
body { margin: 0 auto; max-width: 1080px; padding: 24px 16px 48px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 4px; } h2 { font-size: 1.1rem; margin: 32px 0 8px; }
p.setting { color: var(--soft); margin: 0; } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
tr.best td { font-weight: 650; } i.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px;
  margin-right: 8px; } .curve { height: 420px; } details pre { overflow-x: auto; font-size: 0.85rem; }
"""
# The page's own ink and lines, so that curves are readable in light and dark.
FOLLOW_THE_PAGE = """
const tone = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function dress() {
  for (const plot of document.querySelectorAll(".plotly-graph-div")) {
    const line = tone("--line");
    Plotly.relayout(plot, { "font.color": tone("--ink"), "xaxis.gridcolor": line, "yaxis.gridcolor": line,
      "xaxis.zerolinecolor": line, "yaxis.zerolinecolor": line,
      "hoverlabel.bgcolor": tone("--paper"), "hoverlabel.font.color": tone("--ink") });
  }
}
dress();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);
"""


def comparison_page(comparison: Comparison) -> str:
    """The page of a comparison."""
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(comparison.rows))]
    best = max(comparison.rows, key=lambda row: -math.inf if math.isnan(row.mean) else row.mean)
    lines = []
    for row, colour in zip(comparison.rows, colours, strict=True):
        shown = [html.escape(cell).replace("+", "+<wbr>") for cell in cells(row)]
        shown[0] = f'<i class="key" style="background:{colour}"></i>{shown[0]}'
        mark = ' class="best"' if row is best else ""
        lines.append(f"<tr{mark}>{''.join(f'<td>{cell}</td>' for cell in shown)}</tr>")
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headings(comparison))
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    groups = [(row.method, row.runs) for row in comparison.rows]
    return _page("Comparison of federated methods", comparison.config, f"<h2>Result</h2>{table}", groups)


def run_page(run: Run) -> str:
    """The page of a single run."""
    last = {k: v for k, v in run.history[-1].items() if isinstance(v, int | float)}
    lines = "".join(f"<tr><td>{html.escape(name)}</td><td>{value:,.6g}</td></tr>" for name, value in last.items())
    table = f'<h2>After the last round</h2><div class="wide"><table>{lines}</table></div>'
    return _page(run.config.method, run.config, table, [(run.config.method, [run])])


def _page(title: str, config: RunConfig, table: str, groups: Sequence[tuple[str, list[Run]]]) -> str:
    from plotly.offline import get_plotlyjs

    metric = f"test_{config.metric}"
    plots = [
        (f"Test {config.metric}", metric, 100.0, "%"),
        ("Test loss", "test_loss", 1.0, ""),
        ("Training loss", "train_loss", 1.0, ""),
    ]
    curves = [_curve(heading, name, scale, unit, groups) for heading, name, scale, unit in plots]
    setting = (
        f"{config.setting}, model {config.model}, lr {config.lr:g}, batch {config.batch_size}, epochs {config.epochs}"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<meta http-equiv="Content-Security-Policy" content="{NOTHING_FROM_OUTSIDE}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)} · Fedloom</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f'<body><h1>{html.escape(title)}</h1><p class="setting">{html.escape(setting)}</p>{table}'
        f"{''.join(curves)}<details><summary>Every setting</summary><pre>{html.escape(config.yaml())}</pre></details>"
        f"<script>{FOLLOW_THE_PAGE}</script></body></html>"
    )


def _curve(heading: str, name: str, scale: float, unit: str, groups: Sequence[tuple[str, list[Run]]]) -> str:
    """One figure: mean over seeds against Works, with a band of one standard deviation."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (label, runs) in enumerate(groups):
        colour = COLOURS[i % len(COLOURS)]
        works, mean, deviation = _over_seeds(runs, name, scale)
        if not works:
            continue
        if any(deviation):
            upper = [m + d for m, d in zip(mean, deviation, strict=True)]
            lower = [m - d for m, d in zip(mean, deviation, strict=True)]
            edge: dict[str, Any] = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            figure.add_scatter(x=works, y=upper, legendgroup=label, **edge)
            band = f"rgba({int(colour[1:3], 16)},{int(colour[3:5], 16)},{int(colour[5:7], 16)},0.15)"
            figure.add_scatter(x=works, y=lower, fill="tonexty", fillcolor=band, legendgroup=label, **edge)
        line = {"color": colour, "width": 2}
        figure.add_scatter(x=works, y=mean, mode="lines", name=html.escape(label), line=line, legendgroup=label)
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 56, "r": 12, "t": 12, "b": 48},
        height=420,
        hovermode="x unified",
        xaxis={"title": "works"},
        yaxis={"title": unit},
        legend={"orientation": "h", "y": -0.25, "yanchor": "top"},
        showlegend=True,
    )
    drawn = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True}
    )
    return f"<h2>{html.escape(heading)}</h2>{drawn}"


def _over_seeds(runs: list[Run], name: str, scale: float) -> tuple[list[float], list[float], list[float]]:
    """Works, mean and standard deviation, at the rounds where every seed has a value."""
    works, mean, deviation = [], [], []
    for rows in zip(*(run.history for run in runs), strict=False):
        values = [row.get(name) for row in rows]
        if any(value is None for value in values):
            continue
        scaled = [scale * value for value in values if value is not None]
        works.append(float(rows[0]["works"]))
        mean.append(statistics.fmean(scaled))
        deviation.append(statistics.stdev(scaled) if len(scaled) > 1 else 0.0)
    return works, mean, deviation
