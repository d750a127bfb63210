"""The deployment that other tests stand on: what it starts is real, what it kills is dead, what it says is so."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app.user_config import UserConfig
from flwr.common.config import parse_config_args

from tests.flower.deployment import Deployment, as_text
from tests.flower.processes import marked, wait_until

ECHO = Path(__file__).parent / "apps" / "echo"
HEARTBEAT = 5
NODE_UNAVAILABLE = 5  # Flower's error code


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Every test leaves it as it was: two nodes, and no run."""
    prepared = Deployment(
        tmp_path_factory.mktemp("flower"), nodes=2, node_configs={1: {"site": "a b=c"}}, heartbeat=HEARTBEAT
    )
    prepared.nodes[1].environment["NODE_OWN"] = "of node 1"
    with prepared:
        yield prepared
    for process in (prepared.superlink, *prepared.nodes):
        assert not list(marked(str(process.folder)))


def said(deployment: Deployment, run: int, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in deployment.log(run).splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def run_into_training(deployment: Deployment, **config: Any) -> int:
    """A run whose ClientApps have begun to train, for longer than the tests need."""
    run = deployment.run(ECHO, seconds=3.0, **config)
    for node in deployment.nodes:
        node.wait_for_log(f"train in run {run}", timeout=30)
    return run


@pytest.mark.long
def test_messages_reach_every_node_and_come_back(deployment: Deployment) -> None:
    run = deployment.run(ECHO, rounds=2)
    assert deployment.wait(run, timeout=60) == "finished:completed", deployment.log(run)
    replies = said(deployment, run, "reply")
    assert sorted(reply["first"] for reply in replies) == [2, 2, 4, 4]
    assert {reply["node"] for reply in replies} == {node.id for node in deployment.nodes}
    assert len({reply["pid"] for reply in replies}) == 4  # each message in a process of its own
    by_node = {reply["node"]: reply for reply in replies}
    first, second = (by_node[node.id] for node in deployment.nodes)
    assert json.loads(first["config"]) == {"partition-id": 0, "num-partitions": 2}
    assert json.loads(second["config"]) == {"partition-id": 1, "num-partitions": 2, "site": "a b=c"}
    assert (first["own"], second["own"]) == ("", "of node 1")
    assert second["cwd"] == str(deployment.nodes[1].folder)


@pytest.mark.long
def test_a_node_with_an_unknown_key_is_refused(deployment: Deployment) -> None:
    stranger = deployment.add_node("stranger", {"partition-id": 7})
    stranger.start()
    assert stranger.ended(timeout=30) == 1
    assert "[code: 2004] Failed to activate SuperNode" in stranger.log()
    assert "No SuperNode found with the given public key" in deployment.superlink.log()
    deployment.nodes.remove(stranger)


@pytest.mark.long
def test_a_config_that_the_app_does_not_have_is_refused(deployment: Deployment) -> None:
    with pytest.raises(RuntimeError, match="Invalid run configuration"):
        deployment.run(ECHO, round=2)


@pytest.mark.long
def test_a_node_is_killed_in_a_message_and_comes_back_with_its_key(deployment: Deployment) -> None:
    node = deployment.nodes[1]
    run = run_into_training(deployment, rounds=1)
    node.kill()
    assert not node.processes()
    assert deployment.wait(run, timeout=60) == "finished:completed", deployment.log(run)
    assert [error["code"] for error in said(deployment, run, "error")] == [NODE_UNAVAILABLE]
    assert [reply["node"] for reply in said(deployment, run, "reply")] == [deployment.nodes[0].id]
    node.wait_gone(timeout=30)
    known = set(deployment.known_nodes())
    node.start()
    node.wait_connected()
    assert set(deployment.known_nodes()) == known  # the same node, not one more


@pytest.mark.long
def test_a_stopped_run_stops(deployment: Deployment) -> None:
    run = run_into_training(deployment, rounds=9)
    server = deployment.server_process(run)
    deployment.stop(run)
    assert deployment.wait(run, timeout=30) == "finished:stopped"
    wait_until(lambda: server not in deployment.superlink.processes(), 30, "its end", deployment.superlink.log)
    for node in deployment.nodes:
        node.wait_idle(timeout=30)


@pytest.mark.long
def test_the_run_of_a_killed_server_app_fails(deployment: Deployment) -> None:
    run = run_into_training(deployment, rounds=9)
    server = deployment.server_process(run)
    deployment.kill_server(run)
    assert server not in deployment.superlink.processes()
    assert deployment.wait(run, timeout=60) == "finished:failed"


@pytest.mark.long
def test_a_restarted_superlink_knows_its_nodes(tmp_path: Path) -> None:
    with Deployment(tmp_path / "flower", nodes=1, database=True) as deployment:
        deployment.superlink.kill()
        deployment.start_superlink()
        run = deployment.run(ECHO, rounds=1, nodes=1)
        assert deployment.wait(run, timeout=90) == "finished:completed", deployment.log(run)


def test_a_wait_that_is_too_long_tells_the_end_of_the_log() -> None:
    with pytest.raises(TimeoutError, match=r"rain did not happen within 0.1 s; the log ends with\nsun"):
        wait_until(lambda: False, 0.1, "rain", lambda: "sun")


def test_node_configs_on_the_command_line() -> None:
    config: UserConfig = {"partition-id": 3, "rate": 0.5, "on": True, "site": 'a "b" = c\\d', "empty": ""}
    assert parse_config_args([as_text(config)]) == config
    with pytest.raises(ValueError, match="no ' in it"):
        as_text({"site": "it's"})
