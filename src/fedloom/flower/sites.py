"""The user's own data in a Flower app: a folder with one file for each site, as an example of what each site has."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.catalogue import REGISTRY, find_dataset
from fedloom.data.corpus import Corpus
from fedloom.data.own import data_files, folder_corpus
from fedloom.errors import DataError
from fedloom.experiment.config import RunConfig
from fedloom.spec import Call


@dataclass(frozen=True)
class Sites:
    """What an app must know of them, and where the example lies, seen from the app's folder."""

    call: Call
    template: str
    constants: Mapping[str, Any]
    names: list[str]
    paths: list[str]


def find_sites(data: str, config: RunConfig, app: Path) -> Sites | None:
    """Read the example, if `data` is one: the path of a folder, or folder(path=..., label=...)."""
    call = _call(data)
    if call.name == "table":
        raise DataError(
            f"data={data}: in a federation each site has a file of its own; show one for each: folder(path='sites/')"
        )
    if call.name != "folder":
        return None
    if call.named.get("lazy") or call.named.get("client"):
        raise DataError(
            f"data={data}: a site reads its own file whole, which is that of one client; leave {_told(call)}out"
        )
    folder, label = Path(str(call.named["path"])), str(call.named.get("label", "label"))
    own, held_out = data_files(folder)
    corpus = folder_corpus(folder, label=label)
    if len(corpus.owners if corpus.owners is not None else ()) != len(own):
        raise DataError(f"{folder}: a file holds more than one client; show one file for each site")
    if config.partition not in (None, "natural") or config.clients not in (None, len(own)):
        raise DataError(f"{folder} has {len(own)} files, one for each client: leave --partition and --clients out")
    test = None if held_out is None else str((folder / "test").resolve())
    template, constants = _arrays(corpus) if not corpus.columns else _table(corpus, label)
    if any(quote in str(folder / path) for path in own for quote in "'\"\\"):
        raise DataError(f"{folder}: a path with quotes or backslashes can't be told to a node; rename it")
    paths = [str(path) if folder.is_absolute() else os.path.relpath(path, app) for path in own]
    names = [path.name.partition(".")[0] for path in own]
    if not all(re.fullmatch("[A-Za-z0-9-]+", name) for name in names):
        names = [f"node-{number}" for number in range(len(own))]
    return Sites(call, template, {**constants, "TEST": test}, names, paths)


def _call(data: str) -> Call:
    known = {entry.name for entry in REGISTRY.entries()}
    if data not in known and (os.sep in data or Path(data).is_dir()) and not re.match(r"\s*(folder|table)\s*\(", data):
        return find_dataset(str(Call("folder", named={"path": data})))
    return find_dataset(data)


def _told(call: Call) -> str:
    return "".join(f"{name} " for name in ("lazy", "client") if call.named.get(name))


def _table(corpus: Corpus, label: str) -> tuple[str, dict[str, Any]]:
    x = corpus.train_x.astype(np.float64)
    spread = np.where(x.std(0) > 0, x.std(0), 1.0)
    scales = zip(corpus.columns, x.mean(0), spread, strict=True)
    columns = {name: (_short(mean), _short(deviation)) for name, mean, deviation in scales}
    return "task_table.py", {"COLUMNS": columns, "LABEL": label, "CLASSES": _classes(corpus)}


def _arrays(corpus: Corpus) -> tuple[str, dict[str, Any]]:
    x = corpus.train_x
    kind = "uint8" if x.dtype == np.uint8 else "float32" if x.dtype.kind == "f" else "int64"
    if corpus.class_names:
        raise DataError("targets in .npz files must be numbers from 0: the names of classes differ from site to site")
    return "task_arrays.py", {"SHAPE": tuple(x.shape[1:]), "KIND": kind, "CLASSES": len(_classes(corpus))}


def _classes(corpus: Corpus) -> list[Any]:
    if corpus.class_names:
        return list(corpus.class_names)
    targets = [part for part in (corpus.train_y, corpus.test_y) if part is not None]
    if any(part.dtype.kind not in "iu" or part.ndim != 1 for part in targets):
        raise DataError("these targets are no classes; begin with a data set that has some, and change task.py")
    return list(range(1 + max(int(part.max()) for part in targets)))


def _short(number: float) -> float:
    return float(f"{number:.6g}")
