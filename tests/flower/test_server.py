"""A server over in-process nodes equals the simulator: every method, its history, memory and restarts."""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

import torch

import fedloom as fl
from fedloom.flower import LocalGrid, client_app, serve
from fedloom.flower.server import settled
from fedloom.flower.wire import read_local, write_local
from tests.examples import EXAMPLES, METHODS, STACK
from tests.flower.in_process import LOCAL, apart, clients, mlp, served, simulated

NOT_COMPARED = {"seconds", "refused", "silent", "forgot"}


def check_same(real: fl.Result, other: fl.Result, most: float = 1e-12) -> None:
    assert apart(real.params, other.params) < most
    assert len(real.history) == len(other.history)
    for a, b in zip(real.history, other.history, strict=True):
        assert a.keys() - NOT_COMPARED == b.keys() - NOT_COMPARED
        for name in a.keys() - NOT_COMPARED:
            assert a[name] == pytest.approx(b[name], rel=1e-9, abs=1e-12, nan_ok=True), name


# What travels differs in these: corrections, memories, rates, scores, models of one's own. The others are long.
DIFFER = ("scaffold", "scaffold-m", "feddyn", "adabest", "fednova", "importance", "radfedi", "2dlrd", "md", "noise")
EVERY_DAY = {STACK, *(EXAMPLES.get(name, name) for name in DIFFER)}
SYNCHRONOUS = [
    pytest.param(method, marks=() if method in EVERY_DAY else pytest.mark.long)
    for method in METHODS
    if "fedasync" not in method  # see test_live.py
]


@pytest.mark.parametrize("method", SYNCHRONOUS)
def test_every_method_equals_the_simulator(method: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 2, "clients_per_round": 4}
    if "scaffold-m" in method:
        options["local"] = fl.Local(steps=3, batch_size=4, lr=0.05)
    check_same(served(method, tmp_path, **options), simulated(method, **options))


@pytest.mark.parametrize("method", ["adabest+fedglad", "radfed(redistributions=2)", "fedavg"])
def test_buffers_travel_too(method: str, tmp_path: Path) -> None:
    local = fl.Local(batch_size=4, lr=0.05, last_batch="bootstrap")
    options: dict[str, Any] = {"model": lambda: mlp(norm=True), "local": local}
    check_same(served(method, tmp_path, **options), simulated(method, **options))


def test_a_run_folder_is_left_as_by_fedloom_run(tmp_path: Path) -> None:
    result = served("adabest+fedglad", tmp_path / "memory", folder=tmp_path / "run", evaluate_clients=False)
    run = fl.load_run(tmp_path / "run")
    assert run.finished
    assert [row["round"] for row in run.history] == [1, 2, 3, 4]
    assert run.config.method == fl.Method("adabest+fedglad").text
    assert run.config.engine == "flower"
    assert run.history[-1]["test_accuracy"] == result.history[-1]["test_accuracy"]


def test_without_test_data_clients_may_score(tmp_path: Path) -> None:
    data = clients()

    def own(context: Any) -> fl.Federation:
        x, y = data.client(int(context.node_config["partition-id"]))
        return fl.Federation.from_arrays([(x[:-3], y[:-3])], test=(x[-3:], y[-3:]), classes=3)

    grid = LocalGrid.of_app(client_app(lambda context: mlp(), own, memory=tmp_path), 5)
    result = serve(grid, mlp(), clients=5, rounds=2, local=LOCAL, evaluate_clients=True)
    last = result.history[-1]
    assert "test_accuracy" not in last
    right = []
    with torch.no_grad():
        for k in range(5):
            x, y = data.client(k)
            right.append(float((result.model(x[-3:]).argmax(1) == y[-3:]).double().mean()))
    assert last["clients_accuracy"] == pytest.approx(sum(right) / 5)
    assert last["clients_loss"] > 0


class Interrupted(Exception):
    pass


def interrupting(at: int) -> Any:
    def callback(event: fl.Event) -> None:
        if event.round == at:
            raise Interrupted

    return callback


STATEFUL = ["adabest+fedglad", "radfed(redistributions=2)+scaffold", "feddyn+2dlrd(c=0.5, window=1)"]


@pytest.mark.parametrize("method", STATEFUL)
@pytest.mark.parametrize("at", [1, 3])
def test_a_resumed_server_ends_where_an_uninterrupted_one_does(method: str, at: int, tmp_path: Path) -> None:
    folder, memory = tmp_path / "run", tmp_path / "memory"
    with pytest.raises(Interrupted):  # after the round, before its checkpoint: the clients are a round ahead
        served(method, memory, folder=folder, callbacks=[interrupting(at)])
    check_same(served(method, memory, folder=folder, resume=True), simulated(method))


def test_a_server_that_never_saved_begins_anew(tmp_path: Path) -> None:
    check_same(served("adabest", tmp_path / "m", folder=tmp_path / "run", resume=True), simulated("adabest"))


def test_a_finished_run_is_told_again_without_clients(tmp_path: Path) -> None:
    first = served("adabest", tmp_path / "memory", folder=tmp_path / "run")
    nobody = LocalGrid(5, lambda messages: pytest.fail("somebody was asked"))
    again = served("adabest", tmp_path / "memory", folder=tmp_path / "run", resume=True, grid=nobody)
    assert torch.equal(again.params, first.params)


