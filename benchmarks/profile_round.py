"""Where the time of one round goes: GPU kernels by kind, and how long the GPU waits for the host.

`python benchmarks/profile_round.py [case] [method] [plain]` needs a CUDA device; it prints a table and writes JSON into
benchmarks/results/. The run is warm, and compiled unless `plain`.
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


def covered(spans: list[tuple[float, float]]) -> float:
    """How long at least one of them lasts."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def main() -> None:
    case = CASES[sys.argv[1] if len(sys.argv) > 1 else "cnn"]
    method = sys.argv[2] if len(sys.argv) > 2 else "fedavg"
    data = federation(case)
    settings: dict[str, Any] = {"clients_per_round": case.cohort, "device": "cuda"}
    local = fl.Local(epochs=case.epochs, batch_size=case.batch, lr=0.01)
    model = fl.model(case.model, data)
    run = Training(
        model, data, method, rounds=100, local=local, engine="vector", compile="plain" not in sys.argv, **settings
    )
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
    kernels = [event for event in profiled.events() if str(event.device_type).endswith("CUDA")]
    spent: dict[str, float] = {}
    for event in kernels:
        spent[kind(event.name)] = spent.get(kind(event.name), 0.0) + event.device_time / 1e3
    busy = covered([(event.time_range.start, event.time_range.end) for event in kernels]) / 1e3
    heading(["kind of kernel", "ms"])
    for name, ms in sorted(spent.items(), key=lambda pair: -pair[1]):
        show([name, f"{ms:.2f}"])
    show(["all kernels, some of which run side by side", f"{busy:.2f}"])
    show(["a round", f"{1000 * wall:.2f}"])
    found = {"kernels": spent, "busy": busy, "round": 1000 * wall}
    save(f"profile-{case.model.partition('(')[0]}", torch.device("cuda"), found)


if __name__ == "__main__":
    main()
