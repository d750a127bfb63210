"""The layers of `fused_layers.py` by PyTorch's own functions, for one client: what kernels are compared with.

A deep net with batch norms makes another step of the least rounding, so that one of its steps in two forms tells little
about either. A layer that is given the same numbers does not: what kernels make of them is compared layer by layer, in
the first step, for the first client.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

OFF = 0.1  # of a result: rounding, even to eight bits, makes a tenth of it, and a wrong kernel ten times as much

_compares = [False]  # gradients are computed in threads of their own, so this is for all threads


@contextmanager
def compared() -> Iterator[None]:
    """Meanwhile layers compare what they compute, and raise an error where it is something else."""
    _compares[0] = True
    try:
        yield
    finally:
        _compares[0] = False


def compare(plain: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    """Outputs, of inputs, for K clients."""
    if _compares[0]:
        _agree(plain.__name__, [_first(value) for value in outputs], _as_tuple(plain(*map(_first, inputs))))


def compare_gradients(
    plain: Callable[..., Any],
    inputs: Sequence[Any],
    of_outputs: Sequence[Tensor | None],
    found: Sequence[Tensor | None],
) -> None:
    """Gradients of inputs, from those of outputs; None where there is none."""
    if not _compares[0]:
        return
    own = [
        value.requires_grad_() if isinstance(value, Tensor) and of_value is not None else value
        for value, of_value in zip(map(_first, inputs), found, strict=True)
    ]
    with torch.enable_grad():
        pairs = [
            (output, of_output[0].to(output))
            for output, of_output in zip(_as_tuple(plain(*own)), of_outputs, strict=True)
            if of_output is not None
        ]
        leaves = [value for value, of_value in zip(own, found, strict=True) if of_value is not None]
        outputs, given = zip(*pairs, strict=True)
        wanted = torch.autograd.grad(outputs, leaves, given)
    _agree(f"the gradient of {plain.__name__}", [value[0].float() for value in found if value is not None], wanted)


def convolution(
    x: Tensor,
    mean: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    relu: bool,
    through: bool,
    weight: Tensor,
    stride: int,
    padding: int,
) -> tuple[Tensor, ...]:
    read = x if mean is None or scale is None or bias is None else _normed(x, mean, scale, bias)
    y = F.conv2d(read.relu() if relu else read, weight, None, stride, padding)
    statistics = torch.stack([y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False)])
    return (y, statistics, 1 * x) if through else (y, statistics)


def scaling(statistics: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return 1 * statistics[0], weight / (statistics[1] + eps).sqrt()


def addition(
    y: Tensor,
    mean: Tensor,
    scale: Tensor,
    bias: Tensor,
    other: Tensor | None,
    other_mean: Tensor | None,
    other_scale: Tensor | None,
    other_bias: Tensor | None,
    relu: bool,
) -> Tensor:
    found = _normed(y, mean, scale, bias)
    if other_mean is not None and other_scale is not None and other_bias is not None and other is not None:
        other = _normed(other, other_mean, other_scale, other_bias)
    found = found if other is None else found + other
    return found.relu() if relu else found


def numbers(images: Tensor) -> Tensor:
    """What images hold: those of half precision are the bits of float16, as `fused_layers.Packed` has them."""
    return images.view(torch.float16) if images.dtype == torch.bfloat16 else images


def _normed(x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return (x - mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]


def _first(value: Any) -> Any:
    return numbers(value)[0].detach().float() if isinstance(value, Tensor) else value


def _as_tuple(values: Any) -> tuple[Tensor, ...]:
    return values if isinstance(values, tuple) else (values,)


def _agree(what: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        off, size = float((one - other).norm()), float(other.norm())
        if not off <= OFF * size:
            raise ArithmeticError(f"{what} is off by {off:.2g}, where it is {size:.2g}")
