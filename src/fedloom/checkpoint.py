"""A run's state on disk: plain tensors and JSON, written beside, synced and renamed; the last two are kept.

    round-00001731/manifest.json         its own checksum, then everything that is no tensor
    round-00001731/tensors.safetensors   the model, buffers, stages, the best model, diagnostics
    memory/00001731-0-0.safetensors      what clients remember, as far as it changed since the checkpoint before

What clients remember may be large, so that a checkpoint writes only what changed: its manifest lists the pieces that
make up the whole, oldest first, each with its checksum; a newer piece wins. A new piece takes in the last ones as long
as they are not much larger than itself: so they stay few, and little of what they hold is out of date.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import RunError
from fedloom.local import Local
from fedloom.memory import Remembering
from fedloom.round import RunState
from fedloom.stages import State
from fedloom.untrusted import open_plain, read_bytes

LOG = logging.getLogger("fedloom")
FORMAT = 2
KEPT = 2
MEMORY = "memory"
NAME, PIECE = r"round-[0-9]{8,}", r"[0-9]{8,}-[0-9]+-[0-9]+[.]safetensors"
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
PORTION = 1 << 28  # bytes of what clients remember that are in one file, and in memory for it
LONGEST = 1 << 30  # bytes of a manifest
LARGER = 2  # a new piece takes in one before it that is at most so many times as large


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds beside what clients remember."""

    state: RunState
    history: list[dict[str, Any]]
    best: dict[str, Tensor]  # the best validation weights so far: "theta" and buffers, or empty
    notes: dict[str, Any]  # plain values: what the best score was, how long there was no gain
    diagnosis: Mapping[str, Tensor] = field(default_factory=dict)  # what diagnostics remember


@dataclass
class Piece:
    """A part of what the clients of one stage remember, in a few files."""

    key: str  # of the stage
    files: dict[str, str]  # name and checksum
    clients: set[int]  # whose values in it are the newest


