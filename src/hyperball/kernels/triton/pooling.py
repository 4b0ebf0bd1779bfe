"""Triton kernels of robust pooling: a program reads its rows once, solves them in registers and writes a number each.

Tiles are [rows, samples]; what belongs to a row is [rows, 1]. The mathematics is that of `pooling_rows` and
`pooling.c`: convex penalties by Newton's method inside a bracket, from the mean; others by the same from the best of
the points of a grid, or of the samples where these are fewer. A row without weights has its missing samples at y
itself, where psi is 0 and psi' and s are 1, so that their number is subtracted and no product is formed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.pooling_terms import bounded, score, terms
from hyperball.kernels.triton.row_access import row_numbers, row_offset, somewhere, tap_offset

EPS = tl.constexpr(1.1920928955078125e-07)
HUGEST = tl.constexpr(3.4028234663852886e38 / 8)
STEPS = tl.constexpr(100)
FINE = tl.constexpr(1.0)  # of c: how far apart the points of the grid lie
MISSED = tl.constexpr(0.125)  # of Σ w: by how much a score grows at most over half that distance, as psi' <= 1
APART = tl.constexpr(1.5)  # of c: two starts that are to be followed are at least so far apart
CLOSE = tl.constexpr(0.8)  # a second start whose score is below this share of the best is not followed


@triton.jit
def fetch(
    x_row: tl.tensor, w_row: tl.tensor, at: tl.tensor, n: tl.tensor, inner: tl.tensor, xs0: tl.tensor, xs1: tl.tensor,
    ws0: tl.tensor, ws1: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Samples at, at + 1, … of every row as they are, their weights (0 where one is absent), and which exist."""
    t = at + tl.arange(0, BN)[None, :]
    if EVEN:
        inside = tl.full([x_row.shape[0], BN], 1, tl.int1)
        x = tl.load(x_row + tap_offset(t, inner, xs0, xs1, FLAT, WIDE)).to(tl.float32)
    else:
        inside = t < n
        x = tl.load(x_row + tap_offset(t, inner, xs0, xs1, FLAT, WIDE), mask=inside, other=0.0).to(tl.float32)
    w = inside
    if WEIGHTED:
        held = tl.load(w_row + tap_offset(t, inner, ws0, ws1, FLAT, WIDE), mask=inside, other=0.0).to(tl.float32)
        w = tl.where(held > 0, held, 0.0)
        inside = held > 0
        x = tl.where(inside, x, 0.0)
    return x, w, inside


