"""Folders whose samples stay on disk: the same results as in memory, and one clear sentence for what can't be read."""

import io
import os
import pickle
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom import untrusted
from fedloom.data import lazy, shards
from fedloom.data.catalogue import read_corpus
from fedloom.data.files import Files
from fedloom.data.stored import Stored
from fedloom.engines import choose, rule
from fedloom.engines.choose import Wishes, choose_engine
from fedloom.engines.threads import Threads
from fedloom.engines.vector import Vector
from fedloom.experiment.config import RunConfig
from fedloom.experiment.folder import load_run
from fedloom.experiment.run import Job, start_run, start_runs
from fedloom.simulation import Simulation
from fedloom.stages import Stage, Updates, Work

SIZES = [7, 3, 12, 5, 9, 4, 8, 6]
Save = Callable[..., None]


def samples(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 6)).astype(np.float32), rng.integers(0, 3, n)


def write_shards(folder: Path, save: Any = np.savez, test: bool = True) -> Path:
    """Three files: two shards, and a client alone."""
    train = folder / "train" if test else folder
    train.mkdir(parents=True, exist_ok=True)
    for i, sizes in enumerate((SIZES[:4], SIZES[4:7])):
        x, y = samples(sum(sizes), i)
        save(train / f"{i}.npz", x=x, y=y, offsets=np.cumsum([0, *sizes]))
    x, y = samples(SIZES[7], 9)
    save(train / "alone.npz", x=x, y=y)
    if test:
        (folder / "test").mkdir()
        x, y = samples(40, 10)
        save(folder / "test" / "all.npz", x=x, y=y)
    return folder


def write_tables(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, sizes in enumerate((SIZES[:4], SIZES[4:])):
        x, y = samples(sum(sizes), i)
        table = pd.DataFrame(x.astype(float), columns=list("abcdef")).assign(label=y)
        table["who"] = np.random.default_rng(i).permutation(np.repeat([f"{i}-{k}" for k in range(4)], sizes))
        path = folder / f"{i}{kind}"
        table.to_parquet(path) if kind == ".parquet" else table.to_csv(path, index=False)
    return folder


def both(folder: Path, **options: Any) -> tuple[fl.Federation, fl.Federation]:
    return fl.Federation.from_folder(folder, **options), fl.Federation.from_folder(folder, lazy=True, **options)


def fit(federation: fl.Federation, method: str = "fedavg", model: nn.Module | None = None, **more: Any) -> fl.Result:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"rounds": 3, "clients_per_round": 4, "seed": 1, "engine": "loop", **more}
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) if model is None else model
    local = settings.pop("local", fl.Local(batch_size=4, lr=0.1, epochs=2))
    return fl.fit(made, federation, method, local=local, **settings)


def same(a: fl.Result, b: fl.Result) -> None:
    assert torch.equal(a.params, b.params)
    for name, value in a.model.state_dict().items():
        assert torch.equal(value, b.model.state_dict()[name])
    for mine, theirs in zip(a.history, b.history, strict=True):
        assert {n: v for n, v in mine.items() if n != "seconds"} == {n: v for n, v in theirs.items() if n != "seconds"}


