"""Convolutions over few channels, and those of one pixel, as matrix products.

A cohort's convolution is a grouped one, and cuDNN's grouped kernels are at their worst where channels are few: on an
H200 the first layer of cnn-mcmahan takes longer than all others together, and LeNet-5's second longer than the rest.
There are three products for three kinds of them:

- of patches, for the one to four channels of an image: its input is the data, whose gradient nobody asks for, so no
  patch is ever put back;
- of rows by bands (`bands.py`), where channels are few on both sides, on a GPU, in steps that are not compiled:
  torch 2.11 compiles a wrong step of them (tests/gpu/test_speed.py showed it);
- of the images as they lie (`pointwise.py`), for a convolution 1x1: cuDNN takes 3 to 24 times as long for ResNet-56's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.engines.bands import banded
from fedloom.engines.pointwise import pointwise

Pair = tuple[int, int]
Product = Callable[[Tensor, Tensor, Pair, Pair], Tensor]

FEW = 4  # channels
THIN = 16  # channels before and behind a convolution
WIDE = 8  # widths of the kernel in that of the image, which is how much arithmetic bands add


def convolved(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv2d`, as a product where that is faster."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind):  # under `vmap` it lowers products and leaves convolutions as they are
        low = None if bias is None else _lowered(bias)
        with torch.autocast(kind, enabled=False):
            return convolved(_lowered(input), _lowered(weight), low, stride, padding, dilation, groups)
    plain = groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str) and input.dim() == 4
    if plain:
        pairs = _pair(stride), _pair(padding)
        product = form(input.shape, weight.shape, *pairs, bands=input.is_cuda and not is_traced())
        if product is not None:
            found = product(input, weight, *pairs)
            return found if bias is None else found + bias[:, None, None].to(found.dtype)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


def form(image: Sequence[int], weight: Sequence[int], stride: Pair, padding: Pair, bands: bool) -> Product | None:
    """The product that is faster than a convolution of these sizes, if there is one."""
    outputs, inputs, _, wide = weight
    if tuple(weight[2:]) == (1, 1) and padding == (0, 0) and inputs > FEW:
        return _points
    thin = max(inputs, outputs) <= THIN and image[3] + 2 * padding[1] <= WIDE * wide
    if bands and thin and stride == (1, 1):
        return _bands
    return _patches if inputs <= FEW else None


def is_traced() -> bool:
    """Is the step being written down for the compiler?"""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def _points(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    return pointwise(x[:, :, :: stride[0], :: stride[1]], weight)


def _bands(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    return banded(x, weight, padding)


def _patches(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """The convolution of x [B, C, H, W] by weight [O, C, tall, wide], as a product of each sample's patches."""
    (down, right), (rows, columns), (tall, wide) = stride, padding, weight.shape[2:]
    if rows or columns:
        x = F.pad(x, (columns, columns, rows, rows))
    patches = x.unfold(2, tall, down).unfold(3, wide, right)  # [B, C, h, w, tall, wide]
    samples, channels, h, w = patches.shape[:4]
    table = patches.permute(0, 1, 4, 5, 2, 3).reshape(samples, channels * tall * wide, h * w)
    # A product for each sample: its gradient then is a sum over samples, instead of one narrow product over them all.
    return torch.bmm(weight.flatten(1).expand(samples, -1, -1), table).reshape(samples, len(weight), h, w)


def _lowered(values: Tensor) -> Tensor:
    """As autocast would have it."""
    return values if values.dtype == torch.float64 else values.to(torch.get_autocast_dtype(values.device.type))


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
