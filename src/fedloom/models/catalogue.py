"""Every model by name."""

from dataclasses import dataclass

import torch
from torch import nn

from fedloom.errors import ModelError
from fedloom.federation import Federation
from fedloom.keys import check_seed
from fedloom.registry import Registry
from fedloom.spec import parse_one


@dataclass(frozen=True)
class Shape:
    """What a model must read and how many numbers it must answer with."""

    inputs: tuple[int, ...]
    outputs: int

    @property
    def features(self) -> int:
        return int(torch.Size(self.inputs).numel())


REGISTRY: Registry[nn.Module] = Registry("model", ModelError)


def model(text: str, federation: Federation, seed: int = 0) -> nn.Module:
    """A model by name, with inputs and outputs as the data want them and weights drawn from `seed`.

    >>> from fedloom.data.catalogue import load
    >>> sum(p.numel() for p in model("mlp(hidden=[100])", load("digits", clients=10)).parameters())
    7510
    """
    from fedloom.models import dense  # noqa: F401

    check_seed(seed)
    call = REGISTRY.complete(parse_one(text))
    targets = federation.y.shape[1:].numel()
    shape = Shape(tuple(federation.x.shape[1:]), federation.classes or targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return REGISTRY.make(call, shape=shape)
