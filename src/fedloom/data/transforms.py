"""What happens to a batch before the model reads it: normalisation always, augmentation in training.

All of it is tensor code on the device, and all randomness is a hash of (key, step, sample, draw), so that every engine
and a resumed run see the same pictures whoever else is trained beside them.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.errors import DataError
from fedloom.keys import hashed
from fedloom.registry import Registry
from fedloom.spec import parse

PIXEL = 255.0


@dataclass(frozen=True)
class Draws:
    """The random numbers of one batch, in the order in which augmentations ask for them."""

    key: Tensor  # [2]
    step: int | Tensor

    def uniform(self, samples: int, draw: int) -> Tensor:
        """One number in [0, 1) for each sample [samples]."""
        return hashed(self.key, self.step, draw, (samples,))


@dataclass(frozen=True)
class Augmentation:
    """Changes a normalised batch [B, C, H, W]; `first` is the number of its first draw, `black` a black pixel [C]."""

    def apply(self, x: Tensor, draws: Draws, first: int, black: Tensor) -> Tensor:
        raise NotImplementedError


REGISTRY: Registry[Augmentation] = Registry("augmentation", DataError)
DRAWS = 4  # numbers that each augmentation may use for a sample


@REGISTRY.add("flip")
@dataclass(frozen=True)
class Flip(Augmentation):
    """Mirror left and right with probability p."""

    p: float = 0.5

    def __post_init__(self) -> None:
        _probability("flip", self.p)

    def apply(self, x: Tensor, draws: Draws, first: int, black: Tensor) -> Tensor:
        flipped = draws.uniform(len(x), first) < self.p
        return torch.where(flipped[:, None, None, None], x.flip(-1), x)


@REGISTRY.add("crop")
@dataclass(frozen=True)
class Crop(Augmentation):
    """With probability p pad on all sides and cut the old size out at random; `fill` is the border's colour."""

    padding: int = 4
    p: float = 1.0
    fill: Literal["black", "mean"] = "black"

    def __post_init__(self) -> None:
        _probability("crop", self.p)
        if self.padding < 1:
            raise DataError(f"crop: padding must be at least 1, not {self.padding}")

    def apply(self, x: Tensor, draws: Draws, first: int, black: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        chosen, down, right = (draws.uniform(n, first + i) for i in range(3))
        cropped = (chosen < self.p).long()
        shifts = [((u * (2 * self.padding + 1)).long() - self.padding) * cropped for u in (down, right)]
        border = black if self.fill == "black" else torch.zeros_like(black)
        padded = F.pad(x - border[:, None, None], [self.padding] * 4)
        rows = shifts[0][:, None] + torch.arange(height, device=x.device) + self.padding
        columns = shifts[1][:, None] + torch.arange(width, device=x.device) + self.padding
        sample = torch.arange(n, device=x.device)[:, None, None, None]
        channel = torch.arange(channels, device=x.device)[:, None, None]
        return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]] + border[:, None, None]


@REGISTRY.add("cutout", paper="DeVries and Taylor, 2017")
@dataclass(frozen=True)
class Cutout(Augmentation):
    """Blank a square of `size` pixels around a random place; where it sticks out, less."""

    size: int = 16

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError(f"cutout: size must be at least 1, not {self.size}")

    def apply(self, x: Tensor, draws: Draws, first: int, black: Tensor) -> Tensor:
        inside = []
        for i, length in enumerate(x.shape[-2:]):
            centre = (draws.uniform(len(x), first + i) * length).long()
            start = (centre - self.size // 2)[:, None]
            place = torch.arange(length, device=x.device)
            inside.append((place >= start) & (place < start + self.size))
        return x.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)


@REGISTRY.add("flip-crop", paper="Varno et al. (AdaBest)")
@dataclass(frozen=True)
class FlipCrop(Augmentation):
    """A flip, and with probability 1/2 a crop with 4 pixels of the mean colour around it: AdaBest's for CIFAR."""

    def apply(self, x: Tensor, draws: Draws, first: int, black: Tensor) -> Tensor:
        x = Flip().apply(x, draws, first, black)
        return Crop(p=0.5, fill="mean").apply(x, draws, first + 1, black)


def augmentations(text: str | None) -> tuple[Augmentation, ...]:
    """Read `crop + flip + cutout(size=16)`, applied in that order.

    >>> augmentations("flip(p=0.3)")
    (Flip(p=0.3),)
    """
    return () if text is None else tuple(REGISTRY.make(REGISTRY.complete(call)) for call in parse(text))


@dataclass(frozen=True)
class Preparation:
    """From stored samples to what the model reads. `pixels` says that they are bytes of images."""

    pixels: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: tuple[Augmentation, ...] = ()

    def __post_init__(self) -> None:
        if self.augment and not self.pixels:
            raise DataError("only images can be augmented, and these samples are none")

    def clean(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """For evaluation: no chance involved."""
        if not self.pixels:
            return x
        x = x.to(dtype) / PIXEL
        if not self.mean:
            return x
        return (x - _channels(self.mean, x.dtype, x.device)) / _channels(self.std, x.dtype, x.device)

    def train(self, x: Tensor, dtype: torch.dtype, draws: Draws | None) -> Tensor:
        x = self.clean(x, dtype)
        if not self.augment or draws is None:
            return x
        black = self.clean(torch.zeros((1, x.shape[1], 1, 1), device=x.device), dtype).reshape(-1)
        for i, change in enumerate(self.augment):
            x = change.apply(x, draws, DRAWS * i, black)
        return x


@cache  # every copy to a device would wait for it
def _channels(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None, None]


def _probability(name: str, p: float) -> None:
    if not 0 <= p <= 1:
        raise DataError(f"{name}: p must lie between 0 and 1, not {p}")
