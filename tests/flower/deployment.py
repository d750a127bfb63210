"""A whole Flower deployment on this machine: SuperLink, SuperNodes and their apps as processes, with TLS and node keys.

with Deployment(tmp_path, nodes=2) as deployment:
    run = deployment.run(app_folder, rounds=3)
    assert deployment.wait(run, timeout=60) == "finished:completed", deployment.log(run)
"""

import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from flwr.app.user_config import UserConfig, UserConfigValue
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

import fedloom
from tests.flower.control import connect
from tests.flower.credentials import write_certificates, write_node_key
from tests.flower.launch import HEARTBEAT, LONGEST_SLEEP
from tests.flower.processes import Process, kill, wait_until, write_commands

SOURCE = str(Path(fedloom.__file__).parent.parent)


class Deployment:
    """One SuperLink and its SuperNodes; everything they write is in `folder`, and none of them outlives the `with`."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        *,
        node_configs: Mapping[int, UserConfig] | None = None,  # node -> what its config has besides the partition
        environment: Mapping[str, str] | None = None,  # of all processes
        heartbeat: int | None = None,  # seconds; Flower's own is 30, and a dead node is noticed after two of them
        sleep: float | None = 0.1,  # a SuperNode's between two questions for work; None: Flower's own, 3 seconds
        database: bool = False,  # the SuperLink remembers nodes and runs when it is killed; a round takes 1 s longer
    ) -> None:
        self.folder = folder.resolve()
        self.address = f"127.0.0.1:{free_port()}"
        self.environment = self._environment(environment or {}, heartbeat, sleep)
        self.superlink = Process(self.folder / "superlink", "flower-superlink", self.environment)
        self.database = ["--database", str(self.superlink.folder / "state.db")] if database else []
        self._control: ControlHttpClient | None = None
        self._server_processes: dict[int, int] = {}  # run -> process id
        self.nodes: list[Node] = []
        for number in range(nodes):
            config = {"partition-id": number, "num-partitions": nodes, **(node_configs or {}).get(number, {})}
            self.nodes.append(Node(self, f"node-{number}", config))

    def _environment(self, more: Mapping[str, str], heartbeat: int | None, sleep: float | None) -> dict[str, str]:
        commands = self.folder / "commands"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FLWR_")},
            "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": SOURCE,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            **more,
        }
        if heartbeat is not None:
            environment[HEARTBEAT] = str(heartbeat)
        if sleep is not None:
            environment[LONGEST_SLEEP] = str(sleep)
            environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = str(sleep)
        return environment

    def __enter__(self) -> Self:
        try:
            (self.folder / "commands").mkdir(parents=True)
            write_commands(self.folder / "commands")
            write_certificates(self.folder)
            self.start_superlink()
            for node in self.nodes:
                node.register()
                node.start()
            for node in self.nodes:
                node.wait_connected()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is left running, whatever happened before."""
        with contextlib.ExitStack() as each:  # also when one of them fails
            for process in (self.superlink, *self.nodes):
                each.callback(process.kill)
            if self._control is not None:
                each.callback(self._control.close)

    def start_superlink(self, timeout: float = 60) -> None:
        """Also after `superlink.kill()`, where it has a database."""
        certificates = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        host, port = self.address.split(":")
        self.superlink.launch(
            *(str(self.folder / word) if "." in word else word for word in certificates),
            *("--host", host, "--port", port, *self.database),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        )
        wait_until(self._answers, timeout, "an answer of the SuperLink", self.superlink.log)

    def _answers(self) -> bool:
        try:
            self.control.ListNodes(ListNodesRequest())
        except httpx.TransportError:
            return False
        return True

    @property
    def control(self) -> ControlHttpClient:
        """What the command `flwr` talks through."""
        if not self.superlink.alive:
            raise RuntimeError(f"the SuperLink does not run; its log ends with\n{self.superlink.log()[-3000:]}")
        if self._control is None:
            self._control = connect(self.address, self.folder / "ca.crt")
        return self._control

    def add_node(self, name: str, config: UserConfig) -> "Node":
        """One more, neither registered nor started."""
        node = Node(self, name, config)
        self.nodes.append(node)
        return node

    def known_nodes(self) -> dict[int, NodeInfo]:
        """What the SuperLink says of the nodes: node id -> status ("registered", "online", "offline") and more."""
        return {node.node_id: node for node in self.control.ListNodes(ListNodesRequest()).nodes_info}

    def run(self, app: Path, **config: UserConfigValue) -> int:
        """Start a run of the app in this folder, with these changes to its config, and don't wait for it."""
        content = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(config))
        try:
            return self.control.StartRun(request).run_id
        except httpx.HTTPStatusError as error:
            raise RuntimeError(f"the SuperLink refuses the run: {error.response.text}") from error

    def status(self, run: int) -> str:
        """As "running" or "finished:completed"."""
        status = self.control.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
        return f"{status.status}:{status.sub_status}" if status.sub_status else status.status

    def wait(self, run: int, timeout: float) -> str:
        """Wait until the run has ended, one way or another; its status."""
        self._wait(lambda: self.status(run).startswith("finished"), timeout, f"the end of run {run}", run)
        return self.status(run)

    def wait_for_log(self, run: int, text: str, timeout: float) -> None:
        """Wait until the ServerApp has said this."""
        self._wait(lambda: text in self.log(run), timeout, f"the log line {text!r}", run)

    def _wait(self, happened: Callable[[], bool], timeout: float, what: str, run: int) -> None:
        """An answer takes the SuperLink 10 ms, which it needs for the run."""
        wait_until(happened, timeout, what, lambda: self.log(run), every=0.25)

    def log(self, run: int) -> str:
        """What the ServerApp has logged and printed so far."""
        said: list[str] = []
        ended = self.status(run).startswith("finished")
        try:
            for part in self.control.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=0.0)):
                said.append(part.log_output)
                if not ended:  # all so far comes in one part, and then the stream waits for more
                    break
        except httpx.ReadTimeout:
            pass
        return "".join(said)

    def stop(self, run: int) -> None:
        self.control.StopRun(StopRunRequest(run_id=run))

    def server_process(self, run: int, timeout: float = 30) -> int:
        """The process id of the run's ServerApp, as soon as it is there; ask for one run before you start the next."""
        others = {pid for known, pid in self._server_processes.items() if known != run}

        def found() -> list[int]:
            return [pid for pid in self.superlink.processes("flwr-serverapp") if pid not in others]

        wait_until(lambda: len(found()) == 1, timeout, f"the start of one ServerApp, of run {run}", self.superlink.log)
        self._server_processes[run] = found()[0]
        return self._server_processes[run]

    def kill_server(self, run: int) -> None:
        """SIGKILL its ServerApp."""
        pid = self.server_process(run)
        kill(pid)
        wait_until(lambda: pid not in self.superlink.processes(), 10, f"the end of process {pid}", self.superlink.log)


