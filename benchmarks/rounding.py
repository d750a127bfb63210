"""What rounding does to a gradient of ResNet-56 on CIFAR-10, on a CPU, by what is rounded:

    python benchmarks/rounding.py DATA [steps ...]

DATA is a folder with cifar10.npz. Images are rounded where they are stored (after convolutions and at the ends of
blocks) and where they are multiplied; gradients likewise. Printed is how far the gradient of one batch is from that in
float64, in parts of its norm, at the start and after so many steps of plain training (20 60 160).
"""

import copy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import grad

from fedloom.models.catalogue import Shape
from fedloom.models.resnet import Residual, resnet56

BATCH = 64


class Kinds(NamedTuple):
    """Of numbers: multiplied forward and backward, stored forward and backward."""

    multiplied: str = ""
    multiplied_back: str = ""
    stored: str = ""
    stored_back: str = ""


FORMS = {
    "float32": Kinds(),
    "TF32 products": Kinds("tf32", "tf32"),
    "images float16, gradients bfloat16": Kinds("float16", "bfloat16", "float16", "bfloat16"),
    "the same, gradients stored in float32": Kinds("float16", "float16", "float16"),
    "bfloat16 throughout": Kinds("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
}


def rounded(x: Tensor, kind: str) -> Tensor:
    if kind == "tf32":
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return x.to(getattr(torch, kind)).to(x.dtype) if kind else x


class Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kinds: Kinds) -> Tensor:
        ctx.kinds = kinds
        return rounded(x, kinds.stored)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return rounded(g, ctx.kinds.stored_back), None


class Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int, kinds: Kinds) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = stride, padding, kinds.multiplied_back
        return F.conv2d(rounded(x, kinds.multiplied), rounded(weight, kinds.multiplied), None, stride, padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, kind = ctx.settings
        g = rounded(g, kind)
        of_x = grad.conv2d_input(x.shape, rounded(weight, kind), g, stride, padding)
        of_weight = grad.conv2d_weight(rounded(x, kind), weight.shape, g, stride, padding)
        return of_x, of_weight, None, None, None


class Convolution(nn.Module):
    def __init__(self, like: nn.Conv2d, kinds: Kinds) -> None:
        super().__init__()
        self.weight, self.kinds = like.weight, kinds
        self.settings = like.stride[0], int(like.padding[0])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Stored.apply(Multiplied.apply(x, self.weight, *self.settings, self.kinds), self.kinds)
        return found


def rounding(net: nn.Module, kinds: Kinds) -> nn.Module:
    """The same net, whose numbers are rounded."""
    net = copy.deepcopy(net)
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                setattr(module, name, Convolution(child, kinds))
        if isinstance(module, Residual):
            module.register_forward_hook(lambda _, inputs, out: Stored.apply(out, kinds))
    return net


def gradient(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    (F.cross_entropy(net.train()(x.to(next(net.parameters()).dtype)), y)).backward()
    return torch.cat([p.grad.double().flatten() for p in net.parameters() if p.grad is not None])


def report(net: nn.Module, x: Tensor, y: Tensor, when: str) -> None:
    right = gradient(copy.deepcopy(net).double(), x, y)
    for form, kinds in FORMS.items():
        off = float((gradient(rounding(net, kinds), x, y) - right).norm() / right.norm())
        print(f"{when:>16}  {off:6.3f}  {form}", flush=True)  # noqa: T201


def main(folder: str, *asked: str) -> None:
    with np.load(Path(folder) / "cifar10.npz") as data:
        x = torch.from_numpy(data["train_x"][:20000]).permute(0, 3, 1, 2).float() / 255
        y = torch.from_numpy(data["train_y"][:20000]).long()
    x = (x - 0.47) / 0.25
    torch.manual_seed(0)
    net = resnet56(shape=Shape((3, 32, 32), 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    report(net, x[:BATCH], y[:BATCH], "at the start")
    steps = [int(step) for step in asked] or [20, 60, 160]
    for step in range(1, max(steps) + 1):
        chosen = torch.randint(0, len(x), (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(net.train()(x[chosen]), y[chosen]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if step in steps:
            report(net, x[:BATCH], y[:BATCH], f"after {step} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
