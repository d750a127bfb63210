"""Convolutions over few channels as products of rows of an image by bands.

A row of the result depends on `tall` rows of the image. The product of those rows, as one vector, by a matrix that
holds the kernel once for every column of the result is that row, in all of its channels. Most of the matrix is zero, so
this is W / wide times as much arithmetic, in products of a shape that a GPU is made for: with six channels of 14 pixels
a client, cuDNN's grouped convolution takes several times as long.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def banded(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """The convolution of x [B, C, H, W] by weight [O, C, tall, wide] with stride 1."""
    rows, columns = padding
    if rows or columns:
        x = F.pad(x, (columns, columns, rows, rows))
    samples, _, height, width = x.shape
    outputs, _, tall, wide = weight.shape
    h, w = height - tall + 1, width - wide + 1
    # Rows beside each other, [B, h, C, tall, W]. Slices, since their gradients are sums and not scattered.
    beside = torch.stack([x[:, :, i : i + h] for i in range(tall)], dim=3).transpose(1, 2)
    found = beside.reshape(samples * h, -1) @ bands(weight, width)
    return found.reshape(samples, h, outputs, w).transpose(1, 2)


def bands(weight: Tensor, width: int) -> Tensor:
    """The matrix [C * tall * width, O * w] of a kernel: column (o, v) holds kernel o, v pixels from the left."""
    outputs, channels, tall, wide = weight.shape
    w = width - wide + 1
    # A kernel and zeros, one longer than a row: written one after the other, each begins a pixel further on.
    longer = F.pad(weight, (0, width + 1 - wide)).unsqueeze(3).expand(-1, -1, -1, w, -1)
    shifted = longer.flatten(3)[..., : w * width].reshape(outputs, channels, tall, w, width)
    return shifted.permute(1, 2, 4, 0, 3).reshape(channels * tall * width, outputs * w)
