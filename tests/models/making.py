"""A model by its text form for data of a given shape, and samples of that shape."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedloom.data.files import Files
from fedloom.models.catalogue import REGISTRY, Shape, load_models
from fedloom.spec import parse_one


def make(text: str, shape: Shape, seed: int = 0) -> nn.Module:
    load_models()
    torch.manual_seed(seed)
    return REGISTRY.make(REGISTRY.complete(parse_one(text)), shape=shape)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def samples(shape: Shape, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random samples; texts have at least one token and are padded at the right end where the shape says so."""
    generator = torch.Generator().manual_seed(seed)
    if shape.tokens is None:
        return torch.randn(count, *shape.inputs, generator=generator, dtype=dtype)
    ids = torch.randint(1, shape.tokens, (count, *shape.inputs), generator=generator)
    if shape.padded:
        lengths = torch.randint(1, shape.inputs[0] + 1, (count, 1), generator=generator)
        ids = ids * (torch.arange(shape.inputs[0]) < lengths)
    return ids


def targets(shape: Shape, count: int, seed: int = 0) -> Tensor:
    size = (count, shape.inputs[0]) if shape.per_position else (count,)
    return torch.randint(0, shape.outputs, size, generator=torch.Generator().manual_seed(seed))


def with_files(shape: Shape, folder: Path) -> Shape:
    """The same, with `folder` as the user's and an empty cache."""
    return replace(shape, files=Files(folder, folder / "cache"))
