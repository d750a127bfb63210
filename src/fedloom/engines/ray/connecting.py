"""The way to a cluster: one that is there, or a local one that is started."""

import logging
import os
import signal
import subprocess  # nosec B404  # to ask whether a cluster answers
import sys
import threading
from typing import Any

from fedloom.errors import ConfigError, FedloomError, RunError

ANSWERS = 20.0  # seconds that a cluster has to say that it is there


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("engine=ray needs Ray, the extra `ray`: pip install 'fedloom[ray]'") from None
    return ray


def connect(ray: Any, address: str | None) -> bool:
    """Join the cluster, or start a local one: True where it was started here."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    handlers = _handlers()
    try:
        if address is None:
            cores = len(os.sched_getaffinity(0))
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
        else:
            check_address(address)
            ray.init(address=address, **quiet)
    except FedloomError:
        raise
    except Exception as error:  # Ray raises plain ones, too
        where = "no local Ray could be started" if address is None else f"no Ray cluster answers at {address}"
        raise RunError(f"{where}: {last_line(error)}") from None
    finally:
        for number, handler in handlers.items():  # Ray's own would end the process without saving anything
            signal.signal(number, handler)
    return True


def _handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


def check_address(address: str) -> None:
    """Ray itself tries for minutes. A process of its own can be given up."""
    said = f"ray_address={address!r}"
    if address == "auto" and (meant := os.environ.get("RAY_ADDRESS")):
        address, said = meant, f"RAY_ADDRESS={meant!r}"
    if address.startswith("ray://"):
        raise ConfigError(f"{said}: start the run on a node of the cluster, with the address 'auto' or host:port")
    if address in ("auto", "local"):
        return
    ask = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        asked = subprocess.run(ask, capture_output=True, timeout=ANSWERS, check=False)  # nosec B603  # no shell
        answered = asked.returncode == 0
    except subprocess.TimeoutExpired:
        answered = False
    if not answered:
        raise RunError(f"no Ray cluster answers at {address} within {ANSWERS:.0f} s; is the head node up?")


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