@triton.jit
def totals(
    P: tl.constexpr, y: tl.tensor, x: tl.tensor, w: tl.tensor, inside: tl.tensor, c: tl.tensor, over: tl.tensor,
    far: tl.tensor, shape: tl.tensor, left: tl.tensor, WEIGHTED: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Σ w·(psi, |psi|, psi', s) of one tile at y; `left` says how many samples there are from here on."""
    z = y - x
    if not WEIGHTED:
        z = tl.where(inside, z, 0.0)
    psi, h, s = terms(P, z, c, over, far, shape)
    if WEIGHTED:
        psi, h, s = psi * w, h * w, s * w
    absent = 0.0
    if not WEIGHTED:
        absent = (BN - tl.minimum(tl.maximum(left, 0), BN)).to(tl.float32)
    return (
        tl.sum(psi, axis=1, keep_dims=True),
        tl.sum(tl.abs(psi), axis=1, keep_dims=True),
        tl.sum(h, axis=1, keep_dims=True) - absent,
        tl.sum(s, axis=1, keep_dims=True) - absent,
    )


@triton.jit
def slopes(
    P: tl.constexpr, y: tl.tensor, x: tl.tensor, w: tl.tensor, inside: tl.tensor, c: tl.tensor, over: tl.tensor,
    far: tl.tensor, shape: tl.tensor, unit: tl.tensor, x_row: tl.tensor, w_row: tl.tensor, n: tl.tensor,
    longest: tl.tensor, inner: tl.tensor, xs0: tl.tensor, xs1: tl.tensor, ws0: tl.tensor, ws1: tl.tensor,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr,
    BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`totals` of whole rows: those in registers, or read again tile by tile."""
    g, size, h, s = totals(P, y, x, w, inside, c, over, far, shape, n, WEIGHTED, BN)
    if LOOP:
        for at in range(BN, longest, BN):
            xt, wt, there = fetch(x_row, w_row, at, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
            xt = bounded(xt) * unit
            g1, size1, h1, s1 = totals(P, y, xt, wt, there, c, over, far, shape, n - at, WEIGHTED, BN)
            g, size, h, s = g + g1, size + size1, h + h1, s + s1
    return g, size, h, s


@triton.jit
def scores(
    P: tl.constexpr, y: tl.tensor, x: tl.tensor, w: tl.tensor, inside: tl.tensor, over: tl.tensor, far: tl.tensor,
    shape: tl.tensor, unit: tl.tensor, x_row: tl.tensor, w_row: tl.tensor, n: tl.tensor, longest: tl.tensor,
    inner: tl.tensor, xs0: tl.tensor, xs1: tl.tensor, ws0: tl.tensor, ws1: tl.tensor, WEIGHTED: tl.constexpr,
    EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What the global minimum has most of, of whole rows: Σ w·(1 - phi/c²), welsch's Σ w·exp(-z²/(2c²))."""
    v = score(P, y - x, over, far, shape)
    found = tl.sum(v * w if WEIGHTED else tl.where(inside, v, 0.0), axis=1, keep_dims=True)
    if LOOP:
        for at in range(BN, longest, BN):
            xt, wt, there = fetch(x_row, w_row, at, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
            v = score(P, y - bounded(xt) * unit, over, far, shape)
            found += tl.sum(v * wt if WEIGHTED else tl.where(there, v, 0.0), axis=1, keep_dims=True)
    return found


@triton.jit
def measured(x: tl.tensor, w: tl.tensor, inside: tl.tensor, WEIGHTED: tl.constexpr) -> tl.tensor:
    """The least and greatest sample, Σ w·x and Σ w."""
    low = tl.min(tl.where(inside, x, float("inf")), axis=1, keep_dims=True)
    high = tl.max(tl.where(inside, x, float("-inf")), axis=1, keep_dims=True)
    mass = 0.0
    if WEIGHTED:
        mass = tl.sum(w, axis=1, keep_dims=True)
    total = tl.sum(x * w if WEIGHTED else x, axis=1, keep_dims=True)
    return low, high, total, mass


@triton.jit
def holds_nan(x: tl.tensor) -> tl.tensor:
    return tl.max((x != x).to(tl.int32), axis=1, keep_dims=True) > 0


@triton.jit
def order_key(x: tl.tensor) -> tl.tensor:
    """The bits of a number as an integer of the same order; its own inverse on bits."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight_up_to(
    key: tl.tensor, x: tl.tensor, w: tl.tensor, inside: tl.tensor, unit: tl.tensor, x_row: tl.tensor, w_row: tl.tensor,
    n: tl.tensor, longest: tl.tensor, inner: tl.tensor, xs0: tl.tensor, xs1: tl.tensor, ws0: tl.tensor, ws1: tl.tensor,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr,
    BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The weight of the samples whose key is at most this one, and the least sample beyond."""
    under = inside & (order_key(x) <= key)
    mass = tl.sum(tl.where(under, w.to(tl.float32), 0.0), axis=1, keep_dims=True)
    beyond = tl.min(tl.where(inside & ~under, x, float("inf")), axis=1, keep_dims=True)
    if LOOP:
        for at in range(BN, longest, BN):
            xt, wt, there = fetch(x_row, w_row, at, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
            xt = bounded(xt) * unit
            under = there & (order_key(xt) <= key)
            mass += tl.sum(tl.where(under, wt.to(tl.float32), 0.0), axis=1, keep_dims=True)
            beyond = tl.minimum(beyond, tl.min(tl.where(there & ~under, xt, float("inf")), axis=1, keep_dims=True))
    return mass, beyond


@triton.jit
def median(
    low: tl.tensor, high: tl.tensor, mass: tl.tensor, broken: tl.tensor, x: tl.tensor, w: tl.tensor, inside: tl.tensor,
    unit: tl.tensor, x_row: tl.tensor, w_row: tl.tensor, n: tl.tensor, longest: tl.tensor, inner: tl.tensor,
    xs0: tl.tensor, xs1: tl.tensor, ws0: tl.tensor, ws1: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
    FLAT: tl.constexpr,
    WIDE: tl.constexpr, LOOP: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The mean of the two middle samples of rows between low and high, by bisecting the bits of the answer."""
    least, most = order_key(low), order_key(high)
    half = mass * 0.5
    while somewhere((least < most) & ~broken):
        middle = (least >> 1) + (most >> 1) + (least & most & 1)
        up_to, _ = weight_up_to(
            middle, x, w, inside, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE,
            LOOP, BN,
        )  # fmt: skip
        enough = up_to * (1.0 + 4.0 * EPS) >= half
        moving = (least < most) & ~broken
        least = tl.where(moving & ~enough, middle + 1, least)
        most = tl.where(enough & moving, middle, most)
    up_to, beyond = weight_up_to(
        most,
        x,
        w,
        inside,
        unit,
        x_row,
        w_row,
        n,
        longest,
        inner,
        xs0,
        xs1,
        ws0,
        ws1,
        WEIGHTED,
        EVEN,
        FLAT,
        WIDE,
        LOOP,
        BN,
    )
    found = (most ^ ((most >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    beyond = tl.where((up_to > half * (1.0 + 4.0 * EPS)) | (beyond == float("inf")), found, beyond)
    return found + (beyond - found) * 0.5


@triton.jit
def gap_around(
    y: tl.tensor, x: tl.tensor, w: tl.tensor, inside: tl.tensor, unit: tl.tensor, x_row: tl.tensor, w_row: tl.tensor,
    n: tl.tensor, longest: tl.tensor, inner: tl.tensor, xs0: tl.tensor, xs1: tl.tensor, ws0: tl.tensor, ws1: tl.tensor,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr,
    BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The weights below and above y, the greatest sample <= y and the least >= y."""
    wt, xt, there = w, x, inside
    below = tl.sum(tl.where(there & (xt < y), wt.to(tl.float32), 0.0), axis=1, keep_dims=True)
    above = tl.sum(tl.where(there & (xt > y), wt.to(tl.float32), 0.0), axis=1, keep_dims=True)
    low = tl.max(tl.where(there & (xt <= y), xt, float("-inf")), axis=1, keep_dims=True)
    high = tl.min(tl.where(there & (xt >= y), xt, float("inf")), axis=1, keep_dims=True)
    if LOOP:
        for at in range(BN, longest, BN):
            xt, wt, there = fetch(x_row, w_row, at, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
            xt = bounded(xt) * unit
            below += tl.sum(tl.where(there & (xt < y), wt.to(tl.float32), 0.0), axis=1, keep_dims=True)
            above += tl.sum(tl.where(there & (xt > y), wt.to(tl.float32), 0.0), axis=1, keep_dims=True)
            low = tl.maximum(low, tl.max(tl.where(there & (xt <= y), xt, float("-inf")), axis=1, keep_dims=True))
            high = tl.minimum(high, tl.min(tl.where(there & (xt >= y), xt, float("inf")), axis=1, keep_dims=True))
    return below, above, low, high


@triton.jit
def best_start(
    P: tl.constexpr, several: tl.tensor, low: tl.tensor, high: tl.tensor, mass: tl.tensor, live: tl.tensor,
    x: tl.tensor, w: tl.tensor, inside: tl.tensor, c: tl.tensor, over: tl.tensor,
    far: tl.tensor, shape: tl.tensor, unit: tl.tensor, x_row: tl.tensor, w_row: tl.tensor, n: tl.tensor,
    longest: tl.tensor, inner: tl.tensor, xs0: tl.tensor, xs1: tl.tensor, ws0: tl.tensor, ws1: tl.tensor,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A point in the basin of the global minimum: of a grid, or of the samples where these are fewer, the best; a
    second one that is apart from it and may hide a better minimum is compared after three steps of both."""
    cells = tl.where(several, tl.minimum((high - low) / (c * FINE), 1e9), 0.0)
    on_grid = cells <= n.to(tl.float32)
    count = tl.where(several, tl.minimum(cells.to(tl.int32) + 1, n), 0)
    most_starts = tl.max(tl.max(count, axis=1), axis=0)
    off_grid = somewhere(several & ~on_grid)
    u1, u2 = low, low
    v1 = tl.full([BR, 1], float("-inf"), tl.float32)
    v2 = v1
    for k in range(0, most_starts):
        u = tl.minimum(low + (k + 0.5) * (c * FINE), high)
        if off_grid:
            j = tl.minimum(tl.zeros([BR, 1], tl.int32) + k, tl.maximum(n - 1, 0))
            at_x = x_row + tap_offset(j, inner, xs0, xs1, FLAT, WIDE)
            sample = bounded(tl.load(at_x, mask=live & (n > 0), other=0.0).to(tl.float32)) * unit
            u = tl.where(on_grid, u, tl.minimum(tl.maximum(sample, low), high))
        v = scores(
            P, u, x, w, inside, over, far, shape, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0,
            ws1, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN,
        )  # fmt: skip
        tried = k < count
        near = tl.abs(u - u1) <= c * APART
        better = tried & (v > v1)
        second = tried & ~better & ~near & (v > v2)
        u2 = tl.where(better & ~near, u1, tl.where(second, u, u2))
        v2 = tl.where(better & ~near, v1, tl.where(second, v, v2))
        u1, v1 = tl.where(better, u, u1), tl.where(better, v, v1)
    rival = several & (v2 > float("-inf"))
    if P == "welsch":
        rival = rival & (v2 > v1 * CLOSE)
    else:
        rival = rival & (~on_grid | (v2 > v1 - mass * MISSED))
    if somewhere(rival):
        for _ in range(3):
            g, _, h, s = slopes(
                P, u1, x, w, inside, c, over, far, shape, unit, x_row, w_row, n, longest, inner, xs0, xs1,
                ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN,
            )  # fmt: skip
            u1 = tl.where(rival, u1 - g / tl.maximum(tl.where(h > 0.3 * s, h, s), 1e-37), u1)
            g, _, h, s = slopes(
                P, u2, x, w, inside, c, over, far, shape, unit, x_row, w_row, n, longest, inner, xs0, xs1,
                ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN,
            )  # fmt: skip
            u2 = tl.where(rival, u2 - g / tl.maximum(tl.where(h > 0.3 * s, h, s), 1e-37), u2)
        u1, u2 = tl.minimum(tl.maximum(u1, low), high), tl.minimum(tl.maximum(u2, low), high)
        v1 = scores(
            P, u1, x, w, inside, over, far, shape, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0,
            ws1, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN,
        )  # fmt: skip
        v2 = scores(
            P, u2, x, w, inside, over, far, shape, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0,
            ws1, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN,
        )  # fmt: skip
        u1 = tl.where(rival & (v2 > v1), u2, u1)
    return u1


@triton.jit
def local_bracket(
    P: tl.constexpr, several: tl.tensor, y: tl.tensor, low: tl.tensor, high: tl.tensor, x: tl.tensor, w: tl.tensor,
    inside: tl.tensor, c: tl.tensor, over: tl.tensor,
    far: tl.tensor, shape: tl.tensor, unit: tl.tensor, x_row: tl.tensor, w_row: tl.tensor, n: tl.tensor,
    longest: tl.tensor, inner: tl.tensor, xs0: tl.tensor, xs1: tl.tensor, ws0: tl.tensor, ws1: tl.tensor,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """From y downhill to the first of y ± c/2, c, 2c, 4c beyond which the objective rises, else to the row's end."""
    g, _, _, _ = slopes(
        P, y, x, w, inside, c, over, far, shape, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0, ws1,
        WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN,
    )  # fmt: skip
    down = tl.where(g > 0, -1.0, 1.0)
    beyond = y + down * c * 0.5
    crossed = (g == 0) | ~several
    k = 0
    while somewhere(~crossed) & (k < 4):
        g, _, _, _ = slopes(
            P, beyond, x, w, inside, c, over, far, shape, unit, x_row, w_row, n, longest, inner, xs0, xs1,
            ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN,
        )  # fmt: skip
        crossed = crossed | (g * down >= 0)
        wide = c * tl.exp2(tl.zeros([BR, 1], tl.float32) + k)
        beyond = tl.where(crossed, beyond, y + down * wide)
        k += 1
    beyond = tl.where(crossed, beyond, tl.where(down < 0, low, high))
    low, high = tl.where(several, tl.minimum(y, beyond), low), tl.where(several, tl.maximum(y, beyond), high)
    return low, high


@triton.jit
def newton(
    P: tl.constexpr, y: tl.tensor, low: tl.tensor, high: tl.tensor, mass: tl.tensor, broken: tl.tensor, x: tl.tensor,
    w: tl.tensor, inside: tl.tensor, c: tl.tensor, over: tl.tensor,
    far: tl.tensor, shape: tl.tensor, unit: tl.tensor, x_row: tl.tensor, w_row: tl.tensor, n: tl.tensor,
    longest: tl.tensor, inner: tl.tensor, xs0: tl.tensor, xs1: tl.tensor, ws0: tl.tensor, ws1: tl.tensor,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """y with Σ w·psi(y - x) = 0 inside [low, high], Σ w·psi' there, and the steps taken, as `pooling_solver.solve`."""
    taken = tl.zeros([BR, 1], tl.int32)
    done = broken
    nudged = done & False
    last = tl.full([BR, 1], float("inf"), tl.float32)
    before = last
    support = mass
    k = 0
    while somewhere(~done) & (k < STEPS):
        g, size, h, s = slopes(
            P, y, x, w, inside, c, over, far, shape, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0, ws1,
            WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN,
        )  # fmt: skip
        support = tl.where(done, support, h)
        low, high = tl.where(g < 0, y, low), tl.where(g > 0, y, high)
        slope = h
        if P == "welsch" or P == "barron":
            slope = tl.where(h > 1e-4 * s, h, s)
        target = y - g / tl.maximum(slope, 1e-37)
        accepted = (slope > 0) & (target >= low) & (target <= high) & (tl.abs(target - y) <= before * 0.5)
        target = tl.where(accepted, target, low * 0.5 + high * 0.5)
        moved, ulp = tl.abs(target - y), tl.abs(y) * EPS
        flat, short = ~(tl.abs(g) > size * EPS), ~(moved > 2.0 * ulp)
        small = flat | (short & ~(high - low > 4.0 * ulp))
        if P == "pseudo_huber":  # |psi''| <= 0.86/c: what a step of this length leaves is below rounding
            small = small | (accepted & (0.43 * mass * over * moved * moved <= size * 0.0625 * EPS))
        stuck = short & ~small
        close_by = y - tl.where(g > 0, 4.0 * ulp, -4.0 * ulp)
        close_by = tl.where(nudged | ~((close_by > low) & (close_by < high)), low * 0.5 + high * 0.5, close_by)
        target = tl.where(stuck, close_by, target)
        moved, accepted = tl.where(stuck, tl.abs(target - y), moved), accepted & ~stuck
        nudged = nudged | stuck
        y = tl.where(done | (small & ~accepted), y, target)
        done = done | small
        before, last = last, moved
        taken += tl.where(done, 0, 1)
        k += 1
    return y, support, taken


@triton.jit
def forward_kernel(
    x_pointer: tl.tensor, w_pointer: tl.tensor, c_pointer: tl.tensor, shape_pointer: tl.tensor, offsets: tl.tensor,
    y_pointer: tl.tensor, steps_pointer: tl.tensor, c_number: tl.tensor, shape_number: tl.tensor, rows: tl.tensor,
    taps: tl.tensor, inner: tl.tensor, r1: tl.tensor, r2: tl.tensor, r3: tl.tensor, x0: tl.tensor, x1: tl.tensor,
    x2: tl.tensor, x3: tl.tensor, xs0: tl.tensor, xs1: tl.tensor, w0: tl.tensor, w1: tl.tensor, w2: tl.tensor,
    w3: tl.tensor, ws0: tl.tensor, ws1: tl.tensor, c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor,
    a0: tl.tensor, a1: tl.tensor, a2: tl.tensor, a3: tl.tensor, columns: tl.tensor, P: tl.constexpr,
    WEIGHTED: tl.constexpr, C_TENSOR: tl.constexpr, SHAPE_TENSOR: tl.constexpr, RAGGED: tl.constexpr,
    EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr,
    BN: tl.constexpr,
) -> None:  # fmt: skip
    """y = argmin_u Σ w·phi(u - x; c) of BR rows, and how many steps each took."""
    number = row_numbers(WIDE, BR)
    live = number < rows
    row = tl.where(live, number, 0)
    if RAGGED:  # row = segment · columns + column
        begin = tl.load(offsets + row // columns).to(tl.int64)
        n = (tl.load(offsets + row // columns + 1).to(tl.int64) - begin).to(tl.int32)
        x_row = x_pointer + begin * columns + row % columns
        w_row = w_pointer + begin * columns + row % columns
    else:
        n = tl.zeros([BR, 1], tl.int32) + taps
        x_row = x_pointer + row_offset(row, r1, r2, r3, x0, x1, x2, x3)
        w_row = w_pointer + row_offset(row, r1, r2, r3, w0, w1, w2, w3)
    n = tl.where(live, n, 0)
    longest = tl.max(tl.max(n, axis=1), axis=0)
    c = tl.zeros([BR, 1], tl.float32) + c_number
    if C_TENSOR:
        c = tl.load(c_pointer + row_offset(row, r1, r2, r3, c0, c1, c2, c3)).to(tl.float32)
    shape = tl.zeros([BR, 1], tl.float32) + shape_number
    if SHAPE_TENSOR:
        shape = tl.load(shape_pointer + row_offset(row, r1, r2, r3, a0, a1, a2, a3)).to(tl.float32)
    shape = tl.minimum(tl.maximum(shape, -1e15), 1e15)

    x, w, inside = fetch(x_row, w_row, 0, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
    low, high, total, mass = measured(x, w, inside, WEIGHTED)
    if LOOP:
        for at in range(BN, longest, BN):
            xt, wt, there = fetch(x_row, w_row, at, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
            low1, high1, total1, mass1 = measured(xt, wt, there, WEIGHTED)
            low, high = tl.minimum(low, low1), tl.maximum(high, high1)
            total, mass = total + total1, mass + mass1
    if not WEIGHTED:
        mass = n.to(tl.float32)
    broken = ~(mass > 0)
    if somewhere(total != total):  # a NaN, or infinite sums of both signs
        broken = broken | holds_nan(x)
        if LOOP:
            for at in range(BN, longest, BN):
                xt, _, _ = fetch(x_row, w_row, at, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
                broken = broken | holds_nan(xt)
    if P != "quadratic" and P != "absolute":
        broken = broken | ~(c > 0)
    endless = (low == float("-inf")) | (high == float("inf"))
    odd = (low < -HUGEST) | (high > HUGEST)
    low, high = tl.minimum(tl.maximum(low, -HUGEST), HUGEST), tl.minimum(tl.maximum(high, -HUGEST), HUGEST)
    large = tl.maximum(tl.abs(low), tl.abs(high)) > 1e18
    if P != "quadratic":
        large = large & (c > 1e22)
    unit = tl.where(large & (P != "absolute"), 8.881784197001252e-16, 1.0)
    if somewhere(odd | large):
        x = bounded(x) * unit
    low, high, c = low * unit, high * unit, c * unit
    c = tl.minimum(tl.maximum(c, 1e-36), 1e30)
    over, far = 1.0 / c, tl.minimum(1e18 * c, 1.6e38)
    if P == "welsch":
        far = tl.minimum(1e4 * c, 1.6e38)
    if P == "barron":
        over = 1.0 / (c * tl.sqrt(tl.maximum(tl.abs(shape - 2.0), 1e-6)))
    safe = tl.where(broken, 1.0, mass)
    y = tl.minimum(tl.maximum(total * unit / safe, low), high)
    y = tl.where(broken | ~(y == y), 0.0, y)
    taken = tl.zeros([BR, 1], tl.int32)

    if P == "quadratic":
        z = x - y
        moved = tl.sum(z * w if WEIGHTED else tl.where(inside, z, 0.0), axis=1, keep_dims=True)
        if LOOP:
            for at in range(BN, longest, BN):
                xt, wt, there = fetch(x_row, w_row, at, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
                z = bounded(xt) * unit - y
                moved += tl.sum(z * wt if WEIGHTED else tl.where(there, z, 0.0), axis=1, keep_dims=True)
        y = tl.where(endless, total, (y + moved / safe) / unit)
    elif P == "absolute":
        y = median(
            low, high, mass, broken, x, w, inside, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0, ws1, WEIGHTED,
            EVEN, FLAT, WIDE, LOOP, BN,
        )  # fmt: skip
    else:
        if P != "welsch":
            vast = ~broken & ((high - low) * over > 1e12)  # halving such a bracket would take too many steps
            if somewhere(vast):
                middle = median(
                    low, high, mass, broken, x, w, inside, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0, ws1,
                    WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN,
                )  # fmt: skip
                y = tl.where(vast, middle, y)
        if P == "welsch" or P == "barron":
            several = ~broken & (high > low)
            if P == "barron":
                several = several & (shape < 1.0)
            if somewhere(several):
                start = best_start(
                    P, several, low, high, mass, live,
                    x, w, inside, c, over, far, shape, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0, ws1,
                    WEIGHTED,
                    EVEN, FLAT, WIDE, LOOP, BR, BN,
                )  # fmt: skip
                y = tl.where(several, start, y)
                low, high = local_bracket(
                    P, several, y, low, high,
                    x, w, inside, c, over, far, shape, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0, ws1,
                    WEIGHTED,
                    EVEN, FLAT, WIDE, LOOP, BR, BN,
                )  # fmt: skip
        y, support, taken = newton(
            P, y, low, high, mass, broken,
            x, w, inside, c, over, far, shape, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0, ws1, WEIGHTED,
            EVEN, FLAT, WIDE, LOOP, BR, BN,
        )  # fmt: skip
        if P == "huber":  # without an inlier every point c away from both middle samples is a minimum: their middle
            lonely = ~broken & (support <= 0.5001 * mass)
            if somewhere(lonely):
                below, above, left, right = gap_around(
                    y, x, w, inside, unit, x_row, w_row, n, longest, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT,
                    WIDE,
                    LOOP, BN,
                )  # fmt: skip
                even = tl.abs(below - above) <= (below + above) * 8.0 * EPS
                lonely = lonely & even & (left < y) & (right > y) & (right - left > 2.0 * c)
                y = tl.where(lonely, left + (right - left) * 0.5, y)
        y = y / unit
    if P != "quadratic":
        y = tl.where(y > HUGEST / 2, float("inf"), tl.where(y < -HUGEST / 2, float("-inf"), y))
    y = tl.where(broken, float("nan"), y)
    tl.store(y_pointer + number, y, mask=live)
    tl.store(steps_pointer + number, taken, mask=live)
