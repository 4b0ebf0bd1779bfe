"""Triton kernels over one-channel maps: lengths, box sums and their transpose, x·T, and running means.

Activations are rows: [batch·positions, channels], channels last; group g of a row is channels [g·C, (g + 1)·C).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.rows import hypotenuse, inverse

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
FLOOR = tl.constexpr(1e-4)  # that of hyperball.nn.learned: a relative radius is (ratio² + FLOOR) mean lengths


@triton.jit
def fetch(start: tl.tensor, where: tl.tensor, mask: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """A tile in float32; without a mask where nothing lies outside."""
    if EVEN:
        value = tl.load(start + where)
    else:
        value = tl.load(start + where, mask=mask, other=0.0)
    return value.to(tl.float32)


@triton.jit
def row_length(tile: tl.tensor) -> tl.tensor:
    """‖row‖ of a float32 tile, without overflow or underflow: the squares are of the row over a power of two."""
    bits = tl.max(tl.abs(tile), axis=1).to(tl.int32, bitcast=True) & 0x7F800000
    scale = tl.minimum(tl.maximum(bits.to(tl.float32, bitcast=True), 1.1754943508222875e-38), 8.507059173023462e37)
    shrunk = tile * (1.0 / scale)[:, None]
    return tl.sqrt(tl.sum(shrunk * shrunk, axis=1)) * scale


@triton.jit
def joined(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """sqrt(a² + b²) of two lengths, 0 where both are; no overflow, and none lost above the smallest normal number."""
    longest = tl.maximum(a, b)
    share = tl.minimum(a, b) * inverse(longest)
    return longest * tl.sqrt(1.0 + share * share)


@triton.jit
def inverse_hypotenuse(n: tl.tensor, ROOT_EPS: tl.constexpr) -> tl.tensor:
    """1/sqrt(n² + eps) for n >= 0 without a division; 1/n = rsqrt(n)² where n² would overflow; at most 1e20."""
    root = tl.rsqrt(tl.maximum(n, 1e-20))
    held = tl.minimum(n, 1e18)
    smooth = tl.rsqrt(tl.maximum(held * held + ROOT_EPS * ROOT_EPS, 1e-36))
    near = (n > 1e18) | ((n < 1e-17) & (ROOT_EPS < 1e-17))
    return tl.where(near, root * root, smooth)


@triton.jit
def lengths_kernel(
    x: tl.tensor, out: tl.tensor, rows: tl.tensor, GROUPS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """r[row, group] = ‖x[row, channels of the group]‖."""
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    start = row[:, None] * (GROUPS * C) + group * C
    long = tl.zeros([BM], tl.float32)
    for part in tl.static_range(PARTS):
        channel = part * BC + tl.arange(0, BC)
        tile = fetch(x, start + channel[None, :], inside[:, None] & (channel < C)[None, :], EVEN)
        long = row_length(tile) if PARTS == 1 else joined(long, row_length(tile))
    tl.store(out + row * GROUPS + group, long, mask=inside)


@triton.jit
def put_norms(
    r: tl.tensor, n: tl.tensor, program: tl.tensor, blocks: tl.tensor, D: tl.tensor, H: tl.tensor, W: tl.tensor,
    OD: tl.tensor, OH: tl.tensor, OW: tl.tensor, G: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, ED: tl.constexpr, EH: tl.constexpr, EW: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """n = sqrt(Σ_window r²) for one block of an image, and which of it there are."""
    image = (program // blocks).to(tl.int64)
    at = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    count = OD * OH * OW * G
    inside = at < count
    group, place = at % G, at // G
    ow, place = place % OW, place // OW
    oh, od = place % OH, place // OH
    source = r + image * (D * H * W * G)
    total = tl.zeros([BLOCK], tl.float64)
    for a in tl.static_range(KD):
        d = od * SD - PD + a * ED
        for b in tl.static_range(KH):
            h = oh * SH - PH + b * EH
            for c in tl.static_range(KW):
                w = ow * SW - PW + c * EW
                real = inside & (d >= 0) & (d < D) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
                value = tl.load(source + ((d * H + h) * W + w) * G + group, mask=real, other=0.0).to(tl.float64)
                total += value * value
    length = tl.minimum(tl.sqrt(total), FLOAT_MAX).to(tl.float32)
    tl.store(n + image * count + at, length, mask=inside)
    return length, inside


@triton.jit
def box_kernel(
    r: tl.tensor, n: tl.tensor, parts: tl.tensor, blocks: tl.tensor, D: tl.tensor, H: tl.tensor,
    W: tl.tensor, OD: tl.tensor, OH: tl.tensor, OW: tl.tensor, G: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, ED: tl.constexpr, EH: tl.constexpr, EW: tl.constexpr, ROOT_EPS: tl.constexpr,
    SUMS: tl.constexpr, PEAKS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """n by `put_norms`; with it, by block, Σ sqrt(n² + eps) and, behind all of those, max n."""
    block = tl.program_id(0)
    length, inside = put_norms(
        r, n, block, blocks, D, H, W, OD, OH, OW, G, KD, KH, KW, SD, SH, SW, PD, PH, PW, ED, EH, EW, BLOCK
    )
    if SUMS:
        smooth = hypotenuse(length, tl.zeros_like(length) + ROOT_EPS)
        tl.store(parts + block, tl.sum(tl.where(inside, smooth, 0.0), axis=0))
    if PEAKS:
        tl.store(parts + tl.num_programs(0) + block, tl.max(tl.where(inside, length, 0.0), axis=0))


@triton.jit
def transposed_sums(
    t: tl.tensor, n: tl.tensor, program: tl.tensor, positions: tl.tensor, blocks: tl.tensor, D: tl.tensor, H: tl.tensor,
    W: tl.tensor, OD: tl.tensor, OH: tl.tensor, OW: tl.tensor, G: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, ED: tl.constexpr, EH: tl.constexpr, EW: tl.constexpr, ROOT_EPS: tl.constexpr,
    PULLS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """boxᵀ(t) and boxᵀ(1/sqrt(n² + eps), 0 where n is 0) for one block of an image; where they belong, and which do."""
    image = (program // blocks).to(tl.int64)
    at = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    count = D * H * W * G
    inside = at < count
    group, place = at % G, at // G
    w, place = place % W, place // W
    h, d = place % H, place // H
    t += image * (OD * OH * OW * G)
    n += image * (OD * OH * OW * G)
    stride = tl.full([], 0, tl.int64) + positions
    total = tl.zeros([BLOCK], tl.float32)
    level = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(KD):
        td = d + PD - a * ED
        for b in tl.static_range(KH):
            th = h + PH - b * EH
            for c in tl.static_range(KW):
                tw = w + PW - c * EW
                od, oh, ow = td // SD, th // SH, tw // SW
                real = inside & (td >= 0) & (od < OD) & (th >= 0) & (oh < OH) & (tw >= 0) & (ow < OW)
                if SD > 1:
                    real = real & (td % SD == 0)
                if SH > 1:
                    real = real & (th % SH == 0)
                if SW > 1:
                    real = real & (tw % SW == 0)
                where = ((od * OH + oh) * OW + ow) * G + group
                for part in tl.static_range(PARTS):
                    total += tl.load(t + part * stride + where, mask=real, other=0.0)
                if PULLS:
                    length = tl.load(n + where, mask=real, other=0.0)
                    level += tl.where(length > 0, inverse_hypotenuse(length, ROOT_EPS), 0.0)
    return total, level, image * count + at, inside


@triton.jit
def mean_pull(
    pulls: tl.tensor, positions: tl.tensor, PULLS: tl.constexpr, OUT: tl.constexpr, BO: tl.constexpr
) -> tl.tensor:
    """K: the channels' pulls on the mean length, for one position; 0 without them."""
    pull = 0.0
    if PULLS:
        channel = tl.arange(0, BO)
        pull = tl.sum(tl.load(pulls + channel, mask=channel < OUT, other=0.0), axis=0) / positions
    return pull


