"""CIFAR-10: Krizhevsky: Learning multiple layers of features from tiny images. University of Toronto, 2009.

Mean and deviation of the channels are those of FedDyn's and AdaBest's code.
"""

import numpy as np

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source
from fedloom.data.formats import cifar_images, plain_images, size_notes

SAMPLES = (50_000, 10_000)
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ARCHIVE = Remote(
    "cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
)


@dataset(
    "cifar10",
    samples=SAMPLES,
    classes=10,
    licence="free for research",
    plain=("cifar10.npz",),
    published=[[ARCHIVE]],
    how=f"Get {ARCHIVE.url}, or save the arrays (N x 32 x 32 x 3) as cifar10.npz.",
)
def cifar10(*, source: Source) -> Corpus:
    """photographs of ten kinds of thing, 32 x 32 pixels in colour (Krizhevsky 2009)"""
    if source.plain is not None:
        train, test = plain_images(source.plain, (32, 32, 3), 10)
        (x, y), (test_x, test_y) = ((np.ascontiguousarray(x.transpose(0, 3, 1, 2)), y) for x, y in (train, test))
    else:
        batches = [f"data_batch_{part}.bin" for part in range(1, 6)]
        path = source.published[ARCHIVE.name]
        (x, y), (test_x, test_y) = cifar_images(path, batches, "test_batch.bin", label_bytes=1, classes=10)
    return Corpus(
        x,
        y,
        test_x,
        test_y,
        classes=10,
        class_names=NAMES,
        mean=(0.491, 0.482, 0.447),
        std=(0.247, 0.243, 0.262),
        notes=size_notes(len(y), len(test_y), SAMPLES),
    )
