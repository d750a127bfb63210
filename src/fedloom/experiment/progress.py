"""Progress on long work: a live bar in a terminal, a plain line every few seconds elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedloom.training import Callback, Event

SECONDS = 5.0


class Watch:
    """Shows how a number of rounds comes along. Hand `watch.callback(label)` to each run."""

    def __init__(self, total: int, console: Console) -> None:
        self.total = total
        self.done = 0
        self.console = console
        self.began = self.last = time.monotonic()
        self.bar: Progress | None = None

    def __enter__(self) -> "Watch":
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=self.console)
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total, note="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()

    def skip(self, rounds: int) -> None:
        """Rounds that were done before."""
        self.total -= rounds
        if self.bar:
            self.bar.update(self.task, total=self.total)

    def callback(self, label: str, metric: str) -> Callback:
        score = ""

        def show(event: Event) -> None:
            nonlocal score
            self.done += 1
            now = time.monotonic()
            rate = self.done / max(now - self.began, 1e-9)
            score = _score(event, metric) or score
            if self.bar:
                note = f"{score}  {rate:.1f} rounds/s"
                self.bar.update(self.task, completed=self.done, description=label, note=note)
            elif now - self.last >= SECONDS or self.done == self.total:
                self.last = now
                left = (self.total - self.done) / rate
                self.console.print(
                    f"{label}: round {event.round}/{event.rounds}  {score}  {rate:.1f} rounds/s  {left:.0f} s left",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )

        return show


def _score(event: Event, metric: str) -> str:
    value = event.metrics.get(f"test_{metric}")
    if value is not None:
        return f"{metric} {value:.4f}"
    return ""
