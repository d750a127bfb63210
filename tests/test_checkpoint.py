"""Checkpoints: only what changed is written, what is damaged is never loaded, and what can't be written is said so."""

import hashlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedloom as fl
from fedloom.checkpoint import KEPT, MANIFEST, MEMORY, TENSORS, Checkpoints, Saved
from fedloom.lockstep import run_together
from fedloom.memory import Memory
from fedloom.population import Population
from fedloom.round import RunState
from fedloom.stopping import Terminated, seconds_of, terminable, undisturbed, within
from fedloom.training import Training
from tests.command_line import ENV, fedloom, fedloom_alone
from tests.engines.test_vector import dense, federation

P = 200
CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------------
# What clients remember: pieces
# ---------------------------------------------------------------------------------------------------------------------


def memory() -> Memory:
    return Memory({"h": "row", "t": "scalar"}, torch.zeros(P, dtype=torch.float64))


def state(round: int, work: int) -> Saved:
    theta = torch.full((P,), float(round), dtype=torch.float64)
    return Saved(RunState(round, work, theta, {}, {}), [{"round": r} for r in range(round)], {}, {})


def write(kept: Memory, clients: list[int], w: int) -> None:
    h = torch.tensor(clients)[:, None] * 1000.0 + w + torch.arange(P) / P
    kept.write(torch.tensor(clients), w, {"h": h.double(), "t": torch.full((len(clients),), float(w)).double()})


def pieces(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (folder / MEMORY).iterdir()}


def read_back(folder: Path, kept: Memory, w: int, clients: int) -> None:
    """A fresh process finds exactly what was known before Work w."""
    other, again = memory(), Checkpoints(folder, {})
    assert again.load(CPU) is not None
    other.restore(again.remembered("m"))
    everyone = torch.arange(clients)
    for mine, theirs in zip(kept.read(everyone, w).values(), other.read(everyone, 1 << 60).values(), strict=True):
        assert torch.equal(mine, theirs)


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    kept, checkpoints = memory(), Checkpoints(tmp_path, {})
    checkpoints.begin()
    write(kept, list(range(500)), 0)
    checkpoints.save(state(1, 1), {"m": kept})
    (whole,) = pieces(tmp_path).values()
    assert whole > 500 * P * 8
    write(kept, [7, 450, 3], 1)
    kept.settle()
    checkpoints.save(state(2, 2), {"m": kept})
    (_, few) = sorted(pieces(tmp_path).values(), reverse=True)
    assert 3 * P * 8 < few < 5 * P * 8
    read_back(tmp_path, kept, 2, 501)
    before = pieces(tmp_path)
    checkpoints.save(state(3, 2), {"m": kept})  # nobody took part
    assert pieces(tmp_path) == before


def test_half_a_round_is_not_written(tmp_path: Path) -> None:
    """An interrupt comes when clients have trained a Work of the next round already: 7 for the second time, 9 for the
    first.
    """
    kept, checkpoints = memory(), Checkpoints(tmp_path, {})
    checkpoints.begin()
    write(kept, [7, *range(10, 30)], 0)
    kept.settle()
    write(kept, [7, 9], 1)
    checkpoints.save(state(1, 1), {"m": kept})
    read_back(tmp_path, kept, 1, 30)
    kept.settle()
    checkpoints.save(state(2, 2), {"m": kept})  # the round went on after all
    read_back(tmp_path, kept, 2, 30)


