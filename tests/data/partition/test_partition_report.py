"""The report: figures against dense arithmetic, the summary, the heat map, the file."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.partition import Deal, PartitionReport, Pool, partition
from fedloom.data.partition import report as module
from fedloom.errors import DataError

Y = np.random.default_rng(0).integers(0, 7, 1000)
NAMES = ("a", "b", "c", "d", "e", "f", "g")


def report(text: str = "dirichlet(alpha=0.2)", clients: int = 30) -> PartitionReport:
    return PartitionReport(text, partition(text, Pool(Y), clients, 0), Y, NAMES)


@pytest.mark.parametrize("chunk", [1, 50, 10**6])
def test_figures(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    it = report()
    dense = np.stack([np.bincount(Y[it.deal.client(k)], minlength=7) for k in range(30)])
    assert np.array_equal(it.histogram, dense)
    r, R = dense / dense.sum(axis=1, keepdims=True), dense.sum(axis=0) / dense.sum()
    assert it.c_score == pytest.approx(np.abs(r - R).sum(axis=1).mean(), abs=1e-12)
    assert it.classes_per_client(0.1) == np.mean(np.sum(r > 0.1, axis=1))
    assert np.array_equal(it.sizes, dense.sum(axis=1))


def test_c_score_of_one_class_of_ten_per_client_is_1_8() -> None:
    y = np.repeat(np.arange(10), 20)
    assert PartitionReport("", partition("shards", Pool(y), 10, 0), y).c_score == pytest.approx(1.8)
    assert PartitionReport("", partition("iid(True)", Pool(y), 10, 0), y).c_score == pytest.approx(0)


def test_summary() -> None:
    deal = Deal.of([np.array([0, 1, 2]), np.array([3])], ["1 samples were left out, because"])
    text = str(PartitionReport("shards(per_client=1)", deal, np.array([0, 0, 1, 1, 1])))
    assert text.splitlines() == [
        "partition   shards(per_client=1)",
        "clients     2 with 4 samples",
        "left out    1 samples",
        "sizes       1 to 3, mean 2, sd 1",
        "C-score     0.67",
        "classes     1.5 of 2 per client (above 1%)",
        "remark      1 samples were left out, because",
    ]


def test_without_labels() -> None:
    it = PartitionReport("iid", partition("iid", Pool(np.zeros(50, int)), 5, 0))
    assert np.isnan(it.c_score)
    assert np.isnan(it.classes_per_client())
    assert str(it).splitlines()[-1] == "sizes       10 to 10, mean 10, sd 0"
    with pytest.raises(DataError, match=r"^the data of partition iid have no class labels to count$"):
        it.plot()


def test_many_clients_and_classes_need_no_dense_table() -> None:
    """300,000 clients x 100,000 classes would be 240 GB."""
    rng = np.random.default_rng(0)
    y, owner = rng.integers(0, 100_000, 600_000), np.repeat(np.arange(300_000), 2)
    it = PartitionReport("natural", partition("natural", Pool(y, owner), None, 0), y)
    assert 1.99 < it.c_score < 2
    assert 1.99 < it.classes_per_client() <= 2


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
@pytest.mark.parametrize("clients", [1, 30, 450])
def test_plot(tmp_path: Path, suffix: str, clients: int) -> None:
    path = tmp_path / f"map.{suffix}"
    figure = report(clients=clients).plot(path)
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert path.read_bytes().startswith(starts[suffix])
    title = figure.axes[0].get_title()
    assert title.endswith("200 of 450 clients, evenly chosen" if clients > 200 else f"{clients} clients")
    shares = np.asarray(figure.axes[0].images[0].get_array())
    assert shares.shape == (7, min(clients, 200))
    assert np.allclose(shares.sum(axis=0), 1)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(NAMES)


def test_plot_leaves_no_state() -> None:
    report().plot()
    import matplotlib.pyplot as plt

    assert plt.get_fignums() == []
    assert matplotlib.rcParams["figure.figsize"] == matplotlib.rcParamsDefault["figure.figsize"]


def test_plot_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^a plot can be written as .png, .svg, .pdf, not as 'map.txt'$"):
        report().plot(tmp_path / "map.txt")
    with pytest.raises(DataError, match=r"^the plot could not be written to .*: No such file or directory$"):
        report().plot(tmp_path / "nowhere" / "map.png")


@pytest.mark.parametrize("names", [None, np.array(["ann", "Ωmega", "cy"])])
@pytest.mark.parametrize("remarks", [(), ("3 samples were left out, so", "and more")])
def test_save_and_load(tmp_path: Path, names: np.ndarray | None, remarks: tuple[str, ...]) -> None:
    deal = Deal(np.array([5, 1, 2, 0]), np.array([0, 1, 1, 4]), names, remarks)
    PartitionReport("iid", deal).save(tmp_path / "partition.npz")
    again = PartitionReport.load(tmp_path / "partition.npz")
    assert again.text == "iid"
    assert again.remarks == remarks
    assert np.array_equal(again.deal.index, deal.index)
    assert np.array_equal(again.deal.offsets, deal.offsets)
    assert (again.deal.names is None) if names is None else np.array_equal(again.deal.names, names)  # type: ignore[arg-type]


def test_load_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^there is no partition file "):
        PartitionReport.load(tmp_path / "partition.npz")
    with pytest.raises(DataError, match=r"^the partition could not be written to .*: No such file or directory$"):
        report().save(tmp_path / "nowhere" / "partition.npz")
    good = {
        "index": np.arange(4),
        "offsets": np.array([0, 1, 4]),
        "text": np.array("iid"),
        "remarks": np.array([], "U1"),
    }
    wrong = {
        "positions must be whole numbers": {"index": np.arange(4.0)},
        "its offsets do not fit its samples": {"offsets": np.array([0, 5, 4])},
        "its samples are no distinct positions": {"index": np.array([0, 1, 1, 2])},
        "its names do not fit its clients": {"names": np.array(["one"])},
        "its text is no text": {"text": np.array(3)},
        "": {"text": np.array({"a": 1}, dtype=object)},  # a pickle
    }
    for what, change in wrong.items():
        path = tmp_path / "wrong.npz"
        np.savez(path, **{**good, **change})  # type: ignore[arg-type]
        with pytest.raises(DataError, match=f"is damaged or no partition saved by Fedloom(: {what})?$"):
            PartitionReport.load(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_load_refuses_damage(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any bytes changed or cut off: the same partition, or one sentence."""
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    report(clients=5).save(path)
    content = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    sentence = ""
    try:
        PartitionReport.load(path)
    except DataError as error:
        sentence = str(error)
    assert not sentence or sentence.startswith(f"{path} is damaged or no partition saved by Fedloom")
