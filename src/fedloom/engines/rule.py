"""The numbers in the rule for engine="auto" on a CPU: those found on two cores, or what `fedloom bench` found here."""

import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from fedloom.data.files import cache_folder
from fedloom.errors import FedloomError
from fedloom.untrusted import read_bytes

FILE = "engine-rule.json"
LONGEST = 1 << 16  # bytes
COHORTS = (2, 4, 8, 16, 32)
HIDDEN = (8, 32, 128, 512, 1024)  # units of a network with 64 inputs and 10 outputs


@dataclass(frozen=True)
class Rule:
    """When a cohort is one matrix, and when cores share it."""

    vector_from: int = 6  # clients in a round, and
    vector_below: int = 100_000  # parameters: beyond, a step is arithmetic, and its calls do not count
    shared_from: int = 4_000_000  # rows x batch x parameters of a step: below, threads wait for each other


class Measured(NamedTuple):
    """Samples per second of one kind of cohort."""

    clients: int
    parameters: int
    loop: float
    vector: float


def machine() -> str:
    """Numbers that were measured elsewhere say nothing here."""
    return f"{platform.node()}, {os.cpu_count()} cores, PyTorch {torch.__version__}"


@cache
def rule() -> Rule:
    """What `fedloom bench` found on this machine, or what holds without it."""
    try:
        found = json.loads(read_bytes(cache_folder() / FILE, LONGEST))
        values = {f.name: found["rule"][f.name] for f in fields(Rule)}
        if found["machine"] == machine() and all(type(v) is int and v >= 0 for v in values.values()):
            return Rule(**values)
    except (FedloomError, OSError, ValueError, KeyError, TypeError, RecursionError):  # it only saves time
        pass
    return Rule()


def measure(report: Callable[[Measured], None], seconds: float = 0.5) -> Rule:
    """Time cohorts of small dense models with both engines, on one thread."""
    found = []
    for hidden in HIDDEN:
        for clients in COHORTS:
            found.append(_measured(clients, hidden, seconds))
            report(found[-1])
    return fitted(found)


def fitted(found: list[Measured]) -> Rule:
    """The rule under which the cohorts that were measured are fastest, by the mean of the logarithms."""
    smallest = {one.clients for one in found}
    largest = {one.parameters + 1 for one in found}

    def gain(limits: tuple[int, int]) -> float:
        chosen = [one for one in found if one.clients >= limits[0] and one.parameters < limits[1]]
        return sum(math.log(one.vector / one.loop) for one in chosen)

    best = max(((clients, size) for clients in sorted(smallest) for size in sorted(largest)), key=gain)
    return Rule(vector_from=best[0], vector_below=best[1] if gain(best) > 0 else 0)


def save(chosen: Rule) -> Path:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f"{FILE}.part"
    beside.write_text(json.dumps({"machine": machine(), "rule": asdict(chosen)}, indent=1))
    beside.replace(folder / FILE)
    rule.cache_clear()
    return folder / FILE


def _measured(clients: int, hidden: int, seconds: float) -> Measured:
    from torch import nn

    from fedloom.federation import Federation
    from fedloom.fit import fit
    from fedloom.local import Local

    samples, inputs = 64, 64
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * samples, inputs, generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    data = Federation.from_tensor(x, y, list(range(0, len(x) + 1, samples)), classes=10)
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def rate(engine: str) -> float:
        def rounds(n: int) -> float:
            began = time.perf_counter()
            fit(
                model,
                data,
                rounds=n,
                clients_per_round=clients,
                local=Local(batch_size=32),
                engine=engine,
                compile=False,
                device="cpu",
            )
            return time.perf_counter() - began

        rounds(2)
        n = max(3, int(seconds / max(rounds(4) / 4, 1e-6)))
        return n * clients * samples / rounds(n)

    try:
        speeds = [rate("loop"), rate("vector")]
    finally:
        torch.set_num_threads(threads)
    return Measured(clients, sum(p.numel() for p in model.parameters()), *speeds)
