"""All runs below a folder, as they come, grow and go. What lies there may be broken or hostile: it is listed with the
reason, and the others go on.
"""

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedloom.errors import FedloomError, RunError
from fedloom.experiment.config import RunConfig, read_config
from fedloom.experiment.folder import CONFIG, METRICS, MODEL, TENSORS, read_line
from fedloom.report.describe import Described, describe_head, progress, tensor_names
from fedloom.report.series import Point, RunSeries, columns, tail
from fedloom.report.tail import Tail

DEEPEST = 12  # folders below the one that is watched
FOLDERS = 50_000  # looked into
Signature = tuple[tuple[int, int, int], ...]


class Stopped(Exception):
    """The server ends while files are read."""


class Watched:
    """One run folder: what was read of it, and what was told of it."""

    def __init__(self, folder: Path, name: str, files: Signature, stopping: threading.Event) -> None:
        self.folder, self.name, self.files, self.stopping = folder, name, files, stopping
        self.config = RunConfig().change(read_config(folder / CONFIG, links=False))
        self.head = describe_head(self.config, name, _names(folder))
        self.tail, self.series = Tail(folder / METRICS), RunSeries()
        self.lines = 0
        self.read()
        self.told: dict[str, list[Point]] = self.series.parts()
        self.state = self._state()

    def read(self) -> None:
        """Whatever is new in its history."""
        anew, lines = self.tail.read()
        if anew:
            self.series, self.lines = RunSeries(), 0
        for line in lines:
            self.lines += 1
            self.series.add(_row(line, self.lines))
            if self.stopping.is_set():
                raise Stopped

    def described(self) -> Described:
        return {**self.head, **self.state, "parts": {name: columns(points) for name, points in self.told.items()}}

    def grown(self) -> Described | None:
        """What changed since the last time."""
        self.read()
        now, state = self.series.parts(), self._state()
        tails = {name: tail(self.told[name], points) for name, points in now.items()}
        changed = {name: one for name, one in tails.items() if one is not None}
        if not changed and state == self.state:
            return None
        self.told, self.state = now, state
        return {"id": self.name, **state, "parts": changed}

    def _state(self) -> Described:
        model = _signature(self.folder / MODEL)
        changed = _signature(self.folder / METRICS)[2] / 1e9
        return {**progress(self.series, model[1] > 0), "changed": changed}


class Watch:
    """Everything below one folder. `look` finds what changed; `snapshot` is all that was found so far."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stopping = threading.Event()
        self.runs: dict[str, Watched] = {}
        self.labels: list[dict[str, Any]] = []
        self._broken: dict[str, tuple[Signature, str]] = {}

    def snapshot(self) -> dict[str, Any]:
        runs = [run.described() for run in self.runs.values()]
        return {"runs": runs, "unreadable": self.unreadable, "labels": self.labels}

    @property
    def unreadable(self) -> list[dict[str, str]]:
        return [{"id": name, "reason": reason} for name, (_, reason) in self._broken.items()]

    def look(self) -> dict[str, Any] | None:
        """What is new, what grew, what went; None if nothing did."""
        before, had = self.unreadable, set(self.runs)
        found = dict(run_folders(self.root))
        for name in [name for name in (*self.runs, *self._broken) if name not in found]:
            self._forget(name)
        change: dict[str, Any] = {"new": [], "grown": []}
        for name, folder in found.items():
            if self.stopping.is_set():
                raise Stopped
            self._look_at(name, folder, change)
        change["gone"] = sorted(had - set(self.runs))
        unreadable = self.unreadable
        if not any(change.values()) and unreadable == before:
            return None
        return {**change, "unreadable": unreadable}

    def _look_at(self, name: str, folder: Path, change: dict[str, Any]) -> None:
        run = self.runs.get(name)
        once = (_signature(folder / CONFIG), _signature(folder / TENSORS))  # else the run is another one
        all_of_it = (*once, _signature(folder / METRICS))
        if name in self._broken and self._broken[name][0] == all_of_it:
            return
        try:
            if run is not None and run.files == once:
                grown = run.grown()
                change["grown"] += [] if grown is None else [grown]
            else:
                self.runs[name] = Watched(folder, name, once, self.stopping)
                self._broken.pop(name, None)
                change["new"].append(self.runs[name].described())
        except Stopped:
            raise
        except FileNotFoundError:  # it went while we looked
            self._forget(name)
        except Exception as error:  # nothing that a folder holds may end the server
            self._forget(name)
            self._broken[name] = (all_of_it, _reason(error, folder))

    def _forget(self, name: str) -> None:
        self.runs.pop(name, None)
        self._broken.pop(name, None)


def run_folders(root: Path) -> Iterator[tuple[str, Path]]:
    """Every run folder with its name below the root, in alphabetical order. No link is followed."""
    waiting = [root]
    for _ in range(FOLDERS):
        if not waiting:
            return
        folder = waiting.pop()
        try:
            with os.scandir(folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError:
            continue
        files = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
        if {CONFIG, METRICS} <= files:
            yield folder.relative_to(root).as_posix(), folder
        elif len(folder.relative_to(root).parts) < DEEPEST:
            below = [e.path for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
            waiting += [Path(path) for path in reversed(below)]


def _signature(path: Path) -> tuple[int, int, int]:
    """Which file it is, how long, and when it was written; zeros where there is no plain file."""
    try:
        found = path.lstat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else (0, 0, 0)


def _names(folder: Path) -> list[str]:
    return tensor_names(folder) if _signature(folder / TENSORS)[1] else []


def _row(line: bytes, number: int) -> dict[str, Any]:
    try:
        return read_line(line)
    except ValueError as error:
        raise RunError(f"line {number} of {METRICS} {error}") from None


def _reason(error: Exception, folder: Path) -> str:
    if isinstance(error, FedloomError):
        said = str(error)
    elif isinstance(error, OSError):
        said = f"{error.filename}: {error.strerror}"
    else:
        said = f"{type(error).__name__}: {getattr(error, 'problem', None) or error}"
    return " ".join(said.replace(f"{folder}/", "").split())[:300]
