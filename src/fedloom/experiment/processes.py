"""Many runs at once on one machine, in processes of their own.

A run of a small model waits for its host most of the time: one core draws clients and batches while the GPU idles. Runs
side by side fill it, best under NVIDIA's MPS, which lets kernels of several processes run at the same time. A process
that is given several runs plays them in lockstep.
"""

import gc
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedloom.engines.choose import Wishes, bytes_of, device_memory
from fedloom.errors import ConfigError, FedloomError, RunError
from fedloom.experiment.config import RunConfig
from fedloom.experiment.run import Job, start_runs
from fedloom.result import Callback, Event
from fedloom.simulation import find_device
from fedloom.stopping import heed, terminable, undisturbed

LOG = logging.getLogger("fedloom")
MOST = 256  # processes
USED = 0.8  # of the device's memory; the rest is for the processes themselves
LEAVING = 30.0  # seconds that a process may take to end by itself


def check_processes(processes: int | None, config: RunConfig) -> None:
    """Refuse a number of processes that has no meaning."""
    if processes is None:
        return
    if not 1 <= processes <= MOST:
        raise ConfigError(f"processes must be between 1 and {MOST}, not {processes}")
    if Wishes(config.engine, ray_address=config.ray_address, actors=config.actors).on_ray:
        raise ConfigError(f"engine={config.engine} has workers of its own; leave out --processes")


class _Worker(NamedTuple):
    process: BaseProcess
    link: Connection


def side_by_side(
    groups: Sequence[Sequence[Job]],
    processes: int,
    *,
    resume: bool,
    refused: Callable[[Job], None] | None = None,
) -> dict[Path, FedloomError]:
    """Play every group of jobs, so many at a time, in their order; what went wrong, by the folders of those concerned.
    Callbacks hear of metrics only: the models are elsewhere; `refused` hears of jobs that can't begin.
    """
    waiting = list(range(len(groups)))
    problems: dict[Path, FedloomError] = {}
    at_work: dict[int, _Worker] = {}
    idle: list[_Worker] = []
    with terminable():
        try:
            while waiting or at_work:
                heed()
                while waiting and len(at_work) < processes:
                    worker = idle.pop() if idle else _hired(processes, resume)
                    at_work[waiting[0]] = worker
                    _send(worker, [job._replace(callbacks=()) for job in groups[waiting.pop(0)]])
                for place in _speaking(at_work):
                    error = _heard(groups[place], at_work[place], problems, refused)
                    if error is None:
                        continue
                    worker = at_work.pop(place)
                    if error is not DONE:
                        for job in groups[place]:
                            problems.setdefault(job.folder, error)
                        LOG.warning("%s%s", _label(groups[place]), error)
                    if worker.process.is_alive():
                        idle.append(worker)
        finally:
            with undisturbed():
                _dismiss(list(at_work.values()), idle)
    return problems


DONE = FedloomError("done")


def _speaking(at_work: dict[int, _Worker]) -> list[int]:
    ready = wait([worker.link for worker in at_work.values()])
    return [place for place, worker in at_work.items() if worker.link in ready]


def _heard(
    group: Sequence[Job], worker: _Worker, problems: dict[Path, FedloomError], refused: Callable[[Job], None] | None
) -> FedloomError | None:
    """What a worker has to say; an error, or that it is done, where that is the end of its runs. A run that was refused
    goes to the problems.
    """
    try:
        kind, said = worker.link.recv()
    except (EOFError, OSError):
        worker.process.join()
        return RunError(f"its process has died ({_how(worker.process.exitcode)}); the same command goes on")
    if kind == "ended":
        error: FedloomError = said or DONE
        return error
    if kind == "refused":
        place, why = said
        problems[group[place].folder] = why
        LOG.warning("%s%s", _label(group[place : place + 1]), why)
        if refused is not None:
            refused(group[place])
    elif kind == "said":
        level, text = said
        alone = len(group) == 1 and level >= logging.WARNING  # in a group each run names itself
        LOG.log(level, "%s%s", _label(group) if alone else "", text)
    else:
        place, rounds, metrics = said
        event = Event(metrics["round"], rounds, torch.empty(0), metrics, None)
        for callback in group[place].callbacks:
            callback(event)
    return None


def _how(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _label(group: Sequence[Job]) -> str:
    others = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return f"{group[0].config.method}, seed {group[0].config.seed}{others}: "


def _hired(processes: int, resume: bool) -> _Worker:
    spawning = multiprocessing.get_context("spawn")  # a fork of a process that has used a GPU can't use it
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_work, args=(theirs, processes, resume, torch.get_num_threads()))
    with _deaf():
        process.start()
    theirs.close()  # so that its death is heard
    return _Worker(process, ours)


@contextmanager
def _deaf() -> Iterator[None]:
    """What is started here does not hear Ctrl-C, which a terminal sends to all: it is told to stop by this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _send(worker: _Worker, what: Any) -> None:
    try:
        worker.link.send(what)
    except OSError:  # it has died; that is heard next
        return


def _dismiss(at_work: Sequence[_Worker], idle: Sequence[_Worker]) -> None:
    """Tell all to stop, and wait until what they have played is safe. What they say meanwhile is taken from them, so
    that nobody waits to be heard. Those who have nothing to do leave by themselves, so that nothing of theirs is left.
    """
    for worker in idle:
        worker.link.close()
    for worker in at_work:
        worker.process.terminate()
    for worker in at_work:
        while worker.process.is_alive():
            with suppress(EOFError, OSError):
                while worker.link.poll(0.1):
                    worker.link.recv()
            worker.process.join(0.1)
        worker.link.close()
    for worker in idle:
        worker.process.join(LEAVING)
        worker.process.terminate()
        worker.process.join()


class _Relay(logging.Handler):
    """What a worker has to say goes to whoever sent it to work."""

    def __init__(self, link: Connection) -> None:
        super().__init__()
        self.link = link

    def emit(self, record: logging.LogRecord) -> None:
        self.link.send(("said", (record.levelno, record.getMessage())))


def _work(link: Connection, processes: int, resume: bool, threads: int) -> None:
    """What a worker does: one group of runs after the other, with its share of cores and memory."""
    torch.set_num_threads(max(1, threads // processes))
    log = logging.getLogger("fedloom")
    log.handlers, log.propagate = [_Relay(link)], False
    log.setLevel(logging.INFO)
    while True:
        try:
            asked = link.recv()
        except EOFError:  # whoever sent it to work is no more
            return
        error = None
        try:
            jobs = [job._replace(callbacks=[_telling(link, i)]) for i, job in enumerate(asked)]
            _play(jobs, processes, resume, lambda i, why: link.send(("refused", (i, why))))
        except FedloomError as found:
            error = found
        except (KeyboardInterrupt, ConnectionError):  # told to stop, or left alone: what was played is saved
            return
        link.send(("ended", error))


def _telling(link: Connection, place: int) -> Callback:
    return lambda event: link.send(("round", (place, event.rounds, dict(event.metrics))))


def _play(jobs: Sequence[Job], processes: int, resume: bool, refused: Callable[[int, FedloomError], None]) -> None:
    first = jobs[0].config
    device = find_device(first.device)
    if first.max_memory is None:
        share = int(device_memory(device) * USED) // processes
        jobs = [job._replace(config=replace(job.config, max_memory=share)) for job in jobs]
    room = Wishes(max_memory=bytes_of(jobs[0].config.max_memory)).room(device)
    room.host //= processes
    start_runs(jobs, resume=resume, room=room, refused=refused)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next run of another process may need it
