"""RADFed's quadratic programmes (1) and (2): the table of clients x configurations nearest to what was drawn.

A configuration u is a class, or a class with a value of each feature; B_u samples have it. The groups of an attribute
(the classes, or the values of feature j) collect configurations, and z = G a_t are client t's samples per group:

    min_a  sum_t || G a_t - b_t ||^2   s.t.   sum_u a_tu = n_t,   sum_t a_tu = B_u,   a >= 0

By classes alone G is the identity and the solution is unique (the projection of b onto a transportation polytope); with
features only z is.

For OSQP (Stellato et al., 2020), z are auxiliary variables. A group's row z = G a is dense where the group holds most
configurations, as the zeros of a rare binary feature do; so the largest group of each attribute is defined by the
others instead, as n_t minus their sum, which keeps the factorisation sparse. One column constraint is redundant and
left out. What OSQP's tolerance leaves of violated constraints is repaired (Altschuler et al., 2017, Algorithm 2):
shrink rows and columns that are too large, then spread what is missing in proportion to both margins' deficits.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse

from fedloom.errors import DataError

TOLERANCE = 1e-9
ITERATIONS = 50_000


@dataclass(frozen=True)
class Programme:
    """Margins, groups and targets of the table a [T, U]."""

    n: np.ndarray  # [T] samples of each client
    B: np.ndarray  # [U] samples of each configuration
    groups: np.ndarray  # [attributes, U] the group of each configuration, numbered on from attribute to attribute
    b: np.ndarray  # [T, G] target for each client and group

    @cached_property
    def G(self) -> sparse.csr_array:
        """[groups, U] one where the configuration is in the group."""
        ones = np.ones(self.groups.size)
        columns = np.tile(np.arange(len(self.B)), len(self.groups))
        return sparse.csr_array((ones, (self.groups.ravel(), columns)), shape=(self.b.shape[1], len(self.B)))

    @property
    def simple(self) -> bool:
        """Every configuration is a group of its own: G is the identity."""
        return len(self.groups) == 1 and np.array_equal(self.groups[0], np.arange(self.b.shape[1]))

    def residuals(self, a: np.ndarray) -> np.ndarray:
        """[T, G]"""
        z: np.ndarray = (self.G @ a.T).T - self.b
        return z

    def loss(self, a: np.ndarray) -> float:
        """The Frobenius distance from the targets, not squared."""
        return float(np.linalg.norm(self.residuals(a)))

    def solve(self) -> tuple[np.ndarray, bool]:
        """The optimal table, and whether the solver reached its tolerance."""
        T, U, total = len(self.n), len(self.B), float(self.n.sum())
        scale = total / (T * U)
        P, q, A, low = self._simple() if self.simple else self._with_sums()
        high = low.copy()
        high[len(low) - T * U :] = np.inf  # a >= 0 comes last
        solver = _osqp()
        P, A = sparse.csc_matrix(P), sparse.csc_matrix(A)  # OSQP knows matrices, not arrays
        solver.setup(P, q / scale, A, low / scale, high / scale, verbose=False, scaling=0, rho=1.0, polishing=True,
                     eps_abs=TOLERANCE, eps_rel=TOLERANCE, max_iter=ITERATIONS, adaptive_rho_interval=50)  # fmt: skip
        found = solver.solve(raise_error=False)
        a = np.nan_to_num(found.x[: T * U].reshape(T, U)) * scale
        return repair(a, self.n, self.B), found.info.status == "solved"

    def _margins(self) -> sparse.csr_array:
        T, U = len(self.n), len(self.B)
        rows = sparse.kron(sparse.eye_array(T), np.ones((1, U)))
        columns = sparse.kron(np.ones((1, T)), sparse.eye_array(U), format="csr")[:-1]
        return sparse.vstack([rows, columns], format="csr")

    def _simple(self) -> tuple[Any, np.ndarray, Any, np.ndarray]:
        cells = sparse.eye_array(self.b.size, format="csc")
        A = sparse.vstack([self._margins(), cells], format="csc")
        low = np.concatenate([self.n, self.B[:-1], np.zeros(self.b.size)]).astype(float)
        return cells, -self.b.ravel(), A, low

    def _with_sums(self) -> tuple[Any, np.ndarray, Any, np.ndarray]:
        T, U = len(self.n), len(self.B)
        clients, cells, sums = sparse.eye_array(T), sparse.eye_array(T * U), sparse.eye_array(self.b.size)
        of_a, of_z, of_n = self._definitions()
        blocks: list[list[Any]] = [
            [self._margins(), None],
            [sparse.kron(clients, of_a), sparse.kron(clients, of_z)],
            [cells, None],
        ]
        A = sparse.block_array(blocks, format="csc")
        P = sparse.block_diag([sparse.csc_array((T * U, T * U)), sums], format="csc")
        q = np.concatenate([np.zeros(T * U), -self.b.ravel()])
        low = np.concatenate([self.n, self.B[:-1], np.outer(self.n, of_n).ravel(), np.zeros(T * U)])
        return P, q, A, low

    def _definitions(self) -> tuple[Any, Any, np.ndarray]:
        """What defines z: of_a a_t + of_z z_t = of_n n_t; a row G a - z = 0, or sum z = n_t for the largest group."""
        of_a, of_z = self.G.tolil(), sparse.lil_array(-sparse.eye_array(self.b.shape[1]))
        of_n = np.zeros(self.b.shape[1])
        for of_attribute in self.groups:
            members = np.bincount(of_attribute)
            largest, attribute = int(np.argmax(members)), np.flatnonzero(members)
            of_a[[largest]] = 0
            of_z[largest, attribute] = 1
            of_n[largest] = 1
        return of_a.tocsr(), of_z.tocsr(), of_n


def repair(a: np.ndarray, n: np.ndarray, B: np.ndarray) -> np.ndarray:
    """The table, no more than its violations away, with a >= 0 and both margins as they should be."""
    a = np.maximum(a, 0)
    a *= np.minimum(1, n / np.maximum(a.sum(axis=1), TOLERANCE))[:, None]
    a *= np.minimum(1, B / np.maximum(a.sum(axis=0), TOLERANCE))
    rows, columns = np.maximum(n - a.sum(axis=1), 0), np.maximum(B - a.sum(axis=0), 0)
    if columns.sum() > 0:
        a += np.outer(rows, columns / columns.sum())
    return a


def _osqp() -> Any:
    try:
        import osqp
    except ImportError as error:
        raise DataError("quadratic needs the package osqp, as in pip install osqp") from error
    return osqp.OSQP()
