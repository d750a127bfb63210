"""The layers of `fused_layers.py` by PyTorch's own functions, for one client: what kernels are compared with.

A deep net with batch norms makes another step of the least rounding, so that one of its steps in two forms tells little
about either. A layer that is given the same numbers does not: what kernels make of them is compared layer by layer, in
the first step, for the first client and the last.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

OFF = 0.1  # of a result: rounding, even to eight bits, makes a tenth of it, and a wrong kernel ten times as much
MORE = 3  # times what rounded inputs make of a result, where that is more: of a sum that should be zero all is rounding
UNIT = {torch.float32: 2.0**-11, torch.float16: 2.0**-8}  # the share of a number that is lost, by what images hold

_compares = [False]  # gradients are computed in threads of their own, so this is for all threads


@contextmanager
def compared() -> Iterator[None]:
    """Meanwhile layers compare what they compute, and raise an error where it is something else."""
    _compares[0] = True
    try:
        yield
    finally:
        _compares[0] = False


def compare(plain: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    """Outputs, of inputs, for K clients."""
    for k in (0, -1) if _compares[0] else ():
        own = [_of(value, k) for value in inputs]
        right, nudged = (plain(*_off(own, away)) for away in (0.0, _unit(inputs)))
        _agree(plain.__name__, [_of(value, k) for value in outputs], right, nudged)


def compare_gradients(
    plain: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Any],
    of_outputs: Sequence[Tensor | None],
    found: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> None:
    """Gradients of inputs, from those of outputs; None where there is none. Some of them are needed."""
    if not _compares[0]:
        return
    what = f"the gradient of {plain.__name__}"
    if any(own is None and wanted for own, wanted in zip(found, needed, strict=True)):
        raise ArithmeticError(f"{what} is missing")
    there = [own is not None for own in found]
    for k in (0, -1):
        own = [_of(value, k) for value in inputs]
        given = [None if value is None else value[k].float() for value in of_outputs]
        right, nudged = (_gradients(plain, _off(own, away), _off(given, away), there) for away in (0.0, _unit(inputs)))
        _agree(what, [value[k].float() for value in found if value is not None], right, nudged)


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
    """The output, its mean and its variance, and x itself."""
    read = x if mean is None or scale is None or bias is None else _normed(x, mean, scale, bias)
    y = F.conv2d(read.relu() if relu else read, weight, None, stride, padding)
    return y, y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False), *([1 * x] if through else [])


def scaling(
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    places: int,
) -> tuple[Tensor, ...]:
    """Mean, scale, and what the running statistics become."""
    unbiased = variance * places / (places - 1)
    pairs = ((running_mean, mean), (running_var, unbiased))
    after = [before + momentum * (own.detach() - before) for before, own in pairs]
    return 1 * mean, weight / (variance + eps).sqrt(), *after


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
) -> tuple[Tensor]:
    found = _normed(y, mean, scale, bias)
    if other_mean is not None and other_scale is not None and other_bias is not None and other is not None:
        other = _normed(other, other_mean, other_scale, other_bias)
    found = found if other is None else found + other
    return (found.relu() if relu else found,)


def numbers(images: Tensor) -> Tensor:
    """What images hold: those of half precision are the bits of float16, as `fused_layers.Packed` has them."""
    return images.view(torch.float16) if images.dtype == torch.bfloat16 else images


def _normed(x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return (x - mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]


def _of(value: Any, k: int) -> Any:
    """One client's."""
    return numbers(value)[k].detach().float() if isinstance(value, Tensor) else value


def _unit(inputs: Sequence[Any]) -> float:
    return max(UNIT[numbers(value).dtype] for value in inputs if isinstance(value, Tensor))


def _off(values: Sequence[Any], away: float) -> list[Any]:
    """Every number off by up to this share of itself."""

    def drawn(value: Tensor) -> Tensor:
        generator = torch.Generator(value.device).manual_seed(value.numel())
        return 2 * torch.rand(value.shape, generator=generator, device=value.device) - 1

    return [value * (1 + away * drawn(value)) if isinstance(value, Tensor) else value for value in values]


def _gradients(
    plain: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Any],
    given: Sequence[Tensor | None],
    there: Sequence[bool],
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [value.requires_grad_() for value, wanted in zip(inputs, there, strict=True) if wanted]
        pairs = [
            (output, of_output.to(output))
            for output, of_output in zip(plain(*inputs), given, strict=True)
            if of_output is not None
        ]
        outputs, of_outputs = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, leaves, of_outputs)


def _agree(what: str, found: Sequence[Tensor], right: Sequence[Tensor], nudged: Sequence[Tensor]) -> None:
    for one, other, rounded in zip(found, right, nudged, strict=True):
        off, size, least = (float(value.norm()) for value in (one - other, other, rounded - other))
        if not off <= max(OFF * size, MORE * least):
            raise ArithmeticError(f"{what} is off by {off:.2g}, where it is {size:.2g}")
