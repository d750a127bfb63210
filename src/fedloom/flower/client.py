"""A client of a real federation: a Flower ClientApp that trains with the simulator's own client step."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedloom.engines.choose import Wishes
from fedloom.engines.site import Learning, Site
from fedloom.errors import ConfigError, DataError, FedloomError, RunError
from fedloom.evaluate import Evaluator, Score, find_metric
from fedloom.federation import Federation
from fedloom.flower.diary import Diary
from fedloom.flower.wire import (
    ACTION,
    PROTOCOL,
    PULL,
    TOLD,
    Kind,
    Order,
    Refused,
    anything,
    model_digest,
    nested,
    pack,
    plain_record,
    read_fields,
    read_local,
    read_names,
    under,
    unpack,
)
from fedloom.local import Local
from fedloom.method import Method, Pipeline
from fedloom.rows import Rows
from fedloom.simulation import find_device
from fedloom.space import Space, buffers_of
from fedloom.stages import Setup, Updates, Work
from fedloom.task import Loss, Precision, Task, check_fit

LOG = logging.getLogger("fedloom")
Data = Federation | tuple[Any, Any]
MEMORY = Path("~/.fedloom/memory")
LARGEST_BATCH = 1_000_000  # samples: a batch that is filled by drawing takes memory for all of them
REPORTED = ("mean_gradient", "final_score", "step_norm")  # what engines can report beside an update
Answer = Callable[[Message, Context], RecordDict]


def client_app(
    model: nn.Module | Callable[[Context], nn.Module],
    data: Data | Callable[[Context], Data],
    local: Local | None = None,
    *,
    loss: str | Loss | None = None,
    metric: str | Score = "accuracy",
    device: str = "auto",
    precision: Precision = "auto",
    memory: str | Path | None = None,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """A Flower ClientApp for one client.

    `model` and `data` are made anew for every message, by functions of Flower's Context: the model must have the
    server's names and shapes, the data are a pair (x, y) or a federation of one client, whose `test` it is evaluated
    on. With `local` the client trains by these settings only, and refuses a server that wants others.

    What it must remember from round to round (AdaBest, SCAFFOLD and the like) is kept in the folder `memory`; left
    out, that is `memory` of the node's config, or ~/.fedloom/memory.
    """
    if local is not None and not isinstance(local, Local):
        raise ConfigError(f"local must be a fl.Local, not {type(local).__name__}")
    client = _Client(model, data, local, loss, metric, device, precision, memory)
    app = ClientApp(mods=list(mods))
    app.query(ACTION)(_answering(client.introduce))
    app.train(ACTION)(_answering(client.train))
    app.evaluate(ACTION)(_answering(client.evaluate))
    return app


def _answering(answer: Answer) -> Callable[[Message, Context], Message]:
    """What can't be done is told to the server in one sentence. Of other faults it hears the kind only: Flower would
    send their whole text, which may name files of this machine or repeat a line of its data.
    """

    @wraps(answer)
    def reply(message: Message, context: Context) -> Message:
        try:
            return Message(answer(message, context), reply_to=message)
        except RunError as error:  # of files and disks
            LOG.warning("refused: %s", error)
            why = "what it needs can't be read or written there; its own log says more"
        except FedloomError as error:
            LOG.warning("refused: %s", error)
            why = str(error)
        except Exception as error:
            LOG.warning("failed", exc_info=error)
            why = f"it failed ({type(error).__name__}); its own log says more"
        return Message(RecordDict({"refusal": plain_record({"why": why[:TOLD]})}), reply_to=message)

    return reply


@dataclass(frozen=True)
class _Client:
    model: nn.Module | Callable[[Context], nn.Module]
    data: Data | Callable[[Context], Data]
    local: Local | None
    loss: str | Loss | None
    metric: str | Score
    device: str
    precision: Precision
    memory: str | Path | None

    def introduce(self, message: Message, context: Context) -> RecordDict:
        """Who is there: how many samples, for which model."""
        asked = read_fields(message.content, "question", {"protocol": int, "local": str})
        if asked["protocol"] != PROTOCOL:
            raise Refused(f"the client speaks protocol {PROTOCOL}; install the same release of Fedloom")
        model, federation = self._made(context)
        self._settings(asked["local"], model, federation)
        partition = context.node_config.get("partition-id", -1)
        known = {
            "protocol": PROTOCOL,
            "samples": len(federation.x),
            "partition": partition if type(partition) is int else -1,
            "digest": model_digest(model),
        }
        return RecordDict({"introduction": plain_record(known)})

    def train(self, message: Message, context: Context) -> RecordDict:
        """Train as ordered, and remember it before anybody hears of it."""
        order = Order.read(message.content)
        model, federation = self._made(context)
        local = self._settings(order.local, model, federation)
        pipeline = _pipeline(order.method)
        space = Space.of(model)
        arrays = _read_work(message.content, space, model)
        federation = _numbered(federation, order.client)
        setup = Setup(
            space=space,
            clients=order.clients,
            sizes=federation.sizes,
            per_round=1,
            local=local,
            seed=order.seed,
            device=torch.device("cpu"),
            start=arrays["start"],
        )
        learning = Learning(model, self.loss, self.precision, pipeline.clients, Wishes("loop"))
        site = Site(learning, find_device(self.device), setup, federation)
        work = _work(order, arrays, pipeline, site, len(federation.x))
        memory = site.population.kept
        with ExitStack() as opened:
            knew = True
            if memory:
                diary = opened.enter_context(Diary.open(self._folder(context), order.run, order.client))
                knew = diary.recall(order, memory)
            updates = site.train(work, _pull(message.content))
            if memory and order.commit:
                diary.write(order, memory)
        return _reply(order, updates, pipeline, forgot=not knew)

    def evaluate(self, message: Message, context: Context) -> RecordDict:
        """Score a model on data that the client keeps for that."""
        model, federation = self._made(context)
        if federation.test is None:
            raise Refused("this client has no test data")
        task = Task.of(model, self.loss, find_device(self.device), self.precision)
        arrays = _read_model(message.content.get("model"), task.space, model)
        moved = federation.to(find_device(self.device), task.space.dtype)
        evaluator = Evaluator(task, moved.preparation, *find_metric(self.metric))
        assert moved.test is not None  # nosec B101  # for the type checker
        place = {n: t.to(find_device(self.device)) for n, t in arrays.items()}
        found = evaluator.measure(place["start"], under("buffer", place), moved.test, "clients")
        return RecordDict({"scores": plain_record({name: float(value) for name, value in found.items()})})

    def _made(self, context: Context) -> tuple[nn.Module, Federation]:
        model = self.model if isinstance(self.model, nn.Module) else _called("model", self.model, context)
        given = _called("data", self.data, context) if callable(self.data) else self.data
        federation = given if isinstance(given, Federation) else Federation.from_arrays([given])
        if len(federation) != 1:
            raise DataError(f"a client has its own data only, but these are of {len(federation)} clients")
        return model, _numbered(federation, 0)

    def _settings(self, asked: str, model: nn.Module, federation: Federation) -> Local:
        """How to train, unless the client was told otherwise, or its data do not go with it."""
        local = read_local(asked)
        if self.local is not None and local != self.local:
            names = [name for name in Local.names() if getattr(local, name) != getattr(self.local, name)]
            raise Refused(
                "this client trains by its own settings only: "
                + ", ".join(f"{n} is {getattr(self.local, n)}, not {getattr(local, n)}" for n in names)
            )
        if local.batch_size is not None and local.batch_size > LARGEST_BATCH:
            raise Refused(f"the server asks for batches of {local.batch_size:,} samples")
        task = Task.of(model, self.loss, torch.device("cpu"), self.precision)
        check_fit(task, federation.to(torch.device("cpu"), task.space.dtype), local)
        return local

    def _folder(self, context: Context) -> Path:
        return Path(self.memory or str(context.node_config.get("memory", MEMORY))).expanduser()


def _called(what: str, made: Callable[[Context], Any], context: Context) -> Any:
    """The owner's function; what it says when it fails is for the owner."""
    try:
        return made(context)
    except Exception as error:
        LOG.warning("the client's %s can't be made", what, exc_info=error)
        raise Refused(f"its {what} can't be made ({type(error).__name__}); its own log says more") from None


