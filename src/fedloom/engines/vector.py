"""The fast engine: a cohort is one matrix [K, P], and a local step of all its clients is one step of the matrix.

The gradient of the sum of the clients' losses, by `vmap` over the rows, is each client's own gradient. Clients are
sorted by how many steps they take, so that those who still train are always the first rows, and no finished row is
computed again. A short batch is filled up with a sample of its own client, whose loss counts nothing; where the samples
of a batch touch each other (batch norm), clients with batches of one length step together instead.

On a GPU a step is recorded once as a CUDA graph and played again; for clients that finish early there is a recording
for every power of two of rows, and a row that has finished stays as it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedloom.data.transforms import Draws
from fedloom.engines.answer import answer, step_norms
from fedloom.engines.cohort import Cohort, lay_out, widths
from fedloom.engines.dropout import keyed
from fedloom.engines.plan import Plan, batches_of, keys_of, ordered_batches_of, plan
from fedloom.engines.step import Optimizer
from fedloom.federation import Federation
from fedloom.models.recurrent import set_fused
from fedloom.space import Buffers, buffers_of
from fedloom.stages import Setup, State, Updates, Work
from fedloom.task import Task

Batches = Sequence[Sequence[np.ndarray]]  # of each client, positions in the federation


@dataclass(frozen=True)
class Vector:
    """Trains the clients of a Work together."""

    task: Task
    federation: Federation  # on the device
    setup: Setup
    mixes: bool  # the samples of a batch touch each other
    graphs: bool = False  # record steps and play them again
    together: int = 1 << 30  # rows that fit into memory at once
    name: str = "vector"
    kept: list[Cohort] = field(default_factory=list)  # whose memory is used again
    pool: list[Any] = field(default_factory=list)  # of memory that recordings share: they are played one by one

    def __post_init__(self) -> None:
        set_fused(self.task.model, False)  # the fused kernel has no batching rule

    def train(self, work: Work) -> Updates:
        self.task.model.train()
        batches = [batches_of(self.setup, self.federation, work, k) for k in range(len(work))]
        own = work.start.dim() == 2
        rows = work.start.new_zeros((len(work), self.setup.space.size))
        buffers = {n: (b if own else b.expand(len(work), *b.shape)).clone() for n, b in work.buffers.items()}
        losses = work.start.new_zeros(len(work))
        extra: State = {}
        if "mean_gradient" in work.wants:
            extra["mean_gradient"] = torch.zeros_like(rows)
        if "final_score" in work.wants:
            extra["final_score"] = rows.new_zeros(len(work), dtype=torch.float64)
        keys = keys_of(self.setup, self.federation, self.task.model, work)
        for places in self._chunks(batches):
            planned = plan([batches[k] for k in places])
            there = torch.tensor(places)[torch.from_numpy(planned.order)]  # place in the Work of each row
            cohort = self._cohort(work, planned, there, buffers, keys)
            self._play(cohort, planned)
            self._collect(work, cohort, planned, there.to(rows.device), rows, buffers, losses, extra)
        steps = [len(own_batches) for own_batches in batches]
        if "step_norm" in work.wants:
            extra["step_norm"] = step_norms(self.setup.local, work, steps)
        return answer(work, self.setup, rows, buffers, losses, steps, extra)

    def _chunks(self, batches: Batches) -> Iterator[list[int]]:
        """Clients that step together: with batches of about the same length, and no more than fit."""
        by_width: dict[int, list[int]] = {}
        for k, own in enumerate(batches):
            by_width.setdefault(max((len(batch) for batch in own), default=0).bit_length(), []).append(k)
        for alike in by_width.values():
            for i in range(0, len(alike), self.together):
                yield alike[i : i + self.together]

    def _cohort(self, work: Work, planned: Plan, there: Tensor, buffers: Buffers, keys: Tensor | None) -> Cohort:
        device, dtype = work.start.device, work.start.dtype
        on = there.to(device)
        start = work.start[on] if work.start.dim() == 2 else work.start.expand(len(on), -1)
        rates = work.rates[there] if work.rates.dim() == 2 else work.rates
        samples, lengths, table = lay_out(planned, rates, device, dtype)
        made = Cohort(
            x=start.clone(),
            start=start.clone() if self.graphs else start,
            buffers={name: values[on] for name, values in buffers.items()},
            total=start.new_zeros(len(on)),
            samples=samples,
            lengths=lengths,
            rates=table,
            optimizer=Optimizer.of(self.setup.local, start, torch.zeros((), dtype=torch.float64, device=device)),
            pull=None if work.pull is None else work.pull.to(start)[on][:, None],
            drift=None if work.drift is None else work.drift[on],
            raw=torch.zeros_like(start) if "mean_gradient" in work.wants else None,
            keys=None if keys is None else keys[on],
            step=torch.zeros((), dtype=torch.int64, device=device),
        )
        if not self.graphs:
            return made
        for known in self.kept:
            if known.take_over(made):
                return known
        self.kept.append(made)
        del self.kept[:-KEPT]
        return made

    def _play(self, cohort: Cohort, planned: Plan) -> None:
        """All steps; those whose clients agree on the length of a batch, or need not, are recorded on a GPU."""
        widest = planned.samples.shape[2]
        for s in range(len(planned.samples)):
            n = planned.active(s)
            found = widths(planned, s, n)
            alike = not self.mixes or len(found) == 1
            width = max(found) if self.mixes or not self.graphs else widest
            if self.graphs and alike:
                rows = min(1 << (n - 1).bit_length(), len(cohort.x))
                play(self, cohort, rows, width, full=n == rows)
            elif alike:
                self.step(cohort, n, width)
            else:
                self._mixed_step(cohort, planned, s, n)

    def step(self, cohort: Cohort, n: int, width: int, full: bool = True) -> None:
        """The next step of the first n rows, with batches of one width; unless `full`, some of them have finished."""
        samples, lengths, rates = (
            table.index_select(0, cohort.step.reshape(1))[0, :n]
            for table in (cohort.samples, cohort.lengths, cohort.rates)
        )
        keys = None if cohort.keys is None else cohort.keys[:n]
        held = {name: values[:n].clone() for name, values in cohort.buffers.items()}
        gradient, lost = self.gradients(cohort.x[:n], held, samples[:, :width], lengths, keys, cohort.step)
        for name, values in held.items():
            before = cohort.buffers[name][:n]
            goes_on = (lengths > 0).reshape(-1, *(1 for _ in before.shape[1:]))
            before.copy_(torch.where(goes_on, values, before))
        if not full:  # whatever a finished row makes of a sample that is not its own
            gradient = gradient.where(lengths[:, None] > 0, 0.0)
        cohort.update(gradient, lost, rates)

    def _mixed_step(self, cohort: Cohort, planned: Plan, s: int, n: int) -> None:
        """A step in which batch norm must not see batches of different length together."""
        x = cohort.x[:n]
        gradient, lost = torch.empty_like(x), x.new_zeros(n)
        for width in sorted(widths(planned, s, n)):
            alike = torch.from_numpy(np.flatnonzero(planned.lengths[s, :n] == width)).to(x.device)
            held = {name: values[alike] for name, values in cohort.buffers.items()}
            keys = None if cohort.keys is None else cohort.keys[alike]
            samples, lengths = cohort.samples[s, alike, :width], cohort.lengths[s, alike]
            gradient[alike], lost[alike] = self.gradients(x[alike], held, samples, lengths, keys, cohort.step)
            for name, values in held.items():
                cohort.buffers[name][alike] = values
        cohort.update(gradient, lost, cohort.rates[s, :n])

    def gradients(
        self,
        x: Tensor,
        buffers: Buffers,
        samples: Tensor,
        lengths: Tensor,
        keys: Tensor | None,
        step: int | Tensor,
        clean: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The gradients [n, P] of the batches' mean losses and the sums of their losses [n]; `buffers` are updated."""
        inputs, targets = self.federation.x[samples], self.federation.y[samples]
        counts = torch.arange(samples.shape[1], device=x.device) < lengths[:, None]
        leaf = x.detach().requires_grad_()

        def client(flat: Tensor, held: Buffers, x: Tensor, y: Tensor, key: Tensor | None) -> tuple[Tensor, Buffers]:
            after = dict(held)
            draws = None if key is None or clean else Draws(key, step)
            prepared = self.federation.preparation.train(x, flat.dtype, draws)
            with keyed(self.task.model, key, step):
                return self.task.losses(flat, after, prepared, y), after

        over = (0, 0, 0, 0, None if keys is None else 0)
        losses, after = vmap(client, in_dims=over)(leaf, buffers, inputs, targets, keys)
        losses = losses.where(counts, 0.0)
        (gradient,) = torch.autograd.grad((losses.sum(1) / lengths.clamp(min=1)).sum(), leaf)
        buffers.update({name: values.detach() for name, values in after.items()})
        return gradient, losses.detach().sum(1)

    def _collect(
        self,
        work: Work,
        cohort: Cohort,
        planned: Plan,
        there: Tensor,
        rows: Tensor,
        buffers: Buffers,
        losses: Tensor,
        extra: State,
    ) -> None:
        """A cohort's outcome into its rows of the whole Work's."""
        rows[there] = cohort.start - cohort.x
        seen = torch.from_numpy(np.maximum(planned.lengths.sum(0), 1)).to(losses)
        losses[there] = cohort.total / seen
        for name, values in cohort.buffers.items():
            buffers[name][there] = values
        if cohort.raw is not None:
            steps = torch.from_numpy(np.maximum(planned.steps, 1)).to(rows)
            extra["mean_gradient"][there] = cohort.raw / steps[:, None]
        if "final_score" in extra:
            extra["final_score"][there] = self._scores(work, cohort, there)

    def _scores(self, work: Work, cohort: Cohort, there: Tensor) -> Tensor:
        """Mean over a client's batches, in stored order, of the squared norm of the gradient where it ended."""
        clients = work.clients[there.cpu()].tolist()
        ordered = plan([ordered_batches_of(self.setup, self.federation, client) for client in clients])
        turn = torch.from_numpy(ordered.order).to(there.device)
        x, held = cohort.x[turn], {name: values[turn] for name, values in cohort.buffers.items()}
        squares = x.new_zeros(len(x), dtype=torch.float64)
        for s in range(len(ordered.samples)):
            for width in sorted(widths(ordered, s, ordered.active(s))):
                alike = torch.from_numpy(np.flatnonzero(ordered.lengths[s] == width)).to(x.device)
                samples = torch.from_numpy(ordered.samples[s]).to(x.device)[alike, :width]
                lengths = torch.full((len(alike),), width, device=x.device)
                keys = None if cohort.keys is None else cohort.keys[turn][alike]
                part = {name: values[alike] for name, values in held.items()}
                gradient, _ = self.gradients(x[alike], part, samples, lengths, keys, s, clean=True)
                for name, values in part.items():
                    held[name][alike] = values
                squares[alike] += gradient.double().square().sum(1)
        scores = torch.empty_like(squares)
        scores[turn] = squares / torch.from_numpy(ordered.steps).to(squares)
        return scores


