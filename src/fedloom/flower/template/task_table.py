"""The model and the data: the file to make your own.

`model` is called at the server and at every client, `data` at each client, `test` at the server. They are called again
for every message, so that the same call must return the same.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from flwr.app import Context
from torch import nn

import fedloom as fl

MODEL = "logistic"  # `fedloom models` lists them
# What the model reads, with the mean and the deviation that every site scales it by.
COLUMNS = {"age": (50.0, 20.0)}
LABEL = "outcome"  # the column of targets
CLASSES: list[str] | list[int] = ["no", "yes"]  # its values, in one order everywhere, also where one never occurs
TEST: str | None = None  # the server's own file, or folder of files, to evaluate on


def model(context: Context) -> nn.Module:
    """Any nn.Module will do; its parameters are where training starts from."""
    like = fl.Federation.from_arrays([(np.zeros((1, len(COLUMNS)), np.float32), [0])], classes=len(CLASSES))
    return fl.model(MODEL, like, int(context.run_config["seed"]))


def data(context: Context) -> fl.Federation:
    """This client's samples: YOUR OWN DATA, a file or a folder of files that the node was told of when it was started,
    with --node-config 'data="/path/of/this/site"'; `test`, if it is told of one, is what this client evaluates on.
    """
    if "data" not in context.node_config:
        raise fl.DataError("this node was not told where its data are: --node-config 'data=\"/path/of/this/site\"'")
    own, test = (context.node_config.get(name) for name in ("data", "test"))
    held_out = None if test is None else read(Path(str(test)))
    return fl.Federation.from_arrays([read(Path(str(own)))], held_out, classes=len(CLASSES))


def test(context: Context) -> tuple[np.ndarray, np.ndarray] | None:
    """What the server evaluates on; None: nothing."""
    return None if TEST is None else read(Path(TEST))


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Samples [n, columns] and their classes [n]."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    table = pd.concat([pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_csv(file) for file in files])
    x = np.stack([(table[name] - mean) / spread for name, (mean, spread) in COLUMNS.items()], axis=1)
    labels = table[LABEL].astype(str) if isinstance(CLASSES[0], str) else table[LABEL]
    y = labels.map({name: number for number, name in enumerate(CLASSES)})
    if np.isnan(x).any() or y.isna().any():
        raise fl.DataError(f"{path} has rows without a value, or with a {LABEL} that is none of {CLASSES}")
    return x.astype(np.float32), np.array(y, np.int64)
