"""Parsed data sets as plain .npy files: parsing is done once."""

import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from fedloom.data.corpus import Corpus
from fedloom.untrusted import open_plain, read_bytes

VERSION = 2  # of what the parsers make of a file; raise it when one of them changes
FACTS = "facts.json"
LONGEST_FACTS = 64 << 20  # bytes
FIELDS = [f.name for f in fields(Corpus)]
ABANDONED = 86_400.0  # seconds after which half an entry is nobody's


def cached(folder: Path, call: str, sources: Sequence[Path], parse: Callable[[], Corpus]) -> Corpus:
    """What `parse` made of these very files before, or makes now."""
    entry = folder / _key(call, sources)
    found = _read(entry)
    if found is not None:
        return found
    made = parse()
    try:
        _write(entry, made)
    except OSError as error:
        warnings.warn(f"{call} could not be kept in the cache {folder}: {error}", stacklevel=2)
    return made


def _key(call: str, sources: Sequence[Path]) -> str:
    """Other parameters, another version, or a file that was touched since: another entry."""
    stamps: list[list[str | int]] = []
    for path in sources:
        inside = [file.stat() for file in sorted(path.rglob("*"))] if path.is_dir() else []
        stamps += [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for stat in (path.stat(), *inside)]
    digest = hashlib.sha256(json.dumps([VERSION, call, stamps]).encode()).hexdigest()[:16]
    return f"{call.partition('(')[0]}-{digest}"


def _read(entry: Path) -> Corpus | None:
    try:
        facts = json.loads(read_bytes(entry / FACTS, LONGEST_FACTS))
        arrays = {name: _array(entry / f"{name}.npy") for name in FIELDS if name in facts["arrays"]}
        found = Corpus.of(arrays, dict(facts["facts"]))
        found.check()
        return found
    except (OSError, EOFError, ValueError, KeyError, TypeError, MemoryError, RecursionError):
        shutil.rmtree(entry, ignore_errors=True)  # none, cut off or of another version: parse again
        return None


def _array(path: Path) -> np.ndarray:
    with open_plain(path, links=False) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _write(entry: Path, corpus: Corpus) -> None:
    """Beside, then renamed: a reader never sees half an entry."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    for left in entry.parent.glob(".*-part"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > ABANDONED:
            shutil.rmtree(left, ignore_errors=True)
    beside = entry.with_name(f".{entry.name}-{os.getpid()}-{time.monotonic_ns()}-part")
    beside.mkdir()
    try:
        arrays = corpus.arrays()
        for name, array in arrays.items():
            np.save(beside / f"{name}.npy", array, allow_pickle=False)
        (beside / FACTS).write_text(json.dumps({"facts": corpus.facts(), "arrays": sorted(arrays)}))
        os.replace(beside, entry)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        if not (entry / FACTS).exists():  # unless another process was faster
            raise
