"""What a round costs: sample gradients per second through `fl.fit`, beside a plain PyTorch loop.

    python benchmarks/round_cost.py [--device cuda] [--rounds 20]

Prints a table and writes benchmarks/results/round_cost-MACHINE.json.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from torch import nn

import fedloom as fl

CLIENTS, PER_ROUND, SAMPLES, BATCH, EPOCHS = 100, 10, 500, 50, 5


def data(features: int, classes: int) -> fl.Federation:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * SAMPLES, features, generator=draw)
    y = torch.randint(classes, (CLIENTS * SAMPLES,), generator=draw)
    return fl.Federation.from_arrays([(x[i : i + SAMPLES], y[i : i + SAMPLES]) for i in range(0, len(x), SAMPLES)])


def through_fit(model: nn.Module, federation: fl.Federation, method: str, rounds: int, device: str) -> float:
    """Samples per second, the first round left out."""
    result = fl.fit(
        model, federation, method, rounds + 1, PER_ROUND, fl.Local(EPOCHS, batch_size=BATCH, lr=0.1), device=device
    )
    seconds = result.history[-1]["seconds"] - result.history[0]["seconds"]
    return float(rounds * PER_ROUND * SAMPLES * EPOCHS / seconds)


def plain(model: nn.Module, federation: fl.Federation, rounds: int, device: str) -> float:
    """The same work as most people write it: one module, one optimiser, one client after the other."""
    model = model.to(device)
    x, y = federation.x.to(device), federation.y.to(device)
    began = time.perf_counter()
    for _ in range(rounds * PER_ROUND):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(EPOCHS):
            for batch in torch.randperm(SAMPLES, device=device).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return rounds * PER_ROUND * SAMPLES * EPOCHS / (time.perf_counter() - began)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--rounds", type=int, default=10)
    chosen = options.parse_args()
    federation = data(784, 10)
    model = fl.model("mlp(hidden=[100, 100])", federation)
    rates = {"plain loop": plain(model, federation, chosen.rounds, chosen.device)}
    for method in ("fedavg", "fedprox(mu=0.1)+fedadam"):
        rates[f"fl.fit {method}"] = through_fit(model, federation, method, chosen.rounds, chosen.device)
    machine = torch.cuda.get_device_name() if chosen.device == "cuda" else platform.machine()
    lines = [f"mlp 784-100-100-10, {PER_ROUND} of {CLIENTS} clients x {SAMPLES}, batch {BATCH}, on {machine}"]
    lines += [f"{name:32} {rate:12,.0f} samples/s" for name, rate in rates.items()]
    print("\n".join(lines))  # noqa: T201
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    found = {"machine": machine, "threads": torch.get_num_threads(), "torch": torch.__version__, "rates": rates}
    (folder / f"round_cost-{machine.replace(' ', '_')}.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
