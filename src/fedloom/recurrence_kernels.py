"""Kernels for the recurrent part of a cohort's LSTMs, in Triton; `models/recurrence.py` says what they are for.

Values lie as [K, T, B, n]: of client k, time by time, sample by sample. A program takes one client and a tile of its
samples through all times, since what a sample becomes depends on no other. At each time it goes over its tiles of
hidden units, and what it has written at one time it reads again at the next, after a barrier. Weights are laid out so
that what is added up lies side by side, as products in TF32 want it.

Sums are in float32, also where values are in bfloat16, and so are the cells, which add up over time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST = 16  # rows and columns of a product
SAMPLES = 64  # that a program takes: weights are read once for all of them
REGISTERS = 128  # of a thread, so that two programs of eight warps share a processor


def run_forward(projected: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States, cells and gates of [K, T, B, 4H], [K, H, 4H] and [K, 4H]."""
    clients, times, samples, width = projected.shape
    hidden = width // 4
    projected = projected.contiguous()
    gates = torch.empty_like(projected)
    states = projected.new_empty((clients, times, samples, hidden))
    cells = torch.empty_like(states, dtype=torch.float32)
    grid, sizes = _tiles(clients, samples, hidden, units=64, read=64 // projected.itemsize)
    forward[grid](
        projected, weight.mT.contiguous(), bias.contiguous(), states, cells, gates, times, samples, H=hidden, **sizes,
        maxnreg=REGISTERS,
    )  # fmt: skip
    return states, cells, gates


def run_backward(gradient: Tensor, weight: Tensor, cells: Tensor, gates: Tensor) -> Tensor:
    """The gradient of what went into the gates, from that of the states [K, T, B, H]."""
    clients, times, samples, hidden = cells.shape
    of_gates = torch.empty_like(gates)
    of_states, of_cells = cells.new_empty((2, clients, samples, hidden)).unbind()
    grid, sizes = _tiles(clients, samples, hidden, units=256, read=128 // gates.itemsize)
    backward[grid](
        gradient, weight.contiguous(), cells, gates, of_gates, of_states, of_cells, *gradient.stride(), times, samples,
        H=hidden, BP=min(32, sizes["BN"]), **sizes,
    )  # fmt: skip
    return of_gates


def _tiles(clients: int, samples: int, hidden: int, units: int, read: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Programs, and what each takes at once: of its samples, of its at most `units` units and of a sum over what is
    read. With 256 units and samples of 72 clients on an H200 these were the fastest of eight.
    """
    rows = min(SAMPLES, max(LEAST, triton.next_power_of_2(samples)))
    across = max(LEAST, triton.next_power_of_2(hidden))
    sizes = {"BM": rows, "BN": min(units, across), "BK": max(LEAST, min(read, across))}
    return (triton.cdiv(samples, rows), clients), {**sizes, "num_warps": 8 if rows == SAMPLES else 4, "num_stages": 3}


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def forward(
    projected, weight, bias, states, cells, gates, times, samples,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """States, cells and gates, these after their sigmoids and tanh. The weight is [K, 4H, H]."""
    k = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * BM + tl.arange(0, BM)
    there = (own < samples)[:, None]
    weights = weight + k * (4 * H * H)
    biases = bias + k * (4 * H)
    for t in range(times):
        row = (k * times + t) * samples  # the first one of this time
        earlier = states + (row - samples) * H
        reach = tl.minimum(t, 1) * H  # the state before the first is zero
        for first in range(0, H, BN):
            units = first + tl.arange(0, BN)
            known = (units < H)[None, :]
            i = tl.zeros((BM, BN), tl.float32)
            f = tl.zeros((BM, BN), tl.float32)
            g = tl.zeros((BM, BN), tl.float32)
            o = tl.zeros((BM, BN), tl.float32)
            for start in range(0, reach, BK):
                read = start + tl.arange(0, BK)
                at = units[None, :] * H + read[:, None]
                here = there if H % BK == 0 else there & (read < H)[None, :]
                by = known if H % BK == 0 else known & (read < H)[:, None]
                state = tl.load(earlier + own[:, None] * H + read[None, :], mask=here, other=0.0)
                i = tl.dot(state, tl.load(weights + at, mask=by, other=0.0), i)
                f = tl.dot(state, tl.load(weights + H * H + at, mask=by, other=0.0), f)
                g = tl.dot(state, tl.load(weights + 2 * H * H + at, mask=by, other=0.0), g)
                o = tl.dot(state, tl.load(weights + 3 * H * H + at, mask=by, other=0.0), o)
            both = there & known
            at = own[:, None] * (4 * H) + units[None, :]
            given = projected + row * (4 * H)
            i += tl.load(biases + units, mask=units < H, other=0.0).to(tl.float32)[None, :]
            f += tl.load(biases + H + units, mask=units < H, other=0.0).to(tl.float32)[None, :]
            g += tl.load(biases + 2 * H + units, mask=units < H, other=0.0).to(tl.float32)[None, :]
            o += tl.load(biases + 3 * H + units, mask=units < H, other=0.0).to(tl.float32)[None, :]
            i = tl.sigmoid(i + tl.load(given + at, mask=both, other=0.0).to(tl.float32))
            f = tl.sigmoid(f + tl.load(given + H + at, mask=both, other=0.0).to(tl.float32))
            g = tanh(g + tl.load(given + 2 * H + at, mask=both, other=0.0).to(tl.float32))
            o = tl.sigmoid(o + tl.load(given + 3 * H + at, mask=both, other=0.0).to(tl.float32))
            found = gates + row * (4 * H)
            tl.store(found + at, i.to(gates.dtype.element_ty), mask=both)
            tl.store(found + H + at, f.to(gates.dtype.element_ty), mask=both)
            tl.store(found + 2 * H + at, g.to(gates.dtype.element_ty), mask=both)
            tl.store(found + 3 * H + at, o.to(gates.dtype.element_ty), mask=both)
            at = own[:, None] * H + units[None, :]
            before = tl.load(cells + (row - samples) * H + at, mask=both & (t > 0), other=0.0)
            cell = f * before + i * g
            tl.store(cells + row * H + at, cell, mask=both)
            tl.store(states + row * H + at, (o * tanh(cell)).to(states.dtype.element_ty), mask=both)
        tl.debug_barrier()


@triton.jit
def backward(
    gradient, weight, cells, gates, of_gates, of_states, of_cells, by_client, by_time, by_sample, by_unit,
    times, samples,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Gradients of what went into the gates. The weight is [K, H, 4H]; the gradient of the states comes with its
    strides; `of_states` and `of_cells` [K, B, H] are room for what one time hands to the one before.

    Products and gates come one after the other: together they would hold more numbers than there are registers.
    """
    k = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * BM + tl.arange(0, BM)
    there = (own < samples)[:, None]
    weights = weight + k * (4 * H * H)
    of_states += k * samples * H
    of_cells += k * samples * H
    for back in range(times):
        t = times - 1 - back
        row = (k * times + t) * samples
        later = of_gates + (row + samples) * (4 * H)
        reach = tl.minimum(back, 1) * H  # after the last time comes nothing
        for first in range(0, reach, BN):
            units = first + tl.arange(0, BN)
            known = (units < H)[None, :]
            of_state = tl.zeros((BM, BN), tl.float32)
            for start in range(0, 4 * H, BK):
                read = start + tl.arange(0, BK)
                here = there if H % BK == 0 else there & (read < 4 * H)[None, :]
                by = known if H % BK == 0 else known & (read < 4 * H)[:, None]
                of_later = tl.load(later + own[:, None] * (4 * H) + read[None, :], mask=here, other=0.0)
                weighs = tl.load(weights + units[None, :] * (4 * H) + read[:, None], mask=by, other=0.0)
                of_state = tl.dot(of_later, weighs, of_state)
            tl.store(of_states + own[:, None] * H + units[None, :], of_state, mask=there & known)
        tl.debug_barrier()
        given = gradient + k * by_client + t.to(tl.int64) * by_time
        found, wanted = gates + row * (4 * H), of_gates + row * (4 * H)
        for first in range(0, H, BP):
            units = first + tl.arange(0, BP)
            both = there & (units < H)[None, :]
            at = own.to(tl.int64)[:, None] * by_sample + units[None, :] * by_unit
            of_state = tl.load(given + at, mask=both, other=0.0).to(tl.float32)
            at = own[:, None] * H + units[None, :]
            of_state += tl.load(of_states + at, mask=both & (back > 0), other=0.0)
            of_cell = tl.load(of_cells + at, mask=both & (back > 0), other=0.0)
            bent = tanh(tl.load(cells + row * H + at, mask=both, other=0.0))
            before = tl.load(cells + (row - samples) * H + at, mask=both & (t > 0), other=0.0)
            place = own[:, None] * (4 * H) + units[None, :]
            i = tl.load(found + place, mask=both, other=0.0).to(tl.float32)
            f = tl.load(found + H + place, mask=both, other=0.0).to(tl.float32)
            g = tl.load(found + 2 * H + place, mask=both, other=0.0).to(tl.float32)
            o = tl.load(found + 3 * H + place, mask=both, other=0.0).to(tl.float32)
            of_cell += of_state * o * (1.0 - bent * bent)
            kind = of_gates.dtype.element_ty
            tl.store(wanted + place, (of_cell * g * i * (1.0 - i)).to(kind), mask=both)
            tl.store(wanted + H + place, (of_cell * before * f * (1.0 - f)).to(kind), mask=both)
            tl.store(wanted + 2 * H + place, (of_cell * i * (1.0 - g * g)).to(kind), mask=both)
            tl.store(wanted + 3 * H + place, (of_state * bent * o * (1.0 - o)).to(kind), mask=both)
            tl.store(of_cells + at, of_cell * f, mask=both)
        tl.debug_barrier()
