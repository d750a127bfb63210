"""A model as one flat vector of P numbers, and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from fedloom.errors import ModelError

Buffers = dict[str, Tensor]
GroupBy = Literal["tensor", "layer", "model"]


@dataclass(frozen=True)
class Groups:
    """A division of the P numbers: by tensor, by layer, or all together."""

    sizes: tuple[int, ...]  # of each tensor
    owner: tuple[int, ...]  # group of each tensor

    def __len__(self) -> int:
        return 1 + max(self.owner)

    def sums(self, values: Tensor) -> Tensor:
        """[..., P] -> [..., groups]: the sum over each group, in float64."""
        by_tensor = [piece.sum(-1, dtype=torch.float64) for piece in torch.split(values, list(self.sizes), -1)]
        total = values.new_zeros((*values.shape[:-1], len(self)), dtype=torch.float64)
        return total.index_add_(-1, _on(self.owner, values.device), torch.stack(by_tensor, -1))

    def spread(self, values: Tensor) -> Tensor:
        """[..., groups] -> [..., P]: each group's value at all of its places."""
        if len(self) == 1:
            return values.expand(*values.shape[:-1], sum(self.sizes))
        chosen = values.index_select(-1, _on(self.owner, values.device))
        return chosen.repeat_interleave(_on(self.sizes, values.device), -1, output_size=sum(self.sizes))


@cache
def _on(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


@dataclass(frozen=True)
class Space:
    """The trainable parameters of a model, in the order of `named_parameters`; tied ones count once, frozen ones not.

    >>> space = Space.of(nn.Linear(3, 2))
    >>> space.size, space.names
    (8, ('weight', 'bias'))
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: nn.Module) -> "Space":
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ModelError(f"{type(model).__name__} has no trainable parameter, so there is nothing to train")
        dtypes = {p.dtype for p in trainable.values()}
        if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
            found = ", ".join(sorted(str(d) for d in dtypes))
            raise ModelError(f"the trainable parameters must share one floating-point dtype, not {found}")
        return cls(tuple(trainable), tuple(p.shape for p in trainable.values()), dtypes.pop())

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many numbers each tensor has."""
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """P, the length of the flat vector."""
        return sum(self.sizes)

    def groups(self, by: GroupBy) -> Groups:
        """Tensors on their own, those of one module together, or all together."""
        return _groups(self.names, self.sizes, by)

    def flatten(self, model: nn.Module) -> Tensor:
        """A copy of the model's trainable parameters as one vector [P]."""
        parameters = dict(model.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self.names])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector [P] by name. One `split` for all: slicing one by one makes the backward pass quadratic."""
        pieces = torch.split(flat, list(self.sizes))
        return {name: p.view(shape) for name, p, shape in zip(self.names, pieces, self.shapes, strict=True)}

    def load(self, model: nn.Module, flat: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Write a vector [P] and buffers into a model, in place."""
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, value in {**self.split(flat), **buffers}.items():
                own[name].copy_(value)


@cache
def _groups(names: tuple[str, ...], sizes: tuple[int, ...], by: GroupBy) -> Groups:
    cut = {"tensor": names, "layer": [name.rpartition(".")[0] for name in names], "model": [""] * len(names)}
    owners = cut[by]
    place = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    return Groups(sizes, tuple(place[owner] for owner in owners))


def buffers_of(model: nn.Module) -> Buffers:
    """Copies of the model's buffers (batch-norm statistics and the like), which travel beside the vector."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def average_buffers(stacked: Mapping[str, Tensor], weights: Tensor) -> Buffers:
    """Float buffers: the weighted mean over clients; counters: the largest. `stacked` holds [K, ...] tensors."""
    share = weights.double() / weights.double().sum()
    averaged: Buffers = {}
    for name, values in stacked.items():
        if values.is_floating_point() or values.is_complex():
            mean = torch.tensordot(share.to(values.dtype), values, dims=1)
            averaged[name] = torch.where((values == values[0]).all(0), values[0], mean)  # constants stay exact
        else:
            averaged[name] = values.amax(0)
    return averaged
