"""Convolutions over few channels, and those of one pixel, as matrix products.

A cohort's convolution is a grouped one, and cuDNN's grouped kernels are at their worst on the three channels of an
image: on an H200 the first layer of cnn-mcmahan takes longer than all others together. As a product of patches it
takes a quarter of that. Its input is the data, whose gradient nobody asks for, so no patch is ever put back. A
convolution 1x1 is a product as it stands (`pointwise.py`): cuDNN takes 3 to 24 times as long for ResNet-56's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.engines.pointwise import pointwise

FEW = 4  # channels


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
    plain = groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str) and input.dim() == 4
    # Under autocast and vmap a product becomes bfloat16 where a convolution does not.
    if not plain or not _is_product(weight, padding) or torch.is_autocast_enabled(input.device.type):
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    down, right = _pair(stride)
    if weight.shape[1] <= FEW:
        found = _patches(input, weight, (down, right), _pair(padding))
    else:
        found = pointwise(input[:, :, ::down, ::right], weight)
    return found if bias is None else found + bias[:, None, None].to(found.dtype)


def _is_product(weight: Tensor, padding: Any) -> bool:
    return weight.shape[1] <= FEW or (tuple(weight.shape[2:]) == (1, 1) and _pair(padding) == (0, 0))


def _patches(x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """The convolution of x [B, C, H, W] by weight [O, C, tall, wide], as a product of each sample's patches."""
    (down, right), (rows, columns), (tall, wide) = stride, padding, weight.shape[2:]
    if rows or columns:
        x = F.pad(x, (columns, columns, rows, rows))
    patches = x.unfold(2, tall, down).unfold(3, wide, right)  # [B, C, h, w, tall, wide]
    samples, channels, h, w = patches.shape[:4]
    table = patches.permute(0, 1, 4, 5, 2, 3).reshape(samples, channels * tall * wide, h * w)
    # A product for each sample: its gradient then is a sum over samples, instead of one narrow product over them all.
    return torch.bmm(weight.flatten(1).expand(samples, -1, -1), table).reshape(samples, len(weight), h, w)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
