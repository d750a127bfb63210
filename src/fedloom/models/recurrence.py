"""The recurrent part of an LSTM, of a whole cohort at once.

Hochreiter, Schmidhuber: Long Short-Term Memory. Neural Computation 1997.

PyTorch's kernel takes one client at a time. Here a step in time is one product for all clients and one pass over their
gates, forward and backward; the gradient of the weights is one product over all times. Written out as tensor code it
would be a dozen passes, and `autograd` would hold all of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fedloom.vmapped import joined


def recurrence(projected: Tensor, weight: Tensor) -> Tensor:
    """The states [T, B, H] of a run that begins at zero. `projected` [T, B, 4H] is what the inputs add to the gates
    (input, forget, cell, output), `weight` [H, 4H] what the state before does.
    """
    kind = projected.device.type
    lowers = torch.is_autocast_enabled(kind)  # some of the operations, and is over in the backward
    if lowers and projected.dtype != torch.float64:
        projected = projected.to(torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):
        weights = weight.to(projected.dtype).unsqueeze(0)
        states: Tensor = Recurrence.apply(projected.unsqueeze(1), weights)[0]  # type: ignore[no-untyped-call]
    return states.squeeze(1)


class Recurrence(torch.autograd.Function):
    """The states of K clients, [T, K, B, 4H] and [K, H, 4H] to [T, K, B, H], and what their gradients need: cells, and
    the gates [T, K, B, 4H] after their sigmoids and tanh.
    """

    @staticmethod
    def forward(projected: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        recurrent = torch.zeros_like(projected[0])
        before = recurrent.chunk(4, dim=-1)[0].contiguous()
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        for at_time in projected.unbind(0):
            if steps:
                state, before, _ = steps[-1]
                recurrent = torch.bmm(state, weight)
            steps.append(_cell(at_time, recurrent, before))
        states, cells, gates = (torch.stack(values) for values in zip(*steps, strict=True))
        return states, cells, gates

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[1], *output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        weight, states, cells, gates = ctx.saved_tensors
        nothing = torch.zeros_like(cells[0])
        of_state, of_cell, found = gradient[-1], nothing, []
        for t in reversed(range(len(gates))):
            of_gates, of_cell = _cell_backward(of_state, of_cell, cells[t - 1] if t else nothing, cells[t], gates[t])
            found.append(of_gates)
            if t:
                of_state = torch.baddbmm(gradient[t - 1], of_gates, weight.mT)
        of_projected = torch.stack(found[::-1])
        earlier, later = (_times_joined(values) for values in (states[:-1], of_projected[1:]))
        return of_projected, torch.bmm(earlier.mT, later)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], projected: Tensor, weight: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        rows = info.batch_size
        found = Recurrence.apply(*joined(rows, in_dims, projected, weight))  # type: ignore[no-untyped-call]
        return tuple(values.reshape(len(values), rows, -1, *values.shape[2:]) for values in found), (1, 1, 1)


def _cell(projected: Tensor, recurrent: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """State, cell and gates [K, B, ...] after one step."""
    if projected.is_cuda:
        flat = (values.flatten(0, 1) for values in (projected, recurrent, before))
        state, cell, gates = torch.ops.aten._thnn_fused_lstm_cell(*flat)
        return state.view_as(before), cell.view_as(before), gates.view_as(projected)
    i, f, g, o = (projected + recurrent).chunk(4, dim=-1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell = f * before + i * g
    return o * cell.tanh(), cell, torch.cat([i, f, g, o], dim=-1)


def _cell_backward(
    of_state: Tensor, of_cell: Tensor, before: Tensor, cell: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of what went into the gates, and of the cell before."""
    if gates.is_cuda:
        flat = [values.flatten(0, 1) for values in (of_state, of_cell, before, cell, gates)]
        of_gates, of_before, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(*flat, False)
        return of_gates.view_as(gates), of_before.view_as(before)
    i, f, g, o = gates.chunk(4, dim=-1)
    bent = cell.tanh()
    of_cell = of_cell + of_state * o * (1 - bent.square())
    parts = [
        of_cell * g * i * (1 - i),
        of_cell * before * f * (1 - f),
        of_cell * i * (1 - g.square()),
        of_state * bent * o * (1 - o),
    ]
    return torch.cat(parts, dim=-1), of_cell * f


def _times_joined(values: Tensor) -> Tensor:
    """[T, K, B, n] to [K, T * B, n]."""
    return values.transpose(0, 1).flatten(1, 2)
