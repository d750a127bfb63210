"""Write what the documentation says about methods, data sets, partitions and models, from what their files say."""

import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fedloom as fl
from fedloom.data import catalogue
from fedloom.data.partition import partitioners
from fedloom.models.catalogue import REGISTRY as MODELS
from fedloom.models.catalogue import load_models
from fedloom.registry import Entry
from fedloom.report.method_page import method_page

DOCS = Path(__file__).parent.parent / "docs"


def pages() -> dict[str, str]:
    """Path below docs/ to text."""
    methods = fl.list_methods()
    lines = [[f"[{e.name}]({e.name}.md)", f"`{e.signature}`", e.about, e.paper] for e in methods]
    head = "# Methods\n\nEverything that can stand in a method's text, joined with `+`.\n\n"
    return {
        "methods/README.md": head + _table(("method", "how it is written", "what it does", "paper"), lines),
        **{f"methods/{e.name}.md": method_page(e.name) for e in methods},
        "data-sets.md": _data_sets(),
        "partitions.md": _partitions(),
        "models.md": _models(),
    }


def _data_sets() -> str:
    catalogue.load_sets()
    lines = []
    for entry in catalogue.REGISTRY.entries():
        facts = catalogue.FACTS[entry.name]
        samples = f"{facts.samples[0]:,} / {facts.samples[1]:,}" if facts.samples else "any"
        lines.append([f"`{entry.signature}`", entry.about, samples, str(facts.classes or "-"), facts.licence])
    head = "# Data sets\n\nWhere their files come from, and your own data: [data.md](data.md).\n\n"
    titles = ("how it is written", "what it is", "train / test", "classes", "licence")
    return head + _table(titles, lines) + _words(catalogue.REGISTRY.entries())


def _partitions() -> str:
    lines = [[f"`{entry.signature}`", entry.about, entry.paper] for entry in partitioners()]
    head = "# Partitions\n\nHow samples are dealt out to clients. An overview: [data.md](data.md#partitions).\n\n"
    return head + _table(("how it is written", "what it does", "paper"), lines) + _words(partitioners())


def _models() -> str:
    load_models()
    lines = [[f"`{entry.signature}`", entry.about, entry.paper] for entry in MODELS.entries()]
    head = "# Models\n\n`fl.model(text, federation)` sizes inputs and outputs from the data.\n\n"
    return head + _table(("how it is written", "what it is", "paper"), lines) + _words(MODELS.entries())


def _table(titles: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    rows = [tuple(titles), *map(tuple, lines)]
    rows.insert(1, ("---",) * len(rows[0]))
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def _words(entries: Iterable[Entry[Any]]) -> str:
    """The docstring of each file, under the names that it registers."""
    named: dict[str, list[str]] = {}
    for entry in entries:
        named.setdefault(entry.make.__module__, []).append(entry.name)
    texts = [(names, inspect.getdoc(sys.modules[module]) or "") for module, names in named.items()]
    return "".join(f"\n## {', '.join(names)}\n\n{text}\n" for names, text in texts)


def main() -> None:
    found = pages()
    (DOCS / "methods").mkdir(parents=True, exist_ok=True)
    for old in (DOCS / "methods").glob("*.md"):
        if f"methods/{old.name}" not in found:
            old.unlink()
    for name, text in found.items():
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
