"""A user's own data: a table with a column that says whose a row is, or a folder of files.

A folder holds one file per client, named after it, or shards that hold many clients each:

| file | one client | a shard |
| --- | --- | --- |
| .npz | arrays `x` [n, ...] and `y` [n] | `offsets` [clients + 1] too, and `names` [clients] if they have any |
| .csv, .csv.gz, .parquet | a column of targets, all others are features | a column of client names too |

Client j of a shard has its rows from `offsets[j]` to `offsets[j + 1]`.

With subfolders `train` and `test` the clients come from the first and the test set from the second.

A folder that is opened lazily (`fedloom.data.lazy`) has the same layout. Its .npz files are best written by `np.savez`,
not by `np.savez_compressed`: from arrays that are not packed a client's rows are read alone, all else file by file.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.data.corpus import Corpus
from fedloom.data.files import open_text, reading
from fedloom.data.pieces import KINDS, TABLES, Piece, check_alike, kind_of, name_of, read_arrays
from fedloom.errors import DataError, nearest
from fedloom.untrusted import is_folder, is_plain, most_unpacked, open_plain, too_much

if TYPE_CHECKING:
    import pandas as pd

SPARSE = 1000  # labels that are so much larger than their number are something else


def table_corpus(
    table: "pd.DataFrame | str | Path",
    *,
    client: str,
    label: str,
    features: Sequence[str] | None = None,
    test: "pd.DataFrame | str | Path | None" = None,
) -> Corpus:
    """A table as a corpus with one natural client for each value of its column `client`."""
    client, label = str(client), str(label)
    if isinstance(features, str):
        raise DataError(f"features must be a list of columns, such as [{features!r}]")
    train = _piece(*_frame(table, client), label, client, features)
    held = None if test is None else _piece(*_frame(test, None), label, None, train.columns)
    return _corpus([train], None if held is None else [held])


def folder_corpus(folder: Path, *, label: str = "label", client: str | None = None) -> Corpus:
    """A folder of files as a corpus with one natural client for each file, or for each client of a shard."""
    train_files, test_files = data_files(folder)
    train = [read_piece(path, label, client) for path in train_files]
    test = None if test_files is None else [read_piece(path, label, client) for path in test_files]
    check_names(folder, (name for piece in train for name in piece.names))
    return _corpus(train, test)


def data_files(folder: Path) -> tuple[list[Path], list[Path] | None]:
    """A folder's files for training and, if it has subfolders for both, those for the test."""
    if not is_folder(folder):
        raise DataError(f"{folder} is no folder")
    split = (folder / "train").is_dir()
    test = split and (folder / "test").is_dir()
    return _files(folder / "train" if split else folder), _files(folder / "test") if test else None


def _files(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and kind_of(path))
    if not files:
        raise DataError(f"{folder} holds no file that ends in {', '.join(KINDS)}")
    return files


def check_names(folder: Path, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"{folder} holds two clients with the name {name!r}; rename one")
        seen.add(name)


def read_piece(path: Path, label: str, client: str | None) -> Piece:
    """All that a file holds."""
    if kind_of(path) == ".npz":
        return read_arrays(path)
    piece = _piece(*_frame(path, client), label, client, None)
    return piece if client else replace(piece, names=[name_of(path)])


def _frame(table: "pd.DataFrame | str | Path", client: str | None) -> tuple["pd.DataFrame", str]:
    """A data frame whose columns have texts as names, and what to call it."""
    import pandas as pd

    if isinstance(table, pd.DataFrame):
        return table.set_axis([str(column) for column in table.columns], axis=1), "the table"
    path = Path(table)
    if not is_plain(path):
        raise DataError(f"{path} is no file")
    if not path.name.endswith(TABLES):
        raise DataError(f"{path}: a table's name ends in {', '.join(TABLES)}")
    try:
        with reading(path):
            if path.suffix == ".parquet":
                frame = _parquet(path)
                return frame.set_axis([str(column) for column in frame.columns], axis=1), str(path)
            return _csv(path, client), str(path)
    except ImportError:
        raise DataError(f"{path}: reading parquet needs pyarrow; install fedloom[parquet]") from None


def _parquet(path: Path) -> "pd.DataFrame":
    """A table whose numbers of rows and columns are no more than such a file can hold."""
    import pandas as pd
    from pyarrow.parquet import read_metadata

    with open_plain(path) as file:
        facts = read_metadata(file)
        if not 0 <= 8 * facts.num_rows * max(1, facts.num_columns) <= most_unpacked(path):
            raise too_much(path)
        return pd.read_parquet(file)


