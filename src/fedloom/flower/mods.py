"""Two remedies as Flower's mods: for `client_app`, and for every ClientApp that follows the contract of Flower's
strategies.

>>> from flwr.clientapp import ClientApp
>>> app = ClientApp(mods=[proximal_mod(0.1), clip_mod(1.0)])
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import fedloom.flower.private  # noqa: F401  # a missing Flower is told before it is looked for
from fedloom.errors import ConfigError
from fedloom.flower.wire import PULL, TRAIN

# isort: split
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message

Call = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Call], Message]


def proximal_mod(mu: float) -> Mod:
    """Ask the app for FedProx's pull: `proximal-mu` in the config of messages to train, whatever the server says.

    An app that does not read `proximal-mu` trains as before.
    """
    if not _is_number(mu) or not 0 <= mu < math.inf:
        raise ConfigError(f"proximal_mod: mu must be a finite number of at least 0, not {mu!r}")

    def pull(message: Message, context: Context, call_next: Call) -> Message:
        if message.metadata.message_type == TRAIN:
            message.content[PULL] = ConfigRecord({"proximal-mu": float(mu)})
        elif _trains(message):
            for config in _configs(message):
                config["proximal-mu"] = float(mu)
        return call_next(message, context)

    return pull


def clip_mod(norm: float) -> Mod:
    """Shorten the update, reply minus received, to at most this norm over all floating-point arrays; others are left
    as they are, and so is a reply that is not finite, which is the server's to refuse. What a client of Fedloom
    remembers is its own, unclipped update; a method whose clients send more than an update (SCAFFOLD) fails.
    """
    if not _is_number(norm) or not 0 < norm < math.inf:
        raise ConfigError(f"clip_mod: norm must be a finite number above 0, not {norm!r}")

    def clip(message: Message, context: Context, call_next: Call) -> Message:
        if message.metadata.message_type == TRAIN:
            return _clip_update(call_next(message, context), norm)
        if not _trains(message):
            return call_next(message, context)
        before = _floats(_only(message, "received"))  # an app may change what it got
        reply = call_next(message, context)
        if reply.has_content():
            arrays = _only(reply, "replied")
            arrays.update(_clipped(before, _floats(arrays), norm))
        return reply

    return clip


def _clip_update(reply: Message, norm: float) -> Message:
    """A client of Fedloom sends the update itself."""
    update = reply.content.array_records.get("update", ArrayRecord({}))
    more = [name for name, array in update.items() if name.startswith("up/") and array.shape]
    if more:
        raise ValueError(f"clip_mod can't bound what the method sends beside its update: {more[0]}")
    if "row" in update:
        row = update["row"].numpy()
        update.update(_clipped({"row": np.zeros_like(row)}, {"row": row}, norm))
    return reply


def _clipped(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], norm: float) -> dict[str, Array]:
    """The arrays that change, in float64 until the end; none where the update is short enough, or not finite."""
    if before.keys() != after.keys() or any(before[n].shape != after[n].shape for n in after):
        raise ValueError("clip_mod needs a reply with the arrays that were received, of the same names and shapes")
    updates = {name: after[name].astype(np.float64) - before[name] for name in after}
    length = math.sqrt(sum(float(np.square(update).sum()) for update in updates.values()))
    if not math.isfinite(length) or length <= norm:
        return {}
    return {
        name: Array(np.asarray(before[name] + update * (norm / length)).astype(after[name].dtype))
        for name, update in updates.items()
    }


def _floats(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in arrays.items() if np.issubdtype(np.dtype(array.dtype), np.floating)}


def _only(message: Message, which: str) -> ArrayRecord:
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ValueError(f"clip_mod needs one ArrayRecord in what is {which}, not {len(records)}")
    return records[0]


def _configs(message: Message) -> list[ConfigRecord]:
    """The config of a message; one that has none gets it."""
    if not message.content.config_records:
        message.content["config"] = ConfigRecord()
    return list(message.content.config_records.values())


def _trains(message: Message) -> bool:
    """Also by an action of its own, `train.name`."""
    return message.metadata.message_type.partition(".")[0] == "train"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
