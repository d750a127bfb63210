"""A Work's answers, from all workers, put together in the order of the Work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedloom.engines.ray.spread import Spread
from fedloom.engines.ray.there import Asked
from fedloom.engines.ray.wire import unpack
from fedloom.rows import Rows
from fedloom.stages import Updates, Work

if TYPE_CHECKING:
    from fedloom.engines.ray.engine import Ray


@dataclass
class Out:
    """A Work that is with the workers, or was the last one there."""

    serial: int
    work: Work
    common: Any  # what all shares have in common, as an object of the cluster's
    whole: bool  # rows come back at once
    where: dict[int, int] = field(default_factory=dict)  # by position: the worker (its identity) that has its row
    replies: dict[int, dict[str, Any]] = field(default_factory=dict)  # by position
    deaths: int = 0


def updates_of(engine: "Ray", out: Out) -> Updates:
    """All answers, in the order of the Work."""
    work, count = out.work, len(out.work)
    replies = [out.replies[k] for k in range(count)]

    def numbers(name: str, like: Tensor) -> Tensor:
        found = [unpack(r["of"][name])[r["place"]] for r in replies]
        return torch.stack(found).clone() if found else like

    def stacked(pick: Callable[[dict[str, Any]], Any]) -> Tensor:
        return torch.stack([unpack(pick(r["of"]))[r["place"]] for r in replies]).to(engine.setup.device)

    first = replies[0]["of"] if replies else {"buffers": {}, "sent": {}, "extra": {}}
    buffers = {n: stacked(lambda of, n=n: of["buffers"][n]) for n in first["buffers"]}  # type: ignore[misc]
    if not replies:
        buffers = {n: b[None][:0] if work.start.dim() == 1 else b[:0] for n, b in work.buffers.items()}
    sent = {
        stage: {
            n: _rows(engine, out, f"{stage}/{n}", [r["of"]["sent"][stage][n][r["place"]] for r in replies])
            if isinstance(value, list)
            else stacked(lambda of, stage=stage, n=n: of["sent"][stage][n])  # type: ignore[misc]
            for n, value in values.items()
        }
        for stage, values in first["sent"].items()
    }
    return Updates(
        clients=work.clients,
        slots=work.places,
        counts=work.counts,
        samples=engine.setup.sizes[work.clients],
        steps=numbers("steps", torch.empty(0, dtype=torch.int64)),
        loss=numbers("loss", torch.empty(0, dtype=torch.float64)),
        finite=numbers("finite", torch.empty(0, dtype=torch.bool)),
        rows=_rows(engine, out, "", [r["of"]["largest"][r["place"]] for r in replies]),
        buffers=buffers,
        sent=sent,
        extra={n: stacked(lambda of, n=n: of["extra"][n]) for n in first["extra"]},  # type: ignore[misc]
    )


def _rows(engine: "Ray", out: Out, name: str, largest: Sequence[float]) -> Rows:
    space, device = engine.setup.space, engine.setup.device
    if not len(out.work):
        return Rows(torch.empty(0, space.size, dtype=space.dtype, device=device), space)
    if out.whole:
        order = [out.replies[k] for k in range(len(out.work))]
        return Rows(torch.stack([unpack(r["rows"][name])[r["place"]] for r in order]).to(device), space)
    asked = Asked(out.serial, name, tuple(range(len(out.work))))
    return Spread(engine, asked, torch.tensor(largest, dtype=torch.float64), space, device)
