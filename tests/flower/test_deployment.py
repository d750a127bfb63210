"""A real federation: SuperLink and SuperNodes as processes here, TLS and node keys on, against the simulator.

All tests share one deployment of three nodes; each leaves it as it was.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

import fedloom as fl
from tests.flower.apps.hospital.hospital.task import model
from tests.flower.deployment import Deployment, Node
from tests.flower.processes import marked, wait_until

HOSPITAL = Path(__file__).parent / "apps" / "hospital"
HEARTBEAT = 5
STACK = "adabest+fedglad"
DIGITS = fl.load("digits", partition="classes(per_client=4)", clients=3)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("federation")
    assert DIGITS.test is not None
    np.savez(folder / "test.npz", x=DIGITS.test.x, y=DIGITS.test.y)
    configs: dict[int, Any] = {}
    for k in range(3):
        x, y = DIGITS.client(k)
        np.savez(folder / f"{k}.npz", x=x, y=y)
        configs[k] = {"memory": str(folder / f"memory-{k}"), "data": str(folder / f"{k}.npz")}
    environment = {"TEST_DATA": str(folder / "test.npz")}
    prepared = Deployment(folder / "flower", 3, node_configs=configs, heartbeat=HEARTBEAT, environment=environment)
    with prepared:
        yield prepared
    for process in (prepared.superlink, *prepared.nodes):
        assert not list(marked(str(process.folder)))


def simulated(method: str, rounds: int, per_round: int = 3, **options: Any) -> fl.Result:
    local = fl.Local(lr=0.1, batch_size=20)
    return fl.fit(model(), DIGITS, method, rounds, per_round, local, engine="loop", **options)


def cloud(folder: Path) -> Tensor:
    """The cloud model of the last checkpoint."""
    newest = max((folder / "checkpoint").glob("round-*"))
    return load_file(newest / "tensors.safetensors")["theta"]


def check_same(folder: Path, other: fl.Result) -> None:
    """Final parameters, the deployable model and the whole history."""
    assert float((cloud(folder) - other.params).norm() / other.params.norm()) < 1e-4
    deployed = load_file(folder / "model.safetensors")
    for name, value in other.model.state_dict().items():
        assert float((deployed[name] - value).norm() / value.norm()) < 1e-4, name
    run = fl.load_run(folder)
    for row, line in zip(run.history, other.history, strict=True):
        for name in ("works", "local_steps", "asked", "answered", "diverged", "uplink_bytes", "downlink_bytes"):
            assert row[name] == line[name], name
        for name in ("train_loss", "test_loss", "test_accuracy"):
            assert row[name] == pytest.approx(line[name], rel=1e-4), name


def played(deployment: Deployment, folder: Path, method: str, rounds: int, **config: Any) -> str:
    """A whole run; what the server said."""
    run = deployment.run(HOSPITAL, method=method, rounds=rounds, folder=str(folder), **config)
    status = deployment.wait(run, timeout=180)
    assert status == "finished:completed", deployment.log(run)
    return deployment.log(run)


def test_adabest_and_fedglad_as_in_the_simulator_and_no_stranger(deployment: Deployment, tmp_path: Path) -> None:
    stranger = deployment.add_node("stranger", {"partition-id": 0, "memory": str(tmp_path)})
    stranger.start()
    said = played(deployment, tmp_path / "run", STACK, 3, **{"clients-per-round": 2})
    check_same(tmp_path / "run", simulated(STACK, 3, 2))
    assert "round 3 of 3: 2 of 2 answered" in said
    assert stranger.ended(timeout=30) == 1
    assert "[code: 2004] Failed to activate SuperNode" in stranger.log()
    assert "No SuperNode found with the given public key" in deployment.superlink.log()
    deployment.nodes.remove(stranger)
    files = sorted(deployment.folder.parent.glob("memory-*/*/*.memory"))
    assert len(files) >= 2
    for file in files:  # each client's memory is its own
        assert file.parent.parent.name == f"memory-{file.stem}"


@pytest.mark.long
@pytest.mark.parametrize("method", ["radfed(redistributions=3)", "scaffold"])
def test_other_methods_as_in_the_simulator(method: str, deployment: Deployment, tmp_path: Path) -> None:
    rounds = 2 if method.startswith("radfed") else 3
    played(deployment, tmp_path / "run", method, rounds)
    check_same(tmp_path / "run", simulated(method, rounds))


@pytest.mark.long
def test_asynchronous_clients(deployment: Deployment, tmp_path: Path) -> None:
    node = deployment.nodes[2]
    node.stop()
    node.start(WAIT="10")
    node.wait_connected()
    try:
        played(deployment, tmp_path / "run", "fedasync(alpha=0.5)", 8)
    finally:
        node.stop()
        node.start(WAIT="0")
        node.wait_connected()
    history = fl.load_run(tmp_path / "run").history
    assert len(history) == 8
    assert history[-1]["test_accuracy"] > history[0]["test_accuracy"]
    assert max(row["fedasync.staleness"] for row in history) >= 1


@pytest.mark.long
def test_a_node_killed_in_a_round_keeps_its_memory_and_rejoins(deployment: Deployment, tmp_path: Path) -> None:
    node = deployment.nodes[1]
    for slow in deployment.nodes:
        slow.stop()
        slow.start(WAIT="4")
        slow.wait_connected()
    run = deployment.run(HOSPITAL, method=STACK, rounds=6, folder=str(tmp_path / "run"))
    before = node.log().count("training for Work 2")
    try:
        _wait(node, "training for Work 2", before + 1)
        node.kill()
        node.wait_gone(timeout=60)
        node.start(WAIT="4")
        node.wait_connected()
        assert deployment.wait(run, timeout=240) == "finished:completed", deployment.log(run)
    finally:
        for slow in deployment.nodes:
            slow.stop()
            slow.start(WAIT="0")
            slow.wait_connected()
    history = fl.load_run(tmp_path / "run").history
    away = [row["round"] - 1 for row in history if row["answered"] == 2]
    assert 2 in away
    assert len(away) < 4  # it came back
    assert all(row["forgot"] == 0 for row in history)
    assert [row.get("silent_clients", []) for row in history if row["silent"]] == [[1]] * len(away)
    check_same(tmp_path / "run", simulated(STACK, 6, availability=lambda client, w: client != 1 or w not in away))


def _wait(node: Node, text: str, times: int) -> None:
    wait_until(lambda: node.log().count(text) >= times, 90, text, node.log)


@pytest.mark.long
def test_a_hostile_node_is_refused_and_the_round_goes_on(deployment: Deployment, tmp_path: Path) -> None:
    node = deployment.nodes[2]
    node.stop()
    node.start(HARMS="1:nan 2:shape 3:size")
    node.wait_connected()
    try:
        said = played(deployment, tmp_path / "run", STACK, 5)
    finally:
        node.stop()
        node.start(HARMS="")
        node.wait_connected()
    assert f"client 2 (node {node.id}) is left out: the update, row holds NaN or infinity" in said
    assert f"client 2 (node {node.id}) is left out: the update, row has the shape" in said
    assert f"client 2 (node {node.id}) is left out: the update, row has 48,528 bytes in place of 4,840" in said
    history = fl.load_run(tmp_path / "run").history
    assert [row["refused"] for row in history] == [0, 1, 1, 1, 0]
    check_same(tmp_path / "run", simulated(STACK, 5, availability=lambda client, w: client != 2 or w not in (1, 2, 3)))


@pytest.mark.long
def test_a_killed_server_goes_on_at_its_round(deployment: Deployment, tmp_path: Path) -> None:
    config: dict[str, Any] = {"method": STACK, "rounds": 5, "folder": str(tmp_path / "run")}
    first = deployment.run(HOSPITAL, **config)
    deployment.server_process(first)
    deployment.wait_for_log(first, "round 2 of 5", timeout=120)
    deployment.nodes[0].wait_for_log("training for Work 2", timeout=60)  # in the middle of the third round
    deployment.kill_server(first)
    second = deployment.run(HOSPITAL, **config)
    assert deployment.wait(second, timeout=180) == "finished:completed", deployment.log(second)
    said = deployment.log(second)
    assert "round 3 of 5" in said
    assert "round 2 of 5" not in said
    check_same(tmp_path / "run", simulated(STACK, 5))
    assert deployment.wait(first, timeout=60) == "finished:failed"
    third = deployment.run(HOSPITAL, **config)  # of a finished run there is nothing left to do
    assert deployment.wait(third, timeout=60) == "finished:completed", deployment.log(third)
    assert "round" not in deployment.log(third).replace("rounds", "")


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on(deployment: Deployment, tmp_path: Path) -> None:
    config: dict[str, Any] = {"method": STACK, "rounds": 4, "folder": str(tmp_path / "run")}
    first = deployment.run(HOSPITAL, **config)
    deployment.wait_for_log(first, "round 1 of 4", timeout=120)
    server = deployment.server_process(first)
    deployment.stop(first)
    wait_until(lambda: server not in deployment.superlink.processes(), 60, "its end", deployment.superlink.log)
    second = deployment.run(HOSPITAL, **config)
    assert deployment.wait(second, timeout=180) == "finished:completed", deployment.log(second)
    assert "round 1 of 4" not in deployment.log(second)
    check_same(tmp_path / "run", simulated(STACK, 4))


@pytest.mark.long
def test_what_is_wrong_is_told_in_the_run_s_log(deployment: Deployment, tmp_path: Path) -> None:
    run = deployment.run(HOSPITAL, clients=4, **{"clients-per-round": 2, "enrol-timeout": 15.0})
    assert deployment.wait(run, timeout=90) == "finished:failed"
    assert "only 3 of 4 clients introduced themselves within 15 s" in deployment.log(run)
    run = deployment.run(HOSPITAL, method="adabst")
    assert deployment.wait(run, timeout=60) == "finished:failed"
    assert "did you mean adabest?" in deployment.log(run)
