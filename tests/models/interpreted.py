"""The kernels of a cohort's LSTMs, played by Triton's interpreter: how far they are from the equations in float64.

A program of its own, since Triton asks for the variable TRITON_INTERPRET when the kernels are read. One line for each
size: the relative errors of the states and of the gradient of the inputs, and whether the states are the same if
nothing else is kept.
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
    for clients, times, samples, inputs, hidden in json.loads(sys.argv[1]):
        generator = torch.Generator().manual_seed(0)
        own = ((times, samples, inputs), (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,))
        x, weight_ih, weight_hh, bias = (torch.randn((clients, *shape), generator=generator) for shape in own)
        x, weight_hh = x.transpose(1, 2).contiguous().transpose(1, 2), weight_hh / hidden**0.5
        given = (x, weight_ih, weight_hh, bias)
        gradient = torch.randn((clients, samples, times, hidden), generator=generator).transpose(1, 2)
        states, cells, gates = run_forward(*given, True)
        alone = run_forward(*given, False)[0]
        of_gates = run_backward(gradient, weight_hh, cells, gates)
        of_x = torch.bmm(of_gates.flatten(1, 2), weight_ih).view_as(x)
        leaves = [values.double().requires_grad_() for values in given]
        exact = torch.stack([as_tensor_code(*one) for one in zip(*leaves, strict=True)])
        (wanted,) = torch.autograd.grad(exact, leaves[:1], gradient.double())
        by_hand = np.stack([by_equations(*(v.double().numpy() for v in one)) for one in zip(*given, strict=True)])
        errors = [apart(states, torch.from_numpy(by_hand)), apart(of_x, wanted)]
        sys.stdout.write(json.dumps([*errors, torch.equal(alone, states)]) + "\n")


if __name__ == "__main__":
    main()