# What is read


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_client_is_as_in_memory(save: Save, tmp_path: Path) -> None:
    here, there = both(write_shards(tmp_path, save))
    assert there.names is not None
    assert here.names is not None
    assert there.names.tolist() == here.names.tolist()
    assert there.sizes.tolist() == here.sizes.tolist() == SIZES
    assert (there.classes, there.name) == (here.classes, here.name) == (3, "folder")
    assert there.shards is not None
    assert [shard.arrays is not None for shard in there.shards.shards] == [save is np.savez] * 3
    for k in range(len(here)):
        for mine, theirs in zip(there.client(k), here.client(k), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
    assert there.test is not None
    assert here.test is not None
    assert torch.equal(there.test.x, here.test.x)
    assert torch.equal(there.test.y, here.test.y)


@pytest.mark.parametrize("kind", [".csv", ".csv.gz", ".parquet"])
def test_tables_whose_clients_are_mixed(kind: str, tmp_path: Path) -> None:
    here, there = both(write_tables(tmp_path, kind), client="who")
    for k in range(len(here)):
        for mine, theirs in zip(there.client(k), here.client(k), strict=True):
            assert torch.equal(mine, theirs)


def targets(kind: str) -> list[np.ndarray]:
    found: dict[str, list[np.ndarray]] = {
        "floats": [np.array([0.5, 1.0]), np.array([2.0])],
        "zeros and ones": [np.array([0.0, 1.0]), np.array([1.0])],
        "small": [np.array([0, 1], np.int8), np.array([2], np.uint16)],
        "below zero": [np.array([0, -1]), np.array([3])],
        "sequences": [np.array([[-100, -100], [-100, 4]]), np.array([[-100, -100]])],
    }
    return found[kind]


@pytest.mark.parametrize("kind", ["floats", "zeros and ones", "small", "below zero", "sequences"])
def test_targets_of_every_kind(kind: str, tmp_path: Path) -> None:
    for i, y in enumerate(targets(kind)):
        np.savez(tmp_path / f"{i}.npz", x=np.zeros((len(y), 2), np.float32), y=y)
    here, there = both(tmp_path)
    assert there.classes == here.classes
    for k in range(2):
        assert torch.equal(there.client(k)[1], here.client(k)[1])
        assert there.client(k)[1].dtype == here.client(k)[1].dtype


@pytest.mark.parametrize("change", ["bytes", "columns", "images", "half", "double"])
def test_samples_of_every_kind(change: str, tmp_path: Path) -> None:
    x = samples(10)[0]
    found = {
        "bytes": x.astype(">f4"),
        "columns": np.asfortranarray(x),
        "images": np.arange(10 * 12, dtype=np.uint8).reshape(10, 3, 2, 2),
        "half": x.astype(np.float16),
        "double": x.astype(np.float64),
    }[change]
    np.savez(tmp_path / "a.npz", x=found, y=np.arange(10) % 2, offsets=[0, 4, 10])
    here, there = both(tmp_path)
    assert there.preparation == here.preparation
    for k in range(2):
        assert torch.equal(there.client(k)[0], here.client(k)[0])
        assert there.client(k)[0].dtype == here.client(k)[0].dtype


def test_only_a_head_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "HEAD", 5)
    here, there = both(write_shards(tmp_path))
    assert torch.equal(there.x, here.x[:5])
    assert torch.equal(there.y, here.y[:5])
    monkeypatch.setattr(lazy, "HEAD", 33)  # some of the second file
    assert torch.equal(fl.Federation.from_folder(tmp_path, lazy=True).x, here.x[:33])
    monkeypatch.setattr(lazy, "HEAD_BYTES", 100)
    assert len(fl.Federation.from_folder(tmp_path, lazy=True).x) == 4


def test_clients_are_held_under_their_own_numbers(tmp_path: Path) -> None:
    here, there = both(write_shards(tmp_path))
    asked = torch.tensor([6, 1, 6, 3])
    held = there.holding(asked)
    assert here.holding(asked) is here
    assert len(held.x) == SIZES[1] + SIZES[3] + SIZES[6]
    for k, positions in zip([6, 1], held.positions([6, 1]), strict=True):
        assert torch.equal(held.x[positions], here.client(k)[0])
    with pytest.raises(fl.DataError, match="client 2 are not here"):
        held.positions([2])
    with pytest.raises(fl.DataError, match="on disk"):
        there.positions([1])
    with pytest.raises(fl.DataError, match="no client 8"):
        there.client(8)
    double = there.to(torch.device("cpu"), torch.float64).holding(asked)
    assert double.x.dtype == torch.float64
    assert double.y.dtype == torch.int64


