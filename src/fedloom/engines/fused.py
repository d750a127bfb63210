"""Convolutions and batch norms of a whole cohort, fused: a norm and a ReLU never write what they make of an image.

In a net such as ResNet-56 arithmetic is cheap and memory is not: most of a step is reading and writing images for
statistics, norms, ReLUs and sums. Here a convolution writes its output and, tile by tile, the statistics of it; the
batch norm behind it becomes three numbers for each channel, and whoever reads the image next applies them, and a ReLU,
on the way. Only the sum at the end of a residual block is written, and what a larger kernel reads: it reads every pixel
several times, and would have to apply the norm each time. Backward, the part of the gradient that comes by the
statistics is added by whoever reads the gradient.

That takes laziness: while `Fused` is entered, such a layer returns a `Pending` image, which becomes a tensor as soon as
anything but a norm, a ReLU, a sum or a convolution 1x1 asks for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.engines.fused_layers import Convolution, Packed, Scale, Sum, Unpacked
from fedloom.engines.kernels import Faster
from fedloom.task import Task

EXACT = (torch.float32,)  # what parameters may be
IN_PLACE = "an image that is not written yet can't be changed in place"
MOST_CHANNELS = {1: 256, 2: 64, 3: 64}  # by the size of a kernel: up to where these were measured, and are faster


def is_fusible(task: Task) -> bool:
    """Is there anything to fuse, and the means to do it? Products are in TF32 or bfloat16. In a net with wider
    convolutions arithmetic counts, which cuDNN is better at.
    """
    modules = list(task.model.modules())
    convolutions = [module for module in modules if isinstance(module, nn.Conv2d) and module.groups == 1]
    narrow = all(
        max(module.in_channels, module.out_channels) <= MOST_CHANNELS.get(max(module.kernel_size), MOST_CHANNELS[3])
        for module in convolutions
    )
    layers = bool(convolutions) and narrow and any(isinstance(module, _BatchNorm) for module in modules)
    return layers and task.space.dtype in EXACT and task.precision != "fp32" and find_spec("triton") is not None


class Norm(NamedTuple):
    """What a batch norm does to a channel: (x - mean) * scale + bias."""

    mean: Tensor
    scale: Tensor
    bias: Tensor


@dataclass(eq=False)
class Pending:
    """An image that is not written yet: relu(norm(image) + beside). Without a norm it is the output of a convolution.
    No name here is one of a tensor's, all of which are to be had.
    """

    image: Tensor
    statistics: Tensor | None = None  # of the image
    scaling: Norm | None = None
    beside: "Tensor | Pending | None" = None
    rectifies: bool = False
    written: Tensor | None = None

    def tensor(self) -> Tensor:
        """As anybody can read it."""
        found = self.packed()
        return Unpacked.apply(found) if found.dtype == torch.bfloat16 else found

    def packed(self) -> Tensor:
        """As the layers of `fused_layers.py` read it."""
        if self.scaling is None:
            return self.image
        if self.written is None:
            other: tuple[Any, ...] = (self.beside, None, None, None)
            if isinstance(self.beside, Pending) and self.beside.scaling is not None:
                other = (self.beside.image, *self.beside.scaling)
            self.written = Sum.apply(self.image, *self.scaling, *other, self.rectifies)
        return self.written

    def read_through(self, other: Tensor) -> None:
        """From now on, this is what its readers get."""
        if self.scaling is None:
            self.image = other
        else:
            self.written = other

    @property
    def is_normed(self) -> bool:
        """And not written yet."""
        return self.scaling is not None and self.written is None

    @property
    def is_normed_only(self) -> bool:
        return self.is_normed and self.beside is None and not self.rectifies

    def rectified(self, inplace: bool = False) -> "Pending":
        if not inplace:
            return self if self.rectifies else replace(self, rectifies=True, written=None)
        self.rectifies = True
        return self

    def plus(self, other: "Tensor | Pending") -> "Pending":
        """Of two images, this one has a norm and nothing else."""
        if isinstance(other, Tensor):
            other = _packed(other, self.image.dtype)
        elif not other.is_normed_only:
            other = other.packed()
        return replace(self, beside=other)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*_written(args), **_written(kwargs or {}))

    def __add__(self, other: Any) -> Any:
        return _sum(self, other)

    __radd__ = __add__

    def __iadd__(self, other: Any) -> "Pending":
        """Under all of its names."""
        found = _sum(replace(self), other)
        if not isinstance(found, Pending):
            raise NotImplementedError(IN_PLACE)
        self.__dict__.update(found.__dict__)
        return self

    def dim(self) -> int:
        return self.image.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.image.shape if dim is None else self.image.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if _changes(name):
            raise NotImplementedError(IN_PLACE)
        if name in ("shape", "ndim", "dtype", "device", "is_cuda"):
            return getattr(self.image, name)
        return getattr(self.tensor(), name)


def _as_a_tensor(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.tensor(), name)(*_written(others))


def _refused(self: Pending, other: Any) -> Any:
    raise NotImplementedError(IN_PLACE)


def _changes(name: str) -> bool:
    """Does an operation change its first argument?"""
    return name.endswith("_") and not name.endswith("__")


for operator in ("mul", "sub", "truediv", "floordiv", "mod", "pow", "matmul"):  # Python asks the class for these
    for side in ("", "r"):
        setattr(Pending, f"__{side}{operator}__", _as_a_tensor(f"__{side}{operator}__"))
    setattr(Pending, f"__i{operator}__", _refused)
for operator in ("neg", "abs", "getitem", "len", "iter", "lt", "le", "gt", "ge", "eq", "ne", "bool", "float", "invert"):
    setattr(Pending, f"__{operator}__", _as_a_tensor(f"__{operator}__"))


class Fused(Faster):
    """While it is entered, layers that can be fused are, and others take their faster forms."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = self._fused(func, args, kwargs or {})
        if found is not None:
            return found
        return super().__torch_function__(func, types, _written(args), _written(kwargs or {}))

    def _fused(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.conv2d:
            return _convolved(*args, **kwargs)
        if func is F.batch_norm:
            return _normalised(*args, **kwargs)
        if not any(isinstance(value, Pending) for value in args):
            return None
        first = args[0]
        if func in (F.relu, torch.relu) and isinstance(first, Pending) and first.is_normed:
            return first.rectified(*args[1:], **kwargs)
        if func in (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__) and len(args) == 2 and not kwargs:
            return _sum(*args)
        if isinstance(first, Pending) and (_changes(getattr(func, "__name__", "")) or kwargs.get("inplace")):
            raise NotImplementedError(IN_PLACE)
        return None


def _sum(a: Any, b: Any) -> Any:
    images = isinstance(a, Tensor | Pending) and isinstance(b, Tensor | Pending)
    if images and a.shape == b.shape and a.dtype == b.dtype:
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Pending) and one.is_normed_only:
                return one.plus(other)
    return torch.add(*_written((a, b)))


