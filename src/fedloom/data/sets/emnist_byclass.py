"""EMNIST by class: Cohen, Afshar, Tapson, van Schaik: EMNIST, extending MNIST to handwritten letters. IJCNN 2017.

62 classes of very different size: digits, capitals, small letters. Pixels lie in [0, 1] and are not normalised.
"""

import gzip
import io
import zipfile
from pathlib import Path, PurePosixPath
from string import ascii_lowercase, ascii_uppercase, digits

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source, reading
from fedloom.data.formats import Pair, checked_pair, plain_images, read_idx, size_notes
from fedloom.errors import DataError
from fedloom.untrusted import Unpacked, open_plain

SAMPLES = (697_932, 116_323)
NAMES = tuple(digits + ascii_uppercase + ascii_lowercase)
ARCHIVE = Remote(
    "gzip.zip", "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "md5:58c8d27c78d21e728a6bc7b3cc06412e"
)


@dataset(
    "emnist-byclass",
    samples=SAMPLES,
    classes=62,
    licence="public domain",
    plain=("emnist-byclass.npz",),
    published=[[ARCHIVE]],
    how=f"Get {ARCHIVE.url}, or save the arrays as emnist-byclass.npz, upright.",
)
def emnist_byclass(*, source: Source) -> Corpus:
    """handwritten digits, capitals and small letters, 28 x 28 pixels (Cohen et al. 2017)"""
    if source.plain is not None:
        (x, y), (test_x, test_y) = plain_images(source.plain, (28, 28), 62)
    else:
        (x, y), (test_x, test_y) = nist_images(source.published[ARCHIVE.name], "byclass", 62)
    notes = size_notes(len(y), len(test_y), SAMPLES)
    return Corpus(x[:, None], y, test_x[:, None], test_y, classes=62, class_names=NAMES, notes=notes)


def nist_images(path: Path, split: str, classes: int, first: int = 0) -> tuple[Pair, Pair]:
    """A split of NIST's archive, whose images are transposed and whose labels count from `first`."""

    def pair(part: str) -> Pair:
        images, labels = (
            _member(path, f"emnist-{split}-{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1")
        )
        x, y = checked_pair(path, part, (images, labels.astype(np.int64) - first), (28, 28), classes)
        return np.ascontiguousarray(x.transpose(0, 2, 1)), y

    return pair("train"), pair("test")


def _member(path: Path, name: str) -> np.ndarray:
    """One idx file of the archive, in whichever folder it lies there."""
    with reading(path), open_plain(path) as whole, zipfile.ZipFile(whole) as archive:
        found = [member for member in archive.namelist() if PurePosixPath(member).name == name]
        if not found:
            raise DataError(f"{path} has no {name}")
        with archive.open(found[0]) as packed, gzip.open(packed) as file:
            return read_idx(io.BufferedReader(Unpacked(file, path)), path)
