"""A run's folder: config, metrics, names of the tensors, model, checkpoints, partition, report."""

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedloom.checkpoint import sync
from fedloom.data.catalogue import find_dataset
from fedloom.data.lazy import is_lazy
from fedloom.data.load import load
from fedloom.errors import RunError
from fedloom.experiment.config import RunConfig, read_config
from fedloom.experiment.score import looks
from fedloom.federation import Federation
from fedloom.models import model as make_model
from fedloom.result import in_short
from fedloom.untrusted import is_plain, open_plain

if TYPE_CHECKING:
    import pandas as pd

MARK = ".fedloom"
COMPARISON = "comparison.yaml"
STUDY = "tune.yaml"
CONFIG, METRICS, MODEL, PARTITION, CHECKPOINT, TENSORS = (
    "config.yaml",
    "metrics.jsonl",
    "model.safetensors",
    "partition.npz",
    "checkpoint",
    "tensors.json",  # names of the model's parameters, in the order of metrics that have one value for each
)

COUNTS = ("round", "works", "local_steps", "uplink_bytes", "downlink_bytes", "seconds", "answered", "diverged")
LONGEST_LINE = 32 << 20  # bytes; the scores of a million clients fit


@dataclass(frozen=True, repr=False)
class Run:
    """A run folder, read back."""

    folder: Path
    config: RunConfig
    history: list[dict[str, Any]]

    def __repr__(self) -> str:
        left = "" if self.finished else f", not finished ({self.config.rounds} planned)"
        return f"Run({self.folder}: {self.config.method} on {self.config.data}, {in_short(self.history)}{left})"

    @property
    def finished(self) -> bool:
        return is_finished(self.folder)

    @property
    def kept(self) -> dict[str, Any]:
        """The line of the round whose model was kept: the last, or under patience that of the best validation score,
        which may be a look on the way to it.
        """
        if self.config.patience is None or not self.history:
            return self.history[-1] if self.history else {}
        seen = [look for line in self.history if "validation_loss" in line for look in looks(line, "validation_loss")]
        return max(seen, key=self._score, default=self.history[-1])  # the first of several

    def _score(self, line: Mapping[str, Any]) -> float:
        """What patience judges by; an undefined score is worse than any other."""
        name, loss = f"validation_{self.config.metric}", line["validation_loss"]
        score = line.get(name, loss if loss is None else -loss)
        return -math.inf if score is None else float(score)

    def frame(self) -> "pd.DataFrame":
        import pandas as pd

        return pd.DataFrame(self.history)

    def federation(self) -> Federation:
        """The data, dealt out as they were in the run; a folder that stays on disk is dealt out by its files."""
        if is_lazy(find_dataset(self.config.data)):
            return load(**self.config.dealing)
        if not is_plain(self.folder / PARTITION, links=False):
            raise RunError(f"{self.folder} holds no {PARTITION}, which says who has which samples")
        return load(**{**self.config.dealing, "partition": self.folder / PARTITION})

    def model(self) -> nn.Module:
        """The deployable model."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.folder / MODEL
        if not is_plain(path, links=False):
            raise RunError(f"{self.folder} holds no model yet: the run has not finished; continue it with --resume")
        made = make_model(self.config.model, self.federation(), self.config.seed, self.config.data_dir)
        try:
            made.load_state_dict(load_file(path))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise RunError(f"{path} can't be read: {error}") from None
        return made


class InUse(RunError):
    """Another process works in the folder."""


def is_finished(folder: Path) -> bool:
    """The model is written last, and must be whole."""
    return _told(folder) is not None


def load_run(folder: str | Path) -> Run:
    """Read a run folder, finished or not."""
    folder = Path(folder)
    if not is_plain(folder / CONFIG, links=False):
        kind = "holds a comparison; its runs are in the folders below" if is_plain(folder / COMPARISON) else ""
        kind = "holds a study; train its best.yaml with fedloom run" if is_plain(folder / STUDY) else kind
        raise RunError(f"{folder} {kind or f'is no run folder: it has no {CONFIG}'}")
    config = RunConfig().change(read_config(folder / CONFIG, links=False))
    return Run(folder, config, _read_lines(folder / METRICS))


def load_finished(folder: Path) -> Run:
    """Read a run that has finished, and refuse one that has not all of its rounds."""
    run = load_run(folder)
    if not run.history:
        raise RunError(f"{folder / METRICS} is empty although the run has finished; remove the folder to repeat it")
    played = rounds_played(folder)
    if played is not None and played != len(run.history):
        told = f"has {len(run.history)} lines, but the run played {played} rounds"
        raise RunError(f"{folder / METRICS} {told}; remove the folder to repeat it")
    return run


def _read_lines(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        with open_plain(path, links=False) as file:
            while line := file.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise RunError(f"{path} holds a line of more than {LONGEST_LINE >> 20} MB")
                try:
                    rows.append(_whole(read_line(line)))
                except ValueError:
                    if line.endswith(b"\n") or not line.isascii():
                        raise
                    break  # a run that was killed while it wrote the line
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise RunError(f"{path} can't be read: line {len(rows) + 1} {error}") from None
    return rows


def read_line(line: bytes) -> dict[str, Any]:
    """One round: names to numbers, nothing, or lists of these; what counts rounds and their cost is a finite number."""
    try:
        row = json.loads(line)
        wrong = [name for name, value in row.items() if not _measured(name, value)] if isinstance(row, dict) else []
    except (ValueError, RecursionError):
        raise ValueError("is no JSON") from None
    if not isinstance(row, dict):
        raise ValueError("is no record")
    wrong += [name for name in COUNTS if not isinstance(row.get(name, 0), int | float)]
    wrong += [name for name in COUNTS if name not in wrong and not math.isfinite(row.get(name, 0))]
    if wrong:
        raise ValueError(f"has no number for {wrong[0][:80]!r}")
    return row


def _whole(row: dict[str, Any]) -> dict[str, Any]:
    missing = next((name for name in COUNTS if name not in row), None)
    if missing is not None:
        raise ValueError(f"has no {missing!r}")
    return row


def _measured(name: str, value: Any) -> bool:
    """A number or none; what is not a score of the whole model may be a list."""
    if isinstance(value, list):
        return not name.startswith(("test_", "validation_", "train_")) and all(_measured(name, one) for one in value)
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


@contextmanager
def claim(folder: Path, overwrite: bool, resume: bool) -> Iterator[None]:
    """Take a folder for as long as a run lasts, or refuse: nothing that is there is lost unless `overwrite` says so,
    and then only in a folder that holds our mark. The mark is also the lock.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; choose another --out")
    if folder.is_dir() and any(folder.iterdir()) and not resume:
        if not overwrite:
            raise RunError(f"{folder} exists already; continue it with --resume or replace it with --overwrite")
        if not (folder / MARK).is_file():
            raise RunError(f"{folder} was not written by fedloom (it has no {MARK}), so --overwrite leaves it alone")
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_links(folder, [folder / MARK] if overwrite else folder.iterdir())
    with (folder / MARK).open("a") as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InUse(f"{folder} is in use by another fedloom; wait for it, or choose another --out") from None
        if overwrite:
            for old in folder.iterdir():
                if old.is_dir() and not old.is_symlink():
                    shutil.rmtree(old)
                elif old.name != MARK:
                    old.unlink()
        yield


