"""The transformer against PyTorch's encoder, and what its positions may see."""

import pytest
import torch
from torch import Tensor, nn

from fedloom.models.catalogue import Shape
from fedloom.models.transformer import Transformer
from tests.models.making import make, samples

TEXT = Shape((7,), 4, tokens=20)
PER_WORD = Shape((7,), 20, tokens=20, per_position=True)
SMALL = "transformer(width=12, heads=3, feedforward=10, layers=2)"


def built(shape: Shape, text: str = SMALL) -> Transformer:
    model = make(text, shape).double()
    assert isinstance(model, Transformer)
    return model


def encoded(model: Transformer, x: Tensor, causal: bool, padding: Tensor | None) -> Tensor:
    """The same layers, run by PyTorch's own encoder."""
    width, heads = model.embedding.embedding_dim, 3
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if causal else None
    for block in model.blocks:
        theirs = nn.TransformerEncoderLayer(width, heads, 10, dropout=0.0, batch_first=True, dtype=x.dtype)
        own = dict(block.named_parameters())
        names = {
            "self_attn.in_proj_": "attention.queries_keys_values.",
            "self_attn.out_proj.": "attention.out.",
            "linear1.": "feedforward.0.",
            "linear2.": "feedforward.2.",
            "norm1.": "attention_norm.",
            "norm2.": "feedforward_norm.",
        }
        theirs.load_state_dict({t + kind: own[o + kind] for t, o in names.items() for kind in ("weight", "bias")})
        x = theirs(x, src_mask=mask, src_key_padding_mask=padding)
    return x


def sines(time: int, width: int) -> Tensor:
    rows = torch.zeros(time, width, dtype=torch.float64)
    for place in range(time):
        for i in range(width):
            angle = torch.tensor(place / 10_000 ** (2 * (i // 2) / width), dtype=torch.float64)
            rows[place, i] = angle.cos() if i % 2 else angle.sin()
    return rows


def test_per_position_equals_pytorchs_encoder() -> None:
    model, ids = built(PER_WORD), samples(PER_WORD, 5)
    wanted = model.head(encoded(model, model.embedding(ids) + sines(7, 12), causal=True, padding=None))
    torch.testing.assert_close(model(ids), wanted.transpose(1, 2), rtol=0, atol=1e-12)


def test_one_answer_equals_pytorchs_encoder() -> None:
    model, ids = built(TEXT), samples(TEXT, 5)
    seen = encoded(model, model.embedding(ids) + sines(7, 12), causal=False, padding=ids == 0)
    means = torch.stack([row[: int((text != 0).sum())].mean(0) for row, text in zip(seen, ids, strict=True)])
    torch.testing.assert_close(model(ids), model.head(means), rtol=0, atol=1e-12)


def test_later_words_and_padding_are_not_seen() -> None:
    model, ids = built(PER_WORD), samples(PER_WORD, 5)
    changed = ids.clone()
    changed[:, 4:] = 7
    torch.testing.assert_close(model(ids)[:, :, :4], model(changed)[:, :, :4], rtol=0, atol=1e-12)
    one = built(TEXT)
    text = torch.tensor([[5, 6, 7]])
    longer = torch.tensor([[5, 6, 7, 0, 0]])
    torch.testing.assert_close(one(text), one(longer), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [TEXT, PER_WORD])
def test_an_empty_text_has_an_answer(shape: Shape) -> None:
    model = built(shape)
    answer = model(torch.zeros(2, 7, dtype=torch.uint8))
    answer.sum().backward()
    assert answer.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_odd_width_and_dropout() -> None:
    model = built(TEXT, "transformer(width=9, heads=3, feedforward=4, layers=1, dropout=0.5)")
    ids = samples(TEXT, 3)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
    model.train(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float()(ids).isfinite().all()
