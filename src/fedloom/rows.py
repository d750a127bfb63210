"""The cohort's updates as a matrix [K, P], behind the few operations that server mathematics needs.

Stages go through these operations, so that the matrix may lie on one device or be spread over a cluster whose workers
answer with sums. Whoever reads `matrix` has the rows of a cluster brought together first.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.space import GroupBy, Space

PART = 1 << 26  # numbers that an operation makes of the rows at once


def finite_rows(matrix: Tensor) -> Tensor:
    """Which rows hold neither NaN nor infinity: [K]. Their extremes tell, and are found many times faster."""
    if not matrix.numel():
        return torch.ones(len(matrix), dtype=torch.bool, device=matrix.device)
    return torch.isfinite(matrix.amax(1)) & torch.isfinite(matrix.amin(1))


class Comparison(NamedTuple):
    """A row beside a rest, [K, groups] each, in float64."""

    along: Tensor  # inner product
    own: Tensor  # squared norm of the row
    rest: Tensor  # squared norm of the rest
    across: Tensor  # squared norm of the row's part orthogonal to the rest


class Rows:
    """K rows of P numbers on one device.

    >>> space = Space(("w",), (torch.Size([2]),), torch.float32)
    >>> Rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), space).weighted_sum(torch.tensor([0.5, 0.5]))
    tensor([2., 3.])
    """

    def __init__(self, matrix: Tensor, space: Space) -> None:
        self._matrix = matrix
        self.space = space

    @property
    def matrix(self) -> Tensor:
        return self._matrix

    @property
    def device(self) -> torch.device:
        """Where the sums of these rows are."""
        return self.matrix.device

    def __len__(self) -> int:
        return len(self.matrix)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sum of weights_k times row k: [P]."""
        total: Tensor = torch.mv(self.matrix.T, weights.to(self.matrix))  # a matrix-vector product keeps full precision
        return total

    def squares(self, by: GroupBy) -> Tensor:
        """Squared norm of each row in each group: [K, groups]."""
        groups = self.space.groups(by)
        return torch.cat([groups.sums(self.matrix[at].square()) for at in self._parts()])

    def beside_rest(self, total: Tensor, weights: Tensor, by: GroupBy) -> Comparison:
        """Each row beside the rest of a total, rest_k = total - weights_k row_k."""
        groups = self.space.groups(by)
        found = []
        for at in self._parts():
            rows = self.matrix[at]
            rest = total - weights[at].to(rows)[:, None] * rows  # formed, not expanded into products: those cancel
            along, own, square = groups.sums(rows * rest), groups.sums(rows.square()), groups.sums(rest.square())
            share = torch.where(square > 0, along / square, 0.0).to(rows)
            across = groups.sums((rows - groups.spread(share) * rest).square_())
            found.append(torch.stack([along, own, square, across]))
        return Comparison(*torch.cat(found, 1))

    def blend(self, scale: Tensor, vector: Tensor, share: Tensor, by: GroupBy) -> "Rows":
        """scale_k times row k plus share_k times a vector; scale and share are [K, groups]."""
        groups = self.space.groups(by)
        matrix = torch.empty_like(self.matrix)
        for at in self._parts():
            torch.mul(groups.spread(scale[at].to(matrix)), self.matrix[at], out=matrix[at])
            matrix[at].addcmul_(groups.spread(share[at].to(matrix)), vector.expand_as(matrix[at]))
        return Rows(matrix, self.space)

    def scaled(self, scale: Tensor) -> "Rows":
        """scale_k times row k."""
        return Rows(scale.to(self.matrix)[:, None] * self.matrix, self.space)

    def plus(self, vector: Tensor) -> "Rows":
        """Every row plus a vector [P]."""
        return Rows(self.matrix + vector, self.space)

    def distances(self, point: Tensor, norm: int = 2) -> Tensor:
        """How far each row is from a point: [K], in float64."""
        far = [torch.linalg.vector_norm((self.matrix[at] - point).double(), norm, dim=1) for at in self._parts()]
        return torch.cat(far)

    def pairwise_squares(self) -> Tensor:
        """Squared distances between all pairs of rows: [K, K], in float64."""
        return torch.stack([(self.matrix - row).double().square().sum(1) for row in self.matrix])

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (of these rows, not estimated from them) in every coordinate: [P] each."""
        variance, mean = torch.var_mean(self.matrix, dim=0, correction=0)
        return mean, variance.sqrt()

    def put(self, where: Tensor, rows: Tensor) -> "Rows":
        """Other rows at these positions: [len(where), P], or [P] for all of them."""
        matrix = self.matrix.clone()
        matrix[where.to(matrix.device)] = rows.to(matrix)
        return Rows(matrix, self.space)

    def finite(self) -> Tensor:
        """Which rows hold neither NaN nor infinity: [K], on the CPU."""
        return finite_rows(self.matrix).cpu()

    def _parts(self) -> Iterator[slice]:
        """All rows, a few at a time: what is made of them must fit into memory beside them."""
        some = max(1, PART // max(self.matrix.shape[1], 1))
        for i in range(0, max(len(self), 1), some):
            yield slice(i, i + some)

    def select(self, keep: Tensor) -> "Rows":
        """The rows at these positions, in this order."""
        return Rows(self.matrix[keep.to(self.matrix.device)], self.space)
