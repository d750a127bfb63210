"""`fl.load`: from a name to a federation, on files that the tests write."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.data.catalogue import read_corpus
from fedloom.data.files import Files
from fedloom.data.load import load


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small MNIST in the plain layout, and a cache of its own."""
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 300), ("test", 100)):
        arrays[f"{part}_x"] = rng.integers(0, 256, (n, 28, 28)).astype(np.uint8)
        arrays[f"{part}_y"] = rng.integers(0, 10, n).astype(np.uint8)
    data = tmp_path / "data"
    data.mkdir()
    np.savez(data / "mnist.npz", **arrays)  # type: ignore[arg-type]
    return data


def test_images_stay_bytes_in_one_tensor(folder: Path) -> None:
    federation = load("mnist", partition="iid", clients=10, data_dir=folder)
    assert federation.x.dtype == torch.uint8
    assert federation.x.shape == (300, 1, 28, 28)
    assert federation.test is not None
    assert federation.test.x.shape == (100, 1, 28, 28)
    assert federation.preparation.pixels
    x, _ = federation.batch(torch.tensor([3]), torch.float32)
    assert torch.equal(x, federation.x[3:4].float() / 255)


def test_pooled_deals_out_everything(folder: Path) -> None:
    federation = load("mnist", partition="iid", clients=10, pooled=True, data_dir=folder)
    assert int(federation.sizes.sum()) == 400
    assert federation.test is None
    with np.load(folder / "mnist.npz") as saved:
        expected = np.concatenate([saved["train_x"], saved["test_x"]])
    assert np.array_equal(federation.x[:, 0].numpy(), expected)


def test_validation_clients_come_on_top(folder: Path) -> None:
    federation = load("mnist", partition="iid", clients=10, validation=5, data_dir=folder)
    assert len(federation) == 10
    assert federation.sizes.tolist() == [20] * 10  # 300 samples over 15
    assert federation.validation is not None
    assert federation.validation.offsets is not None
    assert len(federation.validation.offsets) == 6
    assert federation.test is not None
    assert federation.report is not None
    assert len(federation.report.deal) == 15


def test_folds(folder: Path) -> None:
    federation = load("mnist", partition="iid", clients=20, pooled=True, fold=3, data_dir=folder)
    assert len(federation) == 12
    assert federation.test is not None
    assert federation.test.offsets is not None
    assert len(federation.test.offsets) == 5
    assert len(federation.test.x) == 80


def test_the_folder_may_be_named_by_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(folder))
    assert len(load("mnist", clients=7)) == 7


def test_a_missing_set_says_where_it_was_looked_for(folder: Path) -> None:
    with pytest.raises(fl.DataError) as error:
        load("femnist", data_dir=folder)
    text = str(error.value)
    assert "femnist is not on this machine" in text
    assert str(folder) in text
    with pytest.raises(fl.DataError, match="does not exist"):
        load("mnist", data_dir=folder / "nowhere")


def test_a_saved_partition_is_dealt_out_again(folder: Path, tmp_path: Path) -> None:
    first = load("mnist", "dirichlet(alpha=0.1)", 10, seed=5, validation=2, data_dir=folder)
    assert first.report is not None
    first.report.save(tmp_path / "partition.npz")
    again = load("mnist", tmp_path / "partition.npz", 10, seed=5, validation=2, data_dir=folder)
    assert torch.equal(first.index, again.index)
    assert torch.equal(first.offsets, again.offsets)
    for other in (
        {"data_dir": _smaller(folder, tmp_path)},
        {"data_dir": folder, "pooled": True},
        {"name": "digits"},
    ):
        with pytest.raises(fl.DataError, match="deals out other data"):
            load(**{"name": "mnist", "partition": tmp_path / "partition.npz", **other})  # type: ignore[arg-type]
    with pytest.raises(fl.DataError, match="deals out to 12 clients, not to 20"):
        load("mnist", tmp_path / "partition.npz", 20, data_dir=folder)


