"""The engine of a real federation: a Work goes out as one message per client, and comes back as Updates.

Whatever arrives is compared with what was asked for. A reply that does not fit is refused, counted and logged with its
node, and the round goes on with the others.
"""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from fedloom.engines.answer import answer
from fedloom.errors import RunError
from fedloom.flower.client import update_of
from fedloom.flower.post import Post
from fedloom.flower.roster import Registrar, Roster
from fedloom.flower.wire import (
    EVALUATE,
    TRAIN,
    Kind,
    Order,
    Refused,
    check_finite,
    nested,
    pack,
    read_fields,
    under,
    unpack,
    write_local,
)
from fedloom.memory import Memory, Remembering
from fedloom.method import Pipeline
from fedloom.population import Absence, Population
from fedloom.round import begin_run, probe
from fedloom.rows import Rows
from fedloom.space import Buffers
from fedloom.stages import Metrics, Setup, State, Updates, Work, as_sent

LOG = logging.getLogger("fedloom")


class Accepted(Memory):
    """By client, one more than the number of the Work whose answer was accepted last; and how far back a server may
    still go: to the older of the two checkpoints that are kept.
    """

    def __init__(self) -> None:
        super().__init__({"work": "scalar"}, torch.empty(0))
        self.checkpoints: list[int] = []  # Works done at the last two, of those that this session wrote

    def saved(self, w: int) -> None:
        super().saved(w)
        self.checkpoints = [*self.checkpoints[-1:], w]

    @property
    def settled(self) -> int:
        return self.checkpoints[0] if len(self.checkpoints) == 2 else 0

    def last(self, client: int, w: int) -> int:
        """The Work before w whose answer was accepted; -1: there is none."""
        return int(self.read(torch.tensor([client]), w)["work"]) - 1

    def accept(self, clients: Tensor, w: int) -> None:
        self.write(clients, w, {"work": torch.full((len(clients),), float(w + 1), dtype=torch.float64)})


class Away(Population):
    """The clients of a real federation, as the server sees them: what they do and remember is their own business."""

    def __init__(self, setup: Setup, accepted: Accepted | None) -> None:
        super().__init__([], setup, Absence())
        self.accepted = accepted

    @property
    def memory(self) -> Mapping[str, Remembering]:
        return {} if self.accepted is None else {"accepted": self.accepted}

    def prepare(self, work: Work) -> Work:
        return work

    def finish(self, work: Work, updates: Updates) -> Updates:
        return updates

    def settle(self) -> None:
        if self.accepted is not None:
            self.accepted.settle()


@dataclass(frozen=True)
class Terms:
    """How long, and for how many, a Work is waited for."""

    round_timeout: float = 3600.0
    min_replies: int = 1
    evaluate_clients: bool = False
    metric: str = "accuracy"


@dataclass(frozen=True)
class Answer:
    """One client's good reply."""

    place: int  # among the Work's clients
    steps: int
    loss: float
    tensors: State  # empty: it has diverged


