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

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedloom.errors import RunError
from fedloom.flower.live import live
from fedloom.flower.post import Absent, Failed, Post
from fedloom.flower.replies import Answer, Replies
from fedloom.flower.roster import Registrar, Roster
from fedloom.flower.wire import (
    EVALUATE,
    TRAIN,
    Order,
    Refused,
    nested,
    pack,
    read_fields,
    write_local,
)
from fedloom.memory import Memory, Remembering
from fedloom.method import Pipeline
from fedloom.population import Absence, Population
from fedloom.space import Buffers
from fedloom.stages import Metrics, Setup, Updates, Work

LOG = logging.getLogger("fedloom")
FRUITLESS = 10  # refused replies in a row, for each client, after which an asynchronous run ends
ASSEMBLY = 60.0  # seconds that a server waits for all of its clients when it begins or goes on


class Accepted(Memory):
    """By client, one more than the number of the Work whose answer was accepted last; and how far back a server may
    still go: to the older of the two checkpoints that are kept.
    """

    def __init__(self, resumable: bool) -> None:
        super().__init__({"work": "scalar"}, torch.empty(0))
        self.resumable = resumable
        self.checkpoints: list[int] = []  # Works done at the last two, of those that this session wrote

    def saved(self, w: int) -> None:
        super().saved(w)
        self.checkpoints = [*self.checkpoints[-1:], w]

    def settled(self, w: int) -> int:
        """The Work before which no server will ask again, seen from Work w."""
        if not self.resumable:
            return w
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
    resumable: bool = False
    evaluate_clients: bool = False
    metric: str = "accuracy"


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
        self.pipeline = live(pipeline, self)
        self.one_by_one = self.pipeline is not pipeline
        self.method, self.setup = method, setup
        self.out: dict[str, Work] = {}  # of an asynchronous schedule: Works of one client that are out
        self.ready: list[tuple[Work, Answer]] = []  # of these, what has come back and was not used yet
        self.heard = time.monotonic()
        self.fruitless = 0  # replies in a row that were refused
        self.assembled = False
        self.accepted = Accepted(terms.resumable) if pipeline.stateful else None
        self.replies: Replies | None = None  # known from the first Work on
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
        if not self.assembled:
            self._assemble()
        if self.one_by_one and work.commit:
            return self._first(work)
        places = self._ready(work)
        ids = self._send(work, places)
        answers: list[Answer] = []

        def take(id: str, content: RecordDict | Failed) -> None:
            found = self._judged(work, ids[id], content)
            if found is not None:
                answers.append(found)

        for id in self.post.gather(ids, self.terms.round_timeout, take):
            self.note("silent", int(work.clients[ids[id]]), f"no answer within {self.terms.round_timeout:g} s")
        self._check_enough(work, len(answers))
        return self._updates(work, sorted(answers, key=lambda one: one.place))

    def _assemble(self) -> None:
        """Before the first Work of a session: nodes need a while to come back to a server that was resumed."""
        self.assembled = True
        deadline = time.monotonic() + min(ASSEMBLY, self.terms.round_timeout)
        while time.monotonic() < deadline:
            there = set(self.post.connected())
            missing = [client for client, member in enumerate(self.roster.members) if member.node not in there]
            if not missing:
                return
            self.registrar.welcome_back(self.roster, missing)
            self.post.pause()
        LOG.warning("%d of %d clients are not connected", len(missing), len(self.roster.members))

    def _first(self, work: Work) -> Updates:
        """Send a Work of one client; nothing while there are still others to be sent, then whatever comes first."""
        places = [] if self.roster.members[int(work.clients[0])].node not in self.post.connected() else [0]
        self.out |= dict.fromkeys(self._send(work, places), work)
        if not places:
            self.registrar.welcome_back(self.roster, work.clients.tolist())
            self.post.pause()
        while not self.ready and (len(self.out) >= self.setup.per_round or not places):
            for id, content in self.post.look(self.out).items():
                asked = self.out.pop(id)
                found = self._judged(asked, 0, content)
                if found is not None:
                    self.ready.append((asked, found))
                self.fruitless = 0 if found is not None else self.fruitless + 1
            self._give_up_late()
            if self.ready or len(self.out) < self.setup.per_round:
                break
            self.post.pause()
        if self.ready:
            self.heard = time.monotonic()
            asked, found = self.ready.pop(0)
            answered = self._updates(asked, [found])
            which = {"work": torch.tensor([asked.w]), "start": asked.start[None]}
            return replace(answered, extra={**answered.extra, **which})
        if self.fruitless > FRUITLESS * self.setup.clients:
            raise RunError(f"the last {self.fruitless} replies were all refused; resume when that is mended")
        if self.fruitless:
            self.post.pause()
        if time.monotonic() - self.heard > 2 * self.terms.round_timeout:
            raise RunError(f"no client has answered for {2 * self.terms.round_timeout:g} s; resume when one is there")
        return self._updates(work, [])

    def _give_up_late(self) -> None:
        late = [id for id in self.out if time.monotonic() - self.post.out[id].at > self.terms.round_timeout]
        for id in late:
            client = int(self.out.pop(id).clients[0])
            self.note("silent", client, f"no answer within {self.terms.round_timeout:g} s")
        self.post.forget(late)

    def busy(self) -> set[int]:
        """The clients that are at work under an asynchronous schedule."""
        at_work = [*self.out.values(), *(work for work, _ in self.ready)]
        return {int(work.clients[0]) for work in at_work}

    def spare(self, client: int) -> int:
        """This one if it is not at work, or the next one that is not; fewer are at work than there are clients."""
        busy, many = self.busy(), self.setup.clients
        return next(c % many for c in range(client, client + many) if c % many not in busy)

    def accept(self, clients: Tensor, w: int) -> None:
        """What these clients told of Work w is used: they go on from there."""
        if self.accepted is not None and len(clients):
            self.accepted.accept(clients, w)

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

    def _send(self, work: Work, places: Sequence[int]) -> dict[str, int]:
        """One message for each place, by its id; what is the same for all is packed once, in records of each message's
        own.
        """
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
            rates = rates[: self._replies(work).steps(client, work.max_steps)]
            records: dict[str, ArrayRecord | ConfigRecord | MetricRecord] = {
                "order": self._order(one, client).record(),
                "model": ArrayRecord(dict(model)),
                "beside": ArrayRecord({**beside, **pack({"rates": rates})}),
            }
            contents.append((self.roster.members[client].node, RecordDict(records)))
        ids = self.post.send(contents, TRAIN, self.terms.round_timeout)
        for place, id in zip(places, ids, strict=True):
            if id is None:
                self.note("silent", int(work.clients[place]), "Flower did not take its message")
        return {id: place for place, id in zip(places, ids, strict=True) if id is not None}

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
            settled=0 if accepted is None else accepted.settled(one.w),
        )

    def _judged(self, work: Work, place: int, content: RecordDict | Failed) -> Answer | None:
        """A reply that fits, or a note of why it does not."""
        client = int(work.clients[place])
        if isinstance(content, Failed):
            self.note("silent" if isinstance(content, Absent) else "refused", client, content.why)
            return None
        try:
            return self._replies(work).check(work, place, content)
        except Refused as error:
            self.note("refused", client, str(error))
            return None

    def _updates(self, work: Work, answers: Sequence[Answer]) -> Updates:
        """All good replies; what they tell of is from now on what their clients go on from, unless the schedule says so
        itself.
        """
        good = [one.place for one in answers if one.tensors]
        if work.commit and not self.one_by_one:
            self.accept(work.clients[torch.tensor(good, dtype=torch.int64)], work.w)
        for one in answers:
            if one.forgot:
                client = int(work.clients[one.place])
                self.notes.setdefault("forgot", []).append(client)
                LOG.warning("client %d has lost what it remembered, and begins anew", client)
        return self._replies(work).updates(work, answers)

    def _replies(self, work: Work) -> Replies:
        if self.replies is None:
            own = work.start.dim() == 2
            buffers = {n: b[0] if own else b for n, b in work.buffers.items()}
            self.replies = Replies.of(self.pipeline, self.setup, self.roster, buffers)
        return self.replies

    def evaluate(self, round: int, flat: Tensor, buffers: Buffers) -> dict[str, float]:
        """What clients with test data of their own say of a model: means over clients."""
        if not self.terms.evaluate_clients:
            return {}
        there = set(self.post.connected())
        nodes = {m.node: client for client, m in enumerate(self.roster.members) if m.node in there}
        model = dict(pack(_model(flat, buffers)))
        contents = [(node, RecordDict({"model": ArrayRecord(dict(model))})) for node in nodes]
        asked = dict(zip(self.post.send(contents, EVALUATE, self.terms.round_timeout), nodes, strict=True))
        names = ("clients_loss", f"clients_{self.terms.metric}")
        scores: list[dict[str, float]] = []

        def take(id: str, content: RecordDict | Failed) -> None:
            try:
                scores.append(_scores(content, names))
            except Refused as error:
                LOG.warning("client %d (node %d) gives no score: %s", nodes[asked[id]], asked[id], error)

        self.post.gather([id for id in asked if id], self.terms.round_timeout, take)
        values = {name: [found[name] for found in scores if name in found] for name in names}
        return {name: sum(some) / len(some) for name, some in values.items() if some}


def _model(start: Tensor, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"start": start, **nested("buffer", buffers)}


def _scores(content: RecordDict | Failed, names: Sequence[str]) -> dict[str, float]:
    if isinstance(content, Failed):
        raise Refused(content.why)
    record = content.get("scores")
    found = read_fields(content, "scores", {n: float for n in names if record and n in record})
    if not found or not all(map(math.isfinite, found.values())):
        raise Refused("its scores are no numbers")
    return found
