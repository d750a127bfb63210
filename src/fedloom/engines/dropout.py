"""Dropout whose masks are a hash of (client's key, step, layer, place): every engine draws the same ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedloom.keys import hashed

FIRST_DRAW = 1 << 16  # augmentation uses smaller numbers
PLACES = {F.dropout: None, F.dropout1d: 2, F.dropout2d: 2, F.dropout3d: 2}  # axes that have a mask of their own


class KeyedDropout(TorchFunctionMode):
    """While it is entered, `F.dropout` and its relatives draw from a key [2] and a step."""

    def __init__(self, key: Tensor, step: int | Tensor) -> None:
        super().__init__()
        self.key, self.step, self.layer = key, step, FIRST_DRAW

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in PLACES:
            return func(*args, **(kwargs or {}))
        return self._dropped(PLACES[func], *args, **(kwargs or {}))

    def _dropped(
        self, axes: int | None, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        self.layer += 1
        if not training or p == 0:
            return x
        shape = x.shape if axes is None else (*x.shape[:axes], *(1 for _ in x.shape[axes:]))
        kept = hashed(self.key, self.step, self.layer, shape) >= p
        return x * kept.to(x.dtype) / (1 - p) if p < 1 else x * 0


@contextmanager
def keyed(model: nn.Module, key: Tensor | None, step: int | Tensor) -> Iterator[None]:
    """Dropout by key, where the model has any."""
    if key is None or not has_dropout(model):
        yield
        return
    with KeyedDropout(key, step):
        yield


def has_dropout(model: nn.Module) -> bool:
    """A layer that the mode above takes care of."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    return any(isinstance(module, kinds) and module.p > 0 for module in model.modules())
