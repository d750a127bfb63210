"""Kernels for convolutions with batch norms of a whole cohort, in Triton; `fused.py` says what they are for.

Images lie as [K, B, H, W, C]: of each of K clients a matrix of places by channels, where places are pixels counted over
all of its samples. A program takes one client, a tile of places and a block of channels. Sums over places are written
down tile by tile and added up afterwards, so that their order never changes.

Norms come as what they do to a channel, (x - mean) * scale + bias. What a statistic of a channel adds to the gradient
of each of its values is (of_mean + 2 * of_var * (y - mean)) / places.

Negative values are cut off by a comparison, since a maximum would hide what is not a number.
"""

import triton
import triton.language as tl


@triton.jit
def normed(values, at, mean, scale, bias, channels, known, RELU: tl.constexpr):
    """What a batch norm, and a ReLU, make of values [P, C]; also their distances from the mean, and before the ReLU."""
    centred = values - tl.load(mean + at + channels, mask=known, other=0.0)[None, :]
    factor = tl.load(scale + at + channels, mask=known, other=0.0)[None, :]
    before = centred * factor + tl.load(bias + at + channels, mask=known, other=0.0)[None, :]
    after = tl.where(before < 0, 0.0, before) if RELU else before
    return after, centred, before


@triton.jit
def fitting(values, like):
    """As numbers of a kind; of half precision those that are too large, but not infinite, become the largest."""
    if like.dtype.element_ty == tl.float16:
        values = tl.where((values > 65504) & (values < float("inf")), 65504.0, values)
        values = tl.where((values < -65504) & (values > float("-inf")), -65504.0, values)
    return values.to(like.dtype.element_ty)


@triton.jit
def of_output(g, y, statistics, of_statistics, at, there, k, outs, known, total, O: tl.constexpr, WHOLE: tl.constexpr):
    """The whole gradient of a convolution's output [P, O]: what comes directly, and what comes by its statistics."""
    found = tl.load(g + at, mask=there, other=0.0)
    if not WHOLE:
        mean = tl.load(statistics + k * 2 * O + outs, mask=known, other=0.0)[None, :]
        of_mean = tl.load(of_statistics + k * 2 * O + outs, mask=known, other=0.0)[None, :] / total
        of_var = tl.load(of_statistics + (k * 2 + 1) * O + outs, mask=known, other=0.0)[None, :] * 2 / total
        values = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
        found = tl.where(there, found.to(tl.float32) + of_mean + of_var * (values - mean), 0.0)
    return found


