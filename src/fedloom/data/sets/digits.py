"""The digits that come with scikit-learn: 1,797 images of 8 x 8 pixels, every fifth held out for the test."""

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Source


@dataset("digits", samples=(1437, 360), classes=10, licence="CC BY 4.0", embedded=True)
def digits(*, source: Source) -> Corpus:
    """handwritten digits, 8 x 8 pixels (UCI; comes with scikit-learn)"""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = (bunch.data / 16).astype(np.float32)  # pixels count from 0 to 16
    y = bunch.target.astype(np.int64)
    test = np.arange(len(y)) % 5 == 0
    return Corpus(x[~test], y[~test], x[test], y[test], classes=10, class_names=tuple("0123456789"))
