"""Progress on long work: a live bar in a terminal, elsewhere a line every few seconds, on long runs more rarely."""

import sys
import time
from types import TracebackType
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedloom.result import Callback, Event

SECONDS = 5.0  # from a line to the next, at first
SHARE = 1 / 30  # of the time so far, later: a day is told in some hundred lines


class Watch:
    """Shows how a number of rounds comes along. Hand `watch.callback(label, metric, rounds)` to each run. Where their
    rounds differ in length, as those of several methods do, `works` are counted instead.
    """

    def __init__(self, total: float, console: Console, unit: Literal["rounds", "works"] = "rounds") -> None:
        self.total = float(total)
        self.done = 0.0
        self.unit = unit
        self.console = console
        self.began: float | None = None  # when the first round was done: before it, data are loaded and steps compiled
        self.before = 0.0  # what was done until then
        self.start = self.last = time.monotonic()
        self.bar: Progress | None = None

    def __enter__(self) -> "Watch":
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                TimeRemainingColumn(),
            )
            # what a callback prints appears above the bar, unless it goes elsewhere
            above = sys.stdout is not None and sys.stdout.isatty()
            self.bar = Progress(*columns, console=self.console, redirect_stdout=above)
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total, note="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()

    def skip(self, done: float) -> None:
        """What was done before, or need not be done."""
        self.total -= done
        if self.bar:
            self.bar.update(self.task, total=self.total)

    def callback(self, label: str, metric: str, planned: float) -> Callback:
        """For a run of so many rounds, or works, in all."""
        score, seen = "", 0.0

        def show(event: Event) -> None:
            nonlocal score, seen
            here = float(event.round if self.unit == "rounds" else event.metrics["works"])
            if not seen:  # a run that goes on has rounds behind it
                seen = here * (event.round - 1) / event.round
                self.skip(seen)
            self.done, seen = self.done + here - seen, here
            if event.round == event.rounds and here < planned - 1e-6:  # it ended early
                self.skip(planned - here)
            now = time.monotonic()
            score = _score(event, metric) or score
            rate = self._rate(now)
            if self.bar:
                note = score + (f"  {rate:.1f} {self.unit}/s" if rate else "")
                self.bar.update(self.task, completed=self.done, description=label, note=note)
            elif now - self.last >= max(SECONDS, SHARE * (now - self.start)) or self.done >= self.total - 1e-6:
                self.last = now
                told = (
                    f"  {rate:.1f} {self.unit}/s  {max(0.0, self.total - self.done) / rate:.0f} s left" if rate else ""
                )
                self.console.print(
                    f"{label}: round {event.round}/{event.rounds}  {score}{told}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )

        return show

    def _rate(self, now: float) -> float:
        """Rounds or works per second; 0 as long as nobody knows."""
        if self.began is None:
            self.began, self.before = now, self.done
        passed = now - self.began
        return (self.done - self.before) / passed if passed >= 1 else 0.0


def _score(event: Event, metric: str) -> str:
    value = event.metrics.get(f"test_{metric}")
    if value is not None:
        return f"{metric} {value:.4f}"
    return ""
