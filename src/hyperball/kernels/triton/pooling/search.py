"""How the kernels of robust pooling find a row's center: by bisecting bits, by a grid of starts, by Newton's method.

See `samples` for the tuples. A name that trades its value with another inside a loop must not begin as that
other one: Triton takes a name whose value the loop's body leaves as it began for a constant of the loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.pooling.samples import fetch_scaled, row_sum, sample_at, scores, slopes
from hyperball.kernels.triton.row_access import somewhere

EPS = tl.constexpr(1.1920928955078125e-07)
STEPS = tl.constexpr(100)
FINE = tl.constexpr(1.0)  # of c: how far apart the points of barron's grid lie
MISSED = tl.constexpr(0.125)  # of Σ w: by how much a score grows at most over half that distance, as psi' <= 1
APART = tl.constexpr(1.5)  # of c: two starts of barron's that are to be followed are at least so far apart


@triton.jit
def order_key(x: tl.tensor) -> tl.tensor:
    """The bits of a number as an integer of the same order; its own inverse on bits."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def split_by_key(key: tl.tensor, tile: tl.tensor) -> tl.tensor:
    """Of one tile the weight of the samples whose key is at most this one, and the least sample beyond."""
    x, w, inside = tile
    under = inside & (order_key(x) <= key)
    beyond = tl.min(tl.where(inside & ~under, x, float("inf")), axis=1, keep_dims=True)
    return row_sum(tl.where(under, w.to(tl.float32), 0.0)), beyond


