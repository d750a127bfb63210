"""The diagnostics that a run may measure, each with what it costs. `fedloom.diagnosis` lists them."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.diagnose.agreement import conflicts, cosines, gsi, gsi_of, mean_cosine, norm_ratio
from fedloom.diagnose.divergence import dissimilarity, distance
from fedloom.diagnose.fairness import fairness
from fedloom.diagnose.skew import label_counts
from fedloom.diagnose.vectors import cosine, squares
from fedloom.engines.loop import Loop
from fedloom.errors import ConfigError
from fedloom.round import Outcome, RunState, probe
from fedloom.simulation import Simulation
from fedloom.space import Buffers, buffers_of
from fedloom.stages import Metrics, Round, State, Updates, Work

SNAPSHOTS = 10  # of what is too much for every round
LARGEST_MATRIX = 100  # clients
MOST_SCORES = 10_000  # clients


@dataclass(frozen=True)
class Look:
    """One finished round, to be measured."""

    simulation: Simulation
    before: RunState
    outcome: Outcome
    record: Round  # of the outcome
    snapshot: bool  # one of a few rounds of the run


class Diagnostic:
    """One thing that is measured. It may follow the Works of a round, and is asked once when the round is over."""

    name: ClassVar[str]

    def cost(self, simulation: Simulation) -> str:
        """In a few words."""
        raise NotImplementedError

    def begin(self) -> None:
        """A round begins."""

    def heard(self, simulation: Simulation, work: Work, updates: Updates) -> dict[str, float]:
        """Numbers of one Work; `updates` are those that are finite, at least one."""
        return {}

    def measure(self, look: Look) -> Metrics:
        return {}

    def tensors(self) -> State:
        """What it must remember for the next round."""
        return {}

    def restore(self, tensors: State) -> None:
        pass


class Gsi(Diagnostic):
    name = "gsi"

    def cost(self, simulation: Simulation) -> str:
        return "a pass over the updates of each round"

    def measure(self, look: Look) -> Metrics:
        updates = look.record.updates
        if len(updates) < 2:
            return {}
        by_tensor = gsi(updates.rows, updates.weights, "tensor")
        return {"gsi.model": float(gsi(updates.rows, updates.weights, "model")), "gsi.tensor": by_tensor.tolist()}


class Similarity(Diagnostic):
    name = "similarity"

    def cost(self, simulation: Simulation) -> str:
        return "the products of all pairs of updates in each round"

    def measure(self, look: Look) -> Metrics:
        record = look.record
        rows = record.updates.rows  # as they are averaged
        found: Metrics = {
            "similarity.cosine": mean_cosine(rows),
            "similarity.conflicts": conflicts(rows),
            "similarity.norm_ratio": norm_ratio(rows),
        }
        if record.received.rows is not rows:  # an update stage has changed them
            found["similarity.cosine_before"] = mean_cosine(record.received.rows)
            found["similarity.conflicts_before"] = conflicts(record.received.rows)
        if look.snapshot and len(record.updates) <= LARGEST_MATRIX:
            found["similarity.matrix"] = cosines(rows).tolist()
            found["clients"] = record.updates.clients.tolist()
        return found


class Labels(Diagnostic):
    name = "labels"
    of_all: Tensor | None = None

    def cost(self, simulation: Simulation) -> str:
        if simulation.federation.classes is None:
            raise ConfigError("diagnose=labels: the targets are no class labels to compare")
        if simulation.federation.shards is not None:
            raise ConfigError(
                "diagnose=labels: the labels stay on disk (lazy=True) and can't be counted; leave lazy out"
            )
        return "the labels of each round's clients"

    def measure(self, look: Look) -> Metrics:
        federation = look.simulation.federation
        if self.of_all is None:
            self.of_all = label_counts(federation)
        counts = label_counts(federation, look.record.received.clients)
        return {"labels.similarity": cosine(counts, self.of_all)}


class Divergence(Diagnostic):
    name = "divergence"

    def cost(self, simulation: Simulation) -> str:
        return "two passes over the updates of each Work"

    def heard(self, simulation: Simulation, work: Work, updates: Updates) -> dict[str, float]:
        start = work.start[places(work, updates)] if work.start.dim() == 2 else work.start
        models = start - updates.rows.matrix
        return {"divergence.updates": dissimilarity(updates.rows), "divergence.models": dissimilarity(models)}


class Twin(Diagnostic):
    """A second model, trained in each Work on the pooled data of the clients that answered it: as many epochs with the
    same batch size, so about K times the steps of one client, at the rate of the Work's first step.
    """

    name = "twin"

    def __init__(self) -> None:
        self.theta: Tensor | None = None
        self.buffers: Buffers = {}

    def cost(self, simulation: Simulation) -> str:
        return "as much training again, of one model after the other"

    def heard(self, simulation: Simulation, work: Work, updates: Updates) -> dict[str, float]:
        setup = simulation.setup
        if self.theta is None:
            self.theta, self.buffers = setup.start, buffers_of(simulation.task.model)
        clients = torch.tensor(sorted(set(updates.clients.tolist())))
        pooled = simulation.federation.holding(clients).only(clients)
        total = len(pooled.index)
        pooled = replace(pooled, offsets=torch.tensor([0, total]))
        local = replace(setup.local, shuffle=True)  # else it would see one client after the other
        if local.steps is not None:
            local = replace(local, steps=local.steps * len(clients))
        limit = None if work.max_steps is None else work.max_steps * len(clients)
        alone = replace(setup, clients=1, sizes=torch.tensor([total]), local=local)
        one = torch.zeros(1, dtype=torch.int64)
        steps = min(local.count_steps(total), limit or 1 << 62)
        rate = work.rates.flatten()[:1]
        asked = Work(work.w, one, one, one + 1, self.theta, self.buffers, rate.expand(steps), limit)
        trained = Loop(simulation.task, pooled, alone).train(asked)
        self.theta = self.theta - trained.rows.matrix[0]
        self.buffers = {name: values[0] for name, values in trained.buffers.items()}
        start = work.start[places(work, updates)] if work.start.dim() == 2 else work.start
        return {"twin.distance": distance((start - updates.rows.matrix).mean(0), self.theta)}

    def measure(self, look: Look) -> Metrics:
        return {} if self.theta is None else {"twin.distance": distance(look.record.after, self.theta)}

    def tensors(self) -> State:
        if self.theta is None:
            return {}
        return {"theta": self.theta, **{f"buffers/{name}": values for name, values in self.buffers.items()}}

    def restore(self, tensors: State) -> None:
        if "theta" in tensors:
            self.theta = tensors["theta"]
            self.buffers = {n.removeprefix("buffers/"): values for n, values in tensors.items() if n != "theta"}


class Fair(Diagnostic):
    name = "fairness"

    def cost(self, simulation: Simulation) -> str:
        return f"an evaluation on all training data, {SNAPSHOTS} times in a run"

    def measure(self, look: Look) -> Metrics:
        if not look.snapshot:
            return {}
        simulation, state = look.simulation, look.outcome.state
        scores: list[float] = []
        for some in torch.split(torch.arange(simulation.setup.clients), 100):
            own = simulation.federation.held_out(some)
            scores += simulation.evaluator.by_client(simulation.deployed(state), state.buffers, own)
        found = fairness(scores)
        kept: Metrics = {f"fairness.{name}": getattr(found, name) for name in ("mean", "std", "min", "p10")}
        return {**kept, "fairness.scores": scores} if len(scores) <= MOST_SCORES else kept


class Probe(Diagnostic):
    name = "probe"
    sampled: float | None = None

    def cost(self, simulation: Simulation) -> str:
        setup = simulation.setup
        trained = setup.per_round * simulation.pipeline.schedule.stage.works(setup.per_round)
        return f"all {setup.clients} clients train in every round, beside the {trained:g} of the round"

    def begin(self) -> None:
        self.sampled = None

    def heard(self, simulation: Simulation, work: Work, updates: Updates) -> dict[str, float]:
        if self.sampled is None:  # of the round's first Work: as far as a probe goes
            self.sampled = float(squares(updates.rows).sqrt().mean())
        return {}

    def measure(self, look: Look) -> Metrics:
        simulation, setup, sampled = look.simulation, look.simulation.setup, self.sampled
        groups = setup.space.groups("tensor")
        total, lengths = torch.zeros_like(setup.start), torch.zeros(len(groups), dtype=torch.float64)
        mass, squared = 0.0, []
        for clients in torch.split(torch.arange(setup.clients), setup.per_round):
            work = simulation.population.prepare(probe(simulation.pipeline, setup, look.before, clients))
            updates = finite(simulation.population.finish(work, simulation.train(work)))
            if not len(updates):
                continue
            by_samples = simulation.pipeline.weights == "samples"
            w = updates.samples.double() if by_samples else torch.ones(len(updates), dtype=torch.float64)
            w = w.to(total.device)
            total = total + updates.rows.weighted_sum(w)
            lengths = lengths + (w[:, None] * updates.rows.squares("tensor")).sum(0).cpu()
            mass += float(w.sum())
            squared.append(squares(updates.rows).cpu())
        if not squared:
            return {}
        mean, lengths = total / mass, lengths / mass
        along = groups.sums(mean.square()).cpu()
        return {
            "probe.gsi": gsi_of(lengths, along, mean.dtype).tolist(),
            "probe.gsi_model": float(gsi_of(lengths.sum(), along.sum(), mean.dtype)),
            "probe.norm": float(torch.cat(squared).sqrt().mean()),
            "probe.sampled_norm": float("nan") if sampled is None else sampled,
        }


KINDS: dict[str, type[Diagnostic]] = {
    kind.name: kind for kind in (Gsi, Similarity, Labels, Divergence, Twin, Fair, Probe)
}


def finite(updates: Updates) -> Updates:
    return updates if bool(updates.finite.all()) else updates.only(updates.finite.nonzero().flatten())


def places(work: Work, updates: Updates) -> Tensor:
    """Where in the Work each update's client stands: not all may have answered."""
    at = {int(slot): i for i, slot in enumerate(work.places)}
    return torch.tensor([at[int(slot)] for slot in updates.slots], device=work.start.device)
