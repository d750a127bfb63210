"""The recurrent part of a cohort's LSTMs on a GPU; `models/recurrence.py` says what it is for.

Values lie as [K, T, B, n]: of client k, time by time, sample by sample. A step in time is one product for all clients,
which cuBLAS makes, and one pass over their gates, which is a kernel in Triton: it reads what the inputs and the state
before add to the gates, and writes gates, cells and states where they belong in the whole, so that nothing is copied.
Recorded and played again, the steps in time follow each other at once.

Gates are made in float32, also where values are in bfloat16, and so are the cells, which add up over time.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 512  # numbers of each gate that a program takes


def run_forward(projected: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """States, cells and gates of [K, T, B, 4H], [K, H, 4H] and [K, 4H]. Unless all is kept for gradients, there are the
    last cells alone, and no gates.
    """
    clients, times, samples, width = projected.shape
    hidden = width // 4
    projected, bias = projected.contiguous(), bias.contiguous()
    states = projected.new_empty((clients, times, samples, hidden))
    cells = states.new_empty((clients, times if keep else 1, samples, hidden), dtype=torch.float32)
    gates = torch.empty_like(projected) if keep else projected.new_empty((clients, 0))
    recurrent = projected.new_zeros((clients, samples, width))  # what the state before the first adds
    run = _over(forward, clients, samples, hidden)
    for t in range(times):
        if t:
            torch.bmm(states[:, t - 1], weight, out=recurrent)
        run(projected, recurrent, bias, states, cells, gates, t, times, samples, KEEP=keep)
    return states, cells, gates


def run_backward(gradient: Tensor, weight: Tensor, cells: Tensor, gates: Tensor) -> Tensor:
    """The gradient of what went into the gates, from that of the states [K, T, B, H]."""
    clients, times, samples, hidden = cells.shape
    of_gates = torch.empty_like(gates)
    of_state = gates.new_zeros((clients, samples, hidden))  # what a time hands to the one before
    of_cell = torch.zeros_like(of_state, dtype=torch.float32)
    run = _over(backward, clients, samples, hidden)
    for t in reversed(range(times)):
        if t + 1 < times:
            torch.bmm(of_gates[:, t + 1], weight.mT, out=of_state)
        run(gradient, of_state, of_cell, cells, gates, of_gates, *gradient.stride(), t, times, samples)
    return of_gates


def _over(kernel: Any, clients: int, samples: int, hidden: int) -> Callable[..., Any]:
    """A kernel over tiles of samples and units of each client."""
    units = min(triton.next_power_of_2(hidden), TILE)
    rows = TILE // units
    grid = (triton.cdiv(samples, rows), triton.cdiv(hidden, units), clients)

    def run(*values: Any, **options: bool) -> None:
        kernel[grid](*values, H=hidden, BM=rows, BN=units, **options)

    return run


@triton.jit
def tanh(x, ROUGH: tl.constexpr):
    if ROUGH:  # to eleven bits, by one instruction
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def sigmoid(x, ROUGH: tl.constexpr):
    if ROUGH:
        return 0.5 + 0.5 * tanh(0.5 * x, ROUGH)
    else:
        return tl.sigmoid(x)


@triton.jit(do_not_specialize=["t"])
def forward(
    projected, recurrent, bias, states, cells, gates, t, times, samples,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """One time: states, cells and gates, these after their sigmoids and tanh. Cells are one after the other, or, unless
    KEEP, each in the place of the one before; gates are left out then.
    """
    k = tl.program_id(2).to(tl.int64)
    own = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    units = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    there = (own < samples) & (units < H)
    row = (k * times + t) * samples  # the first one of this time
    wide, narrow = own * (4 * H) + units, own * H + units
    given = projected + row * (4 * H) + wide
    added = recurrent + k * samples * (4 * H) + wide
    shift = bias + k * (4 * H) + own * 0 + units  # as wide as the tile, so that it is laid out like the rest
    i = tl.load(given, mask=there, other=0.0).to(tl.float32) + tl.load(added, mask=there, other=0.0).to(tl.float32)
    f = tl.load(given + H, mask=there, other=0.0).to(tl.float32)
    f += tl.load(added + H, mask=there, other=0.0).to(tl.float32)
    g = tl.load(given + 2 * H, mask=there, other=0.0).to(tl.float32)
    g += tl.load(added + 2 * H, mask=there, other=0.0).to(tl.float32)
    o = tl.load(given + 3 * H, mask=there, other=0.0).to(tl.float32)
    o += tl.load(added + 3 * H, mask=there, other=0.0).to(tl.float32)
    held = cells + (row if KEEP else k * samples) * H + narrow
    before = tl.load(held - (samples * H if KEEP else 0), mask=there & (t > 0), other=0.0)
    kind = gates.dtype.element_ty
    ROUGH: tl.constexpr = kind == tl.bfloat16
    i = sigmoid(i + tl.load(shift, mask=there, other=0.0).to(tl.float32), ROUGH)
    f = sigmoid(f + tl.load(shift + H, mask=there, other=0.0).to(tl.float32), ROUGH)
    g = tanh(g + tl.load(shift + 2 * H, mask=there, other=0.0).to(tl.float32), ROUGH)
    o = sigmoid(o + tl.load(shift + 3 * H, mask=there, other=0.0).to(tl.float32), ROUGH)
    cell = f * before + i * g
    if KEEP:
        found = gates + row * (4 * H) + wide
        tl.store(found, i.to(kind), mask=there)
        tl.store(found + H, f.to(kind), mask=there)
        tl.store(found + 2 * H, g.to(kind), mask=there)
        tl.store(found + 3 * H, o.to(kind), mask=there)
    tl.store(held, cell, mask=there)
    tl.store(states + row * H + narrow, (o * tanh(cell, ROUGH)).to(kind), mask=there)


@triton.jit(do_not_specialize=["t"])
def backward(
    gradient, of_state, of_cell, cells, gates, of_gates, by_client, by_time, by_sample, by_unit, t, times, samples,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One time: gradients of what went into the gates. The gradient of the states comes with its strides; `of_state`
    and `of_cell` [K, B, H] are what the time after hands to this one, and `of_cell` becomes what this one hands on.
    """
    k = tl.program_id(2).to(tl.int64)
    own = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    units = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    there = (own < samples) & (units < H)
    row = (k * times + t) * samples
    wide, narrow = own * (4 * H) + units, own * H + units
    given = gradient + k * by_client + t.to(tl.int64) * by_time + own.to(tl.int64) * by_sample + units * by_unit
    later, ahead = of_state + k * samples * H + narrow, of_cell + k * samples * H + narrow
    found, wanted = gates + row * (4 * H) + wide, of_gates + row * (4 * H) + wide
    of_h = tl.load(given, mask=there, other=0.0).to(tl.float32) + tl.load(later, mask=there, other=0.0).to(tl.float32)
    of_c = tl.load(ahead, mask=there, other=0.0)
    kind = of_gates.dtype.element_ty
    bent = tanh(tl.load(cells + row * H + narrow, mask=there, other=0.0), kind == tl.bfloat16)
    before = tl.load(cells + (row - samples) * H + narrow, mask=there & (t > 0), other=0.0)
    i = tl.load(found, mask=there, other=0.0).to(tl.float32)
    f = tl.load(found + H, mask=there, other=0.0).to(tl.float32)
    g = tl.load(found + 2 * H, mask=there, other=0.0).to(tl.float32)
    o = tl.load(found + 3 * H, mask=there, other=0.0).to(tl.float32)
    of_c += of_h * o * (1.0 - bent * bent)
    tl.store(wanted, (of_c * g * i * (1.0 - i)).to(kind), mask=there)
    tl.store(wanted + H, (of_c * before * f * (1.0 - f)).to(kind), mask=there)
    tl.store(wanted + 2 * H, (of_c * i * (1.0 - g * g)).to(kind), mask=there)
    tl.store(wanted + 3 * H, (of_h * bent * o * (1.0 - o)).to(kind), mask=there)
    tl.store(ahead, of_c * f, mask=there)
