"""What is learned: a model as a function of a flat vector, and one loss per sample."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.errors import ConfigError, ModelError, nearest
from fedloom.federation import NO_TARGET, Federation, has_target
from fedloom.local import Local
from fedloom.space import Buffers, Space, buffers_of

Loss = Callable[[Tensor, Tensor], Tensor]
Precision = Literal["auto", "fp32", "bf16"]


def set_precision(precision: Precision) -> None:
    """On a GPU products and convolutions are in TF32 unless fp32 was asked for."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


@contextmanager
def computed_in(precision: Precision) -> Iterator[None]:
    """`set_precision`, put back afterwards."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per sample; positions of a sequence are averaged, those without a target left out."""
    losses = F.cross_entropy(outputs, targets.long(), reduction="none", ignore_index=NO_TARGET)
    if losses.dim() == 1:
        return losses
    counted = has_target(targets).flatten(1).sum(1).clamp(min=1)
    return losses.flatten(1).sum(1) / counted


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    """Crammer and Singer's: by how much the best wrong class comes closer than 1 to the right one."""
    right = targets.long().unsqueeze(1)
    wrong = outputs.scatter(1, right, float("-inf")).amax(1)
    return (1 + wrong - outputs.gather(1, right).squeeze(1)).clamp(min=0)


LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "hinge": hinge}


def find_loss(loss: str | Loss | None, model: nn.Module) -> Loss:
    """A loss by name or as it is; None is the one that the model brings (svm: hinge), else cross-entropy."""
    if callable(loss):
        return loss
    name = getattr(model, "fedloom_loss", "cross-entropy") if loss is None else loss
    if name not in LOSSES:
        raise ConfigError(f"unknown loss {name!r}: {nearest(str(name), LOSSES)}")
    return LOSSES[name]


