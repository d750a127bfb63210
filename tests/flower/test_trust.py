"""Nothing that arrives is trusted: whatever a node sends, or a server, is used only if it is what was asked for."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

import fedloom as fl
from fedloom.flower import LocalGrid
from fedloom.flower.wire import Kind, Refused, anything, pack, unpack
from tests.flower.in_process import apart, app_for, clients, mlp, served, simulated

Content = Any  # a RecordDict
Call = Callable[[Message, Context], Message]
Harm = Callable[[Content], Content | None]
HOSTILE = 1


def hostile(harm: Harm, memory: Path, kind: str = "train") -> LocalGrid:
    """Five nodes, one of whose replies to messages of a kind is changed by its owner."""

    def mod(message: Message, context: Context, call_next: Call) -> Message:
        reply = call_next(message, context)
        if context.node_config["partition-id"] != HOSTILE or not message.metadata.message_type.startswith(kind):
            return reply
        changed = harm(reply.content)
        return reply if changed is None else Message(changed, reply_to=message)

    return LocalGrid.of_app(app_for(clients(), memory, mods=[mod]), 5)


def rows(content: Content, row: np.ndarray) -> None:
    content["update"] = ArrayRecord({**content["update"], "row": Array(row)})


def row_of(content: Content) -> np.ndarray:
    return np.array(content["update"]["row"].numpy())


def told(content: Content, **fields: Any) -> None:
    content["reply"] = ConfigRecord({**content["reply"], **fields})


def poisoned(value: float) -> Harm:
    def harm(content: Content) -> None:
        row = row_of(content)
        row[3] = value
        rows(content, row)

    return harm


def raw(**fields: Any) -> Harm:
    """The row as an array that is put together by hand."""

    def harm(content: Content) -> None:
        row = content["update"]["row"]
        known = {"dtype": row.dtype, "shape": row.shape, "stype": row.stype, "data": row.data}
        content["update"] = ArrayRecord({**content["update"], "row": Array(**{**known, **fields})})

    return harm


def promising(shape: str) -> bytes:
    """A NumPy array whose header speaks of far more than there is."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\x00" * 64


def resized(factor: float) -> Harm:
    def harm(content: Content) -> None:
        row = row_of(content)
        rows(content, np.resize(row, int(len(row) * factor)))

    return harm


def fail(content: Content) -> None:
    raise KeyError("a fault of the node")


