"""Sets of numbers: Covertype, eICU and the made-up clients."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedloom.data.sets import synthetic
from fedloom.data.sets.covertype import ABSENT, COLUMNS
from fedloom.errors import DataError
from tests.data.sets.writers import npz, packed, put, read, read_published

RANDOM = np.random.default_rng(3)


def forest(n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Rows with one wilderness area and one soil type each; the absent soils go with other classes only."""
    y = np.arange(n) % 7
    x = RANDOM.integers(-50, 4000, (n, 54), dtype=np.int16)
    x[:, 10:] = 0
    x[np.arange(n), 10 + RANDOM.integers(0, 4, n)] = 1
    soils = np.array([COLUMNS.index(name) for name in ABSENT])
    x[np.arange(n), np.where(y < 2, 15, soils[np.arange(n) % 5])] = 1
    return x, y


def test_covertype_in_the_plain_layout(tmp_path: Path) -> None:
    x, y = forest()
    path = npz(tmp_path / "covertype.npz", train_x=x[:40], train_y=y[:40], test_x=x[40:], test_y=y[40:])
    corpus = read("covertype", path)
    kept = [name not in ABSENT for name in COLUMNS]
    assert np.array_equal(corpus.train_x, x[:40][y[:40] < 2][:, kept])
    assert corpus.train_x.dtype == np.float32
    assert corpus.train_x.shape[1] == len(corpus.columns) == 49
    assert corpus.numeric == 10
    assert set(corpus.train_y) == {0, 1}
    assert not set(ABSENT) & set(corpus.columns)


def test_covertype_as_published(tmp_path: Path) -> None:
    x, y = forest(700)
    text = "".join(",".join(map(str, [*row, label + 1])) + "\n" for row, label in zip(x, y, strict=True))
    path = put(tmp_path / "covtype.data.gz", packed(text.encode()))
    corpus = read_published("covertype", {"covtype.data.gz": path})
    again = read_published("covertype", {"covtype.data.gz": path})
    assert corpus.test_x is not None
    assert corpus.test_y is not None
    assert (len(corpus.train_y), len(corpus.test_y)) == (160, 40)
    assert np.array_equal(corpus.test_x, again.test_x if again.test_x is not None else 0)
    kept = [name not in ABSENT for name in COLUMNS]
    everything = np.concatenate([corpus.train_x, corpus.test_x])
    assert sorted(map(tuple, everything)) == sorted(map(tuple, x[y < 2][:, kept]))
    assert np.bincount(np.concatenate([corpus.train_y, corpus.test_y])).tolist() == [100, 100]


def test_covertype_of_another_shape(tmp_path: Path) -> None:
    x, y = forest()
    arrays = {"train_x": x, "train_y": y, "test_x": x, "test_y": y}

    def refused(words: str, **other: np.ndarray) -> None:
        path = npz(tmp_path / "covertype.npz", **{**arrays, **other})
        with pytest.raises(DataError, match=words) as caught:
            read("covertype", path)
        assert str(path) in str(caught.value)

    refused("numbers in 54 columns were expected", train_x=x[:, :49])
    refused("the label 7", test_y=y + 1)
    refused("60 rows but 59 labels", train_y=y[1:])
    soil = x.copy()
    soil[0, COLUMNS.index("Soil_Type15")] = 1
    refused("which never occur with them", train_x=soil)
    short = put(tmp_path / "covtype.data.gz", packed(b"1,2,3\n"))
    with pytest.raises(DataError, match="has 3 columns, but 55 were expected"):
        read_published("covertype", {"covtype.data.gz": short})


