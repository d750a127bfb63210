"""A cohort's LSTMs on a GPU; `models/recurrence.py` says what they are for.

Values lie as [K, T, B, n]: of client k, time by time, sample by sample. Forward, a step in time is one kernel for all
clients: a program makes the products for some samples and units, for the four gates of these units side by side, and
goes over the gates at once. So what inputs and states add to the gates is never written, and of a step there are gates,
cells and states alone, where they belong in the whole. Backward, it is one product, which cuBLAS makes, and one pass
over the gates: there the product is four times as long and little of it need be written, and one kernel for both took
twice as long. Recorded and played again, the steps follow each other at once.

Sums and gates are made in float32, also where values are in bfloat16, and so are the cells, which add up over time.
"""

from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 512  # numbers of each gate that a program takes on the way back
PROCESSORS = 132  # of an H100 or H200


class Tile(NamedTuple):
    """Samples and units that a program takes, how far it goes along a product at once, and how much it loads ahead."""

    samples: int
    units: int
    along: int
    warps: int
    stages: int

    def grid(self, clients: int, samples: int, hidden: int) -> tuple[int, int, int]:
        return triton.cdiv(samples, self.samples), triton.cdiv(hidden, self.units), clients

    @property
    def options(self) -> dict[str, int]:
        return {
            "BM": self.samples, "BN": self.units, "BK": self.along, "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


def tile_for(clients: int, samples: int, hidden: int, dtype: torch.dtype) -> Tile:
    """As measured on an H200: wide tiles read least, small ones leave no processor idle."""
    if dtype == torch.float32:
        return Tile(128, 32, 32, 8, 4)
    wide, small = Tile(128, 64, 64, 8, 4), Tile(64, 32, 64, 4, 4)
    return wide if prod(wide.grid(clients, samples, hidden)) > PROCESSORS else small


def run_forward(
    x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """States, cells and gates of [K, T, B, I], [K, 4H, I], [K, 4H, H] and [K, 4H]. Unless all is kept for gradients,
    there are the last cells alone, and no gates.
    """
    (clients, times, samples, inputs), hidden = x.shape, weight_hh.shape[2]
    given = [values.contiguous() for values in (x, weight_ih, weight_hh, bias)]
    states = x.new_empty((clients, times, samples, hidden))
    cells = x.new_empty((clients, times if keep else 1, samples, hidden), dtype=torch.float32)
    gates = x.new_empty((clients, times, samples, 4 * hidden) if keep else (clients, 0))
    tile = tile_for(clients, samples, hidden, x.dtype)
    options: dict[str, Any] = {**tile.options, "BI": min(tile.along, max(16, triton.next_power_of_2(inputs)))}
    grid = tile.grid(clients, samples, hidden)
    for t in range(times):
        forward[grid](*given, states, cells, gates, t, times, samples, N=inputs, H=hidden, KEEP=keep, **options)
    return states, cells, gates


def run_backward(gradient: Tensor, weight_hh: Tensor, cells: Tensor, gates: Tensor) -> Tensor:
    """The gradient of what went into the gates, from that of the states [K, T, B, H]."""
    clients, times, samples, hidden = cells.shape
    of_gates = torch.empty_like(gates)
    of_state = gates.new_zeros((clients, samples, hidden))  # what a time hands to the one before
    of_cell = torch.zeros_like(of_state, dtype=torch.float32)
    units = min(triton.next_power_of_2(hidden), TILE)
    tile = {"BM": TILE // units, "BN": units}
    grid = (triton.cdiv(samples, tile["BM"]), triton.cdiv(hidden, units), clients)
    for t in reversed(range(times)):
        if t + 1 < times:
            torch.bmm(of_gates[:, t + 1], weight_hh, out=of_state)
        backward[grid](
            gradient, of_state, of_cell, cells, gates, of_gates, *gradient.stride(), t, times, samples, H=hidden, **tile
        )
    return of_gates


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


@triton.jit
def add_product(sums, left, some, right, others, WIDTH: tl.constexpr, BK: tl.constexpr):
    """sums[i, j] plus the product of rows i and j, whose WIDTH numbers begin at left[i] and right[j]; of those that are
    not there (`some`, `others`) nothing is read.
    """
    along = tl.arange(0, BK)
    for begin in range(0, WIDTH, BK):
        rows, columns = left[:, None] + begin + along[None, :], right[None, :] + begin + along[:, None]
        if WIDTH % BK == 0:
            a = tl.load(rows, mask=some[:, None], other=0.0)
            b = tl.load(columns, mask=others[None, :], other=0.0)
        else:
            inside = begin + along < WIDTH
            a = tl.load(rows, mask=some[:, None] & inside[None, :], other=0.0)
            b = tl.load(columns, mask=others[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="tf32")
    return sums


@triton.jit(do_not_specialize=["t"])
def forward(
    x, weight_ih, weight_hh, bias, states, cells, gates, t, times, samples,
    N: tl.constexpr, H: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """One time: states, cells and gates, these after their sigmoids and tanh. Cells are one after the other, or, unless
    KEEP, each in the place of the one before; gates are left out then.
    """
    k = tl.program_id(2).to(tl.int64)
    own, unit = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    row = (k * times + t) * samples  # the first one of this time
    side = tl.arange(0, 4 * BN)  # gate by gate
    of_unit = tl.program_id(1) * BN + side % BN
    wanted = side // BN * H + of_unit
    some, others = own < samples, of_unit < H
    shift = tl.load(bias + k * (4 * H) + wanted, mask=others, other=0.0).to(tl.float32)
    sums = tl.zeros((BM, 4 * BN), tl.float32) + shift[None, :]
    first = weight_ih + k * (4 * H * N)
    sums = add_product(sums, x + row * N + own * N, some, first + wanted * N, others, N, BI)
    if t > 0:
        first, before = weight_hh + k * (4 * H * H), states + (row - samples) * H
        sums = add_product(sums, before + own * H, some, first + wanted * H, others, H, BK)
    i_and_g, f_and_o = tl.split(tl.permute(tl.reshape(sums, (BM, 2, 2, BN)), (0, 3, 1, 2)))
    i, g = tl.split(i_and_g)
    f, o = tl.split(f_and_o)
    there = some[:, None] & (unit < H)[None, :]
    wide, narrow = own[:, None] * (4 * H) + unit[None, :], own[:, None] * H + unit[None, :]
    held = cells + (row if KEEP else k * samples) * H + narrow
    old = tl.load(held - (samples * H if KEEP else 0), mask=there & (t > 0), other=0.0)
    kind = states.dtype.element_ty
    ROUGH: tl.constexpr = kind == tl.bfloat16
    i, f, g, o = sigmoid(i, ROUGH), sigmoid(f, ROUGH), tanh(g, ROUGH), sigmoid(o, ROUGH)
    cell = f * old + i * g
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
