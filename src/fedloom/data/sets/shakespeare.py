"""Shakespeare's plays by speaking role: McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient
learning of deep networks from decentralized data. AISTATS 2017. Also in LEAF (Caldas et al., arXiv:1812.01097).

A sample is `length` characters, its target the next one; samples begin every `stride` characters. A client is one role
of one play. The last fifth of each role's samples, in the order of the play, is the test set; no training sample's
window or target reaches the first of their targets. Roles whose text is too short for one sample are left out.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source, open_text, reading
from fedloom.data.formats import leaf_users, positive
from fedloom.errors import DataError

LEAF = "shakespeare/all_data"
TEST_SHARE = 0.2


@dataset(
    "shakespeare",
    samples=None,
    classes=None,
    licence="public domain (plays); the edition's own",
    plain=("shakespeare.jsonl.gz",),
    published=[[Remote(LEAF)]],
    how="Run LEAF's script for shakespeare and put its folder all_data into a subfolder shakespeare, or save "
    "shakespeare.jsonl.gz, one JSON a line with play, role and text.",
    natural=True,
)
def shakespeare(length: int = 80, stride: int = 1, *, source: Source) -> Corpus:
    """the next character of a play, one client per speaking role (McMahan et al. 2017)"""
    positive(length=length, stride=stride)
    if source.plain is not None:
        return _from_texts(source.plain, length, stride)
    return _from_windows(source.published[LEAF], length, stride)


def _from_texts(path: Path, length: int, stride: int) -> Corpus:
    """All windows at once: places of their first characters in one long array."""
    roles: dict[str, str] = {}
    for name, text in _roles(path):
        if name in roles:
            raise DataError(f"{path} has two lines for {name!r}; join their texts")
        roles[name] = text
    kept = {name: text for name, text in roles.items() if len(text) > length}
    if not kept:
        raise DataError(f"{path}: no role has more than length={length} characters")
    ids, words = _numbered(np.concatenate([_codes(text) for text in kept.values()]))
    sizes = np.array([len(text) for text in kept.values()])
    counts = (sizes - length - 1) // stride + 1
    owner, place = _ranked(counts)
    starts = (np.cumsum(sizes) - sizes)[owner] + place * stride
    test = place >= (counts - (TEST_SHARE * counts).astype(np.int64))[owner]
    windows = np.lib.stride_tricks.sliding_window_view(ids, length)
    targets = ids[starts + length].astype(np.int64)
    return _corpus(windows, starts, targets, owner, test, words, list(kept), len(roles) - len(kept))


def _from_windows(folder: Path, length: int, stride: int) -> Corpus:
    """LEAF's windows are cut out already; every `stride`-th of them is taken."""
    windows: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    names: list[str] = []
    for path, user, x, y in leaf_users(folder):
        if not all(isinstance(text, str) and len(text) == length for text in x):
            raise DataError(f"{path}: the windows of {user!r} are not all length={length} characters long")
        if not all(isinstance(text, str) and len(text) == 1 for text in y):
            raise DataError(f"{path}: the targets of {user!r} are not all single characters")
        if x:
            windows.append(_codes("".join(x[::stride])).reshape(-1, length))
            targets.append(_codes("".join(y[::stride])))
            names.append(user)
    if not names:
        raise DataError(f"{folder}: no role has a sample")
    counts = np.array([len(part) for part in targets])
    owner, place = _ranked(counts)
    test = place >= (counts - (TEST_SHARE * counts).astype(np.int64))[owner]
    ids, words = _numbered(np.concatenate([np.concatenate(windows).ravel(), np.concatenate(targets)]))
    cut, last = ids[: -len(owner)].reshape(-1, length), ids[-len(owner) :].astype(np.int64)
    return _corpus(cut, np.arange(len(owner)), last, owner, test, words, names, 0)


def _roles(path: Path) -> Iterator[tuple[str, str]]:
    with reading(path), open_text(path) as file:
        for number, line in enumerate(file, 1):
            row = json.loads(line)
            if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("play", "role", "text")):
                raise DataError(f"{path}, line {number}: needs the texts play, role and text")
            yield f"{row['play']}: {row['role']}", row["text"]


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "replace"), dtype=np.uint32)


def _numbered(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids into the characters that occur, in the order of their code points."""
    present = np.flatnonzero(np.bincount(codes))
    table = np.zeros(present[-1] + 1, dtype=np.uint8 if len(present) <= 256 else np.int32)
    table[present] = np.arange(len(present))
    return table[codes], np.array([chr(code) for code in present])


def _ranked(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each sample its owner and its place among the owner's."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _corpus(
    windows: np.ndarray,
    starts: np.ndarray,
    targets: np.ndarray,
    owner: np.ndarray,
    test: np.ndarray,
    words: np.ndarray,
    names: list[str],
    short: int,
) -> Corpus:
    return Corpus(
        windows[starts[~test]],
        targets[~test],
        windows[starts[test]],
        targets[test],
        owner=owner[~test],
        test_owner=owner[test],
        owners=np.array(names, dtype=np.str_),
        words=words,
        padded=False,
        predicts_tokens=True,
        notes=(f"{short} roles have too little text for one sample and are left out",) if short else (),
    )
