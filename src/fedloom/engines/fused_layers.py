"""The layers of `fused.py`: a convolution with its statistics, a batch norm as numbers, the sum that ends a block.

Each comes twice: as a function of K clients at once, with gradients, by the kernels of `fused_kernels.py` as
`fused_passes.py` calls them; and as what `vmap` calls, which hands all clients to the first.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fedloom.engines.fused_check import addition, compare, compare_gradients, convolution, numbers, scaling
from fedloom.engines.fused_passes import (
    LARGEST_HALF,
    Given,
    Sizes,
    block_of,
    blocks_of,
    by_channel,
    by_place,
    convolve,
    dense,
    input_gradient,
    kind_of,
    rows_apart,
    shared,
    weight_gradient,
)


def _under_vmap(inner: Any) -> Any:
    """A function of one client, which `vmap` calls with all of them: `inner`, which also has the gradients."""

    class OfOne(torch.autograd.Function):
        @staticmethod
        def forward(*values: Any) -> Any:
            raise NotImplementedError("this is for clients under vmap; one alone has PyTorch's own layers")

        @staticmethod
        def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
            """Nothing is kept here."""

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
            held = [
                _rows(value, at, info.batch_size) if isinstance(value, Tensor) else value
                for value, at in zip(values, in_dims, strict=True)
            ]
            found = inner.apply(*held)
            return found, tuple(0 for _ in found) if isinstance(found, tuple) else 0

    return OfOne


def _rows(value: Tensor, at: int | None, rows: int) -> Tensor:
    return value.expand(rows, *value.shape) if at is None else value.movedim(at, 0)


class ConvolutionOfClients(torch.autograd.Function):
    """x [K, B, C, H, W], perhaps under a norm [K, C] and a ReLU, by weight [K, O, C, size, size]: y [K, B, O, h, w],
    the mean and the variance of its channels [K, 2, O], and x itself where others read it `through` this one.
    """

    @staticmethod
    def forward(
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
        norm = None if mean is None else dense(mean, scale, bias, x)
        read = numbers(by_place(x))
        shape = Sizes.of(read, weight, stride, padding)
        y = x.new_empty((shape.rows, shape.samples, *shape.to, shape.outs))
        statistics = torch.empty((shape.rows, 2, shape.outs), device=x.device)
        convolve(read, norm, relu, weight, stride, padding, numbers(y), statistics)
        beside = [x.view_as(x)] if through else []
        inputs = (x, mean, scale, bias, relu, through, weight, stride, padding)
        compare(convolution, inputs, (by_channel(y), *statistics.unbind(1), *beside))
        return by_channel(y), statistics, *beside

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, mean, scale, bias, ctx.relu, ctx.through, weight, ctx.stride, ctx.padding = inputs
        ctx.set_materialize_grads(False)  # where nobody reads through it, there is nothing to add
        ctx.save_for_backward(x, mean, scale, bias, weight, *output[:2])

    @staticmethod
    def backward(
        ctx: Any, g: Tensor | None, of_statistics: Tensor | None, through: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        x, mean, scale, bias, weight, y, statistics = ctx.saved_tensors
        if g is None:
            g = torch.zeros_like(y)
        if of_statistics is None:
            of_statistics = torch.zeros_like(statistics)
        given = Given(by_place(g), numbers(by_place(y)), statistics.contiguous(), of_statistics.contiguous())
        x = numbers(by_place(x))
        shape = Sizes.of(x, weight, ctx.stride, ctx.padding)
        if shape.size > 1:
            given = given.whole()
        norm = None if mean is None else dense(mean, scale, bias, x)
        beside = None if through is None else by_place(through)
        of_x = of_mean = of_scale = of_bias = None
        if ctx.needs_input_grad[0] and norm is None and shape.turns_round:
            # A convolution, too, by the weights turned round.
            of_x = torch.empty_like(x, dtype=given.g.dtype)
            turned = weight.flip(3, 4).transpose(1, 2)
            convolve(given.g, None, False, turned, 1, shape.size - 1 - ctx.padding, of_x, None)
            of_x = of_x if beside is None else of_x + beside
        elif any(ctx.needs_input_grad[:4]):
            of_x, of_scale, of_bias = input_gradient(given, x, norm, ctx.relu, weight, shape, beside)
            of_mean = None if of_bias is None else -scale * of_bias
        of_x = None if of_x is None else by_channel(of_x)
        of_weight = weight_gradient(given, x, norm, ctx.relu, shape).reshape(weight.shape)
        found = (of_x, of_mean, of_scale, of_bias, None, None, of_weight, None, None)
        settings = (ctx.relu, ctx.through, weight, ctx.stride, ctx.padding)
        of_outputs = (g, *of_statistics.unbind(1), *([through] if ctx.through else []))
        inputs = (by_channel(x), mean, scale, bias, *settings)
        compare_gradients(convolution, inputs, of_outputs, found, ctx.needs_input_grad)
        return found


class ScaleOfClients(torch.autograd.Function):
    """From the statistics [K, 2, C] of an image and a batch norm's weight [K, C]: mean and scale [K, C], and what its
    running statistics become.
    """

    @staticmethod
    def forward(
        statistics: Tensor,
        weight: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
        places: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from fedloom.engines import fused_kernels as kernels

        statistics, weight = statistics.contiguous(), rows_apart(weight)
        rows, _, channels = statistics.shape
        found = [torch.empty((rows, channels), device=weight.device) for _ in range(4)]
        kernels.norm_forward[(blocks_of(channels), rows)](
            statistics, weight, running_mean.contiguous(), running_var.contiguous(), *found,
            weight.stride(0), momentum, eps, places, C=channels, BC=block_of(channels),
        )  # fmt: skip
        mean, scale, new_mean, new_var = found
        inputs = (*statistics.unbind(1), weight, running_mean, running_var, momentum, eps, places)
        compare(scaling, inputs, found)
        return mean, scale, new_mean, new_var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.eps = inputs[5]
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor | None, of_scale: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        from fedloom.engines import fused_kernels as kernels

        if of_mean is None or of_scale is None:  # nobody has used it
            return None, None, None, None, None, None, None
        statistics, weight = ctx.saved_tensors
        statistics, weight = statistics.contiguous(), rows_apart(weight)
        rows, _, channels = statistics.shape
        of_statistics, of_weight = torch.empty_like(statistics), torch.empty_like(of_scale)
        kernels.norm_backward[(blocks_of(channels), rows)](
            statistics, weight, of_mean.contiguous(), of_scale.contiguous(), of_statistics, of_weight,
            weight.stride(0), ctx.eps, C=channels, BC=block_of(channels),
        )  # fmt: skip
        inputs = (*statistics.unbind(1), weight, weight, weight, 0.1, ctx.eps, 2)  # the running ones have no gradient
        gradients = (*of_statistics.unbind(1), of_weight, *5 * [None])
        needed = (*2 * ctx.needs_input_grad[:1], *ctx.needs_input_grad[1:])
        compare_gradients(scaling, inputs, (of_mean, of_scale, None, None), gradients, needed)
        return of_statistics, of_weight, None, None, None, None, None


class SumOfClients(torch.autograd.Function):
    """relu(norm(y) + other) of images [K, B, C, H, W]; `other` may be none, and may have a norm of its own."""

    @staticmethod
    def forward(
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
        from fedloom.engines import fused_kernels as kernels

        y = by_place(y)
        out = torch.empty_like(y)
        read = numbers(y)
        beside = read if other is None else numbers(by_place(other))
        norms = [*dense(mean, scale, bias, read), beside, *dense(other_mean, other_scale, other_bias, read)]
        places, grid, blocks = shared(y)
        kernels.sum_forward[grid](
            read, *norms, numbers(out), places, C=y.shape[-1], OTHER=kind_of(other, other_mean), RELU=relu, **blocks
        )
        inputs = (by_channel(y), mean, scale, bias, other, other_mean, other_scale, other_bias, relu)
        compare(addition, inputs, [by_channel(out)])
        return by_channel(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.relu = inputs[-1]
        ctx.save_for_backward(*inputs[:-1], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.engines import fused_kernels as kernels

        *inputs, out = ctx.saved_tensors
        y, mean, scale, _, other, other_mean, other_scale, _ = inputs
        kind = kind_of(other, other_mean)
        g, y = by_place(g), by_place(y)
        read = numbers(y)
        beside = read if other is None else numbers(by_place(other))
        of_y, of_other = torch.empty_like(g), torch.empty_like(g) if kind else g
        places, grid, blocks = shared(y)
        partial = torch.empty((len(y), grid[0], 3, y.shape[-1]), device=y.device)
        kernels.sum_backward[grid](
            g, numbers(by_place(out)), read, *dense(mean, scale, read), beside,
            *dense(other_mean, other_scale, read), of_y, of_other, partial, places,
            C=y.shape[-1], OTHER=kind, RELU=ctx.relu, **blocks,
        )  # fmt: skip
        of_y, of_other = by_channel(of_y), by_channel(of_other)
        of_bias, of_scale, of_other_scale = partial.sum(1).unbind(1)
        found: tuple[Tensor | None, ...] = (of_y, -scale * of_bias, of_scale, of_bias, of_other if kind else None)
        found += (-other_scale * of_bias, of_other_scale, of_bias, None) if kind == 2 else (None, None, None, None)
        compare_gradients(addition, (*inputs, ctx.relu), [by_channel(g)], found, ctx.needs_input_grad)
        return found


class PackedOfClients(torch.autograd.Function):
    """Images as bfloat16 that hold the bits of float16.

    What a net makes of rounding grows from layer to layer, forward: images need float16's mantissa, as long as that of
    TF32. Gradients need bfloat16's range, and their rounding stays as small as it is. But `autograd` gives an image
    and its gradient one type.
    """

    @staticmethod
    def forward(images: Tensor) -> Tensor:
        fitting = images.clamp(-LARGEST_HALF, LARGEST_HALF).where(images.isfinite(), images)
        return by_channel(by_place(fitting.to(torch.float16)).view(torch.bfloat16))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.to(ctx.dtype)


class UnpackedOfClients(torch.autograd.Function):
    """What everybody else can read, though not change: it is a view, so that `autograd` refuses it."""

    @staticmethod
    def forward(images: Tensor) -> Tensor:
        return numbers(images).to(torch.bfloat16).contiguous().view(images.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


Convolution = _under_vmap(ConvolutionOfClients)
Packed = _under_vmap(PackedOfClients)
Unpacked = _under_vmap(UnpackedOfClients)
Scale = _under_vmap(ScaleOfClients)
Sum = _under_vmap(SumOfClients)
