"""Tensors on their way between processes: as NumPy arrays, which Ray moves without copying them into a pickle."""

import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

NO_NUMPY = {torch.bfloat16: torch.int16}  # dtypes that travel as the bits of another


class Packed(NamedTuple):
    """A tensor, as it travels."""

    array: np.ndarray
    bits_of: str = ""  # its own dtype, where NumPy does not have it


def pack(value: Any) -> Any:
    """Tensors in dicts, lists and tuples, made fit for the way."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        if plain.dtype in NO_NUMPY:
            return Packed(plain.view(NO_NUMPY[plain.dtype]).numpy(), str(plain.dtype).removeprefix("torch."))
        return Packed(plain.numpy())
    if isinstance(value, dict):
        return {name: pack(one) for name, one in value.items()}
    return [pack(one) for one in value] if isinstance(value, list) else value


def unpack(value: Any, device: torch.device | None = None, own: bool = False) -> Any:
    """The way back. Tensors may share their memory with all processes of a machine: they are not to be written to,
    unless the copy is to be `own`.
    """
    if isinstance(value, Packed):
        _say_it_now()
        tensor = torch.from_numpy(np.array(value.array) if own else value.array)
        tensor = tensor.view(getattr(torch, value.bits_of)) if value.bits_of else tensor
        return tensor if device is None else tensor.to(device)
    if isinstance(value, dict):
        return {name: unpack(one, device, own) for name, one in value.items()}
    return [unpack(one, device, own) for one in value] if isinstance(value, list) else value


@contextmanager
def whole_classes(ray: Any, values: Iterable[Any]) -> Iterator[None]:
    """Send the code of a user's own models, losses and stages along: the workers need not have their modules."""
    kinds = [value if hasattr(value, "__qualname__") else type(value) for value in values]
    modules = {sys.modules.get(kind.__module__) for kind in kinds if kind.__module__ != "__main__"}
    own = [module for module in modules if module is not None and _is_users(module)]
    for module in own:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            ray.cloudpickle.unregister_pickle_by_value(module)


def _is_users(module: ModuleType) -> bool:
    """Neither installed nor part of Python or of this package."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "fedloom":
        return False
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(Path(file).is_relative_to(folder) for folder in folders)


@cache
def _say_it_now() -> None:
    """PyTorch warns once in a process that an array is not to be written to; we do not."""
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


def size_of(value: Any) -> int:
    """Bytes of all arrays in it."""
    if isinstance(value, Packed):
        return int(value.array.nbytes)
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(size_of, value)) if isinstance(value, list) else 0
