"""Every method with every other: it runs, or it says why not."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.stages import SINGLE
from tests import reference
from tests.methods.test_privacy_refusals import REFUSED

# Where the bare name would need a parameter, fill nothing, or train for long.
EXAMPLES = {
    "attack": "attack(kind='scale', fraction=0.4, scale=1.5)",
    "bernoulli": "bernoulli(rate=0.7)",
    "clip": "clip(norm=0.05)",
    "fedasync": "fedasync(max_staleness=2, rho=0.1)",
    "fedavg": "fedavg(lr=0.5, weights='equal')",
    "fixed": "fixed(cohorts=[[0, 1, 2, 3, 4], [5, 4, 3, 2, 1]])",
    "noise": "clip(norm=0.05)+noise(multiplier=0.5, seed=1)",
    "radfed": "radfed(redistributions=2)",
    "radfeda": "radfeda(redistributions=2)",
    "radfedi": "radfedi(redistributions=2)",
    "radfedm": "radfedm(redistributions=2)",
    "radfedp": "radfedp(redistributions=2)",
}
NAMES = [e.name for e in fl.list_methods() if e.make.__module__.startswith("fedloom.methods")]
TEXTS = {name: EXAMPLES.get(name, name) for name in NAMES}
PAIRS = list(itertools.combinations(NAMES, 2))
TRAVELLING = {"radfed", "radfeda", "radfedi", "radfedm", "radfedp"}
CLIENTS = reference.make_clients((3, 4, 5, 4, 3, 6), 2, seed=2)
ROUNDS = 3


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs.squeeze(1) - targets) ** 2


@pytest.fixture(scope="module")
def federation() -> fl.Federation:
    return fl.Federation.from_arrays(CLIENTS)


def tiny_model() -> nn.Linear:
    model = nn.Linear(2, 1).double()
    nn.utils.vector_to_parameters(torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64), model.parameters())
    return model


def run(method: str, federation: fl.Federation) -> fl.Result:
    return fl.fit(
        tiny_model(),
        federation,
        method,
        rounds=ROUNDS,
        clients_per_round=5 if "krum" in method else 3,  # Krum filters five or more
        local=fl.Local(steps=2, batch_size=2, lr=0.05),
        loss=squared_error,
        engine="loop",
        device="cpu",
        seed=3,
    )


def without_seconds(history: Sequence[Mapping[str, Any]]) -> str:
    """As text, in which a nan equals a nan."""
    return repr([{name: value for name, value in row.items() if name != "seconds"} for row in history])


def shared_stages(one: str, other: str) -> set[str]:
    return set(fl.Method(TEXTS[one]).fills) & set(fl.Method(TEXTS[other]).fills) & set(SINGLE)


def refused(one: str, other: str) -> bool:
    """Section 11.8: no client owns a travelling model. Beside noise: what test_privacy_refusals.py lists."""
    if "noise" in (one, other):
        return bool({one, other} & REFUSED.keys())
    return "adafl" in (one, other) and bool({one, other} & TRAVELLING)


def test_all_the_methods_are_here() -> None:
    expected = {
        *(
            "2dlrd",
            "adabest",
            "adafl",
            "attack",
            "bernoulli",
            "clip",
            "clustered",
            "decay-additive",
            "decay-all",
            "dgt",
        ),
        *(
            "exponential",
            "fedadagrad",
            "fedadam",
            "fedasync",
            "fedavg",
            "fedavgm",
            "feddyn",
            "fedglad",
            "fednova",
            "fedprox",
        ),
        *("fedyogi", "first-only", "fixed", "ida", "importance", "krum", "linear", "md", "median", "mixing", "radfed"),
        *("radfeda", "radfedi", "radfedm", "radfedp", "scaffold", "scaffold-m", "trimmed-mean", "uniform"),
    }
    assert expected <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_method_alone(name: str, federation: fl.Federation) -> None:
    """It moves the model, does so again, and its text reads back."""
    one, other = (run(TEXTS[name], federation) for _ in range(2))
    assert torch.equal(one.params, other.params)
    assert bool(torch.isfinite(one.params).all())
    assert not torch.equal(one.params, nn.utils.parameters_to_vector(tiny_model().parameters()).detach())
    assert fl.Method(fl.Method(TEXTS[name]).text) == fl.Method(TEXTS[name])


@pytest.mark.parametrize(
    ("one", "other"),
    [pytest.param(*pair, marks=() if i % 4 == 0 else pytest.mark.long) for i, pair in enumerate(PAIRS)],
)
def test_pair(one: str, other: str, federation: fl.Federation) -> None:
    text = f"{TEXTS[one]}+{TEXTS[other]}"
    shared = shared_stages(one, other)
    if shared or refused(one, other):
        with pytest.raises(fl.MethodError) as error:
            run(text, federation)
        message = str(error.value)
        assert one in message
        assert other in message
        assert not shared or any(stage in message for stage in shared)
        return
    results = [run(text, federation) for _ in range(2)]
    assert bool(torch.isfinite(results[0].params).all())
    assert len(results[0].history) == ROUNDS
    assert all(np.isfinite(row["train_loss"]) for row in results[0].history)
    assert torch.equal(results[0].params, results[1].params)
    assert without_seconds(results[0].history) == without_seconds(results[1].history)


FULL = "importance(start='full')"
WITH_FULL = [name for name in NAMES if name != "noise" and "sampler" not in fl.Method(TEXTS[name]).fills]


@pytest.mark.parametrize("name", WITH_FULL)
def test_with_a_pass_over_all_clients_first(name: str, federation: fl.Federation) -> None:
    """The pass asks without training: every rate, schedule and memory must bear a Work of no steps."""
    results = [run(f"{TEXTS[name]}+{FULL}", federation) for _ in range(2)]
    assert bool(torch.isfinite(results[0].params).all())
    assert torch.equal(results[0].params, results[1].params)
    assert results[0].history[0]["works"] == run(TEXTS[name], federation).history[0]["works"]


# ---------------------------------------------------------------------------------------------------------------------
# The five papers at once
# ---------------------------------------------------------------------------------------------------------------------

STACK = "radfed(redistributions=3)+adabest+dgt+fedglad+2dlrd"


def stack(federation: fl.Federation, rounds: int, **settings: Any) -> fl.Result:
    return fl.fit(
        fl.model("mlp(hidden=[16])", federation),
        federation,
        STACK,
        rounds=rounds,
        clients_per_round=5,
        local=fl.Local(epochs=1, batch_size=20, lr=0.1),
        engine="loop",
        device="cpu",
        seed=1,
        **settings,
    )


def test_full_stack_on_digits(tmp_path: Path) -> None:
    """Finite, learning, the numbers of every member in the history; resumed bit for bit."""
    federation = fl.load("digits", partition="classes(per_client=2)", clients=20)
    whole = stack(federation, 8)
    assert bool(torch.isfinite(whole.params).all())
    last = whole.history[-1]
    assert all(np.isfinite(row["train_loss"]) for row in whole.history)
    assert last["test_accuracy"] > whole.history[0]["test_accuracy"]
    assert last["works"] == 24
    for name in ("dgt.calibrated", "dgt.cosine", "fedglad.gsi", "fedglad.scale", "fedglad.at_bound", "adabest.h_norm"):
        assert name in last
    assert len(last["fedglad.gsi"]) == len(last["fedglad.scale"]) == 4

    stack(federation, 3, checkpoint=tmp_path)
    resumed = stack(federation, 8, checkpoint=tmp_path, resume=True)
    assert torch.equal(whole.params, resumed.params)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert without_seconds(whole.history) == without_seconds(resumed.history)