class Node(Process):
    """A SuperNode: `start`, `kill`, `stop`, and `start` again with the same key."""

    def __init__(self, deployment: Deployment, name: str, config: UserConfig) -> None:
        super().__init__(deployment.folder / name, "flower-supernode", deployment.environment)
        self.deployment, self.config = deployment, config
        self.key = self.folder / "key"
        self.public_key = write_node_key(self.key)
        self.id: int | None = None  # until it is registered

    def register(self) -> None:
        """The SuperLink lets in only nodes that it knows."""
        self.id = self.deployment.control.RegisterNode(RegisterNodeRequest(public_key=self.public_key)).node_id

    def start(self, **environment: str) -> None:
        """Start it and don't wait; the variables are for this node and its ClientApps, from now on.

        What they should have from the beginning goes into `environment`, before the deployment starts.
        """
        self.environment |= environment
        host, port = "127.0.0.1", str(free_port())  # where its ClientApps reach it
        self.launch(
            *("--root-certificates", str(self.deployment.folder / "ca.crt"), "--superlink", self.deployment.address),
            *("--host", host, "--port", port, "--auth-supernode-private-key", str(self.key)),
            *("--node-config", as_text(self.config)),
        )

    @property
    def connected(self) -> bool:
        if not self.alive:
            raise RuntimeError(f"{self.folder.name} has ended; its log ends with\n{self.log()[-3000:]}")
        return self.id is not None and self.deployment.known_nodes()[self.id].status == "online"

    def wait_connected(self, timeout: float = 60) -> None:
        """Mind that a node that was killed stays "online" for two heartbeats: wait for `wait_gone` before `start`."""
        wait_until(lambda: self.connected, timeout, f"the connection of {self.folder.name}", self.log)

    def wait_gone(self, timeout: float) -> None:
        """Until the SuperLink has noticed that the node is down; before that it lets none with the same key in."""
        wait_until(
            lambda: self.id is not None and self.deployment.known_nodes()[self.id].status != "online",
            timeout,
            f"the end of {self.folder.name} for the SuperLink",
            self.log,
        )

    def client_processes(self) -> list[int]:
        """The ClientApps that run now."""
        return list(self.processes("flwr-clientapp"))

    def wait_idle(self, timeout: float) -> None:
        """Until no ClientApp runs here."""
        wait_until(lambda: not self.client_processes(), timeout, f"the last ClientApp of {self.folder.name}", self.log)

    def wait_for_log(self, text: str, timeout: float) -> None:
        """Wait until the SuperNode or one of its ClientApps has said this."""
        wait_until(lambda: text in self.log(), timeout, f"{text!r} in the log of {self.folder.name}", self.log)


def as_text(config: UserConfig) -> str:
    """A node's config as `--node-config` reads it: TOML values, joined by spaces."""
    words = []
    for key, value in config.items():
        if isinstance(value, bool):
            text = str(value).lower()
        elif isinstance(value, str):
            if "'" in value or "\n" in value:
                raise ValueError(f"the node config {key}={value!r} can't be written on a command line: no ' in it")
            text = f"'{value}'"
        else:
            text = str(value)
        words.append(f"{key}={text}")
    return " ".join(words)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
