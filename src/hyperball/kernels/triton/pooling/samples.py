"""How the kernels of robust pooling find and read their rows, and sums over whole rows.

Tiles are [rows, samples]; what belongs to a row is [rows, 1]. Functions pass three tuples on:

- `place`: where the samples lie: (x's and the weights' pointers of every row, how many samples a row has, how many the
  longest, the size of the inner tap level, the strides of both tap levels for x and for the weights);
- `tile`: the first samples of every row, their weights, and which of them exist;
- `law`: c, its inverse as a penalty needs it, the residual beyond which psi is held, and the shape.

A row that does not fit registers is read again, tile after tile, by every sum (LOOP).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.pooling.terms import bounded, score, terms
from hyperball.kernels.triton.row_access import row_offset, tap_offset


@triton.jit
def start_of(
    offsets: tl.tensor, row: tl.tensor, sizes: tl.tensor, strides: tl.tensor, columns: tl.tensor, RAGGED: tl.constexpr
) -> tl.tensor:
    """Where a row begins, in 64 bits; a ragged one is segment · columns + column."""
    if RAGGED:
        start = tl.load(offsets + row // columns).to(tl.int64) * columns + row % columns
    else:
        start = row_offset(row, sizes, strides)
    return start


@triton.jit
def place_rows(
    x_pointer: tl.tensor, w_pointer: tl.tensor, offsets: tl.tensor, row: tl.tensor, live: tl.tensor, taps: tl.tensor,
    inner: tl.tensor, sizes: tl.tensor, x_at: tl.tensor, w_at: tl.tensor, x_taps: tl.tensor, w_taps: tl.tensor,
    columns: tl.tensor, RAGGED: tl.constexpr, BR: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`place` of these rows; a row that is not there has no samples."""
    if RAGGED:
        segment = offsets + row // columns
        n = (tl.load(segment + 1).to(tl.int64) - tl.load(segment).to(tl.int64)).to(tl.int32)
    else:
        n = tl.zeros([BR, 1], tl.int32) + taps
    n = tl.where(live, n, 0)
    longest = tl.max(tl.max(n, axis=1), axis=0)
    x_row = x_pointer + start_of(offsets, row, sizes, x_at, columns, RAGGED)
    w_row = w_pointer + start_of(offsets, row, sizes, w_at, columns, RAGGED)
    return x_row, w_row, n, longest, inner, x_taps, w_taps


