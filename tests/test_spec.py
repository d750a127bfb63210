"""The text form: what it reads, that it prints back to the same text, and that garbage is refused, never crashed on."""

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from fedloom.spec import Call, SpecError, from_data, parse, parse_one, show, to_data

NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,12}\Z")
PARAMETERS = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,8}\Z")
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
CALLS = st.builds(Call, NAMES, st.just(()), st.dictionaries(PARAMETERS, VALUES, max_size=4))


@given(st.lists(CALLS, min_size=1, max_size=4))
def test_text_round_trip(calls: list[Call]) -> None:
    text = "+".join(str(call) for call in calls)
    assert parse(text) == calls
    assert "+".join(str(call) for call in parse(text)) == text


@given(st.lists(CALLS, min_size=1, max_size=4))
def test_yaml_round_trip(calls: list[Call]) -> None:
    assert from_data(to_data(calls)) == calls


def test_method_through_real_yaml() -> None:
    method = fl.Method("fedprox(mu=0.1)+fedadam(lr=0.02, v_init=None)+fixed(cohorts=[[0, 1], [2]])")
    assert fl.Method(yaml.safe_load(yaml.safe_dump(method.data))) == method
    assert fl.Method(method.text).text == method.text


@given(st.text(max_size=60) | st.text("fedprox(mu=0.1)+[]{}'\",\\ \n-1e9", max_size=60))
def test_garbage_is_refused(text: str) -> None:
    try:
        method = fl.Method(text)
    except fl.FedloomError:
        return
    assert fl.Method(method.text) == method


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_garbage_data_is_refused(data: Any) -> None:
    try:
        method = fl.Method(data)
    except fl.FedloomError:
        return
    assert fl.Method(method.data) == method


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2dlrd", [Call("2dlrd")]),
        ("scaffold-m + dgt", [Call("scaffold-m"), Call("dgt")]),
        ("a(x='1+1', y=[1, (2, 3)])", [Call("a", named={"x": "1+1", "y": [1, [2, 3]]})]),
        ("a(deploy=cloud)", [Call("a", named={"deploy": "cloud"})]),
        ("fedglad(gamma=inf)", [Call("fedglad", named={"gamma": math.inf})]),
        ("a(-inf, x=-1e-3,)", [Call("a", (-math.inf,), {"x": -0.001})]),
        ("a(x='it\\'s (', y=None)", [Call("a", named={"x": "it's (", "y": None})]),
        (" fedprox ( mu = 0.1 ) ", [Call("fedprox", named={"mu": 0.1})]),
    ],
)
def test_reads(text: str, expected: list[Call]) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "+", "a+", "a(", "a)", "a(x=1", "a(x=1))", "a(x=1)(y=2)", "a b", "a(x=1 2)", "a(x==1)", "a(1, x=1, 2)",
     "a(x=1, x=2)", "a(x=__import__('os'))", "a(x=[)", "a(x='", "a(x={1: 2})", "a(x=1j)", "a(x=b'1')", "-a", "a(,)",
     "a(x=9223372036854775808)", "a(x=[-9223372036854775808])",
     "a(x=nan*1)", "a(x=1e999-1e999)", "é", "a(x=" + "[" * 200 + "]" * 200 + ")", "a" * 20_000],
)  # fmt: skip
def test_refuses(text: str) -> None:
    with pytest.raises(fl.FedloomError):
        fl.Method(text)


def test_one_name_only() -> None:
    assert parse_one("iid") == Call("iid")
    with pytest.raises(SpecError, match="joined"):
        parse_one("iid+iid")


@given(VALUES)
def test_shown_values_read_back(value: Any) -> None:
    assert parse(f"a(x={show(value)})") == [Call("a", named={"x": value})]


def test_hostile_data_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (cycle, 10**5000, {"a": 1}, math.nan):
        with pytest.raises(fl.FedloomError):
            fl.Method([{"fedprox": {"mu": value}}])
