"""What kernels of fused layers are compared with, and that the comparison finds what is wrong."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from fedloom.engines.fused_check import addition, compare, compare_gradients, compared, convolution, numbers, scaling
from fedloom.engines.fused_layers import Packed, PackedOfClients, Unpacked

K, B, C, OUTS = 2, 3, 4, 5


def drawn(*shape: int) -> Tensor:
    return torch.randn(K, *shape, generator=torch.Generator().manual_seed(len(shape)))


IMAGE, NORM = drawn(B, C, 6, 6), [drawn(C), 1 + drawn(C) / 4, drawn(C) / 2]
CASES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "convolution": (convolution, [IMAGE, *NORM, True, False, drawn(OUTS, C, 3, 3), 2, 1]),
    "read through": (convolution, [IMAGE, None, None, None, False, True, drawn(OUTS, C, 1, 1), 1, 0]),
    "scaling": (scaling, [drawn(C), drawn(C).abs(), drawn(C) + 2, drawn(C), drawn(C).abs(), 0.1, 1e-5, 50]),
    "sum": (addition, [IMAGE, *NORM, None, None, None, None, False]),
    "sum of two": (addition, [IMAGE, *NORM, drawn(B, C, 6, 6).flip(1), None, None, None, True]),
    "sum of two norms": (addition, [IMAGE, *NORM, IMAGE.flip(2), *NORM[::-1], True]),
}


def outcome(plain: Callable[..., Any], inputs: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """Outputs of all clients, gradients of these, and those of the inputs."""
    leaves = [value.clone().requires_grad_() if isinstance(value, Tensor) else value for value in inputs]
    each = [plain(*(v[k] if isinstance(v, Tensor) else v for v in leaves)) for k in range(K)]
    outputs = [torch.stack(own) for own in zip(*each, strict=True)]
    given = [torch.cos(torch.arange(own.numel())).view_as(own) for own in outputs]
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    found = iter(torch.autograd.grad(outputs, tensors, given))
    return outputs, given, [next(found) if isinstance(value, Tensor) else None for value in leaves]


def changed(values: Sequence[Any], at: int, k: int, by: float) -> list[Any]:
    """The same, but one of them is something else for one client."""
    found: list[Any] = [None if own is None else own.detach().clone() for own in values]
    found[at][k] *= by
    return found


@pytest.mark.parametrize("k", [0, K - 1])
@pytest.mark.parametrize("name", CASES)
def test_what_is_right_and_what_is_wrong(name: str, k: int) -> None:
    """Every result is looked at, of the first client and of the last; nothing is while nobody compares."""
    plain, inputs = CASES[name]
    outputs, given, found = outcome(plain, inputs)
    needed = [own is not None for own in found]
    with compared():
        compare(plain, inputs, outputs)
        compare_gradients(plain, inputs, given, found, needed)
        for at in range(len(outputs)):
            with pytest.raises(ArithmeticError, match=f"^{plain.__name__} is off by"):
                compare(plain, inputs, changed(outputs, at, k, 1.2))
        for at in [place for place, own in enumerate(found) if own is not None]:
            with pytest.raises(ArithmeticError, match=f"^the gradient of {plain.__name__} is off by"):
                compare_gradients(plain, inputs, given, changed(found, at, k, torch.nan), needed)
            missing = [None if place == at else own for place, own in enumerate(found)]
            with pytest.raises(ArithmeticError, match=f"^the gradient of {plain.__name__} is missing"):
                compare_gradients(plain, inputs, given, missing, needed)
    compare(plain, inputs, [2 * own for own in outputs])


def test_what_should_be_zero_may_be_rounding() -> None:
    """A norm's bias before a convolution 1x1 and another norm has no gradient: all that there is of it is rounding."""
    x, weight = drawn(B, C, 6, 6), drawn(OUTS, C, 1, 1)
    inputs = [x, *NORM, False, False, weight, 1, 0]
    y = outcome(convolution, inputs)[0][0]
    given = torch.sin(torch.arange(y.numel()).float()).view_as(y)
    given = given - given.mean((1, 3, 4), keepdim=True)
    found: list[Tensor | None] = []
    for k in range(K):
        bias = NORM[2][k].clone().requires_grad_()
        out = convolution(x[k], NORM[0][k], NORM[1][k], bias, False, False, weight[k], 1, 0)[0]
        found.append(torch.autograd.grad(out, bias, given[k])[0])
    of_bias = torch.stack([own for own in found if own is not None])
    slots: list[Tensor | None] = [None, None, None, of_bias, *5 * [None]]
    largest = float(of_bias.abs().max())
    assert largest < 1e-3
    rounded = [None if own is None else own + 2 * largest for own in slots]  # by kernels that round in another order
    with compared():
        compare_gradients(convolution, inputs, [given, None, None], rounded, [False] * 9)
        wrong = [None if own is None else own + 10 for own in slots]
        with pytest.raises(ArithmeticError, match="off by"):
            compare_gradients(convolution, inputs, [given, None, None], wrong, [False] * 9)


def test_a_convolution_is_what_pytorch_makes_of_it() -> None:
    x, w = IMAGE[0], drawn(OUTS, C, 3, 3)[0]
    y, mean, variance, again = convolution(x, None, None, None, False, True, w, 1, 1)
    torch.testing.assert_close(y, F.conv2d(x, w, padding=1))
    torch.testing.assert_close(mean, y.mean((0, 2, 3)))
    torch.testing.assert_close(variance, y.var((0, 2, 3), unbiased=False))
    assert torch.equal(again, x)


def test_a_scaling_is_what_pytorch_makes_of_it() -> None:
    layer, y = torch.nn.BatchNorm2d(C).train(), IMAGE[0]
    wanted = layer(y)
    statistics = (y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False))
    before = (torch.zeros(C), torch.ones(C))
    mean, scale, *after = scaling(*statistics, layer.weight, *before, 0.1, layer.eps, y.numel() // C)
    torch.testing.assert_close((y - mean[:, None, None]) * scale[:, None, None], wanted)
    torch.testing.assert_close(after, [layer.running_mean, layer.running_var])


def test_images_of_half_precision() -> None:
    """They keep float16's ten bits, and infinity, however large, and their gradients have bfloat16's range."""
    image = torch.tensor([1 + 2**-10, 3e-6, 1e6, -1e6, torch.nan, torch.inf]).reshape(1, 1, 1, 1, 6).requires_grad_()
    packed = PackedOfClients.apply(image)  # type: ignore[no-untyped-call]
    assert packed.dtype == torch.bfloat16
    wanted = torch.tensor([1 + 2**-10, 3e-6, 65504, -65504, torch.nan, torch.inf]).half().view_as(image)
    torch.testing.assert_close(numbers(packed), wanted, rtol=0, atol=0, equal_nan=True)
    tiny = torch.full_like(packed, 1e-30)
    (of_image,) = torch.autograd.grad(packed, image, tiny)
    assert of_image.dtype == torch.float32
    assert torch.equal(of_image, tiny.float())


def test_packed_and_unpacked_under_vmap() -> None:
    """As autocast would have it outside, with images [B, C, H, W] in any order in memory."""
    image = IMAGE.clone().requires_grad_()
    found = vmap(lambda x: Unpacked.apply(Packed.apply(x)))(image)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, IMAGE.half().bfloat16(), rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(found.float().square().sum(), image)
    torch.testing.assert_close(gradient, 2 * IMAGE, rtol=0.01, atol=1e-6)
