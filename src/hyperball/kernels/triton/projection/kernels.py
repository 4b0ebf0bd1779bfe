"""Triton kernels of projections: a program reads its rows once, finds the threshold in registers and writes y.

Tiles are [rows, samples]; what belongs to a row is [rows, 1]. The formulas are those of
`hyperball.kernels.projection.surfaces`; a row that is not finite is NaN for L1, L2 and the simplex, and so is one whose
radius is not > 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.row_access import row_numbers, row_offset, somewhere, tap_offset

ROUNDS = tl.constexpr(40)  # each divides the mass above 1 times the support by 4 at least: 8,192² 2²⁴ ask for 25
KINDS = ("l1_ball", "l1_sphere", "l2_ball", "l2_sphere", "linf_ball", "linf_sphere", "simplex")


@triton.jit
def sign_of(x: tl.tensor) -> tl.tensor:
    """sgn(x) with sgn(0) = +1."""
    return tl.where(x < 0, -1.0, 1.0)


@triton.jit
def fetch(
    pointer: tl.tensor, row: tl.tensor, inside: tl.tensor, t: tl.tensor, inner: tl.tensor, sizes: tl.tensor,
    row_strides: tl.tensor, tap_strides: tl.tensor, FLAT: tl.constexpr, WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The rows in float32, 0 where there is no sample."""
    where = row_offset(row, sizes, row_strides) + tap_offset(t, inner, tap_strides, FLAT, WIDE)
    return tl.load(pointer + where, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def excess(size: tl.tensor, inside: tl.tensor, r: tl.tensor) -> tl.tensor:
    """max((x - max x)/r, -2), -2 where there is no sample, and max x."""
    top = tl.max(tl.where(inside, size, float("-inf")), axis=1, keep_dims=True)
    return tl.where(inside, tl.maximum(size - top, -2.0 * r) / r, -2.0), top


@triton.jit
def threshold(c: tl.tensor, bad: tl.tensor) -> tl.tensor:
    """theta near Σ max(c + theta, 0) = 1 from the right, and the last step of Newton's method from there."""
    theta = tl.full([c.shape[0], 1], 1.0, tl.float32)
    step = tl.zeros([c.shape[0], 1], tl.float32)
    moving = ~bad
    k = 0
    while somewhere(moving) & (k < ROUNDS):
        theta = tl.where(moving, theta - step, theta)
        reach = c + theta
        total = tl.sum(tl.maximum(reach, 0.0), axis=1, keep_dims=True)
        count = tl.sum(tl.where(reach > 0, 1.0, 0.0), axis=1, keep_dims=True)
        following = (total - 1.0) / tl.maximum(count, 1.0)
        step = tl.where(moving, following, step)
        moving = moving & (theta - step < theta)
        k += 1
    return theta, step


@triton.jit
def scaled_length(x: tl.tensor, inside: tl.tensor, taps: tl.tensor) -> tl.tensor:
    """x/‖x‖, 1/sqrt(n) everywhere for the zero row; and ‖x‖."""
    largest = tl.max(tl.abs(x), axis=1, keep_dims=True)
    zero = largest == 0
    u = tl.where(zero, tl.where(inside, 1.0, 0.0), x / tl.where(zero, 1.0, largest))
    length = tl.sqrt(tl.sum(u * u, axis=1, keep_dims=True))
    return u / tl.maximum(length, 1e-30), largest * length


@triton.jit
def first_largest(x: tl.tensor, inside: tl.tensor, t: tl.tensor) -> tl.tensor:
    """The index of the first largest |x|; of the first NaN, if there is one."""
    wrong = inside & (x != x)
    some = tl.max(wrong.to(tl.int32), axis=1, keep_dims=True) > 0
    size = tl.where(inside & ~wrong, tl.abs(x), -1.0)
    top = tl.max(size, axis=1, keep_dims=True)
    chosen = tl.where(some, wrong, size == top)
    return tl.min(tl.where(chosen, t, 2147483647), axis=1, keep_dims=True)


@triton.jit
def forward_kernel(
    x_pointer: tl.tensor, r_pointer: tl.tensor, y_pointer: tl.tensor, cut_pointer: tl.tensor, rows: tl.tensor,
    taps: tl.tensor, inner: tl.tensor, r1: tl.tensor, r2: tl.tensor, r3: tl.tensor, x0: tl.tensor, x1: tl.tensor,
    x2: tl.tensor, x3: tl.tensor, xs0: tl.tensor, xs1: tl.tensor, y0: tl.tensor, y1: tl.tensor, y2: tl.tensor,
    y3: tl.tensor, ys0: tl.tensor, ys1: tl.tensor, c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor,
    KIND: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """y = the nearest point of the set, and (theta, step) of every row for L1 and the simplex."""
    number = row_numbers(WIDE, BR)
    live = number < rows
    row = tl.where(live, number, 0)
    t = tl.arange(0, BN)[None, :]
    inside, sizes = live & (t < taps), (r1, r2, r3)
    x = fetch(x_pointer, row, inside, t, inner, sizes, (x0, x1, x2, x3), (xs0, xs1), FLAT, WIDE)
    r = tl.load(r_pointer + row_offset(row, sizes, (c0, c1, c2, c3))).to(tl.float32)
    if KIND == "linf_ball" or KIND == "linf_sphere":
        y = tl.where(x > r, r, tl.where(x < -r, -r, x))
        if KIND == "linf_sphere":
            y = tl.where(t == first_largest(x, inside, t), tl.where(x == x, r * sign_of(x), x), y)
    else:
        odd = tl.sum(tl.where(x == x, 0.0, 1.0), axis=1, keep_dims=True) > 0
        if KIND == "l2_ball" or KIND == "l2_sphere":
            odd = odd | (tl.max(tl.abs(x), axis=1, keep_dims=True) == float("inf"))
            u, length = scaled_length(x, inside, taps)
            y = r * u
            if KIND == "l2_ball":
                y = tl.where(length <= r, x, y)
        else:
            size = x
            if KIND != "simplex":
                size = tl.abs(x)
            c, top = excess(size, inside, r)
            odd = odd | ~(tl.abs(top) < float("inf"))
            theta, step = threshold(c, odd | ~live | ~(r > 0))
            y = r * tl.maximum(c + theta - step, 0.0)
            if KIND != "simplex":
                y = y * sign_of(x)
            if KIND == "l1_ball":
                y = tl.where(tl.sum(size, axis=1, keep_dims=True) <= r, x, y)
            tl.store(cut_pointer + 2 * number, theta, mask=live)
            tl.store(cut_pointer + 2 * number + 1, step, mask=live)
        y = tl.where(odd, float("nan"), y)
    y = tl.where(r > 0, y, float("nan"))
    where = row_offset(row, sizes, (y0, y1, y2, y3)) + tap_offset(t, inner, (ys0, ys1), FLAT, WIDE)
    tl.store(y_pointer + where, y.to(y_pointer.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    v_pointer: tl.tensor, x_pointer: tl.tensor, r_pointer: tl.tensor, cut_pointer: tl.tensor, dx_pointer: tl.tensor,
    dr_pointer: tl.tensor, rows: tl.tensor, taps: tl.tensor, inner: tl.tensor, r1: tl.tensor, r2: tl.tensor,
    r3: tl.tensor, v0: tl.tensor, v1: tl.tensor, v2: tl.tensor, v3: tl.tensor, vs0: tl.tensor, vs1: tl.tensor,
    x0: tl.tensor, x1: tl.tensor, x2: tl.tensor, x3: tl.tensor, xs0: tl.tensor, xs1: tl.tensor, d0: tl.tensor,
    d1: tl.tensor, d2: tl.tensor, d3: tl.tensor, ds0: tl.tensor, ds1: tl.tensor, c0: tl.tensor, c1: tl.tensor,
    c2: tl.tensor, c3: tl.tensor, KIND: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr,
    BN: tl.constexpr,
) -> None:  # fmt: skip
    """J v, J symmetric, and <v, dy/dr> of every row."""
    number = row_numbers(WIDE, BR)
    live = number < rows
    row = tl.where(live, number, 0)
    t = tl.arange(0, BN)[None, :]
    inside, sizes = live & (t < taps), (r1, r2, r3)
    v = fetch(v_pointer, row, inside, t, inner, sizes, (v0, v1, v2, v3), (vs0, vs1), FLAT, WIDE)
    x = fetch(x_pointer, row, inside, t, inner, sizes, (x0, x1, x2, x3), (xs0, xs1), FLAT, WIDE)
    r = tl.load(r_pointer + row_offset(row, sizes, (c0, c1, c2, c3))).to(tl.float32)
    if KIND == "linf_ball" or KIND == "linf_sphere":
        pinned = tl.where(x == x, tl.where(tl.abs(x) > r, 1.0, 0.0), x)
        if KIND == "linf_sphere":
            pinned = tl.where(t == first_largest(x, inside, t), tl.where(x == x, 1.0, 0.0), pinned)
        dx = v * (1.0 - pinned)
        dr = tl.sum(tl.where(inside, v * pinned * sign_of(x), 0.0), axis=1, keep_dims=True)
    else:
        odd = tl.sum(tl.where(x == x, 0.0, 1.0), axis=1, keep_dims=True) > 0
        if KIND == "l2_ball" or KIND == "l2_sphere":
            odd = odd | (tl.max(tl.abs(x), axis=1, keep_dims=True) == float("inf"))
            u, length = scaled_length(x, inside, taps)
            along = tl.sum(u * v, axis=1, keep_dims=True)
            gain = tl.minimum(r / tl.where(length > 0, length, 1.0), 3.4028234663852886e38)
            dx = tl.where(length > 0, gain, 0.0) * (v - u * along)
            dr = along
            if KIND == "l2_ball":
                kept = length <= r
                dx, dr = tl.where(kept, v, dx), tl.where(kept, 0.0, dr)
        else:
            size, sign = x, tl.full([BR, BN], 1.0, tl.float32)
            if KIND != "simplex":
                size, sign = tl.abs(x), sign_of(x)
            c, top = excess(size, inside, r)
            odd = odd | ~(tl.abs(top) < float("inf"))
            theta = tl.load(cut_pointer + 2 * row)
            step = tl.load(cut_pointer + 2 * row + 1)
            chosen = tl.where(c + theta - step > 0, sign, 0.0)
            count = tl.maximum(tl.sum(tl.abs(chosen), axis=1, keep_dims=True), 1.0)
            dr = tl.sum(chosen * v, axis=1, keep_dims=True) / count
            dx = tl.abs(chosen) * v - chosen * dr
            if KIND == "l1_ball":
                kept = tl.sum(size, axis=1, keep_dims=True) <= r
                dx, dr = tl.where(kept, v, dx), tl.where(kept, 0.0, dr)
        dx, dr = tl.where(odd, float("nan"), dx), tl.where(odd, float("nan"), dr)
    where = row_offset(row, sizes, (d0, d1, d2, d3)) + tap_offset(t, inner, (ds0, ds1), FLAT, WIDE)
    tl.store(dx_pointer + where, dx.to(dx_pointer.dtype.element_ty), mask=inside)
    tl.store(dr_pointer + number, dr, mask=live)
