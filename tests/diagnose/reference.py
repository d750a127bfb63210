"""The diagnostics written down from the papers' equations, one pair and one client at a time, in float64 NumPy."""

import math
from itertools import combinations

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedloom.rows import Rows
from fedloom.space import Space

Array = NDArray[np.float64]

# Two layers of two tensors each; the last one has no numbers at all.
SHAPES = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (1, 2), "b.bias": (0,)}
SIZE = sum(math.prod(shape) for shape in SHAPES.values())
CUTS: dict[str, list[slice]] = {
    "tensor": [slice(0, 6), slice(6, 8), slice(8, 10), slice(10, 10)],
    "layer": [slice(0, 8), slice(8, 10)],
    "model": [slice(0, 10)],
}


def rows_of(matrix: Array, dtype: torch.dtype = torch.float64) -> Rows:
    space = Space(tuple(SHAPES), tuple(torch.Size(shape) for shape in SHAPES.values()), dtype)
    return Rows(torch.from_numpy(np.ascontiguousarray(matrix)).to(dtype), space)


@st.composite
def matrices(draw: st.DrawFn, least: int = 0, most: int = 7) -> Array:
    """Updates of some clients: of any size, some of them zero, some alike, some opposite."""
    clients = draw(st.integers(least, most))
    matrix = np.random.default_rng(draw(st.integers(0, 2**32))).normal(size=(clients, SIZE))
    matrix *= 10.0 ** np.array([draw(st.integers(-12, 12)) for _ in range(clients)])[:, None]
    for k in range(clients):
        other = draw(st.integers(0, clients - 1))
        matrix[k] = draw(st.sampled_from([1.0, 1.0, 1.0, 0.0, 0.5, -2.0])) * matrix[draw(st.sampled_from([k, other]))]
    return matrix


def cosine(a: Array, b: Array) -> float:
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return float(np.sum(a * b))


def pairs(matrix: Array) -> list[tuple[Array, Array]]:
    """i < j, without zero vectors."""
    return list(combinations([row for row in matrix if np.any(row != 0)], 2))


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
