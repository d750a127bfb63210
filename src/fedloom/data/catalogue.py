"""Every data set by name. Each has a file of its own in `sets/`, which registers it here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from fedloom.data.corpus import Corpus
from fedloom.data.files import Files, Remote, Source
from fedloom.errors import DataError
from fedloom.registry import Registry
from fedloom.spec import Call, parse_one

Maker = TypeVar("Maker", bound=Callable[..., Corpus])

REGISTRY: Registry[Corpus] = Registry("data set", DataError)


@dataclass(frozen=True)
class Facts:
    """What the catalogue knows of a data set before it is read."""

    samples: tuple[int, int] | None  # train and test as published; None: as the user has them
    classes: int | None
    licence: str
    plain: tuple[str, ...] = ()  # files in Fedloom's plain layout, such as mnist.npz
    published: tuple[tuple[Remote, ...], ...] = ()  # or one of these sets of the publisher's files
    how: str = ""  # how to get them
    embedded: bool = False  # needs no file
    natural: bool = False  # has clients of its own


FACTS: dict[str, Facts] = {}


def dataset(
    name: str,
    *,
    samples: tuple[int, int] | None,
    classes: int | None,
    licence: str,
    plain: Sequence[str] = (),
    published: Sequence[Sequence[Remote]] = (),
    how: str = "",
    embedded: bool = False,
    natural: bool = False,
    paper: str = "",
) -> Callable[[Maker], Maker]:
    """A decorator for a function that reads a data set: its positional parameters are the user's, in
    `emnist-letters(letters=10)`; `source` names the files that were found. The first line of its docstring is the
    line in the catalogue.
    """

    def keep(make: Maker) -> Maker:
        groups = tuple(map(tuple, published))
        FACTS[name] = Facts(samples, classes, licence, tuple(plain), groups, how, embedded, natural)
        return REGISTRY.add(name, paper=paper)(make)

    return keep


def find_dataset(text: str) -> Call:
    """The data set that a text asks for, with its parameters checked."""
    load_sets()
    return REGISTRY.complete(parse_one(text))


def read_corpus(text: str, files: Files, clients: int | None = None, seed: int = 0) -> Corpus:
    """A data set's arrays, from the cache of parsed sets where they lie there."""
    from fedloom.data.cache import cached

    call = find_dataset(text)
    facts = FACTS[call.name]
    if facts.embedded:
        return REGISTRY.make(call, source=Source(call.name, clients=clients, seed=seed))
    source = files.find(call.name, facts.plain, facts.published, facts.how)

    def parse() -> Corpus:
        files.verify(source, facts.published)
        return REGISTRY.make(call, source=replace(source, clients=clients, seed=seed))

    folders = [Path(v) for v in call.named.values() if isinstance(v, str) and Path(v).is_dir()]  # a tokenizer's
    return cached(files.cache / "parsed", str(call), [*source.paths, *folders], parse)


def load_sets() -> None:
    from fedloom.data import sets

    sets.load()