def test_some_clients_only(tmp_path: Path) -> None:
    here, there = both(write_shards(tmp_path))
    for chosen in ([5, 0, 7], [2, 0]):
        here, there = here.only(torch.tensor(chosen)), there.only(torch.tensor(chosen))
        assert there.names is not None
        assert here.names is not None
        assert there.names.tolist() == here.names.tolist()
        assert there.offsets.tolist() == here.offsets.tolist()
        mine, theirs = there.held_out(torch.tensor([1, 0])), here.held_out(torch.tensor([1, 0]))
        assert torch.equal(mine.x, theirs.x)
        assert torch.equal(mine.y, theirs.y)
    held = there.holding(torch.tensor([1])).only(torch.tensor([1]))
    assert torch.equal(held.client(0)[0], here.client(1)[0])


def test_a_record_travels(tmp_path: Path) -> None:
    here, there = both(write_shards(tmp_path))
    again = pickle.loads(pickle.dumps(there.shards))
    x, y = again.read(np.array([4, 2]))
    assert np.array_equal(x, torch.cat([here.client(4)[0], here.client(2)[0]]).numpy())
    assert np.array_equal(y, torch.cat([here.client(4)[1], here.client(2)[1]]).numpy())


def test_tokens_are_counted_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "HEAD", 2)
    monkeypatch.setattr(shards, "CHUNK", 64)
    x = np.random.default_rng(0).integers(0, 50, (30, 4))
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(30) % 2, offsets=[0, 10, 30])
    here, there = both(tmp_path)
    assert there.tokens == here.tokens == x.max() + 1


def test_whole_files_are_kept_as_far_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = fl.Federation.from_folder(write_shards(tmp_path, np.savez_compressed), lazy=True)
    assert there.shards is not None
    read: list[shards.Shard] = []
    own = shards._whole

    def whole(all: shards.Shards, shard: shards.Shard) -> shards.Pair:
        read.append(shard)
        return own(all, shard)

    monkeypatch.setattr(shards, "_whole", whole)
    one = sum(SIZES[:4]) * (6 * 4 + 8)
    monkeypatch.setattr(shards, "WHOLE", shards.Whole(one + 8))
    for k in (0, 1, 3, 4, 5, 0, 7):
        there.client(k)
    assert [shard.path.stem for shard in read] == ["0", "1", "0", "alone"]
    assert sum(x.nbytes + y.nbytes for x, y in shards.WHOLE.kept.values()) <= one + 8


# Training


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("method", ["fedavg+md", "adabest(beta=0.9)", "importance", "radfed(redistributions=2)+dgt"])
def test_results_are_the_same(engine: str, method: str, tmp_path: Path) -> None:
    here, there = both(write_shards(tmp_path))
    same(fit(here, method, engine=engine), fit(there, method, engine=engine))


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_batch_norm_and_few_at_a_time(engine: str, tmp_path: Path) -> None:
    here, there = both(write_shards(tmp_path, np.savez_compressed))
    made = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    local = fl.Local(batch_size=4, lr=0.1, last_batch="bootstrap")
    same(*(fit(f, "fedavg", made, engine=engine, local=local, clients_per_round=8) for f in (here, there)))


def test_one_column_of_pixels_is_augmented_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (30, 3, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=rng.integers(0, 2, 30), offsets=[0, 10, 18, 30])
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    here, there = (f.images((0.5,) * 3, (0.2,) * 3, "flip + crop") for f in both(tmp_path))
    for engine in ("loop", "vector"):
        same(*(fit(f, "fedavg", made, engine=engine, clients_per_round=3) for f in (here, there)))


