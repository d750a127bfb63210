"""Flower's grid in one process: what a strategy or a server app sends is answered at once, without a wire.

>>> from flwr.app import Message, RecordDict
>>> from flwr.clientapp import ClientApp
>>> app = ClientApp()
>>> @app.query()
... def echo(message, context):
...     return Message(message.content, reply_to=message)
>>> grid = LocalGrid.of_app(app, nodes=3)
>>> len(grid.send_and_receive([Message(RecordDict(), node, "query") for node in grid.get_node_ids()]))
3
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self
from uuid import uuid4

import torch
from torch import nn

from fedloom.engines.choose import Wishes
from fedloom.errors import ConfigError
from fedloom.evaluate import Score
from fedloom.federation import Federation
from fedloom.flower.private import Run, as_sent, failure, identify, join_run, mark
from fedloom.local import Local
from fedloom.method import Method
from fedloom.simulation import Simulation
from fedloom.task import Loss, Precision

# isort: split
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedloom.flower.nodes import Nodes

Answer = Callable[[Sequence[Message]], Sequence[Message]]  # one reply per message, in order
FIRST_NODE = 1_000_000  # a node's id is never its number among the partitions, as in a deployment, where ids are random
LOG = logging.getLogger("fedloom")


class LocalGrid(Grid):
    """Nodes in this process. Every message and every reply is copied on its way, as a wire would do it."""

    def __init__(self, nodes: int, answer: Answer) -> None:
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
            raise ConfigError(f"nodes must be a count of at least 1, not {nodes!r}")
        self._nodes = range(FIRST_NODE, FIRST_NODE + nodes)
        self._answer = answer
        self._replies: dict[str, Message] = {}  # by the id of the message, until they are pulled
        self._run = identify()

    @classmethod
    def of_app(
        cls,
        app: ClientApp,
        nodes: int,
        node_config: Callable[[int], Mapping[str, bool | float | int | str]] | None = None,
        run_config: Mapping[str, bool | float | int | str] | None = None,
    ) -> Self:
        """Each node runs this app. Node k is partition k; `node_config(k)` adds to what its context tells."""
        states: dict[tuple[int, int], RecordDict] = {}  # by run and node

        def run_app(message: Message) -> Message:
            run, node = message.metadata.run_id, message.metadata.dst_node_id
            number = node - FIRST_NODE
            config: UserConfig = {"partition-id": number, "num-partitions": nodes}
            config |= node_config(number) if node_config is not None else {}
            state = copied(states.get((run, node), RecordDict()))
            context = Context(run, node, config, state, dict(run_config or {}))
            try:
                return _checked(app(message, context), message)
            except Exception as error:  # whatever an app raises, its node answers
                LOG.warning("node %d (partition %d): the ClientApp failed", node, number, exc_info=error)
                return failure(message, error)
            finally:  # a node keeps what its app remembered, also where it failed
                states[run, node] = copied(context.state)

        return cls(nodes, lambda messages: [run_app(message) for message in messages])

    @classmethod
    def of_federation(
        cls,
        model: nn.Module,
        federation: Federation,
        local: Local | None = None,
        *,
        loss: str | Loss | None = None,
        metric: str | Score = "accuracy",
        seed: int = 0,
        engine: str = "auto",
        device: str | torch.device = "auto",
        precision: Precision = "auto",
        rounds: int = 1,
        clients_per_round: int | float = 1.0,
    ) -> Self:
        """Client k of a federation is node k, and follows the contract of Flower's built-in strategies (see
        `fedloom.flower.nodes`). Batches are those that `fl.fit` draws with the same seed. The engine is chosen for so
        many rounds of so many clients.

        >>> import fedloom as fl
        >>> from flwr.app import ArrayRecord
        >>> from flwr.serverapp.strategy import FedAvg
        >>> federation = fl.load("digits", partition="classes(per_client=2)", clients=5)
        >>> model = fl.model("mlp", federation)
        >>> grid = LocalGrid.of_federation(model, federation, fl.Local(lr=0.1))
        >>> trained = FedAvg().start(grid, ArrayRecord(model.state_dict()), num_rounds=1).arrays
        """
        return cls.of_nodes(
            nodes_of(
                model,
                federation,
                local,
                engine=engine,
                rounds=rounds,
                clients_per_round=clients_per_round,
                loss=loss,
                metric=metric,
                device=device,
                precision=precision,
                seed=seed,
            )
        )

    @classmethod
    def of_nodes(cls, nodes: Nodes) -> Self:
        """Nodes that somebody else keeps an eye on."""
        return cls(nodes.simulation.setup.clients, nodes.answer)

    def set_run(self, run: Run) -> None:
        self._run = run
        join_run(run)

    @property
    def run(self) -> Run:
        return Run(**vars(self._run))

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send; everything is answered when this returns."""
        sent = list(messages)
        for message in sent:
            if message.metadata.dst_node_id not in self._nodes:
                raise ConfigError(
                    f"a message goes to node {message.metadata.dst_node_id}, but the nodes are "
                    f"{self._nodes[0]} to {self._nodes[-1]}; take ids from get_node_ids()"
                )
            mark(message, str(uuid4()))
        arrived = [as_sent(message, copied(message.content)) for message in sent]
        ids = [message.metadata.message_id for message in arrived]
        for message_id, reply in zip(ids, self._answer(arrived), strict=True):
            answered = as_sent(reply, copied(reply.content) if reply.has_content() else None)
            mark(answered, str(uuid4()))
            self._replies[message_id] = answered
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to these messages, each of them once."""
        ids = dict.fromkeys(message_ids)
        return [self._replies.pop(message_id) for message_id in ids if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send and collect, in the order of sending; nothing is waited for."""
        return self.pull_messages(self.push_messages(messages))


def nodes_of(model: nn.Module, federation: Federation, local: Local | None, *, engine: str, **settings: Any) -> Nodes:
    """The clients of a federation, ready to train; whatever does not fit is refused here."""
    if not isinstance(federation, Federation):
        raise ConfigError(f"federation must be a fl.Federation, not {type(federation).__name__}")
    wishes = Wishes(engine)
    if wishes.on_ray:
        raise ConfigError(f"engine={engine} is for fl.fit; nodes in this process are trained by auto, loop or vector")
    simulation = Simulation.of(model, federation, Method("fedavg"), wishes=wishes, local=local or Local(), **settings)
    return Nodes(simulation, FIRST_NODE)


def _checked(reply: object, message: Message) -> Message:
    if not isinstance(reply, Message):
        raise TypeError(f"the ClientApp returned {type(reply).__name__}, not a Message")
    if reply.metadata.reply_to_message_id != message.metadata.message_id:
        raise ValueError("the ClientApp returned a Message that is no reply: Message(content, reply_to=message)")
    return reply


def copied(content: RecordDict) -> RecordDict:
    """Records that share nothing that can be changed with those given (the bytes of an Array can't be)."""
    return RecordDict({name: _copied_record(record) for name, record in content.items()})


def _copied_record(record: ArrayRecord | ConfigRecord | MetricRecord) -> ArrayRecord | ConfigRecord | MetricRecord:
    if isinstance(record, ArrayRecord):
        return ArrayRecord(dict(record.items()))  # builds each Array anew
    values = {key: list(value) if isinstance(value, list) else value for key, value in record.items()}
    return ConfigRecord(values) if isinstance(record, ConfigRecord) else MetricRecord(values)  # type: ignore[arg-type]
