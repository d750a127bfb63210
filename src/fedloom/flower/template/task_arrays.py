"""The model and the data: the file to make your own.

`model` is called at the server and at every client, `data` at each client, `test` at the server. They are called again
for every message, so that the same call must return the same.
"""

from pathlib import Path

import numpy as np
from flwr.app import Context
from torch import nn

import fedloom as fl

MODEL = "cnn"  # `fedloom models` lists them
SHAPE = (1, 28, 28)  # of one sample
KIND = "float32"  # of its numbers; uint8 are the pixels of images
CLASSES = 10  # labels are 0 to CLASSES - 1 everywhere, also where one never occurs
TEST: str | None = None  # the server's own file, or folder of files, to evaluate on


def model(context: Context) -> nn.Module:
    """Any nn.Module will do; its parameters are where training starts from."""
    like = federation(np.zeros((1, *SHAPE), KIND), np.zeros(1, np.int64))
    return fl.model(MODEL, like, int(context.run_config["seed"]))


def data(context: Context) -> fl.Federation:
    """This client's samples: YOUR OWN DATA, a file or a folder of files that the node was told of when it was started,
    with --node-config 'data="/path/of/this/site"'; `test`, if it is told of one, is what this client evaluates on.
    """
    if "data" not in context.node_config:
        raise fl.DataError("this node was not told where its data are: --node-config 'data=\"/path/of/this/site\"'")
    own, test = (context.node_config.get(name) for name in ("data", "test"))
    return federation(*read(Path(str(own))), None if test is None else read(Path(str(test))))


def test(context: Context) -> fl.Federation | None:
    """What the server evaluates on; None: nothing."""
    if TEST is None:
        return None
    x, y = read(Path(TEST))
    return federation(x[:1], y[:1], (x, y))


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Samples [n, ...] and their classes [n]: the arrays x and y of .npz files."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    parts = [np.load(file, allow_pickle=False) for file in files]
    x, y = (np.concatenate([part[name] for part in parts]) for name in ("x", "y"))
    if x.shape[1:] != SHAPE or y.dtype.kind not in "iu":
        raise fl.DataError(f"{path} has samples of shape {x.shape[1:]}, not {SHAPE}, or targets that are no numbers")
    return x.astype(KIND), y.astype(np.int64)


def federation(x: np.ndarray, y: np.ndarray, test: tuple[np.ndarray, np.ndarray] | None = None) -> fl.Federation:
    """One client."""
    made = fl.Federation.from_arrays([(x, y)], test, classes=CLASSES)
    return made.images() if KIND == "uint8" and len(SHAPE) == 3 else made