def _smaller(folder: Path, tmp_path: Path) -> Path:
    other = tmp_path / "other"
    other.mkdir()
    with np.load(folder / "mnist.npz") as saved:
        np.savez(other / "mnist.npz", **{name: saved[name][:50] for name in saved.files})
    return other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "mnits"}, "unknown data set 'mnits': did you mean mnist"),
        ({"name": "mnist(size=3)"}, "has no parameter 'size'"),
        ({"clients": 0}, "at least 1"),
        ({"clients": "ten"}, "clients must be a whole number"),
        ({"clients": 301}, "301 clients can't share 300 samples"),
        ({"validation": -1}, "validation must be a number of clients"),
        ({"validation": None}, "validation must be a whole number"),
        ({"fold": "0"}, "fold must be a whole number"),
        ({"fold": True}, "fold must be a whole number"),
        ({"partition": "natural"}, "no clients of its own"),
        ({"partition": "dirichlet(alpha=-1)"}, "alpha"),
        ({"partition": "nowhere.npz"}, "nowhere.npz"),
        ({"fold": 7}, "fold=7"),
        ({"standardise": "global"}, "only a table of numbers"),
        ({"augment": "flop"}, "unknown augmentation"),
    ],
)
def test_bad_requests(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(fl.FedloomError, match=message):
        load(**{"name": "mnist", "data_dir": folder, **options})  # type: ignore[arg-type]


def test_synthetic_brings_as_many_clients_as_asked_for() -> None:
    federation = load("synthetic(alpha=0.5, beta=0.5)", clients=12, validation=3)
    assert len(federation) == 12
    assert federation.validation is not None
    assert federation.validation.offsets is not None
    assert len(federation.validation.offsets) == 4
    result = fl.fit(fl.model("logistic", federation), federation, rounds=10, local=fl.Local(lr=0.05))
    assert result.history[-1]["test_accuracy"] > 0.4  # of ten classes


def test_validation_clients_come_on_top_of_the_default_too(folder: Path) -> None:
    assert len(load("mnist", "iid", validation=10, data_dir=folder)) == 100


def test_numpy_numbers_are_numbers(folder: Path) -> None:
    federation = load("mnist", "iid", np.int64(7), np.int64(1), fold=np.int64(0), data_dir=folder)  # type: ignore[arg-type]
    assert len(federation) == 7 - 2 * 2


def test_the_test_set_is_that_of_the_chosen_clients() -> None:
    corpus = read_corpus("synthetic", Files.of())
    assert corpus.owner is not None
    assert corpus.test_owner is not None
    sizes, tests = np.bincount(corpus.owner), np.bincount(corpus.test_owner)
    assert 0 < (sizes >= 200).sum() < len(sizes)
    chosen = load("synthetic", "natural(min_samples=200)")
    assert len(chosen) == (sizes >= 200).sum()
    assert chosen.test is not None
    assert len(chosen.test.x) == tests[sizes >= 200].sum()


def test_moved_data_are_shared_and_never_stale() -> None:
    """Two runs that live at the same time share their samples; what their owner changed since is seen."""
    numbers = np.ones((4, 2), dtype=np.float32)
    federation = fl.Federation.from_tensor(torch.from_numpy(numbers), [0, 1, 0, 1], [0, 2, 4])
    here = torch.device("cpu")
    first, second = (federation.to(here, torch.float64) for _ in range(2))
    assert first.x is second.x
    numbers *= 3
    assert federation.to(here, torch.float64).x.tolist() == [[3.0, 3.0]] * 4
    assert first.x.tolist() == [[1.0, 1.0]] * 4


def test_fewer_samples_are_the_same_for_every_seed(folder: Path) -> None:
    whole = load("mnist", "iid", 3, data_dir=folder)
    few, again = (load("mnist", "iid", 3, seed=seed, samples=30, data_dir=folder) for seed in (0, 5))
    assert len(whole.x) > 30
    assert len(few.x) == 30
    assert torch.equal(few.x, again.x)
    assert whole.test is not None
    assert few.test is not None
    assert len(few.test.x) == min(30, len(whole.test.x))
    seen = {bytes(x) for x in whole.x.numpy().reshape(len(whole.x), -1)}
    assert all(bytes(x) in seen for x in few.x.numpy().reshape(30, -1))
    own = load("synthetic", "natural", samples=200)
    assert int(own.sizes.sum()) == 200
    assert int(own.sizes.min()) > 0
    with pytest.raises(fl.DataError, match="samples must be at least 1"):
        load("mnist", "iid", samples=0, data_dir=folder)