@pytest.mark.parametrize("seed", range(4))
def test_pieces_make_up_the_whole(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cohorts of all sizes; now and then the process dies and another goes on from what is on disk."""
    monkeypatch.setattr("fedloom.checkpoint.PORTION", 40 * P * 8)
    rng = np.random.default_rng(seed)
    kept, checkpoints = memory(), Checkpoints(tmp_path, {})
    checkpoints.begin()
    live: set[int] = set()
    written = 0
    for w in range(60):
        chosen = rng.choice(300, rng.choice([1, 3, 10, 150]), replace=False).tolist()
        live |= set(chosen)
        write(kept, chosen, w)
        kept.settle()
        before = pieces(tmp_path)
        checkpoints.save(state(w + 1, w + 1), {"m": kept})
        now = pieces(tmp_path)
        written += sum(size for name, size in now.items() if name not in before)
        read_back(tmp_path, kept, w + 1, 300)
        files = {name for piece in checkpoints.pieces for name in piece.files}
        assert len(checkpoints.pieces) <= 2 + math.log2(len(live) + 1)
        assert sum(now[name] for name in files) <= 4 * len(live) * (P + 3) * 8 + 4000
        assert len([*tmp_path.glob("round-*")]) <= KEPT
        if rng.random() < 0.2:
            kept, checkpoints = memory(), Checkpoints(tmp_path, {})
            assert checkpoints.load(CPU) is not None
            kept.restore(checkpoints.remembered("m"))
    assert written < 0.75 * 60 * 300 * P * 8  # all of it every time would be more


# ---------------------------------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {"rounds": 6, "clients_per_round": 2, "engine": "loop"}
METHOD = "adabest(mu=0.1)+dgt"


def played(folder: Path, rounds: int = 6, **more: Any) -> Training:
    given: dict[str, Any] = {**SETTINGS, "rounds": rounds, **more}
    return Training(dense(), federation(), METHOD, checkpoint=folder, checkpoint_every=1, **given)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Tensor]]:
    """A folder with the checkpoints of rounds 5 and 6, and the models that they must hold."""
    folder = tmp_path_factory.mktemp("two") / "checkpoint"
    models: dict[int, Tensor] = {}
    played(folder).run([lambda event: models.__setitem__(event.round, event.params)])
    assert sorted(path.name for path in folder.glob("round-*")) == ["round-00000005", "round-00000006"]
    return folder, models


def damaged(two: tuple[Path, dict[int, Tensor]], path: Path, content: bytes) -> int | None:
    """Which round is resumed with other content in a file: None is a refusal."""
    folder, models = two
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        run = played(folder, resume=True)
    except fl.RunError:
        return None
    finally:
        path.write_bytes(whole)
    assert torch.equal(run.state.theta, models[run.state.round])
    assert len(run.history) == run.state.round
    return run.state.round


def test_truncations_of_a_manifest(two: tuple[Path, dict[int, Tensor]], caplog: pytest.LogCaptureFixture) -> None:
    folder, models = two
    path, identity = folder / "round-00000006" / MANIFEST, played(folder).identity
    whole = path.read_bytes()
    try:
        for length in [*range(100), *range(100, len(whole) - 20, 7), *range(len(whole) - 20, len(whole))]:
            path.write_bytes(whole[:length])
            caplog.clear()
            saved = Checkpoints(folder, identity).load(CPU)
            assert saved is not None
            assert saved.state.round == 5
            assert torch.equal(saved.state.theta, models[5])
            assert "checkpoint round-00000006 is damaged" in caplog.text
    finally:
        path.write_bytes(whole)
    assert damaged(two, path, whole) == 6


@pytest.mark.parametrize("how", ["truncations", "flips"])
def test_damaged_tensors(how: str, two: tuple[Path, dict[int, Tensor]]) -> None:
    """200 of each, over the tensors and the pieces of what clients remember; those that both checkpoints need are
    refused, all others repaired from the checkpoint before.
    """
    folder, rng = two[0], np.random.default_rng(0)
    manifests = [json.loads((folder / f"round-0000000{r}" / MANIFEST).read_text().split("\n", 1)[1]) for r in (5, 6)]
    five, six = ({name for piece in m["memory"] for name in piece["files"]} for m in manifests)
    assert six - five
    files = [folder / "round-00000006" / TENSORS, *(folder / MEMORY / name for name in sorted(six))]
    outcomes = []
    for i in range(200):
        path = files[i % len(files)]
        content = bytearray(path.read_bytes())
        if how == "flips":
            content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        else:
            del content[rng.integers(len(content)) :]
        outcomes.append(damaged(two, path, bytes(content)))
        assert outcomes[-1] == (None if path.name in five else 5), path
    assert 5 in outcomes
    assert damaged(two, files[0], files[0].read_bytes()) == 6


def test_missing_files(two: tuple[Path, dict[int, Tensor]], tmp_path: Path) -> None:
    for name in ("round-00000006/" + MANIFEST, "round-00000006/" + TENSORS, "round-00000006"):
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(two[0], folder)
        gone = folder / name
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        run = played(folder, resume=True)
        assert run.state.round == 5
        result = run.run()
        assert torch.equal(result.params, two[1][6])
        assert played(folder, resume=True).state.round == 6  # the damaged one has been replaced


def test_pipe_in_place_of_a_file(two: tuple[Path, dict[int, Tensor]], tmp_path: Path) -> None:
    """It would wait for ever."""
    for name in (MANIFEST, TENSORS):
        folder = tmp_path / name
        shutil.copytree(two[0], folder)
        path = folder / "round-00000006" / name
        path.unlink()
        os.mkfifo(path)
        assert played(folder, resume=True).state.round == 5


def test_damaged_one_does_not_outlive_the_next(two: tuple[Path, dict[int, Tensor]], tmp_path: Path) -> None:
    """After round 5 was resumed because 6 is damaged, and round 7 is saved, 7 and 5 are kept, not 7 and 6."""
    folder = tmp_path / "c"
    shutil.copytree(two[0], folder)
    (folder / "round-00000006" / TENSORS).write_bytes(b"")
    run = Training(
        dense(), federation(), METHOD, checkpoint=folder, checkpoint_every=7, resume=True, **{**SETTINGS, "rounds": 7}
    )
    run.run()
    assert sorted(path.name for path in folder.glob("round-*")) == ["round-00000005", "round-00000007"]


def test_nothing_behind_a_link_is_touched(two: tuple[Path, dict[int, Tensor]], tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "c"
    home.mkdir()
    (home / "thesis.tex").write_text("years")
    shutil.copytree(two[0], folder)
    shutil.rmtree(folder / MEMORY)
    (folder / MEMORY).symlink_to(home)
    with pytest.raises(fl.RunError, match="memory is a link, behind which nothing is read or written"):
        played(folder, rounds=8, resume=True)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / MEMORY).symlink_to(home)
    with pytest.raises(fl.RunError, match="memory is a link"):
        played(folder).run()
    assert (home / "thesis.tex").read_text() == "years"
    shutil.copytree(two[0], tmp_path / "d")
    shutil.move(tmp_path / "d" / "round-00000006", home)
    (tmp_path / "d" / "round-00000006").symlink_to(home / "round-00000006")
    assert played(tmp_path / "d", resume=True).state.round == 5


def test_what_is_not_ours_stays(two: tuple[Path, dict[int, Tensor]], tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(two[0], folder)
    others = [folder / "my-round-notes" / "a", folder / MEMORY / "sub" / "b", folder / MEMORY / "notes.txt"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    played(folder, rounds=8, resume=True).run()
    assert all(path.read_text() == "mine" for path in others)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_manifest_of_an_enemy(data: st.DataObject, two: tuple[Path, dict[int, Tensor]]) -> None:
    """Its checksum is right, but something in it is not: it is loaded or refused, and nothing else is raised."""
    path = two[0] / "round-00000006" / MANIFEST
    whole = path.read_text()
    manifest = json.loads(whole.split("\n", 1)[1])
    place: Any = manifest
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    if data.draw(st.booleans()) and isinstance(place, dict):
        del place[key]
    else:
        place[key] = data.draw(JSON)
    text = json.dumps(manifest)
    path.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()}) + "\n" + text)
    try:
        played(two[0], resume=True)
    except fl.FedloomError:
        pass
    finally:
        path.write_text(whole)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), which=st.integers(0, 2))
def test_files_of_an_enemy(content: bytes, which: int, two: tuple[Path, dict[int, Tensor]]) -> None:
    """Any bytes under a manifest whose checksums fit them."""
    path = two[0] / "round-00000006" / MANIFEST
    whole = path.read_text()
    manifest = json.loads(whole.split("\n", 1)[1])
    digest = hashlib.sha256(content).hexdigest()
    last = manifest["memory"][-1]["files"]
    target = [two[0] / "round-00000006" / TENSORS, two[0] / MEMORY / [*last][-1], path][which]
    before = target.read_bytes()
    if which == 0:
        manifest["sha256"] = digest
    else:
        last[[*last][-1]] = digest
    text = json.dumps(manifest)
    target.write_bytes(content)
    if which < 2:
        path.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()}) + "\n" + text)
    try:
        played(two[0], resume=True)
    except fl.FedloomError:
        pass
    finally:
        target.write_bytes(before)
        path.write_text(whole)


# ---------------------------------------------------------------------------------------------------------------------
# Another run
# ---------------------------------------------------------------------------------------------------------------------


def other_labels() -> fl.Federation:
    given = federation()
    return fl.Federation.from_arrays([(x, y.flip(0)) for x, y in (given.client(k) for k in range(len(given)))])


def other_partition() -> fl.Federation:
    given = federation()
    return fl.Federation.from_arrays([given.client(k) for k in reversed(range(len(given)))])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "adabest(mu=0.2)+dgt"}, r'method was "adabest\(mu=0.1\)\+dgt", now "adabest\(mu=0.2\)\+dgt"'),
        ({"local": fl.Local(lr=0.5)}, r"local.lr was 0.01, now 0.5"),
        ({"federation": other_labels()}, "data differs"),
        ({"federation": other_partition()}, "partition differs|data differs"),
        ({"model": torch.nn.Sequential(dense(), torch.nn.Identity())}, "model"),
        ({"seed": 3}, "seed was 0, now 3"),
    ],
    ids=["method", "local", "data", "partition", "model", "seed"],
)
def test_changed_run_is_refused(change: dict[str, Any], said: str, two: tuple[Path, dict[int, Tensor]]) -> None:
    given: dict[str, Any] = {"model": dense(), "federation": federation(), "method": METHOD, **SETTINGS, **change}
    with pytest.raises(fl.RunError, match=f"belongs to another run: .*({said})"):
        Training(checkpoint=two[0], resume=True, **given)


@pytest.mark.parametrize("shuffle", [True, False])
def test_settings_that_are_newer_than_the_checkpoint(shuffle: bool, two: tuple[Path, dict[int, Tensor]]) -> None:
    """What it does not know had its default."""
    path = two[0] / "round-00000006" / MANIFEST
    whole = path.read_text()
    manifest = json.loads(whole.split("\n", 1)[1])
    del manifest["identity"]["local"]["shuffle"]
    text = json.dumps(manifest)
    path.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()}) + "\n" + text)
    try:
        if shuffle:
            assert played(two[0], resume=True).state.round == 6
        else:
            with pytest.raises(fl.RunError, match=r"belongs to another run: local.shuffle was true, now false"):
                played(two[0], resume=True, local=fl.Local(shuffle=False))
    finally:
        path.write_text(whole)


def test_queue_of_buffers(tmp_path: Path) -> None:
    """FedAsync remembers models of earlier rounds, with their batch-norm statistics as soon as there are some."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).double()
    method = "fedasync(staleness=poly, max_staleness=3)"
    given: dict[str, Any] = {"clients_per_round": 2, "engine": "loop", "local": fl.Local(batch_size=8)}
    whole = fl.fit(model, federation(sizes=[0, 8, 20, 30, 42]), method, rounds=9, **given)
    given |= {"federation": federation(sizes=[0, 8, 20, 30, 42]), "checkpoint": tmp_path}
    fl.fit(model, method=method, rounds=4, **given)
    resumed = fl.fit(model, method=method, rounds=9, resume=True, **given)
    assert torch.equal(whole.params, resumed.params)


def test_engine_may_change(two: tuple[Path, dict[int, Tensor]], tmp_path: Path) -> None:
    shutil.copytree(two[0], tmp_path / "c")
    loop, vector = (
        played(tmp_path / "c" if engine == "vector" else tmp_path / "new", rounds=9, engine=engine, resume=True).run()
        for engine in ("loop", "vector")
    )
    assert torch.allclose(loop.params, vector.params, rtol=1e-4, atol=1e-6)
    assert len(vector.history) == 9


# ---------------------------------------------------------------------------------------------------------------------
# Being told to stop
# ---------------------------------------------------------------------------------------------------------------------


def test_writing_takes_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checkpoints that take long come rarely: of twelve rounds of a second each, a save of 0.2 s is worth every fourth.
    In lockstep rounds of a run are its share of the time, however long they last by the clock.
    """
    monkeypatch.setattr("fedloom.training.BETWEEN_CHECKPOINTS", 0.0)
    clock = [0.0]
    monkeypatch.setattr("fedloom.training.time.monotonic", lambda: clock[0])
    saved: list[int] = []
    run = Training(dense(), federation(), METHOD, checkpoint=tmp_path, **{**SETTINGS, "rounds": 12})
    assert run.checkpoints is not None

    def slowly(*of: Any) -> None:
        saved.append(run.state.round)
        clock[0] += 0.2

    monkeypatch.setattr(run.checkpoints, "save", slowly)
    counted = run._row

    def row(*of: Any) -> dict[str, Any]:
        clock[0] += 100.0  # by the clock
        return {**counted(*of), "seconds": float(run.state.round + 1)}

    monkeypatch.setattr(run, "_row", row)
    run.run()
    assert saved == [0, 4, 8, 12]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """It is heard, also where the tests run in the background, in which a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number: int, after: float) -> None:
    threading.Timer(after, os.kill, (os.getpid(), number)).start()


