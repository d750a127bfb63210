"""A client; its node's environment may make it wait (WAIT, seconds) or hostile in some Works (HARMS="1:nan 2:size")."""

import os
import sys
import time
from collections.abc import Callable

import numpy as np
from flwr.app import Array, Context, Message

from fedloom.flower import client_app
from hospital.task import model, read

HARMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nan": lambda row: np.where(np.arange(len(row)) == 7, np.nan, row).astype(row.dtype),
    "shape": lambda row: row[:-1],
    "size": lambda row: np.tile(row, 10),
}


def harm(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    if not message.metadata.message_type.startswith("train"):
        return call_next(message, context)
    work = str(message.content.config_records["order"]["work"])
    sys.stdout.write(f"training for Work {work}\n")
    sys.stdout.flush()
    time.sleep(float(os.environ.get("WAIT", "0")))
    reply = call_next(message, context)
    chosen = dict(one.split(":") for one in os.environ.get("HARMS", "").split())
    if work in chosen:
        update = reply.content.array_records["update"]
        update["row"] = Array(HARMS[chosen[work]](update["row"].numpy()))
    return reply


app = client_app(lambda context: model(), lambda context: read(str(context.node_config["data"])), mods=[harm])
