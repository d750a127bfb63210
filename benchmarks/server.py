"""What the server's stages cost: milliseconds for K updates of P numbers each.

`python benchmarks/server.py [KxP ...]` prints a table and writes JSON into benchmarks/results/. The largest size is
1000 x 1,000,000, or what half of the memory holds.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import heading, save, seconds, show
from torch import Tensor

import fedloom as fl
from fedloom.engines.choose import device_memory
from fedloom.local import Local
from fedloom.round import begin_run, play_round
from fedloom.rows import Rows
from fedloom.space import Space
from fedloom.stages import Setup, Updates, Work

METHODS = (
    "fedavg",
    "dgt",
    "fedglad",
    "adabest",
    "feddyn",
    "fedadam",
    "fednova",
    "ida",
    "median",
    "krum",
    "adabest+dgt+fedglad",
)
SIZES = ((10, 100_000), (10, 1_000_000), (100, 1_000_000), (1000, 1_000_000))
SLOW = {"krum": 100}  # grows with the square of K: up to this


def space(size: int) -> Space:
    """Ten tensors, as in a small network."""
    part = size // 10
    sizes = [part] * 9 + [size - 9 * part]
    return Space(tuple(f"layer{i}.weight" for i in range(10)), tuple(torch.Size([n]) for n in sizes), torch.float32)


def server_only(method: str, rows: Tensor, rounds: int) -> Callable[[], Any]:
    """Rounds whose clients answer at once, with the same updates each time."""
    clients, size = rows.shape
    pipeline = fl.Method(method).pipeline()
    start = torch.zeros(size, device=rows.device)
    sizes = torch.full((clients,), 100)
    setup = Setup(space(size), clients, sizes, clients, Local(), 0, rows.device, start)
    state = begin_run(pipeline, setup, {})

    def answer(work: Work) -> Updates:
        steps = torch.ones(len(work), dtype=torch.int64)
        return Updates(
            clients=work.clients,
            slots=work.places,
            counts=work.counts,
            samples=sizes,
            steps=steps,
            loss=torch.ones(len(work), dtype=torch.float64),
            finite=torch.ones(len(work), dtype=torch.bool),
            rows=Rows(rows, setup.space),
            buffers={},
            extra={"step_norm": steps.double()},
        )

    def run() -> None:
        nonlocal state
        for _ in range(rounds):
            playing = play_round(pipeline, setup, state)
            work = next(playing)
            try:
                while True:
                    work = playing.send(answer(work))
            except StopIteration as end:
                state = replace(end.value.state, theta=start)

    return run


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = [tuple(int(n) for n in text.split("x")) for text in sys.argv[1:]] or list(SIZES)
    fits = [(k, p) for k, p in wanted if 4 * 4 * k * p < device_memory(device) // 2]
    results: dict[str, dict[str, float]] = {}
    heading(["ms a round", *(f"{k:,} x {p:,}" for k, p in fits)])
    for method in METHODS:
        results[method] = {}
        for k, p in fits:
            if k > SLOW.get(method, k):
                continue
            rows = torch.randn(k, p, device=device, generator=torch.Generator(device).manual_seed(0))
            seconds(server_only(method, rows, 2), device)
            rounds = max(2, min(50, 200_000_000 // (k * p)))
            results[method][f"{k}x{p}"] = 1000 * seconds(server_only(method, rows, rounds), device) / rounds
        shown = [f"{results[method][f'{k}x{p}']:.2f}" if f"{k}x{p}" in results[method] else "" for k, p in fits]
        show([method, *shown])
    save("server", device, results)


if __name__ == "__main__":
    main()