def test_terminated_in_python(tmp_path: Path) -> None:
    """As any script that calls `fit`: SIGTERM saves, and what was arranged for it before is there again."""
    run = played(tmp_path, rounds=100_000)
    run.checkpoint_every = 1_000_000
    send(signal.SIGTERM, 0.3)
    with pytest.raises(Terminated):
        run.run()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    done = run.state.round
    assert 0 < done < 100_000
    resumed = played(tmp_path, rounds=done + 2, resume=True)
    assert resumed.state.round == done
    whole = Training(dense(), federation(), METHOD, **{**SETTINGS, "rounds": done + 2})
    assert torch.equal(resumed.run().params, whole.run().params)


def test_a_signal_whose_exception_is_swallowed(tmp_path: Path) -> None:
    """Whoever catches everything does not keep a run from ending with its round."""

    def swallow(event: fl.Event) -> None:
        if event.round == 3:
            with suppress(BaseException):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)  # time for the signal to arrive

    run = played(tmp_path, rounds=20)
    with pytest.raises(Terminated):
        run.run([swallow])
    assert run.state.round == 3
    assert played(tmp_path, rounds=20, resume=True).state.round == 3


def test_own_arrangements_for_a_signal_stay() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with terminable(), undisturbed():
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == []
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signal_waits_for_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Checkpoints.save
    inside: list[bool] = []

    def slow(self: Checkpoints, *given: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # time for the signal to arrive
        saving(self, *given)
        inside.append(True)

    monkeypatch.setattr(Checkpoints, "save", slow)
    with pytest.raises(Terminated):
        played(tmp_path).run()
    assert inside
    monkeypatch.setattr(Checkpoints, "save", saving)
    assert played(tmp_path, resume=True).state.round == 0  # it came with the one before the first round


@pytest.mark.usefixtures("ctrl_c")
def test_second_signal_does_not_keep_others_from_being_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, twice in a row, while several runs train together: the second comes while the first run is saved."""
    saving, count = Checkpoints.save, 0

    def impatient(self: Checkpoints, *given: Any) -> None:
        nonlocal count
        count += 1
        if count > 3:  # the first three are those before the first round
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)
        saving(self, *given)

    monkeypatch.setattr(Checkpoints, "save", impatient)
    data = federation()
    settings: dict[str, Any] = {**SETTINGS, "rounds": 300, "engine": "vector", "checkpoint_every": 1_000_000}
    settings["compile"] = False
    runs = [
        Training(dense(), data, METHOD, checkpoint=tmp_path / str(seed), seed=seed, **settings) for seed in range(3)
    ]

    def stop(event: fl.Event) -> None:
        if event.round == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_together(runs, [[stop], [], []])
    assert count == 6
    for seed, run in enumerate(runs):
        assert run.state.round > 0
        saved = Checkpoints(tmp_path / str(seed), run.identity).load(CPU)
        assert saved is not None
        assert saved.state.round == run.state.round


@pytest.mark.usefixtures("ctrl_c")
def test_round_is_over_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal right behind the model's change: the score that patience counts is there, too."""
    data = federation()
    held = fl.Federation.from_arrays([data.client(k) for k in range(5)], validation=data.client(5))
    settings: dict[str, Any] = {"rounds": 30, "clients_per_round": 2, "engine": "loop", "patience": 3, "min_gain": 0.05}
    whole = fl.fit(dense(), held, METHOD, **settings)
    assert whole.stopped == "patience"
    settle = Population.settle
    for round in range(1, len(whole.history)):

        def interrupted(self: Population, when: int = round, calls: list[int] = []) -> None:  # noqa: B006
            calls.append(1)
            if len(calls) == when:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.005)
            settle(self)

        monkeypatch.setattr(Population, "settle", interrupted)
        saving: dict[str, Any] = {"checkpoint": tmp_path / str(round), "checkpoint_every": 1000}
        with pytest.raises(KeyboardInterrupt):
            fl.fit(dense(), held, METHOD, **settings, **saving)
        monkeypatch.setattr(Population, "settle", settle)
        resumed = fl.fit(dense(), held, METHOD, resume=True, **settings, **saving)
        assert len(resumed.history) == len(whole.history)
        kept = (list(one.model.state_dict().values()) for one in (whole, resumed))
        assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_time_that_is_used_up(tmp_path: Path) -> None:
    run = played(tmp_path, rounds=1_000_000)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), within("0.4s"):
        run.run()
    assert 0.3 < time.monotonic() - began < 10
    assert played(tmp_path, rounds=1_000_000, resume=True).state.round == run.state.round > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5", 1.5), ("90m", 5400), ("1h30m", 5400), ("2d 1s", 172801)]
)
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "1x", "-5", "0", "nan", "inf", "1h-30m", "1.2.3s", "1m30", "1e12", "9999999999d"]
)
def test_bad_times(text: str) -> None:
    with pytest.raises(fl.ConfigError, match="time_budget must be seconds or a text such as '90m'"):
        seconds_of(text)


