"""Many runs at once: Works of runs that train the same model in the same way are one larger cohort.

Each run keeps its own batches, memory and server; only the local steps are shared. So the results are those of the same
runs one after the other, up to rounding, and a GPU that ten clients leave idle is filled by a hundred.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.engines.joined import Parts
from fedloom.engines.vector import Vector
from fedloom.errors import RunError, out_of_memory
from fedloom.result import Callback, Result
from fedloom.simulation import guarded
from fedloom.space import buffers_of
from fedloom.stages import Updates, Work
from fedloom.stopping import terminable, undisturbed
from fedloom.training import Training

LOG = logging.getLogger("fedloom")


def alike(one: Training, other: Training) -> bool:
    """May two runs share their local steps?"""
    a, b = one.simulation, other.simulation
    if not isinstance(a.engine, Vector) or not isinstance(b.engine, Vector):
        return False
    return (
        a.federation.x is b.federation.x
        and a.federation.shards is b.federation.shards  # the same clients under the same numbers
        and _same_labels(a.federation.y, b.federation.y)
        and a.federation.preparation == b.federation.preparation
        and replace(a.setup.local, lr=b.setup.local.lr) == b.setup.local  # each row has rates of its own
        and a.setup.space == b.setup.space
        and a.task.loss == b.task.loss
        and a.task.precision == b.task.precision
        and a.engine.mixes == b.engine.mixes
        and repr(a.task.model) == repr(b.task.model)
        and _same_answers(a.engine, b.engine)
    )


def _same_labels(mine: Tensor, theirs: Tensor) -> bool:
    """Each run under an attack has labels of its own, often the same ones."""
    return mine is theirs or (mine.dtype == theirs.dtype and torch.equal(mine, theirs))


def _same_answers(a: Vector, b: Vector) -> bool:
    """Are both models the same function? Frozen parameters and plain attributes may differ."""
    mine, theirs = dict(a.task.model.named_parameters()), dict(b.task.model.named_parameters())
    frozen = set(mine) - set(a.task.space.names)
    if mine.keys() != theirs.keys() or not all(torch.equal(mine[name], theirs[name]) for name in frozen):
        return False
    flat, buffers = a.task.space.flatten(a.task.model), buffers_of(a.task.model)
    x = a.federation.batch(torch.arange(min(2, len(a.federation.x)), device=flat.device), flat.dtype)[0]
    answers = []
    for task in (a.task, b.task):
        task.model.eval()
        with torch.no_grad():
            answers.append(task.outputs(flat, dict(buffers), x))
    return torch.equal(*answers)


def run_together(
    trainings: Sequence[Training],
    callbacks: Sequence[Sequence[Callback]],
    finished: Callable[[int, Result], None] = lambda i, result: None,
) -> list[Result]:
    """Play all runs to their ends, round by round; `finished` is told of each as soon as it has ended. A run that fails
    is saved and left behind, and its error raised when all others have ended.
    """
    playing = [training.works(own) for training, own in zip(trainings, callbacks, strict=True)]
    waiting: dict[int, Work] = {}
    results: dict[int, Result] = {}
    errors: list[Exception] = []

    def go_on(i: int, updates: Updates | None) -> None:
        try:
            try:
                waiting[i] = playing[i].send(updates)  # type: ignore[arg-type]  # nothing is sent before the first Work
            except StopIteration as end:
                waiting.pop(i, None)
                results[i] = end.value
                finished(i, end.value)
        except Exception as error:  # in its callbacks, its disk, its server: the other runs are not concerned
            waiting.pop(i, None)
            errors.append(error)
            _save(trainings[i : i + 1])
            if waiting:
                LOG.warning("%s%s; the other runs go on", trainings[i].label, error)

    groups: list[list[int]] = []
    for i, training in enumerate(trainings):
        group = next((known for known in groups if alike(trainings[known[0]], training)), None)
        groups.append([i]) if group is None else group.append(i)
    with trainings[0].simulation.numerics(), terminable():
        try:
            for i in range(len(trainings)):
                go_on(i, None)
            while waiting:
                for group in groups:
                    here = [i for i in group if i in waiting]
                    asked = {i: waiting[i] for i in here}
                    for i, updates in zip(here, _trained(trainings, group[0], asked), strict=True):
                        go_on(i, updates)
        except BaseException:  # an interrupt, or a device that fails
            _save(trainings)
            raise
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(trainings))]


def _save(trainings: Sequence[Training]) -> None:
    """All of them, also where one can't be written; whatever stopped them is what is raised."""
    with undisturbed():
        for training in trainings:
            try:
                training.save()
            except RunError as error:
                LOG.warning("%s%s", training.label, error)


def _trained(trainings: Sequence[Training], first: int, asked: dict[int, Work]) -> list[Updates]:
    """The Works of a group, by the engine of its first run; each run's share of the time is that of its rows."""
    if not asked:
        return []
    lead = trainings[first].simulation.engine
    began = time.perf_counter()
    with guarded(trainings[first].simulation.setup.device):
        if isinstance(lead, Vector):
            parts = [(_engine(trainings[i]), work) for i, work in asked.items()]
            found = [updates for some in _portions(lead, parts) for updates in _joined(lead, some)]
        else:
            found = [lead.train(work) for work in asked.values()]
    seconds = time.perf_counter() - began
    rows = sum(len(work) for work in asked.values())
    for i, work in asked.items():
        trainings[i].trained += seconds * len(work) / max(rows, 1)
    return found


def _portions(lead: Vector, parts: Parts) -> Iterator[Parts]:
    """Works that fit into memory together, as far as that is known."""
    some: list[tuple[Vector, Work]] = []
    for part in parts:
        if some and sum(len(work) for _, work in [*some, part]) > lead.together:
            yield some
            some = []
        some.append(part)
    yield some


def _joined(lead: Vector, parts: Parts) -> list[Updates]:
    """Works as one cohort; in halves where memory runs out before a single step."""
    try:
        return lead.train_together(parts)
    except RuntimeError as error:
        if not out_of_memory(error) or len(parts) == 1:
            raise
    lead.forget()
    half = len(parts) // 2
    return [*_joined(lead, parts[:half]), *_joined(lead, parts[half:])]


def _engine(training: Training) -> Vector:
    engine = training.simulation.engine
    assert isinstance(engine, Vector)  # nosec B101  # for the type checker
    return engine
