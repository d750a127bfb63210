"""YAML files of settings: plain values, and for every key the place where it stands."""

from pathlib import Path
from typing import Any

from fedloom.errors import ConfigError
from fedloom.untrusted import read_bytes

Places = dict[tuple[str, ...], str]  # from the keys on the way down to the beginning of an error message
LONGEST = 1 << 20  # bytes of a file
MOST = 50_000  # words and brackets in it
DEEPEST = 12  # lists in lists
WORD = 100_000  # characters; a whole number of more takes minutes to read


def read_yaml(path: Path, *, links: bool = True) -> tuple[dict[str, Any], Places]:
    """What a file sets, and where; whatever is wrong with it is told with its line. Keys are texts, as written: 10 and
    yes too.
    """
    import yaml

    try:
        text = read_bytes(path, LONGEST, links=links).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"the file {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file {path} can't be read: {error}") from None
    try:
        _check_shape(text, path)
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
    for key, value in values.items():
        _check_plain(value, places.get((str(key),), f"{path}: "))
    return values, places


def _check_shape(text: str, path: Path) -> None:
    """Refuse what a reader of YAML would be busy with for hours: references, which may stand for more text than fits
    into memory, brackets in brackets, and numbers of a million digits.
    """
    import yaml

    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        long = isinstance(event, yaml.ScalarEvent) and len(event.value) > WORD
        if isinstance(event, yaml.AliasEvent) or depth > DEEPEST or number > MOST or long:
            line = event.start_mark.line + 1
            raise ConfigError(
                f"{path}, line {line}: this refers to itself, or is nested or long beyond what settings are"
            )


def _check_plain(value: Any, place: str) -> None:
    """Texts, truth values, numbers of 63 bits, lists and mappings of them: no dates, bytes or sets."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_plain(key, place)
            _check_plain(inner, place)
    elif isinstance(value, list):
        for inner in value:
            _check_plain(inner, place)
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ConfigError(f"{place}a whole number of more than 63 bits is no value")
    elif isinstance(value, str) and not value.isascii() and _is_torn(value):
        raise ConfigError(f"{place}a text holds half a character (U+D800 to U+DFFF)")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{place}a {type(value).__name__} is no value (a number, a text, a list, true, false, null)")


def _is_torn(text: str) -> bool:
    return any("\ud800" <= sign <= "\udfff" for sign in text)


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
    return str(getattr(error, "problem", None) or "this is no YAML")[:200].replace("\n", " ")
