"""What is searched, in the text form: a parameter's value may be a range or a list to choose from.

fedadam(lr=log(1e-4, 0.1))              between two numbers, evenly on a logarithmic scale
adabest(beta=uniform(0.5, 1))           between two numbers
radfed(redistributions=integer(5, 50))  a whole number, both ends included
fedprox(mu=choice(1, 0.1, 0.01))        one of these
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from fedloom.errors import ConfigError, nearest
from fedloom.experiment.config import RunConfig
from fedloom.local import Local
from fedloom.method import REGISTRY, Method, load_methods
from fedloom.spec import Call, SpecError, parse, parse_one, show

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Kind = Literal["log", "uniform", "integer", "choice"]
KINDS: tuple[Kind, ...] = ("log", "uniform", "integer", "choice")
Point = Mapping[str, Any]  # a value for each search, by name

_BEGINS = re.compile(rf"({'|'.join(KINDS)})\s*\(")
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Search:
    """One value that is searched: from where to where, or among which."""

    kind: Kind
    values: tuple[Any, ...]  # low and high, or the choices

    @classmethod
    def read(cls, text: str) -> "Search":
        """
        >>> Search.read("log(1e-4, 0.1)").values
        (0.0001, 0.1)
        """
        try:
            call = parse_one(text)
        except SpecError:
            raise ConfigError(f"{text}: a search holds plain values, such as log(1e-4, 0.1) or choice(1, 2)") from None
        if call.name not in KINDS:
            raise ConfigError(f"{text}: {call.name!r} is no search: {nearest(call.name, KINDS)}")
        if call.named:
            raise ConfigError(f"{text}: a search has no parameters with names, as in log(1e-4, 0.1) or choice(1, 2)")
        if call.name == "choice":
            return cls("choice", _choices(call.values, text))
        return _range(call.name, call.values, text)

    @property
    def size(self) -> float:
        """How many values there are; a range of numbers has infinitely many."""
        if self.kind == "choice":
            return len(self.values)
        return self.values[1] - self.values[0] + 1 if self.kind == "integer" else math.inf

    @property
    def all(self) -> Sequence[Any]:
        """Every value, where they can be counted."""
        return range(self.values[0], self.values[1] + 1) if self.kind == "integer" else self.values

    def distribution(self) -> "BaseDistribution":
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.kind == "choice":
            return CategoricalDistribution(self.values)
        low, high = self.values
        return (
            IntDistribution(low, high) if self.kind == "integer" else FloatDistribution(low, high, self.kind == "log")
        )

    def __str__(self) -> str:
        return str(Call(self.kind, self.values))


def _choices(values: tuple[Any, ...], text: str) -> tuple[Any, ...]:
    if not values:
        raise ConfigError(f"{text}: there is nothing to choose from")
    if any(isinstance(value, list) for value in values):
        raise ConfigError(f"{text}: choose among numbers, texts, True, False and None, not lists")
    twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
    if twice is not None:
        raise ConfigError(f"{text}: {show(twice)} stands there twice")
    return values


def _range(kind: Any, values: tuple[Any, ...], text: str) -> Search:
    whole = kind == "integer"
    numbers = [value for value in values if isinstance(value, int if whole else int | float)]
    if len(values) != 2 or len(numbers) != 2 or any(isinstance(value, bool) for value in values):
        raise ConfigError(f"{text}: {kind} goes between two {'whole numbers' if whole else 'numbers'}")
    low, high = values if whole else map(float, values)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{text}: {kind} goes from a lower to a higher number, both finite")
    if kind == "log" and low <= 0:
        raise ConfigError(f"{text}: a logarithmic scale begins above 0")
    return Search(kind, (low, high))


@dataclass(frozen=True)
class Template:
    """A method and local settings, some of whose values are searched."""

    calls: tuple[Call, ...]  # a searched value is a Search
    local: Mapping[str, Search]

    @classmethod
    def read(cls, method: str, local: Mapping[str, Search] | None = None) -> "Template":
        """
        >>> template = Template.read("fedprox(mu=choice(1, 0.1))+fedadam(lr=log(1e-3, 1))")
        >>> list(template.searches), template.fill({"fedprox.mu": 0.1, "fedadam.lr": 0.5}, RunConfig()).method
        (['fedprox.mu', 'fedadam.lr'], 'fedprox(mu=0.1)+fedadam(lr=0.5)')
        """
        plain, found = _cut_out(method)
        load_methods()
        calls = tuple(_named(call, found) for call in parse(plain))
        names = [call.name for call in calls]
        if len(set(names)) < len(names):
            raise ConfigError(f"{method}: {max(names, key=names.count)} stands there twice")
        return cls(calls, dict(local or {}))

    @property
    def name(self) -> str:
        """Without parameters."""
        return "+".join(call.name for call in self.calls)

    @property
    def text(self) -> str:
        return "+".join(_shown(call) for call in self.calls)

    @property
    def searches(self) -> dict[str, Search]:
        """By name: `fedadam.lr` is a method's, `lr` is that of local training."""
        own = {f"{c.name}.{n}": v for c in self.calls for n, v in c.named.items() if isinstance(v, Search)}
        return {**own, **self.local}

    @property
    def size(self) -> float:
        """How many points there are."""
        return math.prod(search.size for search in self.searches.values())

    def fill(self, point: Point, config: RunConfig) -> RunConfig:
        """The settings of a run at this point."""
        calls = [
            replace(call, named={n: point.get(f"{call.name}.{n}", v) for n, v in call.named.items()})
            for call in self.calls
        ]
        text = Method("+".join(map(str, calls))).text
        return config.change({"method": text, **{name: point[name] for name in self.local}})


