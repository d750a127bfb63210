"""A layer of LSTM, of a whole cohort at once.

Hochreiter, Schmidhuber: Long Short-Term Memory. Neural Computation 1997.

PyTorch's kernel takes one client at a time. Here all clients go through time together, forward and backward: a step in
time is one product for all of them and one pass over their gates. The gradients of inputs and weights are one product
each, over all times. On a GPU a step in time is a kernel or two (`recurrence_kernels.py`).

Values lie as [K, T, B, n], client by client and time by time: so `vmap` holds them, and a product over all times reads
them as they are.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def recurrence(x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor) -> Tensor:
    """The states [T, B, H] of a run over the inputs [T, B, I] that begins at zero. Weights [4H, I] and [4H, H] and the
    bias [4H] hold the gates in the order input, forget, cell, output.
    """
    kind = x.device.type
    lowers = torch.is_autocast_enabled(kind)  # some of the operations, and is over in the backward
    if lowers and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):
        own = (values.unsqueeze(0) for values in (x, weight_ih.to(x.dtype), weight_hh.to(x.dtype), bias))
        states: Tensor = Recurrence.apply(*own, torch.is_grad_enabled())[0]  # type: ignore[no-untyped-call]
    return states.squeeze(0)


class Recurrence(torch.autograd.Function):
    """The states of K clients, from [K, T, B, I], [K, 4H, I], [K, 4H, H] and [K, 4H] to [K, T, B, H], and what their
    gradients need: cells, and the gates [K, T, B, 4H] after their sigmoids and tanh. Where no gradient follows, a GPU
    need not `keep` them.
    """

    @staticmethod
    def forward(
        x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _has_kernels(x):
            return _run(x, weight_ih, weight_hh, bias)
        from fedloom.recurrence_kernels import run_forward

        return run_forward(x, weight_ih, weight_hh, bias, keep)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # zeros for cells and gates would fill more memory than all else
        ctx.save_for_backward(*inputs[:4], *output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if gradient is None:  # nobody used the states
            return None, None, None, None, None
        x, weight_ih, weight_hh, bias, states, cells, gates = ctx.saved_tensors
        if _has_kernels(gates):
            from fedloom.recurrence_kernels import run_backward

            of_gates = run_backward(gradient, weight_hh, cells, gates)
        else:
            of_gates = _run_backward(gradient, weight_hh, cells, gates)
        all_times, later = of_gates.flatten(1, 2), of_gates[:, 1:].flatten(1, 2)
        return (
            torch.bmm(all_times, weight_ih).view_as(x) if ctx.needs_input_grad[0] else None,
            torch.bmm(all_times.mT, x.flatten(1, 2)),
            torch.bmm(later.mT, states[:, :-1].flatten(1, 2)),
            of_gates.sum((1, 2), dtype=bias.dtype),
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        rows, (*given, keep) = info.batch_size, values
        held = (
            own.expand(rows, *own.shape) if at is None else own.movedim(at, 0)
            for own, at in zip(given, in_dims[:4], strict=True)
        )
        found = Recurrence.apply(*(own.flatten(0, 1) for own in held), keep)  # type: ignore[no-untyped-call]
        return tuple(own.unflatten(0, (rows, -1)) for own in found), (0, 0, 0)


def _has_kernels(values: Tensor) -> bool:
    """On an NVIDIA GPU, where products may be rounded. Who traces a step to compile it sees nothing but tensor code."""
    rounded = torch.get_float32_matmul_precision() != "highest"
    fits = values.dtype == torch.bfloat16 or (values.dtype == torch.float32 and rounded)
    fits = fits and values.is_cuda and torch.version.hip is None
    return fits and get_proxy_mode() is None and find_spec("triton") is not None


def _run(x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States, cells and gates."""
    projected = torch.bmm(x.flatten(1, 2), weight_ih.mT).view(*x.shape[:3], -1)
    times = (projected + bias[:, None, None]).to(projected.dtype).unbind(1)
    recurrent = torch.zeros_like(times[0])
    before = recurrent.chunk(4, dim=-1)[0].contiguous()
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    for at_time in times:
        if steps:
            state, before, _ = steps[-1]
            recurrent = torch.bmm(state, weight_hh.mT)
        steps.append(_cell(at_time, recurrent, before))
    states, cells, gates = (torch.stack(values, dim=1) for values in zip(*steps, strict=True))
    return states, cells, gates


def _run_backward(gradient: Tensor, weight_hh: Tensor, cells: Tensor, gates: Tensor) -> Tensor:
    """The gradient of what went into the gates."""
    nothing = torch.zeros_like(cells[:, 0])
    of_state, of_cell, found = gradient[:, -1], nothing, []
    for t in reversed(range(gates.shape[1])):
        before = cells[:, t - 1] if t else nothing
        of_gates, of_cell = _cell_backward(of_state, of_cell, before, cells[:, t], gates[:, t])
        found.append(of_gates)
        if t:
            of_state = torch.baddbmm(gradient[:, t - 1], of_gates, weight_hh)
    return torch.stack(found[::-1], dim=1)


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
