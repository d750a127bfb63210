"""The report in a real browser: everything is drawn, nothing is asked of any host, hostile text stays text."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedloom.experiment.compare import Comparison
from fedloom.experiment.folder import Run
from fedloom.experiment.recipe import read_recipe
from fedloom.experiment.reproduce import reproduce
from fedloom.report import curves, reproduction
from fedloom.report.describe import describe_runs
from fedloom.report.page import comparison_page, json_in_html, run_page, runs_page
from fedloom.report.table import csv_text, size, spread
from tests.report.conftest import METHODS, Tab, opened

Visit = Callable[..., Tab]
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u2028'\"&"


@pytest.fixture(scope="module")
def address(rich_comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(comparison_page(rich_comparison), tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def tab(address: str, browser: Any) -> Iterator[Tab]:
    """Opened once: it takes seconds. Each test chooses what it looks at."""
    with opened(browser, address) as found:
        found.page.wait_for_selector("#traffic path.js-line")
        yield found


def saved(page: str, folder: Path) -> str:
    (folder / "page.html").write_text(page)
    return (folder / "page.html").as_uri()


def test_every_section_is_drawn(address: str, tab: Tab) -> None:
    assert tab.drawn("curves") == 4 * 2  # a curve per method in each figure
    assert tab.drawn("tensors") == 2 + 1  # two tensors and the model
    assert tab.page.locator("#scatter path.point").count() == 2 * 2 * 8  # a point per method, seed and round
    assert "(r = " in tab.page.locator("#scatter .legend").inner_text()
    assert tab.drawn("similarity") == tab.drawn("labels") == 1
    assert tab.drawn("fairness") == 2 + 1  # scores of both methods, gains of the second
    assert tab.drawn("traffic") == 2
    assert tab.page.locator(".bars tr").count() == 2
    assert tab.page.locator("main table").first.inner_text().count("fedadam") == 1
    assert tab.asked == [address]


def test_a_request_would_be_seen(visit: Visit, tmp_path: Path) -> None:
    tab = visit(saved("<img src='http://reports.invalid/x.png'>", tmp_path), harmless="ERR_")
    tab.page.wait_for_timeout(100)
    assert "http://reports.invalid/x.png" in tab.asked


def test_lists_choose_what_is_drawn(tab: Tab) -> None:
    page = tab.page
    metrics = page.locator("#curves figcaption select")
    options = metrics.locator("option").all_inner_texts()
    assert {"theta_norm", "gsi.model", "fairness.min", "between_test_accuracy", "local_steps"} <= set(options)
    metrics.select_option(label="between_test_accuracy")
    last = page.locator("#curves .plot").last
    xs = last.evaluate("div => div.data.filter(t => t.name)[0].x")
    assert xs[:3] == pytest.approx([1 / 3, 2 / 3, 4 / 3], abs=1e-5)  # two values between any two aggregations
    page.locator("#curves .controls select").select_option("uplink_bytes")
    assert page.locator("#curves .plot").first.evaluate("div => div.layout.xaxis.title.text") == "uplink"
    page.locator("#tensors .controls select").first.select_option(index=2)  # the first run with FedGLAD
    page.locator("#tensors .controls select").last.select_option("fedglad.scale")
    upper = page.locator("#tensors .plot").evaluate("div => div.data.at(-1).y")
    assert upper == pytest.approx([1 + 0.05 * t for t in range(8)])
    slider = page.locator("#similarity input[type=range]")
    slider.evaluate("s => { s.value = 1; s.dispatchEvent(new Event('input')); }")
    assert page.locator("#similarity output").inner_text().strip() == "8"
    assert page.locator("#similarity .plot").evaluate("div => div.data[0].z[0][1]") == pytest.approx(0.8)


def test_a_gap_is_where_a_number_is_missing(tab: Tab) -> None:
    """theta_norm was not finite in round 5; the test loss was measured in every second round only."""
    page = tab.page
    page.locator("#curves .controls select").select_option("works")
    page.locator("#curves figcaption select").select_option("rounds|theta_norm")
    norms = page.locator("#curves .plot").last.evaluate("div => div.data.filter(t => t.name)[0].y")
    assert [i for i, value in enumerate(norms) if value is None] == [4]
    losses = page.locator("#curves .plot").nth(1).evaluate("div => div.data.filter(t => t.name)[0]")
    assert losses["x"] == [2, 4, 6, 8]
    assert None not in losses["y"]


def test_the_legend_hides_a_method(tab: Tab) -> None:
    tab.page.locator("#curves figcaption select").select_option("rounds|gsi.model")
    first = tab.page.locator("#curves .legend button").first
    first.click()
    assert tab.drawn("curves") == 4
    assert first.get_attribute("aria-pressed") == "false"
    first.click()
    assert tab.drawn("curves") == 8


GROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 22, 28)"


def test_light_and_dark(tab: Tab) -> None:
    page = tab.page
    assert page.evaluate(GROUND) == LIGHT
    page.click("#theme")
    assert page.evaluate(GROUND) == DARK
    assert page.locator("#curves .plot").first.evaluate("div => div.layout.font.color") == "#e6e8ee"
    page.click("#theme")
    assert page.evaluate(GROUND) == LIGHT


def test_prints_in_light_without_buttons(address: str, visit: Visit) -> None:
    page = visit(address, dark=True).page
    page.wait_for_selector("#traffic path.js-line")
    assert page.evaluate(GROUND) == DARK  # as the system has it
    pdf = page.pdf(format="A4")
    assert pdf[:5] == b"%PDF-"
    assert page.locator("html").get_attribute("data-theme") is None  # as before
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(GROUND) == LIGHT
    assert not page.locator("#theme").is_visible()
    assert not page.locator("#curves .controls").is_visible()
    widths = page.locator(".plot:visible").evaluate_all("divs => divs.map(div => div.layout.width)")
    assert max(widths) <= 640  # an A4 sheet holds that


def test_hostile_and_long_texts_on_a_phone(rich_comparison: Comparison, visit: Visit, tmp_path: Path) -> None:
    rows = []
    for i, row in enumerate(rich_comparison.rows):
        runs = []
        for run in row.runs:
            history = [{**line, HOSTILE[:60]: 1.0, "x</script>": 2.0, "__proto__": 3.0} for line in run.history]
            runs.append(Run(run.folder, replace(run.config, data=HOSTILE, partition=HOSTILE), history))
        rows.append(replace(row, runs=runs, method=f"{HOSTILE}{'+2dlrd(window=10)' * 20}{i}"))
    text = comparison_page(replace(rich_comparison, rows=rows))
    assert text.count("</script>") == 3  # Plotly, the description, ours
    tab = visit(saved(text, tmp_path), width=390)
    page = tab.page
    page.locator("#runs > summary").click()
    page.wait_for_selector("#traffic path.js-line")
    assert page.title() == "Comparison of federated methods · Fedloom"
    assert page.locator("img").count() == 0
    assert page.locator("#curves .legend button").first.inner_text().startswith("</script><script>")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    # and no text of the page is cut by its edge
    cut = """[...document.querySelectorAll('main *')].filter(e => !e.closest('.wide, .plot, select, .boxes')
        && e.getBoundingClientRect().right > 391).map(e => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(cut) == []


def test_a_plain_run(comparison: Comparison, visit: Visit, tmp_path: Path) -> None:
    """Sections without data are left out; a script that got into the page would not run."""
    text = run_page(comparison.rows[0].runs[0]).replace("<main>", "<main><script>document.title = 'owned'</script>")
    tab = visit(saved(text, tmp_path), harmless="Content Security Policy")
    tab.page.wait_for_selector("#curves path.js-line")
    shown = [s for s in ("tensors", "scatter", "similarity", "fairness") if tab.page.locator(f"#{s}").is_visible()]
    assert shown == []
    assert tab.page.title() == "fedavg · Fedloom"
    assert any("Content Security Policy" in error for error in tab.errors)


def test_runs_are_chosen(rich_comparison: Comparison, visit: Visit, tmp_path: Path) -> None:
    runs = [run for row in rich_comparison.rows for run in row.runs]
    runs.append(replace(runs[0], config=replace(runs[0].config, lr=0.5)))
    page = visit(saved(runs_page("Some runs", runs), tmp_path)).page
    page.locator("#runs > summary").click()

    def shown() -> list[Any]:
        return list(page.evaluate("fedloom.shownRuns().map(run => [run.method, run.seed, run.settings.lr])"))

    assert len(shown()) == 4  # one setting at a time
    page.locator("#runs").get_by_label("setting").select_option("")
    assert len(shown()) == 5
    assert "[B]" in page.locator("#curves .legend").inner_text()
    page.fill("input[type=search]", "fedadam seed-1")
    assert shown() == [[METHODS[1], 1, "0.1"]]
    page.fill("input[type=search]", "")
    page.locator("fieldset", has_text=re.compile("^seed")).locator("label", has_text="1").click()
    assert {seed for _, seed, _ in shown()} == {0}


def test_browser_and_figures_agree(rich_comparison: Comparison, tab: Tab) -> None:
    """page.js averages what a reader chose, curves.py what a paper shows: the same numbers."""
    page = tab.page
    groups = curves.grouped(describe_runs(rich_comparison))
    for i, group in enumerate(groups):
        runs = f"fedloom.seriesOf(fedloom.shownRuns())[{i}].runs"
        for key, part in (("test_accuracy", "rounds"), ("theta_norm", "rounds"), ("between_test_accuracy", "between")):
            for x in ("works", "traffic", "seconds"):
                ours = curves.over_seeds(group.runs, key, x, part)
                theirs = page.evaluate(f"fedloom.overSeeds({runs}, '{key}', '{x}', '{part}')")
                for name in ("x", "mean", "deviation"):
                    there = np.array(theirs[name], dtype=float)  # None is nan
                    np.testing.assert_allclose(there, getattr(ours, name), rtol=1e-12, atol=1e-15)
        points = curves.pairs(group.runs, "labels.similarity", "gsi.model")
        r = page.evaluate(f"fedloom.correlation(fedloom.pairs({runs}, 'labels.similarity', 'gsi.model'))")
        assert r == pytest.approx(curves.correlation(points))
        gained = page.evaluate(f"fedloom.gains({runs}, fedloom.seriesOf(fedloom.shownRuns())[0].runs)")
        assert gained == pytest.approx(curves.gains(group.runs, groups[0].runs))
        share, scores = curves.quantiles(curves.all_scores(group.runs))
        found = page.evaluate(f"fedloom.quantiles(fedloom.allScores({runs}))")
        assert found["x"] == pytest.approx(share)
        assert found["y"] == pytest.approx(scores)


def test_json_in_html() -> None:
    text = json_in_html({"a": "</script><!--\u2028\u2029&\ud800"})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text)["a"] == "</script><!--\u2028\u2029&?"


