"""One watch for all open pages: each is told everything, then what changed."""

import asyncio
import json
import logging
import threading
import zipfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fedloom.data.catalogue import FACTS, find_dataset
from fedloom.experiment.folder import PARTITION, Run
from fedloom.report.labels import describe_labels
from fedloom.report.watch import Stopped, Watch, Watched

LOG = logging.getLogger("fedloom")
SECONDS = 1.0  # between two looks at the folder
HEARTBEAT = 15.0  # seconds; a page that went away is noticed by it at the latest
BEHIND = 100  # changes that a slow page may lag; then it is cut off, and its browser asks for everything again
LARGEST_PARTITION = 256 << 20  # bytes, unpacked


class Hub:
    """Looks at the folder, and tells the pages."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._lock = asyncio.Lock()  # a page's snapshot lies between two changes
        self._pages: set[asyncio.Queue[str | None]] = set()
        self._closed = False

    async def follow(self) -> None:
        """Look at the folder for as long as the server lives."""
        labels = asyncio.create_task(self._count_labels())
        try:
            while True:
                try:
                    async with self._lock:
                        change = await asyncio.to_thread(self._change)
                        if change is not None:
                            self._tell(change)
                except (OSError, MemoryError) as error:  # the next look may be luckier
                    LOG.warning("the folder can't be looked through: %s", error)
                await asyncio.sleep(SECONDS)
        except Stopped:
            pass
        finally:
            labels.cancel()

    def _change(self) -> str | None:
        change = self.watch.look()
        return None if change is None else _event("change", change)

    def _tell(self, event: str | None) -> None:
        for page in list(self._pages):
            behind = page.qsize() >= BEHIND
            if behind:
                self._pages.discard(page)
            page.put_nowait(None if behind else event)

    async def events(self) -> AsyncIterator[str]:
        """For one page: everything, then what changes."""
        page: asyncio.Queue[str | None] = asyncio.Queue()
        try:
            async with self._lock:
                everything = await asyncio.to_thread(lambda: _event("snapshot", self.watch.snapshot()))
                self._pages.add(page)
            yield everything
            while not self._closed:
                try:
                    event = await asyncio.wait_for(page.get(), HEARTBEAT)
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                if event is None:
                    return
                yield event
        finally:
            self._pages.discard(page)

    def close(self) -> None:
        """Let every page go."""
        self._closed = True
        self.watch.stopping.set()
        self._tell(None)

    async def _count_labels(self) -> None:
        """Setting by setting, in a thread that does not keep the server from ending: data may take long to read."""
        tried: set[str] = set()
        while True:
            await asyncio.sleep(SECONDS)
            async with self._lock:
                due = [run for run in self.watch.runs.values() if run.head["group"] not in tried]
            for run in due[:1]:
                tried.add(run.head["group"])
                table = await _in_daemon(partial(_labels, run))
                async with self._lock:
                    self.watch.labels = [*self.watch.labels, *table]
                    nothing: dict[str, Any] = {"new": [], "grown": [], "gone": []}
                    self._tell(_event("change", {**nothing, "labels": self.watch.labels}))


async def _in_daemon(work: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell(result: Any) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        result = work()
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=run, daemon=True).start()
    return await done


def _labels(run: Watched) -> list[dict[str, Any]]:
    """The labels of a run's clients, if they can be had from a published data set that lies here: what a folder says
    about other files is not trusted.
    """
    group, seed = run.head["group"], run.config.seed
    try:
        call = find_dataset(run.config.data)
        if FACTS[call.name].embedded and call.name != "digits":
            return [{"group": group, "seed": seed, "missing": "The live page counts labels of published data only."}]
        path = run.folder / PARTITION
        if path.is_symlink() or not path.is_file():
            return []
        with zipfile.ZipFile(path) as packed:
            if sum(member.file_size for member in packed.infolist()) > LARGEST_PARTITION:
                return [{"group": group, "seed": seed, "missing": f"{PARTITION} is too large to be drawn here."}]
        return describe_labels([Run(run.folder, replace(run.config, data_dir=None), [])])
    except Exception as error:  # nothing that a folder holds may end the server
        return [{"group": group, "seed": seed, "missing": f"The labels can't be counted: {str(error)[:200]}"}]


def _event(kind: str, told: Any) -> str:
    """As browsers read it; one that is cut off asks again after a second."""
    return f"retry: 1000\nevent: {kind}\ndata: {json.dumps(told, allow_nan=False, separators=(',', ':'))}\n\n"
