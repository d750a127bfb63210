"""CIFAR-100: Krizhevsky: Learning multiple layers of features from tiny images. University of Toronto, 2009.

The labels are the 100 fine ones. Mean and deviation of the channels are those of FedDyn's and AdaBest's code.
"""

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source
from fedloom.data.formats import cifar_images, plain_images, size_notes

SAMPLES = (50_000, 10_000)
ARCHIVE = Remote(
    "cifar-100-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    "md5:03b5dce01913d631647c71ecec9e9cb8",
)


@dataset(
    "cifar100",
    samples=SAMPLES,
    classes=100,
    licence="free for research",
    plain=("cifar100.npz",),
    published=[[ARCHIVE]],
    how=f"Get {ARCHIVE.url}, or save the arrays (N x 32 x 32 x 3) as cifar100.npz.",
)
def cifar100(*, source: Source) -> Corpus:
    """photographs of a hundred kinds of thing, 32 x 32 pixels in colour (Krizhevsky 2009)"""
    if source.plain is not None:
        train, test = plain_images(source.plain, (32, 32, 3), 100)
        (x, y), (test_x, test_y) = ((np.ascontiguousarray(x.transpose(0, 3, 1, 2)), y) for x, y in (train, test))
    else:
        path = source.published[ARCHIVE.name]  # of each record the coarse label, then the fine one
        (x, y), (test_x, test_y) = cifar_images(path, ["train.bin"], "test.bin", label_bytes=2, classes=100)
    return Corpus(
        x,
        y,
        test_x,
        test_y,
        classes=100,
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
        notes=size_notes(len(y), len(test_y), SAMPLES),
    )
