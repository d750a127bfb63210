"""Sample gradients per second of public simulators on the workloads of throughput.py.

Every peer does the same work: plain SGD with lr 0.01, cross-entropy, the short last batch kept, averaging weighted by
samples, no evaluation, the clients' data in memory as tensors before the clock starts. What its users write
themselves, the model and the clients' batches, is the quickest form that it takes. The first round is not counted.
`python benchmarks/peers.py [case ...] [--device cpu]` measures those installed; JSON goes into benchmarks/results/.
"""

import argparse
import importlib
import importlib.metadata
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from common import heading, save, show
from throughput import CASES, Case, federation
from torch import Tensor, nn

import fedloom as fl

Peer = Callable[[Case, fl.Federation, torch.device, int], float]


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def rate(case: Case, ends: list[float]) -> float:
    """`ends`: when each round ended; the first one only starts the clock."""
    return (len(ends) - 1) * case.a_round / (ends[-1] - ends[0])


def shards(case: Case, data: fl.Federation, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    x, y = data.x.to(device), data.y.to(device)
    return list(zip(x.split(case.samples), y.split(case.samples), strict=True))


class Batches:
    """A client's data in a new order each epoch, every batch one index of the tensors."""

    def __init__(self, x: Tensor, y: Tensor, size: int) -> None:
        self.x, self.y, self.size = x, y, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.y), device=self.y.device).split(self.size):
            yield self.x[chosen], self.y[chosen]


