"""Values and data that a model can't be built from, refused with the model's name."""

from torch import nn

from fedloom.errors import ModelError
from fedloom.models.catalogue import Shape

DEEPEST = 1000  # layers: they are made one by one, before anything notices that there are too many


def at_least_one(model: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ModelError(f"{model}: {name} must be at least 1, not {size}")
        if name == "layers" and size > DEEPEST:
            raise ModelError(f"{model}: layers must be at most {DEEPEST}, not {size}")


def not_empty(model: str, **names: str) -> None:
    for name, text in names.items():
        if not text.strip():
            raise ModelError(f"{model}: {name} is an empty text")


def numbers(model: str, shape: Shape) -> int:
    """How many numbers one sample has; token ids are names and no numbers."""
    if shape.tokens is not None:
        raise ModelError(f"{model} reads numbers, not token ids; for texts choose lstm, bilstm or transformer")
    return shape.features


def one_answer(model: str, shape: Shape) -> None:
    if shape.per_position:
        raise ModelError(
            f"{model} answers once per text, but the data want an answer at every position; "
            "choose stackoverflow-lstm or transformer"
        )


def dropout_layer(model: str, rate: float) -> nn.Module:
    """A dropout layer. Without a rate it is the identity, so that nothing random is left in the model."""
    if not 0 <= rate < 1:
        raise ModelError(f"{model}: dropout must be at least 0 and below 1, not {rate}")
    return nn.Dropout(rate) if rate else nn.Identity()
