"""Stack Overflow: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive federated optimization. ICLR
2021; published by the authors of TensorFlow Federated. 342,477 users with 135,818,730 training sentences.

Next word: a sentence of words w1 w2 ... becomes the input <bos> w1 w2 ... and the targets w1 w2 ... <eos>, both cut to
`length`; beyond a short sentence's end there is no target (-100). `vocabulary` counts words: padding, <bos>, <eos> and
the unknown word come on top, 10,004 tokens as in the paper. `users` takes only the first so many of each split, since
all need more than 60 GB of memory.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source, open_text, reading
from fedloom.data.formats import LONGEST, SPLITS, Owners, hdf5_users, positive, unpacked_from
from fedloom.errors import DataError

TFF = ("stackoverflow_train.h5", "stackoverflow_test.h5")
ARCHIVE = Remote(
    "stackoverflow.tar.bz2",
    "https://storage.googleapis.com/tff-datasets-public/stackoverflow.tar.bz2",
    "sha256:99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2",
)
PADDING, BEGIN, END = 0, 1, 2
NO_TARGET = -100
Sentences = Iterable[tuple[str, list[str]]]  # of each user
Split = tuple[np.ndarray, np.ndarray, np.ndarray]  # inputs, targets, users


@dataset(
    "stackoverflow",
    samples=(135_818_730, 16_586_035),
    classes=None,
    licence="CC BY-SA 3.0",
    plain=("stackoverflow.jsonl.gz",),
    published=[[Remote(name) for name in TFF], [ARCHIVE]],
    how=f"Get {ARCHIVE.url} and unpack it, or save stackoverflow.jsonl.gz, one JSON a line with user, split (train or "
    "test) and sentences.",
    natural=True,
)
def stackoverflow(length: int = 20, vocabulary: int = 10_000, users: int | None = None, *, source: Source) -> Corpus:
    """the next word of questions and answers, one client per user (Reddi et al. 2021)"""
    positive(length=length, vocabulary=vocabulary, users=users)
    if source.plain is not None:
        splits = [_first(_json_lines(source.plain, split), users) for split in SPLITS]
        return _corpus(splits, length, vocabulary, source.plain)
    if TFF[0] in source.published:
        files = [source.published[name] for name in TFF]
        return _corpus([_hdf5(file, users) for file in files], length, vocabulary, files[0])
    path = source.published[ARCHIVE.name]
    with unpacked_from(path, TFF) as files:
        return _corpus([_hdf5(file, users) for file in files], length, vocabulary, path)


def _hdf5(path: Path, most: int | None) -> Sentences:
    for user, (tokens,) in hdf5_users(path, ("tokens",), most):
        if tokens.dtype.kind not in "OS" or tokens.ndim != 1:
            raise DataError(f"{path}: the tokens of {user!r} are {tokens.dtype} {list(tokens.shape)}, but no texts")
        yield user, [text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text) for text in tokens]


def _json_lines(path: Path, wanted: str) -> Sentences:
    with reading(path), open_text(path) as file:
        for number, line in enumerate(file, 1):
            row = json.loads(line)
            if not isinstance(row, dict) or row.get("split") not in SPLITS or not isinstance(row.get("user"), str):
                raise DataError(f"{path}, line {number}: needs a user (a text) and a split (train or test)")
            texts = row.get("sentences")
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise DataError(f"{path}, line {number}: sentences is no list of texts")
            if row["split"] == wanted:
                yield row["user"], texts


def _first(found: Sentences, most: int | None) -> Iterator[tuple[str, list[str]]]:
    """A user may have several lines."""
    seen: set[str] = set()
    for user, texts in found:
        if user in seen or most is None or len(seen) < most:
            seen.add(user)
            yield user, texts


def _corpus(splits: Sequence[Sentences], length: int, vocabulary: int, path: Path) -> Corpus:
    known, users = {"": PADDING, "<bos>": BEGIN, "<eos>": END}, Owners()
    (x, y, owner), (test_x, test_y, test_owner) = (_encoded(split, length, known, users) for split in splits)
    if not len(x):
        raise DataError(f"{path}: there is no training sentence")
    return Corpus(
        x,
        y,
        test_x,
        test_y,
        owner=owner,
        test_owner=test_owner,
        owners=users.names(),
        words=np.array(list(known), dtype=np.str_),
        predicts_tokens=True,
        vocabulary=vocabulary + 2,  # <bos> and <eos> are counted among the words
    )


def _encoded(found: Sentences, length: int, known: dict[str, int], users: Owners) -> Split:
    inputs, owner = [np.zeros((0, length + 1), dtype=np.int32)], [np.zeros(0, dtype=np.int64)]
    for user, texts in found:
        cut = [text.split()[:length] for text in texts]
        sentences = [words for words in cut if words]
        rows = np.zeros((len(sentences), length + 1), dtype=np.int32)
        for row, words in zip(rows, sentences, strict=True):
            ids = [BEGIN, *(known.setdefault(word[:LONGEST], len(known)) for word in words), END]
            row[: len(ids)] = ids[: length + 1]
        if len(rows):
            inputs.append(rows)
            owner.append(np.full(len(rows), users.place(user)))
    tokens = np.concatenate(inputs)
    x, y = tokens[:, :-1].copy(), tokens[:, 1:].astype(np.int64)
    x[x == END] = PADDING  # nothing follows it
    y[y == PADDING] = NO_TARGET
    return x, y, np.concatenate(owner)
