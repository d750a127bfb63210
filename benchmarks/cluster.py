"""Rounds per second of the Ray engine by number of workers, beside the loop in this process on one thread.

    python benchmarks/cluster.py --actors 1 2 --rounds 6

cnn-mcmahan on made-up images (how fast a step is does not depend on what they show): 100 clients with 200 samples each,
10 a round, one epoch in batches of 20. Each figure is the median over rounds, the first left out, of the runs of
`--repeats`, which take turns: a machine that becomes slower does so for all.
"""

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from common import heading, save, show

import fedloom as fl
from fedloom.engines.ray import session

LOCAL = fl.Local(epochs=1, batch_size=20, lr=0.05)


def data(clients: int, samples: int) -> fl.Federation:
    generator = torch.Generator().manual_seed(0)
    count = clients * samples
    x = torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (count,), generator=generator)
    return fl.Federation.from_tensor(x, y, [samples * k for k in range(clients + 1)], classes=10).images()


def seconds(federation: fl.Federation, args: argparse.Namespace, method: str, **engine: Any) -> list[float]:
    """Of each round but the first, the server's step included."""
    model = fl.model(args.model, federation, seed=0)
    marks: list[float] = []

    def mark(event: fl.Event) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    fl.fit(
        model,
        federation,
        method,
        rounds=args.rounds,
        clients_per_round=args.per_round,
        local=LOCAL,
        eval_every=args.rounds,
        device=args.device,
        callbacks=[mark],
        **engine,
    )
    return [after - before for before, after in pairwise(marks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--model", default="cnn-mcmahan")
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--alone", default="loop", help="The engine in this process to compare with.")
    parser.add_argument("--name", default="cluster", help="Of the file in benchmarks/results.")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    federation = data(100, 200)
    found: dict[str, dict[str, list[float]]] = {}
    for method in args.methods:
        own = found.setdefault(method, {})
        for _ in range(args.repeats):
            own.setdefault(args.alone, []).extend(seconds(federation, args, method, engine=args.alone))
            for actors in args.actors:
                with session():
                    times = seconds(federation, args, method, engine=f"ray-{args.alone}", actors=actors)
                own.setdefault(f"ray {actors}", []).extend(times)
    rates = {m: {name: 1 / statistics.median(times) for name, times in own.items()} for m, own in found.items()}
    heading(["method", "engine", "rounds/s", f"of {args.alone}"])
    for method, by_engine in rates.items():
        for name, rate in by_engine.items():
            show([method, name, f"{rate:.3f}", f"{rate / by_engine[args.alone]:.3f}"])
    save(args.name, torch.device(args.device), {"settings": vars(args), "rounds per second": rates, "seconds": found})


if __name__ == "__main__":
    main()
