"""Somebody's Flower app in this process: its pyproject.toml, its modules while they are needed, its faults."""

import importlib
import re
import sys
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedloom.errors import ConfigError, RunError, nearest

MANIFEST = "pyproject.toml"
Value = bool | float | int | str
_PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)")  # as Flower reads them


@dataclass(frozen=True)
class Manifest:
    """What an app says of itself."""

    folder: Path
    server: str  # module:attribute
    client: str
    config: Mapping[str, Value]

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        path = folder / MANIFEST
        try:
            known = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{folder} is no Flower app: it has no {MANIFEST}") from None
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path} can't be read: {error}") from None
        app = _table(_table(_table(known, "tool"), "flwr"), "app")
        components = _table(app, "components")
        for name in ("serverapp", "clientapp"):
            if not re.fullmatch(r"[\w.]+:[\w.]+", str(components.get(name, ""))):
                raise ConfigError(f"{path}: [tool.flwr.app.components] has no {name} such as 'package.module:app'")
        config = dict(_flat(_table(app, "config"), ""))
        return cls(folder.resolve(), components["serverapp"], components["clientapp"], config)

    def check_known(self, name: str) -> None:
        """Flower takes changes of settings only that the app has."""
        if name not in self.config:
            raise ConfigError(f"the app has no setting {name!r}: {nearest(name, self.config)}")


def _table(known: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = known.get(name)
    return found if isinstance(found, dict) else {}


def _flat(config: Mapping[str, Any], before: str) -> Iterator[tuple[str, Value]]:
    """Tables in tables have names with dots."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, bool | float | int | str):
            yield f"{before}{name}", value
        else:
            raise ConfigError(f"the setting {before}{name} must be a text, a number, true or false, not {value!r}")


def read_settings(texts: Sequence[str], what: str) -> dict[str, Value]:
    """Settings as Flower's commands take them: `lr=0.1 method="fedavg"`; a word without quotes is a text, too."""
    found: dict[str, Value] = {}
    for text in texts:
        if _PAIR.sub("", text).strip():
            raise ConfigError(f"{what}: {text!r} is not of the form name=value")
        for name, value in _PAIR.findall(text):
            found |= dict(_flat({name: _value(value)}, ""))
    return found


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


@contextmanager
def load_apps(manifest: Manifest) -> Iterator[tuple[Any, Any]]:
    """The app's ServerApp and ClientApp. When this ends its modules are gone, and those that they hid are back."""
    folder = str(manifest.folder)
    own = _own_names(manifest)
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in own}
    for name in hidden:
        del sys.modules[name]
    path, no_bytecode = list(sys.path), sys.dont_write_bytecode
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True  # an app that is changed within a second would be taken from its cache
    importlib.invalidate_caches()
    try:
        yield (
            _component(manifest, manifest.server, ServerApp),
            _component(manifest, manifest.client, ClientApp),
        )
    finally:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in own or _lies_in(module, manifest.folder):
                del sys.modules[name]
        sys.modules.update(hidden)
        sys.path[:], sys.dont_write_bytecode = path, no_bytecode
        importlib.invalidate_caches()


def _own_names(manifest: Manifest) -> set[str]:
    """Modules and packages in the app's folder, and those of its components."""
    found = {reference.partition(":")[0].partition(".")[0] for reference in (manifest.server, manifest.client)}
    for entry in manifest.folder.iterdir():
        if entry.suffix == ".py" or (entry / "__init__.py").is_file():
            found.add(entry.stem)
    return found


def _lies_in(module: Any, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and folder in Path(file).parents


def _component(manifest: Manifest, reference: str, kind: type) -> Any:
    module, _, attributes = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise RunError(f"{reference} can't be imported{place(error, manifest.folder)}") from error
    for name in attributes.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"{MANIFEST} names {reference}, but {module} has no {name}")
        found = getattr(found, name)
    if not isinstance(found, kind):
        raise ConfigError(f"{reference} is a {type(found).__name__}, not a {kind.__name__}")
    return found


def place(error: BaseException, folder: Path) -> str:
    """Where in an app an error came up, and what it says: the end of a sentence."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f" in {_seen_from(folder, error.filename)}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if folder in Path(frame.filename).parents]
    if not frames:
        return f": {said}"
    last = frames[-1]
    return f" in {_seen_from(folder, last.filename)}, line {last.lineno}, in {last.name}: {said}"


def _seen_from(folder: Path, file: str) -> str:
    path = Path(file)
    return str(path.relative_to(folder)) if folder in path.parents else file
