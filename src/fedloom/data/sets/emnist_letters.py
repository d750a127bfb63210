"""EMNIST letters: Cohen, Afshar, Tapson, van Schaik: EMNIST, extending MNIST to handwritten letters. IJCNN 2017.

`letters=10` is EMNIST-L of FedDyn and AdaBest: the first ten letters, 48,000 / 8,000 images. They are normalised by
the mean and deviation of their own training pixels, as there.
"""

from string import ascii_uppercase

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Source
from fedloom.data.formats import plain_images, size_notes
from fedloom.data.sets.emnist_byclass import ARCHIVE, nist_images
from fedloom.errors import DataError

SAMPLES = (124_800, 20_800)


@dataset(
    "emnist-letters",
    samples=SAMPLES,
    classes=26,
    licence="public domain",
    plain=("emnist-letters.npz",),
    published=[[ARCHIVE]],
    how=f"Get {ARCHIVE.url}, or save the arrays as emnist-letters.npz, upright and with 0 for A.",
)
def emnist_letters(letters: int = 26, *, source: Source) -> Corpus:
    """handwritten letters, 28 x 28 pixels, the first so many of the alphabet (Cohen et al. 2017)"""
    if not 2 <= letters <= 26:
        raise DataError(f"emnist-letters: letters must lie between 2 and 26, not {letters}")
    if source.plain is not None:
        train, test = plain_images(source.plain, (28, 28), 26)
    else:
        train, test = nist_images(source.published[ARCHIVE.name], "letters", 26, first=1)
    (x, y), (test_x, test_y) = ((x[y < letters], y[y < letters]) for x, y in (train, test))
    mean, std = _moments(x)
    published = (SAMPLES[0] // 26 * letters, SAMPLES[1] // 26 * letters)
    return Corpus(
        x[:, None],
        y,
        test_x[:, None],
        test_y,
        classes=letters,
        class_names=tuple(ascii_uppercase[:letters]),
        mean=(mean,),
        std=(std,),
        notes=size_notes(len(y), len(test_y), published),
    )


def _moments(x: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of pixels in [0, 1], from how often each grey value occurs."""
    counts = sum(np.bincount(part.ravel(), minlength=256) for part in np.array_split(x, len(x) // 4096 + 1))
    grey = np.arange(256) / 255
    mean = float((counts * grey).sum() / x.size)
    return mean, float(np.sqrt((counts * (grey - mean) ** 2).sum() / x.size))
