"""How the kernels of `fused_kernels.py` are called: sizes, tiles, and who shares what.

Images are [K, B, H, W, C] here, contiguous.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST, MOST = 16, 64  # rows and columns of a product
WIDE, LARGEST = 256, 16384  # rows, and rows by columns, of a gradient of weights, which programs add up
TILE, NARROW = 128, 64  # places that a program takes at once
AT_ONCE = 4096  # values, where there is nothing to multiply
PROGRAMS = 1024  # that share the places of a sum: several for each processor of a GPU
LARGEST_HALF = 65504.0  # number of float16
PARTS = 256  # tiles whose statistics are merged at once


def convolve(
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
    block = block_of(shape.outs)
    tile = NARROW if block == MOST and shape.size > 1 else TILE
    tiles = -(-shape.places // tile)
    partial = torch.empty((shape.rows, tiles, 2, shape.outs), device=x.device) if statistics is not None else x
    ahead = shape.size > 1 and shape.channels <= MOST  # two taps load while a third one multiplies
    kernels.forward[(tiles, blocks_of(shape.outs), shape.rows)](
        x, _by_tap(weight.transpose(1, 2), x.dtype), *(norm or 3 * [x]), out, partial, shape.samples,
        **shape.constants(), NORMED=norm is not None, RELU=relu, STATISTICS=statistics is not None, **_product(x.dtype),
        BC=block_of(shape.channels), BO=block, BP=tile, num_stages=3 if ahead else 1,
    )  # fmt: skip
    if statistics is not None:
        kernels.merge[(blocks_of(shape.outs, LEAST), shape.rows)](
            partial, statistics, tiles, shape.places, O=shape.outs, BP=tile, BT=PARTS, BO=LEAST
        )


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
        places, block = samples * height * width, block_of(outs)
        tile = AT_ONCE // block
        found = torch.empty_like(self.g)
        kernels.whole[(-(-places // tile), blocks_of(outs), rows)](*self[:4], found, places, O=outs, BO=block, BP=tile)
        return self._replace(g=found, is_whole=True)


def input_gradient(
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
    kernels.input_backward[(tiles, blocks_of(shape.channels), shape.rows)](
        *given[:4], _by_tap(weight, given.g.dtype), x, *(norm or 3 * [x]), x if through is None else through, of_x,
        partial, shape.samples, **shape.constants(), **_product(given.g.dtype), NORMED=norm is not None, RELU=relu,
        THROUGH=through is not None, WHOLE=given.is_whole,
        BC=block_of(shape.channels), BO=block_of(shape.outs), BP=NARROW, num_stages=1,
    )  # fmt: skip
    if norm is None:
        return of_x, None, None
    of_bias, of_scale = partial.sum(1).unbind(1)
    return of_x, of_scale, of_bias


def weight_gradient(given: Given, x: Tensor, norm: list[Tensor] | None, relu: bool, shape: "Sizes") -> Tensor:
    """[K, O, C, taps]. Programs share the tiles."""
    from fedloom.engines import fused_kernels as kernels

    columns = 1 << (shape.size - 1).bit_length()
    tall = block_of(shape.outs, WIDE)
    wide = block_of(shape.channels, max(LEAST, LARGEST // (tall * columns)))
    across = blocks_of(shape.outs, tall) * blocks_of(shape.channels, wide) * shape.size
    parts = max(1, min(-(-shape.places // NARROW), PROGRAMS // (shape.rows * across)))
    partial = torch.empty((shape.rows, parts, shape.size**2, shape.outs, shape.channels), device=x.device)
    kernels.weight_backward[(parts, across, shape.rows)](
        *given[:4], x, *(norm or 3 * [x]), partial, shape.samples, **shape.constants(), **_product(given.g.dtype),
        NORMED=norm is not None, RELU=relu, WHOLE=given.is_whole, COLUMNS=columns, BC=wide, BO=tall, BP=NARROW,
        num_warps=8 if tall * wide * columns >= LARGEST // 2 else 4, num_stages=2,
    )  # fmt: skip
    return partial.sum(1).permute(0, 2, 3, 1)


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


def by_place(images: Tensor) -> Tensor:
    """[K, B, C, H, W] as [K, B, H, W, C], in this order in memory."""
    return images.permute(0, 1, 3, 4, 2).contiguous()


def by_channel(images: Tensor) -> Tensor:
    return images.permute(0, 1, 4, 2, 3)


def shared(images: Tensor) -> tuple[int, tuple[int, int, int], dict[str, int]]:
    """Places of each client, and how programs share them for a pass over images [K, B, H, W, C]."""
    rows, *places, channels = images.shape
    block = block_of(channels)
    blocks = {"BC": block, "BP": AT_ONCE // block}
    count = places[0] * places[1] * places[2]
    return count, (-(-count // blocks["BP"]), blocks_of(channels), rows), blocks


def kind_of(other: Tensor | None, norm: Tensor | None) -> int:
    return 0 if other is None else 1 if norm is None else 2


def block_of(n: int, most: int = MOST) -> int:
    """A power of two that holds n, or that n is cut into."""
    return min(most, max(LEAST, 1 << (n - 1).bit_length()))


def blocks_of(n: int, size: int | None = None) -> int:
    return -(-n // (size or block_of(n)))


def rows_apart(values: Tensor) -> Tensor:
    """Whose rows may lie apart, as those of a part of a matrix do, but are whole."""
    return values if values[0].is_contiguous() else values.contiguous()


def dense(*values: Tensor | None) -> list[Tensor]:
    """Arguments of a kernel; the last stands for those that are missing, and is not one of them."""
    *given, instead = values
    assert instead is not None  # nosec B101  # for the type checker
    return [instead if value is None else value.contiguous() for value in given]