def eicu_files(folder: Path, ending: str = ".csv.gz", **changed: pd.DataFrame) -> dict[str, Path]:
    tables: dict[str, pd.DataFrame] = {
        "patient": pd.DataFrame(
            {
                "patientunitstayid": [1, 2, 3, 4, 5, 6],
                "gender": ["Male"] * 6,
                "hospitalid": [73, 60, 73, 60, 60, 99],
                "hospitaldischargestatus": ["Alive", "Expired", "Alive", "", "Expired", "Alive"],
            }
        ),
        "apachePredVar": pd.DataFrame(
            {
                "apachepredvarid": [11, 12, 13, 14, 15],
                "patientunitstayid": [1, 2, 3, 4, 5],
                "age": [60, -1, 70, 99, 20],
                "admitdiagnosis": ["S-1"] * 5,
                "diedinhospital": [0, 1, 0, 0, 1],
                "dischargelocation": [1, 9, 1, 1, 9],
                "eyes": [4, 1, 4, 4, 1],
            }
        ),
        "apacheApsVar": pd.DataFrame(
            {
                "apacheapsvarid": [21, 22, 23, 25],
                "patientunitstayid": [1, 2, 3, 5],
                "eyes": [3, 1, -1, 2],
                "ph": [7.3, np.nan, 7.5, -1],
                "urine": [-1, -1, -1, -1],
            }
        ),
    }
    files = {}
    for name, table in {**tables, **changed}.items():
        text = io.StringIO()
        table.to_csv(text, index=False)
        content = text.getvalue().encode()
        path = folder / f"{name}{ending}"
        files[f"eicu/{name}{ending}"] = put(path, packed(content) if ending.endswith("gz") else content)
    return files


@pytest.mark.parametrize("ending", [".csv.gz", ".csv"])
def test_eicu(ending: str, tmp_path: Path) -> None:
    corpus = read_published("eicu", eicu_files(tmp_path, ending))
    assert corpus.columns == ("pred_age", "pred_eyes", "aps_eyes", "aps_ph", "aps_urine")
    wanted = [[60, 4, 3, 7.3, 0], [60, 1, 1, 7.4, 0], [70, 4, 2, 7.5, 0], [20, 1, 2, 7.4, 0]]
    assert corpus.train_x == pytest.approx(np.array(wanted, dtype=np.float32))
    assert corpus.train_x.dtype == np.float32
    assert corpus.train_y.tolist() == [0, 1, 0, 1]
    assert corpus.owners is not None
    assert corpus.owner is not None
    assert corpus.owners[corpus.owner].tolist() == ["73", "60", "73", "60"]
    assert corpus.test_x is None
    assert corpus.numeric == 5


def test_eicu_without_a_column_or_with_another_status(tmp_path: Path) -> None:
    less = pd.DataFrame({"patientunitstayid": [1], "hospitaldischargestatus": ["Alive"]})
    with pytest.raises(DataError, match=r"patient\.csv\.gz has no column 'hospitalid'"):
        read_published("eicu", eicu_files(tmp_path, patient=less))
    other = less.assign(hospitalid=1, hospitaldischargestatus="Gone")
    with pytest.raises(DataError, match="is 'Gone', but Alive or Expired was expected"):
        read_published("eicu", eicu_files(tmp_path, patient=other))
    alone = other.assign(patientunitstayid=77, hospitaldischargestatus="Alive")
    with pytest.raises(DataError, match="no stay or no variable in common"):
        read_published("eicu", eicu_files(tmp_path, patient=alone))
    texts = pd.DataFrame({"patientunitstayid": [1, 2], "age": ["old", "young"]})
    with pytest.raises(DataError, match=r"apachePredVar\.csv\.gz is damaged or of another format"):
        read_published("eicu", eicu_files(tmp_path, apachePredVar=texts))