KEPT = 4  # cohorts whose memory and recordings are held for the next Work


def play(engine: Vector, cohort: Cohort, rows: int, width: int, full: bool) -> None:
    """One step of the first rows from its recording, which is made the first time."""
    graph = cohort.recorded.get((rows, width, full))
    if graph is None:
        graph = cohort.recorded[(rows, width, full)] = record(engine, cohort, rows, width, full)
    graph.replay()


def record(engine: Vector, cohort: Cohort, rows: int, width: int, full: bool) -> torch.cuda.CUDAGraph:
    """A step as a CUDA graph. It is tried first, and undone: what a first call sets up must not be recorded."""
    state = [tensor for tensor in cohort.tensors() if tensor is not None]
    before = [tensor.clone() for tensor in state]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            engine.step(cohort, rows, width, full)
            for tensor, values in zip(state, before, strict=True):
                tensor.copy_(values)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if not engine.pool:
        engine.pool.append(torch.cuda.graph_pool_handle())
    with torch.cuda.graph(graph, pool=engine.pool[0]):
        engine.step(cohort, rows, width, full)
    return graph


def refusal(task: Task, federation: Federation, setup: Setup) -> str:
    """Why `vmap` can't train this model, or nothing: one step of two made-up clients is tried."""
    engine = Vector(task, federation, setup, mixes=False)
    flat = task.space.flatten(task.model)
    task.model.train()
    x, device = torch.stack([flat, flat]), flat.device
    buffers = {name: torch.stack([b, b]) for name, b in buffers_of(task.model).items()}
    samples = torch.zeros((2, 2), dtype=torch.int64, device=device)
    keys = torch.zeros((2, 2), dtype=torch.int64, device=device)
    fallback: Any = torch._C._functorch  # an operation without a batching rule would run row by row
    fallback._set_vmap_fallback_enabled(False)
    try:
        engine.gradients(x, buffers, samples, torch.full((2,), 2, device=device), keys, 0)
    except Exception as error:  # a model may fail anywhere
        return f"vmap can't train this model ({' '.join(str(error).split())[:200]})"
    finally:
        fallback._set_vmap_fallback_enabled(True)
        set_fused(task.model, True)
    return ""


def mixes_samples(task: Task, federation: Federation) -> bool:
    """Does an output depend on the other samples of its batch, as under batch norm?"""
    task.model.train()
    flat = task.space.flatten(task.model)
    both = federation.batch(torch.arange(2, device=flat.device) % len(federation.x), flat.dtype)[0]
    try:
        with torch.no_grad(), keyed(task.model, torch.zeros(2, dtype=torch.int64, device=flat.device), 0):
            alone = task.outputs(flat, buffers_of(task.model), both[:1])
        with torch.no_grad(), keyed(task.model, torch.zeros(2, dtype=torch.int64, device=flat.device), 0):
            beside = task.outputs(flat, buffers_of(task.model), both)[:1]
    except (RuntimeError, ValueError):
        return True
    return not torch.allclose(alone, beside, rtol=1e-3, atol=1e-4)
