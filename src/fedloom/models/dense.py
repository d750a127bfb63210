"""Models without convolutions: logistic regression, a linear support vector machine, fully connected layers.

mlp(hidden=[100, 100]) is the network of FedDyn and AdaBest (Varno et al., ECCV 2022) for ten letters of EMNIST,
mlp(hidden=[200, 200]) that of RADFed (Xue, Klabjan, Luo, 2021) for MNIST, mlp(hidden=[64, 64], init="truncated") its
network for Covertype and logistic(zeros=True) its model for eICU. The support vector machine is that of the preliminary
runs in 2D-LRD (Mo et al., IJCNN 2021), which prints no more than its name.
"""

from typing import ClassVar, Literal

import torch
from torch import nn

from fedloom.models.catalogue import REGISTRY, Shape
from fedloom.models.checks import at_least_one, numbers

TRUNCATED_STD = 0.02


@REGISTRY.add("logistic")
def logistic(zeros: bool = False, *, shape: Shape) -> nn.Module:
    """Logistic regression; zeros=True begins with all weights at zero."""
    linear = nn.Linear(numbers("logistic", shape), shape.outputs)
    if zeros:
        with torch.no_grad():
            linear.weight.zero_()
            linear.bias.zero_()
    return nn.Sequential(nn.Flatten(), linear)


class SupportVectorMachine(nn.Sequential):
    """Linear scores, trained with the hinge loss."""

    fedloom_loss: ClassVar[str] = "hinge"


@REGISTRY.add("svm")
def svm(*, shape: Shape) -> nn.Module:
    """A linear support vector machine: linear scores under the hinge loss."""
    return SupportVectorMachine(nn.Flatten(), nn.Linear(numbers("svm", shape), shape.outputs))


@REGISTRY.add("mlp")
def mlp(
    hidden: tuple[int, ...] = (100, 100), init: Literal["default", "truncated"] = "default", *, shape: Shape
) -> nn.Module:
    """Fully connected layers with ReLU between them.

    init="truncated": weights from a normal distribution of deviation 0.02, cut at two deviations, and biases of zero.
    """
    for units in hidden:
        at_least_one("mlp", **{"every hidden layer": units})
    layers: list[nn.Module] = [nn.Flatten()]
    width = numbers("mlp", shape)
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        width = units
    network = nn.Sequential(*layers, nn.Linear(width, shape.outputs))
    if init == "truncated":
        _truncated(network)
    return network


def _truncated(network: nn.Sequential) -> None:
    for layer in network:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=TRUNCATED_STD, a=-2 * TRUNCATED_STD, b=2 * TRUNCATED_STD)
            nn.init.zeros_(layer.bias)
