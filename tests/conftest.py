"""Every test trains on one thread: small steps on several wait for each other."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# No deadline, unless a test sets its own: the first example may import, and others may use the machine.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)  # a submission is judged by the same examples
settings.load_profile("ci" if os.environ.get("CI") else "here")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for a network
os.environ.setdefault("FEDLOOM_CACHE", str(Path(__file__).parent.parent / ".data" / "cache"))


@pytest.fixture(autouse=True)
def _as_silent_as_before() -> Iterator[None]:
    """A command that a test runs in this process lets the log speak on stderr; the next test's says nothing."""
    log = logging.getLogger("fedloom")
    handlers, level = log.handlers, log.level
    yield
    log.handlers = handlers
    log.setLevel(level)