def test_synthetic_is_fedprox_generator() -> None:
    """Client by client in a loop, from the same streams of random numbers."""
    clients, features, classes, alpha, beta = 5, 7, 3, 0.5, 2.0
    corpus = read(f"synthetic(alpha={alpha}, beta={beta}, features=7, classes=3)", clients=clients, seed=4)
    sizes = np.floor(synthetic._stream(4, 0, 0).lognormal(4, 2, 1024)).astype(int)[:clients] + 50
    draw, noise = synthetic._stream(4, 0, 1), synthetic._stream(4, 0, 2)
    u, centre, v, b, w = (
        draw.standard_normal(shape, dtype=np.float32).astype(float)
        for shape in ((1024,), (1024,), (1024, features), (1024, classes), (1024, features, classes))
    )
    assert corpus.owner is not None
    assert corpus.test_owner is not None
    assert corpus.test_x is not None
    assert corpus.test_y is not None
    for k in range(clients):
        z = noise.standard_normal((sizes[k], features), dtype=np.float32).astype(float)
        x = (v[k] + beta * centre[k]) + z * np.sqrt([j**-1.2 for j in range(1, features + 1)])
        scores = x @ (w[k] + alpha * u[k]) + (b[k] + alpha * u[k])
        kept = 9 * sizes[k] // 10
        assert corpus.train_x[corpus.owner == k] == pytest.approx(x[:kept], abs=1e-5)
        assert corpus.test_x[corpus.test_owner == k] == pytest.approx(x[kept:], abs=1e-5)
        clear = np.sort(scores, 1)[:, -1] - np.sort(scores, 1)[:, -2] > 1e-4
        found = np.concatenate([corpus.train_y[corpus.owner == k], corpus.test_y[corpus.test_owner == k]])
        assert np.array_equal(found[clear], scores.argmax(1)[clear])


def test_synthetic_spreads_as_the_paper_says() -> None:
    """Variance j^-1.2 within a client; 1 + beta^2 between the clients' means."""
    corpus = read("synthetic(beta=2, samples=200)", clients=1100)
    x = corpus.train_x.reshape(1100, 180, 60)
    within = x.var(axis=1).mean(axis=0)
    assert within == pytest.approx(np.arange(1, 61) ** -1.2, rel=0.05)
    between = x.mean(axis=1).var(axis=0).mean()
    assert between == pytest.approx(1 + 2**2, rel=0.15)


def test_a_made_up_client_does_not_depend_on_their_number() -> None:
    for samples in (None, 3):
        few, many = (read(f"synthetic(samples={samples})", clients=k, seed=1) for k in (3, 1030))
        other = read(f"synthetic(samples={samples})", clients=3, seed=2)
        assert few.owner is not None
        assert many.owner is not None
        assert np.array_equal(few.train_x, many.train_x[many.owner < 3])
        assert np.array_equal(few.train_y, many.train_y[many.owner < 3])
        assert not np.array_equal(few.train_x[0], other.train_x[0])
        assert len(np.unique(many.train_x[:, 0])) > 0.99 * len(many.train_x)  # the second block is not the first again


@pytest.mark.parametrize(("samples", "test"), [(1, 0), (2, 1), (10, 1), (25, 3)])
def test_a_tenth_of_each_client_is_for_the_test(samples: int, test: int) -> None:
    corpus = read(f"synthetic(samples={samples})")
    assert corpus.owner is not None
    assert corpus.test_owner is not None
    assert np.bincount(corpus.owner).tolist() == [samples - test] * 30
    assert len(corpus.test_owner) == 30 * test
    assert corpus.owners is not None
    assert len(corpus.owners) == 30


@pytest.mark.parametrize(
    ("text", "clients", "words"),
    [
        ("synthetic(samples=0)", None, "samples must be at least 1"),
        ("synthetic(features=0)", None, "features must be at least 1"),
        ("synthetic(alpha=-1)", None, "must be 0 or larger"),
        ("synthetic(beta=inf)", None, "must be 0 or larger"),
        ("synthetic", 0, "clients must be at least 1"),
        ("synthetic(samples=100_000_000)", 10_000, "GB of memory; ask for fewer"),
    ],
)
def test_made_up_clients_that_cannot_be(text: str, clients: int | None, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read(text, clients=clients)


@pytest.mark.long
def test_a_million_made_up_clients() -> None:
    corpus = read("synthetic(samples=10)", clients=1_000_000)
    assert corpus.train_x.shape == (9_000_000, 60)
    assert corpus.test_x is not None
    assert len(corpus.test_x) == 1_000_000
