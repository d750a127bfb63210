"""A method is what it puts into the stages of the round; `a + b` is the union."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from fedloom.errors import MethodError
from fedloom.registry import Entry, Registry
from fedloom.spec import Call, from_data, to_data
from fedloom.stages import (
    SINGLE,
    Aggregator,
    Client,
    Rate,
    Rescaler,
    Sampler,
    Schedule,
    Server,
    Stage,
    Update,
    Weighting,
)

Made = Stage | Sequence[Stage]
REGISTRY: Registry[Made] = Registry("method", MethodError)
S = TypeVar("S", bound=Stage)
Maker = TypeVar("Maker", bound=Callable[..., Made])


def register(name: str, *, paper: str = "") -> Callable[[Maker], Maker]:
    """Make a stage, or a function that returns stages, a method that text can name.

    A keyword-only parameter called `written` receives the names of the parameters that the user wrote.

    >>> from dataclasses import dataclass
    >>> from fedloom.stages import Client
    >>> @register("doctest-prox")
    ... @dataclass(frozen=True)
    ... class Prox(Client):
    ...     mu: float = 0.01
    >>> Method("doctest-prox(mu=1)").text
    'doctest-prox(mu=1.0)'
    """
    return REGISTRY.add(name, paper=paper)


@dataclass(frozen=True)
class Part(Generic[S]):
    """A stage in its place, with the name under which its state is kept."""

    key: str
    stage: S


@dataclass(frozen=True)
class Pipeline:
    """One stage for every question of the round."""

    sampler: Part[Sampler]
    schedule: Part[Schedule]
    clients: tuple[Part[Client], ...]
    rate: Part[Rate]
    updates: tuple[Part[Update], ...]
    aggregator: Part[Aggregator]
    rescaler: Part[Rescaler] | None
    server: Part[Server]
    weights: Weighting

    @property
    def parts(self) -> list[Part[Any]]:
        single: list[Part[Any]] = [self.sampler, self.schedule, self.rate, self.aggregator, self.server]
        return [*single, *self.clients, *self.updates, *([self.rescaler] if self.rescaler else [])]

    @property
    def stateful(self) -> bool:
        """Do clients remember anything? Then a client that is drawn twice trains once."""
        return any(part.stage.remembers for part in self.clients)


class Method:
    """A method, or a union of methods.

    >>> method = Method("fedprox(mu=0.1)") + Method("fedavgm", lr=0.5)
    >>> method.text
    'fedprox(mu=0.1)+fedavgm(lr=0.5)'
    """

    def __init__(self, text: "str | list[Any] | Method", **parameters: Any) -> None:
        load_methods()
        calls = from_data(text.data if isinstance(text, Method) else text)
        if parameters:
            if len(calls) != 1 or calls[0].named or calls[0].values:
                raise MethodError(f"parameters can be added to one bare name only, not to {text!r}")
            calls = [Call(calls[0].name, named=parameters)]
        self._calls = _union(REGISTRY.complete(call) for call in calls)
        self._filled = _fill(self._calls)
        self.remarks = _join(self._filled)

    @property
    def text(self) -> str:
        return "+".join(str(call) for call in self._calls)

    @property
    def data(self) -> list[Any]:
        """For YAML; `Method(method.data) == method`."""
        return to_data(list(self._calls))

    @property
    def fills(self) -> list[str]:
        """The stages that this method fills."""
        return list(dict.fromkeys(part.stage.kind for part in self._filled))

    def pipeline(self) -> Pipeline:
        """Every stage, the defaults included."""
        from fedloom.methods.defaults import DEFAULTS

        single = {part.stage.kind: part for part in self._filled if part.stage.kind in SINGLE}
        chosen = {kind: single.get(kind, Part(kind, stage)) for kind, stage in DEFAULTS.items()}
        equal = any(part.stage.weights == "equal" for part in self._filled)
        written: Any = single.get("weights")
        return Pipeline(
            **chosen,
            clients=tuple(p for p in self._filled if p.stage.kind == "client"),
            updates=tuple(sorted((p for p in self._filled if p.stage.kind == "update"), key=lambda p: p.stage.rank)),
            rescaler=single.get("rescaler"),
            weights=written.stage.by if written else "equal" if equal else "samples",
        )

    def __add__(self, other: "Method") -> "Method":
        if not isinstance(other, Method):
            return NotImplemented
        return Method(self.data + other.data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Method({self.text!r})"


def list_methods() -> list[Entry[Made]]:
    """Every method that can be named, in alphabetical order."""
    load_methods()
    return REGISTRY.entries()


def filled_by(entry: Entry[Made]) -> list[str]:
    """The stages that a method fills with its default parameters."""
    kind: str | None = getattr(entry.make, "kind", None)  # a stage's class, or a function that makes several
    return [kind] if kind else Method(entry.name).fills


@cache
def load_methods() -> None:
    """Import the built-in methods, then those that installed packages offer."""
    import fedloom.methods  # noqa: F401

    for point in entry_points(group="fedloom.methods"):
        try:
            point.load()
        except Exception as error:
            raise MethodError(f"the methods of {point.value!r} can't be loaded: {error}") from error


def _union(calls: Iterable[Call]) -> tuple[Call, ...]:
    union: dict[str, Call] = {}
    for call in calls:
        if union.setdefault(call.name, call) != call:
            raise MethodError(f"{union[call.name]} and {call} are the same method with different parameters")
    return tuple(union.values())


def _fill(calls: Iterable[Call]) -> list[Part[Any]]:
    parts: list[Part[Any]] = []
    taken: dict[str, Call] = {}
    for call in calls:
        for stage in _stages(call):
            if stage.kind in SINGLE:
                if stage.kind in taken:
                    raise MethodError(f"{taken[stage.kind]} and {call} both fill the {stage.kind} stage; keep one")
                taken[stage.kind] = call
            key = f"{call.name}.{stage.kind}"
            taken_already = sum(part.key.startswith(key) for part in parts)
            parts.append(Part(f"{key}{taken_already + 1}" if taken_already else key, stage))
    return parts


def _join(parts: list[Part[Any]]) -> list[str]:
    """Let every stage look at the others: refusals are raised, remarks are collected."""
    stages = {part.key: part.stage for part in parts}
    remarks = [stage.join({k: other for k, other in stages.items() if k != key}) for key, stage in stages.items()]
    return [remark for remark in remarks if remark]


def _stages(call: Call) -> Sequence[Stage]:
    asks = REGISTRY.find(call.name).make
    filled = {"written": frozenset(call.named)} if "written" in _keyword_only(asks) else {}
    made = REGISTRY.make(call, **filled)
    stages = [made] if isinstance(made, Stage) else made
    if not isinstance(stages, Sequence) or not all(isinstance(stage, Stage) for stage in stages):
        raise MethodError(f"method {call.name} must make a stage or a list of stages, not {type(made).__name__}")
    return stages


def _keyword_only(make: Callable[..., Any]) -> set[str]:
    import inspect

    return {p.name for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY}
