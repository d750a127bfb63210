"""Data sets for the terminal: the catalogue, and one set with some of its samples."""

import textwrap
from pathlib import Path

import numpy as np
from rich.table import Table

from fedloom.data.catalogue import FACTS, REGISTRY, find_dataset, load_sets, read_corpus
from fedloom.data.corpus import Corpus
from fedloom.data.files import Files
from fedloom.data.partition import partitioners

SHADES = " .:-=+*#%@"
SAMPLES = 3
WIDEST = 100  # characters


def catalogue(data_dir: str | Path | None) -> Table:
    """Every data set: its size, its licence, whether it is here."""
    load_sets()
    files = Files.of(data_dir)
    shown = Table("data set", "train / test", "classes", "here?", "licence", "what it is", box=None, pad_edge=False)
    shown.columns[0].overflow = "fold"
    for entry in REGISTRY.entries():
        facts = FACTS[entry.name]
        samples = f"{facts.samples[0]:,} / {facts.samples[1]:,}" if facts.samples else "any"
        classes = str(facts.classes) if facts.classes else "-"
        shown.add_row(entry.signature, samples, classes, _presence(entry.name, files), facts.licence, entry.about)
    return shown


def ways() -> Table:
    """Every partition."""
    shown = Table("partition", "what it does", "paper", box=None, pad_edge=False)
    shown.columns[0].overflow = "fold"
    for way in partitioners():
        shown.add_row(way.signature, way.about, way.paper)
    return shown


def _presence(name: str, files: Files) -> str:
    facts = FACTS[name]
    if facts.embedded:
        return "yes"
    if files.present(name, facts.plain, facts.published):
        return "yes"
    fetched = any(all(remote.url and remote.checksum for remote in group) for group in facts.published)
    return "to download" if fetched else "no"


def data_page(text: str, data_dir: str | Path | None) -> str:
    """What a data set holds, class by class, and its first samples."""
    call = find_dataset(text)
    corpus = read_corpus(text, Files.of(data_dir))
    test = 0 if corpus.test_y is None else len(corpus.test_y)
    lines = [
        f"{call}: {REGISTRY.find(call.name).about}",
        f"licence: {FACTS[call.name].licence}",
        f"{len(corpus.train_y):,} training samples, {test:,} test samples, each {_kind(corpus)}",
    ]
    if corpus.owners is not None and corpus.owner is not None:
        sizes = np.bincount(corpus.owner, minlength=len(corpus.owners))
        spread = f"{sizes.min():,} to {sizes.max():,} training samples each"
        lines.append(f"{len(corpus.owners):,} clients of its own, {spread}")
    lines += [*corpus.notes, *_balance(corpus), ""]
    for i in np.linspace(0, len(corpus.train_y) - 1, SAMPLES).astype(int):
        lines += [f"training sample {i}, target {_target(corpus, i)}:", *_sample(corpus, i), ""]
    return "\n".join(lines)


def _kind(corpus: Corpus) -> str:
    shape = " x ".join(str(n) for n in corpus.train_x.shape[1:])
    if corpus.train_x.dtype == np.uint8 and corpus.train_x.ndim == 4:
        return f"an image of {shape} bytes"
    return f"{shape} tokens" if corpus.words is not None else f"{shape} {corpus.train_x.dtype} numbers"


def _balance(corpus: Corpus) -> list[str]:
    if corpus.classes is None or corpus.train_y.ndim > 1:
        return []
    train = np.bincount(corpus.train_y, minlength=corpus.classes)
    test = None if corpus.test_y is None else np.bincount(corpus.test_y, minlength=corpus.classes)
    lines = []
    for c, count in enumerate(train):
        name = corpus.class_names[c] if corpus.class_names else str(c)
        lines.append(f"  class {name}: {count:,}" + ("" if test is None else f" / {test[c]:,}"))
    return lines


def _target(corpus: Corpus, i: int) -> str:
    target = corpus.train_y[i]
    if corpus.predicts_tokens and corpus.words is not None:
        return repr(_words(corpus, np.atleast_1d(target)))
    return corpus.class_names[int(target)] if corpus.class_names else str(target)


def _words(corpus: Corpus, ids: np.ndarray) -> str:
    if corpus.words is None:
        return " ".join(str(i) for i in ids)
    separator = " " if corpus.padded else ""
    return separator.join(corpus.words[ids[ids >= 0]].tolist()).strip(None if corpus.padded else "\0")


def _sample(corpus: Corpus, i: int) -> list[str]:
    x = corpus.train_x[i]
    if x.dtype == np.uint8 and x.ndim == 3:
        grey = x.mean(0) / 256
        step = max(1, grey.shape[1] // 32)
        return ["  " + "".join(SHADES[int(v * len(SHADES))] * 2 for v in row[::step]) for row in grey[::step]]
    if x.dtype.kind in "iu" and x.ndim == 1:
        text = _words(corpus, x).replace("\n", "↵")
        return [f"  {line}" for line in textwrap.wrap(text, WIDEST, max_lines=4, placeholder=" ...")]
    if corpus.columns:
        pairs = ", ".join(f"{name} {value:g}" for name, value in zip(corpus.columns, x, strict=True) if value)
        return [f"  {pairs[: 4 * WIDEST]}"]
    numbers = np.array2string(x, precision=2, threshold=60, edgeitems=4, max_line_width=WIDEST)
    return [f"  {line}" for line in numbers.splitlines()]
