"""The report in a real browser: curves are drawn, nothing is asked of any host."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from fedloom.experiment.compare import Comparison, compare
from fedloom.experiment.config import RunConfig
from fedloom.report.page import comparison_page, run_page
from fedloom.report.table import csv_text, size, spread

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    config = RunConfig(clients=10, per_round=4, model="logistic", rounds=5)
    folder = tmp_path_factory.mktemp("compare") / "c"
    return compare(config, ["fedavg", "fedadam(lr=0.02)"], folder, seeds=2, console=Console(quiet=True))


def browse(page: str, folder: Path) -> tuple[str, list[str]]:
    """The page after its scripts ran, and every address that the browser asked for."""
    assert CHROMIUM is not None
    (folder / "page.html").write_text(page)
    log = folder / "net.json"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder / 'user'}"]
    command += [f"--log-net-log={log}", "--virtual-time-budget=8000", "--enable-logging=stderr", "--dump-dom"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND"]  # the browser's own errands end here
    done = subprocess.run([*command, (folder / "page.html").as_uri()], capture_output=True, text=True, timeout=120)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert errors == []
    events = json.loads(log.read_text())["events"]
    asked = [event["params"] for event in events if "url" in event.get("params", {})]
    by_the_page = [p["url"] for p in asked if p.get("initiator", "not an origin") != "not an origin"]
    return done.stdout, [url for url in by_the_page if not url.startswith(("file:", "data:", "blob:"))]


NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")


@NEEDS_CHROMIUM
def test_a_request_would_be_seen(tmp_path: Path) -> None:
    _, asked = browse("<img src='http://reports.invalid/x.png'>", tmp_path)
    assert asked == ["http://reports.invalid/x.png"] * len(asked)
    assert asked


@NEEDS_CHROMIUM
def test_comparison_page_in_a_browser(comparison: Comparison, tmp_path: Path) -> None:
    dom, asked = browse(comparison_page(comparison), tmp_path)
    assert asked == []
    drawn = re.findall(r'<path class="js-line"[^>]*d="M[\d.]', dom)
    assert len(drawn) >= 3 * 2  # three figures, a curve per method
    assert dom.count("fedadam(lr=0.02)") >= 2


@NEEDS_CHROMIUM
def test_run_page_in_a_browser(comparison: Comparison, tmp_path: Path) -> None:
    dom, asked = browse(run_page(comparison.rows[0].runs[0]), tmp_path)
    assert asked == []
    assert len(re.findall(r'<path class="js-line"[^>]*d="M[\d.]', dom)) >= 3


def test_pages_hold_no_foreign_markup(comparison: Comparison) -> None:
    row = comparison.rows[0]
    hostile = type(row)("<script>alert(1)</script>", row.runs, row.metric, row.target)
    page = comparison_page(Comparison(comparison.folder, comparison.config, [hostile], 0.5, 2))
    assert "<script>alert(1)" not in page


def test_numbers_of_the_table(comparison: Comparison) -> None:
    row = comparison.rows[0]
    a, b = (run.history[-1]["test_accuracy"] for run in row.runs)
    assert row.mean == pytest.approx((a + b) / 2)
    assert row.deviation == pytest.approx(abs(a - b) / 2**0.5)
    assert spread(row.finals) == f"{100 * row.mean:.2f} ± {100 * abs(a - b) / 2**0.5:.2f}"
    goal = comparison.target
    reached = [next(line["works"] for line in run.history if line["test_accuracy"] >= goal) for run in row.runs]
    assert row.works_to_target == pytest.approx(sum(reached) / 2)
    assert csv_text(comparison).splitlines()[1].split(",")[:3] == ["fedavg", "0", str(a)]
    assert [size(1), size(999), size(1234), size(5.67e9), size(1e15)] == [
        "1 B",
        "999 B",
        "1.2 kB",
        "5.7 GB",
        "1000.0 TB",
    ]
