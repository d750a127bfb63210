"""A real browser for the pages, and runs to show."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from rich.console import Console

from fedloom.experiment.compare import Comparison, compare
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import Run, write_text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
METHODS = ["fedavg", "fedadam(lr=0.02)+fedglad(gamma=0.05)"]


@dataclass
class Tab:
    """An open page, with all that went wrong and all that it asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def drawn(self, section: str) -> int:
        """How many curves and heat maps stand in a section; a band is a curve without a width."""
        found = self.page.locator(f"#{section} path.js-line, #{section} .heatmaplayer image")
        return int(found.evaluate_all("all => all.filter(one => one.style.strokeWidth !== '0px').length"))


@pytest.fixture(scope="module")  # Playwright's event loop runs until it ends, and allows no other beside it
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if CHROMIUM is None:
        pytest.skip("needs chromium (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextmanager
def opened(
    browser: Any, address: str, width: int = 1280, dark: bool = False, harmless: str = "no error"
) -> Iterator[Tab]:
    """A page that must not have complained by the time it is closed."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab = Tab(context.new_page())
    tab.page.on("console", lambda message: tab.errors.append(message.text) if message.type == "error" else None)
    tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
    tab.page.on("request", lambda request: tab.asked.append(request.url))
    tab.page.goto(address, wait_until="domcontentloaded")
    yield tab
    context.close()
    assert [error for error in tab.errors if harmless not in error] == []


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Open an address for the length of a test."""
    with ExitStack() as tabs:
        yield lambda address, **how: tabs.enter_context(opened(browser, address, **how))


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    config = RunConfig(clients=10, per_round=4, model="logistic", rounds=8, eval_every=2)
    folder = tmp_path_factory.mktemp("compare") / "c"
    return compare(config, METHODS, folder, seeds=2, target=0.2, console=Console(quiet=True))


@pytest.fixture(scope="session")
def rich_comparison(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """The same with everything that a run may measure."""
    rows = []
    for i, row in enumerate(comparison.rows):
        runs = []
        for run in row.runs:
            folder = tmp_path_factory.mktemp("rich")
            shutil.copy(run.folder / "partition.npz", folder / "partition.npz")
            write_text(folder / "tensors.json", json.dumps(["layer.weight", "layer.bias"]))
            history = [enriched(line, i, run.config.seed) for line in run.history]
            runs.append(Run(folder, run.config, history))
        rows.append(replace(row, runs=runs))
    return replace(comparison, rows=rows)


def enriched(line: dict[str, Any], method: int, seed: int) -> dict[str, Any]:
    t = line["round"]
    more: dict[str, Any] = {
        "gsi.tensor": [1 + 0.1 * t, 2 - 0.1 * t],
        "gsi.model": 1.5 + 0.1 * (t % 3) + 0.01 * seed,
        "labels.similarity": 0.9 - 0.1 * (t % 3) + 0.02 * method * (t % 2),
        "theta_norm": None if t == 5 else 3.0 + t,
        "between_test_accuracy": [0.1 * t, 0.1 * t + 0.05],
    }
    if t % 4 == 0:
        more["similarity.matrix"] = [[1.0, 0.1 * t], [0.1 * t, 1.0]]
        more["clients"] = [t, t + 1]
        scores = [0.05 * k + 0.1 * method * (k % 2) + 0.01 * seed for k in range(10)]
        more |= {"fairness.scores": scores, "fairness.mean": sum(scores) / 10, "fairness.min": min(scores)}
        more |= {"fairness.std": 0.1, "fairness.p10": 0.05}
    return {**line, **more}
