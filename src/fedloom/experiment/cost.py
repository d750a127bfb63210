"""How long will a run take here? Measured: a few local steps and one batch of the test, once for each kind of run."""

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from fedloom.data.files import Files
from fedloom.engines.loop import Loop
from fedloom.evaluate import BATCH
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import write_text
from fedloom.experiment.run import load_data
from fedloom.federation import Holdout
from fedloom.method import Method
from fedloom.models import model as make_model
from fedloom.round import probe
from fedloom.simulation import cohort_size, find_device
from fedloom.training import Training

STEPS = 2  # local steps that are timed
ENOUGH = 0.3  # seconds


@dataclass(frozen=True)
class Speed:
    """What one kind of run costs on this machine."""

    sample: float  # seconds of training per sample
    tested: float  # seconds of evaluation
    samples: float  # that a client has, on average
    clients: int


def seconds_for(config: RunConfig) -> float:
    """Estimated seconds of a run, without loading its data and compiling; `config.rounds` counts its aggregations."""
    speed = speed_of(config)
    schedule = Method(config.method).pipeline().schedule.stage
    per_round = cohort_size(config.per_round, speed.clients)
    works = config.rounds * schedule.works(per_round)
    local = config.local
    if local.steps is not None:
        samples = local.steps * (local.batch_size or speed.samples)
    else:
        samples = local.epochs * speed.samples
    trained = works * per_round * samples * speed.sample
    return trained + math.ceil(config.rounds / config.eval_every) * speed.tested


@lru_cache(maxsize=1000)
def _measured(key: str, config: RunConfig) -> Speed:
    path = Files.of(config.data_dir).cache / "cost" / f"{key}.json"
    try:
        return Speed(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    found = measure(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(found)))
    return found


def speed_of(config: RunConfig) -> Speed:
    """Measured once, then read from the cache."""
    like = _alike(config)
    kind = f"{like.yaml()} {device_name(like)} {torch.__version__} {torch.get_num_threads()}"
    return _measured(hashlib.sha256(kind.encode()).hexdigest()[:24], like)


def device_name(config: RunConfig) -> str:
    device = find_device(config.device)
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


def _alike(config: RunConfig) -> RunConfig:
    """The same for all runs that cost the same per sample: how samples are dealt out makes no difference."""
    natural = (config.partition or "").startswith("natural")
    return replace(
        config.settled(),
        partition=config.partition if natural else "iid",
        method="fedavg",
        rounds=1,
        eval_every=1,
        lr=0.0,
        seed=0,
        fold=None if config.fold is None else 0,
        patience=None,
        diagnose=None,
        compile=False,
        epochs=1,
        steps=None,
    )


def measure(config: RunConfig) -> Speed:
    """Time a cohort's first steps, and a part of the test."""
    federation = load_data(**config.dealing)
    training = Training(
        make_model(config.model, federation, 0, config.data_dir),
        federation,
        "fedavg",
        rounds=1,
        clients_per_round=config.per_round,
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
    few = 1 if isinstance(simulation.engine, Loop) else min(setup.per_round, 50)
    asked = probe(simulation.pipeline, setup, state, torch.arange(setup.clients)[: max(few, 1)])
    work = replace(asked, rates=asked.rates[..., :STEPS], max_steps=STEPS)
    seen = sum(min(STEPS * (setup.local.batch_size or int(n)), int(n)) for n in setup.sizes[asked.clients])

    def train() -> None:
        simulation.train(simulation.population.prepare(work))

    tested = 0.0
    with simulation.numerics():
        sample = _timed(train, device) / seen
        test = simulation.federation.test
        if test is not None:
            part = Holdout(test.x[:BATCH], test.y[:BATCH])
            once = _timed(lambda: simulation.evaluator.measure(state.theta, state.buffers, part, "test"), device)
            tested = once * len(test.x) / len(part.x)
    return Speed(sample, tested, float(setup.sizes.double().mean()), setup.clients)


def _timed(action: object, device: torch.device) -> float:
    """Seconds of one call, after a first one that warms up."""
    assert callable(action)
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