def _csv(path: Path, client: str | None) -> "pd.DataFrame":
    """Comma-separated values under a header; names of clients stay as they are written (007 is not 7)."""
    import pandas as pd

    with open_text(path) as file:
        header = pd.read_csv(file, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0].tolist()
    twice = _twice(header)
    if twice is not None:  # pandas would rename the second
        raise DataError(f"{path} has two columns called {twice!r}")
    if len(header) == 1 and ";" in header[0]:
        raise DataError(f"{path} is separated by semicolons; commas were expected")
    with open_text(path) as file:
        frame = pd.read_csv(file, dtype={client: str} if client else None)
    if not isinstance(frame.index, pd.RangeIndex):  # pandas takes what is too much for the names of rows
        raise DataError(f"{path} has rows with more values than the header has columns")
    return frame


def _twice(names: Sequence[str]) -> str | None:
    return next((name for name, times in Counter(names).items() if times > 1), None)


def _piece(frame: "pd.DataFrame", name: str, label: str, client: str | None, features: Sequence[str] | None) -> Piece:
    if not len(frame):
        raise DataError(f"{name} has no rows")
    columns = dict.fromkeys(str(column) for column in frame.columns)
    twice = _twice([str(column) for column in frame.columns])
    if twice is not None:
        raise DataError(f"{name} has two columns called {twice!r}")
    chosen = [column for column in columns if column not in (label, client)] if features is None else list(features)
    for wanted in (label, *([client] if client else []), *chosen):
        if wanted not in columns:
            raise DataError(f"{name} has no column {wanted!r}: {nearest(str(wanted), columns)}")
        missing = np.flatnonzero(frame[wanted].isna().to_numpy())
        if len(missing):
            rows = f"row {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            raise DataError(f"{name}: column {wanted!r} has no value in {rows} (rows count from 0)")
    if label in chosen:
        raise DataError(f"{name}: {label!r} is the target and can't be a feature too")
    if not chosen:
        raise DataError(f"{name} has no column left for features")
    owner, names = np.zeros(len(frame), dtype=np.int64), ["all"]
    if client:
        found, owner = np.unique(frame[client].astype(str).to_numpy(dtype=str), return_inverse=True)
        names = found.tolist()
    x = np.stack([_numbers(frame[column], column, name) for column in chosen], axis=1)
    return Piece(x, frame[label].to_numpy(), owner, names, tuple(chosen))


def _numbers(series: "pd.Series[Any]", column: str, name: str) -> np.ndarray:
    if series.dtype.kind not in "biuf":
        raise DataError(
            f"{name}: column {column!r} holds {series.dtype}, not numbers; turn it into numbers, or name the columns "
            "to use with features=[...]"
        )
    return series.to_numpy().astype(np.float32)


def _corpus(train: Sequence[Piece], test: Sequence[Piece] | None) -> Corpus:
    for piece in (*train, *(test or ())):
        check_alike(train[0], piece)
    targets = [piece.y for piece in (*train, *(test or ()))]
    y, class_names = _targets(targets)
    first = np.cumsum([0, *(len(piece.names) for piece in train)])
    cut = sum(len(piece.y) for piece in train)
    columns = train[0].columns
    return Corpus(
        train_x=np.concatenate([piece.x for piece in train]),
        train_y=y[:cut],
        test_x=None if test is None else np.concatenate([piece.x for piece in test]),
        test_y=None if test is None else y[cut:],
        classes=len(class_names) or None,
        class_names=class_names,
        owner=np.concatenate([piece.owner + first[i] for i, piece in enumerate(train)]),
        owners=np.array([name for piece in train for name in piece.names]),
        columns=columns,
        numeric=len(columns),
    )


def _targets(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Numbers stay as they are; texts and truth values become class labels in sorted order."""
    y = np.concatenate(parts)
    if y.dtype.kind == "f" and np.isin(y, (0.0, 1.0)).all():
        return y.astype(np.int64), ()  # what a merge of tables makes of yes and no
    if y.dtype.kind == "f":
        return y.astype(np.float32), ()
    if y.dtype.kind in "iu":
        if y.size and y.max() > SPARSE * len(found := np.unique(y)):
            raise DataError(f"the labels go up to {y.max()}, but only {len(found)} occur; number them from 0")
        return y.astype(np.int64), ()
    names, labels = np.unique(y.astype(str), return_inverse=True)
    return labels.astype(np.int64), tuple(names.tolist())