class Checkpoints:
    """The checkpoints of one run, and which pieces of its clients' memory are on disk."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.identity: dict[str, Any] = json.loads(json.dumps(dict(identity)))
        self.pieces: list[Piece] = []
        self.round: int | None = None  # of the newest that is whole
        self.damaged: set[str] = set()  # checkpoints that were passed over
        self.needs: dict[str, set[str]] = {}  # by checkpoint: its files of what clients remember

    def begin(self) -> None:
        """Make the folder; one that is gone later was taken away."""
        _refuse_link(self.folder / MEMORY)
        try:
            (self.folder / MEMORY).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(self.folder, error) from None

    def save(self, saved: Saved, memory: Mapping[str, Remembering]) -> None:
        """Write one checkpoint; what is on disk stays untouched until the new one is whole."""
        from safetensors import SafetensorError

        if self.round == saved.state.round:
            return
        name = f"round-{saved.state.round:08d}"
        try:
            pieces = self._write_memory(saved.state, memory)
            self._write(name, saved, pieces)
        except (OSError, SafetensorError) as error:
            self._tidy()
            raise RunError(f"{self._unwritable(saved.state.round, error)}; {self.last_safe}") from None
        self.pieces, self.round = pieces, saved.state.round
        self.damaged.discard(name)
        self.needs[name] = {file for piece in pieces for file in piece.files}
        for stage in memory.values():
            stage.saved(saved.state.work)
        self._tidy()

    def load(self, device: torch.device) -> Saved | None:
        """The newest whole checkpoint, or None where there is none; one that is damaged is passed over with a warning.
        What clients remember is read by `remembered`.
        """
        from safetensors import SafetensorError

        found = _checkpoints(self.folder)
        _refuse_link(self.folder / MEMORY)
        for path in found:
            try:
                manifest = _manifest(path)
                pieces = [Piece(str(p["key"]), _named(p["files"]), set()) for p in manifest["memory"]]
                for name, digest in ((n, d) for piece in pieces for n, d in piece.files.items()):
                    _verify(self.folder / MEMORY / name, digest)
                saved = _read(path, manifest, device)
                then = dict(manifest["identity"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
                LOG.warning("checkpoint %s is damaged (%s); trying the one before it", path.name, _why(error))
                self.damaged.add(path.name)
                continue
            _same_run(then, self.identity)
            self.pieces, self.round = pieces, saved.state.round
            return saved
        if found:
            raise RunError(f"every checkpoint in {self.folder} is damaged; remove the folder to start afresh")
        return None

    def remembered(self, key: str) -> Iterator[State]:
        """What the clients of one stage remembered in the checkpoint that was loaded, oldest first."""
        newest: dict[int, Piece] = {}
        for piece in self.pieces:
            if piece.key != key:
                continue
            for name in piece.files:
                values = _load_file(self.folder / MEMORY / name)
                yield values
                newest |= dict.fromkeys(values["where"][:, 0].tolist(), piece)
        for client, piece in newest.items():
            piece.clients.add(client)

    def _write_memory(self, state: RunState, memory: Mapping[str, Remembering]) -> list[Piece]:
        """Put on disk what has changed; the pieces that now make up the whole."""
        pieces = [Piece(piece.key, piece.files, set(piece.clients)) for piece in self.pieces]
        for number, (key, stage) in enumerate(memory.items()):
            known = stage.known(state.work)
            fresh = stage.changed & known
            if not fresh:
                continue
            own = [piece for piece in pieces if piece.key == key]
            for piece in own:
                piece.clients -= fresh
            while own and len(own[-1].clients) <= LARGER * len(fresh):
                fresh |= own.pop().clients
            files = self._write_piece(f"{state.round:08d}-{number}", stage, sorted(fresh), state.work)
            own = [piece for piece in own if piece.clients]
            pieces = [piece for piece in pieces if piece.key != key] + [*own, Piece(key, files, fresh)]
        return pieces

    def _write_piece(self, name: str, stage: Remembering, clients: Sequence[int], w: int) -> dict[str, str]:
        from safetensors.torch import save_file

        some = max(1, PORTION // stage.row_bytes)
        files = {}
        for i in range(0, len(clients), some):
            path = self.folder / MEMORY / f"{name}-{i // some}.safetensors"
            beside = path.with_name(f".{path.name}.part")
            save_file(stage.tensors(clients[i : i + some], w), beside)
            sync(beside)
            files[path.name] = _digest(beside)
            beside.rename(path)
        return files

    def _write(self, name: str, saved: Saved, pieces: Sequence[Piece]) -> None:
        from safetensors.torch import save_file

        state = saved.state
        beside = self.folder / f".{name}.part"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        tensors = {"theta": state.theta, **_nest("buffers", state.buffers), **_nest("best", saved.best)}
        tensors |= _nest("diagnosis", saved.diagnosis)
        for key, values in state.stages.items():
            tensors |= _nest(f"stages/{key}", values)
        save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, beside / TENSORS)
        manifest = {
            "format": FORMAT,
            "round": state.round,
            "work": state.work,
            "identity": self.identity,
            "stages": list(state.stages),
            "notes": saved.notes,
            "history": saved.history,
            "sha256": _digest(beside / TENSORS),
            "memory": [{"key": piece.key, "files": piece.files} for piece in pieces],
        }
        text = json.dumps(manifest)
        own = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()})
        (beside / MANIFEST).write_text(own + "\n" + text)
        for path in (*beside.iterdir(), beside, self.folder / MEMORY):
            sync(path)
        shutil.rmtree(self.folder / name, ignore_errors=True)  # a damaged one: no whole one is written twice
        beside.rename(self.folder / name)
        sync(self.folder)

    def _tidy(self) -> None:
        """Remove what no kept checkpoint needs: older ones, damaged ones, pieces that were taken in, half a file; of
        what has a name of ours, and nothing else.
        """
        whole = [path for path in _checkpoints(self.folder) if path.name not in self.damaged]
        kept = {path.name: self.needs.get(path.name) or _needs(path) for path in whole[:KEPT]}
        self.needs = kept
        for path in self.folder.glob("*round-*"):
            if path.name not in kept and re.fullmatch(f"{NAME}|[.]{NAME}[.]part", path.name):
                shutil.rmtree(path, ignore_errors=True)
        needed = set().union(*kept.values())
        for path in (self.folder / MEMORY).glob("*"):
            if path.name not in needed and re.fullmatch(f"{PIECE}|[.]{PIECE}[.]part", path.name):
                with suppress(OSError):  # what is left over harms nobody
                    path.unlink()

    def _unwritable(self, round: int, error: Exception) -> str:
        if not self.folder.is_dir():
            return f"{self.folder} has vanished, so that round {round} can't be saved"
        reason = getattr(error, "strerror", None) or error
        return f"the checkpoint of round {round} can't be written to {self.folder}: {reason}"

    @property
    def last_safe(self) -> str:
        """What is on disk, in words."""
        if self.round is None or not self.folder.is_dir():
            return "no checkpoint is on disk"
        return f"the last checkpoint, of round {self.round}, is whole: resume from it when that is mended"


def newest(folder: Path) -> str | None:
    """The name of the newest one, whole or not; None where there is none."""
    return next((path.name for path in _checkpoints(folder)), None)


def _checkpoints(folder: Path) -> list[Path]:
    try:
        found = sorted(folder.glob("round-*"), reverse=True) if folder.is_dir() else []
        return [path for path in found if re.fullmatch(NAME, path.name) and not path.is_symlink()]
    except OSError as error:
        raise _unusable(folder, error) from None


def _refuse_link(path: Path) -> None:
    """What is written, or removed, stays in the folder."""
    if os.path.islink(path):
        raise RunError(f"{path} is a link, behind which nothing is read or written; remove it")


def _unusable(folder: Path, error: OSError) -> RunError:
    return RunError(f"checkpoints can't be kept in {folder}: {error.strerror or error}")


def _manifest(path: Path) -> dict[str, Any]:
    head, _, text = read_bytes(path / MANIFEST, LONGEST, links=False).decode("utf-8").partition("\n")
    if json.loads(head)["sha256"] != hashlib.sha256(text.encode()).hexdigest():
        raise ValueError("its manifest does not match its checksum")
    manifest: dict[str, Any] = json.loads(text)
    if manifest["format"] != FORMAT:
        raise RunError(f"{path} was written in format {manifest['format']!r}, but this version reads {FORMAT}")
    return manifest


def _read(path: Path, manifest: Mapping[str, Any], device: torch.device) -> Saved:
    _verify(path / TENSORS, manifest["sha256"])
    stages: dict[str, State] = {key: {} for key in manifest["stages"]}
    parts: dict[str, State] = {"buffers": {}, "best": {}, "diagnosis": {}}
    theta: Tensor | None = None
    for name, value in _load_file(path / TENSORS).items():
        kind, _, rest = name.partition("/")
        if kind == "theta":
            theta = value.to(device)
        elif kind == "stages":
            key, _, entry = rest.partition("/")
            stages[key][entry] = value
        else:
            parts[kind][rest] = value if kind == "diagnosis" else value.to(device)
    round, work, history, notes = (manifest[name] for name in ("round", "work", "history", "notes"))
    counts = type(round) is int and type(work) is int and 0 <= round <= work
    lines = isinstance(history, list) and all(isinstance(line, dict) for line in history) and len(history) == round
    if theta is None or not (counts and lines and isinstance(notes, dict)):
        raise ValueError("its manifest is not that of a run")
    return Saved(
        RunState(round, work, theta, parts["buffers"], stages), history, parts["best"], notes, parts["diagnosis"]
    )


def _load_file(path: Path) -> State:
    from safetensors import safe_open

    # Copies: where a tensor lies in memory decides in which order its numbers are added up.
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def _verify(path: Path, digest: str) -> None:
    if _digest(path) != digest:
        raise ValueError(f"{path.name} does not match its checksum")


def _named(files: Mapping[str, str]) -> dict[str, str]:
    """Files beside each other, and nowhere else."""
    if not all(re.fullmatch(PIECE, name) for name in files):
        raise ValueError("its manifest names other files")
    return dict(files)


def _needs(path: Path) -> set[str]:
    try:
        return {name for piece in _manifest(path)["memory"] for name in piece["files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()  # damaged: nothing can be read by it


def _same_run(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if isinstance(then.get("local"), dict):  # a setting that is newer than the checkpoint had its default
        then = {**then, "local": asdict(Local()) | then["local"]}
    changed = [_difference(key, then.get(key), now[key]) for key in now if then.get(key) != now[key]]
    if changed:
        raise RunError(f"the checkpoint belongs to another run: {'; '.join(changed)}")


def _difference(key: str, then: Any, now: Any) -> str:
    if isinstance(now, dict) and isinstance(then, dict):
        names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        return "; ".join(_difference(f"{key}.{name}", then.get(name), now.get(name)) for name in names[:3])
    if isinstance(now, str) and len(now) == 64 and " " not in now:  # a checksum says nothing to anybody
        return f"{key} differs"
    return f"{key} was {_short(then)}, now {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name}: {error.strerror or error}"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error) or type(error).__name__


def _nest(prefix: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _digest(path: Path) -> str:
    with open_plain(path, links=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Let a file or a folder reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
