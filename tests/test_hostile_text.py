"""Texts and YAML files that anyone may have written: a FedloomError or a value comes out, soon, and nothing else."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fedloom as fl
from fedloom.experiment.config import RunConfig, read_comparison, read_config
from fedloom.experiment.recipe import read_recipe, recipe_folder
from fedloom.experiment.tune.plan import read_plan
from fedloom.experiment.tune.search import Template
from fedloom.spec import from_data, parse, show

NAMES = ("fedavg", "fedprox", "2dlrd", "radfed", "fixed", "krum", "clip", "adabest", "importance", "no-such")
SIGNS = "()[]{}=,+-'\"\\ \n\t#:&*!|>%@`0123456789.eEinfaxml_\x00\ud800é"
hostile = settings(max_examples=40, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])

TEXTS = st.text(st.sampled_from(SIGNS) | st.characters(), max_size=80)
CALLS = st.builds("{}({})".format, st.sampled_from(NAMES), TEXTS)
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**30, -(10**4000), 2**63, -1, 0, 1e308, float("inf")])
PLAIN = st.none() | st.booleans() | NUMBERS | TEXTS
DATA = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PLAIN, inner, max_size=4))

COMPARISON = {"methods": ["fedavg", "dgt"], "seeds": 2, "target": 0.5, **yaml.safe_load(RunConfig().yaml())}
COMPARISON.pop("method")
STUDY: dict[str, Any] = {"methods": ["fedprox(mu=choice(1, 2))"], "search": [], "objective": "train-loss", "trials": 5}
STUDY |= {"seeds": 1, "sampler": "tpe", "prune": True, "together": 1, "rounds": 3}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What is imported when it is first used does not count against the deadline."""
    fl.load("digits", clients=10)
    Template.read("fedavg")


def refuses(read: Callable[[], object]) -> None:
    """Whatever it says, it says it as Fedloom does."""
    with suppress(fl.FedloomError):
        read()


@hostile
@given(TEXTS | CALLS | st.lists(CALLS, min_size=2, max_size=3).map("+".join))
@example("fedprox(mu=" + "(" * 4000 + ")" * 4000 + ")")
@example("fedprox(mu=" + "-" * 9000 + "1)")
@example("fedprox(mu=" + "not " * 2000 + "1)")
@example("fedprox(mu='\\N{" + "x" * 5000 + "}')")
@example("fedprox(mu=" + "9" * 5000 + ")")
@example("fixed(cohorts=" + "[" * 150 + "]" * 150 + ")")
def test_any_text(text: str) -> None:
    for read in (parse, fl.Method, Template.read):
        refuses(lambda read=read: read(text))  # type: ignore[misc]


@hostile
@given(DATA)
@example([{"fedprox": {"mu": 10**5000}}])
@example([10**5000])
@example({10**5000: 1})
@example([{10**5000: None}])
def test_any_data(data: Any) -> None:
    refuses(lambda: from_data(data))
    refuses(lambda: fl.Method(data))
    for name in ("fedprox", "krum", "radfed", "fixed", "importance"):
        refuses(lambda name=name: fl.Method([{name: data}]))  # type: ignore[misc]


def test_texts_that_hold_inf_stay_as_they_are() -> None:
    """Only a number that is infinite is written as one."""
    (call,) = parse(f"table(features={show(['info', 'inf', float('inf')])})")
    assert call.named == {"features": ["info", "inf", float("inf")]}


@hostile
@given(st.sampled_from(list(RunConfig.__dataclass_fields__)), DATA)
@example("data", "table(path='a\\x00b', client='c', label='l')")
@example("data", f"folder(path='{'a' * 5000}')")
@example("partition", "../" * 2000 + "x.npz")
@example("data_dir", "a" * 5000)
@example("clients", 10**15)
@example("model", "mlp(hidden=[9999999999999])")
@example("augment", "crop(padding=99999999999)")
def test_any_setting(name: str, value: Any) -> None:
    def load() -> None:
        config = RunConfig().change({name: value}).settled()
        if name in ("data_dir", "partition", "clients", "validation", "samples", "fold", "augment", "standardise"):
            fl.load(**config.dealing)

    refuses(load)


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "tune.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def read_all(path: Path) -> None:
    """As a config, a comparison, a recipe and a study."""
    for read in (read_config, read_comparison, read_recipe):
        refuses(lambda read=read: read(path))  # type: ignore[misc]
    refuses(lambda: read_plan(path.parent))


@hostile
@given(st.binary(max_size=200) | TEXTS | DATA.map(lambda data: yaml.safe_dump(data)))
def test_any_yaml(tmp_path: Path, content: str | bytes) -> None:
    read_all(write(tmp_path, content))


