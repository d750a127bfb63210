"""MNIST: LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition. Proc. IEEE 86, 1998.

Pixels lie in [0, 1] and are not normalised, as in FedGLAD's code; with raw=true from 0 to 255, as RADFed's reads them.
"""

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source
from fedloom.data.formats import mnist_files, plain_images, size_notes
from fedloom.data.transforms import PIXEL

SAMPLES = (60_000, 10_000)
_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_SUMS = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


@dataset(
    "mnist",
    samples=SAMPLES,
    classes=10,
    licence="CC BY-SA 3.0",
    plain=("mnist.npz",),
    published=[[Remote(name, _MIRROR + name, f"md5:{digest}") for name, digest in _SUMS.items()]],
    how=f"Get the four files {', '.join(_SUMS)} from {_MIRROR}, or save the arrays as mnist.npz.",
)
def mnist(raw: bool = False, *, source: Source) -> Corpus:
    """handwritten digits, 28 x 28 pixels (LeCun et al. 1998)"""
    if source.plain is not None:
        (x, y), (test_x, test_y) = plain_images(source.plain, (28, 28), 10)
    else:
        (x, y), (test_x, test_y) = mnist_files(source, "")
    return Corpus(
        x[:, None],
        y,
        test_x[:, None],
        test_y,
        classes=10,
        class_names=tuple("0123456789"),
        mean=(0.0,) if raw else (),
        std=(1 / PIXEL,) if raw else (),
        notes=size_notes(len(y), len(test_y), SAMPLES),
    )
