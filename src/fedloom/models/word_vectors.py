"""Word vectors from a text file: a line for each word, its name and its numbers with one space between, as GloVe's."""

import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import ModelError
from fedloom.models.catalogue import Shape
from fedloom.models.stored import find, missing
from fedloom.untrusted import Unpacked, open_plain

LONGEST = 1 << 18  # bytes of a line: a word and ten thousand numbers
UNKNOWN_STD = 0.1  # of the vectors drawn for words that the file doesn't have


def vectors_of(name: str, shape: Shape) -> Tensor:
    """A row for each word of the data [tokens, dimension]; zeros for padding, small random ones for unknown words."""
    if not shape.words:
        raise ModelError(f"vectors={name!r}: the data don't say which words their tokens are; leave vectors out")
    path = _find(name, shape)
    places = {word: place for place, word in enumerate(shape.words) if place or not shape.padded}
    try:
        with _lines(path, name) as lines:
            dimension, rows = _read(path, lines, places)
    except (OSError, EOFError, UnicodeError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise ModelError(f"{path} is damaged or holds no word vectors: {error or type(error).__name__}") from None
    if not rows:
        raise ModelError(f"{path} has a vector for none of the {len(shape.words)} words of the data")
    matrix = torch.randn(max(shape.tokens or 0, len(shape.words)), dimension) * UNKNOWN_STD
    matrix[list(rows)] = torch.from_numpy(np.stack(list(rows.values())))
    if shape.padded:
        matrix[0] = 0
    return matrix


def _find(name: str, shape: Shape) -> Path:
    """The file itself, or a .zip of its name, or of its name without the dimension: glove.6B.zip holds four files."""
    stem = name.removesuffix(".txt")
    stems = [] if name.endswith(".zip") else dict.fromkeys([stem, stem.rpartition(".")[0] or stem])
    names = [name, *(f"{archive}.zip" for archive in stems)]
    path = find(names, shape.files)
    if path is None:
        raise missing("the word vectors are", names, shape.files, "; nlp.stanford.edu/projects/glove publishes GloVe's")
    return path


@contextmanager
def _lines(path: Path, name: str) -> Iterator[Iterator[str]]:
    if path.suffix != ".zip":
        with open_plain(path) as file:
            yield _short_lines(file, path)
        return
    with open_plain(path) as whole, zipfile.ZipFile(whole) as archive:
        texts = [member for member in archive.namelist() if member.endswith(".txt")]
        chosen = [member for member in texts if Path(member).name == Path(name).name] or texts
        if len(chosen) != 1 or (not name.endswith(".zip") and Path(chosen[0]).name != Path(name).name):
            held = ", ".join(texts) or "no .txt file"
            raise ModelError(f"{path} holds {held}: name one of its .txt files as vectors")
        with archive.open(chosen[0]) as member:
            yield _short_lines(io.BufferedReader(Unpacked(member, path)), path)


def _short_lines(file: IO[bytes], path: Path) -> Iterator[str]:
    while line := file.readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise ModelError(f"{path} holds no word vectors: it has a line of more than {LONGEST:,} bytes")
        yield line.decode("utf-8")


def _read(path: Path, lines: Iterator[str], places: dict[str, int]) -> tuple[int, dict[int, np.ndarray]]:
    """The dimension and, by place, the vectors of the wanted words. Numbers of other words are not looked at."""
    dimension = 0
    rows: dict[int, np.ndarray] = {}
    for number, line in enumerate(lines, start=1):
        if number == 1:
            dimension = line.rstrip().count(" ")
        word = line.partition(" ")[0]
        if word not in places and number > 1:
            continue
        whole, *values = line.rstrip().rsplit(" ", dimension) if dimension > 1 else [word]
        if whole != word and len(values) == dimension:
            continue  # a word with spaces in it, whose first part is a word of the data
        try:
            row = np.array(values, dtype=np.float32)
        except ValueError:
            row = np.empty(0, dtype=np.float32)
        if len(row) != dimension or dimension < 2 or not np.isfinite(row).all():
            raise ModelError(
                f"{path} holds no word vectors: line {number} is not a word and {dimension or 'its'} numbers"
            )
        if word in places:
            rows[places[word]] = row
    return dimension, rows
