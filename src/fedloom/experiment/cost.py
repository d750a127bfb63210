"""How long will a run take here? Measured: a few local steps and one batch of the test, once for each kind of run."""

import hashlib
import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from fedloom.data.files import Files
from fedloom.data.split import FOLDS
from fedloom.diagnosis import named
from fedloom.diagnostics import SNAPSHOTS
from fedloom.engines.loop import Loop
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import write_text
from fedloom.experiment.run import load_data
from fedloom.federation import Holdout
from fedloom.method import Method
from fedloom.models import model as make_model
from fedloom.round import probe
from fedloom.simulation import cohort_size, find_device
from fedloom.training import Training
from fedloom.untrusted import read_bytes

ENOUGH = 0.3  # seconds
TESTED = 256  # samples of the test
MOST = 50  # clients of a cohort
LONGEST = 1 << 16  # bytes of what is kept


@dataclass(frozen=True)
class Speed:
    """What one kind of run costs on this machine, and how much data there are."""

    sample: float  # seconds of training per sample
    tested: float  # seconds of evaluation per sample
    train: int  # samples
    test: int
    clients: int  # of the data's own, or as many as were asked for


def seconds_for(config: RunConfig) -> float:
    """Estimated seconds of a run, without loading its data and compiling; `config.rounds` counts its aggregations."""
    speed, local = speed_of(config), config.local
    everybody = (config.clients or speed.clients) + config.validation
    total = speed.train + (speed.test if config.pooled else 0)
    training = everybody - config.validation if config.fold is None else everybody * (FOLDS - 2) // FOLDS
    per_round = cohort_size(config.per_round, max(1, training))
    mean = total / everybody
    seen = local.epochs * mean if local.steps is None else local.steps * (local.batch_size or mean)
    schedule = Method(config.method).pipeline().schedule.stage
    works = config.rounds * schedule.works(per_round)
    diagnostics = named(config.diagnose)
    trained = works * per_round * (2 if "twin" in diagnostics else 1)
    trained += config.rounds * training if "probe" in diagnostics else 0
    held_out = total * 2 / FOLDS if config.fold is not None else (not config.pooled) * speed.test
    looks = min(config.rounds, math.ceil(config.rounds / config.eval_every) + config.eval_last - 1)
    tested = looks * held_out * (schedule.works(per_round) if config.eval_between and schedule.travels else 1)
    tested += min(SNAPSHOTS, config.rounds) * total if "fairness" in diagnostics else 0
    return trained * seen * speed.sample + tested * speed.tested


def clients_of(config: RunConfig) -> int:
    """How many clients train."""
    everybody = (config.clients or speed_of(config).clients) + config.validation
    return everybody - config.validation if config.fold is None else max(1, everybody * (FOLDS - 2) // FOLDS)


@lru_cache(maxsize=1000)
def _measured(key: str, config: RunConfig) -> Speed:
    path = Files.of(config.data_dir).cache / "cost" / f"{key}.json"
    known = _read(path)
    if known is not None:
        return known
    found = measure(config)
    with suppress(OSError):  # a cache that can't be written: it is measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(found)))
    return found


def _read(path: Path) -> Speed | None:
    """What was measured before; None where the file says anything else than numbers."""
    try:
        found = Speed(**json.loads(read_bytes(path, LONGEST)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    values = asdict(found).values()
    return found if all(type(v) in (int, float) and 0 <= v < math.inf for v in values) else None


def speed_of(config: RunConfig) -> Speed:
    """Measured once, then read from the cache."""
    like = alike(config)
    return _measured(_key(like, torch.get_num_threads()), like)


@lru_cache(maxsize=1000)
def _key(like: RunConfig, threads: int) -> str:
    kind = f"{like.yaml()} {device_name(like)} {torch.__version__} {threads}"
    return hashlib.sha256(kind.encode()).hexdigest()[:24]


def device_name(config: RunConfig) -> str:
    device = find_device(config.device)
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


def alike(config: RunConfig) -> RunConfig:
    """The same for all runs that cost the same per sample, however their samples are dealt out."""
    natural = (config.settled().partition or "").startswith("natural")
    per_round = min(MOST, cohort_size(config.per_round, config.clients or 100))
    kept = ("data", "data_dir", "model", "batch_size", "optimizer", "loss", "metric", "engine", "device", "precision")
    return RunConfig(
        **{name: getattr(config, name) for name in kept},
        partition="natural" if natural else "iid",
        clients=None if natural else max(20, per_round),
        per_round=per_round,
        standardise=config.standardise and "global",
        compile=False,
    )


def measure(config: RunConfig) -> Speed:
    """Time a cohort's first step, and a part of the test."""
    federation = load_data(**config.dealing)
    training = Training(
        make_model(config.model, federation, 0, config.data_dir),
        federation,
        "fedavg",
        rounds=1,
        clients_per_round=min(len(federation), int(config.per_round or 10)),
        local=config.local,
        loss=config.loss,
        metric=config.metric,
        engine=config.engine,
        compile=False,
        device=config.device,
        precision=config.precision,
    )
    simulation, state = training.simulation, training.state
    setup, device = simulation.setup, simulation.setup.device
    few = 1 if isinstance(simulation.engine, Loop) else setup.per_round
    largest = setup.sizes.argsort(descending=True)[:few].sort().values
    asked = probe(simulation.pipeline, setup, state, largest)
    work = replace(asked, rates=asked.rates[..., :1], max_steps=1)
    seen = sum(min(setup.local.batch_size or int(n), int(n)) for n in setup.sizes[asked.clients])
    test, tested, count = simulation.federation.test, 0.0, 0
    with simulation.numerics():
        sample = _timed(lambda: simulation.train(simulation.population.prepare(work)), device) / seen
        if test is not None:
            part, count = Holdout(test.x[:TESTED], test.y[:TESTED]), len(test.x)
            once = _timed(lambda: simulation.evaluator.measure(state.theta, state.buffers, part, "test"), device)
            tested = once / len(part.x)
    return Speed(sample, tested, int(federation.offsets[-1]), count, setup.clients)


def _timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, after a first one that warms up."""
    times: list[float] = []
    while len(times) < 2 or (sum(times[1:]) < ENOUGH and len(times) < 10):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def duration(seconds: float) -> str:
    """For people: 40 s, 12 min, 3.5 h, 9 days.

    >>> duration(40), duration(12600), duration(9 * 86400)
    ('40 s', '3.5 h', '9 days')
    """
    for unit, length, most in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 48)):
        if seconds < most * length:
            amount = seconds / length
            return f"{amount:.1f} {unit}" if unit == "h" and amount < 10 else f"{amount:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
