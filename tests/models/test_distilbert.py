"""DistilBERT from a local folder, with a tiny one that the tests write; nothing is fetched."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from fedloom.errors import ModelError
from fedloom.models.catalogue import Shape
from tests.models.making import make, with_files

transformers: Any = pytest.importorskip("transformers")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(16)))
SHAPE = Shape((8,), 3, tokens=20)
IDS = torch.tensor([[2, 5, 6, 3, 0, 0, 0, 0], [2, 7, 8, 9, 10, 11, 12, 3]])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds a tiny DistilBERT which was never a classifier."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = transformers.DistilBertConfig(
        vocab_size=20, dim=8, n_layers=1, n_heads=2, hidden_dim=12, max_position_embeddings=8
    )
    torch.manual_seed(5)
    transformers.DistilBertModel(config).save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return tmp_path


def test_from_a_folder(folder: Path) -> None:
    stored = load_file(folder / "tiny" / "model.safetensors")
    for text in ("distilbert(weights='tiny')", f"distilbert(weights='{folder / 'tiny'}')"):
        model = make(text, with_files(SHAPE, folder))
        own = dict(model.named_parameters())
        for name, value in stored.items():
            assert torch.equal(own[f"body.distilbert.{name}"], value), name
        assert all(value.requires_grad and value.dtype == torch.float32 for value in own.values())
        answer = model(IDS.to(torch.uint8))
        assert answer.shape == (2, 3)
        answer.sum().backward()


def test_the_classifier_is_drawn_from_the_seed(folder: Path) -> None:
    shape = with_files(SHAPE, folder)
    first, again, other = (make("distilbert(weights='tiny')", shape, seed).eval()(IDS) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_padding_is_not_seen(folder: Path) -> None:
    model = make("distilbert(weights='tiny')", with_files(SHAPE, folder)).eval()
    torch.testing.assert_close(model(IDS[:1]), model(IDS[:1, :4]))
    assert model(torch.zeros(2, 8, dtype=torch.int64)).isfinite().all()


def test_parameters_from_outside(folder: Path) -> None:
    shape = with_files(SHAPE, folder)
    one, other = (make("distilbert(weights='tiny')", shape, seed).eval() for seed in (0, 1))
    torch.testing.assert_close(functional_call(one, dict(other.named_parameters()), (IDS,)), other(IDS))


def test_a_trained_classifier_of_other_labels_is_replaced(folder: Path) -> None:
    body = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "tiny", num_labels=7)
    body.save_pretrained(folder / "seven")
    assert make("distilbert(weights='seven')", with_files(SHAPE, folder))(IDS).shape == (2, 3)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (replace(SHAPE, tokens=21), "the data have 21 tokens, but tiny knows 20"),
        (replace(SHAPE, inputs=(9,)), "texts of 9 tokens are too long, tiny reads 8"),
        (replace(SHAPE, words=("[PAD]", "cat")), "the data's tokens are not those of tiny"),
    ],
)
def test_data_that_do_not_fit(folder: Path, shape: Shape, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make("distilbert(weights='tiny')", with_files(shape, folder))


def test_its_own_tokens_fit(folder: Path) -> None:
    make("distilbert(weights='tiny')", with_files(replace(SHAPE, words=WORDS), folder))


def test_missing(folder: Path) -> None:
    words = (
        rf"weights of distilbert-base-uncased are not on this machine: put a folder .* into {folder} or .*config.json"
    )
    with pytest.raises(ModelError, match=words):
        make("distilbert", with_files(SHAPE, folder))


def test_without_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"the extra `text`: pip install 'fedloom\[text\]'"):
        make("distilbert(weights='tiny')", with_files(SHAPE, folder))


def test_damaged_folders(folder: Path) -> None:
    weights = folder / "tiny" / "model.safetensors"
    whole = load_file(weights)
    shape = with_files(SHAPE, folder)
    save_file({"something.else": torch.zeros(2)}, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="tiny lacks weights of its own model"):
        make("distilbert(weights='tiny')", shape)
    save_file(whole, weights, metadata={"format": "pt"})
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ModelError, match="tiny holds no model that transformers can read"):
        make("distilbert(weights='tiny')", shape)
    weights.unlink()
    with pytest.raises(ModelError, match="tiny holds no model that transformers can read"):
        make("distilbert(weights='tiny')", shape)
    (folder / "tiny" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="tiny holds no model that transformers can read"):
        make("distilbert(weights='tiny')", shape)


def test_a_hostile_folder(folder: Path) -> None:
    """Layers without end, code of the publisher, and a pickle in the place of weights."""
    tiny, shape = folder / "tiny", with_files(SHAPE, folder)
    good = (tiny / "config.json").read_text()
    evil = "import os; os.mkdir('owned')\n"
    (tiny / "evil.py").write_text(evil)
    for changes, words in (
        ({"n_layers": 10**8}, "n_layers is 100000000, but 1000 are the most"),
        ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}, "holds no model"),
        ({"dim": 10**12}, "holds no model"),
    ):
        (tiny / "config.json").write_text(json.dumps({**json.loads(good), **changes}))
        with pytest.raises(ModelError, match=words):
            make("distilbert(weights='tiny')", shape)
    (tiny / "config.json").write_text(good)
    weights = load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").unlink()
    torch.save(weights, tiny / "pytorch_model.bin")  # harmless, but nothing tells it from one that is not
    with pytest.raises(ModelError, match="holds no model"):
        make("distilbert(weights='tiny')", shape)
