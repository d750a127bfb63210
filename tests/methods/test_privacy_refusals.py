"""Beside noise every method is admitted or refused with its reason; so is what a third party brings."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.stages import Client, Sampler, Schedule, Setup, State, Update, Updates
from tests.methods.test_privacy import training

NOISE = "clip(norm=0.2)+noise(multiplier=0.7, seed=5)"
ADMITTED = {
    "2dlrd": "2dlrd(c=0.5, window=1)",
    "attack": "attack(kind=scale, fraction=0.4)",
    "bernoulli": "bernoulli(rate=0.5)",
    "clip": "clip(norm=0.2)",
    "decay-additive": "decay-additive(c=0.5, window=1)",
    "decay-all": "decay-all(window=1)",
    "exponential": "exponential",
    "fedadagrad": "fedadagrad",
    "fedadam": "fedadam",
    "fedavg": "fedavg(lr=0.5, weights=equal)",
    "fedavgm": "fedavgm",
    "fedprox": "fedprox(mu=0.1)",
    "fedyogi": "fedyogi",
    "first-only": "first-only(after=2)",
    "fixed": "fixed(cohorts=[[0, 1], [4, 3]])",
    "linear": "linear",
    "mixing": "mixing",
    "noise": "noise(multiplier=0.7, seed=5)",
    "uniform": "uniform",
}
REFUSED = {
    "adabest": "mean of the sizes",
    "adafl": "single updates",
    "clustered": "how many samples they have",
    "dgt": "after it was clipped",
    "fedasync": "one client's update at a time",
    "feddyn": "mean of all sizes",
    "fedglad": "lengths of single updates",
    "fednova": "both fill the aggregator stage",
    "ida": "both fill the aggregator stage",
    "importance": "single gradients",
    "krum": "which others are averaged",
    "md": "may draw one twice",
    "median": "both fill the aggregator stage",
    "radfed": "raw model to the next",
    "radfeda": "raw model to the next",
    "radfedi": "raw model to the next",
    "radfedm": "raw model to the next",
    "radfedp": "raw model to the next",
    "scaffold": "which no noise covers",
    "scaffold-m": "before noise was added",
    "trimmed-mean": "both fill the aggregator stage",
}
BUILT_IN = [e.name for e in fl.list_methods() if e.make.__module__.startswith("fedloom.methods")]


def test_the_tables_hold_every_method() -> None:
    assert {*ADMITTED, *REFUSED} == {*BUILT_IN}
    assert not ADMITTED.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("first", [True, False])
def test_refused(name: str, first: bool) -> None:
    with pytest.raises(fl.MethodError) as error:
        fl.Method(f"{name}+{NOISE}" if first else f"{NOISE}+{name}")
    message = str(error.value)
    assert REFUSED[name] in message
    assert name in message
    assert "noise" in message


def test_attackers_who_know_the_others() -> None:
    with pytest.raises(fl.MethodError, match="noise and attack can't be joined: attack alie makes hostile updates of"):
        fl.Method(f"attack(kind=alie)+{NOISE}")


@pytest.mark.parametrize("name", ADMITTED)
def test_admitted(name: str) -> None:
    """It runs, through rounds of nobody where the sampler may draw them, and says epsilon."""
    method = fl.Method(ADMITTED[name]) + fl.Method(NOISE)
    if "sampler" not in fl.Method(ADMITTED[name]).fills:
        method += fl.Method("bernoulli(rate=0.2)")
    run = training(method.text, rounds=8)
    result = run.run()
    assert bool(torch.isfinite(result.params).all())
    assert result.history[-1]["noise.epsilon"] > result.history[0]["noise.epsilon"] > 0
    if "sampler" not in fl.Method(ADMITTED[name]).fills:
        assert 0 in [row["answered"] for row in result.history]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_stage_says_what_it_does_to_privacy(name: str) -> None:
    """None of the library's own is refused for its silence."""
    parameters = {"clip": "clip(norm=1)", "fixed": "fixed(cohorts=[[0]])", "noise": "noise(multiplier=1)"}
    for text in (parameters.get(name, name), *(["adabest(deploy=latest_of_all)"] if name == "adabest" else [])):
        for part in fl.Method(text).pipeline().parts:
            why = part.stage.breaks_privacy
            assert why is None or "does not say" not in why, part.key


