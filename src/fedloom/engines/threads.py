"""On a CPU: the clients of a Work shared out among cores, each of which trains its part with an engine of its own."""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from fedloom.engines.dropout import keyed
from fedloom.engines.loop import Loop
from fedloom.engines.vector import Vector
from fedloom.federation import Federation
from fedloom.rows import Rows
from fedloom.space import buffers_of
from fedloom.stages import State, Updates, Work
from fedloom.task import Task

One = TypeVar("One", bound=Loop | Vector)


@dataclass(frozen=True)
class Threads:
    """One engine per core; a module can serve only one of them at a time, so each has a copy."""

    engines: Sequence[Loop | Vector]
    pool: ThreadPoolExecutor

    @classmethod
    def of(cls, engine: One, cores: int) -> "Threads":
        share = replace(engine.setup, per_round=-(-engine.setup.per_round // cores))
        copies = [replace(engine, task=copied(engine.task), setup=share) for _ in range(cores)]
        return cls(copies, ThreadPoolExecutor(cores, "fedloom", initializer=torch.set_num_threads, initargs=(1,)))

    @property
    def name(self) -> str:
        return self.engines[0].name

    @property
    def compile(self) -> bool:
        return self.engines[0].compile

    def train(self, work: Work) -> Updates:
        shares = self._shares(work)
        if len(shares) < 2:
            return self.engines[0].train(work)
        parts = [work.only(share) for share in shares]
        answers = list(self.pool.map(lambda pair: pair[0].train(pair[1]), zip(self.engines, parts, strict=False)))
        return _joined(answers, torch.cat(shares).argsort())

    def _shares(self, work: Work) -> list[Tensor]:
        """Places of the Work for each core: the longest next to whoever has least to do."""
        setup = self.engines[0].setup
        steps = [setup.local.count_steps(n) for n in setup.sizes[work.clients].tolist()]
        shares: list[list[int]] = [[] for _ in self.engines]
        load = [0] * len(shares)
        for k in sorted(range(len(work)), key=lambda k: -steps[k]):
            core = load.index(min(load))
            shares[core].append(k)
            load[core] += steps[k]
        return [torch.tensor(sorted(share)) for share in shares if share]


def copied(task: Task) -> Task:
    return replace(task, model=copy.deepcopy(task.model))


def draws_itself(task: Task, federation: Federation) -> bool:
    """Does the model draw from PyTorch's own generator, which threads would share?"""
    task.model.train()
    flat = task.space.flatten(task.model)
    x = federation.batch(torch.arange(min(2, len(federation.x)), device=flat.device), flat.dtype)[0]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = torch.random.get_rng_state()
        with keyed(task.model, torch.zeros(2, dtype=torch.int64, device=flat.device), 0):
            task.outputs(flat, buffers_of(task.model), x)
        return not torch.equal(before, torch.random.get_rng_state())


def _joined(parts: Sequence[Updates], order: Tensor) -> Updates:
    """Answers to parts of a Work as one, in the order of the Work."""

    def join(of: Callable[[Updates], Tensor]) -> Tensor:
        whole = torch.cat([of(part) for part in parts])
        return whole[order.to(whole.device)]

    first = parts[0]
    names = ("clients", "slots", "counts", "samples", "steps", "loss", "finite")
    extra: State = {name: join(lambda part, name=name: part.extra[name]) for name in first.extra}  # type: ignore[misc]
    return replace(
        first,
        **{name: join(lambda part, name=name: getattr(part, name)) for name in names},  # type: ignore[misc, arg-type]
        rows=Rows(join(lambda part: part.rows.matrix), first.rows.space),
        buffers={n: join(lambda part, n=n: part.buffers[n]) for n in first.buffers},  # type: ignore[misc]
        extra=extra,
    )
