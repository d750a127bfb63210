"""How long a local step of char-lstm takes, by the number of clients: losses and gradients of all of them, on windows
of 80 characters drawn by chance; on a GPU recorded and played again, as in a run.

`python benchmarks/recurrent.py [clients ...] [--batch 256] [--precision bf16]` prints a table and writes JSON into
benchmarks/results/.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from common import heading, save, seconds, show

import fedloom as fl
from fedloom.engines.vector import Vector
from fedloom.training import Training

CHARACTERS, WINDOW, REPEATS = 65, 80, 5


def training(batch: int, precision: str) -> Training:
    """A run that holds the engine; it is not played."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, CHARACTERS, (16 * batch, WINDOW), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, CHARACTERS, (16 * batch,), generator=generator)
    data = fl.Federation.from_tensor(x, y, [0, 8 * batch, 16 * batch], classes=CHARACTERS)
    local = fl.Local(batch_size=batch, lr=0.5)
    return Training(
        fl.model("char-lstm", data), data, "fedavg", rounds=1, local=local, engine="vector", precision=precision
    )


def step(run: Training, clients: int, batch: int) -> Callable[[], object]:
    engine = run.simulation.engine
    assert isinstance(engine, Vector)  # nosec B101  # for the type checker
    engine.task.model.train()
    rows, device = run.state.theta.repeat(clients, 1), run.state.theta.device
    samples = torch.randint(0, 16 * batch, (clients, batch), device=device)
    lengths = torch.full((clients,), batch, device=device)

    def once() -> None:
        engine.gradients(rows, {}, samples, lengths, None, 0)

    once()
    if device.type != "cuda":
        return once
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        once()

    def again(held: object = once) -> None:  # what was recorded reads memory that `once` holds
        recording.replay()

    return again


def main() -> None:
    parser = argparse.ArgumentParser(description="A local step of char-lstm, by the number of clients.")
    parser.add_argument("clients", nargs="*", type=int, default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--precision", default="auto", help="auto, fp32 or bf16")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # on a CPU a thread would take a share of the clients
    run = training(asked.batch, asked.precision)
    device = run.state.theta.device
    found = {}
    heading(["clients", "ms", "ms a client"])
    with run.simulation.numerics():
        for clients in asked.clients:
            play = step(run, clients, asked.batch)
            play()
            spent = 1000 * statistics.median(seconds(play, device) for _ in range(REPEATS))
            found[clients] = spent
            show([clients, f"{spent:.2f}", f"{spent / clients:.3f}"])
            del play  # and its memory, before the next is recorded
            if device.type == "cuda":
                torch.cuda.empty_cache()
    save("recurrent", device, {"batch": asked.batch, "precision": asked.precision, "ms": found})


if __name__ == "__main__":
    main()
