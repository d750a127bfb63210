"""YAML files of settings: plain values, and for every key the place where it stands."""

from pathlib import Path
from typing import Any

from fedloom.errors import ConfigError

Places = dict[tuple[str, ...], str]  # from the keys on the way down to the beginning of an error message


def read_yaml(path: Path) -> tuple[dict[str, Any], Places]:
    """What a file sets, and where; whatever is wrong with it is told with its line. Keys are texts, as written: 10 and
    yes too.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file {path} can't be read: {error}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        places = _places(node, str(path), ())
        values = None if node is None else yaml.SafeLoader("").construct_document(node)
    except ConfigError:
        raise
    except Exception as error:  # a hostile file may fail anywhere inside of the parser
        raise ConfigError(f"{path}{_line(error)}: {_problem(error)}") from None
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected lines of the form 'setting: value'")
    return values, places


def _places(node: Any, file: str, above: tuple[str, ...]) -> Places:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return {}
    found: Places = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            key.tag = "tag:yaml.org,2002:str"
        place, at = f"{file}, line {key.start_mark.line + 1}: ", (*above, str(key.value))
        if at in found:
            raise ConfigError(f"{place}{key.value!r} is set twice")
        found[at] = place
        found |= _places(value, file, at)
    return found


def _line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}" if mark else ""


def _problem(error: Exception) -> str:
    return str(getattr(error, "problem", None) or "this is no YAML").replace("\n", " ")