def test_cores_read_their_own_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = both(write_shards(tmp_path, np.savez_compressed))
    monkeypatch.setattr(choose, "rule", lambda: replace(rule.rule(), shared_from=0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for engine in ("loop", "vector"):
        simulation = simulated(there, Wishes(engine))
        assert isinstance(simulation.engine, Threads)
        same(*(fit(f, engine=engine) for f in (here, there)))


def simulated(federation: fl.Federation, wishes: Wishes) -> Simulation:
    method, local = fl.Method("fedavg"), fl.Local(batch_size=4)
    return Simulation.of(nn.Linear(6, 3), federation, method, rounds=10**6, wishes=wishes, local=local, device="cpu")


def test_nothing_is_compiled_and_few_large_clients_train_together(tmp_path: Path) -> None:
    there = fl.Federation.from_folder(write_shards(tmp_path), lazy=True)
    engine = simulated(there, Wishes("vector", compile=True)).engine
    assert isinstance(engine, Vector)
    assert not engine.compile
    large = replace(there, offsets=torch.tensor([0, 10**9, 2 * 10**9]))
    simulation = simulated(there, Wishes("vector", max_memory=1 << 30))
    chosen, _ = choose_engine(Wishes("vector", max_memory=1 << 30), simulation.task, large, simulation.setup, 1)
    assert isinstance(chosen, Vector)
    assert chosen.together == 1


def test_a_chunk_holds_its_own_clients_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = fl.Federation.from_folder(write_shards(tmp_path), lazy=True)
    seen: list[list[int]] = []
    own = shards.Shards.read

    def read(all: shards.Shards, clients: np.ndarray) -> shards.Pair:
        seen.append(clients.tolist())
        return own(all, clients)

    monkeypatch.setattr(shards.Shards, "read", read)
    engine = simulated(there, Wishes("vector")).engine
    assert isinstance(engine, Vector)
    engine.together = 3
    simulation = replace(simulated(there, Wishes("vector")), engine=engine)
    simulation.play(simulation.begin())
    assert sorted(k for chunk in seen for k in chunk) == list(range(8))
    assert max(map(len, seen)) == 3


def test_diagnostics(tmp_path: Path) -> None:
    here, there = both(write_shards(tmp_path))
    asked = "gsi,similarity,divergence,twin,fairness,probe"
    same(fit(here, diagnose=asked), fit(there, diagnose=asked))


def test_checkpoints_know_the_files(tmp_path: Path) -> None:
    here, there = both(write_shards(tmp_path / "data"))
    whole = fit(there, "adabest(beta=0.9)", rounds=4)
    fit(there, "adabest(beta=0.9)", rounds=2, checkpoint=tmp_path / "run")
    again = fl.Federation.from_folder(tmp_path / "data", lazy=True)
    resumed = fit(again, "adabest(beta=0.9)", rounds=4, checkpoint=tmp_path / "run", resume=True)
    assert torch.equal(whole.params, resumed.params)
    for other in (here, there.only(torch.arange(7)), there.only(torch.tensor([1, 0, *range(2, 8)]))):
        with pytest.raises(fl.RunError, match=r"data|partition"):
            fit(other, "adabest(beta=0.9)", rounds=4, checkpoint=tmp_path / "run", resume=True)


# As a data set


def config(folder: Path, **more: Any) -> RunConfig:
    text = f"folder(path='{folder}', lazy=true)"
    settings = {"data": text, "model": "mlp(hidden=[8])", "rounds": 2, "per_round": 3, "batch_size": 4, "device": "cpu"}
    return RunConfig().change({**settings, **more})


def test_a_run_of_the_command_line(tmp_path: Path) -> None:
    write_shards(tmp_path / "data")
    lazily = config(tmp_path / "data", validation=2)
    run = start_run(lazily, tmp_path / "lazy")
    plainly = start_run(replace(lazily, data=f"folder(path='{tmp_path / 'data'}')"), tmp_path / "plain")
    for mine, theirs in zip(run.history, plainly.history, strict=True):
        assert {n: v for n, v in mine.items() if n != "seconds"} == {n: v for n, v in theirs.items() if n != "seconds"}
    assert "lazy=True" in run.config.data
    read = load_run(tmp_path / "lazy")
    assert read.federation().test is not None
    assert read.model() is not None


def test_natural_clients_are_picked_alike(tmp_path: Path) -> None:
    write_shards(tmp_path)
    for partition in ("natural", "natural(min_samples=5)", "natural(pick=largest)"):
        texts = [f"folder(path='{tmp_path}', lazy={how})" for how in ("true", "false")]
        there, here = (fl.load(text, partition, clients=4, seed=3, validation=1) for text in texts)
        assert there.shards is not None
        assert here.shards is None
        assert there.names is not None
        assert here.names is not None
        assert there.names.tolist() == here.names.tolist()
        assert there.validation is not None
        assert here.validation is not None
        assert torch.equal(there.validation.x, here.validation.x)


def test_runs_in_lockstep_share_what_they_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path / "data")
    methods = ("fedavg", "adabest(beta=0.9)", "importance")
    made = [config(tmp_path / "data", engine="vector", method=method) for method in methods]
    alone = [start_run(one, tmp_path / f"alone{i}") for i, one in enumerate(made)]
    seen = []
    own = Vector.train_together

    def train(self: Vector, parts: Sequence[tuple[Vector, Work]]) -> list[Updates]:
        seen.append(len(parts))
        return own(self, parts)

    monkeypatch.setattr(Vector, "train_together", train)
    together = start_runs([Job(one, tmp_path / f"together{i}") for i, one in enumerate(made)])
    assert max(seen) == 3
    for mine, theirs in zip(together, alone, strict=True):
        a, b = ([line["test_loss"] for line in run.history] for run in (mine, theirs))
        assert a == pytest.approx(b, rel=1e-5)


# What can't be


def refused(federation: fl.Federation, **options: Any) -> Callable[[], object]:
    return lambda: fit(federation, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "iid"}, "partition=iid: with lazy=True the samples stay on disk"),
        ({"partition": "natural(max_rate=0.5)"}, "without max_rate"),
        ({"partition": "dealt.npz"}, "partition=dealt.npz"),
        ({"pooled": True}, "pooled=True: it needs all samples, but these stay on disk"),
        ({"samples": 10}, "samples=10"),
        ({"fold": 0}, "fold=0"),
        ({"standardise": "global"}, "standardise=global"),
        ({"clients": 0}, "at least 1"),
        ({"clients": 9}, "8 of the data set's 8 clients"),
    ],
)
def test_settings_that_need_all_samples(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_shards(tmp_path)
    with pytest.raises(fl.DataError, match=message):
        fl.load(f"folder(path='{tmp_path}', lazy=True)", **options)


def test_what_needs_all_samples_is_refused(tmp_path: Path) -> None:
    there = fl.Federation.from_folder(write_shards(tmp_path), lazy=True)
    for action in (
        lambda: fl.standardise(there, "global"),
        lambda: fl.split_clients(there, fold=0),
        lambda: fl.diagnose.label_counts(there),
        lambda: fl.diagnose.label_counts(there, [0]),
        lambda: fl.diagnose.c_score(there),
        lambda: fl.diagnose.worst_cohort(there, 2),
        refused(there, diagnose="labels"),
        refused(there, method="attack(label-flip)"),
    ):
        with pytest.raises(fl.FedloomError, match=r"on disk \(lazy=True\)"):
            action()
    fit(there, "attack(sign-flip)")
    text, files = f"folder(path='{tmp_path}', lazy=True)", Files.of(None)
    with pytest.raises(fl.DataError, match="leave lazy out"):
        read_corpus(text, files)


def test_a_stage_may_not_change_samples_that_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = fl.Federation.from_folder(write_shards(tmp_path), lazy=True)
    monkeypatch.setattr(Stage, "tamper", lambda self, federation, setup: replace(federation, y=1 - federation.y))
    with pytest.raises(fl.DataError, match=r"changes the clients' data, but these stay on disk"):
        fit(there)


@pytest.mark.parametrize("y", [["yes", "no"], [True, False]])
def test_texts_must_be_numbered(y: list[Any], tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)), y=y)
    with pytest.raises(fl.DataError, match=r"a\.npz: the targets are texts or truth values.*number them from 0"):
        fl.Federation.from_folder(tmp_path, lazy=True)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2)), "y": [0, 1]}, "one entry per sample"),
        ({"x": np.zeros((0, 2)), "y": []}, "one entry per sample"),
        ({"x": np.zeros((2, 2))}, "no array 'y'"),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "offsets": [0, 3]}, "offsets must rise"),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "offsets": [0, 2, 1, 2]}, "offsets must rise"),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "offsets": [0, 2**63, 2]}, "offsets must rise"),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "offsets": [-1, 2]}, "offsets must rise"),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "offsets": [0, 1, 2], "names": ["a"]}, "2 clients have 1 names"),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "offsets": [0, 1, 2], "names": ["a", "a"]}, "two clients with the name"),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "offsets": [0, 1, 2], "names": [b"a", b"\xff"]}, "damaged"),
        ({"x": np.zeros((2, 2)), "y": [0, 10_000]}, "go up to 10000, but only 2 occur"),
        ({"x": np.zeros((2, 2)), "y": [0.5, np.nan]}, "targets hold a NaN"),
        ({"x": np.zeros((2, 2)), "y": [0.5, 1e300]}, "targets hold a NaN or an infinity"),
        ({"x": np.zeros((2, 2), complex), "y": [0, 1]}, "holds complex128"),
        ({"x": np.array([["a"], ["b"]]), "y": [0, 1]}, "numbers were expected"),
        ({"x": np.array([{}, {}]), "y": [0, 1]}, "numbers were expected"),
        ({"x": np.zeros((2, 2)), "y": np.array([{}, {}])}, "numbers were expected"),
    ],
)
def test_bad_arrays(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(fl.DataError, match=message) as error:
        fl.Federation.from_folder(tmp_path, lazy=True)
    assert tmp_path.name in str(error.value) or "occur" in str(error.value)


def test_files_that_disagree(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)), y=[0, 1])
    for x, y in ((np.zeros((2, 3)), [0, 1]), (np.zeros((2, 2), np.float32), [0, 1]), (np.zeros((2, 2)), [0.5, 1])):
        np.savez(tmp_path / "b.npz", x=x, y=y)
        with pytest.raises(fl.DataError, match="'a' and 'b' disagree"):
            fl.Federation.from_folder(tmp_path, lazy=True)