def test_a_run_without_a_round(comparison: Comparison) -> None:
    run = replace(comparison.rows[0].runs[0], history=[])
    assert "No round has finished yet." in run_page(run)
    assert "<title>none" in runs_page("none", [])


def test_numbers_of_the_table(comparison: Comparison) -> None:
    row = comparison.rows[0]
    a, b = (run.history[-1]["test_accuracy"] for run in row.runs)
    assert row.mean == pytest.approx((a + b) / 2)
    assert row.deviation == pytest.approx(abs(a - b) / 2**0.5)
    assert spread(row.finals) == f"{100 * row.mean:.2f} ± {100 * abs(a - b) / 2**0.5:.2f}"
    goal = comparison.target
    told = [[line for line in run.history if "test_accuracy" in line] for run in row.runs]
    reached = [next(line["works"] for line in lines if line["test_accuracy"] >= goal) for lines in told]
    assert row.works_to_target == pytest.approx(sum(reached) / 2)
    assert csv_text(comparison).splitlines()[1].split(",")[:3] == ["fedavg", "0", str(a)]
    assert [size(1), size(999), size(1234), size(5.67e9), size(1e15)] == [
        "1 B",
        "999 B",
        "1.2 kB",
        "5.7 GB",
        "1000.0 TB",
    ]


