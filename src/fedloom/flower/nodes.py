"""The clients of a federation as Flower's nodes: all that are asked at once are trained as one cohort.

They keep the contract of Flower's built-in strategies: a message holds the model's arrays and a config with
`server-round` (and `proximal-mu`, FedProx's pull, or `lr`, another local learning rate), a reply arrays and metrics.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedloom.errors import FedloomError
from fedloom.flower.arrays import Layout
from fedloom.flower.private import failure
from fedloom.round import Traffic
from fedloom.simulation import Simulation
from fedloom.space import Buffers
from fedloom.stages import Updates, Work


@dataclass(frozen=True)
class Request:
    """What one message asks of one client."""

    message: Message
    client: int
    name: str  # of the record with the arrays
    arrays: ArrayRecord
    round: int = 0
    lr: float = 0.0
    mu: float = 0.0


@dataclass
class Nodes:
    """Every client of a simulation, answering messages; `traffic` adds up what was trained until somebody clears it."""

    simulation: Simulation
    first: int  # node id of client 0
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.simulation.task.model, self.simulation.setup.space)

    def answer(self, messages: Sequence[Message]) -> list[Message]:
        """One reply per message, in order. What is wrong with a message is told in its reply, as a node would."""
        replies: dict[int, Message] = {}
        cohorts: dict[int, dict[int, Request]] = defaultdict(dict)  # by round, then by place among the messages
        models = _Models(self.layout)
        with self.simulation.numerics():
            for place, message in enumerate(messages):
                kind = message.metadata.message_type
                try:
                    if kind == "train":
                        request = self._request(message)
                        models.of(request.arrays)  # arrays that don't fit are this message's fault alone
                        cohorts[request.round][place] = request
                    elif kind == "evaluate":
                        replies[place] = self._evaluate(message, models)
                    elif kind == "query":
                        replies[place] = _reply(message, {"num-examples": self._samples(self._client(message))})
                    else:
                        raise ValueError(f"these nodes answer train, evaluate and query, not {kind!r}")
                except FedloomError:
                    raise  # a loss or a metric that fails is the caller's
                except Exception as error:
                    replies[place] = failure(message, error)
                    self.traffic = replace(self.traffic, asked=self.traffic.asked + (kind == "train"))
            for round, requests in cohorts.items():
                trained = self._train(round, list(requests.values()), models)
                replies |= dict(zip(requests, trained, strict=True))
        return [replies[place] for place in range(len(messages))]

    def _train(self, round: int, requests: Sequence[Request], models: "_Models") -> list[Message]:
        work = self._work(round, requests, models)
        updates = self.simulation.train(work)
        self.traffic = self.traffic.plus(work, updates)
        ends = work.start - updates.rows.matrix  # [K, P]
        return [self._trained(request, ends[k], updates, k) for k, request in enumerate(requests)]

    def _trained(self, request: Request, end: Tensor, updates: Updates, k: int) -> Message:
        buffers = {name: values[k] for name, values in updates.buffers.items()}
        arrays = self.layout.write(end, buffers, request.arrays)
        metrics = {"num-examples": int(updates.samples[k]), "train_loss": float(updates.loss[k])}
        return _reply(request.message, metrics, {request.name: arrays})

    def _work(self, round: int, requests: Sequence[Request], models: "_Models") -> Work:
        """One cohort, drawn from as Work number round - 1 of a simulation; whoever is asked twice draws anew."""
        clients, occurrence = [request.client for request in requests], []
        seen: Counter[int] = Counter()
        for client in clients:
            occurrence.append(seen[client])
            seen[client] += 1
        start, buffers = models.joined([request.arrays for request in requests])
        local = self.simulation.setup.local
        steps = max(local.count_steps(self._samples(client)) for client in clients)
        rates = torch.tensor([request.lr for request in requests], dtype=torch.float64)
        pull = torch.tensor([request.mu for request in requests], dtype=torch.float64)
        return Work(
            w=round - 1,
            clients=torch.tensor(clients),
            occurrence=torch.tensor(occurrence),
            counts=torch.ones(len(clients), dtype=torch.int64),
            start=start,
            buffers=buffers,
            rates=rates[:1].expand(steps) if bool((rates == rates[0]).all()) else rates[:, None].expand(-1, steps),
            pull=pull if bool(pull.any()) else None,
        )

    def _evaluate(self, message: Message, models: "_Models") -> Message:
        """The model's loss and score on this client's own data."""
        client = self._client(message)
        _, arrays = _the_arrays(message)
        flat, buffers = models.of(arrays)
        own = replace(self.simulation.federation.held_out(torch.tensor([client])), offsets=None)
        found = self.simulation.evaluator.measure(flat, dict(buffers), own, "eval")
        return _reply(message, {"num-examples": self._samples(client), **found})

    def _request(self, message: Message) -> Request:
        name, arrays = _the_arrays(message)
        configs = [record for record in message.content.values() if isinstance(record, ConfigRecord)]
        if len(configs) != 1:
            raise ValueError(f"a message to train needs one ConfigRecord with server-round, not {len(configs)}")
        (config,) = configs
        round, lr, mu = (
            config.get(key, default)
            for key, default in (("server-round", 0), ("lr", self.simulation.setup.local.lr), ("proximal-mu", 0.0))
        )
        if isinstance(round, bool) or not isinstance(round, int) or round < 1:
            raise ValueError(f"server-round must be a whole number of at least 1, not {round!r}")
        for key, value in (("lr", lr), ("proximal-mu", mu)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"{key} must be a finite number of at least 0, not {value!r}")
        return Request(message, self._client(message), name, arrays, round, lr, mu)  # type: ignore[arg-type]

    def _client(self, message: Message) -> int:
        return message.metadata.dst_node_id - self.first

    def _samples(self, client: int) -> int:
        return int(self.simulation.setup.sizes[client])


class _Models:
    """The models of a batch of messages; one that stands in all of them is read once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.read: dict[tuple[int, ...], tuple[Tensor, Buffers]] = {}

    def of(self, arrays: ArrayRecord) -> tuple[Tensor, Buffers]:
        """A vector [P] and buffers. Copies of an array share their bytes, so the same bytes are the same model."""
        key = self._key(arrays)
        if key not in self.read:
            self.read[key] = self.layout.read(arrays)
        return self.read[key]

    def joined(self, several: Sequence[ArrayRecord]) -> tuple[Tensor, Buffers]:
        """The start of a cohort: one for all, or [K, P] with stacked buffers where they differ."""
        if len({self._key(arrays) for arrays in several}) == 1:
            return self.of(several[0])
        found = [self.of(arrays) for arrays in several]
        buffers = {name: torch.stack([own[name] for _, own in found]) for name in found[0][1]}
        return torch.stack([flat for flat, _ in found]), buffers

    def _key(self, arrays: ArrayRecord) -> tuple[int, ...]:
        return tuple(id(array.data) for array in arrays.values())


def _the_arrays(message: Message) -> tuple[str, ArrayRecord]:
    """The one record with arrays, whatever a strategy calls it."""
    found = [(name, record) for name, record in message.content.items() if isinstance(record, ArrayRecord)]
    if len(found) != 1:
        raise ValueError(f"a message needs one ArrayRecord with the model, not {len(found)}")
    return found[0]


def _reply(message: Message, metrics: dict[str, int | float], arrays: dict[str, ArrayRecord] | None = None) -> Message:
    return Message(RecordDict({**(arrays or {}), "metrics": MetricRecord(metrics)}), reply_to=message)  # type: ignore[arg-type]
