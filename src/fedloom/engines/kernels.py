"""Layers of a whole cohort in faster forms than those that `vmap` makes of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fedloom.engines.convolution import convolved
from fedloom.engines.normalization import normalised

FASTER: dict[Any, Callable[..., Tensor]] = {F.conv2d: convolved, F.batch_norm: normalised}


class Faster(TorchFunctionMode):
    """While it is entered, functions that have a faster form are called in that form."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        used: Callable[..., Any] = FASTER.get(func, func)
        return used(*args, **(kwargs or {}))


@contextmanager
def faster(model: nn.Module, fused: bool = False) -> Iterator[None]:
    """Faster forms, where the model has a layer that knows one; `fused` over several layers."""
    if fused:
        from fedloom.engines.fused import Fused

        with Fused():
            yield
        return
    if not any(isinstance(module, (nn.Conv2d, _BatchNorm)) for module in model.modules()):
        yield
        return
    with Faster():
        yield