class Fleet:
    """Asks real clients to train."""

    name = "flower"
    compile = False

    def __init__(
        self,
        post: Post,
        registrar: Registrar,
        roster: Roster,
        terms: Terms,
        method: str,
        pipeline: Pipeline,
        setup: Setup,
    ) -> None:
        self.post, self.registrar, self.roster, self.terms = post, registrar, roster, terms
        self.method, self.pipeline, self.setup = method, pipeline, setup
        self.accepted = Accepted() if pipeline.stateful else None
        self.expected: dict[str, Kind] = {}  # of a reply's tensors; found at the first Work
        self.notes: dict[str, list[int]] = {}

    def noted(self) -> Metrics:
        """By kind of trouble: how many replies of this round had it, and whose."""
        found: Metrics = {}
        for kind in ("refused", "silent", "forgot"):
            clients = self.notes.get(kind, [])
            found |= {kind: len(clients), **({f"{kind}_clients": [*clients]} if clients else {})}
        self.notes = {}
        return found

    def note(self, kind: str, client: int, why: str) -> None:
        self.notes.setdefault(kind, []).append(client)
        LOG.warning("client %d (node %d) is left out: %s", client, self.roster.members[client].node, why)

    def train(self, work: Work) -> Updates:
        self.expected = self.expected or reported(self.pipeline, self.setup, work)
        places = self._ready(work)
        ids = dict(zip(self._send(work, places), places, strict=True))
        answers: list[Answer] = []

        def take(id: str, content: RecordDict | str) -> None:
            found = self._judged(work, ids[id], content)
            if found is not None:
                answers.append(found)

        late = self.post.gather([id for id in ids if id], self.terms.round_timeout, take)
        self.post.forget(late)
        for id in late:
            self.note("silent", int(work.clients[ids[id]]), f"no answer within {self.terms.round_timeout:g} s")
        self._check_enough(work, len(answers))
        return self._updates(work, sorted(answers, key=lambda one: one.place))

    def _check_enough(self, work: Work, came: int) -> None:
        needed = min(self.terms.min_replies, len(work))
        if came < needed:
            raise RunError(
                f"Work {work.w} has {came} usable {'reply' if came == 1 else 'replies'}, fewer than min_replies="
                f"{needed}; see the warnings for why, and resume when that is mended"
            )

    def _ready(self, work: Work) -> list[int]:
        """The places of clients that are connected; while these are too few, others are waited for."""
        deadline = time.monotonic() + self.terms.round_timeout
        waiting = False
        while True:
            clients = work.clients.tolist()
            there = set(self.post.connected())
            places = [i for i, client in enumerate(clients) if self.roster.members[client].node in there]
            if len(places) == len(clients):
                return places
            missing = [client for i, client in enumerate(clients) if i not in set(places)]
            self.registrar.welcome_back(self.roster, missing)
            places = [i for i, client in enumerate(clients) if self.roster.members[client].node in there]
            if len(places) >= min(self.terms.min_replies, len(clients)) or time.monotonic() > deadline:
                for client in missing:
                    if self.roster.members[client].node not in there:
                        self.note("silent", client, "it is not connected")
                return places
            if not waiting:
                waiting = True
                LOG.warning("Work %d waits for clients to connect: %s", work.w, ", ".join(map(str, missing)))
            self.post.pause()

    def _send(self, work: Work, places: Sequence[int]) -> list[str | None]:
        """One message for each place; what is the same for all is packed once, in a record of each message's own."""
        own = work.start.dim() == 2
        common = {} if own else dict(pack(_model(work.start, work.buffers)))
        sent = {f"sent/{key}/{n}": v for key, values in work.sent.items() for n, v in values.items()}
        beside = dict(pack(sent))
        contents = []
        for place in places:
            client = int(work.clients[place])
            one = work.only(torch.tensor([place]))
            model = dict(pack(_model(one.start[0], {n: b[0] for n, b in one.buffers.items()}))) if own else common
            rates = one.rates[0] if one.rates.dim() == 2 else one.rates
            rates = rates[: _steps(self.setup, client, work.max_steps)]
            records = {
                "order": self._order(one, client).record(),
                "model": ArrayRecord(dict(model)),
                "beside": ArrayRecord({**beside, **pack({"rates": rates})}),
            }
            contents.append((self.roster.members[client].node, RecordDict(records)))
        return self.post.send(contents, TRAIN, self.terms.round_timeout)

    def _order(self, one: Work, client: int) -> Order:
        accepted = self.accepted
        return Order(
            run=self.roster.run,
            session=self.roster.session,
            work=one.w,
            client=client,
            clients=self.setup.clients,
            occurrence=int(one.occurrence[0]),
            count=int(one.counts[0]),
            seed=self.setup.seed,
            method=self.method,
            local=write_local(self.setup.local),
            max_steps=-1 if one.max_steps is None else one.max_steps,
            wants=json.dumps(sorted(one.wants)),
            commit=one.commit,
            accepted=-1 if accepted is None else accepted.last(client, one.w),
            settled=0 if accepted is None else accepted.settled,
        )

    def _judged(self, work: Work, place: int, content: RecordDict | str) -> Answer | None:
        """A reply that fits, or a note of why it does not."""
        client = int(work.clients[place])
        if isinstance(content, str):
            self.note("silent" if content.startswith("it is not there") else "refused", client, content)
            return None
        try:
            return self._checked(work, place, content)
        except Refused as error:
            self.note("refused", client, str(error))
            return None

    def _checked(self, work: Work, place: int, content: RecordDict) -> Answer:
        kinds = {"run": str, "work": int, "client": int, "occurrence": int, "samples": int, "steps": int, "loss": float}
        told = read_fields(content, "reply", {**kinds, "finite": bool, "forgot": bool})
        client = int(work.clients[place])
        asked = (self.roster.run, work.w, client, int(work.occurrence[place]))
        if (told["run"], told["work"], told["client"], told["occurrence"]) != asked:
            raise Refused("it answers another Work")
        if told["samples"] != self.roster.members[client].samples:
            raise Refused(f"it says that it has {told['samples']} samples now")
        if told["steps"] != _steps(self.setup, client, work.max_steps):
            raise Refused(f"it says that it took {told['steps']} steps")
        if not told["finite"]:
            unpack(content.get("update"), {}, "the update")
            return Answer(place, told["steps"], told["loss"], {})
        tensors = unpack(content.get("update"), self.expected, "the update")
        buffers = under("buffer", tensors)
        check_finite({n: t for n, t in tensors.items() if not n.startswith("buffer/")}, "the update")
        for name, before in work.buffers.items():
            start = before[place] if work.start.dim() == 2 else before
            if bool((torch.isfinite(start).cpu() & ~torch.isfinite(buffers[name])).any()):
                raise Refused(f"the update, buffer/{name} holds NaN or infinity")
        if not math.isfinite(told["loss"]):
            raise Refused("its loss is not finite")
        if told["forgot"]:
            self.notes.setdefault("forgot", []).append(client)
            LOG.warning("client %d has lost what it remembered, and begins anew", client)
        return Answer(place, told["steps"], told["loss"], tensors)

    def _updates(self, work: Work, answers: Sequence[Answer]) -> Updates:
        """All good replies, as the simulator's engines would have answered."""
        device = self.setup.device
        places = torch.tensor([one.place for one in answers], dtype=torch.int64)
        good = [one.place for one in answers if one.tensors]
        if self.accepted is not None and work.commit and good:
            self.accepted.accept(work.clients[torch.tensor(good)], work.w)

        def stacked(name: str) -> Tensor:
            kind = self.expected[name]
            like = torch.zeros(kind.shape, dtype=kind.dtype)
            values = [one.tensors.get(name, like) for one in answers]
            found = torch.stack(values) if values else like.new_empty((0, *kind.shape))
            host = name.startswith(("extra/", "up/")) and not kind.shape
            return found if host else found.to(device)

        all_of = {name: stacked(name) for name in self.expected}
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

    def evaluate(self, round: int, flat: Tensor, buffers: Buffers) -> dict[str, float]:
        """What clients with test data of their own say of a model: means over clients."""
        if not self.terms.evaluate_clients:
            return {}
        there = set(self.post.connected())
        nodes = {m.node: client for client, m in enumerate(self.roster.members) if m.node in there}
        model = dict(pack(_model(flat, buffers)))
        asked = {node: RecordDict({"model": ArrayRecord(dict(model))}) for node in nodes}
        names = ("clients_loss", f"clients_{self.terms.metric}")
        scores: list[dict[str, float]] = []
        for node, content in self.post.exchange(asked, EVALUATE, self.terms.round_timeout).items():
            try:
                scores.append(_scores(content, names))
            except Refused as error:
                LOG.warning("client %d (node %d) gives no score: %s", nodes[node], node, error)
        values = {name: [found[name] for found in scores if name in found] for name in names}
        return {name: sum(some) / len(some) for name, some in values.items() if some}