@triton.jit
def bounded(value: tl.tensor) -> tl.tensor:
    """The value within float32's finite numbers."""
    return tl.minimum(tl.maximum(value, -FLOAT_MAX), FLOAT_MAX)


@triton.jit
def box_transposed_kernel(
    t: tl.tensor, n: tl.tensor, r: tl.tensor, pulls: tl.tensor, out: tl.tensor, positions: tl.tensor,
    blocks: tl.tensor, D: tl.tensor, H: tl.tensor, W: tl.tensor, OD: tl.tensor, OH: tl.tensor, OW: tl.tensor,
    G: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr,
    SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, ED: tl.constexpr, EH: tl.constexpr,
    EW: tl.constexpr, ROOT_EPS: tl.constexpr, PULLS: tl.constexpr, OUT: tl.constexpr, BO: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """r·T, T = boxᵀ(t + K/sqrt(n² + eps)), K the channels' pulls on the mean length."""
    pull = mean_pull(pulls, positions, PULLS, OUT, BO)
    total, level, where, inside = transposed_sums(
        t, n, tl.program_id(0), positions, blocks, D, H, W, OD, OH, OW, G, KD, KH, KW, SD, SH, SW, PD, PH, PW, ED, EH,
        EW, ROOT_EPS, PULLS, PARTS, BLOCK,
    )  # fmt: skip
    total = (total + pull * level) * tl.load(r + where, mask=inside, other=0.0)
    tl.store(out + where, bounded(total), mask=inside)


@triton.jit
def add_along_kernel(
    dx: tl.tensor, x: tl.tensor, along: tl.tensor, level: tl.tensor, pulls: tl.tensor, rows: tl.tensor,
    positions: tl.tensor, GROUPS: tl.constexpr, C: tl.constexpr, PULLS: tl.constexpr, OUT: tl.constexpr,
    BO: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """dx += x·(along + K·level), in place; the last rows first, which the convolution's backward wrote last.

    K is summed after the first tile has been asked for, whose way is as long.
    """
    group = tl.program_id(1)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row = block.to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    factor = tl.load(along + row * GROUPS + group, mask=inside, other=0.0)
    even = tl.zeros([BM], tl.float32)
    if PULLS:
        even = tl.load(level + row * GROUPS + group, mask=inside, other=0.0)
    for first in tl.static_range(0, C, BC):
        channel = first + tl.arange(0, BC)
        mask = inside[:, None] & (channel < C)[None, :]
        where = row[:, None] * (GROUPS * C) + group * C + channel[None, :]
        value, before = fetch(x, where, mask, EVEN), fetch(dx, where, mask, EVEN)
        if first == 0:
            factor = bounded(factor + mean_pull(pulls, positions, PULLS, OUT, BO) * even)
        held = (before + value * factor[:, None]).to(dx.dtype.element_ty)
        if EVEN:
            tl.store(dx + where, held)
        else:
            tl.store(dx + where, held, mask=mask)


@triton.jit
def channels_last(at: tl.tensor, K: tl.constexpr, TAPS: tl.constexpr) -> tl.tensor:
    """Where entry (channel, tap) of a filter lies with its channels last; TAPS is 1 where it lies so already."""
    if TAPS > 1:
        at = (at % TAPS) * (K // TAPS) + at // TAPS
    return at


@triton.jit
def follow(running: tl.tensor, batches: tl.tensor, value: tl.tensor, mask: tl.tensor) -> None:
    """running ← running + w·(value - running), w = max(1 - 0.999, 1/batches); a non-finite value changes nothing."""
    good = (value - value) == 0
    held = tl.load(running)
    number = tl.load(batches) + tl.where(good, 1, 0)
    weight = tl.maximum(1.0 / tl.maximum(number, 1).to(tl.float32), 1.0 - 0.999)
    tl.store(running, tl.where(good, held + weight * (value - held), held), mask=mask)
    tl.store(batches, number, mask=mask)


@triton.jit
def move(running: tl.tensor, value: tl.tensor, share: tl.tensor, channel: tl.tensor, inside: tl.tensor) -> None:
    """running ← running + share·(value - running), by channel."""
    held = tl.load(running + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(running + channel, (held + share * (value - held)).to(running.dtype.element_ty), mask=inside)


@triton.jit
def track_kernel(
    running: tl.tensor, batches: tl.tensor, unit: tl.tensor, stats: tl.tensor, running_mean: tl.tensor,
    running_var: tl.tensor, counted: tl.tensor, C: tl.constexpr, BC: tl.constexpr, LENGTH: tl.constexpr,
    NORM: tl.constexpr, MOMENTUM: tl.constexpr, UNBIASED: tl.constexpr,
) -> None:  # fmt: skip
    """Running means after a batch: of the mean length, and of BatchNorm's mean and variance, the rows of `stats`."""
    if LENGTH:
        follow(running, batches, tl.load(unit), tl.program_id(0) == 0)
    if NORM:
        number = tl.load(counted) + 1
        tl.store(counted, number)
        share = MOMENTUM
        if MOMENTUM < 0:
            share = 1.0 / number.to(tl.float32)
        channel = tl.arange(0, BC)
        inside = channel < C
        move(running_mean, tl.load(stats + channel, mask=inside, other=0.0), share, channel, inside)
        move(running_var, tl.load(stats + C + channel, mask=inside, other=0.0) * UNBIASED, share, channel, inside)