RECIPE = """\
title: Two & <rows>
paper: nobody
about: Digits; <b>bold</b> is a text here.
seeds: 2
scores: {accuracy: last(test_accuracy)}
settings: {data: digits, clients: 8, per_round: 3, model: logistic, rounds: 4}
methods:
  Plain: fedavg
  Slow: {method: radfed(redistributions=2), settings: {eval_every: 1}}
  Never: fixed(cohorts=[[99]])
rows:
  even: {settings: {partition: iid, eval_every: 2}, printed: {Plain: 50 ± 1}}
  skewed: {settings: {partition: classes(per_client=2), eval_every: 2}}
"""


@pytest.mark.long
def test_the_page_of_a_recipe(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(RECIPE)
    recipe = read_recipe(tmp_path / "two.yaml")
    found = reproduce(recipe, tmp_path / "out", console=Console(quiet=True))
    written = reproduction.write(found, "fedloom reproduce two.yaml", figures=True)
    names = {path.name for path in written}
    assert {"result.csv", "result.md", "report.html", "test_accuracy.png", "test_accuracy.svg"} <= names
    page = found.folder / "report.html"
    assert "<b>bold</b>" not in page.read_text()
    with opened(browser, page.as_uri()) as tab:
        tab.page.wait_for_selector("path.js-line", state="attached")
        text = tab.page.inner_text("body")
        assert "not run: even (Never), skewed (Never): fixed: there is no client 99" in text
        assert "50.00 ± 1.00" in text
        # What a label sets for itself does not keep it from standing beside the others of its row.
        legends = tab.page.locator(".legend").first.inner_text()
        assert "Plain" in legends
        assert "Slow" in legends
    assert [url for url in tab.asked if not url.startswith(("file:", "data:", "blob:"))] == []
