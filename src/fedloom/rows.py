"""The cohort's updates as a matrix [K, P], behind the few operations that server mathematics needs.

Stages go through these operations, so that the matrix may lie on one device or be spread over a cluster whose workers
answer with sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """K rows of P numbers on one device.

    >>> Rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).weighted_sum(torch.tensor([0.5, 0.5]))
    tensor([2., 3.])
    """

    matrix: Tensor

    def __len__(self) -> int:
        return len(self.matrix)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sum of weights_k times row k: [P]."""
        total: Tensor = torch.mv(self.matrix.T, weights.to(self.matrix))  # a matrix-vector product keeps full precision
        return total

    def select(self, keep: Tensor) -> "Rows":
        """The rows at these positions, in this order."""
        return Rows(self.matrix[keep.to(self.matrix.device)])
