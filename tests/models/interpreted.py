"""The kernels of a cohort's LSTMs, played by Triton's interpreter: how far they are from the equations in float64.

A program of its own, since Triton asks for the variable TRITON_INTERPRET when the kernels are read. One line for each
size: the relative errors of the states and of the gradient, and whether the states are the same if nothing else is
kept.
"""

import json
import sys

import numpy as np
import torch
from torch import Tensor

from fedloom.recurrence_kernels import run_backward, run_forward
from tests.models.test_recurrence import as_tensor_code, by_equations


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def main() -> None:
    for clients, times, samples, hidden in json.loads(sys.argv[1]):
        generator = torch.Generator().manual_seed(0)
        shapes = ((clients, times, samples, 4 * hidden), (clients, 4 * hidden, hidden), (clients, 4 * hidden))
        projected, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
        weight = weight.mT / hidden**0.5  # lies as in a model
        gradient = torch.randn((clients, samples, times, hidden), generator=generator).transpose(1, 2)
        states, cells, gates = run_forward(projected, weight, bias, keep=True)
        alone = run_forward(projected, weight, bias, keep=False)[0]
        of_projected = run_backward(gradient, weight, cells, gates)
        leaf = projected.double().requires_grad_()
        exact = torch.stack([as_tensor_code(*own) for own in zip(leaf, weight.double(), bias.double(), strict=True)])
        (wanted,) = torch.autograd.grad(exact, leaf, gradient.double())
        given = (values.double().numpy() for values in (projected, weight, bias))
        by_hand = np.stack([by_equations(*own) for own in zip(*given, strict=True)])
        errors = [apart(states, torch.from_numpy(by_hand)), apart(of_projected, wanted)]
        sys.stdout.write(json.dumps([*errors, torch.equal(alone, states)]) + "\n")


if __name__ == "__main__":
    main()
