"""What the benchmarks share: the machine's name, tables on the screen, JSON into benchmarks/results/."""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else _processor()
    return {
        "machine": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "CPU"


def save(name: str, device: torch.device, results: Any) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({**machine(device), "results": results}, indent=1))


def show(cells: Sequence[object]) -> None:
    """A line of a Markdown table."""
    sys.stdout.write("| " + " | ".join(f"{c:,.0f}" if isinstance(c, float) else str(c) for c in cells) + " |\n")
    sys.stdout.flush()


def heading(cells: Sequence[str]) -> None:
    show(cells)
    show(["---"] * len(cells))


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
