"""Sends an array to every node, again and again, and prints one JSON line per reply."""

import json
import os
import sys
import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    say(event="start", pid=os.getpid(), cwd=os.getcwd(), python=sys.executable, config=dict(config))
    while len(nodes := sorted(grid.get_node_ids())) < int(config["nodes"]):
        time.sleep(0.1)
    for number in range(1, int(config["rounds"]) + 1):
        began = time.perf_counter()
        messages = [
            Message(content(number, int(config["numbers"])), node, "train", group_id=str(number))
            for node in nodes
            for _ in range(int(config["messages"]))
        ]
        exchange(grid, messages, float(config["timeout"]))
        say(event="round", round=number, seconds=round(time.perf_counter() - began, 3))


def content(number: int, numbers: int) -> RecordDict:
    arrays = ArrayRecord({"x": Array(np.full(numbers, number, dtype=np.float32))})
    return RecordDict({"arrays": arrays, "config": ConfigRecord({"sent": time.time()})})


def exchange(grid: Grid, messages: list[Message], timeout: float) -> None:
    began = time.perf_counter()
    waiting = set(grid.push_messages(messages))
    say(event="sent", messages=len(waiting), seconds=round(time.perf_counter() - began, 3))
    while waiting and time.perf_counter() - began < timeout:
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            seconds = round(time.perf_counter() - began, 3)
            if reply.has_error():
                say(event="error", code=reply.error.code, reason=reply.error.reason, seconds=seconds)
            else:
                array = reply.content.array_records["arrays"]["x"].numpy()
                seen = dict(reply.content.config_records["seen"])
                say(event="reply", node=reply.metadata.src_node_id, first=float(array[0]), seconds=seconds, **seen)
        time.sleep(0.1)
    if waiting:
        say(event="missing", messages=len(waiting))


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201 - what a ServerApp prints is the run's log
