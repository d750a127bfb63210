"""MobileNetV2. Sandler, Howard, Zhu, Zhmoginov, Chen: MobileNetV2: Inverted Residuals and Linear Bottlenecks. CVPR
2018.

As in RADFed on CIFAR-10: width 1.0, images enlarged to 224x224, everything before the last inverted residual frozen as
trained on ImageNet; the last inverted residual, the last convolution and the classifier (dropout 0.2) begin at random,
as in RADFed's code, and are trained. The batch norms of the frozen part keep their ImageNet statistics.

Departures: the weights are those of torchvision (its parameter names are kept here), not TensorFlow's, so that images
should be normalised by ImageNet's means and deviations. weights="random" has no use but to try things out: the frozen
part then stays as it was drawn.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.errors import ModelError
from fedloom.models.catalogue import REGISTRY, Shape
from fedloom.models.checks import not_empty
from fedloom.models.stored import find, missing, read_weights

SIDE = 224
FROZEN = 17  # blocks of `features`; 17 is the last inverted residual, 18 the last convolution
# of each stage: expansion, channels, blocks, stride of the first block (Table 2 of the paper)
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
IMAGENET = ("mobilenet_v2.safetensors", "mobilenet_v2-b0353104.pth", "mobilenet_v2.pth")


@REGISTRY.add("mobilenetv2", paper="Sandler et al., CVPR 2018")
def mobilenetv2(weights: str = "imagenet", *, shape: Shape) -> nn.Module:
    """MobileNetV2 trained on ImageNet, of which the last block and the classifier are trained anew.

    weights: "imagenet", "random", or a file with torchvision's names for the tensors.
    """
    channels, _, _ = shape.image("mobilenetv2")
    not_empty("mobilenetv2", weights=weights)
    if channels != 3:
        raise ModelError(f"mobilenetv2 reads images of three channels, not of {channels}")
    network = MobileNetV2(shape.outputs)
    if weights != "random":
        _load_frozen(network, weights, shape)
    return network


class MobileNetV2(nn.Module):
    """Frozen up to the last inverted residual, whatever `train` says."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = [_normed(3, 32, 3, stride=2)]
        inputs = 32
        for expansion, channels, repeats, stride in STAGES:
            for place in range(repeats):
                blocks.append(InvertedResidual(inputs, channels, expansion, stride if place == 0 else 1))
                inputs = channels
        self.features = nn.Sequential(*blocks, _normed(inputs, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))
        self._draw()
        self.features[:FROZEN].requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> "MobileNetV2":
        super().train(mode)
        self.features[:FROZEN].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[-2:]) < SIDE:
            x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        answer: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return answer

    def _draw(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)


class InvertedResidual(nn.Module):
    """1x1 to more channels, 3x3 on each of them, 1x1 back without ReLU; the input is added where sizes agree."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = inputs * expansion
        widen = [] if expansion == 1 else [_normed(inputs, wide, 1)]
        narrow = [nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.conv = nn.Sequential(*widen, _normed(wide, wide, 3, stride, groups=wide), *narrow)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.conv(x)
        return x + answer if self.adds else answer


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU6())


def _load_frozen(network: MobileNetV2, weights: str, shape: Shape) -> None:
    names = IMAGENET if weights == "imagenet" else (weights,)
    path = find(names, shape.files)
    if path is None:
        how = "; torchvision publishes it as mobilenet_v2, and weights='random' does without"
        raise missing("the weights of mobilenetv2 are", names, shape.files, how)
    stored = read_weights(path)
    frozen: OrderedDict[str, Tensor] = OrderedDict()
    for name, own in network.features[:FROZEN].state_dict(prefix="features.").items():
        value = stored.get(name)
        if value is None or value.shape != own.shape:
            found = "no" if value is None else f"of shape {tuple(value.shape)} instead of {tuple(own.shape)} the"
            raise ModelError(f"{path} is not MobileNetV2 of width 1.0 with torchvision's names: it has {found} {name}")
        if not torch.isfinite(value).all():
            raise ModelError(f"{path} holds a NaN or an infinity in {name}")
        frozen[name.removeprefix("features.")] = value
    network.features[:FROZEN].load_state_dict(frozen)