@dataclass(frozen=True)
class Task:
    """A model, its space and its loss, on one device. The module itself stays as it is: parameters come as vectors."""

    model: nn.Module
    space: Space
    loss: Loss
    precision: Precision = "auto"
    channels_last: bool = False

    @classmethod
    def of(cls, model: nn.Module, loss: str | Loss | None, device: torch.device, precision: Precision) -> "Task":
        if not isinstance(model, nn.Module):
            raise ModelError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
        if precision not in ("auto", "fp32", "bf16"):
            raise ConfigError(f"unknown precision {precision!r}: {nearest(str(precision), ('auto', 'fp32', 'bf16'))}")
        own = copy.deepcopy(model).to(device)
        return cls(own, Space.of(own), find_loss(loss, model), precision)

    def outputs(self, flat: Tensor, buffers: Buffers, x: Tensor) -> Tensor:
        """The model's outputs under these parameters [P]; batch-norm statistics in `buffers` are updated in place."""
        state = {**self.space.split(flat), **buffers}
        kept = [(place, key, place[key]) for name in state for place, key in self._places[name]]
        try:
            for name, value in state.items():
                for place, key in self._places[name]:
                    place[key] = value
            with self._autocast(flat.device):
                outputs: Tensor = self.model(x)
            for name in buffers:  # a module may have replaced a buffer instead of writing into it
                place, key = self._places[name][0]
                buffers[name] = place[key]
        finally:
            for place, key, value in kept:
                place[key] = value
        return outputs.to(flat.dtype) if outputs.is_floating_point() else outputs

    @cached_property
    def _places(self) -> dict[str, list[tuple[dict[str, Any], str]]]:
        """Where the modules keep each tensor, tied ones in several places. Found once: `torch.func.functional_call`
        looks for them in every step, which takes longer than a small step itself.
        """
        names: dict[int, str] = {}
        places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for kept in (module._parameters, module._buffers):
                for key, tensor in kept.items():
                    if tensor is not None:
                        name = names.setdefault(id(tensor), f"{path}.{key}" if path else key)
                        places.setdefault(name, []).append((kept, key))
        return places

    def laid_out(self, x: Tensor) -> Tensor:
        """Images in the order in memory that convolutions and poolings on a CPU are fastest in: channels last."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def losses(self, flat: Tensor, buffers: Buffers, x: Tensor, y: Tensor) -> Tensor:
        """One loss per sample [B]."""
        return self.loss(self.outputs(flat, buffers, x), y)

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """For training alone: what a model has learned is measured in full."""
        lowers = self.precision == "bf16" and (self.model.training or torch.is_grad_enabled())
        return torch.autocast(device.type, torch.bfloat16) if lowers else nullcontext()


def check_fit(task: Task, federation: Federation, local: Local) -> None:
    """Refuse at the door what would fail, or mean nothing, in the middle of a run."""
    sizes = federation.sizes
    if local.batch_size is not None and local.last_batch == "drop" and int(sizes.min()) < local.batch_size:
        client = int(sizes.argmin())
        raise ModelError(
            f"client {client} has {int(sizes[client])} samples, fewer than batch_size={local.batch_size}, and would "
            "never train with last_batch='drop'; choose last_batch='keep' or 'bootstrap'"
        )
    task.model.train()
    flat = task.space.flatten(task.model)
    x, y = federation.batch(torch.arange(min(2, len(federation.x)), device=flat.device), flat.dtype)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=_devices(flat.device)):
            outputs = task.outputs(flat, buffers_of(task.model), x)
    except Exception as error:
        shape = tuple(x.shape[1:])
        raise ModelError(f"the model can't read samples of shape {shape} and dtype {x.dtype}: {error}") from error
    if task.loss in LOSSES.values():
        _check_labels(federation, outputs, next(name for name, known in LOSSES.items() if known is task.loss))
    try:
        losses = task.loss(outputs, y)
    except Exception as error:
        raise ModelError(
            f"the loss can't compare outputs of shape {tuple(outputs.shape)} with targets of shape {tuple(y.shape)} "
            f"and dtype {y.dtype}: {error}"
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != (len(x),):
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ModelError(
            f"the loss must return one value per sample, shape ({len(x)},) for {len(x)} samples, not {found}; "
            "leave the mean out (reduction='none')"
        )
    _check_single_samples(task, federation, local)


def takes_channels_last(task: Task, federation: Federation) -> bool:
    """Does a convolutional model on a CPU train on images that lie channels last? One that calls `view` may not."""
    flat = task.space.flatten(task.model)
    if flat.device.type != "cpu" or not any(isinstance(module, nn.Conv2d) for module in task.model.modules()):
        return False
    task.model.train()
    x, y = federation.batch(torch.arange(min(2, len(federation.x))), flat.dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            leaf = flat.requires_grad_()
            other = replace(task, channels_last=True)
            losses = other.losses(leaf, buffers_of(task.model), other.laid_out(x), y)
            torch.autograd.grad(losses.sum(), leaf)
    except Exception:  # a model may fail anywhere
        return False
    return True


def _devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _check_labels(federation: Federation, outputs: Tensor, loss: str) -> None:
    if federation.classes is None:
        raise ModelError(f"{loss} needs class labels, whole numbers from 0 (of an integer type); pass loss= for others")
    columns = outputs.shape[1] if outputs.dim() > 1 else 1
    if federation.classes > columns:
        raise ModelError(f"the data have {federation.classes} classes, but the model has {columns} outputs")


def _check_single_samples(task: Task, federation: Federation, local: Local) -> None:
    """Batch norm has no statistics over one value per channel."""
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in task.model.modules()):
        return
    alone = next((k for k, n in enumerate(federation.sizes.tolist()) if 1 in local.batch_lengths(n)), None)
    if alone is None:
        return
    flat = task.space.flatten(task.model)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=_devices(flat.device)):
            one = federation.batch(torch.zeros(1, dtype=torch.int64, device=flat.device), flat.dtype)[0]
            task.outputs(flat, buffers_of(task.model), one)
    except ValueError:
        raise ModelError(
            f"client {alone} has {int(federation.sizes[alone])} samples and so a batch of one, which batch norm can't "
            "train on; choose last_batch='drop' or 'bootstrap', or another batch_size"
        ) from None
