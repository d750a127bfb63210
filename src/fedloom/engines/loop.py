"""The plain engine: one client after the other. Whatever PyTorch can train, it can."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedloom.data.transforms import Draws
from fedloom.engines.answer import answer, step_norms
from fedloom.engines.dense import Dense
from fedloom.engines.dropout import keyed
from fedloom.engines.plan import Batches, batches_of, keys_of, ordered_batches_of
from fedloom.engines.step import Optimizer, corrected
from fedloom.federation import Federation
from fedloom.keys import module_seed
from fedloom.space import Buffers
from fedloom.stages import Setup, State, Updates, Work
from fedloom.task import Task


@dataclass(frozen=True)
class Loop:
    """Trains the clients of a Work in turn."""

    task: Task
    federation: Federation  # on the device
    setup: Setup
    dense: Dense | None = None  # the local training of a dense net as compiled code
    name: str = "loop"

    @property
    def compile(self) -> bool:
        return self.dense is not None

    def train(self, work: Work) -> Updates:
        self.task.model.train()
        rows = work.start.new_empty((len(work), self.setup.space.size))
        keys = keys_of(self.setup, self.federation, self.task.model, work)
        runs = []
        with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
            for k, batches in enumerate(batches_of(self.setup, self.federation, work)):
                client = int(work.clients[k])
                there = self._holding(client)
                own = batches.at(there.federation.positions([client])[0])
                run = there._client(work, k, own, None if keys is None else keys[k])
                rows[k] = run.start - run.end
                runs.append(run)
        buffers = {n: _stack([run.buffers[n] for run in runs], b) for n, b in work.buffers.items()}
        losses = _stack([run.loss for run in runs], rows.new_zeros(()))
        steps = [run.steps for run in runs]
        extra = {
            name: _stack([run.extra[name] for run in runs], _like(name, work)) for name in work.wants - {"step_norm"}
        }
        if "step_norm" in work.wants:
            extra["step_norm"] = step_norms(self.setup.local, work, steps)
        return answer(work, self.setup, rows, buffers, losses, steps, extra)

    def _holding(self, client: int) -> "Loop":
        """An engine that has the client's samples in memory."""
        here = self.federation.holding(torch.tensor([client]))
        return self if here is self.federation else replace(self, federation=here)

    def _client(self, work: Work, k: int, planned: Batches, key: Tensor | None) -> "_Run":
        local = self.setup.local
        own = work.start.dim() == 2
        start = work.start[k] if own else work.start
        buffers = {n: (b[k] if own else b).clone() for n, b in work.buffers.items()}
        rates = (work.rates[k] if work.rates.dim() == 2 else work.rates).tolist()
        pull = None if work.pull is None else float(work.pull[k])
        drift = None if work.drift is None else work.drift[k]
        raw = "mean_gradient" in work.wants
        if self.dense is not None:
            x, total, gradients = self.dense.train(self.federation, start, planned, rates, pull, drift, raw)
        else:
            _seed(start.device, module_seed(self.setup.seed, work.w, int(work.clients[k]), int(work.occurrence[k])))
            x, optimizer = start.clone(), Optimizer.of(local, start)
            total, gradients = start.new_zeros(()), torch.zeros_like(start) if raw else None
            for step, (rate, batch) in enumerate(zip(rates, planned.cut(), strict=False)):
                draws = None if key is None else Draws(key, step)
                gradient, losses = self._gradient(x, buffers, batch, draws, key, step)
                if gradients is not None:
                    gradients += gradient
                optimizer.step(x, corrected(gradient, x, start, pull, drift, local.clip_norm), rate)
                total = total + losses.sum()
        steps = len(planned.lengths)
        extra: State = {}
        if gradients is not None:
            extra["mean_gradient"] = gradients / max(steps, 1)
        if "final_score" in work.wants:
            extra["final_score"] = self._score(x, buffers, int(work.clients[k]), key)
        return _Run(start, x, buffers, steps, total / max(int(planned.lengths.sum()), 1), extra)

    def _score(self, x: Tensor, buffers: Buffers, client: int, key: Tensor | None) -> Tensor:
        """Mean over the client's batches, in stored order, of the squared norm of the gradient at x."""
        batches = ordered_batches_of(self.setup, self.federation, [client])[0]
        if self.dense is not None:
            return self.dense.squares(self.federation, x, batches).mean()
        untouched = {name: buffer.clone() for name, buffer in buffers.items()}
        squares = []
        for step, batch in enumerate(batches.cut()):
            gradient, _ = self._gradient(x, untouched, batch, None, key, step)
            squares.append(gradient.double().square().sum())
        return torch.stack(squares).mean()

    def _gradient(
        self, x: Tensor, buffers: Buffers, batch: np.ndarray, draws: Draws | None, key: Tensor | None, step: int
    ) -> tuple[Tensor, Tensor]:
        """The gradient [P] of the batch's mean loss, and the losses [B]."""
        inputs, targets = self.federation.batch(torch.from_numpy(batch).to(x.device), x.dtype, draws)
        leaf = x.detach().requires_grad_()
        with keyed(self.task.model, key, step):
            losses = self.task.losses(leaf, buffers, self.task.laid_out(inputs), targets)
        (gradient,) = torch.autograd.grad(losses.mean(), leaf)
        return gradient, losses.detach()


def _seed(device: torch.device, seed: int) -> None:
    """For what a module draws itself. `torch.manual_seed` seeds every device that there is, and takes its time."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@dataclass(frozen=True)
class _Run:
    """One client's local training."""

    start: Tensor
    end: Tensor
    buffers: Buffers
    steps: int
    loss: Tensor
    extra: State


def _like(name: str, work: Work) -> Tensor:
    """The kind of one client's answer."""
    one = work.start[:0].sum(0) if work.start.dim() == 2 else work.start
    return one if name == "mean_gradient" else torch.zeros((), dtype=torch.float64)


def _stack(values: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(values) if values else like.new_empty((0, *like.shape))
