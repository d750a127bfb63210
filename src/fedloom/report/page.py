"""One self-contained HTML page: it opens without a network and asks for nothing. page.js draws what `describe` says."""

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from fedloom.experiment.compare import Comparison
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import Run
from fedloom.report.describe import DASHES, PALETTE, describe_runs, setting_text
from fedloom.report.labels import describe_labels
from fedloom.report.table import cells, headings


def comparison_page(comparison: Comparison) -> str:
    """The page of a comparison."""
    best = max(comparison.rows, key=lambda row: -math.inf if math.isnan(row.mean) else row.mean)
    lines = []
    for i, row in enumerate(comparison.rows):
        shown = [html.escape(cell) for cell in cells(row)]
        shown[0] = f'<i class="key" data-series="{i}"></i>' + re.sub(r"([+,(])", r"\1<wbr>", shown[0])
        mark = ' class="best"' if row is best else ""
        lines.append(f"<tr{mark}>{''.join(f'<td>{cell}</td>' for cell in shown)}</tr>")
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headings(comparison))
    table = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    runs = [run for row in comparison.rows for run in row.runs]
    described = describe_runs(comparison)
    return _static_page(
        "Comparison of federated methods", comparison.config, _section("Result", table), runs, described
    )


def run_page(run: Run) -> str:
    """The page of a single run."""
    last = {k: v for k, v in run.history[-1].items() if isinstance(v, int | float)} if run.history else {}
    lines = "".join(f"<tr><td>{html.escape(name)}</td><td>{value:,.6g}</td></tr>" for name, value in last.items())
    table = _section("After the last round", lines) if last else "<p>No round has finished yet.</p>"
    return _static_page(run.config.method, run.config, table, [run], describe_runs(run))


def runs_page(title: str, runs: Sequence[Run], labels: Sequence[str] | None = None, top: str = "") -> str:
    """The page of any runs: those whose settings agree are averaged over seeds, method by method or label by label.
    `top` is HTML that stands before them.
    """
    return _static_page(title, runs[0].config if runs else None, top, runs, describe_runs(runs, labels), several=True)


def live_page(title: str) -> str:
    """The page that the server hands out: the same, but runs come as events."""
    return _page(title, "", "", {**_look(), "live": True, "runs": [], "labels": []}, connect=True)


def _static_page(
    title: str,
    config: RunConfig | None,
    table: str,
    runs: Sequence[Run],
    described: list[dict[str, Any]],
    several: bool = False,  # settings, so that the one of the first run says little
) -> str:
    # A table of its own stands for the one that page.js would make.
    start = {**_look(), "live": False, "runs": described, "labels": describe_labels(runs), "summary": not table}
    settings = ""
    if config is not None and not several:
        settings = f"<details><summary>Every setting</summary><pre>{html.escape(config.yaml())}</pre></details>"
    setting = (
        f'<p class="setting">{html.escape(setting_text(config))}</p>' if config is not None and not several else ""
    )
    return _page(title, f"{setting}{table}", settings, start, connect=False)


def _look() -> dict[str, Any]:
    return {"palette": PALETTE, "dashes": DASHES}


def _section(heading: str, table: str) -> str:
    return f'<section><h2>{html.escape(heading)}</h2><div class="wide"><table>{table}</table></div></section>'


def _page(title: str, top: str, bottom: str, start: dict[str, Any], connect: bool) -> str:
    script = _own("page.js")
    # Only these two scripts may run: text of a run that got past the escapes would still do nothing.
    allowed = " ".join(f"'sha256-{digest}'" for digest in (_digest(_plotly()), _digest(script)))
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    )
    policy += "; form-action 'none'" + ("; connect-src 'self'" if connect else "")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)} · Fedloom</title><style>{_own('page.css')}</style>"
        f"<script>{_plotly()}</script></head>"
        '<body><header><button type="button" id="theme" class="screen" aria-label="Light or dark">◐</button>'
        f'<h1>{html.escape(title)}</h1></header><main>{top}<div id="drawn"></div>{bottom}</main>'
        f'<script type="application/json" id="start">{json_in_html(start)}</script>'
        f"<script>{script}</script></body></html>"
    )


def json_in_html(value: Any) -> str:
    """JSON that can't end the script around it, nor a line of JavaScript."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    # Half a pair of surrogates, which JSON can write and UTF-8 can't.
    return text.encode("utf-8", "replace").decode()


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _own(name: str) -> str:
    return (files("fedloom.report") / name).read_text("utf-8")