ORIGINALS = {
    "config": RunConfig().yaml(),
    "comparison": yaml.safe_dump(COMPARISON),
    "study": yaml.safe_dump(STUDY),
    "recipe": min(recipe_folder().glob("*.yaml"), key=lambda path: path.stat().st_size).read_text(),
}


@hostile
@given(st.sampled_from(list(ORIGINALS)), st.data())
def test_settings_with_a_part_that_was_changed(tmp_path: Path, which: str, data: st.DataObject) -> None:
    text = ORIGINALS[which].encode()
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start, min(len(text), start + 20)))
    between = data.draw(st.binary(max_size=6) | TEXTS.map(lambda t: t.encode("utf-8", "surrogatepass")))
    read_all(write(tmp_path, text[:start] + between + text[end:]))


@hostile
@given(st.sampled_from(list(ORIGINALS)), st.data(), DATA)
def test_settings_with_a_value_that_was_changed(tmp_path: Path, which: str, data: st.DataObject, value: Any) -> None:
    values = yaml.safe_load(ORIGINALS[which])
    values[data.draw(st.sampled_from(list(values)))] = value
    read_all(write(tmp_path, yaml.safe_dump(values)))


def nested(times: int) -> str:
    lines = [f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}}}\n" for i in range(1, times)]
    return "a0: &a0 {x: 1}\n" + "".join(lines)


ATTACKS: dict[str, str | bytes] = {
    "references that double": nested(60),
    "a list of itself": "data: &a [*a]",
    "a mapping of itself": "data: &a {b: *a}",
    "brackets": "data: " + "[" * 20_000,
    "a number of many digits": "clients: " + "9" * 200_000,
    "a number to the base of sixty": "clients: 1" + ":11" * 50_000,
    "a number of 20,000 bits": "seeds: 0x" + "f" * 5000,
    "an object": "data: !!python/object/apply:os.system ['touch owned']",
    "a module": "data: !!python/module:os",
    "bytes": "data: !!binary aGFsbG8=",
    "a date": "data: 2020-01-01",
    "no date": "data: 2020-99-99",
    "no number": 'lr: !!int ""',
    "no truth": "pooled: !!bool maybe",
    "no time": "data: !!timestamp now",
    "a set": "data: !!set {a, b}",
    "half a character": 'data_dir: "\\ud800"',
    "a zero byte": b"data: a\0b",
    "another encoding": "data: é".encode("latin-1"),
    "a key that is a list": "? [a, b]\n: 1",
    "a key twice": "lr: 1\nlr: 2",
    "too long": "# x\n" * 400_000,
    "two documents": "lr: 1\n---\nlr: 2",
    "merged twice": "<<: {lr: 1}\n<<: {lr: 2}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_yaml_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, ATTACKS[name])
    for read in (read_config, read_comparison, read_recipe):
        with pytest.raises(fl.FedloomError) as caught:
            read(path)
        assert len(str(caught.value)) < 600
    with pytest.raises(fl.FedloomError):
        read_plan(tmp_path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "nothing", "sparse"])
def test_what_is_no_plain_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tune.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 2 << 30)
    for read in (read_config, read_comparison, read_recipe):
        with pytest.raises(fl.ConfigError, match=r"tune.yaml can't be read"):
            read(path)
    with pytest.raises(fl.RunError, match=r"tune.yaml can't be read"):
        read_plan(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "high"}, "target must be a number"),
        ({"target": True}, "target must be a number"),
        ({"seeds": True}, "how many seeds"),
        ({"seeds": 10**12}, "how many seeds"),
        ({"methods": [["fedavg"]]}, "which methods"),
        ({"methods": "fedavg"}, "which methods"),
    ],
)
def test_a_comparison_of_other_types(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert read_comparison(write(tmp_path, yaml.safe_dump(COMPARISON)))["seeds"] == 2
    with pytest.raises(fl.ConfigError, match=words):
        read_comparison(write(tmp_path, yaml.safe_dump({**COMPARISON, **changes})))


@pytest.mark.parametrize(
    "changes",
    [{"trials": "many"}, {"trials": 0}, {"together": None}, {"prune": "no"}, {"methods": [1]}, {"search": "lr"},
     {"sampler": ["tpe"]}, {"seeds": 1.5}, {"objective": {}}],
)  # fmt: skip
def test_a_study_of_other_types(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, yaml.safe_dump(STUDY))
    assert read_plan(tmp_path)["trials"] == 5
    write(tmp_path, yaml.safe_dump({**STUDY, **changes}))
    with pytest.raises(fl.RunError, match=f"{next(iter(changes))} is missing or of another type"):
        read_plan(tmp_path)