HARMS: dict[str, tuple[Harm, str]] = {
    "NaN": (poisoned(np.nan), "holds NaN or infinity"),
    "infinity": (poisoned(-np.inf), "holds NaN or infinity"),
    "longer than any number": (poisoned(1e200), "longer than any number"),
    "ten times as long": (resized(10), "bytes in place of"),
    "too short": (resized(0.5), "has the shape"),
    "a matrix": (lambda c: rows(c, row_of(c)[None]), "has the shape"),
    "single precision": (lambda c: rows(c, row_of(c).astype(np.float32)), "is float32 in place of float64"),
    "whole numbers": (lambda c: rows(c, row_of(c).astype(np.int64)), "is int64 in place of float64"),
    "another description": (raw(shape=(3,)), "has the shape"),
    "a header that lies": (raw(data=promising("(75,)")), "does not hold what its description says"),
    "a header that promises": (raw(data=promising("(10**12,)")), "no header of a NumPy array"),
    "a header that promises much": (raw(data=promising("(99999999999999,)")), "does not hold"),
    "no NumPy array": (raw(stype="pickle"), "is no NumPy array"),
    "no bytes": (raw(data=b""), "no header"),
    "objects": (
        raw(data=b"\x93NUMPY\x01\x00\x36\x00{'descr': '|O', 'fortran_order': False, 'shape': (75,), }"),
        "no hea",
    ),
    "an array too many": (
        lambda c: c.__setitem__("update", ArrayRecord({**c["update"], "x": c["update"]["row"]})),
        "'?x",
    ),
    "an array too few": (lambda c: c.__setitem__("update", ArrayRecord({})), "other arrays"),
    "no update": (lambda c: c.pop("update") and None, "the update is missing"),
    "another record": (lambda c: c.__setitem__("update", MetricRecord({"row": 1.0})), "the update is missing"),
    "no reply": (lambda c: c.pop("reply") and None, "there is no reply"),
    "nothing": (lambda c: RecordDict(), "there is no reply"),
    "an earlier Work": (lambda c: told(c, work=c["reply"]["work"] - 1), "answers another Work"),
    "another client": (lambda c: told(c, client=0), "answers another Work"),
    "another run": (lambda c: told(c, run="0" * 32), "answers another Work"),
    "more samples": (lambda c: told(c, samples=10**9), "1000000000 samples now"),
    "no samples": (lambda c: told(c, samples=0), "0 samples now"),
    "more steps": (lambda c: told(c, steps=10**9), "1000000000 steps"),
    "a loss of NaN": (lambda c: told(c, loss=float("nan")), "loss is not finite"),
    "a huge loss": (lambda c: told(c, loss=-1e308), "loss is not finite"),
    "a text for a number": (lambda c: told(c, samples="12"), "samples is no int"),
    "a field too many": (lambda c: told(c, weight=100.0), "other fields"),
    "a fault": (fail, "it failed"),
    "a refusal": (lambda c: RecordDict({"refusal": ConfigRecord({"why": "\x1b[31mno"})}), "it refused: ?[31mno"),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("method", ["adabest+fedglad"])
def test_a_bad_reply_is_refused_and_the_round_goes_on(
    method: str, harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, why = HARMS[harm]
    with caplog.at_level(logging.WARNING, "fedloom"):
        result = served(method, tmp_path, grid=hostile(change, tmp_path), rounds=2, clients_per_round=4)
    without = simulated(method, rounds=2, clients_per_round=4, availability=lambda client, w: client != HOSTILE)
    assert apart(result.params, without.params) < 1e-12
    asked = [4 - row["answered"] for row in result.history]
    assert [row["refused"] for row in result.history] == asked
    assert sum(asked) > 0
    assert [row.get("refused_clients", []) for row in result.history] == [[HOSTILE] * n for n in asked]
    said = [
        record.getMessage() for record in caplog.records if "client 1 (node 1000001) is left out" in record.getMessage()
    ]
    assert len(said) == sum(asked)
    assert all(why.removeprefix("'?") in line for line in said), said
    assert all(line.isprintable() for line in said)


def test_a_client_that_diverges_and_says_so_is_counted_as_in_the_simulator(tmp_path: Path) -> None:
    data = clients()
    x = data.x.clone()
    x[data.offsets[1] : data.offsets[2]] *= 1e200
    wild = fl.Federation.from_tensor(x, data.y, data.offsets, classes=3)
    real = served("adabest", tmp_path, data=wild, clients_per_round=5)
    other = simulated("adabest", data=wild, clients_per_round=5)
    assert [row["diverged"] for row in real.history] == [row["diverged"] for row in other.history] == [1] * 4
    assert [row["refused"] for row in real.history] == [0] * 4
    assert apart(real.params, other.params) < 1e-12


def test_too_few_good_replies_end_the_run_and_it_can_be_resumed(tmp_path: Path) -> None:
    rounds: list[int] = []

    def sometimes(content: Content) -> None:
        if len(rounds) == 2:
            poisoned(np.nan)(content)

    options: dict[str, Any] = {"clients_per_round": 5, "min_replies": 5, "folder": tmp_path / "run"}
    count = [lambda event: rounds.append(event.round)]
    with pytest.raises(fl.RunError, match="Work 2 has 4 usable replies, fewer than min_replies=5"):
        served("adabest", tmp_path / "m", grid=hostile(sometimes, tmp_path / "m"), callbacks=count, **options)
    resumed = served("adabest", tmp_path / "m", resume=True, **options)
    assert apart(resumed.params, simulated("adabest", clients_per_round=5).params) < 1e-12


def test_nodes_that_do_not_fit_are_no_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cases: dict[str, tuple[Harm, str]] = {
        "samples": (lambda c: c["introduction"].update(samples=10**7), "10000000 samples"),
        "none": (lambda c: c["introduction"].update(samples=0), "0 samples"),
        "model": (lambda c: c["introduction"].update(digest="f" * 64), "another model"),
        "partition": (lambda c: c["introduction"].update(partition=7), "partition-id is 7, but there are 4"),
        "taken": (lambda c: c["introduction"].update(partition=0), "partition-id, 0, already"),
        "garbage": (lambda c: RecordDict(), "there is no introduction"),
        "refusal": (lambda c: RecordDict({"refusal": ConfigRecord({"why": "no"})}), "it refused: no"),
    }
    for harm, (change, why) in cases.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fedloom"), pytest.raises(fl.RunError, match=r"only [34] of 4 clients"):
            # Of five nodes number 4 has no place among four clients; the hostile one would be the fourth.
            served(
                "fedavg",
                tmp_path,
                grid=hostile(change, tmp_path, kind="query"),
                clients=4,
                max_samples=10**6,
                enrol_timeout=0.2,
            )
        assert why in caplog.text, harm


@given(st.binary(max_size=300), st.sampled_from(["float64", "float32", "int16", "|O", "é"]), st.booleans())
def test_no_bytes_make_anything_but_a_refusal(data: bytes, dtype: str, header: bool) -> None:
    content = (promising("(4,)")[:-64] if header else b"") + data
    record = ArrayRecord({"row": Array(dtype, (4,), "numpy.ndarray", content)})
    for exact in (True, False):
        try:
            found = unpack(record, {"row": Kind((4,), torch.float64)}, "it") if exact else anything(record, 99, "it")
        except Refused:
            continue
        assert found["row"].shape == (4,)
        assert len(data) == 32


@given(
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_tensors_travel_as_they_are(dtype: torch.dtype, shape: list[int]) -> None:
    tensor = (torch.randn(shape) * 10).to(dtype)
    back = unpack(pack({"a": tensor}), {"a": Kind.of(tensor)}, "it")["a"]
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def asked_by(change: Callable[[Content], None], memory: Path, kind: str = "train") -> tuple[LocalGrid, list[str]]:
    """Nodes whose server sends one of them something else; what they answer to that."""
    answers: list[str] = []

    def mod(message: Message, context: Context, call_next: Call) -> Message:
        mine = context.node_config["partition-id"] == HOSTILE and message.metadata.message_type.startswith(kind)
        if mine:
            change(message.content)
        reply = call_next(message, context)
        if mine:
            answers.append(str(reply.content["refusal"]["why"]) if "refusal" in reply.content else "")
        return reply

    return LocalGrid.of_app(app_for(clients(), memory, mods=[mod]), 5), answers


def ordered(**fields: Any) -> Callable[[Content], None]:
    return lambda content: content["order"].update(fields)


ORDERS: dict[str, tuple[Callable[[Content], None], str]] = {
    "a path": (ordered(run="../../../../etc/cron.d/x".ljust(32, "0")), "out of range"),
    "a client below none": (ordered(client=-1), "out of range"),
    "a client above all": (ordered(client=99), "out of range"),
    "too many clients": (ordered(client=10**12, clients=10**13), "out of range"),
    "another protocol": (ordered(protocol=2), "another protocol"),
    "an unknown method": (ordered(method="evil(__import__('os'))"), "does not know the server's method"),
    "no settings": (ordered(local="["), "settings of local training"),
    "wild settings": (ordered(local='{"epochs": -5}'), "settings of local training"),
    "batches beyond all memory": (
        ordered(local='{"batch_size": 2000000000, "last_batch": "bootstrap"}'),
        "batches of 2,000,000,000",
    ),
    "unknown wishes": (ordered(wants='["your data"]'), "can't report: your data"),
    "a number for a text": (ordered(run=5), "run is no str"),
    "no order": (lambda c: c.pop("order") and None, "there is no order"),
    "no model": (lambda c: c.pop("model") and None, "the model is missing"),
    "no rates": (lambda c: c.__setitem__("beside", ArrayRecord({})), "no learning rates"),
    "few rates": (lambda c: c["beside"].update(rates=Array(np.zeros(1))), "1 learning rates for"),
    "another model": (lambda c: c["model"].update(start=Array(np.zeros(3))), "has the shape"),
    "too much": (lambda c: c["beside"].update(x=Array(np.zeros(9_000_000))), "larger than"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_client_refuses_what_is_no_order(order: str, tmp_path: Path) -> None:
    change, why = ORDERS[order]
    grid, answers = asked_by(change, tmp_path / "memory")
    result = served("adabest", tmp_path / "memory", grid=grid, rounds=1, clients_per_round=5)
    assert result.history[0]["refused_clients"] == [HOSTILE]
    assert len(answers) == 1
    assert why in answers[0], answers
    assert {path.name for path in (tmp_path / "memory").glob("*/*.memory")} == {
        "0.memory",
        "2.memory",
        "3.memory",
        "4.memory",
    }


def test_a_client_trains_by_its_own_settings_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = app_for(clients(), tmp_path, local=fl.Local(epochs=1, lr=0.05))
    with caplog.at_level(logging.WARNING, "fedloom"), pytest.raises(fl.RunError, match="only 0 of 5"):
        served("fedavg", tmp_path, grid=LocalGrid.of_app(app, 5), enrol_timeout=0.3)
    assert "its own settings only: epochs is 1, not 2, batch_size is 32, not 4" in caplog.text


def test_a_late_answer_leaves_no_trace(tmp_path: Path) -> None:
    """A client trains and remembers, but its answer comes too late: the next Work goes on from before it."""

    class Slow(LocalGrid):
        def pull_messages(self, message_ids: Any) -> list[Message]:
            found = super().pull_messages(message_ids)
            late = [r for r in found if r.has_content() and "reply" in r.content and r.content["reply"]["work"] == 1]
            return [r for r in found if not (r in late and r.metadata.src_node_id == 1_000_000 + HOSTILE)]

    for method in ("adabest+fedglad", "scaffold", "feddyn"):
        memory = tmp_path / method
        grid = Slow.of_app(app_for(clients(), memory), 5)
        result = served(method, memory, grid=grid, clients_per_round=5, round_timeout=0.3)
        assert [row["silent"] for row in result.history] == [0, 1, 0, 0]
        away = simulated(method, clients_per_round=5, availability=lambda client, w: (client, w) != (HOSTILE, 1))
        assert apart(result.params, away.params) < 1e-12


def test_an_order_that_is_over_is_refused(tmp_path: Path) -> None:
    """Somebody plays an earlier message again: what the client remembers since must not be forgotten for it."""
    kept: list[Message] = []

    def mod(message: Message, context: Context, call_next: Call) -> Message:
        if message.metadata.message_type.startswith("train") and context.node_config["partition-id"] == HOSTILE:
            kept.append(message)
        return call_next(message, context)

    app = app_for(clients(), tmp_path, mods=[mod])
    served("adabest", tmp_path, grid=LocalGrid.of_app(app, 5), clients_per_round=5)
    (path,) = tmp_path.glob(f"*/{HOSTILE}.memory")
    before = path.read_bytes()
    context = Context(1, 1_000_001, {"partition-id": HOSTILE}, RecordDict(), {})
    reply = app(kept[0], context)
    assert "Work 0 is over" in str(reply.content["refusal"]["why"])
    assert path.read_bytes() == before
    again = app(kept[-2], context)  # the last: it is played again, as after a lost answer
    assert "reply" in again.content


def test_models_must_be_alike(tmp_path: Path) -> None:
    """Frozen weights do not travel, so they must be the same."""

    def frozen(value: float) -> torch.nn.Module:
        model = mlp()
        model.get_submodule("0").weight.requires_grad_(False).fill_(value)  # type: ignore[operator]
        return model

    app = app_for(clients(), tmp_path, lambda: frozen(1.0))
    assert served("fedavg", tmp_path, grid=LocalGrid.of_app(app, 5), model=lambda: frozen(1.0), rounds=1).history
    with pytest.raises(fl.RunError, match="only 0 of 5"):
        served("fedavg", tmp_path, grid=LocalGrid.of_app(app, 5), model=lambda: frozen(2.0), enrol_timeout=0.3)
