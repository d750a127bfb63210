"""Methods join with `+`; what can't be joined says why."""

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.method import REGISTRY, filled_by
from fedloom.methods.defaults import Mean, Sgd, Synchronous
from fedloom.stages import SINGLE, Client, Server
from tests.methods.test_privacy_refusals import REFUSED

EXAMPLES = {
    "clip": "clip(norm=1.0)",
    "fixed": "fixed(cohorts=[[0]])",
    "fedavg": "fedavg(lr=0.5)",
    "noise": "noise(multiplier=1.0)",
}
TEXTS = {e.name: EXAMPLES.get(e.name, e.name) for e in fl.list_methods()}


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(TEXTS.values(), 2)))
def test_every_pair_joins_or_names_the_stage(a: str, b: str) -> None:
    shared = set(fl.Method(a).fills) & set(fl.Method(b).fills) & set(SINGLE)
    if {a, b} & {"adafl"} and {a, b} & {"radfed", "radfedp", "radfedm", "radfeda"}:
        with pytest.raises(fl.MethodError, match=f"{a} and {b} can't be joined"):
            fl.Method(a) + fl.Method(b)
        return
    silent = a.startswith("test-") or b.startswith("test-")  # of other tests: they don't speak of privacy
    if not shared and "noise(multiplier=1.0)" in (a, b) and (silent or {a, b} & REFUSED.keys()):
        with pytest.raises(fl.MethodError, match=r"noise and .* can't be joined"):
            fl.Method(a) + fl.Method(b)
        return
    if not shared:
        both = fl.Method(a) + fl.Method(b)
        assert both.text == f"{fl.Method(a).text}+{fl.Method(b).text}"
        assert set(both.fills) == set(fl.Method(a).fills) | set(fl.Method(b).fills)
        return
    with pytest.raises(fl.MethodError) as error:
        fl.Method(a) + fl.Method(b)
    message = str(error.value)
    assert fl.Method(a).text in message
    assert fl.Method(b).text in message
    assert any(stage in message for stage in shared)


def test_fedavg_is_the_defaults() -> None:
    assert fl.Method("fedavg").fills == []
    pipeline = fl.Method("fedavg").pipeline()
    assert pipeline.server.stage == Sgd(1.0)
    assert pipeline.aggregator.stage == Mean()
    assert pipeline.schedule.stage == Synchronous()
    assert pipeline.weights == "samples"
    assert (fl.Method("fedavg") + fl.Method("fedadam")).fills == ["server"]


def test_an_argument_fills_its_stage_only_when_written() -> None:
    assert fl.Method("fedavg(lr=1.0)").fills == ["server"]
    with pytest.raises(fl.MethodError, match=r"fedavg\(lr=1\.0\) and fedadam both fill the server stage"):
        fl.Method("fedavg(lr=1)+fedadam")
    assert fl.Method("fedavg(weights='equal')+fedadam").pipeline().weights == "equal"


def test_the_same_method_twice() -> None:
    assert fl.Method("fedprox(mu=0.1)+fedprox(mu=0.1)") == fl.Method("fedprox(mu=0.1)")
    with pytest.raises(fl.MethodError, match="same method"):
        fl.Method("fedprox(mu=0.1)+fedprox(mu=0.2)")


@dataclass(frozen=True)
class _StatesEqual(Client):
    weights = "equal"


def test_default_weights_are_equal_if_any_member_states_so() -> None:
    fl.register("test-states-equal")(_StatesEqual)
    assert fl.Method("test-states-equal+fedadam").pipeline().weights == "equal"
    assert fl.Method("test-states-equal+fedavg(weights=samples)").pipeline().weights == "samples"


def test_python_form() -> None:
    assert fl.Method("fedprox", mu=0.1) == fl.Method("fedprox(mu=0.1)") == fl.Method("fedprox(0.1)")
    assert fl.Method([{"fedprox": {"mu": 0.1}}, "fedadam"]) == fl.Method("fedprox(mu=0.1)+fedadam")
    assert fl.Method(fl.Method("fedprox(mu=1)")).text == "fedprox(mu=1.0)"
    with pytest.raises(TypeError):
        fl.Method("fedprox") + "fedadam"  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedprx", "did you mean fedprox"),
        ("fedprox(nu=1)", "no parameter 'nu': choose from mu"),
        ("fedprox(mu=-0.1)", "at least 0"),
        ("fedprox(mu=inf)", "at least 0"),
        ("fedprox(mu='a')", "a number"),
        ("fedprox(mu=True)", "a number"),
        ("fedprox(1, 2)", "takes 1 values"),
        ("fedprox(1, mu=2)", "given twice"),
        ("fedavgm(momentum=1)", "below 1"),
        ("fedavgm(lr=0)", "above 0"),
        ("fedadam(beta2=1)", "below 1"),
        ("fedadam(tau=0)", "above 0"),
        ("fedadam(v_init=-1)", "at least 0"),
        ("fedadagrad(beta2=0.9)", "no parameter 'beta2'"),
        ("fedavg(weights='size')", "'samples' or 'equal'"),
        ("exponential(decay=1.5)", "at most 1"),
        ("linear(warmup=1)", "below 1"),
        ("bernoulli(rate=0)", "above 0"),
        ("fixed", "needs cohorts"),
        ("fixed(cohorts=[])", "empty"),
        ("fixed(cohorts=[[]])", "empty"),
        ("fixed(cohorts=[[-1]])", "no client -1"),
        ("fixed(cohorts=[0, 1])", "a list, each a list, each a whole number"),
        ("uniform(1)", "takes 0 values"),
    ],
)
def test_bad_parameters(text: str, words: str) -> None:
    with pytest.raises(fl.MethodError, match=words.replace("(", r"\(")):
        fl.Method(text)


def test_a_name_can_be_taken_once() -> None:
    with pytest.raises(fl.MethodError, match="already"):

        @fl.register("fedavg")
        @dataclass(frozen=True)
        class _Mine(Server):
            pass


def test_every_method_says_what_it_is() -> None:
    for entry in REGISTRY.entries():
        if not entry.name.startswith(("test-", "doctest-")):
            assert entry.about.endswith("."), entry.name
            assert filled_by(entry) or entry.name == "fedavg"


def test_installed_packages_bring_methods(tmp_path: Path) -> None:
    package = tmp_path / "guest-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[fedloom.methods]\nguest = guest_methods\n")
    (tmp_path / "guest_methods.py").write_text(
        "import fedloom as fl\n"
        "from dataclasses import dataclass\n"
        "from fedloom.stages import Client\n"
        "@fl.register('guest')\n"
        "@dataclass(frozen=True)\n"
        "class Guest(Client):\n"
        "    '''A guest.'''\n"
    )
    code = "import fedloom as fl; print((fl.Method('guest') + fl.Method('fedadam')).fills)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "['client', 'server']", done.stderr