class WithLoss(nn.Module):
    """A model in the form that pfl asks for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {}


def pfl(case: Case, data: fl.Federation, device: torch.device, rounds: int) -> float:
    """One process. pfl keeps each user's batches and does not shuffle them: nothing is gathered in a round."""
    os.environ["PFL_PYTORCH_DEVICE"] = str(device)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    ends: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            ends.append(now(device))
            return False, Metrics()

    net = WithLoss(fl.model(case.model, data)).to(device).train()
    users = [PyTorchTensorDataset(shard) for shard in shards(case, data, device)]
    source = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(case.clients)))
    FederatedAveraging().run(
        # The first iteration is always an evaluated one; the period keeps the others from it.
        NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=rounds + 2,
            train_cohort_size=case.cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(source, source, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        NNTrainHyperParams(local_batch_size=case.batch, local_num_epochs=case.epochs, local_learning_rate=0.01),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    return rate(case, ends)


def stand_in(name: str, member: str) -> None:
    """An empty module in the place of one that can't be loaded: FedLab imports these for data sets not used here."""
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError):  # torchvision built for another torch raises the latter
        for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[loaded]
        empty = ModuleType(name)
        setattr(empty, member, None)
        sys.modules[name] = empty


def fedlab(case: Case, data: fl.Federation, device: torch.device, rounds: int) -> float:
    """Its clients are all of one weight, which is right here: they hold equally many samples.

    It only iterates over what it calls the client's loader; a `DataLoader` in that place is slower.
    """
    for name, member in (("torchvision", "transforms"), ("PIL", "Image"), ("pynvml", "nvmlInit")):
        stand_in(name, member)
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.core.standalone import StandalonePipeline

    ends: list[float] = []
    clients = shards(case, data, device)

    def loader(client: int, batch: int) -> Batches:
        return Batches(*clients[client], batch)

    model = fl.model(case.model, data)
    where = {"cuda": device.type == "cuda", "device": str(device)}
    trainer = SGDSerialClientTrainer(model, case.clients, **where)
    trainer.setup_dataset(SimpleNamespace(get_dataloader=loader))
    trainer.setup_optim(case.epochs, case.batch, 0.01)
    ratio = min(1.0, (case.cohort + 0.5) / case.clients)  # FedLab rounds the cohort down
    pipeline = StandalonePipeline(SyncServerHandler(model, rounds + 1, ratio, **where), trainer)
    logging.getLogger().setLevel(logging.WARNING)  # FedLab lets every library print what it logs as information
    pipeline.evaluate = lambda: ends.append(now(device))
    pipeline.main()
    return rate(case, ends)


@cache
def flower_state(path: str, device: str) -> tuple[Case, nn.Module, list[tuple[Tensor, Tensor]]]:
    """What an actor keeps from one of its clients to the next."""
    case, model, data = torch.load(path, weights_only=False)  # nosec B614  # written above by this very process
    return case, model.to(device).train(), shards(case, data, torch.device(device))


def flower_client(message: Any, context: Any) -> Any:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    config = message.content["config"]
    case, model, clients = flower_state(config["path"], config["device"])
    x, y = clients[context.node_config["partition-id"]]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    count = 0
    for _ in range(case.epochs):
        for inputs, labels in Batches(x, y, case.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            count += len(labels)
    metrics = MetricRecord({"num-examples": len(y), "gradients": count})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def flower(case: Case, data: fl.Federation, device: torch.device, rounds: int) -> float:
    """One Ray actor per core, each with one thread; on a GPU they share it. Starting them is not counted."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray warns that this will change
    import ray
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    ends: list[float] = []
    counts: list[int] = []
    client, server = ClientApp(), ServerApp()
    model = fl.model(case.model, data)

    def train(message: Message, context: Context) -> Message:
        import peers  # by its name: the actor's own module, whose cache outlives the call

        reply: Message = peers.flower_client(message, context)
        return reply

    def count(replies: list[RecordDict], _: str) -> MetricRecord:
        counts.append(sum(round(float(str(reply["metrics"]["gradients"]))) for reply in replies))
        return MetricRecord()

    def tick(server_round: int, _: ArrayRecord) -> None:
        if server_round:
            ends.append(now(device))

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "federation.pt")
        torch.save((case, model, data), path)

        def main(grid: Grid, _: Context) -> None:
            strategy = FedAvg(
                fraction_train=1e-9,  # the least number of nodes decides
                fraction_evaluate=0.0,
                min_train_nodes=case.cohort,
                min_available_nodes=case.clients,
                train_metrics_aggr_fn=count,
            )
            config = ConfigRecord({"path": path, "device": str(device)})
            arrays = ArrayRecord(model.state_dict())
            strategy.start(grid, arrays, rounds + 1, train_config=config, evaluate_fn=tick)

        client.train()(train)
        server.main()(main)
        cores = os.cpu_count() or 1
        share: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1 / cores if device.type == "cuda" else 0.0}
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        run_simulation(server, client, case.clients, backend_config={"client_resources": share, "init_args": quiet})
        ray.shutdown()
    if counts != [case.a_round] * (rounds + 1):
        raise RuntimeError(f"clients failed: {counts} sample gradients in rounds of {case.a_round}")
    return rate(case, ends)


PEERS: dict[str, Peer] = {
    name: peer
    for name, peer, needs in (
        ("pfl", pfl, ("pfl",)),
        ("fedlab", fedlab, ("fedlab",)),
        ("flower", flower, ("flwr", "ray")),
    )
    if all(find_spec(module) for module in needs)
}


def available() -> dict[str, Peer]:
    return dict(PEERS)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def measure(name: str, device: torch.device) -> dict[str, float]:
    case = CASES[name]
    data = federation(case)
    rounds = max(1, case.rounds[device.type == "cuda"] // 4)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    return {peer: run(case, data, device, rounds) for peer, run in available().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Sample gradients per second of other simulators.")
    parser.add_argument("case", nargs="*", help=f"of {', '.join(CASES)}; all of them by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    results = {}
    heading(["workload", "simulator", "version", "samples/s"])
    for name in asked.case or CASES:
        results[name] = measure(name, device)
        for peer, found in results[name].items():
            show([name, peer, version({"flower": "flwr"}.get(peer, peer)), found])
    save("peers", device, results)


if __name__ == "__main__":
    main()