# ---------------------------------------------------------------------------------------------------------------------
# Diverged clients
# ---------------------------------------------------------------------------------------------------------------------


def fragile(outputs: Tensor, targets: Tensor) -> Tensor:
    """Not a number where the outputs are huge."""
    loss = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    return torch.where(outputs.abs().amax(1) > 1e20, math.nan, loss)


def overflowing(*bad: int) -> fl.Federation:
    given = federation()
    return fl.Federation.from_arrays(
        [(x * 1e30 if k in bad else x, y) for k, (x, y) in ((k, given.client(k)) for k in range(len(given)))]
    )


def line() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(6, 3).double()


def test_too_many_diverged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cohorts = "fixed(cohorts=[[0, 1, 2], [3, 4, 5], [1, 2, 6]])"
    given: dict[str, Any] = {
        "rounds": 6,
        "engine": "loop",
        "method": f"scaffold+{cohorts}",
        "federation": overflowing(2, 5),
        "loss": fragile,
    }
    saving: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": 1000}
    whole = fl.fit(line(), **given)
    assert [line.get("diverged_clients") for line in whole.history] == [[2], [5], [2]] * 2
    assert "round 2: client 5 diverged" in caplog.text
    with pytest.raises(fl.RunError, match=r"3 updates had diverged by round 3, more than max_diverged=2; .* resumed"):
        fl.fit(line(), max_diverged=2, **given, **saving)
    with pytest.raises(fl.RunError, match="3 updates had diverged by round 3"):
        fl.fit(line(), max_diverged=2, resume=True, **given, **saving)
    again = fl.fit(line(), max_diverged=6, resume=True, **given, **saving)
    assert torch.equal(again.params, whole.params)
    with pytest.raises(fl.RunError, match="6 updates had diverged by round 6"):  # in the last round
        fl.fit(line(), max_diverged=5, **given)
    for bad in (-1, 1.5, True, "3"):
        with pytest.raises(fl.ConfigError, match="max_diverged must be a whole number of at least 0"):
            fl.fit(line(), max_diverged=bad, **given)  # type: ignore[arg-type]