def test_a_server_ended_before_its_first_round_is_begun_anew(tmp_path: Path) -> None:
    served("adabest", tmp_path / "m", folder=tmp_path / "run", rounds=1)
    (tmp_path / "run" / "roster.json").unlink()
    with pytest.raises(fl.RunError, match=r"no roster.json of a run"):
        served("adabest", tmp_path / "m", folder=tmp_path / "run", resume=True)
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    check_same(served("adabest", tmp_path / "m", folder=tmp_path / "run", resume=True), simulated("adabest"))


def test_another_runs_folder_is_refused_before_anybody_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("!")
    with pytest.raises(fl.RunError, match="not empty"):
        served("fedavg", tmp_path / "memory", folder=tmp_path / "run", resume=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_run_with_other_settings_is_not_resumed(tmp_path: Path) -> None:
    served("adabest", tmp_path / "memory", folder=tmp_path / "run")
    with pytest.raises(fl.RunError, match="another run: method"):
        served("scaffold", tmp_path / "memory", folder=tmp_path / "run", resume=True, rounds=9)


@pytest.mark.parametrize("harm", ["lost", "damaged", "cut"])
def test_a_client_that_lost_its_memory_begins_anew_and_says_so(harm: str, tmp_path: Path) -> None:
    memory = tmp_path / "memory"

    def spoil(event: fl.Event) -> None:
        if event.round == 2:
            (path,) = memory.glob("*/1.memory")
            content = path.read_bytes()
            if harm == "lost":
                path.unlink()
            else:
                path.write_bytes(content[:-9] if harm == "cut" else content[:-9] + b"123456789")

    result = served("adabest", memory, callbacks=[spoil], clients_per_round=5, folder=tmp_path / "run")
    assert [row["forgot"] for row in result.history] == [0, 0, 1, 0]
    assert result.history[2]["forgot_clients"] == [1]
    assert apart(result.params, simulated("adabest", clients_per_round=5).params) > 1e-6


def test_what_a_client_keeps_does_not_grow(tmp_path: Path) -> None:
    sizes: list[int] = []

    def weigh(event: fl.Event) -> None:
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "memory").glob("*/*.memory")))

    for folder in (None, tmp_path / "run"):
        sizes.clear()
        served("adabest", tmp_path / "memory", folder=folder, rounds=8, clients_per_round=5, callbacks=[weigh])
        assert sizes[-1] < 1.01 * sizes[3]  # the number of the Work has one digit more


def test_memory_is_private(tmp_path: Path) -> None:
    served("adabest", tmp_path / "memory", rounds=1)
    for path in (tmp_path / "memory").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rounds": 0}, "rounds must be"),
        ({"clients_per_round": 6}, "between 1 and the number of clients, 5"),
        ({"clients": 0}, "clients must be"),
        ({"min_replies": 0}, "min_replies must be"),
        ({"round_timeout": 0}, "round_timeout must be"),
        ({"enrol_timeout": float("nan")}, "enrol_timeout must be"),
        ({"max_samples": 2.5}, "max_samples must be"),
        ({"diagnose": "fairness"}, "reads the clients' data"),
        ({"patience": 3}, "needs validation data"),
        ({"local": 3}, "local must be"),
        ({"metric": "f2"}, "unknown metric"),
        ({"folder": "/dev/null/x"}, "can't be written to"),
        ({"folder": "a\0b"}, "can't be written to"),
        ({"folder": "~nobody-of-this-name/x"}, "folder="),
        ({"test": 5}, "test must be a pair"),
        ({"callbacks": 5}, "callbacks must be"),
        ({"evaluate_clients": "yes"}, "evaluate_clients must be"),
    ],
)
def test_bad_settings_are_refused_before_anybody_is_asked(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    nobody = LocalGrid(5, lambda messages: pytest.fail("somebody was asked"))
    with pytest.raises(fl.FedloomError, match=why):
        served("fedavg", tmp_path, grid=nobody, **options)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"method": 3}, "method has a value of another kind: 3"),
        ({"rounds": 2.5}, "rounds has a value of another kind"),
        ({"rounds": True}, "rounds has a value of another kind"),
        ({"round": 2}, "did you mean rounds"),
        ({"learning-rate": 2}, "unknown setting"),
        ({"batch-size": 0}, "batch_size must be"),
        ({"lr": "0.1"}, "lr must be"),
    ],
)
def test_a_run_config_is_checked(config: dict[str, Any], why: str) -> None:
    with pytest.raises(fl.ConfigError, match=why):
        settled(config, {})


def test_a_run_config_wins_over_what_was_written() -> None:
    known = settled({"rounds": 7, "lr": 1, "clients-per-round": 0.5}, {"rounds": 3, "local": fl.Local(epochs=2)})
    assert known == {"rounds": 7, "clients_per_round": 0.5, "local": fl.Local(epochs=2, lr=1)}


def test_what_a_server_can_not_do_is_told_before_anybody_is_asked(tmp_path: Path) -> None:
    nobody = LocalGrid(5, lambda messages: pytest.fail("somebody was asked"))
    with pytest.raises(fl.ConfigError, match="resume=True needs folder="):
        served("fedavg", tmp_path, grid=nobody, resume=True)
    with pytest.raises(fl.ConfigError, match="label-flip changes the clients' data"):
        served("attack(kind=label-flip)", tmp_path, grid=nobody)


def test_a_setting_that_is_not_used_is_not_sent() -> None:
    """A site whose release does not know it reads the rest."""
    assert write_local(fl.Local()) == "{}"
    assert write_local(fl.Local(epochs=1, lr=0.5)) == '{"lr": 0.5}'
    for local in (fl.Local(epochs=3, batch_size=None, shuffle=False), fl.Local(steps=2, optimizer="adam", clip_norm=1)):
        assert read_local(write_local(local)) == local