def _model(start: Tensor, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"start": start, **nested("buffer", buffers)}


def _steps(setup: Setup, client: int, limit: int | None) -> int:
    steps = setup.local.count_steps(int(setup.sizes[client]))
    return steps if limit is None else min(steps, limit)


def reported(pipeline: Pipeline, setup: Setup, like: Work) -> dict[str, Kind]:
    """What a client's reply must hold, found by letting the clients' stages end a Work in which nothing happened."""
    own = like.start.dim() == 2
    buffers = {n: b[0] if own else b for n, b in like.buffers.items()}
    work = probe(pipeline, setup, begin_run(pipeline, setup, buffers), torch.tensor([0]))
    rows = torch.zeros((1, setup.space.size), dtype=setup.space.dtype, device=setup.device)
    one = torch.ones(1, dtype=torch.float64)
    extra = {name: rows if name == "mean_gradient" else one for name in work.wants}
    nothing = answer(work, setup, rows, {n: b[None] for n, b in buffers.items()}, one, [1], extra)
    ended = Population(pipeline.clients, setup, Absence()).finish(replace(work, buffers=buffers), nothing)
    return {name: Kind.of(tensor) for name, tensor in update_of(ended, pipeline).items()}


def _scores(content: Any, names: Sequence[str]) -> dict[str, float]:
    if not isinstance(content, RecordDict):
        raise Refused(str(content) if content else "it did not answer")
    record = content.get("scores")
    found = read_fields(content, "scores", {n: float for n in names if record and n in record})
    if not found or not all(map(math.isfinite, found.values())):
        raise Refused("its scores are no numbers")
    return found
