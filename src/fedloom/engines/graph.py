"""A local step made fast: compiled where the run is long enough for that, and on a GPU recorded and played again."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from threading import Condition
from typing import Any

import torch
from torch import Tensor

from fedloom.data.files import cache_folder
from fedloom.engines.cohort import Cohort

Step = Callable[[Cohort], None]
LONGER_BY_ROWS = 32  # rows from which on a step takes longer the more of them there are


class Turnstile:
    """Threads step beside each other, but while one of them traces, the others wait: tracing changes how every module
    of the process is called.
    """

    def __init__(self) -> None:
        self.gate = Condition()
        self.inside = 0

    @contextmanager
    def beside(self) -> Iterator[None]:
        with self.gate:
            self.inside += 1
        try:
            yield
        finally:
            with self.gate:
                self.inside -= 1
                self.gate.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self.gate:
            self.gate.wait_for(lambda: not self.inside)
            yield


TURNSTILE = Turnstile()


def compiled(step: Step, cohort: Cohort) -> Callable[[], Any]:
    """A step on this cohort's memory as one compiled program; compiled code is kept on disk.

    The step is traced into plain tensor operations first, gradients included: whatever Python a model runs, and the
    modes that `dropout.py` and `kernels.py` enter, are gone before the compiler sees it.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    tensors = cohort.tensors()
    traced = make_fx(lambda *others: step(cohort.over(others)))(*(tensor.clone() for tensor in tensors))
    fast: Any = torch.compile(traced, dynamic=False)

    def run() -> None:
        with torch.no_grad():
            fast(*tensors)

    return run


def try_out(run: Callable[[], Any], cohort: Cohort) -> None:
    """Run a step, and undo it."""
    with undone(cohort):
        run()


@contextmanager
def undone(cohort: Cohort) -> Iterator[list[Tensor]]:
    """Whatever is done to a cohort meanwhile is undone; gives what the tensors that a step changes were before."""
    before = [tensor.clone() for tensor in cohort.changed()]
    yield before
    for tensor, values in zip(cohort.changed(), before, strict=True):
        tensor.copy_(values)


def difference(fast: Callable[[], Any], plain: Callable[[], Any], cohort: Cohort, sizes: Sequence[int]) -> float:
    """How far a step in a fast form is from the same step as it is written; 1 is as far as the step itself goes.

    The largest over the model's tensors, whose `sizes` add up to a row, and over all else that a step changes. A tensor
    whose gradient should be zero has one of rounding alone, so a hundredth of the whole step is added to each.
    """
    with undone(cohort):
        plain()
        right = [tensor.clone() for tensor in cohort.changed()]
    with undone(cohort) as before:
        fast()
        found = [one for one in zip(cohort.changed(), before, right, strict=True) if _is_compared(one[0], cohort)]
        return max(_apart(*one, sizes) for one in found)


def loss_difference(fast: Callable[[], Any], plain: Callable[[], Any], cohort: Cohort) -> float:
    """How far the clients' losses in a step of a fast form are from those of the plain one, as a share of them."""
    right, found = (_losses(step, cohort) for step in (plain, fast))
    known = right.isfinite()
    norm = torch.linalg.vector_norm
    off = norm((found - right)[known]) / norm(right[known]).clamp(min=torch.finfo(right.dtype).tiny)
    return float(off.nan_to_num(nan=torch.inf))


def _losses(step: Callable[[], Any], cohort: Cohort) -> Tensor:
    before = cohort.total.clone()
    with undone(cohort):
        step()
        return cohort.total - before


def nudged(step: Callable[[], Any], cohort: Cohort, unit: float) -> Callable[[], Any]:
    """The same step of models whose numbers are off by up to `unit` of themselves, as products round them. In a deep
    net with batch norm that alone makes quite another step, so two right forms of it may be as far from each other.
    """

    def run() -> None:
        generator = torch.Generator(cohort.x.device).manual_seed(0)
        off = torch.empty_like(cohort.x).uniform_(-unit, unit, generator=generator).mul_(cohort.x)
        cohort.x += off
        step()
        cohort.x -= off

    return run


def _is_compared(tensor: Tensor, cohort: Cohort) -> bool:
    """All but counters, which a compiler leaves out where nobody reads them, and but for Adam's steps: it makes whole
    ones of gradients that are rounding. Its moments tell more.
    """
    adam = cohort.optimizer.second is not None
    return tensor.dim() > 0 and tensor.is_floating_point() and not (adam and tensor is cohort.x)


def _apart(found: Tensor, before: Tensor, right: Tensor, sizes: Sequence[int]) -> float:
    parts = list(sizes) if right.dim() == 2 and right.shape[1] == sum(sizes) else [right.numel()]
    step, error = ((a - b).reshape(-1, sum(parts)) for a, b in ((right, before), (found, right)))
    if not bool(step.isfinite().all()):  # there is nothing to compare with
        return 0.0
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    slack = norm(step) / 100 + 8 * torch.finfo(right.dtype).eps * norm(before) + 1e-300
    pairs = zip(torch.split(step, parts, dim=1), torch.split(error, parts, dim=1), strict=True)
    ratios = torch.stack([norm(own) / (norm(part) + slack) for part, own in pairs])
    return float(ratios.nan_to_num(nan=torch.inf).max())


def recorded(run: Callable[[], Any], cohort: Cohort, pool: list[Any]) -> Callable[[], Any]:
    """A step as a CUDA graph. It is tried first: what a first call sets up must not be recorded. Recordings share
    their memory, since they are played one after the other.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            try_out(run, cohort)
    torch.cuda.current_stream().wait_stream(side)
    if not pool:
        pool.append(torch.cuda.graph_pool_handle())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool[0]):
        run()
    return graph.replay


@cache
def rows_of_recordings(room: int, heavy: bool = False) -> tuple[int, ...]:
    """For how many rows steps of a cohort are recorded: all of them, and powers of two up to a half. Where a step takes
    the longer the more rows it has, some in between as well. A `heavy` step takes longer with every row, and is not
    compiled: more of its recordings are made, so that few rows are computed that have finished.

    >>> rows_of_recordings(10)
    (1, 2, 4, 10)
    >>> rows_of_recordings(256)
    (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
    >>> rows_of_recordings(40, heavy=True)
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40)
    """
    powers = [1 << k for k in range(room.bit_length())]
    if heavy:
        quarters = {max(1, power * quarter // 4) for power in powers for quarter in (4, 5, 6, 7)}
        return (*sorted(rows for rows in quarters if rows < room), room)
    between = [3 * power // 2 for power in powers if power >= LONGER_BY_ROWS]
    fewer = [rows for rows in powers + between if rows <= (0.8 if rows >= LONGER_BY_ROWS else 0.5) * room]
    return (*sorted(fewer), room)
