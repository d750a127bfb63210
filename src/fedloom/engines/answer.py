"""What every engine sends back, put together in one way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.engines.step import step_norm
from fedloom.local import Local
from fedloom.rows import Rows, finite_rows
from fedloom.space import Buffers
from fedloom.stages import Setup, State, Updates, Work


def answer(
    work: Work, setup: Setup, rows: Tensor, buffers: Buffers, losses: Tensor, steps: Sequence[int], extra: State
) -> Updates:
    """Updates of a Work from its clients' rows [K, P], buffers [K, ...] and mean losses [K]."""
    loss, finite = _finite(rows, work.buffers, buffers, losses)
    return Updates(
        clients=work.clients,
        slots=work.places,
        counts=work.counts,
        samples=setup.sizes[work.clients],
        steps=torch.tensor(steps, dtype=torch.int64),
        rows=Rows(rows, setup.space),
        buffers=buffers,
        loss=loss,
        finite=finite,
        extra=extra,
    )


def step_norms(local: Local, work: Work, steps: Sequence[int]) -> Tensor:
    """FedNova's a_k of each client [K]; equal settings are computed once."""
    known: dict[tuple[object, ...], float] = {}
    norms = []
    for k, taken in enumerate(steps):
        rates = (work.rates[k] if work.rates.dim() == 2 else work.rates)[:taken].tolist()
        pull = None if work.pull is None else float(work.pull[k])
        key = (*rates, pull)
        if key not in known:
            known[key] = step_norm(local, rates, pull)
        norms.append(known[key])
    return torch.tensor(norms, dtype=torch.float64)


def _finite(rows: Tensor, before: Buffers, after: Buffers, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and finiteness of each client, brought to the CPU at once."""
    if not len(rows):
        return torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.bool)
    loss = losses.double()
    finite = finite_rows(rows) & torch.isfinite(loss)
    for name, values in after.items():  # an attention mask holds infinities from the start
        spoilt = torch.isfinite(before[name]) & ~torch.isfinite(values)
        finite &= ~spoilt.reshape(len(rows), -1).any(1)
    both = torch.stack([loss, finite.double()]).cpu()
    return both[0], both[1].bool()
