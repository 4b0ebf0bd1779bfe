"""The Triton kernel of robust pooling: a program reads its rows once, solves them in registers, writes a number each.

The mathematics is that of `hyperball.kernels.pooling.rows` and `pooling.c`: convex penalties by Newton's method inside
a bracket, from the mean; others by the same from the two best points of a grid, or of the samples where these are
fewer, welsch by `peaks`. A row without weights has its missing samples at y itself, where psi is 0 and psi' and s are
1, so that their number is subtracted and no product is formed. `samples` says what the tuples hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.pooling.peaks import highest_peak
from hyperball.kernels.triton.pooling.samples import (
    deviation,
    fetch,
    gap_around,
    holds_nan,
    law_of,
    measured,
    parameter,
    place_rows,
    scores,
)
from hyperball.kernels.triton.pooling.search import best_starts, local_bracket, median, newton
from hyperball.kernels.triton.pooling.terms import bounded
from hyperball.kernels.triton.row_access import row_numbers, somewhere

EPS = tl.constexpr(1.1920928955078125e-07)
HUGEST = tl.constexpr(3.4028234663852886e38 / 8)


@triton.jit
def survey(
    tile: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, LOOP: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`measured` of whole rows, and whether a row has no weight or holds a NaN."""
    n, longest = place[2], place[3]
    low, high, total, mass = measured(tile, WEIGHTED)
    if LOOP:
        for at in range(BN, longest, BN):
            low1, high1, total1, mass1 = measured(fetch(place, at, WEIGHTED, EVEN, FLAT, WIDE, BN), WEIGHTED)
            low, high = tl.minimum(low, low1), tl.maximum(high, high1)
            total, mass = total + total1, mass + mass1
    if not WEIGHTED:
        mass = n.to(tl.float32)
    broken = ~(mass > 0)
    if somewhere(total != total):  # a NaN, or infinite sums of both signs
        broken = broken | holds_nan(tile[0])
        if LOOP:
            for at in range(BN, longest, BN):
                xt, _, _ = fetch(place, at, WEIGHTED, EVEN, FLAT, WIDE, BN)
                broken = broken | holds_nan(xt)
    return low, high, total, mass, broken


@triton.jit
def middle_of_gap(
    c: tl.tensor, y: tl.tensor, support: tl.tensor, mass: tl.tensor, broken: tl.tensor, tile: tl.tensor,
    unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, LOOP: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """huber's y: without an inlier every point c away from both middle samples is a minimum, so their middle."""
    lonely = ~broken & (support <= 0.5001 * mass)
    if somewhere(lonely):
        below, above, left, right = gap_around(y, tile, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        even = tl.abs(below - above) <= (below + above) * 8.0 * EPS
        lonely = lonely & even & (left < y) & (right > y) & (right - left > 2.0 * c)
        y = tl.where(lonely, left + (right - left) * 0.5, y)
    return y


@triton.jit
def against_rival(
    P: tl.constexpr, y: tl.tensor, taken: tl.tensor, second: tl.tensor, rival: tl.tensor, low: tl.tensor,
    high: tl.tensor, mass: tl.tensor, tile: tl.tensor, law: tl.tensor, unit: tl.tensor, place: tl.tensor,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """y and its steps, or the minimum that Newton's method reaches from the second start of a row with a rival."""
    if somewhere(rival):
        lower, upper = local_bracket(
            P, rival, second, low, high, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN
        )
        other, _, more = newton(
            P, second, lower, upper, mass, ~rival, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN
        )
        here = scores(P, y, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        there = scores(P, other, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        better = rival & (there > here)
        y, taken = tl.where(better, other, y), tl.where(better, more, taken)
    return y, taken


@triton.jit
def solved(
    P: tl.constexpr, y: tl.tensor, low: tl.tensor, high: tl.tensor, mass: tl.tensor, broken: tl.tensor,
    live: tl.tensor, tile: tl.tensor, law: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr,
    EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr,
    BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The center of every row by Newton's method from y, or the better of those from two starts; and its steps."""
    c, over, _far, shape = law
    vast = ~broken & ((high - low) * over > 1e12)  # halving such a bracket would take too many steps
    if somewhere(vast):
        middle = median(low, high, mass, broken, tile, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        y = tl.where(vast, middle, y)
    second, rival, lower, upper = y, broken & False, low, high
    if P == "barron":
        several = ~broken & (high > low) & (shape < 1.0)
        if somewhere(several):
            first, second, rival = best_starts(
                several, low, high, mass, live, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN
            )
            y = tl.where(several, first, y)
            lower, upper = local_bracket(
                P, several, y, low, high, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN
            )
    y, support, taken = newton(
        P, y, lower, upper, mass, broken, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN
    )
    if P == "barron":
        y, taken = against_rival(
            P, y, taken, second, rival, low, high, mass, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR,
            BN,
        )  # fmt: skip
    if P == "huber":
        y = middle_of_gap(c, y, support, mass, broken, tile, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
    return y, taken


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
    sizes = (r1, r2, r3)
    place = place_rows(
        x_pointer, w_pointer, offsets, row, live, taps, inner, sizes, (x0, x1, x2, x3), (w0, w1, w2, w3), (xs0, xs1),
        (ws0, ws1), columns, RAGGED, BR,
    )  # fmt: skip
    c = parameter(c_pointer, c_number, row, sizes, (c0, c1, c2, c3), C_TENSOR, BR)
    shape = parameter(shape_pointer, shape_number, row, sizes, (a0, a1, a2, a3), SHAPE_TENSOR, BR)
    shape = tl.minimum(tl.maximum(shape, -1e15), 1e15)

    x, w, inside = fetch(place, 0, WEIGHTED, EVEN, FLAT, WIDE, BN)
    low, high, total, mass, broken = survey((x, w, inside), place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
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
    low, high = low * unit, high * unit
    tile, law = (x, w, inside), law_of(P, c * unit, shape, 1e30)
    safe = tl.where(broken, 1.0, mass)
    y = tl.minimum(tl.maximum(total * unit / safe, low), high)
    y = tl.where(broken | ~(y == y), 0.0, y)
    taken = tl.zeros([BR, 1], tl.int32)
    if P == "quadratic":
        moved = deviation(y, tile, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        y = tl.where(endless, total, (y + moved / safe) / unit)
    elif P == "absolute":
        y = median(low, high, mass, broken, tile, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
    elif P == "welsch":
        y, taken = highest_peak(
            low, high, mass, broken, live, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN
        )
        y = y / unit
    else:
        y, taken = solved(
            P, y, low, high, mass, broken, live, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN
        )
        y = y / unit
    if P != "quadratic":
        y = tl.where(y > HUGEST / 2, float("inf"), tl.where(y < -HUGEST / 2, float("-inf"), y))
    y = tl.where(broken, float("nan"), y)
    tl.store(y_pointer + number, y, mask=live)
    tl.store(steps_pointer + number, taken, mask=live)
