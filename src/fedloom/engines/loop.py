"""The plain engine: one client after the other. Whatever PyTorch can train, it can."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.data.transforms import Draws
from fedloom.engines.step import Optimizer, corrected, step_norm
from fedloom.federation import Federation
from fedloom.keys import augmentation_key, client_rng
from fedloom.rows import Rows
from fedloom.space import Buffers
from fedloom.stages import Setup, State, Updates, Work
from fedloom.task import Task


@dataclass(frozen=True)
class Loop:
    """Trains the clients of a Work in turn."""

    task: Task
    federation: Federation  # on the device
    setup: Setup
    name: str = "loop"

    def train(self, work: Work) -> Updates:
        self.task.model.train()
        rows = work.start.new_empty((len(work), self.setup.space.size))
        runs = []
        with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
            for k in range(len(work)):
                run = self._client(work, k)
                rows[k] = run.start - run.end
                runs.append(run)
        buffers = {n: _stack([run.buffers[n] for run in runs], b) for n, b in work.buffers.items()}
        loss, finite = _losses(rows, work.buffers, buffers, [run.loss for run in runs])
        return Updates(
            clients=work.clients,
            slots=work.places,
            counts=work.counts,
            samples=self.setup.sizes[work.clients],
            steps=torch.tensor([run.steps for run in runs], dtype=torch.int64),
            rows=Rows(rows, self.setup.space),
            buffers=buffers,
            loss=loss,
            finite=finite,
            extra={name: _stack([run.extra[name] for run in runs], _like(name, work)) for name in work.wants},
        )

    def _client(self, work: Work, k: int) -> "_Run":
        client, local = int(work.clients[k]), self.setup.local
        own = work.start.dim() == 2
        start = work.start[k] if own else work.start
        buffers = {n: (b[k] if own else b).clone() for n, b in work.buffers.items()}
        rates = (work.rates[k] if work.rates.dim() == 2 else work.rates).tolist()
        pull = None if work.pull is None else float(work.pull[k])
        drift = None if work.drift is None else work.drift[k]

        rng = client_rng(self.setup.seed, work.w, client, int(work.occurrence[k]))
        begin, end = self.federation.offsets[client : client + 2].tolist()
        batches = local.batches(end - begin, rng, work.max_steps)
        key = self._key(work, k, start.device)
        _seed(start.device, int(rng.integers(1 << 62)))
        mine = self.federation.index[begin:end]

        x, optimizer = start, Optimizer(local)
        total, seen = start.new_zeros(()), 0
        gradients = torch.zeros_like(start) if "mean_gradient" in work.wants else None
        for step, (rate, batch) in enumerate(zip(rates, batches, strict=False)):
            chosen = mine[torch.from_numpy(batch)].to(x.device)
            draws = None if key is None else Draws(key, step)
            gradient, losses = self._gradient(x, buffers, *self.federation.batch(chosen, x.dtype, draws))
            if gradients is not None:
                gradients += gradient
            x = optimizer.step(x, corrected(gradient, x, start, pull, drift, local.clip_norm), rate)
            total, seen = total + losses.sum(), seen + len(losses)
        extra: State = {}
        if gradients is not None:
            extra["mean_gradient"] = gradients / max(len(batches), 1)
        if "final_score" in work.wants:
            extra["final_score"] = self._score(x, buffers, mine)
        if "step_norm" in work.wants:
            norm = step_norm(local, rates[: len(batches)], pull)
            extra["step_norm"] = torch.tensor(norm, dtype=torch.float64)
        return _Run(start, x, buffers, len(batches), total / max(seen, 1), extra)

    def _key(self, work: Work, k: int, device: torch.device) -> Tensor | None:
        """For the augmentation of a client's batches, where there is any."""
        if not self.federation.preparation.augment:
            return None
        words = augmentation_key(self.setup.seed, work.w, int(work.clients[k]), int(work.occurrence[k]))
        return torch.tensor(words.tolist(), device=device)

    def _score(self, x: Tensor, buffers: Buffers, mine: Tensor) -> Tensor:
        """Mean over the client's batches, in stored order, of the squared norm of the gradient at x."""
        untouched = {name: buffer.clone() for name, buffer in buffers.items()}
        squares = []
        for places in self.setup.local.batches_in_order(len(mine)):
            chosen = mine[torch.from_numpy(places)].to(x.device)
            gradient, _ = self._gradient(x, untouched, *self.federation.batch(chosen, x.dtype))
            squares.append(gradient.double().square().sum())
        return torch.stack(squares).mean()

    def _gradient(self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient [P] of the batch's mean loss, and the losses [B]."""
        leaf = x.detach().requires_grad_()
        losses = self.task.losses(leaf, buffers, inputs, targets)
        (gradient,) = torch.autograd.grad(losses.mean(), leaf)
        return gradient, losses.detach()


def _seed(device: torch.device, seed: int) -> None:
    """For dropout and the like. `torch.manual_seed` seeds every device that there is, and takes its time."""
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


def _losses(rows: Tensor, before: Buffers, after: Buffers, losses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and finiteness of each client, brought to the CPU at once."""
    if not losses:
        return torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.bool)
    loss = torch.stack(losses).double()
    finite = torch.isfinite(rows).all(1) & torch.isfinite(loss)
    for name, values in after.items():  # an attention mask holds infinities from the start
        spoilt = torch.isfinite(before[name]) & ~torch.isfinite(values)
        finite &= ~spoilt.reshape(len(rows), -1).any(1)
    both = torch.stack([loss, finite.double()]).cpu()
    return both[0], both[1].bool()
