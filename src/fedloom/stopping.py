"""Being told to stop: by Ctrl-C, by SIGTERM, by a time budget; and never in the middle of a write."""

import math
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedloom.errors import ConfigError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST = 3.2e8  # seconds: ten years
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
_last: int | None = None  # signal that ended something
_leaving = False  # one has come, and is being followed


class Terminated(KeyboardInterrupt):
    """A signal, as an exception: what is on its way is saved, as after Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM raise, once, unless somebody has made other arrangements for them: whatever comes after
    the first of them must not end what that one has begun to save.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = [number for number, handler in usual.items() if _hears_signals() and signal.getsignal(number) is handler]
    with _obeyed(*ours):
        yield


@contextmanager
def within(duration: str | None) -> Iterator[None]:
    """End whatever takes longer, as Ctrl-C would."""
    if duration is None:
        yield
        return
    seconds = seconds_of(duration)
    with _obeyed(signal.SIGALRM):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _obeyed(*numbers: signal.Signals) -> Iterator[None]:
    """The first of these signals raises."""
    global _leaving
    before = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _leaving = False


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals to stop wait until the block has ended."""
    if not _hears_signals():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = [number for number, handler in before.items() if callable(handler)]
    for number in ours:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
        if came:
            signal.raise_signal(came[0])


def heed() -> None:
    """Raise once more where a signal has come and its exception has not arrived: what is on its way between two places
    that call this may catch whatever it likes (PyTorch, say, clears those of guards that it calls).
    """
    if _leaving and _hears_signals():
        raise Terminated


def seconds_of(duration: str) -> float:
    """A number of seconds, or with units.

    >>> seconds_of("1h30m")
    5400.0
    """
    parts = re.findall(r"([\d.]+)\s*([smhd])", duration)
    try:
        if re.fullmatch(r"(\s*[\d.]+\s*[smhd])+\s*", duration):
            seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
        else:
            seconds = float(duration)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < LONGEST:
        raise ConfigError(f"time_budget must be seconds or a text such as '90m' or '1h30m', not {duration!r}")
    return seconds


def why() -> str:
    """What has stopped this process, in words."""
    said: dict[int | None, str] = {signal.SIGTERM: "terminated", signal.SIGALRM: "the time budget is used up"}
    return said.get(_last, "interrupted")


def _stop(number: int, frame: FrameType | None) -> None:
    global _last, _leaving
    if _leaving:
        return
    _last, _leaving = number, True
    raise Terminated


def _hears_signals() -> bool:
    """Python hands signals to the main thread only."""
    return threading.current_thread() is threading.main_thread()