@triton.jit
def whole(
    g, y, statistics, of_statistics, of_y, total,
    O: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The whole gradient of an output, written: a kernel of several taps would add it up once for each."""
    k = tl.program_id(2)
    outs = tl.program_id(1) * BO + tl.arange(0, BO)
    known = outs < O
    places = tl.program_id(0) * BP + tl.arange(0, BP)
    both = (places < total)[:, None] & known[None, :]
    here = k.to(tl.int64) * total * O
    at = (places * O)[:, None] + outs[None, :]
    found = of_output(g + here, y + here, statistics, of_statistics, at, both, k, outs, known, total, O, False)
    tl.store(of_y + here + at, found.to(of_y.dtype.element_ty), mask=both)


@triton.jit
def forward(
    x, w, mean, scale, bias, y, partial, samples,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, NORMED: tl.constexpr, RELU: tl.constexpr,
    STATISTICS: tl.constexpr, DOT: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """y = w * act(norm(x)), and for each tile the mean of y and the sum of squares around it. w is [taps, C, O]."""
    tile, k = tl.program_id(0), tl.program_id(2)
    client = k.to(tl.int64)
    outs = tl.program_id(1) * BO + tl.arange(0, BO)
    known_outs = outs < O
    places = tile * BP + tl.arange(0, BP)
    there = places < samples * (HO * WO)
    sample, pixel = places // (HO * WO), places % (HO * WO)
    row, column = pixel // WO, pixel % WO
    images = x + client * samples * (C * H * W)
    weights = w + client * (SIZE * SIZE * O * C)
    found = tl.zeros((BP, BO), tl.float32)
    for tap in tl.range(SIZE * SIZE):
        i, j = row * STRIDE + (tap // SIZE - PAD), column * STRIDE + (tap % SIZE - PAD)
        inside = there & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        at = ((sample * H + i) * W + j) * C
        for first in tl.static_range(0, C, BC):
            channels = first + tl.arange(0, BC)
            known = channels < C
            both = inside[:, None] if C % BC == 0 else inside[:, None] & known[None, :]
            values = tl.load(images + at[:, None] + channels[None, :], mask=both, other=0.0)
            if NORMED:
                values, _, _ = normed(values.to(tl.float32), k * C, mean, scale, bias, channels, known, RELU)
                values = tl.where(both, values, 0.0)
            own = tl.load(
                weights + (tap * C + channels[:, None]) * O + outs[None, :],
                mask=known[:, None] & known_outs[None, :],
                other=0.0,
            )
            found = tl.dot(values.to(DOT), own.to(DOT), found)
    both = there[:, None] & known_outs[None, :]
    stored = fitting(found, y)
    at = client * samples * (O * HO * WO) + (places * O)[:, None] + outs[None, :]
    tl.store(y + at, stored, mask=both)
    if STATISTICS:
        found = tl.where(both, stored.to(tl.float32), 0.0)
        count = tl.sum(there.to(tl.float32), 0)
        average = tl.sum(found, 0) / count
        away = tl.where(both, found - average[None, :], 0.0)
        here = partial + (k * tl.num_programs(0) + tile) * 2 * O
        tl.store(here + outs, average, mask=known_outs)
        tl.store(here + O + outs, tl.sum(away * away, 0), mask=known_outs)


@triton.jit
def merge(partial, statistics, tiles, total, O: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr, BO: tl.constexpr):
    """Mean and variance of all places from those of the tiles."""
    k = tl.program_id(1)
    outs = tl.program_id(0) * BO + tl.arange(0, BO)
    known = outs < O
    mean = tl.zeros((BO,), tl.float32)
    for first in range(0, tiles, BT):
        tile = first + tl.arange(0, BT)
        both = (tile < tiles)[:, None] & known[None, :]
        count = tl.minimum(total - tile * BP, BP).to(tl.float32)
        own = tl.load(partial + (k * tiles + tile)[:, None] * 2 * O + outs[None, :], mask=both, other=0.0)
        mean += tl.sum(tl.where(both, own * count[:, None], 0.0), 0)
    mean = mean / total
    squares = tl.zeros((BO,), tl.float32)
    for first in range(0, tiles, BT):
        tile = first + tl.arange(0, BT)
        both = (tile < tiles)[:, None] & known[None, :]
        count = tl.minimum(total - tile * BP, BP).to(tl.float32)
        at = partial + (k * tiles + tile)[:, None] * 2 * O + outs[None, :]
        away = tl.load(at, mask=both, other=0.0) - mean[None, :]
        own = tl.load(at + O, mask=both, other=0.0)
        squares += tl.sum(tl.where(both, own + count[:, None] * away * away, 0.0), 0)
    tl.store(statistics + k * 2 * O + outs, mean, mask=known)
    tl.store(statistics + (k * 2 + 1) * O + outs, squares / total, mask=known)


@triton.jit
def norm_forward(
    statistics, weight, running_mean, running_var, mean, scale, new_mean, new_var, w_stride, momentum, eps, total,
    C: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What a batch norm does to each channel, and what its running statistics become."""
    k = tl.program_id(1)
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    known = channels < C
    average = tl.load(statistics + k * 2 * C + channels, mask=known, other=0.0)
    var = tl.load(statistics + (k * 2 + 1) * C + channels, mask=known, other=0.0)
    own = tl.load(weight + k.to(tl.int64) * w_stride + channels, mask=known, other=0.0)
    tl.store(mean + k * C + channels, average, mask=known)
    tl.store(scale + k * C + channels, own / tl.sqrt_rn(var + eps), mask=known)
    before = tl.load(running_mean + k * C + channels, mask=known, other=0.0)
    tl.store(new_mean + k * C + channels, before + momentum * (average - before), mask=known)
    before = tl.load(running_var + k * C + channels, mask=known, other=0.0)
    tl.store(new_var + k * C + channels, before + momentum * (var * total / (total - 1) - before), mask=known)


@triton.jit
def norm_backward(
    statistics, weight, of_mean, of_scale, of_statistics, of_weight, w_stride, eps,
    C: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1)
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    known = channels < C
    var = tl.load(statistics + (k * 2 + 1) * C + channels, mask=known, other=0.0) + eps
    own = tl.load(weight + k.to(tl.int64) * w_stride + channels, mask=known, other=0.0)
    given = tl.load(of_scale + k * C + channels, mask=known, other=0.0)
    root = 1.0 / tl.sqrt_rn(var)
    tl.store(of_weight + k * C + channels, given * root, mask=known)
    direct = tl.load(of_mean + k * C + channels, mask=known, other=0.0)
    tl.store(of_statistics + k * 2 * C + channels, direct, mask=known)
    tl.store(of_statistics + (k * 2 + 1) * C + channels, -0.5 * given * own * root / var, mask=known)


@triton.jit
def input_backward(
    g, y, statistics, of_statistics, w, x, mean, scale, bias, through, of_x, partial, samples,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, NORMED: tl.constexpr, RELU: tl.constexpr,
    THROUGH: tl.constexpr, WHOLE: tl.constexpr, DOT: tl.constexpr,
    BC: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and for each tile the sums that the gradients of bias and scale are made of. `through` is
    what others add to the gradient of x; w is [taps, O, C].
    """
    tile, k = tl.program_id(0), tl.program_id(2)
    client = k.to(tl.int64)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channels < C
    places = tile * BP + tl.arange(0, BP)
    there = places < samples * (H * W)
    sample, pixel = places // (H * W), places % (H * W)
    row, column = pixel // W, pixel % W
    outputs = client * samples * (O * HO * WO)
    weights = w + client * (SIZE * SIZE * O * C)
    total = samples * (HO * WO)
    found = tl.zeros((BP, BC), tl.float32)
    for tap in range(SIZE * SIZE):
        i, j = row + PAD - tap // SIZE, column + PAD - tap % SIZE
        inside = there & (i >= 0) & (i < HO * STRIDE) & (j >= 0) & (j < WO * STRIDE)
        inside &= (i % STRIDE == 0) & (j % STRIDE == 0)
        at = ((sample * HO + i // STRIDE) * WO + j // STRIDE) * O
        for first in range(0, O, BO):
            outs = first + tl.arange(0, BO)
            known_outs = outs < O
            both = inside[:, None] if O % BO == 0 else inside[:, None] & known_outs[None, :]
            here = at[:, None] + outs[None, :]
            of_y = of_output(
                g + outputs, y + outputs, statistics, of_statistics, here, both, k, outs, known_outs, total, O, WHOLE
            )
            own = tl.load(
                weights + (tap * O + outs[:, None]) * C + channels[None, :],
                mask=known_outs[:, None] & known[None, :],
                other=0.0,
            )
            found = tl.dot(of_y.to(DOT), own.to(DOT), found)
    both = there[:, None] & known[None, :]
    at = client * samples * (C * H * W) + (places * C)[:, None] + channels[None, :]
    if NORMED:
        values = tl.load(x + at, mask=both, other=0.0).to(tl.float32)
        _, centred, before = normed(values, k * C, mean, scale, bias, channels, known, False)
        if RELU:
            found = tl.where(before <= 0, 0.0, found)
        found = tl.where(both, found, 0.0)
        sums = partial + (k * tl.num_programs(0) + tile) * 2 * C
        tl.store(sums + channels, tl.sum(found, 0), mask=known)
        tl.store(sums + C + channels, tl.sum(found * centred, 0), mask=known)
        found = found * tl.load(scale + k * C + channels, mask=known, other=0.0)[None, :]
    if THROUGH:
        found += tl.load(through + at, mask=both, other=0.0).to(tl.float32)
    tl.store(of_x + at, found.to(of_x.dtype.element_ty), mask=both)


@triton.jit
def weight_backward(
    g, y, statistics, of_statistics, x, mean, scale, bias, partial, samples,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, NORMED: tl.constexpr, RELU: tl.constexpr,
    WHOLE: tl.constexpr, DOT: tl.constexpr, COLUMNS: tl.constexpr,
    BC: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """What every part of the tiles adds to the gradient of w [taps, O, C]. A program takes one row of taps, side by
    side in COLUMNS, a power of two.
    """
    part, k = tl.program_id(0), tl.program_id(2)
    client = k.to(tl.int64)
    tap_row, block = tl.program_id(1) % SIZE, tl.program_id(1) // SIZE
    outs = (block % tl.cdiv(O, BO)) * BO + tl.arange(0, BO)
    known_outs = outs < O
    tap_column = tl.arange(0, COLUMNS * BC) // BC
    channels = (block // tl.cdiv(O, BO)) * BC + tl.arange(0, COLUMNS * BC) % BC
    known = (channels < C) & (tap_column < SIZE)
    outputs = client * samples * (O * HO * WO)
    images = x + client * samples * (C * H * W)
    total = samples * (HO * WO)
    found = tl.zeros((BO, COLUMNS * BC), tl.float32)
    for tile in range(part, tl.cdiv(total, BP), tl.num_programs(0)):
        places = tile * BP + tl.arange(0, BP)
        there = places < total
        sample, pixel = places // (HO * WO), places % (HO * WO)
        both = there[:, None] & known_outs[None, :]
        here = (places * O)[:, None] + outs[None, :]
        of_y = of_output(
            g + outputs, y + outputs, statistics, of_statistics, here, both, k, outs, known_outs, total, O, WHOLE
        )
        i, first = (pixel // WO) * STRIDE - PAD + tap_row, (pixel % WO) * STRIDE - PAD
        j = first[:, None] + tap_column[None, :]
        inside = (there & (i >= 0) & (i < H))[:, None] & (j >= 0) & (j < W) & known[None, :]
        at = ((sample * H + i) * W)[:, None] * C + j * C + channels[None, :]
        values = tl.load(images + at, mask=inside, other=0.0)
        if NORMED:
            values, _, _ = normed(values.to(tl.float32), k * C, mean, scale, bias, channels, known, RELU)
            values = tl.where(inside, values, 0.0)
        found = tl.dot(tl.trans(of_y.to(DOT)), values.to(DOT), found)
    taps = tap_row * SIZE + tap_column
    here = partial + (client * tl.num_programs(0) + part) * (SIZE * SIZE * O * C)
    at = (taps * (O * C) + channels)[None, :] + outs[:, None] * C
    tl.store(here + at, found, mask=known_outs[:, None] & known[None, :])


@triton.jit
def sum_forward(
    y, mean, scale, bias, other, other_mean, other_scale, other_bias, out, total,
    C: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """act(norm(y) + other). OTHER: 0, there is none; 1, it is added as it is; 2, it has a norm of its own."""
    k = tl.program_id(2)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channels < C
    places = tl.program_id(0) * BP + tl.arange(0, BP)
    both = (places < total)[:, None] & known[None, :]
    at = k.to(tl.int64) * total * C + (places * C)[:, None] + channels[None, :]
    values = tl.load(y + at, mask=both, other=0.0).to(tl.float32)
    found, _, _ = normed(values, k * C, mean, scale, bias, channels, known, False)
    if OTHER > 0:
        values = tl.load(other + at, mask=both, other=0.0).to(tl.float32)
        if OTHER == 2:
            values, _, _ = normed(values, k * C, other_mean, other_scale, other_bias, channels, known, False)
        found += values
    if RELU:
        found = tl.where(found < 0, 0.0, found)
    tl.store(out + at, fitting(found, out), mask=both)


@triton.jit
def sum_backward(
    g, out, y, mean, scale, other, other_mean, other_scale, of_y, of_other, partial, total,
    C: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Gradients of y and other, and for each tile the sums that those of bias and the scales are made of."""
    tile, k = tl.program_id(0), tl.program_id(2)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channels < C
    places = tile * BP + tl.arange(0, BP)
    both = (places < total)[:, None] & known[None, :]
    at = k.to(tl.int64) * total * C + (places * C)[:, None] + channels[None, :]
    given = tl.load(g + at, mask=both, other=0.0).to(tl.float32)
    if RELU:
        given = tl.where(tl.load(out + at, mask=both, other=0.0) <= 0, 0.0, given)
    sums = partial + (k * tl.num_programs(0) + tile) * 3 * C
    tl.store(sums + channels, tl.sum(given, 0), mask=known)
    centred = tl.load(y + at, mask=both, other=0.0).to(tl.float32)
    centred -= tl.load(mean + k * C + channels, mask=known, other=0.0)[None, :]
    tl.store(sums + C + channels, tl.sum(tl.where(both, given * centred, 0.0), 0), mask=known)
    of_values = given * tl.load(scale + k * C + channels, mask=known, other=0.0)[None, :]
    tl.store(of_y + at, of_values.to(of_y.dtype.element_ty), mask=both)
    if OTHER == 1:
        tl.store(of_other + at, given.to(of_other.dtype.element_ty), mask=both)
    if OTHER == 2:
        centred = tl.load(other + at, mask=both, other=0.0).to(tl.float32)
        centred -= tl.load(other_mean + k * C + channels, mask=known, other=0.0)[None, :]
        tl.store(sums + 2 * C + channels, tl.sum(tl.where(both, given * centred, 0.0), 0), mask=known)
        of_values = given * tl.load(other_scale + k * C + channels, mask=known, other=0.0)[None, :]
        tl.store(of_other + at, of_values.to(of_other.dtype.element_ty), mask=both)
