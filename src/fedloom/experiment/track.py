"""Trackers: callbacks that hand every round's numbers to TensorBoard, MLflow or Weights & Biases.

    with fl.track.TensorBoard("runs/mine") as tracker:
        fl.fit(model, federation, callbacks=[tracker])

All log the same numbers, those of `flat`, with the round as the step, into files below the run's folder. Nothing is
sent anywhere unless the environment says so (MLFLOW_TRACKING_URI, WANDB_MODE). A tracker that fails says so once and is
left behind: it never ends a run.
"""

import logging
import math
import os
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from fedloom.errors import ConfigError, nearest
from fedloom.local import plain
from fedloom.result import Event
from fedloom.untrusted import is_plain, read_bytes

LOG = logging.getLogger("fedloom")
PROJECT = "fedloom"
AT_ONCE = 1000  # metrics that MLflow takes in one call
PARAMETERS_AT_ONCE = 100
RUN_ID = "run_id"  # in a tracker's folder: which of its runs to continue


def flat(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A round's line as plain numbers: lists become name/0, name/1; whatever is no finite number is left out.

    >>> flat({"round": 1, "gsi": [0.5, None, 2.0], "note": "x", "test_loss": float("nan")})
    {'round': 1.0, 'gsi/0': 0.5, 'gsi/2': 2.0}
    """
    found: dict[str, float] = {}
    for name, given in metrics.items():
        value = plain(given)
        if isinstance(value, list | tuple):
            found |= flat({f"{name}/{i}": item for i, item in enumerate(value)})
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[re.sub(r"[^\w./ :-]", "_", name)] = float(value)
    return found


class Tracker(ABC):
    """A callback for one run. It opens with the first round that it sees, and closes after the last one planned, or
    where its `with` block ends. With `resume` it goes on with what was tracked in the folder before.
    """

    name: ClassVar[str]
    package: ClassVar[str]

    def __init__(
        self, folder: str | Path, config: Mapping[str, Any] | None = None, *, title: str = "", resume: bool = False
    ) -> None:
        if find_spec(self.package) is None:
            raise ConfigError(f"tracking with {self.name} needs {self.package}: pip install 'fedloom[track]'")
        self.folder = Path(folder)
        self.config = dict(config or {})
        self.title = title or self.folder.name
        self.resume = resume
        self.opened = self.failed = False

    def __call__(self, event: Event) -> None:
        if self.failed:
            return
        try:
            if not self.opened:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._open(event.round)
                self.opened = True
            self._log(event.round, flat(event.metrics))
        except Exception as error:  # a server, a disk, a package: whatever it is, the run goes on
            self._give_up(error)
        if event.round == event.rounds:
            self.close()

    def close(self, whole: bool = True) -> None:
        """End the tracker's run; not `whole`: it was interrupted."""
        if not self.opened or self.failed:
            return
        self.opened = False
        try:
            self._close(whole)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        reason = " ".join(str(error).split())[:200]
        LOG.warning("%s is left out from here on, the run goes on: %s", self.name, reason or type(error).__name__)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(whole=kind is None)

    def _run_id(self, place: Path) -> tuple[str, bool]:
        """The run to go on with, or a new name for one; and whether it is an old one."""
        path = place / RUN_ID
        if self.resume and is_plain(path):
            found = read_bytes(path, 1 << 10).decode(errors="replace").strip()
            if re.fullmatch("[0-9a-f]{32}", found):  # it becomes part of names and addresses
                return found, True
        return uuid.uuid4().hex, False

    def _keep_id(self, place: Path, found: str) -> None:
        place.mkdir(parents=True, exist_ok=True)
        (place / RUN_ID).write_text(found)

    @abstractmethod
    def _open(self, first: int) -> None:
        """Begin or go on; `first` is the round that comes first."""

    @abstractmethod
    def _log(self, step: int, numbers: dict[str, float]) -> None: ...

    @abstractmethod
    def _close(self, whole: bool) -> None: ...


class TensorBoard(Tracker):
    """Event files in FOLDER/tensorboard."""

    name, package = "TensorBoard", "tensorboard"

    def _open(self, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        place = self.folder / "tensorboard"
        known = self.resume and place.is_dir()
        # Rounds that were logged after the last checkpoint are played again: readers drop what comes after.
        self.writer = SummaryWriter(str(place), purge_step=first if known else None)
        if self.config and not known:
            settings = {name: _shown(value) for name, value in self.config.items()}
            for part in hparams(settings, {}):  # type: ignore[no-untyped-call]
                self.writer._get_file_writer().add_summary(part)  # type: ignore[no-untyped-call]

    def _log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def _close(self, whole: bool) -> None:
        self.writer.close()


class MLflow(Tracker):
    """A run in FOLDER/mlruns/mlflow.db (MLflow has given up its plain files), or where MLFLOW_TRACKING_URI says."""

    name, package = "MLflow", "mlflow"

    def _open(self, first: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would send usage data when it is imported
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # for minutes, if it were left to itself
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for chatty in ("mlflow.store.db.utils", "alembic"):  # they tell of every table
            logging.getLogger(chatty).setLevel(logging.WARNING)
        place = (self.folder / "mlruns").resolve()
        place.mkdir(parents=True, exist_ok=True)
        elsewhere = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(elsewhere or f"sqlite:///{place / 'mlflow.db'}")
        self.run, known = self._run_id(place)
        self.done = 0  # rounds that were logged before
        if known:
            self.client.update_run(self.run, status="RUNNING")
            self.done = max((m.step for m in self.client.get_metric_history(self.run, "round")), default=0)
            return
        experiment = self.client.get_experiment_by_name(PROJECT)
        files = None if elsewhere else (place / "artifacts").as_uri()
        where = experiment.experiment_id if experiment else self.client.create_experiment(PROJECT, files)
        self.run = self.client.create_run(where, run_name=self.title).info.run_id
        self._keep_id(place, self.run)
        parameters = [Param(name, str(value)) for name, value in self.config.items()]
        for i in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self.client.log_batch(self.run, params=parameters[i : i + PARAMETERS_AT_ONCE])

    def _log(self, step: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        if step <= self.done:  # played again after a checkpoint
            return
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        for i in range(0, len(metrics), AT_ONCE):
            self.client.log_batch(self.run, metrics=metrics[i : i + AT_ONCE])

    def _close(self, whole: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if whole else "KILLED")


class Wandb(Tracker):
    """A run in FOLDER/wandb, offline (`wandb sync` sends it) unless WANDB_MODE says otherwise."""

    name, package = "Weights & Biases", "wandb"

    def _open(self, first: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        place = self.folder / "wandb"
        found, known = self._run_id(place)
        self._keep_id(place, found)
        self.run = wandb.init(
            project=PROJECT,
            dir=str(self.folder),
            id=found,
            name=self.title,
            config=self.config,
            resume="allow" if known else None,
            mode=None if os.environ.get("WANDB_MODE") else "offline",
            reinit="create_new",  # runs in lockstep have one each
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def _log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def _close(self, whole: bool) -> None:
        self.run.finish(exit_code=0 if whole else 1)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": Wandb}


def read_trackers(text: str | None) -> list[str]:
    """The names in `tensorboard,mlflow`, checked, and the packages that they need."""
    names = [name.strip().lower() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}: {nearest(name, TRACKERS)}")
        TRACKERS[name](".")
    return list(dict.fromkeys(names))


@contextmanager
def tracked(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], *, title: str = "", resume: bool = False
) -> Iterator[list[Tracker]]:
    """Trackers of one run, closed in the end."""
    with ExitStack() as opened:
        yield [opened.enter_context(TRACKERS[n](folder, config, title=title, resume=resume)) for n in names]


def _shown(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
