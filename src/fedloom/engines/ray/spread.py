"""Updates that stay with the workers who trained them: the server gets sums, norms and distances of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedloom.engines.ray.there import Asked, Call
from fedloom.engines.ray.wire import pack, unpack
from fedloom.rows import Comparison, Rows
from fedloom.space import GroupBy, Space

if TYPE_CHECKING:
    from fedloom.engines.ray.engine import Ray

SAME = 1e-12  # weights that differ by less than this share give the same sum


@dataclass(frozen=True)
class _Sum:
    """A sum that was made of all rows, for whoever wants it again."""

    weights: Tensor
    total: Tensor


class Spread(Rows):
    """K rows of P numbers, each at the worker that trained it. Operations that change rows are noted, and done where
    the rows are when something is read from them. What is not among the operations below brings the rows together.
    """

    def __init__(self, engine: "Ray", asked: Asked, largest: Tensor, space: Space, device: torch.device) -> None:
        self.engine = engine
        self.asked = asked
        self.largest = largest  # [K] no number of a row is larger than this
        self.space = space
        self._device = device
        self._whole: Tensor | None = None
        self._last: _Sum | None = None

    @property
    def matrix(self) -> Tensor:
        if self._whole is None:
            self._whole = self.engine.fetch(self.asked).to(self._device)
        return self._whole

    @property
    def device(self) -> torch.device:
        return self._device

    def __len__(self) -> int:
        return len(self.asked.at)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        w = weights.detach().cpu().double()
        if self._last is not None and torch.allclose(self._last.weights, w, rtol=SAME, atol=0.0):
            return self._last.total
        total = self.engine.total(self.asked, w, grid(w, self.largest)).to(self._device, self.space.dtype)
        self._last = _Sum(w, total)
        return total

    def squares(self, by: GroupBy) -> Tensor:
        return self._each("squares", ("", by))

    def beside_rest(self, total: Tensor, weights: Tensor, by: GroupBy) -> Comparison:
        found = self._each("beside_rest", self._all(total), _row(weights), ("", by))
        return Comparison(*found.unbind(1))

    def distances(self, point: Tensor, norm: int = 2) -> Tensor:
        return self._each("distances", self._all(point), ("", norm))

    def finite(self) -> Tensor:
        return self._each("finite").cpu()

    def blend(self, scale: Tensor, vector: Tensor, share: Tensor, by: GroupBy) -> Rows:
        most = _largest(scale) * self.largest + _largest(share) * float(vector.abs().max())
        return self._changed(most, "blend", _row(scale), self._all(vector), _row(share), ("", by))

    def scaled(self, scale: Tensor) -> Rows:
        return self._changed(_largest(scale[:, None]) * self.largest, "scaled", _row(scale))

    def plus(self, vector: Tensor) -> Rows:
        return self._changed(self.largest + float(vector.abs().max()), "plus", self._all(vector))

    def select(self, keep: Tensor) -> Rows:
        keep = keep.cpu()
        at, chosen = self.asked.at, keep.tolist()
        changes = tuple(change.only(chosen) for change in self.asked.changes)
        asked = replace(self.asked, at=tuple(at[k] for k in chosen), changes=changes)
        return self._with(asked, self.largest[keep])

    def _changed(self, largest: Tensor, op: str, *arguments: tuple[str, Any]) -> Rows:
        slack = 1 + 8 * torch.finfo(self.space.dtype).eps  # what the operation itself may round up
        asked = replace(self.asked, changes=(*self.asked.changes, Call(op, arguments)))
        return self._with(asked, largest * slack)

    def _with(self, asked: Asked, largest: Tensor) -> Rows:
        return Spread(self.engine, asked, largest, self.space, self._device)

    def _each(self, op: str, *arguments: tuple[str, Any]) -> Tensor:
        return self.engine.each(self.asked, Call(op, arguments)).to(self._device)

    def _all(self, vector: Tensor) -> tuple[str, Any]:
        return "all", self.engine.put(vector)


def _row(values: Tensor) -> tuple[str, Any]:
    return "row", pack(values)


def _largest(values: Tensor) -> Tensor:
    """Of each row, whatever its sign."""
    return values.detach().cpu().double().abs().flatten(1).amax(1)


def grid(weights: Tensor, largest: Tensor) -> float:
    """A number that, added to a term and taken off again, rounds it to 52 bits below the largest sum there can be: so
    coarse that sums of such terms lose nothing, and far finer than float32.
    """
    most = float((weights.abs() * largest).sum())
    return 1.5 * 2.0 ** (math.ceil(math.log2(most)) + 1) if most > 0 and math.isfinite(most) else 0.0


def joined(parts: Sequence[tuple[Sequence[int], Any]], at: Sequence[int]) -> Tensor:
    """Answers of several workers in the order of the positions that were asked for."""
    found = torch.cat([unpack(values, own=True) for _, values in parts])
    place = {position: i for i, position in enumerate(k for own, _ in parts for k in own)}
    return found[torch.tensor([place[k] for k in at], dtype=torch.int64)]
