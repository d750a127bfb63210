"""A run's state on disk: plain tensors and JSON, written beside, synced and renamed; the last two are kept."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import RunError
from fedloom.round import RunState
from fedloom.stages import State

LOG = logging.getLogger("fedloom")
FORMAT = 1
KEPT = 2


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds."""

    state: RunState
    memory: Mapping[str, State]
    history: list[dict[str, Any]]
    best: dict[str, Tensor]  # the best validation weights so far: "theta" and buffers, or empty
    notes: dict[str, Any]  # plain values: what the best score was, how long there was no gain
    diagnosis: Mapping[str, Tensor] = field(default_factory=dict)  # what diagnostics remember


def save(folder: Path, saved: Saved, identity: Mapping[str, Any]) -> None:
    """Write one checkpoint; an older one stays untouched until the new one is whole."""
    from safetensors.torch import save_file

    state = saved.state
    name = f"round-{state.round:08d}"
    beside = folder / f".{name}.part"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    tensors = {"theta": state.theta, **_nest("buffers", state.buffers), **_nest("best", saved.best)}
    tensors |= _nest("diagnosis", saved.diagnosis)
    for key, values in state.stages.items():
        tensors |= _nest(f"stages/{key}", values)
    for key, values in saved.memory.items():
        tensors |= _nest(f"memory/{key}", values)
    save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, beside / "tensors.safetensors")
    manifest = {
        "format": FORMAT,
        "round": state.round,
        "work": state.work,
        "identity": dict(identity),
        "stages": list(state.stages),
        "notes": saved.notes,
        "history": saved.history,
        "sha256": _digest(beside / "tensors.safetensors"),
    }
    text = json.dumps(manifest)
    (beside / "manifest.json").write_text(
        json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()}) + "\n" + text
    )
    for path in (*beside.iterdir(), beside):
        _sync(path)
    final = folder / name
    shutil.rmtree(final, ignore_errors=True)
    beside.rename(final)
    _sync(folder)
    for old in _checkpoints(folder)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, identity: Mapping[str, Any], device: torch.device) -> Saved | None:
    """The newest whole checkpoint, or None where there is none; one that was cut off is passed over with a warning."""
    found = _checkpoints(folder)
    for path in found:
        try:
            manifest = _manifest(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            LOG.warning("checkpoint %s is damaged (%s); trying the one before it", path.name, error)
            continue
        _same_run(manifest["identity"], identity)
        return _read(path, manifest, device)
    if found:
        raise RunError(f"every checkpoint in {folder} is damaged; remove it to start afresh")
    return None


def exist(folder: Path) -> bool:
    """Are there any, whole or not?"""
    return bool(_checkpoints(folder))


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*"), reverse=True) if folder.is_dir() else []


def _manifest(path: Path) -> dict[str, Any]:
    head, _, text = (path / "manifest.json").read_text().partition("\n")
    if json.loads(head)["sha256"] != hashlib.sha256(text.encode()).hexdigest():
        raise ValueError("its manifest does not match its checksum")
    manifest: dict[str, Any] = json.loads(text)
    if manifest["format"] != FORMAT:
        raise RunError(f"{path} was written in format {manifest['format']}, but this version reads {FORMAT}")
    if manifest["sha256"] != _digest(path / "tensors.safetensors"):
        raise ValueError("its tensors do not match their checksum")
    return manifest


def _read(path: Path, manifest: Mapping[str, Any], device: torch.device) -> Saved:
    from safetensors.torch import load_file

    # Copies: where a tensor lies in memory decides in which order its numbers are added up.
    tensors = {name: tensor.clone() for name, tensor in load_file(path / "tensors.safetensors").items()}
    parts: dict[str, dict[str, State]] = {"stages": {key: {} for key in manifest["stages"]}, "memory": {}}
    buffers: State = {}
    best: State = {}
    diagnosis: State = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "buffers":
            buffers[rest] = value.to(device)
        elif kind == "best":
            best[rest] = value.to(device)
        elif kind == "diagnosis":
            diagnosis[rest] = value
        elif kind in parts:
            key, _, entry = rest.partition("/")
            parts[kind].setdefault(key, {})[entry] = value
    state = RunState(manifest["round"], manifest["work"], tensors["theta"].to(device), buffers, parts["stages"])
    return Saved(state, parts["memory"], manifest["history"], best, manifest["notes"], diagnosis)


def _same_run(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    now = json.loads(json.dumps(dict(now)))
    changed = [key for key in now if then.get(key) != now[key]]
    if changed:
        said = "; ".join(f"{key} was {_short(then.get(key))}, now {_short(now[key])}" for key in changed)
        raise RunError(f"the checkpoint belongs to another run: {said}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _nest(prefix: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
