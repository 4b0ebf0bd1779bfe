"""The rows of the radial and angular tables as Triton functions, and which rows there are.

`RADIAL` and `ANGULAR` name the rows that have a function here; a test holds them against the tables. Tiles: n is
[rows, 1], a parameter [1, channels] or [1, 1]; results broadcast. The formulas are those of `radial_functions` and
`angular`, in float32; libdevice is avoided, so that the interpreter runs the same code.
"""

from __future__ import annotations

import triton
import triton.language as tl

RADIAL = ("sphere", "ball", "tanh", "linear", "seg", "log", "mix", "barron", "piecewise")
ANGULAR = ("linear", "cosine", "sigmoid", "square_cosine", "power", "rectified_cosine", "piecewise")


@triton.jit
def inverse(n: tl.tensor) -> tl.tensor:
    """1/n, and 0 where n is 0; below the smallest normal number, that number's inverse."""
    return tl.where(n > 0, 1.0 / tl.maximum(n, 1.1754943508222875e-38), 0.0)


@triton.jit
def hypotenuse(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """sqrt(a² + b²) without overflow, for a, b >= 0; at least 1e-20."""
    longest = tl.maximum(tl.maximum(a, b), 1e-20)
    p, q = a / longest, b / longest
    return tl.maximum(longest * tl.sqrt(p * p + q * q), 1e-20)


@triton.jit
def tanh_both(z: tl.tensor) -> tl.tensor:
    """tanh(z) and 1 - tanh²(z) for z >= 0, each with a small relative error everywhere."""
    e = tl.exp(-2.0 * z)
    q = z * z
    series = 0.021869488536155203
    series = -0.05396825396825397 + q * series
    series = 0.13333333333333333 + q * series
    series = -0.3333333333333333 + q * series
    w = 1.0 / (1.0 + e)
    return tl.where(z < 0.25, z + z * q * series, (1.0 - e) * w), 4.0 * e * w * w


@triton.jit
def tanh_of(z: tl.tensor) -> tl.tensor:
    """tanh(z) for z >= 0."""
    t, _rest = tanh_both(z)
    return t


@triton.jit
def fast_tanh(z: tl.tensor) -> tl.tensor:
    """tanh(z) by the GPU's own instruction, to a relative 2^-11: for results that are stored in 16 bits."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def fast_tanh_both(z: tl.tensor) -> tl.tensor:
    """tanh(z) and 1 - tanh²(z) = e^(-2z)·(1 + tanh(z))² for z >= 0, each to a relative 2^-11, the tail too."""
    t = fast_tanh(z)
    return t, tl.exp(-2.0 * z) * (1.0 + t) * (1.0 + t)


@triton.jit
def log1p_gain(n: tl.tensor) -> tl.tensor:
    """log(1 + n)/n, which is 1 at 0: with w = 1 + n rounded, log(1 + n) = log(w) + (n - (w - 1))/w."""
    n = tl.maximum(n, 1e-20)
    w = 1.0 + n
    return (tl.log(w) + (n - (w - 1.0)) / w) / n


@triton.jit
def log_one_plus_square(n: tl.tensor, over: tl.tensor) -> tl.tensor:
    """log(1 + r²) and r²/(1 + r²) of r = n·over >= 0, accurate near 0 and where r² or r itself overflows."""
    bounded = tl.minimum(n * over, 1e18)
    x = bounded * bounded
    w = 1.0 + x
    beyond = tl.log(tl.maximum(tl.sqrt(n) * (1e-9 * tl.sqrt(over)), 1.0))
    return tl.log(w) + (x - (w - 1.0)) / w + 4.0 * beyond, x / w


@triton.jit
def arcsine(c: tl.tensor) -> tl.tensor:
    """asin(c), c held within ±1: a polynomial below 1/2, and π/2 - 2·asin(sqrt((1 - |c|)/2)) above."""
    a = tl.minimum(tl.abs(c), 1.0)
    large = a > 0.5
    z = tl.where(large, 0.5 * (1.0 - a), a * a)
    x = tl.where(large, tl.sqrt(z), a)
    series = 4.2163199048e-2
    series = 2.4181311049e-2 + z * series
    series = 4.5470025998e-2 + z * series
    series = 7.4953002686e-2 + z * series
    series = 1.6666752422e-1 + z * series
    small = x + x * z * series
    value = tl.where(large, 1.5707963267948966 - 2.0 * small, small)
    return tl.where(c < 0, -value, value)


@triton.jit
def arcsine_slope(c: tl.tensor, EPS: tl.constexpr) -> tl.tensor:
    """1/sqrt(1 - c²), held at 1/sqrt(eps) where 1 - c² < eps."""
    return 1.0 / tl.sqrt(tl.maximum((1.0 - c) * (1.0 + c), EPS))


@triton.jit
def ramp(t: tl.tensor, j: tl.constexpr, PIECES: tl.constexpr) -> tl.tensor:
    """How much of [0, t] lies in piece j of [0, 2], cut into equal pieces; the last piece has no end."""
    above = tl.maximum(t - j * (2.0 / PIECES), 0.0)
    if j < PIECES - 1:
        above = tl.minimum(above, 2.0 / PIECES)
    return above


@triton.jit
def inside_share(n: tl.tensor, rho: tl.tensor) -> tl.tensor:
    """rho/max(n, rho)."""
    return tl.minimum(rho * (1.0 / tl.maximum(n, 1e-30)), 1.0)


@triton.jit
def radial(
    ROW: tl.constexpr, n: tl.tensor, alpha: tl.tensor, beta: tl.tensor, rho: tl.tensor, over: tl.tensor,
    shape: tl.tensor, slopes: tl.tensor, PIECES: tl.constexpr, ROOT_EPS: tl.constexpr, FAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """s(n) = h(n)/n and h'(n) of a row; `over` is 1/rho, one number a channel as 1/n is one a row."""
    if ROW == "sphere":
        long = hypotenuse(n, tl.zeros_like(n) + ROOT_EPS)
        s = alpha / long
        h1 = s * (ROOT_EPS / long) * (ROOT_EPS / long)
    elif ROW == "ball":
        s = alpha * tl.minimum(1.0 / tl.maximum(n, 1e-30), over)
        h1 = tl.where(n <= rho, s, 0.0)
    elif ROW == "tanh":
        held = tl.maximum(n, 1e-30)
        if FAST:
            t, rest = fast_tanh_both(held * over)
        else:
            t, rest = tanh_both(held * over)
        s = alpha * (t * (1.0 / held))
        h1 = rest * (alpha * over)
    elif ROW == "linear":
        s = alpha + tl.zeros_like(n)
        h1 = s
    elif ROW == "seg":
        s = beta + (alpha - beta) * inside_share(n, rho)
        h1 = tl.where(n <= rho, alpha, beta)
    elif ROW == "log":
        s = alpha * log1p_gain(n)
        h1 = alpha / (1.0 + n)
    elif ROW == "mix":
        s = alpha + beta * log1p_gain(n)
        h1 = alpha + beta / (1.0 + n)
    elif ROW == "barron":
        a = tl.minimum(tl.maximum(shape, -1e15), 1e15)
        log_t, share = log_one_plus_square(n, over / tl.sqrt(tl.maximum(tl.abs(a - 2.0), 1e-6)))
        s = alpha * tl.exp(log_t * (a * 0.5 - 1.0))
        h1 = s * (1.0 + (a - 2.0) * share)
    else:
        tl.static_assert(ROW == "piecewise")
        t = n * over
        held = tl.maximum(t, 1e-20)
        height = tl.zeros_like(held)
        h1 = tl.zeros_like(held)
        for j in tl.static_range(PIECES):
            slope = tl.load(slopes + j).to(tl.float32)
            height += slope * ramp(held, j, PIECES)
            if j == 0:
                h1 += slope
            else:
                h1 = tl.where(t > j * (2.0 / PIECES), slope, h1)
        s = height / held
    return s, h1


@triton.jit
def radial_slope(
    ROW: tl.constexpr, SLOT: tl.constexpr, n: tl.tensor, s: tl.tensor, h1: tl.tensor, rho: tl.tensor, over: tl.tensor,
    shape: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """ds/dparameter up to the factor of `radial_post`, for SLOT 0 alpha, 1 beta, 2 rho, 3 shape."""
    if SLOT == 0:
        if ROW == "seg":
            d = inside_share(n, rho)
        elif ROW == "mix":
            d = tl.zeros_like(s) + 1.0
        else:
            d = s
    elif SLOT == 1:
        if ROW == "seg":
            d = 1.0 - inside_share(n, rho)
        else:
            d = log1p_gain(n)
    elif SLOT == 2:
        if ROW == "seg" or ROW == "barron" or ROW == "piecewise":
            d = s - h1
        else:
            d = h1
    else:
        a = tl.minimum(tl.maximum(shape, -1e15), 1e15)
        log_t, share = log_one_plus_square(n, over / tl.sqrt(tl.maximum(tl.abs(a - 2.0), 1e-6)))
        d = s * (log_t - tl.where(tl.abs(a - 2.0) > 1e-6, share, 0.0)) * 0.5
    return d


@triton.jit
def radial_post(ROW: tl.constexpr, SLOT: tl.constexpr, alpha: tl.tensor, over: tl.tensor) -> tl.tensor:
    """The factor, one number a channel, that `radial_slope` leaves out: it multiplies sums over positions."""
    factor = tl.full([1, 1], 1.0, tl.float32)
    if SLOT == 0 and ROW != "seg" and ROW != "mix":
        factor = 1.0 / alpha
    elif SLOT == 2:
        if ROW == "seg" or ROW == "barron" or ROW == "piecewise":
            factor = over
        else:
            factor = -over
    return factor


@triton.jit
def turn(c: tl.tensor, j: tl.constexpr, PIECES: tl.constexpr) -> tl.tensor:
    """The part of [0, c] in piece j of [-1, 1], negative to the left of 0; beyond ±1 the outer pieces go on."""
    low: tl.constexpr = -1.0 + j * (2.0 / PIECES)
    high: tl.constexpr = -1.0 + (j + 1) * (2.0 / PIECES)
    held = c
    zero = 0.0
    if j > 0:
        held = tl.maximum(held, low)
        if low > 0:
            zero = low
    if j < PIECES - 1:
        held = tl.minimum(held, high)
        if high < 0:
            zero = high
    return held - zero


@triton.jit
def power_of(c: tl.tensor, b: tl.tensor) -> tl.tensor:
    """|c|^(b - 1)."""
    return tl.exp(tl.log(tl.maximum(tl.abs(c), 1e-30)) * (b - 1.0))


@triton.jit
def angular(
    ROW: tl.constexpr, c: tl.tensor, bend: tl.tensor, turns: tl.tensor, PIECES: tl.constexpr, EPS: tl.constexpr
) -> tl.tensor:
    """g(c) and g'(c) of a row; `bend` is the sigmoid's k or the power's b."""
    if ROW == "cosine":
        g = c
        g1 = tl.zeros_like(c) + 1.0
    elif ROW == "linear":
        g = arcsine(c) * 0.6366197723675814
        g1 = arcsine_slope(c, EPS) * 0.6366197723675814
    elif ROW == "sigmoid":
        bound = tanh_of(0.7853981633974483 / bend)
        u = arcsine(c) / (2.0 * bend)
        t = tanh_of(tl.abs(u))
        g = tl.where(u < 0, -t, t) / bound
        g1 = (1.0 - t * t) * arcsine_slope(c, EPS) / (2.0 * bend * bound)
    elif ROW == "square_cosine":
        g = c * tl.abs(c)
        g1 = 2.0 * tl.abs(c)
    elif ROW == "power":
        p = power_of(c, bend)
        g = c * p
        g1 = bend * p
    elif ROW == "rectified_cosine":
        g = tl.maximum(c, 0.0)
        g1 = tl.where(c > 0, 1.0, 0.0)
    else:
        tl.static_assert(ROW == "piecewise")
        g = tl.zeros_like(c)
        g1 = tl.zeros_like(c)
        for j in tl.static_range(PIECES):
            slope = tl.load(turns + j).to(tl.float32)
            g += slope * turn(c, j, PIECES)
            if j == 0:
                g1 += slope
            else:
                g1 = tl.where(c > -1.0 + j * (2.0 / PIECES), slope, g1)
    return g, g1


@triton.jit
def bend_slope(ROW: tl.constexpr, c: tl.tensor, g: tl.tensor, bend: tl.tensor) -> tl.tensor:
    """dg/dk of the sigmoid, (tanh(u)·(1 - D²)·κ/D - u·(1 - tanh²(u)))/(k·D), κ = π/4k; dg/db of the power."""
    if ROW == "sigmoid":
        kappa = 0.7853981633974483 / bend
        bound = tanh_of(kappa)
        u = arcsine(c) / (2.0 * bend)
        t = g * bound
        d = (t * ((1.0 - bound * bound) * kappa / bound) - u * (1.0 - t * t)) / (bend * bound)
    else:
        tl.static_assert(ROW == "power")
        d = g * tl.log(tl.maximum(tl.abs(c), 1e-30))
    return d