def _written(values: Any) -> Any:
    """The same arguments, without anything pending."""
    if isinstance(values, Pending):
        return values.tensor()
    if isinstance(values, dict):
        return {name: _written(value) for name, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_written(value) for value in values)
    return values


def _convolved(
    input: Tensor | Pending,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Pending | None:
    """`F.conv2d` with the norm and ReLU before it; None where these kernels do not know it."""
    steps, size, border = _one(stride), _one(tuple(weight.shape[2:])), _one(padding)
    if bias is not None or groups != 1 or _one(dilation) != 1 or steps is None or border is None or size is None:
        return None
    half = torch.is_autocast_enabled(weight.device.type)
    exact = weight.dtype in EXACT and (half or input.dtype == weight.dtype)
    if size not in MOST_CHANNELS or border >= size or input.dim() != 4 or not exact:
        return None
    settings = (weight, steps, border)
    if not isinstance(input, Pending):
        input = _packed(input, torch.bfloat16 if half else input.dtype)
        return Pending(*Convolution.apply(input, None, None, None, False, False, *settings))
    norm: Any = input.scaling
    if size == 1 and input.is_normed and input.beside is None:
        return Pending(*Convolution.apply(input.image, *norm, input.rectifies, False, *settings))
    # Whoever reads it next reads it through this one, so that its gradient is added up on the way.
    y, statistics, through = Convolution.apply(input.packed(), None, None, None, False, True, *settings)
    input.read_through(through)
    return Pending(y, statistics)


def _packed(image: Tensor, dtype: torch.dtype) -> Tensor:
    packed: Tensor = Packed.apply(image) if dtype == torch.bfloat16 else image
    return packed


def _normalised(
    input: Tensor | Pending,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Pending | None:
    """`F.batch_norm` of what a convolution has left pending."""
    if not isinstance(input, Pending) or input.statistics is None or input.scaling is not None or not training:
        return None
    if weight is None or bias is None or running_mean is None or running_var is None or input.dim() != 4:
        return None
    places = input.image.numel() // input.image.shape[1]
    if places < 2:
        return None
    mean, scale, new_mean, new_var = Scale.apply(
        input.statistics, weight, running_mean, running_var, momentum, eps, places
    )
    running_mean.copy_(new_mean)
    running_var.copy_(new_var)
    return Pending(input.image, scaling=Norm(mean, scale, bias))


def _one(value: Any) -> int | None:
    """A number, or two that are the same."""
    if isinstance(value, int):
        return value
    return value[0] if not isinstance(value, str) and value[0] == value[-1] else None
