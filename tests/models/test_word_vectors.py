"""GloVe's rows for the data's words, and files that are missing, damaged or of another kind."""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.errors import ModelError
from fedloom.models.catalogue import Shape
from fedloom.models.recurrent import BothDirections
from tests.models.making import make, with_files

SHAPE = Shape((6,), 4, tokens=5, words=("<pad>", "cat", "zyzzy", "dog", "the"))
LINES = "the 0.1 0.2 0.3\n. . . 9 9 9\ncat 1 -2 3e-1\nother a b c\n<pad> 5 5 5\ndog -1 -1 -1\nthe end 7 7 7\n"
NAME = "glove.6B.3d.txt"


def rows(name: str, shape: Shape, text: str = "bilstm(hidden=4, vectors='{}')") -> torch.Tensor:
    model = make(text.format(name), shape)
    assert isinstance(model, BothDirections)
    assert model(torch.tensor([[1, 2, 4, 0, 0, 0]])).shape == (1, 4)
    return model.embedding.weight


def check(found: torch.Tensor) -> None:
    wanted = torch.tensor([[0, 0, 0], [1, -2, 0.3], [-1, -1, -1], [0.1, 0.2, 0.3]])
    torch.testing.assert_close(found[[0, 1, 3, 4]], wanted)
    assert 0 < found[2].abs().max() < 0.5  # not in the file: small and random
    assert not found.requires_grad


def test_rows_by_name_and_by_path(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(LINES)
    check(rows(NAME, with_files(SHAPE, tmp_path)))
    check(rows(str(tmp_path / NAME), with_files(SHAPE, tmp_path / "elsewhere")))


@pytest.mark.parametrize("name", ["glove.6B.zip", "glove.6B.3d.zip"])
def test_rows_from_a_zip(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("folder/" + NAME, LINES)
        archive.writestr("glove.6B.2d.txt", "cat 1 2\n")
    check(rows(NAME, with_files(SHAPE, tmp_path)))
    with pytest.raises(ModelError, match=r"holds folder/glove.6B.3d.txt, glove.6B.2d.txt: name one"):
        rows(name, with_files(SHAPE, tmp_path))
    with pytest.raises(ModelError, match="name one of its"):
        rows("glove.6B.9d.txt" if name == "glove.6B.zip" else str(tmp_path / name), with_files(SHAPE, tmp_path))


def test_a_zip_of_one_file_needs_no_other_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        archive.writestr("anything.txt", LINES)
    check(rows("mine.zip", with_files(SHAPE, tmp_path)))


def test_vectors_can_be_trained(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(LINES)
    shape = with_files(SHAPE, tmp_path)
    assert rows(NAME, shape, "bilstm(hidden=4, vectors='{}', trainable_vectors=True)").requires_grad


def test_without_padding_the_first_word_has_a_vector(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(LINES)
    found = rows(NAME, replace(with_files(SHAPE, tmp_path), padded=False))
    assert found[0].tolist() == [5, 5, 5]


def test_missing(tmp_path: Path) -> None:
    words = rf"word vectors are not on this machine: put {NAME} or glove.6B.3d.zip or glove.6B.zip into {tmp_path} or"
    with pytest.raises(ModelError, match=words):
        rows(NAME, with_files(SHAPE, tmp_path))


def test_without_a_folder_the_error_says_how_to_name_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="--data-dir or FEDLOOM_DATA"):
        rows(NAME, SHAPE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a vector for none of the 5 words"),
        ("bird 1 2 3\n", "a vector for none of the 5 words"),
        ("400000 300\ncat 1 2\n", "line 1 is not a word"),
        ("cat\n", "line 1 is not a word"),
        ("the 1 2 3\ncat 1 2\n", "line 2 is not a word and 3 numbers"),
        ("the 1 2 3\ncat 1 2 x\n", "line 2"),
        ("the 1 2 3\ncat 1 2 nan\n", "line 2"),
        ("{'json': [1, 2]}\n", "line 1"),
    ],
)
def test_other_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ModelError, match=words):
        rows(NAME, with_files(SHAPE, tmp_path))


def test_damaged_files(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"cat \xff\xfe\x00 1 2\n")
    (tmp_path / "glove.zip").write_bytes(b"PK\x03\x04 and nothing more")
    (tmp_path / "folder.txt").mkdir()
    for name in (NAME, "glove.zip", "folder.txt"):
        with pytest.raises(ModelError, match=f"{name} is damaged or holds no word vectors"):
            rows(name, with_files(SHAPE, tmp_path))


def test_words_must_be_known(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(LINES)
    with pytest.raises(ModelError, match="don't say which words"):
        rows(NAME, replace(with_files(SHAPE, tmp_path), words=()))
