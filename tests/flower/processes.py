"""A process of Flower and all that it has started: found by a mark in the environment, which children inherit."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.flower.launch import PARENT

MARK = "FEDLOOM_TEST_FLOWER_MARK"
LAUNCH = Path(__file__).parent / "launch.py"
APPS = ("flower-superexec", "flwr-serverapp", "flwr-clientapp")  # what Flower starts by name


def wait_until(
    happened: Callable[[], bool], timeout: float, what: str, log: Callable[[], str], *, every: float = 0.05
) -> None:
    """Look again and again; a wait that is too long ends with the end of the log."""
    end = time.monotonic() + timeout
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen within {timeout:g} s; the log ends with\n{log()[-3000:]}")
        time.sleep(every)


def write_commands(folder: Path) -> None:
    """What Flower finds on the PATH for the processes that it starts: the same, through `launch.py`."""
    for name in APPS:
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{LAUNCH}" {name} "$@"\n')
        file.chmod(0o755)


class Process:
    """One `flower-superlink` or `flower-supernode` in a folder of its own, with its log, and its descendants."""

    def __init__(self, folder: Path, command: str, environment: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tmp").mkdir(exist_ok=True)
        self.folder, self.command = folder, command
        own = {"FLWR_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), MARK: str(folder)}
        self.environment = {**environment, **own, PARENT: str(os.getpid())}
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, *arguments: str) -> None:
        if self.alive:
            raise RuntimeError(f"{self.folder.name} runs already; kill or stop it first")
        command = [sys.executable, str(LAUNCH), self.command, *arguments]
        with open(self.folder / "log.txt", "ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for the test, which then cleans up
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log(self) -> str:
        file = self.folder / "log.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def processes(self, name: str = "") -> dict[int, list[str]]:
        """Every process of this one that has `name` in its command, this one too: process id -> command line."""
        return {pid: command for pid, command in marked(str(self.folder)) if not name or name in command}

    def kill(self) -> None:
        """SIGKILL, all of them: nobody says goodbye."""
        if self.process is not None:
            self.process.kill()  # first the one that would start others
            self.process.wait(10)
        end = time.monotonic() + 10
        while found := self.processes():
            if time.monotonic() > end:
                raise TimeoutError(f"processes {sorted(found)} of {self.folder.name} outlived SIGKILL for 10 s")
            for pid in found:
                kill(pid)
            time.sleep(0.01)

    def stop(self, timeout: float = 15) -> None:
        """SIGTERM, and time to say goodbye."""
        if self.process is not None:
            self.process.terminate()
            self.ended(timeout)
        self.kill()

    def ended(self, timeout: float) -> int:
        """Wait until it has ended by itself; its exit code."""
        process = self.process
        if process is None:
            raise RuntimeError(f"{self.folder.name} was never started")
        wait_until(lambda: process.poll() is not None, timeout, f"the end of {self.folder.name}", self.log)
        return process.wait()


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def marked(value: str) -> Iterator[tuple[int, list[str]]]:
    """All living processes with this mark, wherever they hang by now: SuperExec is in a session of its own."""
    wanted = f"{MARK}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name), (folder / "cmdline").read_text().split("\0")
        except OSError:  # it has ended, or is not ours
            continue
