"""Convolutions over few channels, as one matrix product per client.

A cohort's convolution is a grouped one, and cuDNN's grouped kernels are at their worst on the three channels of an
image: on an H200 the first layer of cnn-mcmahan takes longer than all others together. As a product of patches it
takes a quarter of that. Its input is the data, whose gradient nobody asks for, so no patch is ever put back.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

FEW = 4  # channels


class Patches(TorchFunctionMode):
    """While it is entered, `F.conv2d` over few channels is a product."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return (_convolved if func is F.conv2d else func)(*args, **(kwargs or {}))


def _convolved(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    (down, right), (tall, wide), x = _pair(stride), weight.shape[2:], input
    plain = groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str)
    # Under autocast and vmap a product becomes bfloat16 where a convolution does not.
    if x.dim() != 4 or weight.shape[1] > FEW or not plain or torch.is_autocast_enabled(x.device.type):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    rows, columns = _pair(padding)
    if rows or columns:
        x = F.pad(x, (columns, columns, rows, rows))
    patches = x.unfold(2, tall, down).unfold(3, wide, right)  # [B, C, h, w, tall, wide]
    samples, channels, h, w = patches.shape[:4]
    table = patches.permute(0, 1, 4, 5, 2, 3).reshape(samples, channels * tall * wide, h * w)
    # A product for each sample: its gradient then is a sum over samples, instead of one narrow product over them all.
    found = torch.bmm(weight.flatten(1).expand(samples, -1, -1), table)
    if bias is not None:
        found = found + bias[:, None].to(found.dtype)
    return found.reshape(samples, len(weight), h, w)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


@contextmanager
def patched(model: nn.Module) -> Iterator[None]:
    """Products in place of convolutions, where the model has one that is narrow enough."""
    if not any(isinstance(module, nn.Conv2d) and module.in_channels <= FEW for module in model.modules()):
        yield
        return
    with Patches():
        yield
