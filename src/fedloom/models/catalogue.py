"""Every model by name."""

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fedloom.data.files import Files
from fedloom.errors import ModelError
from fedloom.federation import Federation
from fedloom.keys import check_seed
from fedloom.registry import Registry
from fedloom.spec import parse_one


@dataclass(frozen=True)
class Shape:
    """What a model must read and how many numbers it must answer with."""

    inputs: tuple[int, ...]  # of one sample: (features,), (channels, height, width), (time, features) or (length,)
    outputs: int  # classes, or tokens, or numbers
    tokens: int | None = None  # samples are token ids below this; None: they are numbers
    padded: bool = True  # token 0 is padding
    per_position: bool = False  # one answer per position of a sequence: outputs [B, outputs, length]
    words: tuple[str, ...] = ()  # the tokens themselves
    files: Files | None = None  # where weights and word vectors are looked for

    @property
    def features(self) -> int:
        return int(torch.Size(self.inputs).numel())

    def image(self, name: str) -> tuple[int, int, int]:
        """(channels, height, width), or an error that names the model."""
        if self.tokens is None and len(self.inputs) == 3:
            channels, height, width = self.inputs
            return channels, height, width
        raise ModelError(f"{name} reads images (channels, height, width), not samples of shape {self.inputs}")

    def text(self, name: str) -> int:
        """The number of tokens, or an error that names the model."""
        if self.tokens is not None and len(self.inputs) == 1:
            return self.tokens
        raise ModelError(f"{name} reads token ids, not samples of shape {self.inputs} that are numbers")


REGISTRY: Registry[nn.Module] = Registry("model", ModelError)


def model(text: str, federation: Federation, seed: int = 0, data_dir: str | Path | None = None) -> nn.Module:
    """A model by name, with inputs and outputs as the data want them and weights drawn from `seed`. `data_dir` is
    where weights and word vectors are looked for.

    >>> from fedloom.data.load import load
    >>> sum(p.numel() for p in model("mlp(hidden=[100])", load("digits", clients=10)).parameters())
    7510
    """
    load_models()
    check_seed(seed)
    call = REGISTRY.complete(parse_one(text))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return REGISTRY.make(call, shape=shape_of(federation, Files.of(data_dir)))
        except (RuntimeError, OverflowError, MemoryError, TypeError) as error:  # sizes that no memory holds
            raise ModelError(f"{call} can't be built: {error}") from None


def shape_of(federation: Federation, files: Files | None = None) -> Shape:
    targets = federation.y.shape[1:].numel()
    words = federation.vocabulary
    return Shape(
        tuple(federation.x.shape[1:]),
        federation.classes or targets,
        tokens=federation.tokens,
        padded=federation.padded,
        per_position=federation.classes is not None and federation.y.dim() > 1,
        words=words or (),
        files=files,
    )


def load_models() -> None:
    from fedloom import models

    for module in pkgutil.iter_modules(models.__path__):
        importlib.import_module(f"fedloom.models.{module.name}")
