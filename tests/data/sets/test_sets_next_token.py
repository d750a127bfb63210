"""Sets that predict the next character or word: Shakespeare's roles and the users of Stack Overflow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data.corpus import Corpus
from fedloom.errors import DataError
from tests.data.sets.writers import cut_off, hdf5, json_lines, leaf, read, read_published, tar


def plays(folder: Path, *texts: str) -> Path:
    rows = [{"play": "P", "role": f"R{n}", "n_speeches": 1, "text": text} for n, text in enumerate(texts)]
    return json_lines(folder / "shakespeare.jsonl.gz", rows)


Sample = tuple[int, str, str]  # role, window, target


def by_hand(texts: list[str], length: int, stride: int) -> tuple[list[Sample], list[Sample]]:
    """Every training and test sample, one after the other."""
    train: list[Sample] = []
    test: list[Sample] = []
    kept = [text for text in texts if len(text) > length]
    for role, text in enumerate(kept):
        starts = range(0, len(text) - length, stride)
        samples = [(role, text[s : s + length], text[s + length]) for s in starts]
        held = int(0.2 * len(samples))
        train += samples[: len(samples) - held]
        test += samples[len(samples) - held :]
    return train, test


def samples_of(corpus: Corpus, split: str) -> list[Sample]:
    x, y = getattr(corpus, f"{split}_x"), getattr(corpus, f"{split}_y")
    owner = corpus.owner if split == "train" else corpus.test_owner
    assert corpus.words is not None
    assert owner is not None
    words = corpus.words
    return [(int(o), "".join(words[row]), str(words[t])) for o, row, t in zip(owner, x, y, strict=True)]


TEXT = st.text("abcdeé\n ", max_size=40)


@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 5))
def test_shakespeare_cuts_windows_as_by_hand(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], length: int, stride: int
) -> None:
    path = plays(tmp_path_factory.mktemp("plays"), *texts)
    if not any(len(text) > length for text in texts):
        with pytest.raises(DataError, match=f"no role has more than length={length}"):
            read(f"shakespeare({length}, {stride})", path)
        return
    corpus = read(f"shakespeare(length={length}, stride={stride})", path)
    train, test = by_hand(texts, length, stride)
    assert samples_of(corpus, "train") == train
    assert samples_of(corpus, "test") == test
    assert corpus.train_x.dtype == np.uint8
    assert corpus.train_y.dtype == np.int64
    assert corpus.predicts_tokens
    assert not corpus.padded
    short = sum(len(text) <= length for text in texts)
    assert bool(corpus.notes) == bool(short)


@given(st.integers(5, 60), st.integers(1, 6), st.integers(1, 5))
def test_no_training_sample_sees_a_target_of_the_test(
    tmp_path_factory: pytest.TempPathFactory, size: int, length: int, stride: int
) -> None:
    """Every character differs, so that a character tells its place."""
    text = "".join(map(chr, range(200, 200 + max(size, length + 1))))
    corpus = read(f"shakespeare({length}, {stride})", plays(tmp_path_factory.mktemp("plays"), text))
    assert corpus.test_y is not None
    if len(corpus.test_y):
        first = corpus.test_y.min()
        assert corpus.train_x.max() < first
        assert corpus.train_y.max() < first


def test_shakespeare_as_leaf_writes_it(tmp_path: Path) -> None:
    text = "To be, or not"
    x, y = [text[n : n + 4] for n in range(9)], [text[n + 4] for n in range(9)]
    leaf(tmp_path / "all_data" / "all_data.json", {"HAMLET": (x, y), "OTHELLO": (x[:2], y[:2]), "MUTE": ([], [])})
    files = {"shakespeare/all_data": tmp_path / "all_data"}
    corpus = read_published("shakespeare(length=4)", files)
    rows = [(0, a, b) for a, b in zip(x, y, strict=True)]
    assert samples_of(corpus, "train") == rows[:8] + [(1, *row[1:]) for row in rows[:2]]
    assert samples_of(corpus, "test") == rows[8:]
    assert corpus.owners is not None
    assert corpus.owners.tolist() == ["HAMLET", "OTHELLO"]
    assert len(read_published("shakespeare(length=4, stride=3)", files).train_y) == 3 + 1
    with pytest.raises(DataError, match="not all length=80 characters long"):
        read_published("shakespeare", files)


@pytest.mark.parametrize("row", [["a"], {"play": "P", "role": 3, "text": "a"}, {"play": "P", "text": "a"}])
def test_a_line_without_play_role_and_text(row: Any, tmp_path: Path) -> None:
    path = json_lines(tmp_path / "shakespeare.jsonl.gz", [{"play": "P", "role": "R", "text": "a"}, row])
    with pytest.raises(DataError, match=r"jsonl\.gz, line 2: needs the texts play, role and text"):
        read("shakespeare", path)


USERS: list[dict[str, Any]] = [
    {"user": "u1", "split": "train", "sentences": ["how to sort", "", "one two three four five six"]},
    {"user": "u2", "split": "train", "sentences": ["sort"]},
    {"user": "u1", "split": "train", "sentences": ["to"]},
    {"user": "u3", "split": "test", "sentences": ["how unheard"]},
    {"user": "u1", "split": "test", "sentences": ["to"]},
]


def check_stackoverflow(corpus: Corpus) -> None:
    assert corpus.words is not None
    words = corpus.words.tolist()
    assert words[:3] == ["", "<bos>", "<eos>"]
    assert [words[token] for token in corpus.train_x[0]] == ["<bos>", "how", "to", "sort", ""]
    assert [words[token] for token in corpus.train_y[0][:4]] == ["how", "to", "sort", "<eos>"]
    assert corpus.train_y[0][4] == -100
    assert [words[token] for token in corpus.train_x[1]] == ["<bos>", "one", "two", "three", "four"]
    assert [words[token] for token in corpus.train_y[1]] == ["one", "two", "three", "four", "five"]
    assert "six" not in words
    assert corpus.train_x.dtype == np.int32
    assert corpus.train_y.dtype == np.int64
    assert corpus.owners is not None
    assert corpus.owner is not None
    assert corpus.test_owner is not None
    assert sorted(corpus.owners[corpus.owner].tolist()) == ["u1", "u1", "u1", "u2"]
    assert sorted(corpus.owners[corpus.test_owner].tolist()) == ["u1", "u3"]
    assert corpus.vocabulary == 10_002  # with <bos> and <eos>
    assert corpus.predicts_tokens
    assert corpus.padded


def test_stackoverflow_in_the_plain_layout(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "stackoverflow.jsonl.gz", USERS)
    check_stackoverflow(read("stackoverflow(length=5)", path))
    first = read("stackoverflow(length=5, users=1)", path)
    assert first.owners is not None
    assert first.owners.tolist() == ["u1", "u3"]
    assert len(first.train_y) == 3


@pytest.mark.parametrize("archived", [False, True])
def test_stackoverflow_as_tensorflow_federated_has_it(archived: bool, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    files = {}
    for split in ("train", "test"):
        texts: dict[str, list[str]] = {}
        for row in USERS:
            if row["split"] == split:
                texts.setdefault(row["user"], []).extend(row["sentences"])
        kind = h5py.string_dtype()
        arrays = {user: {"tokens": np.array(found, dtype=kind)} for user, found in texts.items()}
        name = f"stackoverflow_{split}.h5"
        files[name] = hdf5(tmp_path / name, arrays)
    if archived:
        contents = {name: path.read_bytes() for name, path in files.items()}
        files = {"stackoverflow.tar.bz2": tar(tmp_path / "stackoverflow.tar.bz2", contents, "w:bz2")}
    check_stackoverflow(read_published("stackoverflow(length=5)", files))
    assert len(read_published("stackoverflow(length=5, users=1)", files).train_y) == 3


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"user": "u", "split": "dev", "sentences": []}, "needs a user"),
        ({"user": 3, "split": "train", "sentences": []}, "needs a user"),
        ({"user": "u", "split": "train", "sentences": "a"}, "sentences is no list of texts"),
        ([], "needs a user"),
    ],
)
def test_a_line_that_is_no_user(row: Any, words: str, tmp_path: Path) -> None:
    path = json_lines(tmp_path / "stackoverflow.jsonl.gz", [row])
    with pytest.raises(DataError, match=f"line 1: {words}"):
        read("stackoverflow", path)


def test_no_training_sentence_at_all(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "stackoverflow.jsonl.gz", USERS[3:])
    with pytest.raises(DataError, match="no training sentence"):
        read("stackoverflow", path)


@pytest.mark.parametrize("name", ["shakespeare", "stackoverflow"])
@pytest.mark.parametrize("share", [0.5, 0.95])
def test_truncated_lines(name: str, share: float, tmp_path: Path) -> None:
    one = {"play": "P", "text": "a b" * 50, "user": "u", "split": "train", "sentences": ["a"]}
    rows = [{**one, "role": f"R{i}"} for i in range(50)]
    path = cut_off(json_lines(tmp_path / f"{name}.jsonl.gz", rows), share)
    with pytest.raises(DataError, match="damaged or of another format") as caught:
        read(name, path)
    assert str(path) in str(caught.value)


def test_two_lines_for_one_role(tmp_path: Path) -> None:
    rows = [{"play": "P", "role": "R", "text": "a b" * 50}] * 2
    with pytest.raises(DataError, match="two lines for 'P: R'"):
        read("shakespeare", json_lines(tmp_path / "shakespeare.jsonl.gz", rows))