def test_many_diverged_are_not_all_named(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.full((2, 3), 1e30)
    everybody = fl.Federation.from_arrays([(x, [0, 1])] * 30)
    result = fl.fit(torch.nn.Linear(3, 2), everybody, rounds=1, clients_per_round=30, loss=fragile)
    assert "and 20 more diverged" in caplog.text
    assert len(result.history[0]["diverged_clients"]) == 30


# ---------------------------------------------------------------------------------------------------------------------
# A disk that fails
# ---------------------------------------------------------------------------------------------------------------------

RUN = ["run", "--clients", "8", "--per-round", "4", "--model", "mlp(hidden=[500])", "--method", "scaffold"]
RUN += ["--checkpoint-every", "1"]


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole") / "r"
    done = fedloom(*RUN, "--rounds", "6", "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.long
def test_file_that_may_not_grow(tmp_path: Path, whole_model: bytes) -> None:
    """Files may have 20 kB from round 4 on: the tensors do not fit."""
    folder = tmp_path / "r"
    assert fedloom(*RUN, "--rounds", "3", "--out", str(folder)).returncode == 0
    (folder / "model.safetensors").unlink()  # as if it had been stopped before the end
    before = {path: path.read_bytes() for path in (folder / "checkpoint").glob("**/*") if path.is_file()}

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    failed = fedloom_alone(*RUN, "--rounds", "6", "--out", str(folder), "--resume", preexec_fn=limited)
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
    assert "the checkpoint of round 4 can't be written to" in failed.stderr
    assert "File too large" in failed.stderr
    assert "the last checkpoint, of round 3, is whole" in failed.stderr
    assert {path: path.read_bytes() for path in (folder / "checkpoint").glob("**/*") if path.is_file()} == before
    done = fedloom(*RUN, "--rounds", "6", "--out", str(folder), "--resume")
    assert done.returncode == 0, done.stderr
    assert (folder / "model.safetensors").read_bytes() == whole_model


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2.5 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("file systems can't be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_full_disk(small_disk: Path, whole_model: bytes) -> None:
    folder = small_disk / "r"
    failed = fedloom(*RUN, "--rounds", "6", "--out", str(folder))
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
    assert "No space left on device" in failed.stderr
    assert "is whole: resume from it" in failed.stderr
    assert not [*(folder / "checkpoint").glob("**/.*.part")]
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    done = fedloom(*RUN, "--rounds", "6", "--out", str(folder), "--resume")
    assert done.returncode == 0, done.stderr
    assert (folder / "model.safetensors").read_bytes() == whole_model


def test_vanished_folder(tmp_path: Path) -> None:
    folder = tmp_path / "c"

    def take_away(event: fl.Event) -> None:
        if event.round == 3:
            shutil.rmtree(folder)

    with pytest.raises(fl.RunError, match=r"has vanished, so that round 3 can't be saved; no checkpoint is on disk"):
        played(folder).run([take_away])
    assert not folder.exists()


def test_folder_that_may_not_be_written() -> None:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    # Root may write everywhere, so that it becomes nobody.
    code = (
        "import os, torch, fedloom as fl\n"
        "data = fl.Federation.from_arrays([(torch.randn(4, 3), [0, 1, 0, 1])] * 3)\n"
        "fl.fit(torch.nn.Linear(3, 2), data, rounds=1)\n"  # all imports, as long as they may be read
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        f"fl.fit(torch.nn.Linear(3, 2), data, rounds=2, checkpoint={str(folder / 'c')!r})\n"
    )
    failed = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=60)
    folder.rmdir()
    assert failed.returncode == 1
    assert "fedloom.errors.RunError: checkpoints can't be kept in" in failed.stderr
    assert "Permission denied" in failed.stderr
