"""Sample gradients per second: a plain PyTorch loop, the engines through `fl.fit`, peers where installed, the limit.

The limit is the same arithmetic as one shared model whose batch is the cohort's batches joined, also as a CUDA graph.
The first rounds of a run (planning, recording, compiling) are left out; what else happens in a run is in: sampling,
batches, corrections, the server, an evaluation every ten rounds.

`python benchmarks/throughput.py [case ...] [--quick] [--no-peers]` prints a table and writes JSON into
benchmarks/results/.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import heading, save, seconds, show
from torch import Tensor, nn

import fedloom as fl
from fedloom.lockstep import run_together
from fedloom.training import Training


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
    compiled: tuple[bool, bool] = (False, True)  # measure it compiled too? on a CPU, on a GPU
    zeros: float = 0.0  # share of inputs that are zero

    @property
    def a_round(self) -> int:
        """Sample gradients of a round."""
        return self.cohort * self.samples * self.epochs


CASES = {
    "cnn": Case("cnn-mcmahan", (3, 32, 32), 10, 100, 500, 10, 45, 5, (1, 60)),
    "mlp": Case("mlp", (784,), 10, 100, 500, 10, 50, 5, (12, 400), (True, True)),
    "digits": Case("mlp(hidden=[200, 200])", (784,), 10, 100, 700, 6, 10, 1, (12, 400), (True, False), 0.81),
    "logistic": Case("logistic", (60,), 10, 10_000, 20, 100, 20, 1, (200, 300), (True, False)),
    "logistic5": Case("logistic", (60,), 10, 10_000, 20, 100, 20, 5, (50, 200), (True, False)),
    "resnet56": Case("resnet56(variant=basic)", (3, 32, 32), 10, 20, 320, 10, 64, 1, (1, 20), (False, False)),
    "pfl": Case("cnn-reddi", (3, 32, 32), 10, 1000, 50, 50, 10, 1, (1, 200)),
}
SKIPPED = 2  # rounds at the beginning of a run


def federation(case: Case) -> fl.Federation:
    generator = torch.Generator().manual_seed(0)
    total = case.clients * case.samples
    x = torch.randn(total, *case.inputs, generator=generator)
    x *= torch.rand(x.shape, generator=generator) >= case.zeros
    y = torch.randint(0, case.classes, (total,), generator=generator)
    few = min(total, 2000)
    return fl.Federation.from_tensor(x, y, torch.arange(0, total + 1, case.samples), test=(x[:few], y[:few]))


def plain_loop(case: Case, data: fl.Federation, device: torch.device, rounds: int) -> float:
    """What one writes without a library: a copy of the model per client, torch.optim, an average."""
    model = fl.model(case.model, data).to(device)
    x, y = data.x.to(device), data.y.to(device)

    def client(k: int) -> list[Tensor]:
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
        mine = torch.arange(k * case.samples, (k + 1) * case.samples, device=device)
        for _ in range(case.epochs):
            for chosen in torch.split(mine[torch.randperm(case.samples, device=device)], case.batch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(own(x[chosen]), y[chosen]).backward()
                optimizer.step()
        return [p.detach() for p in own.parameters()]

    def run() -> None:
        for _ in range(rounds):
            ends = [client(k) for k in range(case.cohort)]
            with torch.no_grad():
                for p, *new in zip(model.parameters(), *ends, strict=True):
                    p.copy_(torch.stack(new).mean(0))

    client(0)
    return rounds * case.a_round / seconds(run, device)


def limit(case: Case, data: fl.Federation, device: torch.device, steps: int, graph: bool) -> float:
    """One model, batches as large as the cohort's together."""
    model = fl.model(case.model, data).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = data.x.to(device), data.y.to(device)
    batch = case.cohort * case.batch
    chosen = torch.randint(0, len(x), (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()

    run: Callable[[], None] = step
    side = torch.cuda.Stream() if graph else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording):
            step()
        run = recording.replay
    run()

    def all_steps() -> None:
        for _ in range(steps):
            chosen.random_(0, len(x))
            run()

    return steps * batch / seconds(all_steps, device)


def engine(
    case: Case, data: fl.Federation, device: torch.device, name: str, method: str, rounds: int, compiled: bool = False
) -> float:
    local = fl.Local(epochs=case.epochs, batch_size=case.batch, lr=0.01)
    result = fl.fit(
        fl.model(case.model, data),
        data,
        method,
        rounds + SKIPPED,
        case.cohort,
        local,
        eval_every=10,
        engine=name,
        compile=compiled,
        device=device,
    )
    spent = result.history[-1]["seconds"] - result.history[SKIPPED - 1]["seconds"]
    return rounds * case.a_round / float(spent)


def lockstep(case: Case, data: fl.Federation, device: torch.device, runs: int, rounds: int, compiled: bool) -> float:
    """Several runs, which differ in their seeds, at once."""
    local = fl.Local(epochs=case.epochs, batch_size=case.batch, lr=0.01)
    trainings = [
        Training(
            fl.model(case.model, data),
            data,
            "fedavg",
            rounds=rounds + SKIPPED,
            clients_per_round=case.cohort,
            local=local,
            eval_every=10,
            engine="vector",
            compile=compiled,
            device=device,
            seed=seed,
        )
        for seed in range(runs)
    ]
    results = run_together(trainings, [[] for _ in trainings])
    spent = sum(r.history[-1]["seconds"] - r.history[SKIPPED - 1]["seconds"] for r in results)
    return runs * rounds * case.a_round / float(spent)


def measure(name: str, device: torch.device, quick: bool, with_peers: bool) -> dict[str, float]:
    case, found = CASES[name], {}
    data = federation(case)
    on_gpu = device.type == "cuda"
    rounds = max(1, case.rounds[on_gpu] // (5 if quick else 1))
    few = max(1, rounds // 20)
    torch.set_float32_matmul_precision("high")
    found["plain loop"] = plain_loop(case, data, device, few)
    steps = max(5, few * case.a_round // (case.batch * case.cohort))
    found["limit"] = limit(case, data, device, steps, graph=False)
    if on_gpu:
        found["limit, graph"] = limit(case, data, device, 10 * steps, graph=True)
    found["loop fedavg"] = engine(case, data, device, "loop", "fedavg", few)
    for method in ("fedavg", "adabest"):
        found[f"vector {method}"] = engine(case, data, device, "vector", method, rounds)
        if case.compiled[on_gpu]:
            found[f"compiled {method}"] = engine(case, data, device, "vector", method, rounds, compiled=True)
            if not on_gpu:
                found[f"loop compiled {method}"] = engine(case, data, device, "loop", method, rounds, compiled=True)
    if name == "mlp":
        found["10 runs in lockstep"] = lockstep(case, data, device, 10, max(1, rounds // 5), compiled=on_gpu)
    if with_peers:
        from peers import available

        for peer, run in available().items():
            found[peer] = run(case, data, device, max(2, few))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Sample gradients per second.")
    parser.add_argument("case", nargs="*", help=f"of {', '.join(CASES)}; all of them by default")
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    parser.add_argument("--no-peers", action="store_true", help="leave other simulators out")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {}
    heading(["workload", "what", "samples/s", "x plain loop"])
    for name in asked.case or CASES:
        results[name] = measure(name, device, asked.quick, not asked.no_peers)
        for what, rate in results[name].items():
            show([name, what, rate, f"{rate / results[name]['plain loop']:.1f}"])
        save("throughput", device, results)


if __name__ == "__main__":
    main()
