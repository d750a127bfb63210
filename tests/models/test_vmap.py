"""Every model over several clients at once: `vmap` over stacked parameters equals a loop over the clients."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedloom.models.catalogue import Shape
from fedloom.models.recurrent import set_fused
from tests.models.making import make, samples, targets

CLIENTS, BATCH = 3, 4
IMAGE, WIDE = Shape((1, 12, 12), 5), Shape((3, 16, 16), 5)
TEXT, UNPADDED = Shape((7,), 4, tokens=20), Shape((7,), 20, tokens=20, padded=False)
PER_WORD, SPEECH = Shape((7,), 20, tokens=20, per_position=True), Shape((6, 5), 4)
MODELS = [
    ("logistic", IMAGE),
    ("svm", IMAGE),
    ("mlp", IMAGE),
    ("cnn-reddi", IMAGE),
    ("cnn-mcmahan", WIDE),
    ("cnn-dgt", IMAGE),
    ("lenet5", IMAGE),
    ("resnet56", WIDE),
    ("resnet56(variant='basic')", WIDE),
    ("char-lstm(hidden=6)", UNPADDED),
    ("char-lstm(hidden=6)", TEXT),
    ("lstm(hidden=6)", TEXT),
    ("lstm(hidden=6, layers=2)", SPEECH),
    ("bilstm(hidden=6)", TEXT),
    ("bilstm(hidden=6)", UNPADDED),
    ("stackoverflow-lstm(embedding=5, hidden=6)", PER_WORD),
    ("transformer(width=8, heads=2, feedforward=9, layers=2)", PER_WORD),
    ("transformer(width=8, heads=2, feedforward=9, layers=2)", TEXT),
]
State = Mapping[str, Tensor]
functorch: Any = torch._C._functorch


@pytest.fixture(autouse=True)
def without_fallback() -> Iterator[None]:
    """An operation without a batching rule is an error, not a slow loop."""
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    yield
    functorch._set_vmap_fallback_enabled(before)


def stacked(models: list[nn.Module]) -> tuple[State, State]:
    parameters = [dict(model.named_parameters()) for model in models]
    buffers = [dict(model.named_buffers()) for model in models]
    return (
        {name: torch.stack([p[name].detach() for p in parameters]).requires_grad_() for name in parameters[0]},
        {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]},
    )


def still(model: nn.Module) -> nn.Module:
    """In training mode, but for dropout, whose draws a loop and `vmap` would not share."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    return model


@pytest.mark.parametrize(("text", "shape"), MODELS)
def test_equals_a_loop(text: str, shape: Shape) -> None:
    models = [still(make(text, shape, seed).double()) for seed in range(CLIENTS)]
    x = torch.stack([samples(shape, BATCH, seed, torch.float64) for seed in range(CLIENTS)])
    y = torch.stack([targets(shape, BATCH, seed) for seed in range(CLIENTS)])

    def loss(model: nn.Module, parameters: State, buffers: State, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, {**parameters, **buffers}, (x,)), y)

    together, buffers = stacked(models)
    set_fused(models[0], False)
    losses = vmap(lambda p, b, x, y: loss(models[0], p, b, x, y))(together, buffers, x, y)
    gradients = torch.autograd.grad(losses.sum(), list(together.values()))
    set_fused(models[0], True)
    for k, model in enumerate(models):
        alone, own = dict(model.named_parameters()), {name: b.clone() for name, b in model.named_buffers()}
        one = loss(model, alone, own, x[k], y[k])
        torch.testing.assert_close(losses[k], one, rtol=1e-10, atol=1e-12)
        for name, found, wanted in zip(alone, gradients, torch.autograd.grad(one, list(alone.values())), strict=True):
            torch.testing.assert_close(found[k], wanted, rtol=1e-8, atol=1e-11, msg=name)
        for name, buffer in own.items():
            torch.testing.assert_close(buffers[name][k], buffer, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "shape"),
    [("cnn-reddi", IMAGE), ("bilstm(hidden=6)", TEXT), ("transformer(width=8, heads=2, dropout=0.5)", TEXT)],
)
def test_dropout_runs(text: str, shape: Shape) -> None:
    model = make(text, shape)
    set_fused(model, False)
    together, _ = stacked([model] * CLIENTS)
    x = samples(shape, BATCH)
    answers = vmap(lambda p: functional_call(model, p, (x,)), randomness="different")(together)
    assert not torch.equal(answers[0], answers[1])


def test_the_fused_kernel_has_no_batching_rule() -> None:
    """If this fails one day, plain tensor code is no longer needed."""
    model = make("lstm(hidden=6)", SPEECH)
    together, _ = stacked([model] * CLIENTS)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        vmap(lambda p: functional_call(model, p, (samples(SPEECH, BATCH),)), randomness="same")(together)
