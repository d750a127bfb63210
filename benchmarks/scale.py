"""From a hundred clients to a million: time per round and memory, AdaBest on a logistic model, 100 clients a round.

Each number of clients runs in a process of its own, whose memory is measured before the run and in every round of it:
the data and what PyTorch itself needs are not counted.
`python benchmarks/scale.py [clients ...]` prints a table and writes JSON into benchmarks/results/.
"""

import json
import resource
import subprocess  # nosec B404  # never with a shell
import sys
import time
from pathlib import Path

import numpy as np
import torch
from common import heading, save, show

import fedloom as fl

CLIENTS = (100, 1_000, 10_000, 100_000, 1_000_000)
SAMPLES, INPUTS, CLASSES = 10, 60, 10
ROUNDS, WARM = 120, 20


def one(clients: int) -> dict[str, float]:
    """A run in this process."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * SAMPLES, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (len(x),), generator=generator)
    data = fl.Federation.from_tensor(x, y, np.arange(0, len(x) + 1, SAMPLES))
    model = fl.model("logistic", data)
    fl.fit(model, data.only(torch.arange(100)), rounds=2, clients_per_round=100)  # what a first run loads
    began, before = time.perf_counter(), _resident()
    local = fl.Local(batch_size=SAMPLES, lr=0.01)
    ends: list[float] = []
    most = before

    def look(event: fl.Event) -> None:
        nonlocal most
        most = max(most, _resident())
        ends.append(time.perf_counter())

    fl.fit(model, data, "adabest", ROUNDS, min(100, clients), local, callbacks=[look])
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "ms per round": 1000 * (ends[-1] - ends[WARM - 1]) / (ROUNDS - WARM),
        "seconds to the first round": ends[0] - began,
        "MB beyond the data": (most - before) / 1e6,
        "MB remembered": min(clients, ROUNDS * 100) * parameters * 4 / 1e6,
    }


def _resident() -> float:
    """Bytes of memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * float(resource.getpagesize())


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        sys.stdout.write(json.dumps(one(int(sys.argv[2]))))
        return
    results = {}
    heading(["clients", "ms per round", "s to the first round", "MB beyond the data", "MB of that remembered, at most"])
    for clients in [int(text) for text in sys.argv[1:]] or CLIENTS:
        command = [sys.executable, str(Path(__file__)), "--one", str(clients)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)  # nosec B603  # this file, and a number
        results[clients] = found = json.loads(done.stdout)
        show([f"{clients:,}", *(f"{value:.2f}" for value in found.values())])
    save("scale", torch.device("cuda" if torch.cuda.is_available() else "cpu"), results)


if __name__ == "__main__":
    main()