@triton.jit
def parameter(
    pointer: tl.tensor, number: tl.tensor, row: tl.tensor, sizes: tl.tensor, strides: tl.tensor, GIVEN: tl.constexpr,
    BR: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A parameter of every row: a number, or a tensor [*rows]."""
    if GIVEN:
        held = tl.load(pointer + row_offset(row, sizes, strides)).to(tl.float32)
    else:
        held = tl.zeros([BR, 1], tl.float32) + number
    return held


@triton.jit
def law_of(P: tl.constexpr, c: tl.tensor, shape: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    """`law`, with c held between 1e-36 and MOST."""
    c = tl.minimum(tl.maximum(c, 1e-36), MOST)
    over, far = 1.0 / c, tl.minimum(1e18 * c, 1.6e38)
    if P == "welsch":
        far = tl.minimum(1e4 * c, 1.6e38)
    if P == "barron":
        over = 1.0 / (c * tl.sqrt(tl.maximum(tl.abs(shape - 2.0), 1e-6)))
    return c, over, far, shape


@triton.jit
def fetch(
    place: tl.tensor, at: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Samples at, at + 1, … of every row as they are, their weights (0 where one is absent), and which exist."""
    x_row, w_row, n, _longest, inner, x_taps, w_taps = place
    t = at + tl.arange(0, BN)[None, :]
    if EVEN:
        inside = tl.full([x_row.shape[0], BN], 1, tl.int1)
        x = tl.load(x_row + tap_offset(t, inner, x_taps, FLAT, WIDE)).to(tl.float32)
    else:
        inside = t < n
        x = tl.load(x_row + tap_offset(t, inner, x_taps, FLAT, WIDE), mask=inside, other=0.0).to(tl.float32)
    w = inside
    if WEIGHTED:
        held = tl.load(w_row + tap_offset(t, inner, w_taps, FLAT, WIDE), mask=inside, other=0.0).to(tl.float32)
        w = tl.where(held > 0, held, 0.0)
        inside = held > 0
        x = tl.where(inside, x, 0.0)
    return x, w, inside


@triton.jit
def sample_at(
    k: tl.tensor, live: tl.tensor, unit: tl.tensor, place: tl.tensor, FLAT: tl.constexpr, WIDE: tl.constexpr,
    BR: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sample k of every row, or its last."""
    x_row, _, n, _, inner, x_taps, _ = place
    j = tl.minimum(tl.zeros([BR, 1], tl.int32) + k, tl.maximum(n - 1, 0))
    at_x = x_row + tap_offset(j, inner, x_taps, FLAT, WIDE)
    return bounded(tl.load(at_x, mask=live & (n > 0), other=0.0).to(tl.float32)) * unit


@triton.jit
def fetch_scaled(
    place: tl.tensor, at: tl.tensor, unit: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`fetch` with ±inf at a bound, in units of the row's."""
    x, w, inside = fetch(place, at, WEIGHTED, EVEN, FLAT, WIDE, BN)
    return bounded(x) * unit, w, inside


@triton.jit
def row_sum(v: tl.tensor) -> tl.tensor:
    return tl.sum(v, axis=1, keep_dims=True)


@triton.jit
def weighted(v: tl.tensor, w: tl.tensor, inside: tl.tensor, WEIGHTED: tl.constexpr) -> tl.tensor:
    """w·v, 0 where there is no sample."""
    return v * w if WEIGHTED else tl.where(inside, v, 0.0)


@triton.jit
def measured(tile: tl.tensor, WEIGHTED: tl.constexpr) -> tl.tensor:
    """The least and greatest sample, Σ w·x and Σ w."""
    x, w, inside = tile
    low = tl.min(tl.where(inside, x, float("inf")), axis=1, keep_dims=True)
    high = tl.max(tl.where(inside, x, float("-inf")), axis=1, keep_dims=True)
    mass = 0.0
    if WEIGHTED:
        mass = row_sum(w)
    return low, high, row_sum(x * w if WEIGHTED else x), mass


@triton.jit
def holds_nan(x: tl.tensor) -> tl.tensor:
    return tl.max((x != x).to(tl.int32), axis=1, keep_dims=True) > 0


@triton.jit
def totals(
    P: tl.constexpr, y: tl.tensor, tile: tl.tensor, law: tl.tensor, left: tl.tensor, WEIGHTED: tl.constexpr,
    BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Σ w·(psi, |psi|, psi', s) of one tile at y; `left` says how many samples there are from here on."""
    x, w, inside = tile
    c, over, far, shape = law
    z = y - x
    if not WEIGHTED:
        z = tl.where(inside, z, 0.0)
    psi, h, s = terms(P, z, c, over, far, shape)
    if WEIGHTED:
        psi, h, s = psi * w, h * w, s * w
    absent = 0.0
    if not WEIGHTED:
        absent = (BN - tl.minimum(tl.maximum(left, 0), BN)).to(tl.float32)
    return row_sum(psi), row_sum(tl.abs(psi)), row_sum(h) - absent, row_sum(s) - absent


@triton.jit
def slopes(
    P: tl.constexpr, y: tl.tensor, tile: tl.tensor, law: tl.tensor, unit: tl.tensor, place: tl.tensor,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr,
    BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`totals` of whole rows: those in registers, or read again tile by tile."""
    n, longest = place[2], place[3]
    g, size, h, s = totals(P, y, tile, law, n, WEIGHTED, BN)
    if LOOP:
        for at in range(BN, longest, BN):
            part = fetch_scaled(place, at, unit, WEIGHTED, EVEN, FLAT, WIDE, BN)
            g1, size1, h1, s1 = totals(P, y, part, law, n - at, WEIGHTED, BN)
            g, size, h, s = g + g1, size + size1, h + h1, s + s1
    return g, size, h, s


@triton.jit
def scores(
    P: tl.constexpr, y: tl.tensor, tile: tl.tensor, law: tl.tensor, unit: tl.tensor, place: tl.tensor,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr,
    BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What the global minimum has most of, of whole rows: Σ w·(1 - phi/c²), welsch's Σ w·exp(-z²/(2c²))."""
    x, w, inside = tile
    _c, over, far, shape = law
    found = row_sum(weighted(score(P, y - x, over, far, shape), w, inside, WEIGHTED))
    if LOOP:
        for at in range(BN, place[3], BN):
            xt, wt, there = fetch_scaled(place, at, unit, WEIGHTED, EVEN, FLAT, WIDE, BN)
            found += row_sum(weighted(score(P, y - xt, over, far, shape), wt, there, WEIGHTED))
    return found


@triton.jit
def deviation(
    y: tl.tensor, tile: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Σ w·(x - y) of whole rows."""
    x, w, inside = tile
    moved = row_sum(weighted(x - y, w, inside, WEIGHTED))
    if LOOP:
        for at in range(BN, place[3], BN):
            xt, wt, there = fetch_scaled(place, at, unit, WEIGHTED, EVEN, FLAT, WIDE, BN)
            moved += row_sum(weighted(xt - y, wt, there, WEIGHTED))
    return moved


@triton.jit
def split_at(y: tl.tensor, tile: tl.tensor) -> tl.tensor:
    """Of one tile the weights below and above y, the greatest sample <= y and the least >= y."""
    x, w, inside = tile
    below = row_sum(tl.where(inside & (x < y), w.to(tl.float32), 0.0))
    above = row_sum(tl.where(inside & (x > y), w.to(tl.float32), 0.0))
    low = tl.max(tl.where(inside & (x <= y), x, float("-inf")), axis=1, keep_dims=True)
    high = tl.min(tl.where(inside & (x >= y), x, float("inf")), axis=1, keep_dims=True)
    return below, above, low, high


@triton.jit
def gap_around(
    y: tl.tensor, tile: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`split_at` of whole rows."""
    below, above, low, high = split_at(y, tile)
    if LOOP:
        for at in range(BN, place[3], BN):
            below1, above1, low1, high1 = split_at(y, fetch_scaled(place, at, unit, WEIGHTED, EVEN, FLAT, WIDE, BN))
            below, above = below + below1, above + above1
            low, high = tl.maximum(low, low1), tl.minimum(high, high1)
    return below, above, low, high
