"""Small convolutional networks. The first fully connected layer is sized from the images.

cnn-reddi: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization. ICLR 2021;
    in FedGLAD for MNIST and FEMNIST.
cnn-mcmahan: McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
    Decentralized Data. AISTATS 2017; in FedDyn and AdaBest for CIFAR. AdaBest prints 394 units for the first fully
    connected layer, its code and FedDyn's have 384, which is taken here. No normalisation of responses.
cnn-dgt: DGT says "three-layer CNN" and no more. Here two convolutions 3x3 of 32 and 64 channels, each with a pooling,
    and one layer of 128 units: a choice, not a print.
lenet5: LeCun, Bottou, Bengio, Haffner: Gradient-Based Learning Applied to Document Recognition. Proc. IEEE 1998; in
    2D-LRD, which prints no sizes. As usual today with ReLU, maximum pooling, full connections between the
    convolutions and a linear output. Images below 32x32 are padded by 2, as LeCun pads digits.
"""

import torch
from torch import nn

from fedloom.errors import ModelError
from fedloom.models.catalogue import REGISTRY, Shape

LENET_SIDE = 32  # what LeNet-5 reads; a 28x28 digit with a border of 2


@REGISTRY.add("cnn-reddi", paper="Reddi et al., ICLR 2021")
def cnn_reddi(*, shape: Shape) -> nn.Module:
    """Two convolutions 3x3 of 32 and 64, one pooling, 128 units, dropout: MNIST and FEMNIST."""
    image = shape.image("cnn-reddi")
    features = [nn.Conv2d(image[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    flat = _flattened("cnn-reddi", features, image)
    head = [nn.Linear(flat, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, shape.outputs)]
    return nn.Sequential(*features, nn.Dropout(0.25), nn.Flatten(), *head)


@REGISTRY.add("cnn-mcmahan", paper="McMahan et al., AISTATS 2017")
def cnn_mcmahan(*, shape: Shape) -> nn.Module:
    """Two convolutions 5x5 of 64, each pooled, 384 and 192 units: CIFAR in FedDyn and AdaBest."""
    image = shape.image("cnn-mcmahan")
    features = [*_pooled(image[0], 64, 5), *_pooled(64, 64, 5)]
    flat = _flattened("cnn-mcmahan", features, image)
    head = [nn.Linear(flat, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, shape.outputs)]
    return nn.Sequential(*features, nn.Flatten(), *head)


@REGISTRY.add("cnn-dgt", paper="DGT, sizes chosen here")
def cnn_dgt(*, shape: Shape) -> nn.Module:
    """Two convolutions 3x3 of 32 and 64, each pooled, 128 units: a choice for DGT's three-layer CNN."""
    image = shape.image("cnn-dgt")
    features = [*_pooled(image[0], 32, 3), *_pooled(32, 64, 3)]
    flat = _flattened("cnn-dgt", features, image)
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(flat, 128), nn.ReLU(), nn.Linear(128, shape.outputs))


@REGISTRY.add("lenet5", paper="LeCun et al., Proc. IEEE 1998")
def lenet5(*, shape: Shape) -> nn.Module:
    """LeNet-5: two convolutions 5x5 of 6 and 16, each pooled, 120 and 84 units."""
    image = shape.image("lenet5")
    padding = 2 if min(image[1:]) < LENET_SIDE else 0
    features = [*_pooled(image[0], 6, 5, padding), *_pooled(6, 16, 5)]
    flat = _flattened("lenet5", features, image)
    head = [nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, shape.outputs)]
    return nn.Sequential(*features, nn.Flatten(), *head)


def _pooled(inputs: int, outputs: int, kernel: int, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def _flattened(model: str, features: list[nn.Module], image: tuple[int, int, int]) -> int:
    """How many numbers the convolutions make of one image."""
    try:
        with torch.no_grad():
            answer: torch.Tensor = nn.Sequential(*features)(torch.zeros(1, *image))
    except RuntimeError:  # a kernel or a pooling that is larger than what is left of the image
        height, width = image[1:]
        raise ModelError(f"{model}: images of {height}x{width} are too small for its convolutions") from None
    return answer.numel()
