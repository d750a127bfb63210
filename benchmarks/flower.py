"""What a round costs beside the training: Flower's FedAvg over its own simulation and over a grid in one process.

`python benchmarks/flower.py [repeats]` prints a table and writes JSON into benchmarks/results/. Clients return what
they got. A federation's clients can't do so: they, and `fl.fit` beside them, take one step on one sample. A figure is
the median over the rounds but the first, and then over the repeats; the time until the first is over stands apart.
"""

import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from typing import Any, NamedTuple

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray warns that this will change

import torch
from common import heading, save, show
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fedloom as fl
from fedloom.flower import LocalGrid, client_app, fit_strategy, serve

LOCAL = fl.Local(steps=1, batch_size=1)
ROUNDS = 20
FEATURES = CLASSES = 100  # 10,100 parameters


class Case(NamedTuple):
    """How many clients there are, and how many a round asks."""

    clients: int
    cohort: int

    @property
    def strategy(self) -> FedAvg:
        return FedAvg(
            fraction_train=1e-9,  # the least number of nodes decides
            fraction_evaluate=0.0,
            min_train_nodes=self.cohort,
            min_available_nodes=self.clients,
        )

    @property
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(FEATURES, CLASSES)

    @property
    def federation(self) -> fl.Federation:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.clients, FEATURES, generator=generator)
        return fl.Federation.from_tensor(x, torch.arange(self.clients) % CLASSES, range(self.clients + 1))


CASES = (Case(1000, 50), Case(100, 10))


class Ticks:
    """When each round was over, after the beginning of it all."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def __call__(self, round: int = 1, arrays: Any = None) -> None:
        if round:
            self.ends.append(time.perf_counter())

    def heard(self, event: fl.Event) -> None:
        self()

    @property
    def found(self) -> tuple[float, float]:
        """Seconds to the end of the first round, and of a later one."""
        if len(self.ends) != ROUNDS + 1:
            raise RuntimeError(f"{len(self.ends) - 1} of {ROUNDS} rounds were played")
        first, *later = (end - begin for begin, end in pairwise(self.ends))
        return first, statistics.median(later)


def empty_app() -> ClientApp:
    app = ClientApp()

    def give_back(message: Message, context: Context) -> Message:
        records = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
        return Message(records, reply_to=message)

    app.train()(give_back)
    return app


def start(case: Case, grid: Grid, ticks: Ticks) -> None:
    case.strategy.start(grid, ArrayRecord(case.model.state_dict()), ROUNDS, evaluate_fn=ticks)


def over_simulation(case: Case) -> tuple[float, float]:
    """Flower's simulation on Ray: an actor per core."""
    import ray
    from flwr.simulation import run_simulation

    server, ticks = ServerApp(), Ticks()

    def main(grid: Grid, _: Context) -> None:
        start(case, grid, ticks)

    server.main()(main)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    share = {"num_cpus": 1, "num_gpus": 0.0}
    config: Any = {"client_resources": share, "init_args": quiet}
    run_simulation(server, empty_app(), case.clients, backend_config=config)
    ray.shutdown()
    return ticks.found


def over_app(case: Case) -> tuple[float, float]:
    ticks = Ticks()
    start(case, LocalGrid.of_app(empty_app(), case.clients), ticks)
    return ticks.found


def over_federation(case: Case) -> tuple[float, float]:
    federation, model, ticks = case.federation, case.model, Ticks()
    fit_strategy(case.strategy, model, federation, ROUNDS, LOCAL, device="cpu", callbacks=[ticks.heard])
    return ticks.found


def own_rounds(case: Case) -> tuple[float, float]:
    federation, model, ticks = case.federation, case.model, Ticks()
    fl.fit(model, federation, "fedavg", ROUNDS, case.cohort, LOCAL, device="cpu", callbacks=[ticks.heard])
    return ticks.found


def served(case: Case) -> tuple[float, float]:
    """Server and clients as in a deployment, each message answered by an app that is made anew."""
    federation, ticks = case.federation, Ticks()

    def data(context: Context) -> Any:
        return federation.client(int(context.node_config["partition-id"]))

    grid = LocalGrid.of_app(client_app(lambda context: case.model, data, device="cpu"), case.clients)
    own: dict[str, Any] = {"clients": case.clients, "clients_per_round": case.cohort, "device": "cpu"}
    serve(grid, case.model, rounds=ROUNDS, local=LOCAL, callbacks=[ticks.heard], **own)
    return ticks.found


WAYS: dict[str, Callable[[Case], tuple[float, float]]] = {
    "FedAvg, Flower's simulation, empty clients": over_simulation,
    "FedAvg, LocalGrid.of_app, empty clients": over_app,
    "FedAvg, fit_strategy, one step": over_federation,
    "fl.fit, one step": own_rounds,
    "fedavg, serve and client_app over LocalGrid, one step": served,
}


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    logging.getLogger("flwr").setLevel(logging.ERROR)
    heading(["clients", "a round", "what", "ms per round", "least and most", "s to the end of the first round"])
    results = []
    for case in CASES:
        for name, way in WAYS.items():
            found = [way(case) for _ in range(repeats)]
            firsts, rounds = ([one[i] for one in found] for i in range(2))
            least, middle, most = (1000 * f(rounds) for f in (min, statistics.median, max))
            begin = statistics.median(firsts)
            show([case.clients, case.cohort, name, f"{middle:.1f}", f"{least:.1f} to {most:.1f}", f"{begin:.2f}"])
            results.append({**case._asdict(), "what": name, "ms": [1000 * r for r in rounds], "first_s": firsts})
    versions = {package: version(package) for package in ("flwr", "ray", "torch", "numpy")}
    save("flower", torch.device("cpu"), {"versions": versions, "rounds": ROUNDS, "ways": results})


if __name__ == "__main__":
    main()
