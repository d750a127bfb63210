"""Doubles the array that it is sent and tells where and when it ran."""

import json
import os
import sys
import time

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    began = time.time()
    print("train in run", message.metadata.run_id, flush=True)  # noqa: T201 - into the log of the node
    sent = message.content.config_records["config"]["sent"]
    assert isinstance(sent, float)
    array = message.content.array_records["arrays"]["x"].numpy()
    time.sleep(float(context.run_config["seconds"]))
    count = context.state.metric_records.setdefault("count", MetricRecord({"messages": 0}))
    count["messages"] = int(count["messages"]) + 1  # type: ignore[arg-type]
    seen = ConfigRecord(
        {
            "pid": os.getpid(),
            "cwd": os.getcwd(),
            "python": sys.executable,
            "module": __file__,
            "own": os.environ.get("NODE_OWN", ""),
            "config": json.dumps(dict(context.node_config)),
            "count": int(count["messages"]),  # type: ignore[arg-type]
            "after": round(began - sent, 3),
            "began": began,
            "ended": time.time(),
        }
    )
    arrays = ArrayRecord({"x": Array(2 * array)})
    return Message(RecordDict({"arrays": arrays, "seen": seen}), reply_to=message)