def member(path: Path, name: str) -> tuple[zipfile.ZipInfo, int]:
    """A member, and where its bytes begin."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(name)
    raw = path.read_bytes()
    named, more = struct.unpack_from("<HH", raw, info.header_offset + 26)
    return info, info.header_offset + 30 + named + more


def patch(path: Path, at: int, content: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(content)] = content
    path.write_bytes(raw)


def one_file(folder: Path) -> Path:
    x, y = samples(20)
    np.savez(folder / "a.npz", x=x, y=y, offsets=[0, 8, 20], names=["ann", "bob"])
    return folder / "a.npz"


@pytest.mark.parametrize("lie", ["(99, 6)", "(20, 7)", "(-20, -6)", "(20, 6, 0)", "(True,)", "(9**99,)", "(2e1, 6)"])
def test_headers_that_lie_about_the_shape(lie: str, tmp_path: Path) -> None:
    path = one_file(tmp_path)
    _, begin = member(path, "x.npy")
    length = 10 + int.from_bytes(path.read_bytes()[begin + 8 : begin + 10], "little")
    told = path.read_bytes()[begin : begin + length]
    lied = told.replace(b"(20, 6)", lie.encode()).rstrip()
    patch(path, begin, lied.ljust(length - 1) + b"\n")
    with pytest.raises(fl.DataError, match=r"a\.npz"):
        fl.Federation.from_folder(tmp_path, lazy=True)


def test_a_shape_that_is_empty_and_endless(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (20, 0, 10**30)})
    targets = io.BytesIO()
    np.save(targets, np.zeros(20, int))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
        archive.writestr("y.npy", targets.getvalue())
    with pytest.raises(fl.DataError, match=r"a\.npz is damaged"):
        fl.Federation.from_folder(tmp_path, lazy=True)


def test_every_byte_may_lie(tmp_path: Path) -> None:
    """Whatever a byte of the headers becomes: the samples of some file, or one sentence."""
    path = one_file(tmp_path)
    raw = path.read_bytes()
    _, begin = member(path, "x.npy")
    listed = raw.index(b"PK\x01\x02")
    rng = np.random.default_rng(0)
    for at in [*range(begin + 128), *range(listed, len(raw))][::2]:
        changed = bytearray(raw)
        changed[at] = int(rng.integers(256))
        path.write_bytes(changed)
        with suppress(fl.DataError):
            found = fl.Federation.from_folder(tmp_path, lazy=True)
            assert found.client(0)[0].numel() < 1000


def test_cut_off_files(tmp_path: Path) -> None:
    path = one_file(tmp_path)
    raw = path.read_bytes()
    for length in (0, 10, 200, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:length])
        with pytest.raises(fl.DataError, match=r"a\.npz"):
            fl.Federation.from_folder(tmp_path, lazy=True)


def test_a_member_that_points_elsewhere(tmp_path: Path) -> None:
    path = one_file(tmp_path)
    raw = path.read_bytes()
    listed = raw.index(b"PK\x01\x02")
    for wrong in (len(raw) - 40, 1 << 31, 7):
        path.write_bytes(raw)
        patch(path, listed + 42, struct.pack("<I", wrong))
        with pytest.raises(fl.DataError, match=r"a\.npz"):
            fl.Federation.from_folder(tmp_path, lazy=True)


def test_bytes_before_the_zip(tmp_path: Path) -> None:
    """Bytes before the zip move everything in it, as in an archive that unpacks itself."""
    path = one_file(tmp_path)
    here = fl.Federation.from_folder(tmp_path)
    path.write_bytes(b"#!/bin/sh\nexit 0\n" + path.read_bytes())
    there = fl.Federation.from_folder(tmp_path, lazy=True)
    assert torch.equal(there.client(1)[0], here.client(1)[0])


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "UNPACKED", 1 << 20)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1 << 20, 4), np.float32), y=np.zeros(1 << 20, int))
    with pytest.raises(fl.DataError, match=r"a\.npz: this unpacks to more than"):
        fl.Federation.from_folder(tmp_path, lazy=True)


def test_links_are_followed_and_pipes_are_not_read(tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    path = one_file(away)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link.npz").symlink_to(path)
    os.mkfifo(folder / "pipe.npz")
    (folder / "nowhere.npz").symlink_to(tmp_path / "nothing.npz")
    there = fl.Federation.from_folder(folder, lazy=True)
    assert there.names is not None
    assert there.names.tolist() == ["ann", "bob"]
    assert torch.equal(there.client(1)[0], fl.Federation.from_folder(away).client(1)[0])
    (folder / "link.npz").unlink()
    os.mkfifo(folder / "link.npz")
    with pytest.raises(fl.DataError, match=r"link\.npz has changed"):
        there.client(0)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_file_that_changed_is_refused(save: Save, tmp_path: Path) -> None:
    write_shards(tmp_path, save, test=False)
    there = fl.Federation.from_folder(tmp_path, lazy=True)
    there.client(0)
    path = tmp_path / "0.npz"
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(fl.DataError, match=r"0\.npz has changed since its folder was opened"):
        there.client(0)
    path.write_bytes(path.read_bytes() + b" ")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for action in (lambda: there.client(0), lambda: fit(there, clients_per_round=8)):
        with pytest.raises(fl.DataError, match=r"0\.npz has changed since its folder was opened"):
            action()
    there.client(5)
    path.unlink()
    with pytest.raises(fl.DataError, match=r"0\.npz is gone"):
        there.client(0)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_found_when_it_is_read(
    save: Save, bad: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy, "HEAD", 5)
    x, y = samples(20)
    x[15, 2] = bad
    save(tmp_path / "a.npz", x=x, y=y, offsets=[0, 8, 12, 20], names=["ann", "bob", "cy"])
    there = fl.Federation.from_folder(tmp_path, lazy=True)
    there.client(1)
    for action in (lambda: there.client(2), lambda: fit(there, clients_per_round=3, engine="vector")):
        with pytest.raises(fl.DataError, match=r"a\.npz: the samples of client 'cy' hold a NaN or an infinity"):
            action()
    x[1, 0] = bad
    save(tmp_path / "a.npz", x=x, y=y, offsets=[0, 8, 12, 20])
    with pytest.raises(fl.DataError, match=r"a\.npz: the samples of client 'a/0'"):
        fl.Federation.from_folder(tmp_path, lazy=True)


# How much is read


def test_a_hundred_thousand_clients_open_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.zeros((4000, 10), np.float32), np.arange(4000) % 10
    for i in range(100):
        np.savez(tmp_path / f"{i:03}.npz", x=x, y=y, offsets=np.arange(0, 4001, 4))
    bytes_read = 0
    own = Stored.rows

    def rows(self: Stored, file: Any, begin: int, end: int) -> np.ndarray:
        nonlocal bytes_read
        found = own(self, file, begin, end)
        bytes_read += found.nbytes
        return found

    monkeypatch.setattr(Stored, "rows", rows)
    began = time.perf_counter()
    federation = fl.Federation.from_folder(tmp_path, lazy=True)
    assert time.perf_counter() - began < 5
    assert len(federation) == 100_000
    assert bytes_read < 100_000  # of 16 million: the head
    federation.holding(torch.tensor([5, 99_999]))
    assert bytes_read < 100_000
    assert len(pickle.dumps(federation.shards)) < 5_000_000


TRAIN = """
import re, sys
from pathlib import Path
import fedloom as fl

