"""Where the time of one round goes: GPU kernels by kind, and how long the GPU waits for the host.

`python benchmarks/profile_round.py [case] [method]` needs a CUDA device; it prints a table and writes JSON into
benchmarks/results/. The run is compiled, and warm.
"""

import re
import sys
import time
from typing import Any

import torch
from common import heading, save, show
from throughput import CASES, federation
from torch.profiler import ProfilerActivity, profile

import fedloom as fl
from fedloom.training import Training

KINDS = {
    "layouts for cuDNN": r"nchwToNhwc|nhwcToNchw",
    "convolutions": r"conv|wgrad|dgrad|fprop|implicit_gemm",
    "matrix products": r"gemm|cutlass|gemv",
    "pooling": r"max_pool",
    "fused by the compiler": r"triton",
    "copies": r"Memcpy|Memset|copy",
}


def kind(kernel: str) -> str:
    return next((name for name, pattern in KINDS.items() if re.search(pattern, kernel)), "other")


def main() -> None:
    case = CASES[sys.argv[1] if len(sys.argv) > 1 else "cnn"]
    method = sys.argv[2] if len(sys.argv) > 2 else "fedavg"
    data = federation(case)
    settings: dict[str, Any] = {"loss": None, "metric": "accuracy", "precision": "auto", "seed": 0}
    settings |= {"availability": None, "dropout_rate": 0.0, "clients_per_round": case.cohort, "device": "cuda"}
    local = fl.Local(epochs=case.epochs, batch_size=case.batch, lr=0.01)
    model = fl.model(case.model, data)
    run = Training(model, data, method, rounds=100, local=local, engine="vector", compile=True, **settings)
    with run.simulation.numerics():
        for _ in range(5):
            run.round(evaluate=False)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            run.round(evaluate=False)
        torch.cuda.synchronize()
        wall = (time.perf_counter() - began) / 10
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run.round(evaluate=False)
            torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in profiled.events():
        if str(event.device_type).endswith("CUDA"):
            spent[kind(event.name)] = spent.get(kind(event.name), 0.0) + event.device_time / 1e3
    busy = sum(spent.values())
    heading(["kind of kernel", "ms", "share of the round"])
    rows = {**dict(sorted(spent.items(), key=lambda pair: -pair[1])), "the GPU waits": max(1000 * wall - busy, 0.0)}
    for name, ms in rows.items():
        show([name, f"{ms:.2f}", f"{ms / wall / 10:.1f}%"])
    show(["a round", f"{1000 * wall:.2f}", ""])
    save(f"profile-{case.model.partition('(')[0]}", torch.device("cuda"), {"ms": rows, "round": 1000 * wall})


if __name__ == "__main__":
    main()