def _refuse_links(folder: Path, entries: Iterable[Path]) -> None:
    """What is written into a folder stays in it, whoever made the folder."""
    for entry in entries:
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir() or not entry.exists()):
            raise RunError(
                f"{folder} holds {entry.name}, which is a link or a device: remove it, or choose another --out"
            )


def write_text(path: Path, text: str) -> None:
    """Write beside, then rename: a reader never sees half a file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise RunError(f"{path} can't be written: {error.strerror}") from None


def rounds_played(folder: Path) -> int | None:
    """How many rounds the model of a finished run has seen; None where its file does not say."""
    told = (_told(folder) or {}).get("rounds", "")
    return int(told) if re.fullmatch("[0-9]{1,18}", told) else None


def _told(folder: Path) -> dict[str, str] | None:
    """What a run's model says of itself; None where there is no whole one."""
    from safetensors import SafetensorError, safe_open

    if not is_plain(folder / MODEL, links=False):
        return None
    try:
        with safe_open(folder / MODEL, "pt") as file:
            told: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError):
        return None
    return told


def write_model(path: Path, model: nn.Module, rounds: int | None = None) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    beside = path.with_name(f".{path.name}.part")
    weights = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    try:
        save_file(weights, beside, None if rounds is None else {"rounds": str(rounds)})
        sync(beside)  # a finished run is known by this file
        os.replace(beside, path)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} can't be written: {error}") from None


def json_line(row: Mapping[str, Any]) -> str:
    """Strict JSON: what is not finite is null."""
    return json.dumps({name: _plain(value) for name, value in row.items()}, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
