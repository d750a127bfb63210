"""A page about one method, from what its file says: for the terminal and for docs/methods/."""

import inspect
import re
import sys

from fedloom.method import REGISTRY, filled_by, load_methods


def method_page(name: str) -> str:
    """Markdown: how it is written, the stages that it fills, then the docstring of its file."""
    load_methods()
    entry = REGISTRY.find(name)
    module = sys.modules[entry.make.__module__]
    text = inspect.getdoc(module) or entry.about
    fills = ", ".join(filled_by(entry)) or "nothing but what is written"
    return f"# {name}\n\n{entry.about}\n\n`{entry.signature}`, fills: {fills}.\n\n{_markdown(text)}\n"


def _markdown(text: str) -> str:
    """Headings of a file's docstring stand out, each in a paragraph of its own."""
    heads = r"^(What (?:it|they) (?:does|do)|When (?:it|they) helps?|What (?:it|they) costs?|Departures|Variants):"
    return re.sub(heads, r"\n**\1:**", text, flags=re.MULTILINE).replace("\n\n\n", "\n\n")