def read_local(texts: Sequence[str]) -> dict[str, Search]:
    """Searched local settings, as in `lr=log(0.001, 1)`."""
    found: dict[str, Search] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError(f"--search {text}: expected setting=search, such as lr=log(0.001, 1)")
        if name not in Local.names():
            raise ConfigError(f"--search {text}: {name!r} is no local setting: {nearest(name, Local.names())}")
        if name in found:
            raise ConfigError(f"--search {text}: {name} is searched twice")
        found[name] = Search.read(value)
    return found


def _shown(call: Call) -> str:
    values = [f"{n}={v if isinstance(v, Search) else show(v)}" for n, v in call.named.items()]
    return f"{call.name}({', '.join(values)})" if values else call.name


def _named(call: Call, found: Mapping[str, Search]) -> Call:
    """The call with every value under its parameter's name, and the searches in their places."""
    parameters = REGISTRY.find(call.name).parameters
    if len(call.values) > len(parameters):
        raise ConfigError(f"{call.name} takes {len(parameters)} values, not {len(call.values)}")
    positional = dict(zip(parameters, call.values, strict=False))
    twice = next((name for name in call.named if name in positional), None)
    if twice is not None:
        raise ConfigError(f"{call.name}: {twice} is given twice")
    named = {**positional, **call.named}
    for name in named:
        if name not in parameters:
            hint = nearest(name, parameters) if parameters else "it takes none"
            raise ConfigError(f"method {call.name} has no parameter {name!r}: {hint}")
    return Call(call.name, named={n: found.get(v, v) if isinstance(v, str) else v for n, v in named.items()})


def _cut_out(text: str) -> tuple[str, dict[str, Search]]:
    """The text with a word in the place of each search, and the searches by their words."""
    found: dict[str, Search] = {}
    kept, depth, quote, i = "", 0, "", 0
    while i < len(text):
        begins = None if quote or not depth or re.match(r"[\w-]", kept[-1:]) else _BEGINS.match(text, i)
        if begins:
            end = _closed(text, begins.end())
            if not text[end:].strip():
                raise ConfigError(f"{text}: a ')' is missing")
            if depth > 1 or not re.search(r"[=(,]\s*$", kept) or not re.match(r"\s*[,)]", text[end:]):
                raise ConfigError(f"{text}: {text[i:end]} must be the whole value of a parameter")
            word = f"searched_{len(found)}"
            while word in text:
                word += "_"
            found[word] = Search.read(text[i:end])
            kept, i = kept + word, end
            continue
        quote, depth = _state(text[i], quote, depth)
        step = 2 if quote and text[i] == "\\" else 1
        kept, i = kept + text[i : i + step], i + step
    return kept, found


def _closed(text: str, start: int) -> int:
    """Behind the bracket that closes the one before `start`."""
    depth, quote, i = 1, "", start
    while i < len(text):
        quote, depth = _state(text[i], quote, depth)
        i += 2 if quote and text[i] == "\\" else 1
        if not depth:
            return i
    raise ConfigError(f"{text}: a ')' is missing")


def _state(c: str, quote: str, depth: int) -> tuple[str, int]:
    """In which quotes and how many brackets the text is behind this character."""
    if quote:
        return ("" if c == quote else quote), depth
    if c in "'\"":
        return c, depth
    return "", depth + (c in _OPEN) - (c in _CLOSE)