@triton.jit
def weight_up_to(
    key: tl.tensor, tile: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`split_by_key` of whole rows."""
    mass, beyond = split_by_key(key, tile)
    if LOOP:
        for at in range(BN, place[3], BN):
            mass1, beyond1 = split_by_key(key, fetch_scaled(place, at, unit, WEIGHTED, EVEN, FLAT, WIDE, BN))
            mass, beyond = mass + mass1, tl.minimum(beyond, beyond1)
    return mass, beyond


@triton.jit
def median(
    low: tl.tensor, high: tl.tensor, mass: tl.tensor, broken: tl.tensor, tile: tl.tensor, unit: tl.tensor,
    place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
    LOOP: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The mean of the two middle samples of rows between low and high, by bisecting the bits of the answer."""
    least, most = order_key(low), order_key(high)
    half = mass * 0.5
    while somewhere((least < most) & ~broken):
        middle = (least >> 1) + (most >> 1) + (least & most & 1)
        up_to, _ = weight_up_to(middle, tile, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        enough = up_to * (1.0 + 4.0 * EPS) >= half
        moving = (least < most) & ~broken
        least = tl.where(moving & ~enough, middle + 1, least)
        most = tl.where(enough & moving, middle, most)
    up_to, beyond = weight_up_to(most, tile, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
    found = (most ^ ((most >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    beyond = tl.where((up_to > half * (1.0 + 4.0 * EPS)) | (beyond == float("inf")), found, beyond)
    return found + (beyond - found) * 0.5


@triton.jit
def start_at(
    k: tl.tensor, on_grid: tl.tensor, off_grid: tl.tensor, width: tl.tensor, low: tl.tensor, high: tl.tensor,
    live: tl.tensor, unit: tl.tensor, place: tl.tensor, FLAT: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The middle of cell k of the grid, or sample k."""
    u = tl.minimum(low + (k + 0.5) * width, high)
    if off_grid:
        sample = sample_at(k, live, unit, place, FLAT, WIDE, BR)
        u = tl.where(on_grid, u, tl.minimum(tl.maximum(sample, low), high))
    return u


@triton.jit
def two_best(
    several: tl.tensor, on_grid: tl.tensor, count: tl.tensor, low: tl.tensor, high: tl.tensor, live: tl.tensor,
    tile: tl.tensor, law: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Of the first `count` starts the best and the best apart from it, and their scores."""
    width, apart = law[0] * FINE, law[0] * APART
    off_grid = somewhere(several & ~on_grid)
    u1, u2 = low, low
    v1 = tl.full([BR, 1], float("-inf"), tl.float32)
    v2 = tl.full([BR, 1], float("-inf"), tl.float32)
    for k in range(0, tl.max(tl.max(count, axis=1), axis=0)):
        u = start_at(k, on_grid, off_grid, width, low, high, live, unit, place, FLAT, WIDE, BR)
        v = scores("barron", u, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        tried = k < count
        near = tl.abs(u - u1) <= apart
        better = tried & (v > v1)
        handed = better & ~near
        second = tried & ~better & ~near & (v > v2)
        u2 = tl.where(handed, u1, tl.where(second, u, u2))
        v2 = tl.where(handed, v1, tl.where(second, v, v2))
        u1, v1 = tl.where(better, u, u1), tl.where(better, v, v1)
    return u1, v1, u2, v2


@triton.jit
def best_starts(
    several: tl.tensor, low: tl.tensor, high: tl.tensor, mass: tl.tensor, live: tl.tensor, tile: tl.tensor,
    law: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Of a grid, or of the samples where these are fewer, barron's best start, a second one that is apart from it, and
    whether that may lead to a better minimum."""
    n = place[2]
    cells = tl.where(several, tl.minimum((high - low) / (law[0] * FINE), 1e9), 0.0)
    on_grid = cells <= n.to(tl.float32)
    count = tl.where(several, tl.minimum(cells.to(tl.int32) + 1, n), 0)
    u1, v1, u2, v2 = two_best(
        several, on_grid, count, low, high, live, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN
    )
    return u1, u2, several & (v2 > float("-inf")) & (~on_grid | (v2 > v1 - mass * MISSED))


@triton.jit
def local_bracket(
    P: tl.constexpr, several: tl.tensor, y: tl.tensor, low: tl.tensor, high: tl.tensor, tile: tl.tensor,
    law: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """From y downhill to the first of y ± c/2, c, 2c, 4c beyond which the objective rises, else to the row's end."""
    c = law[0]
    g, _, _, _ = slopes(P, y, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
    down = tl.where(g > 0, -1.0, 1.0)
    beyond = y + down * c * 0.5
    crossed = (g == 0) | ~several
    k = 0
    while somewhere(~crossed) & (k < 4):
        g, _, _, _ = slopes(P, beyond, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        crossed = crossed | (g * down >= 0)
        wide = c * tl.exp2(tl.zeros([BR, 1], tl.float32) + k)
        beyond = tl.where(crossed, beyond, y + down * wide)
        k += 1
    beyond = tl.where(crossed, beyond, tl.where(down < 0, low, high))
    low, high = tl.where(several, tl.minimum(y, beyond), low), tl.where(several, tl.maximum(y, beyond), high)
    return low, high


@triton.jit
def newton(
    P: tl.constexpr, y: tl.tensor, low: tl.tensor, high: tl.tensor, mass: tl.tensor, broken: tl.tensor,
    tile: tl.tensor, law: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """y with Σ w·psi(y - x) = 0 inside [low, high], Σ w·psi' there, and the steps taken, as `pooling_solver.solve`."""
    taken = tl.zeros([BR, 1], tl.int32)
    done = broken
    nudged = done & False
    last = tl.full([BR, 1], float("inf"), tl.float32)
    before = tl.full([BR, 1], float("inf"), tl.float32)
    support = mass
    k = 0
    while somewhere(~done) & (k < STEPS):
        g, size, h, s = slopes(P, y, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        support = tl.where(done, support, h)
        low, high = tl.where(g < 0, y, low), tl.where(g > 0, y, high)
        slope = h
        if P == "barron":
            slope = tl.where(h > 1e-4 * s, h, s)
        target = y - g / tl.maximum(slope, 1e-37)
        accepted = (slope > 0) & (target >= low) & (target <= high) & (tl.abs(target - y) <= before * 0.5)
        target = tl.where(accepted, target, low * 0.5 + high * 0.5)
        moved, ulp = tl.abs(target - y), tl.abs(y) * EPS
        flat, short = ~(tl.abs(g) > size * EPS), ~(moved > 2.0 * ulp)
        small = flat | (short & ~(high - low > 4.0 * ulp))
        if P == "pseudo_huber":  # |psi''| <= 0.86/c: what a step of this length leaves is below rounding
            small = small | (accepted & (0.43 * mass * law[1] * moved * moved <= size * 0.0625 * EPS))
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