def _pull(content: RecordDict) -> float:
    """FedProx's mu, where a mod of this client asks for it."""
    return 0.0 if PULL not in content else float(read_fields(content, PULL, {"proximal-mu": float})["proximal-mu"])


def _pipeline(method: str) -> Pipeline:
    try:
        return Method(method).pipeline()
    except FedloomError as error:
        raise Refused(f"this client does not know the server's method: {error}") from None


def _numbered(federation: Federation, client: int) -> Federation:
    """A client's own samples, under its number in the federation."""
    here = federation.holding(torch.tensor([0]))
    mine = torch.from_numpy(here.positions([len(here) - 1])[0])
    offsets = torch.zeros(client + 2, dtype=torch.int64)
    offsets[-1] = len(mine)
    own = {"index": torch.arange(len(mine)), "offsets": offsets, "held": None, "names": None, "report": None}
    return replace(here, x=here.x[mine], y=here.y[mine], **own)  # type: ignore[arg-type]


def _read_model(record: Any, space: Space, model: nn.Module) -> dict[str, Tensor]:
    buffers = {f"buffer/{n}": Kind.of(b) for n, b in buffers_of(model).items()}
    return unpack(record, {"start": Kind((space.size,), space.dtype), **buffers}, "the model")


def _read_work(content: RecordDict, space: Space, model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a Work: the model, and what the stages send beside it."""
    found = _read_model(content.get("model"), space, model)
    beside = anything(content.get("beside"), 64 * (space.size + 1_000_000), "what the server sends beside the model")
    if "rates" not in beside or beside["rates"].dim() != 1 or beside["rates"].dtype != torch.float64:
        raise Refused("the server sends no learning rates")
    return {**found, **beside}


def _work(order: Order, arrays: dict[str, Tensor], pipeline: Pipeline, site: Site, samples: int) -> Work:
    device = site.setup.device
    steps = site.setup.local.count_steps(samples)
    limit = None if order.max_steps < 0 else order.max_steps
    if len(arrays["rates"]) < (steps if limit is None else min(steps, limit)):
        raise Refused(f"the server sends {len(arrays['rates'])} learning rates for {steps} steps")
    sent = {part.key: under(f"sent/{part.key}", arrays) for part in pipeline.clients}
    return Work(
        w=order.work,
        clients=torch.tensor([order.client]),
        occurrence=torch.tensor([order.occurrence]),
        counts=torch.tensor([order.count]),
        start=arrays["start"].to(device),
        buffers={n: b.to(device) for n, b in under("buffer", arrays).items()},
        rates=arrays["rates"],
        max_steps=limit,
        sent={key: {n: v.to(device) if v.dim() else v for n, v in values.items()} for key, values in sent.items()},
        wants=read_names(order.wants, REPORTED),
        commit=order.commit,
    )


def carried(pipeline: Pipeline) -> frozenset[str]:
    """What engines report that the server must know; the rest ends with the clients' stages."""
    return frozenset().union(*(part.stage.wants for part in pipeline.parts if part.stage.kind != "client"))


def _reply(order: Order, updates: Updates, pipeline: Pipeline, forgot: bool) -> RecordDict:
    finite = bool(updates.finite[0])
    told = {
        "run": order.run,
        "work": order.work,
        "client": order.client,
        "occurrence": order.occurrence,
        "samples": int(updates.samples[0]),
        "steps": int(updates.steps[0]),
        "loss": float(updates.loss[0]),
        "finite": finite,
        "forgot": forgot,
    }
    return RecordDict(
        {"reply": plain_record(told), "update": pack(update_of(updates, pipeline)) if finite else _none()}
    )


def _none() -> ArrayRecord:
    return ArrayRecord({})


def update_of(updates: Updates, pipeline: Pipeline) -> dict[str, Tensor]:
    """All tensors that one client sends up."""
    found = {"row": updates.rows.matrix[0], **nested("buffer", {n: b[0] for n, b in updates.buffers.items()})}
    for key, sent in updates.sent.items():
        found |= nested(f"up/{key}", {n: (v.matrix if isinstance(v, Rows) else v)[0] for n, v in sent.items()})
    wanted = carried(pipeline)
    return found | nested("extra", {n: v[0] for n, v in updates.extra.items() if n in wanted})
