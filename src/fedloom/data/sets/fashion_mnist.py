"""Fashion-MNIST: Xiao, Rasul, Vollgraf: Fashion-MNIST, a novel image dataset for benchmarking. arXiv:1708.07747, 2017.

Its files have the names of MNIST's, so they are looked for in a folder of their own, fashion-mnist/.
"""

from fedloom.data.catalogue import dataset
from fedloom.data.corpus import Corpus
from fedloom.data.files import Remote, Source
from fedloom.data.formats import mnist_files, plain_images, size_notes

SAMPLES = (60_000, 10_000)
NAMES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_FOLDER = "fashion-mnist/"
_PUBLISHER = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_SUMS = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


@dataset(
    "fashion-mnist",
    samples=SAMPLES,
    classes=10,
    licence="MIT",
    plain=("fashion-mnist.npz",),
    published=[[Remote(_FOLDER + name, _PUBLISHER + name, f"md5:{digest}") for name, digest in _SUMS.items()]],
    how=f"Put the four files from {_PUBLISHER} into a subfolder fashion-mnist, or save fashion-mnist.npz.",
)
def fashion_mnist(*, source: Source) -> Corpus:
    """articles of clothing, 28 x 28 pixels (Xiao et al. 2017)"""
    if source.plain is not None:
        (x, y), (test_x, test_y) = plain_images(source.plain, (28, 28), 10)
    else:
        (x, y), (test_x, test_y) = mnist_files(source, _FOLDER)
    notes = size_notes(len(y), len(test_y), SAMPLES)
    return Corpus(x[:, None], y, test_x[:, None], test_y, classes=10, class_names=NAMES, notes=notes)
