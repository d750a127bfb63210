"""A local step made fast: compiled where the run is long enough for that, and on a GPU recorded and played again."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Any

import torch

from fedloom.data.files import cache_folder
from fedloom.engines.cohort import Cohort

Step = Callable[[Cohort], None]


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
    before = [tensor.clone() for tensor in cohort.changed()]
    run()
    for tensor, values in zip(cohort.changed(), before, strict=True):
        tensor.copy_(values)


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
