"""Kernels for convolutions with batch norms of a whole cohort, in Triton; `fused.py` says what they are for.

Images lie as [K, B, C, H, W]: of client k, K of them, sample by sample. A program takes one client, a block of channels
and a tile of places, which are pixels counted over all samples of the client. Sums over places are written down tile by
tile and added up afterwards, so that their order never changes.

Norms come as what they do to a channel, (x - mean) * scale + bias. What a statistic of a channel adds to the gradient
of each of its values is (of_mean + 2 * of_var * (y - mean)) / places.

Negative values are cut off by a comparison, since a maximum would hide what is not a number.
"""

import triton
import triton.language as tl


@triton.jit
def normed(values, at, mean, scale, bias, channels, known, RELU: tl.constexpr):
    """What a batch norm, and a ReLU, make of values [C, P]; also their distances from the mean, and before the ReLU."""
    centred = values - tl.load(mean + at + channels, mask=known, other=0.0)[:, None]
    factor = tl.load(scale + at + channels, mask=known, other=0.0)[:, None]
    before = centred * factor + tl.load(bias + at + channels, mask=known, other=0.0)[:, None]
    after = tl.where(before < 0, 0.0, before) if RELU else before
    return after, centred, before


@triton.jit
def of_output(g, y, statistics, of_statistics, at, there, k, outs, known, total, O: tl.constexpr, WHOLE: tl.constexpr):
    """The whole gradient of a convolution's output [O, P]: what comes directly, and what comes by its statistics."""
    direct = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
    if WHOLE:
        return direct
    mean = tl.load(statistics + k * 2 * O + outs, mask=known, other=0.0)[:, None]
    of_mean = tl.load(of_statistics + k * 2 * O + outs, mask=known, other=0.0)[:, None] / total
    of_var = tl.load(of_statistics + (k * 2 + 1) * O + outs, mask=known, other=0.0)[:, None] * 2 / total
    values = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
    return tl.where(there, direct + of_mean + of_var * (values - mean), 0.0)


