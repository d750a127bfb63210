"""A model between Flower's arrays, which are its whole state dict, and the flat vector with buffers beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from fedloom.errors import ModelError
from fedloom.space import Buffers, Space, buffers_of


@dataclass(frozen=True)
class Layout:
    """Which array of a state dict is which parameter or buffer. Frozen parameters go back as they came; tied ones stand
    under each of their names.
    """

    space: Space
    device: torch.device
    buffers: Buffers  # of the model itself: those that a state dict leaves out stay as they are
    owner: dict[str, str]  # name in the state dict -> of the parameter or buffer

    @classmethod
    def of(cls, model: nn.Module, space: Space) -> "Layout":
        if space.dtype == torch.bfloat16:
            raise ModelError("Flower's arrays know no bfloat16; use a float32 model, with precision='bf16' if you like")
        names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        owner = {name: names[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}
        device = next(iter(model.parameters())).device
        return cls(space, device, buffers_of(model), owner)

    def read(self, record: ArrayRecord) -> tuple[Tensor, Buffers]:
        """A vector [P] and buffers, where the model lives and in its dtypes."""
        if record.keys() != self.owner.keys():
            odd = sorted(record.keys() ^ self.owner.keys())[0]
            where = "is not in the model" if odd in record else "is missing"
            raise ValueError(f"the arrays must be the model's state dict, but {odd!r} {where}")
        given = {self.owner[name]: (name, array) for name, array in record.items()}
        shapes = dict(zip(self.space.names, self.space.shapes, strict=True))
        pieces = [_read(*given[name], shapes[name]).reshape(-1) for name in self.space.names]
        flat = torch.from_numpy(np.concatenate(pieces))
        buffers = {name: self._buffer(name, *given[name]) if name in given else b for name, b in self.buffers.items()}
        return flat.to(self.device, self.space.dtype), buffers

    def _buffer(self, name: str, key: str, array: Array) -> Tensor:
        """Counters that were averaged are no whole numbers any more: the nearest one."""
        own = self.buffers[name]
        values = torch.from_numpy(_read(key, array, own.shape))
        if values.is_floating_point() and not own.is_floating_point():
            values = values.round()
        return values.to(own)

    def write(self, flat: Tensor, buffers: Buffers, received: ArrayRecord) -> ArrayRecord:
        """The state dict of a vector [P] with buffers; what nobody trains comes from what was received."""
        tensors = {**self.space.split(flat.cpu()), **{name: b.cpu() for name, b in buffers.items()}}
        made = {name: Array(tensor.numpy()) for name, tensor in tensors.items()}
        return ArrayRecord({name: made.get(owner, received[name]) for name, owner in self.owner.items()})


def _read(name: str, array: Array, shape: Sequence[int]) -> np.ndarray:
    values = array.numpy()
    if values.shape != tuple(shape):
        raise ValueError(f"the array {name!r} has the shape {values.shape}, but the model's has {tuple(shape)}")
    return values
