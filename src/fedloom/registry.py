"""Named things that a user asks for by text: methods, partitions, data sets, models."""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar

from fedloom.errors import FedloomError, nearest
from fedloom.local import plain
from fedloom.spec import Call, show

T = TypeVar("T")
Maker = TypeVar("Maker", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered name: what makes it, its parameters, and one line about it."""

    name: str
    make: Callable[..., T]
    about: str
    paper: str

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What a user may write between the brackets; keyword-only parameters are filled in by the library."""
        found = inspect.signature(self.make).parameters.values()
        return {p.name: p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD}

    @property
    def signature(self) -> str:
        """As in `fedprox(mu=0.01)`."""
        shown = [n if p.default is p.empty else f"{n}={show(p.default)}" for n, p in self.parameters.items()]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


class Registry(Generic[T]):
    """Names to makers, with errors that help: the nearest name, the valid parameters, the expected type."""

    def __init__(self, kind: str, error: type[FedloomError]) -> None:
        self.kind = kind
        self.error = error
        self._entries: dict[str, Entry[T]] = {}

    def add(self, name: str, *, paper: str = "") -> Callable[[Maker], Maker]:
        """A decorator: what it decorates makes the thing called `name`, from its parameters."""

        def keep(make: Maker) -> Maker:
            Call(name)  # a name that the text form can't spell is refused here
            before = self._entries.get(name)
            if before is not None and _place(before.make) != _place(make):  # a notebook's cell may run again
                raise self.error(f"there is a {self.kind} called {name!r} already; choose another name")
            about = (inspect.getdoc(make) or "").partition("\n")[0]
            self._entries[name] = Entry(name, make, about, paper)
            return make

        return keep

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entries(self) -> list[Entry[T]]:
        return [self._entries[name] for name in sorted(self._entries)]

    def find(self, name: str) -> Entry[T]:
        if name not in self._entries:
            raise self.error(f"unknown {self.kind} {name!r}: {nearest(name, self._entries)}")
        return self._entries[name]

    def complete(self, call: Call) -> Call:
        """The call with its values bound to parameter names and checked against their types."""
        entry = self.find(call.name)
        parameters = entry.parameters
        if len(call.values) > len(parameters):
            raise self.error(f"{entry.signature} takes {len(parameters)} values, not {len(call.values)}")
        named = dict(zip(parameters, call.values, strict=False))
        for name, value in call.named.items():
            if name not in parameters:
                hint = nearest(name, parameters) if parameters else "it takes none"
                raise self.error(f"{self.kind} {call.name} has no parameter {name!r}: {hint}")
            if name in named:
                raise self.error(f"{call}: {name} is given twice")
            named[name] = value
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and name not in named:
                raise self.error(f"{self.kind} {call.name} needs {name}, as in {entry.signature}")
        hints = _hints(entry.make)
        return Call(call.name, named={n: self._checked(call.name, n, v, hints.get(n, Any)) for n, v in named.items()})

    def make(self, call: Call, **filled: Any) -> T:
        """Build from a completed call; `filled` are the library's own keyword arguments."""
        return self.find(call.name).make(**call.named, **filled)

    def _checked(self, call: str, name: str, value: Any, hint: Any) -> Any:
        fitted = fit_value(value, hint)
        if fitted is MISFIT and value in ("true", "false"):  # as YAML and JSON write them
            fitted = fit_value(value == "true", hint)
        if fitted is MISFIT:
            raise self.error(f"{call}({name}={show(value)}): {name} must be {describe(hint)}")
        return fitted


MISFIT = object()


def _place(make: Callable[..., Any]) -> tuple[str, str]:
    return make.__module__, make.__qualname__


@cache
def _hints(make: Callable[..., Any]) -> Mapping[str, Any]:
    return typing.get_type_hints(make.__init__ if inspect.isclass(make) else make)


def fit_value(value: Any, hint: Any) -> Any:
    """The value as the type hint wants it (an int where a float is wanted becomes one), or MISFIT."""
    value = plain(value)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, UnionType):
        fitted = (fit_value(value, choice) for choice in inner)
        return next((f for f in fitted if f is not MISFIT), MISFIT)
    if origin is typing.Literal:
        return value if value in inner and type(value) in {type(i) for i in inner} else MISFIT
    if origin is tuple:  # tuple[X, ...]: a list in text
        if not isinstance(value, list | tuple):
            return MISFIT
        items = tuple(fit_value(item, inner[0]) for item in value)
        return MISFIT if any(item is MISFIT for item in items) else items
    if hint in (None, NoneType):
        return None if value is None else MISFIT
    if isinstance(value, bool) and hint is not bool:
        return MISFIT
    if hint is float and isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return MISFIT
    return value if isinstance(value, hint) else MISFIT


def describe(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return " or ".join(describe(choice) for choice in inner)
    if origin is typing.Literal:
        return " or ".join(show(choice) for choice in inner)
    if origin is tuple:
        return f"a list, each {describe(inner[0])}"
    names = {float: "a number", int: "a whole number", str: "a text", bool: "True or False", NoneType: "None"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
