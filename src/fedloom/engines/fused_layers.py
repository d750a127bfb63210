"""The layers of `fused.py`: a convolution with its statistics, a batch norm as numbers, the sum that ends a block.

Each comes twice: as a function of K clients at once, with gradients, by the kernels of `fused_kernels.py`; and as what
`vmap` calls, which hands all clients to the first.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

LEAST, MOST = 16, 64  # rows and columns of a product
TILE, NARROW = 128, 64  # places that a program takes at once
PROGRAMS = 1024  # that share the places of a sum: several for each processor of a GPU
PARTS = 256  # tiles whose statistics are merged at once


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


def _convolution(
    x: Tensor,
    mean: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    stride: int,
    padding: int,
    relu: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    from fedloom.engines import fused_kernels as kernels

    shape = Sizes.of(x, weight, stride, padding)
    y = torch.empty((shape.rows, shape.samples, shape.outs, *shape.to), dtype=dtype, device=x.device)
    block = _block(shape.outs)
    tile = NARROW if block == MOST else TILE if shape.size == 1 else 2 * TILE
    tiles = -(-shape.places // tile)
    partial = torch.empty((shape.rows, tiles, 2, shape.outs), device=x.device)
    statistics = torch.empty((shape.rows, 2, shape.outs), device=x.device)
    kernels.forward[(tiles, _blocks(shape.outs), shape.rows)](
        x, _by_tap(weight), *_dense(mean, scale, bias, x), y, partial, shape.samples, **shape.constants(),
        NORMED=mean is not None, RELU=relu, **_product(dtype), BC=_block(shape.channels), BO=block, BP=tile,
    )  # fmt: skip
    kernels.merge[(_blocks(shape.outs, LEAST), shape.rows)](
        partial, statistics, tiles, shape.places, O=shape.outs, BP=tile, BT=PARTS, BO=LEAST
    )
    return y, statistics


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
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        x = x.contiguous()
        y, statistics = _convolution(x, mean, scale, bias, weight, stride, padding, relu, dtype)
        return (y, statistics, x.view_as(x)) if through else (y, statistics)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, mean, scale, bias, ctx.relu, ctx.through, weight, ctx.stride, ctx.padding, ctx.dtype = inputs
        ctx.save_for_backward(x, mean, scale, bias, weight, *output[:2])

    @staticmethod
    def backward(ctx: Any, g: Tensor, of_statistics: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.engines import fused_kernels as kernels

        x, mean, scale, bias, weight, y, statistics = ctx.saved_tensors
        x, g, of_statistics = x.contiguous(), g.contiguous(), of_statistics.contiguous()
        shape = Sizes.of(x, weight, ctx.stride, ctx.padding)
        norm = _dense(mean, scale, bias, x)
        shared = {**shape.constants(), **_product(ctx.dtype), "NORMED": mean is not None, "RELU": ctx.relu}
        shared["WHOLE"] = shape.size > 1
        if shape.size > 1:
            direct, g, places = g, torch.empty_like(g), shape.to[0] * shape.to[1]
            kernels.whole[(-(-shape.places // TILE), _blocks(shape.outs, LEAST), shape.rows)](
                direct, y, statistics, of_statistics, g, shape.samples, O=shape.outs, P=places, BO=LEAST, BP=TILE
            )
        of_x = of_mean = of_scale = of_bias = None
        if ctx.needs_input_grad[0] and mean is None and shape.turns_round:
            # A convolution, too, by the weights turned round. The kernel below is right in Triton's interpreter, but as
            # Triton 3.6 compiles it for an H200 it is wrong for stride 1 and fewer than 64 channels.
            turned = weight.flip(3, 4).transpose(1, 2)
            of_x = _convolution(g, None, None, None, turned, 1, shape.size - 1 - ctx.padding, False, x.dtype)[0]
            of_x = of_x + others[0] if others else of_x
        elif ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x)
            through = others[0].contiguous() if others else x
            tiles = -(-shape.samples * x.shape[3] * x.shape[4] // NARROW)
            partial = torch.empty((shape.rows, tiles, 2, shape.channels), device=x.device)
            kernels.input_backward[(tiles, _blocks(shape.channels), shape.rows)](
                g, y, statistics, of_statistics, _by_tap(weight.transpose(1, 2)), x, *norm, through, of_x, partial,
                shape.samples, **shared, THROUGH=bool(others),
                BC=_block(shape.channels), BO=min(MOST // 2, _block(shape.outs)), BP=NARROW,
            )  # fmt: skip
            if mean is not None:
                of_bias, of_scale = partial.sum(1).unbind(1)
                of_mean = -scale * of_bias
        wide, tall, taps = _block(shape.channels), _block(shape.outs), shape.size * shape.size
        across = _blocks(shape.outs) * _blocks(shape.channels) * taps
        programs = PROGRAMS if taps == 1 else 4 * PROGRAMS
        parts = max(1, min(-(-shape.places // NARROW), programs // (shape.rows * across)))
        partial = torch.empty((shape.rows, parts, taps, shape.outs, shape.channels), device=x.device)
        kernels.weight_backward[(parts, across, shape.rows)](
            g, y, statistics, of_statistics, x, *norm, partial, shape.samples, **shared, BC=wide, BO=tall, BP=NARROW
        )
        of_weight = partial.sum(1).permute(0, 2, 3, 1).reshape(weight.shape)
        return of_x, of_mean, of_scale, of_bias, None, None, of_weight, None, None, None


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

        statistics, weight = statistics.contiguous(), _rows_apart(weight)
        rows, _, channels = statistics.shape
        found = [torch.empty((rows, channels), device=weight.device) for _ in range(4)]
        kernels.norm_forward[(_blocks(channels), rows)](
            statistics, weight, running_mean.contiguous(), running_var.contiguous(), *found,
            weight.stride(0), momentum, eps, places, C=channels, BC=_block(channels),
        )  # fmt: skip
        mean, scale, new_mean, new_var = found
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
        statistics, weight = statistics.contiguous(), _rows_apart(weight)
        rows, _, channels = statistics.shape
        of_statistics, of_weight = torch.empty_like(statistics), torch.empty_like(of_scale)
        kernels.norm_backward[(_blocks(channels), rows)](
            statistics, weight, of_mean.contiguous(), of_scale.contiguous(), of_statistics, of_weight,
            weight.stride(0), ctx.eps, C=channels, BC=_block(channels),
        )  # fmt: skip
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

        rows, samples, channels, *size = y.shape
        y, beside = y.contiguous(), y if other is None else other.contiguous()
        out = torch.empty_like(y)
        norms = [*_dense(mean, scale, bias, y), beside, *_dense(other_mean, other_scale, other_bias, y)]
        places = size[0] * size[1]
        grid = (-(-samples * places // TILE), _blocks(channels, LEAST), rows)
        kernels.sum_forward[grid](
            y, *norms, out, samples, C=channels, P=places, OTHER=_kind(other, other_mean), RELU=relu, BC=LEAST, BP=TILE
        )
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.relu = inputs[-1]
        ctx.save_for_backward(*inputs[:3], *inputs[4:7], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.engines import fused_kernels as kernels

        y, mean, scale, other, other_mean, other_scale, out = ctx.saved_tensors
        rows, samples, channels, *size = y.shape
        y, beside = y.contiguous(), y if other is None else other.contiguous()
        kind = _kind(other, other_mean)
        of_y, of_other = torch.empty_like(y), torch.empty_like(y) if kind else y
        places = size[0] * size[1]
        tiles = -(-samples * places // TILE)
        partial = torch.empty((rows, tiles, 3, channels), device=y.device)
        kernels.sum_backward[(tiles, _blocks(channels, LEAST), rows)](
            g.contiguous(), out, y, mean.contiguous(), scale.contiguous(), beside, *_dense(other_mean, other_scale, y),
            of_y, of_other, partial, samples, C=channels, P=places, OTHER=kind, RELU=ctx.relu, BC=LEAST, BP=TILE,
        )  # fmt: skip
        of_bias, of_scale, of_other_scale = partial.sum(1).unbind(1)
        own = (of_y, -scale * of_bias, of_scale, of_bias)
        if kind == 2:
            return *own, of_other, -other_scale * of_bias, of_other_scale, of_bias, None
        return *own, of_other if kind else None, None, None, None, None


Convolution = _under_vmap(ConvolutionOfClients)
Scale = _under_vmap(ScaleOfClients)
Sum = _under_vmap(SumOfClients)


class Sizes(NamedTuple):
    """Of a convolution."""

    rows: int
    samples: int
    channels: int
    image: tuple[int, int]
    outs: int
    to: tuple[int, int]
    size: int
    stride: int
    padding: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, stride: int, padding: int) -> "Sizes":
        rows, samples, channels, height, width = x.shape
        outs, size = weight.shape[1], weight.shape[3]
        h, w = ((length + 2 * padding - size) // stride + 1 for length in (height, width))
        return cls(rows, samples, channels, (height, width), outs, (h, w), size, stride, padding)

    @property
    def turns_round(self) -> bool:
        """Is the gradient of the input a convolution of the output's? Of a single tap it is one anyway."""
        return self.size > 1 and self.stride == 1

    @property
    def places(self) -> int:
        return self.samples * self.to[0] * self.to[1]

    def constants(self) -> dict[str, int]:
        (height, width), (h, w) = self.image, self.to
        sizes = {"C": self.channels, "H": height, "W": width, "O": self.outs, "HO": h, "WO": w}
        return {**sizes, "SIZE": self.size, "STRIDE": self.stride, "PAD": self.padding}


def _product(dtype: torch.dtype) -> dict[str, Any]:
    """How a kernel multiplies matrices."""
    import triton.language as tl

    return {"DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, "num_stages": 1}


def _by_tap(weight: Tensor) -> Tensor:
    """[K, O, C, size, size] as [K, taps, O, C]."""
    return weight.flatten(3).permute(0, 3, 1, 2).contiguous()


def _kind(other: Tensor | None, norm: Tensor | None) -> int:
    return 0 if other is None else 1 if norm is None else 2


def _block(n: int) -> int:
    """A power of two that holds n, or that n is cut into."""
    return min(MOST, max(LEAST, 1 << (n - 1).bit_length()))


def _blocks(n: int, size: int | None = None) -> int:
    return -(-n // (size or _block(n)))


def _rows_apart(values: Tensor) -> Tensor:
    """Whose rows may lie apart, as those of a part of a matrix do, but are whole."""
    return values if values[0].is_contiguous() else values.contiguous()


def _dense(*values: Tensor | None) -> list[Tensor]:
    """Arguments of a kernel; the last stands for those that are missing, and is not one of them."""
    *given, instead = values
    assert instead is not None  # nosec B101  # for the type checker
    return [instead if value is None else value.contiguous() for value in given]