def train(folder, lazy):
    federation = fl.Federation.from_folder(Path(sys.argv[1]) / folder, lazy=lazy)
    for engine in ("loop", "vector"):
        model = fl.model("logistic", federation)
        local = fl.Local(batch_size=64, steps=2)
        fl.fit(model, federation, rounds=8, clients_per_round=min(20, len(federation)), engine=engine, local=local)

def most():  # ru_maxrss would begin with what the process had that started this one
    return int(re.search(r"VmHWM:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1])

train("few", lazy=False)
before = most()
train("all", lazy=sys.argv[2] == "lazy")
print(most() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the size of a process can't be read here")
@pytest.mark.parametrize("how", ["lazy", pytest.param("in memory", marks=pytest.mark.long)])
def test_memory_stays_flat(how: str, tmp_path: Path) -> None:
    """200 MB in 10 shards of 40 clients; a cohort of 20 is 10 MB."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((5120, 1000), dtype=np.float32), rng.integers(0, 10, 5120)
    for name in ("few", "all"):
        (tmp_path / name).mkdir()
    np.savez(tmp_path / "few" / "a.npz", x=x[:500], y=y[:500])
    for i in range(10):
        np.savez(tmp_path / "all" / f"{i}.npz", x=x, y=y, offsets=np.arange(0, 5121, 128))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAIN, str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown = int(done.stdout) * 1024
    assert grown < 60_000_000 if how == "lazy" else grown > 200_000_000
