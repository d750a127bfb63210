"""Sets of texts, each out of a small file in the plain layout and in its publisher's format."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fedloom.data import formats
from fedloom.data.corpus import Corpus
from fedloom.errors import DataError
from tests.data.sets.writers import cut_off, packed, put, read, read_published, tar

ROWS = "split,label,text\ntrain,0,\"It's GREAT, it's new!\"\ntrain,3,\ntest,1,unheard-of new\n"


def words_of(corpus: Corpus, row: np.ndarray) -> list[str]:
    assert corpus.words is not None
    return [word for word in corpus.words[row].tolist() if word]


def csv(folder: Path, text: str = ROWS, name: str = "agnews") -> Path:
    return put(folder / f"{name}.csv.gz", packed(text.encode()))


@pytest.mark.parametrize("name", ["agnews", "20newsgroups"])
def test_words_and_punctuation_in_lower_case(name: str, tmp_path: Path) -> None:
    corpus = read(f"{name}(length=6)", csv(tmp_path, name=name))
    assert words_of(corpus, corpus.train_x[0]) == ["it's", "great", ",", "it's", "new", "!"]
    assert corpus.train_x.dtype == np.int32
    assert corpus.train_x[1].tolist() == [0] * 6  # an empty text is padding only
    assert corpus.test_x is not None
    assert words_of(corpus, corpus.test_x[0]) == ["unheard", "-", "of", "new"]
    assert corpus.test_x[0].tolist()[4:] == [0, 0]
    assert corpus.words is not None
    assert corpus.words[0] == ""
    assert corpus.train_y.tolist() == [0, 3]
    assert corpus.vocabulary == 20_000
    assert corpus.classes == len(corpus.class_names)


def test_a_text_is_cut_to_its_length_and_a_word_too(tmp_path: Path) -> None:
    corpus = read(
        "agnews(length=3, vocabulary=5)", csv(tmp_path, f"split,label,text\ntrain,0,a b {'c' * 99} d\ntest,0,e\n")
    )
    assert words_of(corpus, corpus.train_x[0]) == ["a", "b", "c" * 32]
    assert corpus.vocabulary == 5
    assert corpus.words is not None
    assert corpus.words.tolist() == ["", "a", "b", "c" * 32, "e"]  # and no d, which occurs in no sample


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("split,text\ntrain,a\n", "has no column 'label'"),
        ("split,label,text\nvalid,0,a\n", "the split 'valid' is neither train nor test"),
        ("split,label,text\ntrain,4,a\n", "the label 4, but 0 to 3"),
        ("split,label,text\ntrain,first,a\n", "damaged or of another format"),
        ("", "damaged or of another format"),
    ],
)
def test_another_table_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = csv(tmp_path, text)
    with pytest.raises(DataError, match=words) as caught:
        read("agnews", path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["length=0", "vocabulary=0"])
def test_parameters_below_1(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be at least 1, not 0"):
        read(f"agnews({wrong})", csv(tmp_path))


def test_newsgroups_as_published(tmp_path: Path) -> None:
    posts = {
        "20news-bydate-test/sci.space/12": "Näh".encode("latin-1"),
        "20news-bydate-train/talk.religion.misc/7": b"last group",
        "20news-bydate-train/alt.atheism/9": b"From: me\n\nfirst group",
    }
    path = tar(tmp_path / "20news-bydate.tar.gz", posts)
    corpus = read_published("20newsgroups", {path.name: path})
    assert corpus.train_y.tolist() == [0, 19]
    assert words_of(corpus, corpus.train_x[0]) == ["from", ":", "me", "first", "group"]
    assert corpus.test_x is not None
    assert words_of(corpus, corpus.test_x[0]) == ["näh"]
    assert corpus.class_names[14] == "sci.space"
    strange = tar(tmp_path / "other.tar.gz", {"20news-bydate-train/alt.cooking/1": b"a"})
    with pytest.raises(DataError, match="belongs to no split of the twenty groups"):
        read_published("20newsgroups", {path.name: strange})
    with pytest.raises(DataError, match="has no posts"):
        read_published("20newsgroups", {path.name: tar(tmp_path / "empty.tar.gz", {"readme": b""})})


def test_agnews_as_published(tmp_path: Path) -> None:
    train = put(tmp_path / "train.csv", b'"3","A ""big"" deal","Shares, up"\n"1","World","news"\n')
    test = put(tmp_path / "test.csv", b'"4","Chips","fast"\n')
    corpus = read_published("agnews", {"agnews/train.csv": train, "agnews/test.csv": test})
    assert corpus.train_y.tolist() == [2, 0]
    assert words_of(corpus, corpus.train_x[0]) == ["a", '"', "big", '"', "deal", "shares", ",", "up"]
    assert corpus.test_y is not None
    assert corpus.test_y.tolist() == [3]
    put(test, b'"5","Chips","fast"\n')
    with pytest.raises(DataError, match=r"test\.csv: the class less 1 holds the label 4"):
        read_published("agnews", {"agnews/train.csv": train, "agnews/test.csv": test})


def tokenizer_folder(folder: Path, pad: int = 0) -> str:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    names = ["[PAD]", "[UNK]", "it", "'", "s", "great", "new"]
    names.insert(pad, names.pop(0))
    model = tokenizers.models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_from_a_folder(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "pieces")
    corpus = read(f"agnews(length=5, tokenizer='{folder}')", csv(tmp_path))
    assert corpus.train_x.tolist() == [[2, 3, 4, 5, 1], [0] * 5]
    assert corpus.train_x.dtype == np.int32
    assert corpus.words is None
    assert corpus.vocabulary == 7


def test_a_tokenizer_that_does_not_pad_with_0(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "pieces", pad=3)
    with pytest.raises(DataError, match="pads with the id 3, but padding must be 0"):
        read(f"agnews(tokenizer='{folder}')", csv(tmp_path))


def test_a_tokenizer_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(formats, "_hub_answers", lambda: False)
    (tmp_path / "empty").mkdir()
    for name in ("nobody/no-such-tokenizer", str(tmp_path / "empty")):
        with pytest.raises(DataError) as caught:
            read(f"agnews(tokenizer='{name}')", csv(tmp_path))
        assert f"tokenizer='{name}'" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_whether_the_hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert not formats._hub_answers()


def test_a_tokenizer_without_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"fedloom\[text\]"):
        read("agnews(tokenizer='distilbert-base-uncased')", csv(tmp_path))


def test_truncated_csv(tmp_path: Path) -> None:
    path = cut_off(csv(tmp_path, ROWS * 1 + "train,1,some words\n" * 500))
    with pytest.raises(DataError, match="damaged or of another format"):
        read("agnews", path)
