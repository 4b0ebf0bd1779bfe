"""Triton's backward of the epilogue: dy, the pull on the norms, and the sums that the parameters' gradients are."""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.decoupled.epilogue import (
    channel_tile,
    leak_tile,
    lift_of,
    operator_tiles,
    put_tile,
    raised,
)
from hyperball.kernels.triton.decoupled.statistics import incoming, own_channels, responses, tile_of
from hyperball.kernels.triton.maps import FLOAT_MAX
from hyperball.kernels.triton.rows import bend_slope, inverse, radial_post, radial_slope, ramp, turn


@triton.jit
def norm_tiles(
    stats: tl.tensor, inner: tl.tensor, at: tl.tensor, real: tl.tensor, OUT: tl.constexpr, NORM: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Scale and shift of BatchNorm, z = a·f + b, and (level, bent) of df = a·dz + level + bent·f."""
    a, b = channel_tile(stats + 3 * OUT, at, real, NORM), channel_tile(stats + 4 * OUT, at, real, NORM)
    bent = channel_tile(inner + 4 * OUT, at, real, NORM)
    level = channel_tile(inner + 3 * OUT, at, real, NORM) - bent * channel_tile(stats, at, real, NORM)
    return a, b, level, bent


@triton.jit
def no_sums(
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
) -> tl.tensor:
    """Four tiles of zeros, of one row where a sum is not needed (-1)."""
    a = tl.zeros([BM if A >= 0 else 1, BC], tl.float32)
    b = tl.zeros([BM if B >= 0 else 1, BC], tl.float32)
    c = tl.zeros([BM if C >= 0 else 1, BC], tl.float32)
    return a, b, c, tl.zeros([BM if D >= 0 else 1, BC], tl.float32)


@triton.jit
def slopes_of(
    df: tl.tensor, y: tl.tensor, n: tl.tensor, times: tl.tensor, made: tl.tensor, ANG: tl.constexpr,
    FACTOR: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """df·∂f/∂y, Σ df·∂f/∂n / n, and df·factor, df·factor·n·g, df·n·g, of which parameters' gradients are sums."""
    s, h1, c, g, g1 = made
    scaled = df
    if FACTOR:
        scaled = df * times
    upon = tl.sum(inverse(n), axis=1)
    if ANG == "cosine":
        slope_y = scaled * s
        weighted, base = scaled * y, df * y
        slope_n = tl.sum(tl.broadcast_to(weighted * (h1 - s), [BM, BC]), axis=1) * upon
    else:
        tilt = s * g1
        slope_y = scaled * tilt
        weighted, base = scaled * g * n, df * g * n
        slope_n = tl.sum(scaled * (h1 * g - tilt * c), axis=1)
    slope_n = tl.minimum(tl.maximum(slope_n * upon, -FLOAT_MAX), FLOAT_MAX)
    return tl.broadcast_to(slope_y, [BM, BC]), slope_n, scaled, weighted, base


@triton.jit
def add_pieces(
    sums: tl.tensor, t: tl.tensor, weight: tl.tensor, RADIAL: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """Row j of the sums: Σ weight·(the part of t in piece j), of the radial or of the angular pieces."""
    for j in tl.static_range(PIECES):
        if RADIAL:
            total = tl.sum(weight * (ramp(t, j, PIECES) / t), axis=0)
        else:
            total = tl.sum(weight * turn(t, j, PIECES), axis=0)
        sums += tl.where((tl.arange(0, ROWS) == j)[:, None], total[None, :], 0.0)
    return sums


@triton.jit
def add_radial(
    sums: tl.tensor, u: tl.tensor, q: tl.tensor, s: tl.tensor, h1: tl.tensor, weighted: tl.tensor, ROW: tl.constexpr,
    PIECES: tl.constexpr, AT_ALPHA: tl.constexpr, AT_BETA: tl.constexpr, AT_RHO: tl.constexpr, AT_SHAPE: tl.constexpr,
    AT_STRETCH: tl.constexpr, AT_SLOPES: tl.constexpr, SLOPE_ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sums for alpha, beta, rho, shape, stretch and slopes after one more tile."""
    s_alpha, s_beta, s_rho, s_shape, s_stretch, s_slopes = sums
    _alpha, _beta, rho, over, shape, _bend, _times, longer = q
    if AT_ALPHA >= 0:
        s_alpha += weighted * radial_slope(ROW, 0, u, s, h1, rho, over, shape)
    if AT_BETA >= 0:
        s_beta += weighted * radial_slope(ROW, 1, u, s, h1, rho, over, shape)
    if AT_RHO >= 0:
        s_rho += weighted * radial_slope(ROW, 2, u, s, h1, rho, over, shape)
    if AT_SHAPE >= 0:
        s_shape += weighted * radial_slope(ROW, 3, u, s, h1, rho, over, shape)
    if AT_STRETCH >= 0:
        s_stretch += weighted * (h1 - s) * inverse(longer)
    if AT_SLOPES >= 0:
        s_slopes = add_pieces(s_slopes, tl.maximum(u * over, 1e-20), weighted, True, PIECES, SLOPE_ROWS)
    return s_alpha, s_beta, s_rho, s_shape, s_stretch, s_slopes


@triton.jit
def put_sum(
    target: tl.tensor, total: tl.tensor, post: tl.tensor, real: tl.tensor, AT: tl.constexpr, OUT: tl.constexpr
) -> None:
    """The sum over a program's rows, times the factor that was left out, into row AT; nothing where AT is -1."""
    if AT >= 0:
        tl.store(target + AT * OUT, tl.sum(total * post, axis=0), mask=real)


@triton.jit
def put_pieces(
    target: tl.tensor, sums: tl.tensor, real: tl.tensor, AT: tl.constexpr, OUT: tl.constexpr, PIECES: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """The sums of the pieces into rows AT, AT + 1, …; nothing where AT is -1."""
    if AT >= 0:
        j = tl.arange(0, ROWS)
        tl.store(target[None, :] + (AT + j[:, None]) * OUT, sums, mask=(j < PIECES)[:, None] & real[None, :])


@triton.jit
def backward_kernel(
    v: tl.tensor, source: tl.tensor, r: tl.tensor, dr: tl.tensor, leak: tl.tensor, stats: tl.tensor,
    inner: tl.tensor, y: tl.tensor, n: tl.tensor, p: tl.tensor, factor: tl.tensor, stretch: tl.tensor,
    scalars: tl.tensor, slopes: tl.tensor, turns: tl.tensor, dy: tl.tensor, t: tl.tensor, parts: tl.tensor,
    rows: tl.tensor, tiles: tl.tensor, GROUPS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
    ROW: tl.constexpr, ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr,
    EPS: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr,
    BEND: tl.constexpr, FACTOR: tl.constexpr, STRETCH: tl.constexpr, LIFT: tl.constexpr, FAST: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, LEAK: tl.constexpr, SOURCE: tl.constexpr,
    LENGTHS: tl.constexpr, SLOTS: tl.constexpr, AT_ALPHA: tl.constexpr, AT_BETA: tl.constexpr,
    AT_RHO: tl.constexpr, AT_SHAPE: tl.constexpr, AT_BEND: tl.constexpr, AT_FACTOR: tl.constexpr,
    AT_STRETCH: tl.constexpr, AT_SLOPES: tl.constexpr, AT_TURNS: tl.constexpr, SLOPE_ROWS: tl.constexpr,
    TURN_ROWS: tl.constexpr, AHEAD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """dy = df·∂f/∂y, t = Σ df·∂f/∂n / n over the tile's channels, and by program and channel what parameters need.

    AT_… is the row of a parameter's gradient in `parts`, -1 where it is not needed.
    """
    group, part, real, at = own_channels(C, PARTS, BC)
    OUT: tl.constexpr = GROUPS * C
    q = operator_tiles(p, factor, stretch, at, real, OUT, ALPHA, BETA, RHO, SHAPE, BEND, FACTOR, STRETCH)
    alpha, _beta, _rho, over, _shape, bend, times, longer = q
    slope, lift = leak_tile(leak, at, real, ACT, LEAK), lift_of(scalars, LIFT)
    a, b, level, bent = norm_tiles(stats, inner, at, real, OUT, NORM)
    s_alpha, s_beta, s_rho, s_shape = no_sums(AT_ALPHA, AT_BETA, AT_RHO, AT_SHAPE, BM, BC)
    s_bend, s_factor, s_stretch, _none = no_sums(AT_BEND, AT_FACTOR, AT_STRETCH, -1, BM, BC)
    s_slopes, s_turns = tl.zeros([SLOPE_ROWS, BC], tl.float32), tl.zeros([TURN_ROWS, BC], tl.float32)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * tiles
    for tile in tl.range(first, tl.minimum(first + tiles, tl.cdiv(rows, BM)), num_stages=AHEAD):
        row, inside, mask, where = tile_of(tile, rows, at, real, OUT, BM)
        value, length, f, s, h1, c, g, g1 = responses(
            y, n, (row, inside, mask, where), group, q, slopes, turns, lift, GROUPS, ROW, ANG, PIECES, TURNS, ROOT_EPS,
            EPS, FACTOR, STRETCH, LIFT, FAST, EVEN,
        )  # fmt: skip
        df, z = incoming(v, source, r, dr, f, a, b, slope, where, mask, row, inside, ACT, SOURCE, LENGTHS, EVEN)
        if ACT == "prelu" and SOURCE != "done":
            df = tl.where(z > 0, df, df * slope)
        if NORM:
            df = a * df + (level + bent * f)
            if not EVEN:
                df = tl.where(inside[:, None], df, 0.0)
        slope_y, slope_n, scaled, weighted, base = slopes_of(
            df, value, length, times, (s, h1, c, g, g1), ANG, FACTOR, BM, BC
        )
        put_tile(dy, where, raised(slope_y, lift, LIFT).to(dy.dtype.element_ty), mask, EVEN)
        tl.store(t + part.to(tl.int64) * rows * GROUPS + row * GROUPS + group, slope_n, mask=inside)
        u = length
        if STRETCH:
            u = length * longer
        s_alpha, s_beta, s_rho, s_shape, s_stretch, s_slopes = add_radial(
            (s_alpha, s_beta, s_rho, s_shape, s_stretch, s_slopes), u, q, s, h1, weighted, ROW, PIECES, AT_ALPHA,
            AT_BETA, AT_RHO, AT_SHAPE, AT_STRETCH, AT_SLOPES, SLOPE_ROWS,
        )  # fmt: skip
        if AT_FACTOR >= 0:
            s_factor += base * s
        if AT_BEND >= 0:
            s_bend += scaled * (length * s) * bend_slope(ANG, c, g, bend)
        if AT_TURNS >= 0:
            s_turns = add_pieces(s_turns, c, scaled * (length * s), False, TURNS, TURN_ROWS)
    target = parts + tl.program_id(1).to(tl.int64) * (SLOTS * OUT) + at
    put_sum(target, s_alpha, radial_post(ROW, 0, alpha, over), real, AT_ALPHA, OUT)
    put_sum(target, s_beta, radial_post(ROW, 1, alpha, over), real, AT_BETA, OUT)
    put_sum(target, s_rho, radial_post(ROW, 2, alpha, over), real, AT_RHO, OUT)
    put_sum(target, s_shape, radial_post(ROW, 3, alpha, over), real, AT_SHAPE, OUT)
    put_sum(target, s_bend, 1.0, real, AT_BEND, OUT)
    put_sum(target, s_factor, 1.0, real, AT_FACTOR, OUT)
    put_sum(target, s_stretch, 1.0, real, AT_STRETCH, OUT)
    put_pieces(target, s_slopes, real, AT_SLOPES, OUT, PIECES, SLOPE_ROWS)
    put_pieces(target, s_turns, real, AT_TURNS, OUT, TURNS, TURN_ROWS)
