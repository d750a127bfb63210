"""`fedloom flower init`: a Flower app that serves a method, as a folder of files to read, change and deploy.

The files are those of `template`, with the user's choices in them; what could not be trained is refused before any of
them is written.
"""

import json
import keyword
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from fedloom import __version__
from fedloom.errors import ConfigError, RunError
from fedloom.experiment.config import RunConfig
from fedloom.experiment.run import load_data, make_training
from fedloom.flower import readme
from fedloom.flower.sites import Sites, find_sites
from fedloom.simulation import cohort_size

LONGEST_NAME = 32  # Flower's limit
LINE = 32  # where comments begin


def write_app(folder: Path, written: Mapping[str, Any], publisher: str = "my-organisation") -> Path:
    """Write an app into a folder that does not exist yet; `written` are settings as `fedloom run` has them."""
    name = _checked_name(folder)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", publisher):
        raise ConfigError(f"--publisher {publisher!r}: letters, digits and hyphens")
    config, sites = _checked(written, folder)
    package = name.replace("-", "_").lower()
    known = {
        "name": name,
        "package": package,
        "version": __version__,
        "publisher": publisher,
        "description": f"{config.model} by {config.method}".replace('"', "'"),
        "config": _settings(config, name),
        **readme.words(name, config, sites),
    }
    app = {
        "pyproject.toml": _filled("pyproject.toml.in", known),
        "README.md": _filled("README.md.in", known),
        ".gitignore": _text("gitignore.in"),
        "certificates.py": _text("certificates.py"),
        f"{package}/task.py": _task(config, sites),
        **{f"{package}/{same}": _text(same) for same in ("__init__.py", "server_app.py", "client_app.py")},
    }
    _write(folder, app)
    return folder


def _checked_name(folder: Path) -> str:
    name = folder.name
    package = name.replace("-", "_").lower()
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name) or len(name) > LONGEST_NAME or keyword.iskeyword(package):
        raise ConfigError(
            f"{name!r} can't be the name of a Flower app: a letter, then letters, digits and hyphens, at most "
            f"{LONGEST_NAME}, and no word of Python's"
        )
    if folder.exists() or folder.is_symlink():
        raise RunError(f"{folder} exists already; choose another name, or remove it")
    if not folder.absolute().parent.is_dir():
        raise RunError(f"{folder.parent} is no folder")
    if find_spec(package) is not None:
        raise ConfigError(f"{name!r} would hide the Python module {package}; choose another name")
    return name


def _checked(written: Mapping[str, Any], app: Path) -> tuple[RunConfig, Sites | None]:
    """Settings with which a run would start, and the example of users' own data if there is one."""
    plain = {name: value for name, value in written.items() if name != "data"}
    config = RunConfig(per_round=1.0).change(plain)
    sites = find_sites(str(written["data"]), config, app) if "data" in written else None
    if sites is not None:
        config = config.change({"data": str(sites.call), "partition": "natural", "clients": len(sites.names)})
    elif "data" in written:
        config = config.change({"data": written["data"]})
    config = config.settled()
    if config.batch_size is None:
        raise ConfigError("batch_size: Flower's settings can't say none; write a number of samples")
    federation = load_data(**config.dealing)
    config = replace(config, clients=len(federation))
    if config.per_round is None:
        config = replace(config, per_round=cohort_size(None, len(federation)))
    make_training(replace(config, engine="loop", device="cpu"), federation)
    return config, sites


def _settings(config: RunConfig, name: str) -> str:
    """The lines of [tool.flwr.app.config]."""
    lines: list[tuple[str, Any, str]] = [
        ("method", config.method, "`fedloom methods` lists them"),
        ("clients", config.clients, "nodes that the run waits for, and keeps to"),
        ("clients-per-round", config.per_round, "a count, or a fraction"),
        ("rounds", config.rounds, "in all"),
        ("epochs", config.epochs, "passes over a client's data in a round"),
        ("batch-size", config.batch_size, "samples in a local step"),
        ("lr", config.lr, "local learning rate"),
        ("momentum", config.momentum, "local"),
        ("weight-decay", config.weight_decay, "local"),
        ("optimizer", config.optimizer, "local: sgd, adam or adamw"),
        ("metric", config.metric, "accuracy, f1 or auc"),
        ("eval-every", config.eval_every, "rounds between evaluations at the server"),
        ("evaluate-clients", False, "let clients with test data of their own score the model, too"),
        ("seed", config.seed, "of everything that is random"),
        ("folder", f"runs/{name}", "for the run; seen from where the SuperLink was started"),
        ("resume", True, "go on with what the folder holds"),
        ("enrol-timeout", 600.0, "seconds to wait for the clients before the first round"),
        ("round-timeout", 3600.0, "seconds to wait for a client in a round; then it goes on without"),
        ("min-replies", 1, "fewer good replies in a round end the run, which can be resumed"),
        ("device", "auto", "of the server: auto, cpu or cuda"),
    ]
    written = [(f"{key} = {_toml(value)}", comment) for key, value, comment in lines]
    return "\n".join(f"{line:<{LINE}}  # {comment}" for line, comment in written)


def _toml(value: Any) -> str:
    """Texts, whole numbers and truth values are written in TOML as in JSON."""
    return repr(value) if isinstance(value, float) else json.dumps(value)


def _task(config: RunConfig, sites: Sites | None) -> str:
    if sites is None:
        return _with_constants("task.py", {"MODEL": config.model, "DATA": config.data, "PARTITION": config.partition})
    return _with_constants(sites.template, {"MODEL": config.model, **sites.constants})


def _with_constants(template: str, values: Mapping[str, Any]) -> str:
    """A template whose `NAME = value  # comment` lines say something else."""
    text = _text(template)
    for name, value in values.items():
        shown = _python(value)
        text, found = re.subn(
            rf"^({name}(?:: [^=]+)?) = .*?(  #.*)?$",
            lambda line, shown=shown: f"{line[1]} = {shown}{line[2] or ''}",  # type: ignore[misc]
            text,
            flags=re.MULTILINE,
        )
        if found != 1:
            raise AssertionError(f"{template} has {found} lines that begin with {name} =")
    return text


def _python(value: Any) -> str:
    """A literal, with texts in double quotes."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, dict):
        return "{" + "".join(f"\n    {_python(key)}: {_python(one)}," for key, one in value.items()) + "\n}"
    return repr(value)


def _text(name: str) -> str:
    return files("fedloom.flower").joinpath("template", name).read_text(encoding="utf-8")


def _filled(name: str, words: Mapping[str, Any]) -> str:
    return Template(_text(name)).substitute(words)


def _write(folder: Path, app: Mapping[str, str]) -> None:
    """All files or none: they are written beside and renamed."""
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        for name, text in app.items():
            file = beside / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        beside.chmod(0o755)
        os.rename(beside, folder)
    except OSError as error:
        raise RunError(f"{folder} can't be written: {error.strerror}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
