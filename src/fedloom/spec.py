"""The text form: `name(parameter=value, ...)`, joined with `+`. Used for methods, partitions, models.

Names may begin with a digit and hold hyphens (`2dlrd`, `scaffold-m`). Values are Python literals, read by
`ast.literal_eval` and nothing else; a bare word stands for a text (`deploy=cloud`) and `inf` for infinity.
"""

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedloom.errors import FedloomError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPEN, _CLOSE = "([{", ")]}"
_LONGEST = 10_000


class SpecError(FedloomError):
    """A text that does not follow `name(parameter=value) + name`."""


@dataclass(frozen=True)
class Call:
    """One `name(value, parameter=value)`.

    >>> str(Call("fedprox", named={"mu": 0.1}))
    'fedprox(mu=0.1)'
    """

    name: str
    values: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise SpecError(f"{_brief(self.name)} is no name: letters, digits, '-' and '_', a letter or digit first")

    def __str__(self) -> str:
        shown = [show(v) for v in self.values] + [f"{n}={show(v)}" for n, v in self.named.items()]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


def parse(text: str) -> list[Call]:
    """Read `a(x=1) + b` into calls.

    >>> [str(call) for call in parse("fedprox(mu=0.1)+2dlrd")]
    ['fedprox(mu=0.1)', '2dlrd']
    """
    if not isinstance(text, str):
        raise SpecError(f"expected a text such as 'fedprox(mu=0.1)', got {type(text).__name__}")
    if len(text) > _LONGEST:
        raise SpecError(f"a text of {len(text)} characters is too long; {_LONGEST} are allowed")
    return [_call(part, text) for part in _cut(text, "+")]


def parse_one(text: str) -> Call:
    """Read exactly one call."""
    calls = parse(text)
    if len(calls) != 1:
        raise SpecError(f"{text!r}: expected one name, found {len(calls)} joined with '+'")
    return calls[0]


def _is_inf(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)


def show(value: Any) -> str:
    """A value as the text form writes it, so that reading it gives the same value."""
    if _is_inf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, list | tuple):  # inside a list only a literal is read, and 1e999 is one
        return f"[{', '.join(show(item).replace('inf', '1e999') if _is_inf(item) else show(item) for item in value)}]"
    return repr(value)


def to_data(calls: list[Call]) -> list[Any]:
    """The form for YAML: a name, or one mapping from the name to its parameters."""
    return [{c.name: {n: _plain(v) for n, v in c.named.items()}} if c.named else c.name for c in calls]


def from_data(data: Any) -> list[Call]:
    """Read the YAML form: a text, or a list of names and one-name mappings."""
    if isinstance(data, str):
        return parse(data)
    if not isinstance(data, list) or not data:
        raise SpecError(f"expected a text or a list of methods, got {_brief(data)}")
    try:
        return [call for item in data for call in _item(item)]
    except RecursionError:
        raise SpecError("a list that holds itself is no value") from None


def _item(item: Any) -> list[Call]:
    if isinstance(item, str):
        return parse(item)
    if isinstance(item, dict) and len(item) == 1:
        name, named = next(iter(item.items()))
        if named is None:
            return [Call(name)]
        if isinstance(named, dict) and all(isinstance(n, str) and _PARAMETER.fullmatch(n) for n in named):
            return [Call(name, named={n: _only_plain(value, name) for n, value in named.items()})]
    raise SpecError(f"expected a name or one 'name: {{parameter: value}}', got {_brief(item)}")


def _brief(value: Any) -> str:
    try:
        return repr(value)[:200]
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists
        return f"a {type(value).__name__}"


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _cut(text: str, separator: str) -> list[str]:
    """Split at a separator that stands outside of brackets and quotes."""
    parts, depth, quote, start, i = [], "", "", 0, 0
    while i < len(text):
        c = text[i]
        if quote:
            if c == "\\":
                i += 1
            elif c == quote:
                quote = ""
        elif c in "'\"":
            quote = c
        elif c in _OPEN:
            depth += _CLOSE[_OPEN.index(c)]
        elif c in _CLOSE:
            if not depth or depth[-1] != c:
                raise SpecError(f"{text!r}: a {c!r} closes nothing")
            depth = depth[:-1]
        elif c == separator and not depth:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    if quote or depth:
        raise SpecError(f"{text!r}: a {quote or depth[-1]!r} is missing")
    return [*parts, text[start:]]


def _call(part: str, text: str) -> Call:
    part = part.strip()
    found = _NAME.match(part)
    if not found:
        raise SpecError(f"{text!r}: expected a name {'before ' + repr(part) if part else 'on each side of +'}")
    rest = part[found.end() :].strip()
    if not rest:
        return Call(part)
    if rest[0] != "(" or rest[-1] != ")":
        raise SpecError(f"{text!r}: expected name(parameter=value, ...) at {part!r}")
    values: list[Any] = []
    named: dict[str, Any] = {}
    pieces = [piece.strip() for piece in _cut(rest[1:-1], ",")]
    if pieces[-1] == "":
        pieces.pop()
    for piece in pieces:
        name, equals, value = _assignment(piece)
        if not equals:
            if named:
                raise SpecError(f"{text!r}: the value {piece!r} stands after a named one")
            values.append(_value(piece, text))
        elif name in named:
            raise SpecError(f"{text!r}: {name} is given twice")
        else:
            named[name] = _value(value, text)
    return Call(found.group(), tuple(values), named)


def _assignment(piece: str) -> tuple[str, str, str]:
    found = re.match(rf"({_PARAMETER.pattern})\s*=", piece)
    return (found.group(1), "=", piece[found.end() :].strip()) if found else ("", "", "")


def _value(text: str, whole: str) -> Any:
    if text.lstrip("+-") == "inf" and len(text) <= 4:
        return -math.inf if text[0] == "-" else math.inf
    if _NAME.fullmatch(text) and text not in ("None", "True", "False") and not text[0].isdigit():
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise SpecError(f"{whole!r}: {text!r} is no value (a number, a text, a list, True, False, None)") from None
    return _only_plain(value, whole)


def _only_plain(value: Any, whole: str) -> Any:
    if isinstance(value, list | tuple):
        return [_only_plain(item, whole) for item in value]
    if isinstance(value, float) and math.isnan(value):
        raise SpecError(f"{whole!r}: nan is no value")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise SpecError("a whole number of more than 63 bits is no value")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SpecError(f"{whole!r}: a {type(value).__name__} is no value (a number, a text, a list, True, False, None)")
