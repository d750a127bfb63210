"""The fast engine: a cohort is one matrix [K, P], and a local step of all its clients is one step of the matrix.

The gradient of the sum of the clients' losses, by `vmap` over the rows, is each client's own gradient. Clients are
sorted by how many steps they take, so that those who still train are always the first rows, and no finished row is
computed again. A short batch is filled up with a sample of its own client, whose loss counts nothing; where the samples
of a batch touch each other (batch norm), clients with batches of one length step together instead.

On a GPU a step is recorded once as a CUDA graph and played again; for clients that finish early there are recordings
of fewer rows, for short batches one for every power of two of samples, and a row that has finished stays as it is. What
is played often is compiled first. The Works of several runs may be one cohort, row under row.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedloom.data.transforms import Draws
from fedloom.engines.cohort import Asked, Cohort, upload, upload_all
from fedloom.engines.dropout import keyed
from fedloom.engines.fused_check import compared
from fedloom.engines.graph import (
    TURNSTILE,
    compiled,
    difference,
    loss_difference,
    nudged,
    recorded,
    rows_of_recordings,
    try_out,
)
from fedloom.engines.joined import Clients, Done, Parts, asked_of, positions_of, slices_of
from fedloom.engines.kernels import faster
from fedloom.engines.plan import Batches, Plan, batches_of, ordered_batches_of, plan, power_of_two, width_of
from fedloom.errors import out_of_memory
from fedloom.federation import Federation
from fedloom.models.recurrent import is_recurrent, set_fused
from fedloom.space import Buffers
from fedloom.stages import Setup, Updates, Work
from fedloom.task import Task

LOG = logging.getLogger("fedloom")
CHAOS = 0.7  # of a step: however much a model makes of rounding, a form of its step that is farther away is wrong
LOSS = 0.05  # of a client's loss: rounding, even to eight bits, makes a percent of it
KEPT = 8  # cohorts whose memory and recordings are held for the next Work
SCORED = 64  # batches that are scored at once, or as many as there are clients
TF32 = 2.0**-11  # the share of a number that is lost when products round it
TABLE = 1 << 24  # entries of a table of samples that may be set aside for the longest client there is


def never(rows: int, width: int, room: int) -> bool:
    return False


@dataclass
class Vector:
    """Trains the clients of a Work together."""

    task: Task
    federation: Federation  # on the device
    setup: Setup
    mixes: bool = False  # the samples of a batch touch each other
    graphs: bool = False  # record steps and play them again
    compile: bool = False  # compile the step of a whole cohort
    fused: bool = False  # by the kernels of fused convolutions and batch norms, whatever the rows
    gains: Callable[[int, int, int], bool] = never  # is a step of `rows`, of batches of `width`, to be compiled?
    together: int = 1 << 30  # rows that fit into memory at once
    name: str = "vector"
    kept: list[Cohort] = field(default_factory=list, init=False)  # whose memory is used again
    pool: list[Any] = field(default_factory=list, init=False)  # of memory that recordings share

    def __post_init__(self) -> None:
        set_fused(self.task.model, False)  # the fused kernel has no batching rule

    def train(self, work: Work) -> Updates:
        return self.train_together([(self, work)])[0]

    def train_together(self, parts: Parts) -> list[Updates]:
        """The Works of this and other runs with the same model, loss, samples and local settings, as one cohort."""
        self.task.model.train()
        clients = [(one, work, k) for one, work in parts for k in range(len(work))]
        longest = max(self.setup.local.count_steps(int(one.setup.sizes.max())) for one, _ in parts)
        batches = [own for one, work in parts for own in batches_of(one.setup, one.federation, work)]
        asked = asked_of(parts)
        done = Done.like(asked, scored=any("final_score" in work.wants for _, work in parts))
        waiting = list(self._chunks(batches))
        while waiting:
            places, fresh = waiting.pop(0), not self.kept
            try:
                engine, chunk = self._holding([clients[k] for k in places])
                planned = plan([batches[k].at(there) for k, there in zip(places, positions_of(chunk), strict=True)])
                order = np.array(places)[planned.order]
                cohort = engine._cohort(asked.only(order), planned, len(clients), longest)
                engine._train(cohort, asked.only(order), planned, order, [chunk[i] for i in planned.order], done)
                continue
            except RuntimeError as error:
                if not out_of_memory(error) or (fresh and len(places) == 1):
                    raise
            self.forget()  # outside of the handler, whose traceback holds on to memory
            if not fresh:  # perhaps it was what earlier cohorts left there
                waiting.insert(0, places)
                continue
            half = -(-len(places) // 2)
            LOG.warning("%d clients do not fit into memory together; trying %d at a time", len(places), half)
            self.together = min(self.together, half)
            waiting[:0] = [places[:half], places[half:]]
        steps = [len(own.lengths) for own in batches]
        return [
            done.answer(one.setup, work, steps, at) for (one, work), at in zip(parts, slices_of(parts), strict=True)
        ]

    def _holding(self, clients: Clients) -> "tuple[Vector, Clients]":
        """An engine that has these clients' samples in memory, and the same rows under it. Where they stay on disk,
        runs that are trained together have the same ones.
        """
        if self.federation.shards is None:
            return self, clients
        asked = torch.tensor([int(work.clients[k]) for _, work, k in clients])
        there = replace(self, federation=self.federation.holding(asked))
        return there, [(there, work, k) for _, work, k in clients]

    def forget(self) -> None:
        """Give memory and recordings back."""
        self.kept.clear()
        self.pool.clear()
        if self.setup.device.type == "cuda":
            torch.cuda.empty_cache()

    def _chunks(self, batches: Sequence[Batches]) -> Iterator[list[int]]:
        """Clients that step together: with batches of about the same length, and no more than fit."""
        by_width: dict[int, list[int]] = {}
        for k, own in enumerate(batches):
            by_width.setdefault(width_of(own.longest, self._most), []).append(k)
        for alike in by_width.values():
            pieces = -(-len(alike) // self.together)
            if pieces > 1:
                LOG.info("%d clients are trained at a time, as many as max_memory has room for", self.together)
            for piece in np.array_split(np.array(alike), pieces):
                yield piece.tolist()

    @cached_property
    def _most(self) -> int:
        return self.setup.local.batch_size or int(self.setup.sizes.max())

    @cached_property
    def _heavy(self) -> bool:
        """Every step in time is a product of its own, and none is compiled."""
        return is_recurrent(self.task.model) and not self.compile

    @property
    def _keeps(self) -> bool:
        return self.graphs or self.compile

    def _train(
        self,
        cohort: Cohort,
        asked: Asked,
        planned: Plan,
        order: np.ndarray,
        clients: Clients,
        done: Done,
    ) -> None:
        """One chunk through all of its steps; its outcome goes into its places of the whole."""
        device = asked.start.device
        seen, steps = np.maximum(planned.lengths.sum(0), 1), np.maximum(planned.steps, 1)
        rates = upload(asked.rates[: len(planned.samples)] * (planned.lengths > 0), device)
        tables = [order, seen, steps, planned.samples, planned.lengths]
        there, seen_there, steps_there, samples, lengths = upload_all(tables, device)
        cohort.fill(asked, samples, lengths, rates)
        self._play(cohort, planned)
        n = len(order)
        done.rows[there] = cohort.start[:n] - cohort.x[:n]
        done.losses[there] = cohort.total[:n] / seen_there
        for name, values in cohort.buffers.items():
            done.buffers[name][there] = values[:n]
        if done.raw is not None and cohort.raw is not None:
            done.raw[there] = cohort.raw[:n] / steps_there[:, None]
        if done.score is not None:
            with TURNSTILE.beside():
                self._score(clients, cohort, order, done.score)

    def _cohort(self, asked: Asked, planned: Plan, clients: int, longest: int) -> Cohort:
        """Memory for a chunk: that of an earlier one where it fits, or some that will fit later ones, too. `clients`
        are asked in all, and no client takes more steps than `longest`.
        """
        steps, n, widest = planned.samples.shape
        if not self._keeps:
            return Cohort.of(self.setup.local, asked, n, steps, widest)
        width = width_of(widest, self._most)
        for known in self.kept:
            if known.holds(asked, planned, width):
                return known
        rows = max(n, min(max(self.setup.per_round, min(clients, power_of_two(n))), self.together))
        room = longest if longest * rows * width <= TABLE else power_of_two(steps)
        made = Cohort.of(self.setup.local, asked, rows, max(room, steps), width)
        self.kept.append(made)
        del self.kept[:-KEPT]
        return made

    def _play(self, cohort: Cohort, planned: Plan) -> None:
        """All steps. Batch norm must not see batches of different length together."""
        lengths = planned.lengths
        active, longest = (lengths > 0).sum(1), lengths.max(1, initial=0)
        alike = (lengths == longest[:, None]).sum(1) == active
        for s, (n, longest_now, same) in enumerate(zip(active.tolist(), longest.tolist(), alike.tolist(), strict=True)):
            if self.mixes and not same:
                with TURNSTILE.beside():
                    self._mixed_step(cohort, lengths[s, :n], s)
            else:
                exact = self.mixes or not self._keeps
                self._next(cohort, n, longest_now if exact else width_of(longest_now, self._most))

    def _next(self, cohort: Cohort, n: int, width: int) -> None:
        """The next step of the first n rows, in the fastest form that there is."""
        _, room, widest = cohort.room
        whole = self.compile and width == widest and 2 * n > room
        if not whole and not self.graphs:
            with TURNSTILE.beside():
                self.step(cohort, n, width)
            return
        sizes = rows_of_recordings(room, self._heavy) if self.graphs else (room,)
        rows = next(size for size in sizes if size >= n)
        if self.graphs and self._heavy and not cohort.recorded:  # the largest first: later ones fit into its memory
            cohort.recorded[room, widest] = self._prepared(cohort, room, widest, worth=False)
        if (rows, width) not in cohort.recorded:
            worth = whole or (width == widest and self.gains(rows, width, room))
            cohort.recorded[rows, width] = self._prepared(cohort, rows, width, worth)
        with TURNSTILE.beside():
            cohort.recorded[rows, width]()

    def _prepared(self, cohort: Cohort, rows: int, width: int, worth: bool) -> Callable[[], Any]:
        step = partial(self.step, n=rows, width=width, all_go_on=False)
        plain = partial(step, cohort)
        if worth or self.fused:
            by = "the fused form" if self.fused else "torch.compile"
            make = partial(partial, plain, fused=True) if self.fused else partial(compiled, step, cohort)
            fast = self._made(by, make, cohort)
            if fast is not None:
                played = self._recorded(fast, cohort)
                with TURNSTILE.beside():
                    if self._is_the_same(by, played, plain, cohort):
                        return played
        return self._recorded(plain, cohort)

    def _made(self, by: str, make: Callable[[], Callable[[], Any]], cohort: Cohort) -> Callable[[], Any] | None:
        """A fast form of a step, which has been tried out."""
        try:
            with TURNSTILE.alone():
                fast = make()
                with compared():
                    try_out(fast, cohort)
            return fast
        except Exception as error:  # a compiler may fail anywhere
            if out_of_memory(error):
                raise
            LOG.warning("%s failed, so steps run without it: %s", by, " ".join(str(error).split())[:200])
            return None

    def _recorded(self, run: Callable[[], Any], cohort: Cohort) -> Callable[[], Any]:
        return recorded(run, cohort, self.pool) if self.graphs else run

    def _is_the_same(self, by: str, fast: Callable[[], Any], plain: Callable[[], Any], cohort: Cohort) -> bool:
        """Are two forms of a step as near to each other as rounding lets them be? Fused layers are compared one by one;
        what is made of them is the same if it loses the same.
        """
        if self.fused:
            off = loss_difference(fast, plain, cohort)
            if off > LOSS:
                LOG.warning("%s has other losses (off by %.0f%%), so steps run without it", by, 100 * off)
            return off <= LOSS
        sizes, dtype = self.setup.space.sizes, self.setup.space.dtype
        beside = difference(fast, plain, cohort, sizes)
        allowed = 1e-6 if dtype == torch.float64 else 0.5 if self.task.precision == "bf16" else 0.1
        if beside > allowed:
            rough = dtype == torch.float32 and self.setup.device.type == "cuda" and self.task.precision != "fp32"
            unit = TF32 if rough else torch.finfo(dtype).eps
            allowed = max(allowed, min(difference(nudged(plain, cohort, unit), plain, cohort, sizes), CHAOS))
        if beside > allowed:
            LOG.warning("%s made another step of it (%.2g steps away), so steps run without it", by, beside)
        return beside <= allowed

    def step(self, cohort: Cohort, n: int, width: int, all_go_on: bool = True, fused: bool = False) -> None:
        """The next step of the first n rows, with batches of one width. Some of them may have finished, unless
        `all_go_on`.
        """
        samples, lengths, rates = (
            table.index_select(0, cohort.step.reshape(1))[0, :n]
            for table in (cohort.samples, cohort.lengths, cohort.rates)
        )
        keys = None if cohort.keys is None else cohort.keys[:n]
        held = {name: values[:n].clone() for name, values in cohort.buffers.items()}
        chosen = samples[:, :width]
        gradient, lost = self.gradients(cohort.x[:n], held, chosen, lengths, keys, cohort.step, fused=fused)
        for name, values in held.items():
            before = cohort.buffers[name][:n]
            goes_on = (lengths > 0).reshape(-1, *(1 for _ in before.shape[1:]))
            before.copy_(torch.where(goes_on, values, before))
        if not all_go_on:  # whatever a finished row makes of a sample that is not its own
            gradient = gradient.where(lengths[:, None] > 0, 0.0)
        cohort.update(gradient, lost, rates)

    def _mixed_step(self, cohort: Cohort, lengths: np.ndarray, s: int) -> None:
        """A step of rows whose batches differ in length: those of one length at a time."""
        n = len(lengths)
        x = cohort.x[:n]
        gradient, lost = torch.empty_like(x), x.new_zeros(n)
        for width in np.unique(lengths).tolist():
            alike = upload(np.flatnonzero(lengths == width), x.device)
            held = {name: values[alike] for name, values in cohort.buffers.items()}
            keys = None if cohort.keys is None else cohort.keys[alike]
            samples, counts = cohort.samples[s, alike, :width], cohort.lengths[s, alike]
            gradient[alike], lost[alike] = self.gradients(x[alike], held, samples, counts, keys, cohort.step)
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
        fused: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The gradients [n, P] of the batches' mean losses and the sums of their losses [n]; `buffers` are updated."""
        inputs, targets = self.federation.x[samples], self.federation.y[samples]
        counts = torch.arange(samples.shape[1], device=x.device) < lengths[:, None]
        leaf = x.detach().requires_grad_()

        def client(flat: Tensor, held: Buffers, x: Tensor, y: Tensor, key: Tensor | None) -> tuple[Tensor, Buffers]:
            after = dict(held)
            draws = None if key is None or clean else Draws(key, step)
            prepared = self.federation.preparation.train(x, flat.dtype, draws)
            with keyed(self.task.model, key, step), faster(self.task.model, fused):
                return self.task.losses(flat, after, prepared, y), after

        over = (0, 0, 0, 0, None if keys is None else 0)
        losses, after = vmap(client, in_dims=over)(leaf, buffers, inputs, targets, keys)
        losses = losses.where(counts, 0.0)
        (gradient,) = torch.autograd.grad((losses.sum(1) / lengths.clamp(min=1)).sum(), leaf)
        buffers.update({name: values.detach() for name, values in after.items()})
        return gradient, losses.detach().sum(1)

    def _score(self, clients: Clients, cohort: Cohort, order: np.ndarray, scores: Tensor) -> None:
        """Mean over a client's batches, in stored order, of the squared norm of the gradient where it ended; for the
        clients of runs that want it.
        """
        asked = np.array([place for place, (_, work, _) in enumerate(clients) if "final_score" in work.wants])
        if not len(asked):
            return
        chosen = [clients[place] for place in asked]
        ordered = plan(
            [ordered_batches_of(one.setup, one.federation, [int(work.clients[k])])[0] for one, work, k in chosen]
        )
        turn = asked[ordered.order]
        rows = upload(turn, scores.device)
        held = {name: values[rows] for name, values in cohort.buffers.items()}
        keys = None if cohort.keys is None else cohort.keys[rows]
        samples, lengths = upload_all([ordered.samples, ordered.lengths], scores.device)
        squares = torch.zeros(lengths.shape, dtype=torch.float64, device=scores.device)
        for steps, places in self._scored_together(ordered.lengths, cohort):
            step, width = int(steps[0]), int(ordered.lengths[steps, places].max())
            when, own = upload_all([steps, places], scores.device)
            part = {name: values[own] for name, values in held.items()}
            drawn = None if keys is None else keys[own]
            batch, counts = samples[when, own, :width], lengths[when, own]
            gradient, _ = self.gradients(cohort.x[rows[own]], part, batch, counts, drawn, step, clean=True)
            for name, values in part.items():
                held[name][own] = values
            squares[when, own] = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64).square()
        scores[upload(order[turn], scores.device)] = squares.sum(0) / upload(ordered.steps, scores.device)

    def _scored_together(self, lengths: np.ndarray, cohort: Cohort) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Steps and places of the batches [S, K] that are scored at once: as many as there is room for, where neither
        buffers nor draws make them differ by when they come; else those of one step, and of one length where the
        samples of a batch touch each other.
        """
        if not cohort.buffers and cohort.keys is None and not self.mixes:
            steps, places = np.nonzero(lengths)
            room = min(max(len(cohort.x), SCORED), self.together)
            for at in range(0, len(steps), room):
                yield steps[at : at + room], places[at : at + room]
            return
        for step, own in enumerate(lengths):
            for alike in [own == width for width in np.unique(own[own > 0])] if self.mixes else [own > 0]:
                places = np.flatnonzero(alike)
                yield np.full(len(places), step), places
