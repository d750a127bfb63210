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
    "scaling": (scaling, [drawn(2, C).abs(), drawn(C), 1e-5]),
    "sum": (addition, [IMAGE, *NORM, None, None, None, None, False]),
    "sum of two": (addition, [IMAGE, *NORM, drawn(B, C, 6, 6).flip(1), None, None, None, True]),
    "sum of two norms": (addition, [IMAGE, *NORM, IMAGE.flip(2), *NORM[::-1], True]),
}


def outcome(plain: Callable[..., Any], inputs: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """Outputs of all clients, gradients of these, and those of the inputs."""
    leaves = [value.clone().requires_grad_() if isinstance(value, Tensor) else value for value in inputs]
    each = [plain(*(v[k] if isinstance(v, Tensor) else v for v in leaves)) for k in range(K)]
    outputs = [
        torch.stack(own) for own in zip(*(one if isinstance(one, tuple) else (one,) for one in each), strict=True)
    ]
    given = [torch.cos(torch.arange(own.numel())).view_as(own) for own in outputs]
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    found = iter(torch.autograd.grad(outputs, tensors, given))
    return outputs, given, [next(found) if isinstance(value, Tensor) else None for value in leaves]


@pytest.mark.parametrize("name", CASES)
def test_what_is_right_and_what_is_wrong(name: str) -> None:
    """Every result is looked at; nothing is while nobody compares."""
    plain, inputs = CASES[name]
    outputs, given, found = outcome(plain, inputs)
    with compared():
        compare(plain, inputs, outputs)
        compare_gradients(plain, inputs, given, found)
        for at in range(len(outputs)):
            with pytest.raises(ArithmeticError, match=f"^{plain.__name__} is off by"):
                compare(plain, inputs, [1.2 * own if i == at else own for i, own in enumerate(outputs)])
        for at, of_input in enumerate(found):
            if of_input is not None:
                wrong = [None if own is None else own * (torch.nan if i == at else 1) for i, own in enumerate(found)]
                with pytest.raises(ArithmeticError, match=f"^the gradient of {plain.__name__} is off by"):
                    compare_gradients(plain, inputs, given, wrong)
    compare(plain, inputs, [2 * own for own in outputs])


def test_a_convolution_is_what_pytorch_makes_of_it() -> None:
    x, w = IMAGE[0], drawn(OUTS, C, 3, 3)[0]
    y, statistics, again = convolution(x, None, None, None, False, True, w, 1, 1)
    torch.testing.assert_close(y, F.conv2d(x, w, padding=1))
    torch.testing.assert_close(statistics, torch.stack([y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False)]))
    assert torch.equal(again, x)


def test_images_of_half_precision() -> None:
    """They keep float16's ten bits, however large, and their gradients have bfloat16's range."""
    image = torch.tensor([1 + 2**-10, 3e-6, 1e6, -1e6, torch.nan]).reshape(1, 1, 1, 1, 5).requires_grad_()
    packed = PackedOfClients.apply(image)  # type: ignore[no-untyped-call]
    assert packed.dtype == torch.bfloat16
    wanted = image.detach().clamp(-65504, 65504).half()
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
