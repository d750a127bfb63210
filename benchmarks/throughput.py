"""Sample gradients per second: a plain PyTorch loop, the engines through `fl.fit`, and the limit.

The limit is the same arithmetic as one shared model whose batch is the cohort's batches joined.
`python benchmarks/throughput.py [cnn mlp logistic resnet56]` prints a table and writes JSON into benchmarks/results/.
"""

import copy
import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedloom as fl


@dataclass(frozen=True)
class Case:
    """A model, the shape of its data, a cohort."""

    model: str
    inputs: tuple[int, ...]
    classes: int
    clients: int
    samples: int
    cohort: int
    batch: int
    epochs: int
    rounds: tuple[int, int]  # on a CPU, on a GPU

    @property
    def a_round(self) -> int:
        """Sample gradients of a round."""
        return self.cohort * self.samples * self.epochs


CASES = {
    "cnn": Case("cnn-mcmahan", (3, 32, 32), 10, 100, 500, 10, 45, 5, (1, 30)),
    "mlp": Case("mlp", (784,), 10, 100, 500, 10, 50, 5, (10, 100)),
    "logistic": Case("logistic", (60,), 10, 10_000, 20, 100, 20, 1, (100, 300)),
    "resnet56": Case("resnet56(variant=basic)", (3, 32, 32), 10, 20, 320, 10, 64, 1, (1, 5)),
}


def federation(case: Case) -> fl.Federation:
    generator = torch.Generator().manual_seed(0)
    total = case.clients * case.samples
    x = torch.randn(total, *case.inputs, generator=generator)
    y = torch.randint(0, case.classes, (total,), generator=generator)
    return fl.Federation.from_tensor(x, y, torch.arange(0, total + 1, case.samples))


def seconds(run: Any, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def plain_loop(case: Case, data: fl.Federation, device: torch.device, cohort: int, batch: int, rounds: int) -> float:
    """What one writes without a library: a copy of the model per client, torch.optim, an average."""
    model = fl.model(case.model, data).to(device)
    x, y = data.x.to(device), data.y.to(device)
    size = case.samples * case.cohort // cohort

    def client(k: int) -> list[Tensor]:
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
        mine = torch.arange(k * size, (k + 1) * size, device=device)
        for _ in range(case.epochs):
            for chosen in torch.split(mine[torch.randperm(size, device=device)], batch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(own(x[chosen]), y[chosen]).backward()
                optimizer.step()
        return [p.detach() for p in own.parameters()]

    def run() -> None:
        for _ in range(rounds):
            ends = [client(k) for k in range(cohort)]
            with torch.no_grad():
                for p, *new in zip(model.parameters(), *ends, strict=True):
                    p.copy_(torch.stack(new).mean(0))

    return rounds * case.a_round / seconds(run, device)


def engine(case: Case, data: fl.Federation, device: torch.device, name: str, method: str, rounds: int) -> float:
    model = fl.model(case.model, data)
    local = fl.Local(epochs=case.epochs, batch_size=case.batch, lr=0.01, last_batch="keep")

    def run(n: int = rounds) -> None:
        fl.fit(model, data, method, n, case.cohort, local, eval_every=10, engine=name, device=device)

    first = seconds(lambda: run(1), device)
    return (rounds - 1) * case.a_round / max(seconds(run, device) - first, 1e-9) if rounds > 1 else case.a_round / first


def measure(name: str, device: torch.device) -> dict[str, float]:
    case, found = CASES[name], {}
    data = federation(case)
    rounds = case.rounds[device.type == "cuda"]
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    few = max(1, rounds // 10)
    plain_loop(case, data, device, case.cohort, case.batch, 1)
    found["plain loop"] = plain_loop(case, data, device, case.cohort, case.batch, few)
    found["limit"] = plain_loop(case, data, device, 1, case.batch * case.cohort, max(few, rounds // 4))
    for engine_name in ("loop", "vector"):
        for method in ("fedavg", "adabest"):
            number = few + 1 if engine_name == "loop" else rounds + 1
            found[f"{engine_name} {method}"] = engine(case, data, device, engine_name, method, number)
    return found


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.processor() or 'CPU'}"
    out = Path(__file__).parent / "results"
    out.mkdir(exist_ok=True)
    results = {}
    for name in sys.argv[1:] or CASES:
        results[name] = measure(name, device)
        shown = ", ".join(f"{key} {value:,.0f}" for key, value in results[name].items())
        sys.stdout.write(f"{name}: {shown}\n")
        sys.stdout.flush()
    about = {"machine": machine, "threads": torch.get_num_threads(), "torch": torch.__version__}
    (out / "throughput.json").write_text(json.dumps({**about, "samples_per_second": results}, indent=1))


if __name__ == "__main__":
    main()
