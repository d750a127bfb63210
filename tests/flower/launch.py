"""One process of Flower, under its own command line; it waits less than Flower does where it is told to.

    python launch.py flower-supernode --superlink ...

Flower has no setting for how long a SuperNode sleeps before it asks for work (3 s), nor for its heartbeat (30 s, and
dead after 60): a test of ten messages would sleep for a minute. Nothing else of Flower is changed.
"""

import ctypes
import os
import signal
import sys
import time
from importlib.metadata import distribution
from types import SimpleNamespace

LONGEST_SLEEP = "FEDLOOM_TEST_FLOWER_SLEEP"  # seconds that a SuperNode sleeps at most between two questions
HEARTBEAT = "FEDLOOM_TEST_FLOWER_HEARTBEAT"  # seconds; a node or an app is dead after two of them
PARENT = "FEDLOOM_TEST_FLOWER_PARENT"  # the process that started the deployment


def main() -> None:
    command = sys.argv[1]
    if command in ("flower-superlink", "flower-supernode"):
        die_with_parent()
    shorten_heartbeat(os.environ.get(HEARTBEAT))
    (script,) = distribution("flwr").entry_points.select(group="console_scripts", name=command)
    start = script.load()
    if command == "flower-supernode":
        shorten_sleep(os.environ.get(LONGEST_SLEEP))
    sys.argv = [command, *sys.argv[2:]]
    start()


def die_with_parent() -> None:
    """A test run that is killed takes its deployment with it; what these two have started looks after its parent.

    Linux means the thread that started us, so that a test must not start a deployment from a short-lived one.
    """
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):  # it died before we asked
        sys.exit(1)


def shorten_heartbeat(seconds: str | None) -> None:
    """Before anything else of Flower copies these constants; every process of a deployment must have the same."""
    if seconds is None:
        return
    import flwr.common.constant as constant

    constant.HEARTBEAT_DEFAULT_INTERVAL = int(seconds)
    constant.HEARTBEAT_MIN_INTERVAL = int(seconds)
    constant.HEARTBEAT_CALL_TIMEOUT = 1


def shorten_sleep(seconds: str | None) -> None:
    if seconds is None:
        return
    import flwr.supernode.start_client_internal as loop

    longest = float(seconds)
    vars(loop)["time"] = SimpleNamespace(sleep=lambda wanted: time.sleep(min(wanted, longest)))


if __name__ == "__main__":
    main()
