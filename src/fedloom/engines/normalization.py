"""Batch norms of a whole cohort, as one batch norm of K times as many channels.

`vmap` has a rule for the statistics alone: the scale and the offset of each client are a product and a sum beside it,
and their gradients two more passes over all images. Here they are arguments of the kernel.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from fedloom.vmapped import joined


class BatchNorm(torch.autograd.Function):
    """A batch norm [B, C, ...] in training, and what its running statistics become. It has a rule for `vmap`, and is
    not called without it.
    """

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError("a batch norm without clients is F.batch_norm")

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Gradients are those of F.batch_norm, which the rule calls."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, *rest: Any
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        rows, (*own, momentum, eps) = info.batch_size, rest
        x, weight, bias, mean, var = joined(rows, in_dims[:-2], x, *own)
        mean, var = mean.clone(), var.clone()
        found = F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
        return (found.view(len(x), rows, -1, *x.shape[2:]), mean.view(rows, -1), var.view(rows, -1)), (1, 0, 0)


def normalised(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` under `vmap`."""
    plain = training and weight is not None and bias is not None
    if not plain or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    found: Tensor
    found, mean, var = BatchNorm.apply(input, weight, bias, running_mean, running_var, momentum, eps)  # type: ignore[no-untyped-call]
    running_mean.copy_(mean)
    running_var.copy_(var)
    return found
