"""Convolutions 1x1 of a whole cohort, as products over its memory as it lies.

After a grouped convolution or a batch norm `vmap` holds a cohort as [B, K, C, ...], and a product under `vmap` would
copy it to [K, B, C, ...] first. The function here has a batching rule of its own, which sees the memory and leaves it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fedloom.vmapped import joined


class Pointwise(torch.autograd.Function):
    """[B, K, C, n] times [K, O, C] is [B, K, O, n]: each sample of each client by the client's own weights."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        found = torch.bmm(_for_each(weight, len(x)), x.flatten(0, 1))
        return found.reshape(*x.shape[:2], *found.shape[1:])

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat = gradient.flatten(0, 1)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = torch.bmm(_for_each(weight, len(x)).mT, flat).view_as(x)
        if ctx.needs_input_grad[1]:  # a product for each sample, then their sum: one product over them all is narrow
            of_weight = torch.bmm(flat, x.flatten(0, 1).mT).reshape(len(x), *weight.shape).sum(0)
        return of_x, of_weight

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        x, weight = joined(info.batch_size, in_dims, x, weight)
        found: Tensor = Pointwise.apply(x, weight)  # type: ignore[no-untyped-call]
        return found.reshape(len(found), info.batch_size, -1, *found.shape[2:]), 1


def pointwise(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution of x [B, C, h, w] by weight [O, C, 1, 1]."""
    found: Tensor = Pointwise.apply(x.flatten(2).unsqueeze(1), weight.flatten(1).unsqueeze(0))  # type: ignore[no-untyped-call]
    return found.reshape(len(x), len(weight), *x.shape[2:])


def _for_each(weight: Tensor, samples: int) -> Tensor:
    """The clients' weights [K, O, C] once more for each sample, [B * K, O, C]."""
    return weight.expand(samples, *weight.shape).flatten(0, 1)
