"""Lengths and angles in float64; of a cohort's rows [K, P] some columns at a time."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedloom.rows import Rows

PART = 1 << 24  # numbers that are made float64 at once

Values = Tensor | Sequence[float]


def columns(rows: Rows | Tensor) -> Iterator[Tensor]:
    """The matrix in float64, some columns at a time: [K, few]."""
    matrix = rows.matrix if isinstance(rows, Rows) else rows
    for part in torch.split(matrix, max(1, PART // max(len(matrix), 1)), 1):
        yield part.double()


def squares(rows: Rows | Tensor) -> Tensor:
    """|g_k|^2: [K]."""
    return torch.stack([part.square().sum(1) for part in columns(rows)]).sum(0)


def products(rows: Rows | Tensor) -> Tensor:
    """<g_i, g_j>: [K, K]."""
    parts = columns(rows)
    first = next(parts)
    total = first @ first.T
    for part in parts:
        total.addmm_(part, part.T)
    return total


def norm(vector: Tensor) -> Tensor:
    """|v|"""
    return squares(vector.reshape(1, -1)).sqrt().squeeze()


def cosine(a: Tensor, b: Tensor) -> float:
    """<a, b> / (|a| |b|), nan beside a vector of zeros."""
    return float(((a.double() / norm(a)) @ (b.double() / norm(b))).clamp(-1, 1))


def numbers(values: Values) -> Tensor:
    """As a vector on the CPU."""
    return torch.as_tensor(values, dtype=torch.float64, device="cpu").flatten()
