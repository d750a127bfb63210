"""A user's own tables and folders: what is read, and one clear sentence for what can't be."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedloom as fl

ROWS = pd.DataFrame(
    {
        "hospital": ["north", "south", "north", "east", "south", "north"],
        "age": [50, 61, 72, 43, 54, 65],
        "pulse": [70.5, 80.5, 90.5, 75.5, 85.5, 95.5],
        "smoker": [True, False, False, True, True, False],
        "died": [0, 1, 1, 0, 0, 1],
    }
)


def write(table: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("kind", ["frame", ".csv", ".csv.gz", ".parquet"])
def test_a_table(kind: str, tmp_path: Path) -> None:
    table = ROWS if kind == "frame" else write(ROWS, tmp_path / f"icu{kind}")
    federation = fl.Federation.from_table(table, client="hospital", label="died")
    assert federation.names is not None
    assert federation.names.tolist() == ["east", "north", "south"]
    assert federation.sizes.tolist() == [1, 3, 2]
    x, y = federation.client(1)
    assert x.tolist() == [[50, 70.5, 1], [72, 90.5, 0], [65, 95.5, 0]]
    assert y.tolist() == [0, 1, 1]
    assert federation.classes == 2


def test_chosen_columns_and_a_test_table() -> None:
    held = pd.DataFrame({"died": [1], "pulse": [60.0], "age": [30], "comment": ["none"]})
    federation = fl.Federation.from_table(ROWS, client="hospital", label="died", features=["pulse", "age"], test=held)
    assert federation.client(0)[0].tolist() == [[75.5, 43]]
    assert federation.test is not None
    assert federation.test.x.tolist() == [[60, 30]]


def test_texts_as_targets_become_classes() -> None:
    named = ROWS.assign(died=["no", "yes", "yes", "no", "no", "yes"])
    federation = fl.Federation.from_table(named, client="hospital", label="died", features=["age"])
    assert federation.class_names == ("no", "yes")
    assert federation.client(1)[1].tolist() == [0, 1, 1]


def test_numbers_as_targets_stay_numbers() -> None:
    federation = fl.Federation.from_table(ROWS, client="hospital", label="pulse", features=["age"])
    assert federation.classes is None
    assert federation.y.dtype == torch.float32


def test_a_table_trains(tmp_path: Path) -> None:
    path = write(ROWS, tmp_path / "icu.csv")
    text = f"table(path='{path}', client=hospital, label=died)"
    federation = fl.load(text, standardise="global")
    assert len(federation) == 3
    result = fl.fit(fl.model("logistic", federation), federation, rounds=2)
    assert len(result.history) == 2


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"label": "dead"}, "the table has no column 'dead': did you mean died"),
        ({}, {"client": "clinic"}, "the table has no column 'clinic'"),
        ({}, {"features": ["agee"]}, "no column 'agee': did you mean age"),
        ({}, {"features": ["age", "died"]}, "'died' is the target"),
        ({}, {"features": []}, "no column left"),
        ({"ward": "a"}, {}, "column 'ward' holds .*not numbers"),
        ({"age": [1, 2, None, 4, 5, None]}, {}, "column 'age' has no value in row 2 and 1 more"),
        ({"hospital": ["a", None, "b", "c", "d", "e"]}, {}, "column 'hospital' has no value in row 1 "),
        ({"pulse": [1, 2, 3, 4, np.inf, 6]}, {}, "NaN or an infinity, first in sample 4"),
    ],
)
def test_bad_tables(change: dict[str, object], options: dict[str, object], message: str) -> None:
    settings = {"client": "hospital", "label": "died", **options}
    with pytest.raises(fl.DataError, match=message):
        fl.Federation.from_table(ROWS.assign(**change), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [".csv", ".parquet"])
def test_bad_files(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"icu{kind}"
    with pytest.raises(fl.DataError, match="is no file"):
        fl.Federation.from_table(path, client="hospital", label="died")
    write(ROWS[:0], path)
    with pytest.raises(fl.DataError, match=f"icu{kind} has no rows"):
        fl.Federation.from_table(path, client="hospital", label="died")
    path.write_bytes(b"\x00\xff\x17 this is nothing\n\x00")
    with pytest.raises(fl.DataError, match=f"icu{kind}"):
        fl.Federation.from_table(path, client="hospital", label="died")
    path.write_bytes(b"")
    with pytest.raises(fl.DataError, match=f"icu{kind} is damaged"):
        fl.Federation.from_table(path, client="hospital", label="died")
    with pytest.raises(fl.DataError, match=r"name ends in \.csv"):
        fl.Federation.from_table(write(ROWS, tmp_path / "icu.txt"), client="hospital", label="died")


def test_two_columns_of_one_name() -> None:
    twice = pd.concat([ROWS, ROWS[["age"]]], axis=1)
    with pytest.raises(fl.DataError, match="two columns called 'age'"):
        fl.Federation.from_table(twice, client="hospital", label="died")


def test_a_folder_of_clients(tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", x=np.ones((2, 2), np.float32), y=[0, 1])
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2), np.float32), y=[2, 1, 0])
    (tmp_path / "notes.txt").write_text("not data")
    federation = fl.Federation.from_folder(tmp_path)
    assert federation.names is not None
    assert federation.names.tolist() == ["a", "b"]
    assert federation.sizes.tolist() == [3, 2]
    assert federation.client(1)[1].tolist() == [0, 1]


@pytest.mark.parametrize("kind", [".csv", ".parquet"])
def test_a_folder_of_tables(kind: str, tmp_path: Path) -> None:
    for name, part in ROWS.groupby("hospital"):
        write(part.drop(columns="hospital"), tmp_path / f"{name}{kind}")
    federation = fl.Federation.from_folder(tmp_path, label="died")
    whole = fl.Federation.from_table(ROWS, client="hospital", label="died")
    for k in range(3):
        for mine, theirs in zip(federation.client(k), whole.client(k), strict=True):
            assert torch.equal(mine, theirs)


def test_shards(tmp_path: Path) -> None:
    x = np.arange(10.0, dtype=np.float32)[:, None]
    np.savez(tmp_path / "0.npz", x=x[:6], y=np.zeros(6, int), offsets=[0, 1, 6], names=["ann", "bob"])
    np.savez(tmp_path / "1.npz", x=x[6:], y=np.ones(4, int), offsets=[0, 4])
    federation = fl.Federation.from_folder(tmp_path)
    assert federation.names is not None
    assert federation.names.tolist() == ["ann", "bob", "1/0"]
    assert federation.client(1)[0].flatten().tolist() == [1, 2, 3, 4, 5]


def test_shards_of_tables(tmp_path: Path) -> None:
    write(ROWS[ROWS.hospital != "south"], tmp_path / "one.parquet")
    write(ROWS[ROWS.hospital == "south"], tmp_path / "two.csv")
    federation = fl.Federation.from_folder(tmp_path, client="hospital", label="died")
    assert federation.names is not None
    assert federation.names.tolist() == ["east", "north", "south"]
    write(ROWS[ROWS.hospital == "south"], tmp_path / "three.csv")
    with pytest.raises(fl.DataError, match="two clients with the name 'south'"):
        fl.Federation.from_folder(tmp_path, client="hospital", label="died")


def test_train_and_test_folders(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        np.savez(tmp_path / part / "a.npz", x=np.zeros((3, 2), np.float32), y=[2, 1, 0])
    federation = fl.Federation.from_folder(tmp_path)
    assert federation.test is not None
    assert len(federation.test.x) == 3


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(fl.DataError, match="is no folder"):
        fl.Federation.from_folder(tmp_path / "nowhere")
    with pytest.raises(fl.DataError, match="holds no file that ends in"):
        fl.Federation.from_folder(tmp_path)
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)), y=[0, 1])
    write(pd.DataFrame({"u": [1.0], "v": [2.0], "label": [0]}), tmp_path / "a.csv")
    with pytest.raises(fl.DataError, match="two clients with the name 'a'"):
        fl.Federation.from_folder(tmp_path)
    (tmp_path / "a.csv").unlink()
    for arrays, message in (
        ({"x": np.zeros((2, 2))}, "has no array 'y'"),
        ({"x": np.zeros((2, 2)), "y": [0]}, "one entry per sample"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "one entry per sample"),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "offsets": [0, 3]}, "offsets must rise"),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "offsets": [0, 1, 1, 2]}, "offsets must rise"),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "offsets": [0, 1, 2], "names": ["a"]}, "2 clients have 1 names"),
        ({"x": np.zeros((2, 3)), "y": [0, 1]}, "clients 'a' and 'b' disagree about the shape of a sample"),
        ({"x": np.zeros((2, 2), np.uint8), "y": [0, 1]}, "disagree about the type of samples: float64 and uint8"),
        ({"x": np.zeros((2, 2)), "y": ["a", "b"]}, "disagree about targets: whole numbers and texts"),
        ({"x": np.zeros((2, 2)), "y": [[0], [1]]}, "disagree about the shape of a target"),
        ({"x": np.array([["a"], ["b"]]), "y": [0, 1]}, "x holds <U1, but numbers were expected"),
        ({"x": np.array(["2020", "2021"], "M8[Y]"), "y": [0, 1]}, "x holds datetime64"),
        ({"x": np.zeros((2, 2), np.longdouble), "y": [0, 1]}, "x holds .*float"),
    ):
        np.savez(tmp_path / "b.npz", **arrays)
        with pytest.raises(fl.DataError, match=message):
            fl.Federation.from_folder(tmp_path)
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "b.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(fl.DataError, match=r"b.npz is damaged"):
        fl.Federation.from_folder(tmp_path)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{"a": 1}, None], dtype=object), y=[0, 1])
    with pytest.raises(fl.DataError, match=r"a.npz is damaged or of another format"):
        fl.Federation.from_folder(tmp_path)


def test_a_million_clients_without_a_list() -> None:
    x, offsets = torch.zeros(2_000_000, 2), torch.arange(0, 2_000_001, 2)
    federation = fl.Federation.from_tensor(x, torch.arange(2_000_000) % 2, offsets)
    assert len(federation) == 1_000_000
    result = fl.fit(torch.nn.Linear(2, 2), federation, rounds=2, clients_per_round=3)
    assert len(result.history) == 2


def test_bad_offsets() -> None:
    for offsets in ([0, 5], [1, 4], [0, 3, 2, 4], [0]):
        with pytest.raises(fl.DataError, match="offsets must rise"):
            fl.Federation.from_tensor(torch.zeros(4, 1), [0, 1, 0, 1], offsets)
    with pytest.raises(fl.DataError, match="client 1 has no samples"):
        fl.Federation.from_tensor(torch.zeros(4, 1), [0, 1, 0, 1], [0, 2, 2, 4])


def table(text: str, tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(text)
    return path


def test_a_csv_with_too_many_values_is_refused(tmp_path: Path) -> None:
    path = table("hospital,age,died\nnorth,50,0,3\nsouth,60,1,4\n", tmp_path)
    with pytest.raises(fl.DataError, match="more values than the header"):
        fl.Federation.from_table(path, client="hospital", label="died")


def test_names_of_clients_stay_as_they_are_written(tmp_path: Path) -> None:
    path = table("hospital,age,died\n007,50,0\n7,60,1\n07,70,1\n", tmp_path)
    federation = fl.Federation.from_table(path, client="hospital", label="died")
    assert federation.names is not None
    assert sorted(federation.names.tolist()) == ["007", "07", "7"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hospital,age,age,died\na,1,2,0\n", "two columns called 'age'"),
        ("hospital;age;died\na;1;0\n", "separated by semicolons"),
        ("hospital,age,died\na,1,0\nb,2,1000000\n", "only 2 occur; number them from 0"),
    ],
)
def test_csv_files_that_are_no_tables(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(fl.DataError, match=message):
        fl.Federation.from_table(table(text, tmp_path), client="hospital", label="died")


def test_columns_that_are_numbers_and_a_text_as_features() -> None:
    plain = pd.DataFrame({0: ["a", "b"], 1: [1.0, 2.0], 2: [0, 1]})
    federation = fl.Federation.from_table(plain, client=0, label=2)  # type: ignore[arg-type]
    assert len(federation) == 2
    with pytest.raises(fl.DataError, match="features must be a list"):
        fl.Federation.from_table(ROWS, client="hospital", label="died", features="age")


def test_yes_and_no_as_floats_are_labels() -> None:
    federation = fl.Federation.from_table(ROWS.assign(died=ROWS.died.astype(float)), client="hospital", label="died")
    assert federation.classes == 2


def test_test_data_are_checked_too(tmp_path: Path) -> None:
    held = ROWS.assign(pulse=[1, 2, 3, np.inf, 5, 6])
    with pytest.raises(fl.DataError, match="test samples hold a NaN or an infinity, first in sample 3"):
        fl.Federation.from_table(ROWS, client="hospital", label="died", test=held)


def test_a_folder_of_pictures_is_read_as_pictures(tmp_path: Path) -> None:
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((3, 1, 4, 4), np.uint8), y=[0, 1, 0])
    federation = fl.Federation.from_folder(tmp_path)
    assert federation.preparation.pixels
    changed = federation.images(mean=[0.5], std=[0.25], augment="flip")
    assert fl.fit(fl.model("mlp", changed), changed, rounds=1).history
    with pytest.raises(fl.DataError, match="1 numbers each"):
        federation.images(mean=[0.5, 0.5], std=[1, 1])
    with pytest.raises(fl.DataError, match="images are bytes"):
        fl.Federation.from_table(ROWS, client="hospital", label="died").images()


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64, np.int8, np.int32, bool])
def test_labels_of_every_type(kind: type) -> None:
    federation = fl.Federation.from_arrays([(np.zeros((2, 3), np.float32), np.array([0, 1], kind))])
    assert federation.classes == 2
    assert fl.fit(torch.nn.Linear(3, 2), federation, rounds=1).history