@triton.jit
def whole(
    g, y, statistics, of_statistics, of_y, samples,
    O: tl.constexpr, P: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The whole gradient of an output, written: a kernel of several taps would add it up once for each."""
    k = tl.program_id(2)
    outs = tl.program_id(1) * BO + tl.arange(0, BO)
    known = outs < O
    places = tl.program_id(0) * BP + tl.arange(0, BP)
    both = (places < samples * P)[None, :] & known[:, None]
    here = k.to(tl.int64) * samples * (O * P)
    at = ((places // P) * (O * P) + places % P)[None, :] + outs[:, None] * P
    found = of_output(g + here, y + here, statistics, of_statistics, at, both, k, outs, known, samples * P, O, False)
    tl.store(of_y + here + at, found.to(of_y.dtype.element_ty), mask=both)


@triton.jit
def forward(
    x, w, mean, scale, bias, y, partial, samples,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, NORMED: tl.constexpr, RELU: tl.constexpr,
    DOT: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """y = w * act(norm(x)), and for each tile the mean of y and the sum of squares around it. w is [taps, O, C]."""
    tile, k = tl.program_id(0), tl.program_id(2)
    client = k.to(tl.int64)
    outs = tl.program_id(1) * BO + tl.arange(0, BO)
    known_outs = outs < O
    places = tile * BP + tl.arange(0, BP)
    there = places < samples * HO * WO
    sample, pixel = places // (HO * WO), places % (HO * WO)
    row, column = pixel // WO, pixel % WO
    images = x + client * samples * (C * H * W)
    weights = w + client * (SIZE * SIZE * O * C)
    found = tl.zeros((BO, BP), tl.float32)
    for tap in tl.static_range(SIZE * SIZE):  # written out, so that one loads while another multiplies
        i, j = row * STRIDE + (tap // SIZE - PAD), column * STRIDE + (tap % SIZE - PAD)
        inside = there & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        at = sample * (C * H * W) + i * W + j
        for first in tl.static_range(0, C, BC):
            channels = first + tl.arange(0, BC)
            known = channels < C
            both = inside[None, :] if C % BC == 0 else inside[None, :] & known[:, None]
            values = tl.load(images + at[None, :] + channels[:, None] * (H * W), mask=both, other=0.0).to(tl.float32)
            if NORMED:
                values, _, _ = normed(values, k * C, mean, scale, bias, channels, known, RELU)
                values = tl.where(both, values, 0.0)
            own = tl.load(
                weights + tap * (O * C) + outs[:, None] * C + channels[None, :],
                mask=known_outs[:, None] & known[None, :],
                other=0.0,
            )
            found = tl.dot(own.to(DOT), values.to(DOT), found)
    both = there[None, :] & known_outs[:, None]
    stored = found.to(y.dtype.element_ty)
    at = client * samples * (O * HO * WO) + sample * (O * HO * WO) + pixel
    tl.store(y + at[None, :] + outs[:, None] * (HO * WO), stored, mask=both)
    found = tl.where(both, stored.to(tl.float32), 0.0)
    count = tl.sum(there.to(tl.float32), 0)
    average = tl.sum(found, 1) / count
    away = tl.where(both, found - average[:, None], 0.0)
    here = partial + (k * tl.num_programs(0) + tile) * 2 * O
    tl.store(here + outs, average, mask=known_outs)
    tl.store(here + O + outs, tl.sum(away * away, 1), mask=known_outs)


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
    what others add to the gradient of x; w is [taps, C, O].
    """
    tile, k = tl.program_id(0), tl.program_id(2)
    client = k.to(tl.int64)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channels < C
    places = tile * BP + tl.arange(0, BP)
    there = places < samples * H * W
    sample, pixel = places // (H * W), places % (H * W)
    row, column = pixel // W, pixel % W
    outputs = client * samples * (O * HO * WO)
    weights = w + client * (SIZE * SIZE * O * C)
    total = samples * HO * WO
    found = tl.zeros((BC, BP), tl.float32)
    for tap in range(SIZE * SIZE):
        i, j = row + PAD - tap // SIZE, column + PAD - tap % SIZE
        inside = there & (i >= 0) & (i < HO * STRIDE) & (j >= 0) & (j < WO * STRIDE)
        inside &= (i % STRIDE == 0) & (j % STRIDE == 0)
        at = sample * (O * HO * WO) + (i // STRIDE) * WO + j // STRIDE
        for first in range(0, O, BO):
            outs = first + tl.arange(0, BO)
            known_outs = outs < O
            both = inside[None, :] if O % BO == 0 else inside[None, :] & known_outs[:, None]
            here = at[None, :] + outs[:, None] * (HO * WO)
            of_y = of_output(
                g + outputs, y + outputs, statistics, of_statistics, here, both, k, outs, known_outs, total, O, WHOLE
            )
            own = tl.load(
                weights + tap * (O * C) + channels[:, None] * O + outs[None, :],
                mask=known_outs[None, :] & known[:, None],
                other=0.0,
            )
            found = tl.dot(own.to(DOT), of_y.to(DOT), found)
    both = there[None, :] & known[:, None]
    at = client * samples * (C * H * W) + (sample * (C * H * W) + pixel)[None, :] + channels[:, None] * (H * W)
    if NORMED:
        values = tl.load(x + at, mask=both, other=0.0).to(tl.float32)
        _, centred, before = normed(values, k * C, mean, scale, bias, channels, known, False)
        if RELU:
            found = tl.where(before <= 0, 0.0, found)
        found = tl.where(both, found, 0.0)
        sums = partial + (k * tl.num_programs(0) + tile) * 2 * C
        tl.store(sums + channels, tl.sum(found, 1), mask=known)
        tl.store(sums + C + channels, tl.sum(found * centred, 1), mask=known)
        found = found * tl.load(scale + k * C + channels, mask=known, other=0.0)[:, None]
    if THROUGH:
        found += tl.load(through + at, mask=both, other=0.0).to(tl.float32)
    tl.store(of_x + at, found.to(of_x.dtype.element_ty), mask=both)


@triton.jit
def weight_backward(
    g, y, statistics, of_statistics, x, mean, scale, bias, partial, samples,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, NORMED: tl.constexpr, RELU: tl.constexpr,
    WHOLE: tl.constexpr, DOT: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """What every part of the tiles adds to the gradient of w [taps, O, C]. A program takes one tap."""
    part, k = tl.program_id(0), tl.program_id(2)
    client = k.to(tl.int64)
    tap, block = tl.program_id(1) % (SIZE * SIZE), tl.program_id(1) // (SIZE * SIZE)
    outs = (block % tl.cdiv(O, BO)) * BO + tl.arange(0, BO)
    known_outs = outs < O
    channels = (block // tl.cdiv(O, BO)) * BC + tl.arange(0, BC)
    known = channels < C
    outputs = client * samples * (O * HO * WO)
    images = x + client * samples * (C * H * W)
    total = samples * HO * WO
    found = tl.zeros((BO, BC), tl.float32)
    for tile in range(part, tl.cdiv(total, BP), tl.num_programs(0)):
        places = tile * BP + tl.arange(0, BP)
        there = places < total
        sample, pixel = places // (HO * WO), places % (HO * WO)
        both = there[None, :] & known_outs[:, None]
        here = (sample * (O * HO * WO) + pixel)[None, :] + outs[:, None] * (HO * WO)
        of_y = of_output(
            g + outputs, y + outputs, statistics, of_statistics, here, both, k, outs, known_outs, total, O, WHOLE
        )
        i, j = (pixel // WO) * STRIDE - PAD + tap // SIZE, (pixel % WO) * STRIDE - PAD + tap % SIZE
        inside = (there & (i >= 0) & (i < H) & (j >= 0) & (j < W))[None, :] & known[:, None]
        at = (sample * (C * H * W) + i * W + j)[None, :] + channels[:, None] * (H * W)
        values = tl.load(images + at, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            values, _, _ = normed(values, k * C, mean, scale, bias, channels, known, RELU)
            values = tl.where(inside, values, 0.0)
        found = tl.dot(of_y.to(DOT), tl.trans(values.to(DOT)), found)
    here = partial + ((client * tl.num_programs(0) + part) * (SIZE * SIZE) + tap) * (O * C)
    tl.store(here + outs[:, None] * C + channels[None, :], found, mask=known_outs[:, None] & known[None, :])


@triton.jit
def sum_forward(
    y, mean, scale, bias, other, other_mean, other_scale, other_bias, out, samples,
    C: tl.constexpr, P: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """act(norm(y) + other). OTHER: 0, there is none; 1, it is added as it is; 2, it has a norm of its own."""
    k = tl.program_id(2)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channels < C
    places = tl.program_id(0) * BP + tl.arange(0, BP)
    both = (places < samples * P)[None, :] & known[:, None]
    at = k.to(tl.int64) * samples * (C * P) + ((places // P) * (C * P) + places % P)[None, :] + channels[:, None] * P
    values = tl.load(y + at, mask=both, other=0.0).to(tl.float32)
    found, _, _ = normed(values, k * C, mean, scale, bias, channels, known, False)
    if OTHER > 0:
        values = tl.load(other + at, mask=both, other=0.0).to(tl.float32)
        if OTHER == 2:
            values, _, _ = normed(values, k * C, other_mean, other_scale, other_bias, channels, known, False)
        found += values
    if RELU:
        found = tl.where(found < 0, 0.0, found)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=both)


@triton.jit
def sum_backward(
    g, out, y, mean, scale, other, other_mean, other_scale, of_y, of_other, partial, samples,
    C: tl.constexpr, P: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Gradients of y and other, and for each tile the sums that those of bias and the scales are made of."""
    tile, k = tl.program_id(0), tl.program_id(2)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channels < C
    places = tile * BP + tl.arange(0, BP)
    both = (places < samples * P)[None, :] & known[:, None]
    at = k.to(tl.int64) * samples * (C * P) + ((places // P) * (C * P) + places % P)[None, :] + channels[:, None] * P
    given = tl.load(g + at, mask=both, other=0.0).to(tl.float32)
    if RELU:
        given = tl.where(tl.load(out + at, mask=both, other=0.0) <= 0, 0.0, given)
    sums = partial + (k * tl.num_programs(0) + tile) * 3 * C
    tl.store(sums + channels, tl.sum(given, 1), mask=known)
    centred = tl.load(y + at, mask=both, other=0.0).to(tl.float32)
    centred -= tl.load(mean + k * C + channels, mask=known, other=0.0)[:, None]
    tl.store(sums + C + channels, tl.sum(tl.where(both, given * centred, 0.0), 1), mask=known)
    of_values = given * tl.load(scale + k * C + channels, mask=known, other=0.0)[:, None]
    tl.store(of_y + at, of_values.to(of_y.dtype.element_ty), mask=both)
    if OTHER == 1:
        tl.store(of_other + at, given.to(of_other.dtype.element_ty), mask=both)
    if OTHER == 2:
        centred = tl.load(other + at, mask=both, other=0.0).to(tl.float32)
        centred -= tl.load(other_mean + k * C + channels, mask=known, other=0.0)[:, None]
        tl.store(sums + 2 * C + channels, tl.sum(tl.where(both, given * centred, 0.0), 1), mask=known)
        of_values = given * tl.load(other_scale + k * C + channels, mask=known, other=0.0)[:, None]
        tl.store(of_other + at, of_values.to(of_other.dtype.element_ty), mask=both)
