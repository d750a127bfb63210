"""Updates at the worker that trained them: kept by their place in a Work, and what the server asks of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedloom.engines.ray.wire import pack, unpack
from fedloom.rows import Rows

NEAR = 1 << 16  # numbers that are worked on at once


@dataclass
class Kept:
    """The rows of one Work that are here."""

    serial: int
    places: dict[int, int] = field(default_factory=dict)  # row of each position in the Work
    rows: dict[str, Tensor] = field(default_factory=dict)

    def add(self, at: Sequence[int], rows: dict[str, Tensor]) -> None:
        """One more share: a second one was another worker's, which is no more."""
        first = len(next(iter(self.rows.values()))) if self.rows else 0
        self.places |= {position: first + i for i, position in enumerate(at)}
        self.rows = {n: torch.cat([self.rows[n], new]) if first else new for n, new in rows.items()}

    def row(self, name: str, position: int) -> Tensor:
        place = self.places[position]
        return self.rows[name][place : place + 1]


@dataclass(frozen=True)
class Call:
    """An operation on rows and its arguments: of each row, of all rows (a vector that every worker is sent once), or
    plain.
    """

    op: str
    arguments: tuple[tuple[str, Any], ...]  # "row", "all" or "", and the value

    def only(self, at: Sequence[int]) -> "Call":
        """For some of the rows."""
        there = torch.tensor(at, dtype=torch.int64)
        cut = [(k, pack(unpack(value)[there]) if k == "row" else value) for k, value in self.arguments]
        return replace(self, arguments=tuple(cut))

    def on(self, device: torch.device) -> Callable[[Rows, int], Any]:
        """As a function of a row and its place, on a worker."""
        import ray

        got = [(kind, ray.get(value) if kind == "all" else value) for kind, value in self.arguments]
        known = [(kind, unpack(value, device) if kind else value) for kind, value in got]

        def call(row: Rows, i: int) -> Any:
            return getattr(row, self.op)(*(value[i : i + 1] if kind == "row" else value for kind, value in known))

        return call


@dataclass(frozen=True)
class Asked:
    """Some rows of a Work, and what is done to them before anything is read from them."""

    serial: int
    name: str  # empty: the updates; else what a client stage sent up
    at: tuple[int, ...]  # positions in the Work
    changes: tuple[Call, ...] = ()


def exact_sum(matrices: Iterable[Tensor], weights: Tensor, grid: float) -> Tensor:
    """The weighted sum [P] of all rows [K, P], in float64, each term rounded by `grid`; a few columns at a time, which
    stay near the processor.
    """
    total: Tensor | None = None
    first = 0
    for matrix in matrices:
        own = weights[first : first + len(matrix), None].double()
        first += len(matrix)
        if total is None:
            total = matrix.new_zeros(matrix.shape[1], dtype=torch.float64)
        columns = max(1, NEAR // len(matrix)) if matrix.device.type == "cpu" else matrix.shape[1]
        for part, into in zip(torch.split(matrix, columns, 1), torch.split(total, columns), strict=True):
            into.add_((part.double() * own).add_(grid).sub_(grid).sum(0))
    assert total is not None  # nosec B101  # for the type checker
    return total


def largest_of(rows: Tensor) -> list[float]:
    """The largest number of each row, whatever its sign."""
    if not rows.numel():
        return [0.0] * len(rows)
    found: list[float] = torch.maximum(-rows.amin(1), rows.amax(1)).double().tolist()
    return found


def answer_of(found: Any) -> Tensor:
    """What one row has to say: without the row's own dimension."""
    answer: Tensor = torch.stack(list(found))[:, 0] if isinstance(found, tuple) else found[0]
    return answer
