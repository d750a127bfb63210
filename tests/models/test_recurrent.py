"""The LSTM against PyTorch's, fused and in plain tensor code; padding against packed sequences."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence

from fedloom.models.catalogue import Shape
from fedloom.models.recurrent import LSTM, BothDirections, LastState, LSTMLayer, backwards, set_fused
from tests.models.making import make, samples

TEXT = Shape((7,), 4, tokens=20)
WEIGHTS = ("weight_ih", "weight_hh", "bias")


def copied(layers: nn.Module, own: nn.LSTM, suffix: str = "") -> None:
    """Write the layers' weights into PyTorch's LSTM, whose second bias becomes zero."""
    assert isinstance(layers, LSTM)
    with torch.no_grad():
        for place, layer in enumerate(layers):
            for name in WEIGHTS:
                torch_name = "bias_ih" if name == "bias" else name
                getattr(own, f"{torch_name}_l{place}{suffix}").copy_(getattr(layer, name))
            getattr(own, f"bias_hh_l{place}{suffix}").zero_()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("batch", "time", "inputs", "hidden", "layers"),
    [(3, 5, 4, 6, 1), (1, 1, 1, 1, 1), (2, 9, 3, 2, 2), (4, 2, 6, 5, 3)],
)
def test_numbers_of_pytorch(fused: bool, batch: int, time: int, inputs: int, hidden: int, layers: int) -> None:
    torch.manual_seed(0)
    ours = LSTM(inputs, hidden, layers).double()
    theirs = nn.LSTM(inputs, hidden, layers, batch_first=True).double()
    copied(ours, theirs)
    set_fused(ours, fused)
    x = torch.randn(batch, time, inputs, dtype=torch.float64, requires_grad=True)
    push = torch.randn(batch, time, hidden, dtype=torch.float64)
    wanted_states = theirs(x)[0]
    torch.testing.assert_close(ours(x), wanted_states, rtol=0, atol=1e-12)
    named = {
        f"{place}.{name}": getattr(theirs, f"{'bias_ih' if name == 'bias' else name}_l{place}")
        for place in range(layers)
        for name in WEIGHTS
    }
    found = torch.autograd.grad(ours(x), [x, *ours.parameters()], push)
    wanted = torch.autograd.grad(wanted_states, [x, *named.values()], push)
    assert [name for name, _ in ours.named_parameters()] == list(named)
    for ours_gradient, theirs_gradient in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_gradient, theirs_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", ["char-lstm(hidden=6)", "lstm(hidden=6)", "bilstm(hidden=6, dropout=0)"])
def test_fused_and_plain_agree_in_single_precision(text: str) -> None:
    model, x = make(text, TEXT), samples(TEXT, 5)
    fused = model(x)
    set_fused(model, False)
    assert not any(m.fused for m in model.modules() if isinstance(m, LSTMLayer))
    torch.testing.assert_close(model(x), fused, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("text", ["char-lstm(hidden=6)", "bilstm(hidden=6, dropout=0)"])
def test_runs_in_bfloat16(text: str, fused: bool) -> None:
    model, x = make(text, TEXT), samples(TEXT, 5)
    set_fused(model, fused)
    with torch.autocast("cpu", torch.bfloat16):
        answer = model(x)
        answer.float().sum().backward()
    torch.testing.assert_close(answer.float(), model(x), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("fused", [True, False])
def test_parameters_from_outside(fused: bool) -> None:
    model, other = make("lstm(hidden=6)", TEXT, seed=0), make("lstm(hidden=6)", TEXT, seed=1)
    set_fused(model, fused)
    answer = functional_call(copy.deepcopy(model), dict(other.named_parameters()), (samples(TEXT, 5),))
    torch.testing.assert_close(answer, other(samples(TEXT, 5)))


lengths_lists = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def padded_ids(lengths: list[int], seed: int) -> Tensor:
    ids = torch.randint(1, 20, (len(lengths), 7), generator=torch.Generator().manual_seed(seed))
    return ids * (torch.arange(7) < torch.tensor(lengths)[:, None])


@settings(max_examples=20, deadline=None)
@given(lengths_lists, st.integers(0, 99), st.booleans())
def test_bilstm_equals_packed_sequences(lengths: list[int], seed: int, fused: bool) -> None:
    model = make("bilstm(hidden=6, dropout=0)", TEXT, seed).double()
    assert isinstance(model, BothDirections)
    set_fused(model, fused)
    reference = nn.LSTM(300, 6, batch_first=True, bidirectional=True).double()
    copied(model.forwards, reference)
    copied(model.backwards, reference, "_reverse")
    ids = padded_ids(lengths, seed)
    packed = pack_padded_sequence(model.embedding(ids), torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    last = reference(packed)[1][0]  # [2, B, H]
    wanted = model.head(torch.cat([last[0], last[1]], dim=1))
    torch.testing.assert_close(model(ids), wanted, rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(lengths_lists, st.integers(0, 99), st.sampled_from(["lstm(hidden=6)", "char-lstm(hidden=6)"]))
def test_last_state_is_that_of_the_last_token(lengths: list[int], seed: int, text: str) -> None:
    model, ids = make(text, TEXT, seed).double(), padded_ids(lengths, seed)
    assert isinstance(model, LastState)
    for row, length, answer in zip(ids, lengths, model(ids), strict=True):
        torch.testing.assert_close(answer, model(row[None, :length])[0], rtol=0, atol=1e-12)


def test_without_padding_token_zero_is_a_token() -> None:
    model = make("lstm(hidden=6)", Shape((4,), 3, tokens=9, padded=False))
    full, cut = torch.tensor([[3, 2, 0, 0]]), torch.tensor([[3, 2]])
    assert not torch.allclose(model(full), model(cut))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("text", ["char-lstm(hidden=6)", "lstm(hidden=6)", "bilstm(hidden=6, dropout=0)"])
def test_an_empty_text_has_an_answer(text: str, fused: bool) -> None:
    model = make(text, TEXT)
    set_fused(model, fused)
    answer = model(torch.zeros(2, 7, dtype=torch.uint8))
    answer.sum().backward()
    assert answer.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_texts_are_turned_round_before_their_padding() -> None:
    ids = torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0], [0, 0, 0, 0], [5, 6, 7, 8]])
    turned = [[3, 2, 1, 0], [4, 0, 0, 0], [0, 0, 0, 0], [8, 7, 6, 5]]
    assert backwards(ids, (ids != 0).sum(1)).tolist() == turned
    assert backwards(ids[:1], None).tolist() == [[0, 3, 2, 1]]


def test_stackoverflow_sees_no_later_word() -> None:
    shape = Shape((7,), 20, tokens=20, per_position=True)
    model, ids = make("stackoverflow-lstm(embedding=4, hidden=5)", shape), samples(shape, 3)
    changed = ids.clone()
    changed[:, 4:] = 7
    torch.testing.assert_close(model(ids)[:, :, :4], model(changed)[:, :, :4])
    assert not torch.allclose(model(ids)[:, :, 4:], model(changed)[:, :, 4:])
