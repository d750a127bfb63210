"""Models without convolutions."""

from torch import nn

from fedloom.errors import ModelError
from fedloom.models.catalogue import REGISTRY, Shape


@REGISTRY.add("logistic")
def logistic(*, shape: Shape) -> nn.Module:
    """Logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(shape.features, shape.outputs))


@REGISTRY.add("mlp")
def mlp(hidden: tuple[int, ...] = (100, 100), *, shape: Shape) -> nn.Module:
    """Fully connected layers with ReLU between them."""
    if any(width < 1 for width in hidden):
        raise ModelError(f"mlp: every hidden layer needs at least one unit, not {list(hidden)}")
    layers: list[nn.Module] = [nn.Flatten()]
    width = shape.features
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, shape.outputs))