def test_adabest_without_its_client_side() -> None:
    """With mu = 0 no size is told to anybody, and the server reads nothing but averages."""
    run = training(f"adabest(mu=0)+{NOISE}+bernoulli(rate=0.4)", rounds=6)
    run.run()
    assert "noise.epsilon" in run.history[-1]
    [part] = run.simulation.pipeline.clients
    assert part.stage.send(run.state.stages[part.key]) == {}
    with pytest.raises(fl.MethodError, match="no noise is added"):
        fl.Method(f"adabest(mu=0, deploy=latest_of_all)+{NOISE}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedavg(weights=samples)", "equal weights"),
        ("fixed(cohorts=[[0, 1], [2, 3, 4]])", "unequal length"),
        ("fixed(cohorts=[[0, 1], [3, 3]])", "a client twice"),
        ("noise(multiplier=-1)", "between 0 and"),
        ("noise(multiplier=inf)", "between 0 and"),
        ("noise(multiplier=1, delta=0)", "between 0 and 1"),
        ("noise(multiplier=1, delta=1)", "between 0 and 1"),
        ("noise(multiplier=1, seed=-1)", "at least 0"),
        ("noise", "needs multiplier"),
    ],
)
def test_bad_settings(text: str, words: str) -> None:
    with pytest.raises(fl.MethodError, match=words):
        fl.Method(text if text.startswith("noise") else f"{text}+{NOISE}")


def test_noise_needs_clip_when_a_run_begins() -> None:
    """Not before: the two may be joined one after the other."""
    alone = fl.Method("noise(multiplier=1)")
    with pytest.raises(fl.MethodError, match=r"needs clip\(norm=\.\.\.\)"):
        training(alone.text)
    training((alone + fl.Method("clip(norm=1)")).text)


def test_forced_cohorts_of_another_length() -> None:
    method = f"fixed(cohorts=[[0, 1]], works=[3])+{NOISE}"
    with pytest.raises(fl.MethodError, match="clients_per_round=3"):
        training(method, clients_per_round=3)
    training(method, clients_per_round=2, rounds=5).run()


def test_batch_norm_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    data = fl.Federation.from_arrays([(np.ones((4, 3), dtype=np.float32), np.array([0, 1, 0, 1]))] * 3)
    options: dict[str, Any] = {"rounds": 1, "device": "cpu"}
    with pytest.raises(fl.ModelError, match=r"1\.running_mean"):
        fl.fit(model, data, NOISE, **options)
    assert "running_mean" in "".join(dict(fl.fit(model, data, "clip(norm=1)", **options).model.named_buffers()))


# ---------------------------------------------------------------------------------------------------------------------
# What third parties bring
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Silent(Client):
    """Says nothing of privacy."""


@dataclass(frozen=True)
class Doubling(Update):
    """After the clip, and sure of itself."""

    breaks_privacy = None
    rank = 40

    def apply(self, state: State, updates: Updates) -> tuple[State, Updates]:
        return state, updates


@dataclass(frozen=True)
class Early(Doubling):
    rank = 2


@dataclass(frozen=True)
class Again(Schedule):
    """Another way through a round, sure of itself."""

    breaks_privacy = None


@dataclass(frozen=True)
class Twice(Sampler):
    """Draws one client twice, and does not say so."""

    breaks_privacy = None

    def draw(self, state: State, setup: Setup, number: int, w: int, rng: np.random.Generator) -> np.ndarray:
        return np.array([0, 1, 1])


@pytest.fixture(scope="module", autouse=True)
def third_parties() -> None:
    for made in (Silent, Doubling, Early, Again, Twice):
        fl.register(f"test-private-{made.__name__.lower()}")(made)


def test_silence_is_refused() -> None:
    with pytest.raises(fl.MethodError, match="test-private-silent does not say whether it reads single updates"):
        fl.Method(f"test-private-silent+{NOISE}")


def test_nothing_may_change_updates_after_the_clip() -> None:
    with pytest.raises(fl.MethodError, match="test-private-doubling changes updates after they were clipped"):
        fl.Method(f"test-private-doubling+{NOISE}")
    training(f"test-private-early+{NOISE}", rounds=1).run()


def test_only_synchronous_rounds_are_accounted_for() -> None:
    with pytest.raises(fl.MethodError, match="test-private-again may ask a client more than once in a round"):
        fl.Method(f"test-private-again+{NOISE}")


def test_a_client_drawn_twice_ends_the_run() -> None:
    with pytest.raises(fl.MethodError, match="drawn twice for Work 0"):
        training(f"test-private-twice+{NOISE}").run()


def test_the_package_is_missed_before_anything_is_trained() -> None:
    code = (
        "import sys; sys.modules['dp_accounting'] = None\n"
        "import numpy as np, fedloom as fl\n"
        "data = fl.Federation.from_arrays([(np.ones((4, 3), dtype='float32'), np.array([0, 1, 0, 1]))] * 3)\n"
        "started = []\n"
        "try:\n"
        "    fl.fit(fl.model('logistic', data), data, 'clip(norm=1)+noise(multiplier=1)', rounds=1, device='cpu',\n"
        "           availability=lambda client, w: started.append(w) or True)\n"
        "except fl.ConfigError as error:\n"
        "    assert not started and str(error).endswith(\"pip install 'fedloom[privacy]'\"), error\n"
        "else:\n"
        "    raise SystemExit('it ran')\n"
    )
    source = Path(fl.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
