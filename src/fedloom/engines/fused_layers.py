"""The layers of `fused.py`: a convolution with its statistics, a batch norm as numbers, the sum that ends a block.

Each comes twice: as a function of K clients at once, with gradients, by the kernels of `fused_kernels.py`; and as what
`vmap` calls, which hands all clients to the first.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fedloom.engines.fused_check import addition, compare, compare_gradients, convolution, numbers, scaling

LEAST, MOST = 16, 64  # rows and columns of a product
WIDE, LARGEST = 256, 16384  # rows, and rows by columns, of a gradient of weights, which programs add up
TILE, NARROW = 128, 64  # places that a program takes at once
AT_ONCE = 4096  # values, where there is nothing to multiply
PROGRAMS = 1024  # that share the places of a sum: several for each processor of a GPU
LARGEST_HALF = 65504.0  # number of float16
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
    norm: list[Tensor] | None,
    relu: bool,
    weight: Tensor,
    stride: int,
    padding: int,
    out: Tensor,
    statistics: Tensor | None,
) -> None:
    """Of images [K, B, H, W, C], into `out`, and the mean and variance of its channels into `statistics`."""
    from fedloom.engines import fused_kernels as kernels

    shape = Sizes.of(x, weight, stride, padding)
    block = _block(shape.outs)
    tile = NARROW if block == MOST and shape.size > 1 else TILE
    tiles = -(-shape.places // tile)
    partial = torch.empty((shape.rows, tiles, 2, shape.outs), device=x.device) if statistics is not None else x
    kernels.forward[(tiles, _blocks(shape.outs), shape.rows)](
        x, _by_tap(weight.transpose(1, 2), x.dtype), *(norm or 3 * [x]), out, partial, shape.samples,
        **shape.constants(), NORMED=norm is not None, RELU=relu, STATISTICS=statistics is not None, **_product(x.dtype),
        BC=_block(shape.channels), BO=block, BP=tile, num_stages=3 if shape.size > 1 and shape.channels <= MOST else 1,
    )  # fmt: skip
    if statistics is not None:
        kernels.merge[(_blocks(shape.outs, LEAST), shape.rows)](
            partial, statistics, tiles, shape.places, O=shape.outs, BP=tile, BT=PARTS, BO=LEAST
        )


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
        norm = None if mean is None else _dense(mean, scale, bias, x)
        shape = Sizes.of(_by_place(x), weight, stride, padding)
        y = x.new_empty((shape.rows, shape.samples, *shape.to, shape.outs))
        statistics = torch.empty((shape.rows, 2, shape.outs), device=x.device)
        _convolution(numbers(_by_place(x)), norm, relu, weight, stride, padding, numbers(y), statistics)
        found = (_by_channel(y), statistics, *([x.view_as(x)] if through else []))
        compare(convolution, (x, mean, scale, bias, relu, through, weight, stride, padding), found)
        return found

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
        given = Given(_by_place(g), numbers(_by_place(y)), statistics.contiguous(), of_statistics.contiguous())
        x = numbers(_by_place(x))
        shape = Sizes.of(x, weight, ctx.stride, ctx.padding)
        if shape.size > 1:
            given = given.whole()
        norm = None if mean is None else _dense(mean, scale, bias, x)
        beside = None if through is None else _by_place(through)
        of_x = of_mean = of_scale = of_bias = None
        if ctx.needs_input_grad[0] and norm is None and shape.turns_round:
            # A convolution, too, by the weights turned round.
            of_x = torch.empty_like(x, dtype=given.g.dtype)
            turned = weight.flip(3, 4).transpose(1, 2)
            _convolution(given.g, None, False, turned, 1, shape.size - 1 - ctx.padding, of_x, None)
            of_x = of_x if beside is None else of_x + beside
        elif ctx.needs_input_grad[0]:
            of_x, of_scale, of_bias = _input_backward(given, x, norm, ctx.relu, weight, shape, beside)
            of_mean = None if of_bias is None else -scale * of_bias
        of_x = None if of_x is None else _by_channel(of_x)
        of_weight = _weight_backward(given, x, norm, ctx.relu, shape).reshape(weight.shape)
        found = (of_x, of_mean, of_scale, of_bias, None, None, of_weight, None, None)
        settings = (ctx.relu, ctx.through, weight, ctx.stride, ctx.padding)
        of_outputs = (g, of_statistics, *([through] if ctx.through else []))
        compare_gradients(convolution, (_by_channel(x), mean, scale, bias, *settings), of_outputs, found)
        return found


class Given(NamedTuple):
    """The gradient of a convolution's output: directly, and by its statistics."""

    g: Tensor  # [K, B, h, w, O]
    y: Tensor  # the output itself
    statistics: Tensor  # [K, 2, O]
    of_statistics: Tensor
    is_whole: bool = False

    def whole(self) -> "Given":
        """Both as one image."""
        from fedloom.engines import fused_kernels as kernels

        rows, samples, height, width, outs = self.g.shape
        places, block = samples * height * width, _block(outs)
        tile = AT_ONCE // block
        found = torch.empty_like(self.g)
        kernels.whole[(-(-places // tile), _blocks(outs), rows)](*self[:4], found, places, O=outs, BO=block, BP=tile)
        return self._replace(g=found, is_whole=True)


def _input_backward(
    given: Given,
    x: Tensor,
    norm: list[Tensor] | None,
    relu: bool,
    weight: Tensor,
    shape: "Sizes",
    through: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, and of scale and bias."""
    from fedloom.engines import fused_kernels as kernels

    of_x = torch.empty_like(x, dtype=given.g.dtype)
    tiles = -(-shape.samples * shape.image[0] * shape.image[1] // NARROW)
    partial = torch.empty((shape.rows, tiles, 2, shape.channels), device=x.device) if norm else x
    kernels.input_backward[(tiles, _blocks(shape.channels), shape.rows)](
        *given[:4], _by_tap(weight, given.g.dtype), x, *(norm or 3 * [x]), x if through is None else through, of_x,
        partial, shape.samples, **shape.constants(), **_product(given.g.dtype), NORMED=norm is not None, RELU=relu,
        THROUGH=through is not None, WHOLE=given.is_whole,
        BC=_block(shape.channels), BO=_block(shape.outs), BP=NARROW, num_stages=1,
    )  # fmt: skip
    if norm is None:
        return of_x, None, None
    of_bias, of_scale = partial.sum(1).unbind(1)
    return of_x, of_scale, of_bias


def _weight_backward(given: Given, x: Tensor, norm: list[Tensor] | None, relu: bool, shape: "Sizes") -> Tensor:
    """[K, O, C, taps]. Programs share the tiles."""
    from fedloom.engines import fused_kernels as kernels

    columns = 1 << (shape.size - 1).bit_length()
    tall = _block(shape.outs, WIDE)
    wide = _block(shape.channels, max(LEAST, LARGEST // (tall * columns)))
    across = _blocks(shape.outs, tall) * _blocks(shape.channels, wide) * shape.size
    parts = max(1, min(-(-shape.places // NARROW), PROGRAMS // (shape.rows * across)))
    partial = torch.empty((shape.rows, parts, shape.size**2, shape.outs, shape.channels), device=x.device)
    kernels.weight_backward[(parts, across, shape.rows)](
        *given[:4], x, *(norm or 3 * [x]), partial, shape.samples, **shape.constants(), **_product(given.g.dtype),
        NORMED=norm is not None, RELU=relu, WHOLE=given.is_whole, COLUMNS=columns, BC=wide, BO=tall, BP=NARROW,
        num_warps=8 if tall * wide * columns >= LARGEST // 2 else 4, num_stages=2,
    )  # fmt: skip
    return partial.sum(1).permute(0, 2, 3, 1)


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
        compare(scaling, (statistics, weight, eps), (mean, scale))
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
        compare_gradients(scaling, (statistics, weight, ctx.eps), (of_mean, of_scale), (of_statistics, of_weight, None))
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

        y = _by_place(y)
        out = torch.empty_like(y)
        read = numbers(y)
        beside = read if other is None else numbers(_by_place(other))
        norms = [*_dense(mean, scale, bias, read), beside, *_dense(other_mean, other_scale, other_bias, read)]
        places, grid, blocks = _shared(y)
        kernels.sum_forward[grid](
            read, *norms, numbers(out), places, C=y.shape[-1], OTHER=_kind(other, other_mean), RELU=relu, **blocks
        )
        inputs = (_by_channel(y), mean, scale, bias, other, other_mean, other_scale, other_bias, relu)
        compare(addition, inputs, [_by_channel(out)])
        return _by_channel(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.relu = inputs[-1]
        ctx.save_for_backward(*inputs[:-1], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        from fedloom.engines import fused_kernels as kernels

        *inputs, out = ctx.saved_tensors
        y, mean, scale, _, other, other_mean, other_scale, _ = inputs
        kind = _kind(other, other_mean)
        g, y = _by_place(g), _by_place(y)
        read = numbers(y)
        beside = read if other is None else numbers(_by_place(other))
        of_y, of_other = torch.empty_like(g), torch.empty_like(g) if kind else g
        places, grid, blocks = _shared(y)
        partial = torch.empty((len(y), grid[0], 3, y.shape[-1]), device=y.device)
        kernels.sum_backward[grid](
            g, numbers(_by_place(out)), read, *_dense(mean, scale, read), beside,
            *_dense(other_mean, other_scale, read), of_y, of_other, partial, places,
            C=y.shape[-1], OTHER=kind, RELU=ctx.relu, **blocks,
        )  # fmt: skip
        of_y, of_other = _by_channel(of_y), _by_channel(of_other)
        of_bias, of_scale, of_other_scale = partial.sum(1).unbind(1)
        found: tuple[Tensor | None, ...] = (of_y, -scale * of_bias, of_scale, of_bias, of_other if kind else None)
        found += (-other_scale * of_bias, of_other_scale, of_bias, None) if kind == 2 else (None, None, None, None)
        compare_gradients(addition, (*inputs, ctx.relu), [_by_channel(g)], found)
        return found


class PackedOfClients(torch.autograd.Function):
    """Images as bfloat16 that hold the bits of float16.

    What a net makes of rounding grows from layer to layer, forward: images need float16's mantissa, as long as that of
    TF32. Gradients need bfloat16's range, and their rounding stays as small as it is. But `autograd` gives an image
    and its gradient one type.
    """

    @staticmethod
    def forward(images: Tensor) -> Tensor:
        return _by_channel(_by_place(images.clamp(-LARGEST_HALF, LARGEST_HALF).to(torch.float16)).view(torch.bfloat16))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.to(ctx.dtype)


class UnpackedOfClients(torch.autograd.Function):
    """What everybody else can read."""

    @staticmethod
    def forward(images: Tensor) -> Tensor:
        return numbers(images).to(torch.bfloat16)

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
        rows, samples, height, width, channels = x.shape
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

    return {"DOT": {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(dtype, tl.float32)}


def _by_tap(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[K, a, b, size, size] as [K, taps, a, b]."""
    return weight.flatten(3).permute(0, 3, 1, 2).to(dtype).contiguous()


def _by_place(images: Tensor) -> Tensor:
    """[K, B, C, H, W] as [K, B, H, W, C], in this order in memory."""
    return images.permute(0, 1, 3, 4, 2).contiguous()


def _by_channel(images: Tensor) -> Tensor:
    return images.permute(0, 1, 4, 2, 3)


def _shared(images: Tensor) -> tuple[int, tuple[int, int, int], dict[str, int]]:
    """Places of each client, and how programs share them for a pass over images [K, B, H, W, C]."""
    rows, *places, channels = images.shape
    block = _block(channels)
    blocks = {"BC": block, "BP": AT_ONCE // block}
    count = places[0] * places[1] * places[2]
    return count, (-(-count // blocks["BP"]), _blocks(channels), rows), blocks


def _kind(other: Tensor | None, norm: Tensor | None) -> int:
    return 0 if other is None else 1 if norm is None else 2


def _block(n: int, most: int = MOST) -> int:
    """A power of two that holds n, or that n is cut into."""
    return min(most, max(LEAST, 1 << (n - 1).bit_length()))


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
