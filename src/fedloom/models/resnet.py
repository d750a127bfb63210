"""ResNet-56. He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition. CVPR 2016.

variant="bottleneck" is what FedML (He et al., 2020) calls ResNet-56 and what FedGLAD ran: three stages of six
bottleneck blocks, widths 16, 32, 64 with four times as many channels out; 591,322 parameters in 176 tensors for
CIFAR-10. variant="basic" is the network of the paper's section 4.2: three stages of nine basic blocks. Its shortcuts
that change the size are 1x1 convolutions (the paper's option B; section 4.2 has some without parameters); 855,770
parameters.

Stage two and three halve the image, in a bottleneck at the 3x3 convolution. Convolutions begin as Kaiming et al.
(ICCV 2015) by fan-out, batch norms at one and zero.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.models.catalogue import REGISTRY, Shape

WIDTHS = (16, 32, 64)


@REGISTRY.add("resnet56", paper="He et al., CVPR 2016")
def resnet56(variant: Literal["bottleneck", "basic"] = "bottleneck", *, shape: Shape) -> nn.Module:
    """ResNet-56 for small images: FedML's bottlenecks [6, 6, 6], or the paper's basic blocks [9, 9, 9]."""
    channels, _, _ = shape.image("resnet56")
    block = Bottleneck if variant == "bottleneck" else Basic
    network = ResNet(block, 6 if variant == "bottleneck" else 9, channels, shape.outputs)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


class Residual(nn.Module):
    """relu(body(x) + shortcut(x)); the shortcut is a convolution where the body changes the size."""

    expansion = 1

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normed(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.body(x) + self.shortcut(x)
        return F.relu(answer)


class Basic(Residual):
    """Two convolutions 3x3."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        body = nn.Sequential(*_normed(inputs, width, 3, stride), nn.ReLU(), *_normed(width, width, 3))
        super().__init__(body, inputs, width, stride)


class Bottleneck(Residual):
    """A convolution 3x3 between two of 1x1, the last of which widens."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        narrow = [*_normed(inputs, width, 1), nn.ReLU(), *_normed(width, width, 3, stride), nn.ReLU()]
        outputs = width * self.expansion
        super().__init__(nn.Sequential(*narrow, *_normed(width, outputs, 1)), inputs, outputs, stride)


class ResNet(nn.Module):
    """A convolution, three stages of blocks, the mean over the image, a linear layer."""

    def __init__(self, block: type[Basic] | type[Bottleneck], depth: int, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_normed(channels, WIDTHS[0], 3), nn.ReLU())
        blocks: list[nn.Module] = []
        inputs = WIDTHS[0]
        for width in WIDTHS:
            for place in range(depth):
                blocks.append(block(inputs, width, stride=2 if place == 0 and width != WIDTHS[0] else 1))
                inputs = width * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = self.blocks(self.stem(x))
        answer: Tensor = self.classifier(torch.mean(seen, dim=(2, 3)))
        return answer


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]
