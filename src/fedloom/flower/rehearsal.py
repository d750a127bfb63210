"""`fedloom flower simulate`: a Flower app, its server and its clients, in this process and without a network.

The app is loaded as Flower loads it: by the components and the config of its pyproject.toml. What is otherwise here:
clients are asked one after the other, in this process, so that globals of the app's modules live from message to
message and nothing ever comes too late; nodes neither leave nor come back; nothing is encrypted, and nobody's key is
asked for. A setting called `folder` is replaced by a temporary folder, and so is `memory` of the nodes' configs.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict

from fedloom.errors import ConfigError, FedloomError, RunError
from fedloom.experiment.folder import CONFIG, load_run
from fedloom.flower.foreign import Manifest, load_apps, place, read_settings
from fedloom.flower.grid import LocalGrid

LOG = logging.getLogger("fedloom")
ENROL_TIMEOUT = 0.1  # seconds: who does not answer at once never will
ROUNDS = ("rounds", "num-server-rounds")  # ours, and that of Flower's own apps
Value = bool | float | int | str


@dataclass(frozen=True)
class Rehearsed:
    """What came of it."""

    nodes: int
    messages: int
    seconds: float
    folder: Path | None  # of the run, where it is kept
    last: Mapping[str, Any]  # its last round; empty where the app writes no run

    def __str__(self) -> str:
        scores = [name for name in self.last if name.startswith(("test_", "clients_", "validation_"))] or ["train_loss"]
        shown = [f"{name} {self.last[name]:.4f}" for name in scores if isinstance(self.last.get(name), float)]
        begin = f"round {self.last['round']}: {', '.join(shown) or 'diverged'}" if self.last else "the app has ended"
        kept = f"; the run is in {self.folder}" if self.folder else "; nothing was kept (--out keeps a run)"
        counts = f"{self.nodes} nodes, {self.messages} messages, {self.seconds:.1f} s"
        return f"{begin}; {counts}{kept if self.last else ''}"


def rehearse(
    app: Path,
    *,
    nodes: int | None = None,
    rounds: int | None = None,
    changes: Sequence[str] = (),
    node_configs: Sequence[str] = (),
    out: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Rehearsed:
    """Run an app's server over so many nodes. `changes` are settings as `flwr run --run-config` takes them,
    `node_configs` what each node is told as `flower-supernode --node-config` tells it; `tell` hears of every message.
    """
    manifest = Manifest.read(app)
    config, asked = _config(manifest, rounds, changes)
    told = [read_settings([text], "--node-config") for text in node_configs]
    count = _count(nodes, config, len(told))
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists already; choose another --out")
    began = time.monotonic()
    with ExitStack() as opened:
        where = out or Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="fedloom-rehearsal-")))
        if "folder" in config and "folder" not in asked:
            config["folder"] = str(where.resolve() / "run")
        if "enrol-timeout" in config and "enrol-timeout" not in asked:
            config["enrol-timeout"] = ENROL_TIMEOUT
        server, client = opened.enter_context(load_apps(manifest))
        counted = _Counted(client, count, manifest.folder, tell)

        def node_config(number: int) -> Mapping[str, Value]:
            return {"memory": str(where.resolve() / "memory" / str(number)), **(told[number] if told else {})}

        grid = LocalGrid.of_app(counted, count, node_config, config)  # type: ignore[arg-type]
        try:
            _serve(manifest, server, grid, Context(1, 0, {}, RecordDict(), dict(config)))
        except RunError:
            counted.check()  # where a client failed says more than what the server made of it
            raise
        counted.check()
        folder = Path(str(config["folder"])) if "folder" in config else None
        last = _last_round(folder)
        kept = folder if last and (out is not None or "folder" in asked) else None
        return Rehearsed(count, counted.messages, time.monotonic() - began, kept, last)


def _config(manifest: Manifest, rounds: int | None, changes: Sequence[str]) -> tuple[dict[str, Value], set[str]]:
    """The app's settings with the changes in them, and which were asked for."""
    asked = dict(read_settings(changes, "the settings"))
    if rounds is not None:
        name = next((name for name in ROUNDS if name in manifest.config), None)
        if name is None:
            raise ConfigError(f"--rounds: the app has no setting called {' or '.join(ROUNDS)}")
        asked[name] = rounds
    for name in asked:
        manifest.check_known(name)
    return {**manifest.config, **asked}, set(asked)


def _count(nodes: int | None, config: Mapping[str, Value], told: int) -> int:
    """How many nodes there are: those asked for, those told of, or as many clients as the app waits for."""
    if told and nodes not in (None, told):
        raise ConfigError(f"--nodes {nodes} and --node-config {told} times: say one --node-config for each node")
    count = nodes or told or config.get("clients")
    if type(count) is not int or count < 1:
        raise ConfigError("how many nodes? The app has no setting `clients` that is a count: say --nodes 3")
    return count


def _last_round(folder: Path | None) -> Mapping[str, Any]:
    if folder is None or not (folder / CONFIG).is_file():
        return {}
    history = load_run(folder).history
    return history[-1] if history else {}


class _Counted:
    """A client's app, how often it was asked, and where it failed."""

    def __init__(self, app: Callable[..., Message], nodes: int, folder: Path, tell: Callable[[str], None]) -> None:
        self.app, self.nodes, self.folder, self.tell = app, nodes, folder, tell
        self.messages = 0
        self.failures: list[str] = []

    def __call__(self, message: Message, context: Context) -> Message:
        self.messages += 1
        number = context.node_config.get("partition-id", 0)
        self.tell(f"message {self.messages}: {message.metadata.message_type} at node {number} of {self.nodes}")
        try:
            return self.app(message, context)
        except Exception as error:
            self.failures.append(place(error, self.folder))
            raise

    def check(self) -> None:
        """A server may get along without clients that fail; a rehearsal is there to find them."""
        if self.failures:
            times = f"{len(self.failures)} of {self.messages} messages"
            raise RunError(f"the ClientApp failed at {times}, first{self.failures[0]}")


def _serve(manifest: Manifest, server: Callable[[LocalGrid, Context], None], grid: LocalGrid, context: Context) -> None:
    """Let the server's app run to its end; whatever ends it earlier is told in one sentence, with its place."""
    with _spoken(manifest.folder) as spoken:
        try:
            server(grid, context)
            spoken.release()
        except SystemExit as end:
            if end.code not in (None, 0):
                why = spoken.error or f"it ended with {end.code!r}"
                raise RunError(why) from None
        except (FedloomError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise RunError(f"the ServerApp failed{place(error, manifest.folder)}") from error


class _Spoken(logging.Handler):
    """What the apps have to say stands on the standard output, as in `flwr log`; an error waits: it may be why the
    server's app ends.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.error = folder, ""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and isinstance(record.exc_info[1], Exception):
            text += place(record.exc_info[1], self.folder)
        self.release()
        if record.levelno >= logging.ERROR:
            self.error = text
        else:
            _say(text)

    def release(self) -> None:
        """An error that ended nothing is said like all else."""
        if self.error:
            _say(self.error)
        self.error = ""


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextmanager
def _spoken(folder: Path) -> Iterator[_Spoken]:
    before, level = LOG.handlers, LOG.level
    spoken = _Spoken(folder)
    LOG.handlers = [spoken]
    LOG.setLevel(logging.INFO)
    try:
        yield spoken
    finally:
        LOG.handlers = before
        LOG.setLevel(level)
