"""What clients send back: each reply compared with what was asked for, and all that fit as Updates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedloom.engines.answer import answer
from fedloom.flower.client import update_of
from fedloom.flower.roster import Roster
from fedloom.flower.wire import Kind, Refused, check_finite, read_fields, under, unpack
from fedloom.method import Pipeline
from fedloom.population import Absence, Population
from fedloom.round import begin_run, probe
from fedloom.rows import Rows
from fedloom.space import Buffers
from fedloom.stages import Setup, State, Updates, Work, as_sent

LARGEST_LOSS = 1e100  # the sum over many clients must stay finite
TOLD = {
    "run": str,
    "work": int,
    "client": int,
    "occurrence": int,
    "samples": int,
    "steps": int,
    "loss": float,
    "finite": bool,
    "forgot": bool,
}


@dataclass(frozen=True)
class Answer:
    """One client's reply, found good."""

    place: int  # among the Work's clients
    steps: int
    loss: float
    tensors: State  # empty: it has diverged, and says so
    forgot: bool = False  # it had lost what it was to remember


@dataclass(frozen=True)
class Replies:
    """Knows what a reply to a Work must be."""

    pipeline: Pipeline
    setup: Setup
    roster: Roster
    expected: dict[str, Kind]

    @classmethod
    def of(cls, pipeline: Pipeline, setup: Setup, roster: Roster, buffers: Buffers) -> "Replies":
        """What tensors a reply holds is found by letting the clients' stages end a Work in which nothing happens."""
        work = probe(pipeline, setup, begin_run(pipeline, setup, buffers), torch.tensor([0]))
        rows = torch.zeros((1, setup.space.size), dtype=setup.space.dtype, device=setup.device)
        one = torch.ones(1, dtype=torch.float64)
        extra = {name: rows if name == "mean_gradient" else one for name in work.wants}
        nothing = answer(work, setup, rows, {n: b[None] for n, b in buffers.items()}, one, [1], extra)
        ended = Population(pipeline.clients, setup, Absence()).finish(replace(work, buffers=buffers), nothing)
        kinds = {name: Kind.of(tensor) for name, tensor in update_of(ended, pipeline).items()}
        return cls(pipeline, setup, roster, kinds)

    def steps(self, client: int, limit: int | None) -> int:
        """How many local steps a client takes."""
        steps = self.setup.local.count_steps(int(self.setup.sizes[client]))
        return steps if limit is None else min(steps, limit)

    def check(self, work: Work, place: int, content: RecordDict) -> Answer:
        """The reply of the client at one place of a Work, or a refusal that says why."""
        told = read_fields(content, "reply", TOLD)
        client = int(work.clients[place])
        asked = (self.roster.run, work.w, client, int(work.occurrence[place]))
        if (told["run"], told["work"], told["client"], told["occurrence"]) != asked:
            raise Refused("it answers another Work")
        if told["samples"] != self.roster.members[client].samples:
            raise Refused(f"it says that it has {told['samples']} samples now")
        if told["steps"] != self.steps(client, work.max_steps):
            raise Refused(f"it says that it took {told['steps']} steps")
        if not told["finite"]:
            unpack(content.get("update"), {}, "the update")
            return Answer(place, told["steps"], told["loss"], {})
        tensors = unpack(content.get("update"), self.expected, "the update")
        check_finite({n: t for n, t in tensors.items() if not n.startswith("buffer/")}, "the update")
        for name, buffer in under("buffer", tensors).items():
            before = work.buffers[name][place] if work.start.dim() == 2 else work.buffers[name]
            if bool((torch.isfinite(before).cpu() & ~torch.isfinite(buffer)).any()):
                raise Refused(f"the update, buffer/{name} holds NaN or infinity")
        if not math.isfinite(float(tensors["row"].double().square().sum())):
            raise Refused("the update is longer than any number")
        if not abs(told["loss"]) < LARGEST_LOSS:
            raise Refused("its loss is not finite")
        return Answer(place, told["steps"], told["loss"], tensors, told["forgot"])

    def updates(self, work: Work, answers: Sequence[Answer]) -> Updates:
        """As the simulator's engines would have answered."""
        places = torch.tensor([one.place for one in answers], dtype=torch.int64)
        all_of = {name: self._stacked(name, answers) for name in self.expected}
        space = self.setup.space
        return Updates(
            clients=work.clients[places],
            slots=work.places[places],
            counts=work.counts[places],
            samples=self.setup.sizes[work.clients[places]],
            steps=torch.tensor([one.steps for one in answers], dtype=torch.int64),
            loss=torch.tensor([one.loss for one in answers], dtype=torch.float64),
            finite=torch.tensor([bool(one.tensors) for one in answers], dtype=torch.bool),
            rows=Rows(all_of["row"], space),
            buffers=under("buffer", all_of),
            sent={part.key: as_sent(under(f"up/{part.key}", all_of), space) for part in self.pipeline.clients},
            extra=under("extra", all_of),
        )

    def _stacked(self, name: str, answers: Sequence[Answer]) -> Tensor:
        """One value of all clients: vectors where the model is, single numbers on the host."""
        kind = self.expected[name]
        nothing = torch.zeros(kind.shape, dtype=kind.dtype)
        values = [one.tensors.get(name, nothing) for one in answers]
        found = torch.stack(values) if values else nothing.new_empty((0, *kind.shape))
        return found if not kind.shape and not name.startswith("buffer/") else found.to(self.setup.device)
