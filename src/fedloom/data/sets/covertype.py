"""Covertype: Blackard, Dean: Comparative accuracies of artificial neural networks and discriminant analysis in
predicting forest cover types from cartographic variables. Computers and Electronics in Agriculture 24, 1999.

RADFed's two-class version: spruce/fir against lodgepole pine, 10 numbers and 39 indicators. Five soil types never occur
with these two and are left out. The publisher has 495,141 such rows (211,840 + 283,301), of which RADFed took 492,000
(211,560 + 280,440), and no test set: every fifth row of a fixed shuffle is one here.
"""

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source, open_text, read_npz, reading
from fedloom.data.formats import ARRAYS, Pair, checked_labels, size_notes
from fedloom.errors import DataError

SAMPLES = (396_112, 99_029)
NUMERIC = (
    "Elevation",
    "Aspect",
    "Slope",
    "Horizontal_Distance_To_Hydrology",
    "Vertical_Distance_To_Hydrology",
    "Horizontal_Distance_To_Roadways",
    "Hillshade_9am",
    "Hillshade_Noon",
    "Hillshade_3pm",
    "Horizontal_Distance_To_Fire_Points",
)
COLUMNS = (
    *NUMERIC,
    *(f"Wilderness_Area{area}" for area in range(1, 5)),
    *(f"Soil_Type{soil}" for soil in range(1, 41)),
)
ABSENT = tuple(f"Soil_Type{soil}" for soil in (1, 5, 14, 15, 37))
TABLE = Remote(
    "covtype.data.gz",
    "https://ndownloader.figshare.com/files/5976039",
    "sha256:614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
)


@dataset(
    "covertype",
    samples=SAMPLES,
    classes=2,
    licence="CC BY 4.0",
    plain=("covertype.npz",),
    published=[[TABLE]],
    how=f"Get {TABLE.url} as {TABLE.name}, or save the arrays (54 columns, labels 0 to 6) as covertype.npz.",
)
def covertype(*, source: Source) -> Corpus:
    """two kinds of forest by 49 properties of the place (Blackard and Dean 1999; RADFed's version)"""
    path = source.paths[0]
    if source.plain is not None:
        found = read_npz(path, ARRAYS)
        train, test = ((found[f"{split}_x"], found[f"{split}_y"]) for split in ("train", "test"))
    else:
        train, test = _published(source)
    kept = [column not in ABSENT for column in COLUMNS]
    (x, y), (test_x, test_y) = (_two_classes(source, pair, np.array(kept)) for pair in (train, test))
    names = tuple(column for column in COLUMNS if column not in ABSENT)
    return Corpus(
        x,
        y,
        test_x,
        test_y,
        classes=2,
        class_names=("spruce/fir", "lodgepole pine"),
        columns=names,
        numeric=len(NUMERIC),
        notes=size_notes(len(y), len(test_y), SAMPLES),
    )


def _published(source: Source) -> tuple[Pair, Pair]:
    """UCI's table without a header: 54 columns and the class, counted from 1."""
    import pandas as pd

    path = source.published[TABLE.name]
    with reading(path), open_text(path) as file:
        table = pd.read_csv(file, header=None, dtype=np.int16).to_numpy()
    if table.shape[1] != len(COLUMNS) + 1:
        raise DataError(f"{path} has {table.shape[1]} columns, but {len(COLUMNS) + 1} were expected")
    table = table[np.isin(table[:, -1], (1, 2))]
    order = np.random.default_rng(0).permutation(len(table))
    test = np.arange(len(table)) % 5 == 0
    x, y = table[order, :-1], table[order, -1] - 1
    return (x[~test], y[~test]), (x[test], y[test])


def _two_classes(source: Source, pair: Pair, kept: np.ndarray) -> Pair:
    path, (x, y) = source.paths[0], pair
    if x.ndim != 2 or x.shape[1] != len(COLUMNS) or x.dtype.kind not in "iuf":
        raise DataError(f"{path}: x is {x.dtype} {list(x.shape)}, but numbers in {len(COLUMNS)} columns were expected")
    y = checked_labels(path, "y", y, 7)
    if len(x) != len(y):
        raise DataError(f"{path}: {len(x)} rows but {len(y)} labels")
    x, y = x[y < 2], y[y < 2]
    if x[:, ~kept].any():
        raise DataError(f"{path}: rows of the first two classes have {', '.join(ABSENT)}, which never occur with them")
    return x[:, kept].astype(np.float32), y
