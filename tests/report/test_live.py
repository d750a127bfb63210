"""The live page as a user meets it: a real server, a real browser, a real run that trains meanwhile."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedloom.cli import main
from tests.report.conftest import Tab
from tests.report.test_watch import append, line, make_run

pytest.importorskip("uvicorn", reason="needs the extra ui")
pytest.importorskip("starlette", reason="needs the extra ui")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
COMMAND = [sys.executable, "-c", "from fedloom.cli import main; main()"]


@dataclass
class Served:
    """A server with its folder."""

    folder: Path
    process: subprocess.Popen[str]
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(self, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, Any]:
        """A request as it stands: no client tidies the path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.putrequest(method, path, skip_host=host is not None)
        if host:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        found = answer.status, answer.read(200).decode(errors="replace"), answer.headers
        connection.close()
        return found

    def events(self) -> Iterator[tuple[str, Any]]:
        """What a page is told."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            kind = ""
            for text in connection.makefile("r", encoding="utf-8"):
                if text.startswith("event: "):
                    kind = text[7:].strip()
                if text.startswith("data: "):
                    yield kind, json.loads(text[6:])


def serve(folder: Path) -> Served:
    command = [*COMMAND, "ui", str(folder), "--port", "0"]
    process = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
    assert found, f"{said} {process.communicate(timeout=10)}"
    return Served(folder, process, int(found[1]))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        make_run(folder / "first" / f"seed-{seed}", method="fedprox(mu=0.1)", seed=seed, partition="iid", clients=20)
    make_run(folder.parent / "outside" / "secret", method="scaffold")
    (folder / "link").symlink_to(folder.parent / "outside")
    found = serve(folder)
    yield found
    if found.process.poll() is None:
        found.process.send_signal(signal.SIGINT)
        found.process.wait(timeout=5)


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/first/seed-0/config.yaml",
        "/events/../first/seed-0/metrics.jsonl",
        "/link/secret/config.yaml",
        "/?file=/etc/passwd&run=../secret",
        "file:///etc/passwd",
        "/events/",
    ],
)
def test_no_file_is_served(served: Served, path: str) -> None:
    status, text, _ = served.ask(path)
    assert (status, text[:15]) in ((404, "Not Found"), (200, "<!doctype html>"))
    assert status == 404 or path.startswith("/?")


@pytest.mark.parametrize("verb", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_only_get(served: Served, verb: str) -> None:
    assert served.ask("/", verb)[0] == served.ask("/events", verb)[0] == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "[::2]", "", " "]
)
def test_other_names_are_refused(served: Served, host: str) -> None:
    """Else a web site whose name points to 127.0.0.1 could read the runs."""
    assert served.ask("/", host=host or " ")[0] in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8765", "127.0.0.1:1", "[::1]", "[::1]:80"])
def test_own_names_are_answered(served: Served, host: str) -> None:
    status, _, headers = served.ask("/", host=host)
    assert status == 200
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert "Access-Control-Allow-Origin" not in headers


def test_pages_are_told_everything_and_then_what_changed(served: Served) -> None:
    one, two = served.events(), served.events()
    for page in (one, two):
        kind, told = next(page)
        assert kind == "snapshot"
        assert [run["id"] for run in told["runs"]] == ["first/seed-0", "first/seed-1"]
    append(served.folder / "first/seed-0/metrics.jsonl", line(4).encode())
    for page in (one, two):
        grown = next(told["grown"] for kind, told in page if told["grown"])
        assert grown[0]["parts"]["rounds"]["columns"]["round"] == [4]
        page.close()  # type: ignore[attr-defined]
    (served.folder / "bad").mkdir()
    (served.folder / "bad/config.yaml").write_text("<script>: [")
    (served.folder / "bad/metrics.jsonl").touch()


def until(page: Any, condition: str, seconds: float = 30) -> None:
    """Playwright's own way to wait would evaluate text in the page, which our policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(100)


def test_a_run_appears_and_grows_while_the_page_is_open(served: Served, visit: Callable[..., Tab]) -> None:
    tab = visit(served.address)
    page = tab.page
    page.wait_for_selector("#curves path.js-line")
    assert page.locator("#curves .legend button").all_inner_texts() == ["fedprox(mu=0.1)"]
    page.wait_for_selector(".broken li")
    command = [*COMMAND, "run", "--method", "fedavg", "--partition", "iid", "--rounds", "4000", "--model", "logistic"]
    command += ["--per-round", "4", "--out", str(served.folder / "new")]
    training = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(page, "fedloom.state.runs.has('new')")
        page.locator("#runs").get_by_label("setting").select_option("")
        until(page, "document.querySelectorAll('#curves .legend button').length === 2")
        curve = "document.querySelector('#curves .plot').data.find(t => t.name?.startsWith('fedavg'))"
        until(page, f"{curve}?.x.length > 1")
        before = page.evaluate(f"{curve}.x.at(-1)")
        until(page, f"{curve}.x.at(-1) > {before}")
        assert re.search(r"new \(round \d+ of 4000\)", page.locator("#runs").inner_text())
    finally:
        training.kill()
        training.wait(timeout=20)
    page.fill("input[type=search]", "fedprox")
    assert page.evaluate("fedloom.shownRuns().map(run => run.id)") == ["first/seed-0", "first/seed-1"]
    page.fill("input[type=search]", "")
    page.locator("fieldset", has_text=re.compile("^seed")).locator("label", has_text="1").click()
    assert page.evaluate("fedloom.shownRuns().map(run => run.id)") == ["first/seed-0", "new"]
    assert {address.split("/events")[0].rstrip("/") for address in tab.asked} == {served.address.rstrip("/")}
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_the_end(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Last in this file: Ctrl-C ends the server although pages are open. Before that, its port is taken."""
    monkeypatch.setattr(sys, "argv", ["fedloom", "ui", str(served.folder), "--port", str(served.port)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = f"fedloom: port {served.port} of 127.0.0.1 is in use; choose another --port\n"
    assert capsys.readouterr().err == said
    pages = [served.events() for _ in range(3)]
    for page in pages:
        assert next(page)[0] == "snapshot"
    began = time.monotonic()
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(timeout=5) == 0
    assert time.monotonic() - began < 2
    assert all(kind == "change" for page in pages for kind, _ in page)  # each of them ends
    assert served.process.stderr is not None
    assert served.process.stderr.read() == ""


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for arguments, said in (
        ([str(tmp_path / "file")], "is a file; name a folder of runs"),
        ([str(tmp_path), "--host", "no.such.host.invalid"], "is no address"),
        ([str(tmp_path), "--port", "99999"], "0<=x<=65535"),
    ):
        monkeypatch.setattr(sys, "argv", ["fedloom", "ui", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
