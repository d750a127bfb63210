"""Whole numbers for a table with whole margins, at random and with both margins kept (controlled rounding).

Every cell is rounded down or up, and up with a probability equal to its fractional part f: in each row the multiples of
one that the running sum of f + Uniform(0, 1) crosses go up, which keeps the row's sum. Columns that came out too large
or too small are then repaired by the flow of a unit at a time along shortest paths, out of cells that went up and into
cells that went down. A flow that repairs all of them exists, because the fractional parts themselves have the right
margins and the vertices of a transportation polytope are whole numbers.

RADFed's code rounds each cell to the nearest and repairs each column by random steps of one, after which the sizes of
clients may be off by a few.
"""

import numpy as np
from numpy.random import Generator
from scipy import sparse
from scipy.sparse.csgraph import maximum_flow

WHOLE = 1e-9  # a cell this near a whole number is one


def round_table(a: np.ndarray, rows: np.ndarray, columns: np.ndarray, rng: Generator) -> np.ndarray:
    """[T, U] whole numbers, each within one of `a`, with these margins."""
    T, U = a.shape
    order = rng.permutation(U)
    low = np.floor(a + WHOLE)
    f = np.where(a - low > WHOLE, a - low, 0.0)
    crossed = np.floor(np.cumsum(f[:, order], axis=1) + rng.random((T, 1)))
    x = np.empty((T, U), dtype=np.int64)
    x[:, order] = np.diff(crossed, axis=1, prepend=0)
    x += _repairs(x, f > 0, rows - (low.sum(axis=1) + x.sum(axis=1)), columns - (low.sum(axis=0) + x.sum(axis=0)), rng)
    table = low.astype(np.int64) + x
    assert np.array_equal(table.sum(axis=1), rows)  # nosec B101  # what the algorithm promises, not what a user gives
    assert np.array_equal(table.sum(axis=0), columns)  # nosec B101
    return table


def _repairs(x: np.ndarray, free: np.ndarray, rows: np.ndarray, columns: np.ndarray, rng: Generator) -> np.ndarray:
    """What to add to x in {0, 1}, within its free cells, so that its margins grow by `rows` and `columns`."""
    T, U = x.shape
    row, column = rng.permutation(T), T + rng.permutation(U)  # nodes; which of several shortest paths is random
    source, sink = T + U, T + U + 1
    i, j = np.nonzero(free)
    tail = np.where(x[i, j] == 0, row[i], column[j])  # up: from row to column; down: the other way
    head = np.where(x[i, j] == 0, column[j], row[i])
    node = np.concatenate([row, column])
    need = np.concatenate([rows, -columns])  # what has to flow out of each
    capacity = np.concatenate([np.ones(len(i)), np.abs(need)]).astype(np.int32)
    tails = np.concatenate([tail, np.where(need > 0, source, node)])
    heads = np.concatenate([head, np.where(need > 0, node, sink)])
    network = sparse.csr_array((capacity, (tails, heads)), shape=(T + U + 2, T + U + 2))
    flow = maximum_flow(network, source, sink).flow.tocsr()
    moved: np.ndarray = flow[row][:, column].toarray()
    return moved
