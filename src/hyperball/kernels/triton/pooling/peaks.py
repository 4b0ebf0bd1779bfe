"""How the kernel of robust pooling finds welsch's center: the highest peak of S(u) = Σ w·exp(-(u - x)²/(2c²)).

On an even grid a point costs a product and a sum for each sample: with t = (x - u)/c and points d·c apart
exp(-(t - k·d)²/2) = exp(-t²/2)·exp(t·d)^k·exp(-(k·d)²/2), so that two exponentials serve a run of points. A point that
is higher than both its neighbors foretells a peak by the parabola through the logarithms of the three. Where that
parabola is so flat that two peaks may hide in one, or a third peak is about as high, a finer grid looks again. A row
of fewer samples than points of the grid is searched from the samples. Newton's method then climbs the highest peak,
and a second one that may be as high. See `samples` for the tuples, `search` for names in loops.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.pooling.samples import fetch_scaled, row_sum, sample_at, scores, weighted
from hyperball.kernels.triton.row_access import somewhere

EPS = tl.constexpr(1.1920928955078125e-07)
ROOT = tl.constexpr(0.8493218002880191)  # sqrt(log2(e)/2): exp(-t²/2) = 2^-(ROOT·t)²
STEPS = tl.constexpr(100)
COARSE = tl.constexpr(0.75)  # of c: how far apart the points of the grid lie
FINE = tl.constexpr(0.15)  # of c: the same where two peaks may hide in one
LOOKS = tl.constexpr(19)  # so many points of the finer grid, 1.35c to both sides
BESIDE = tl.constexpr(0.5625)  # of c: how far from a sample its peak is looked for
RUN = tl.constexpr(14)  # points that two exponentials serve: over 9.75c the powers of 8192 samples are below 2^127
LIFT = tl.constexpr(45.0)  # powers of 2 by which they begin higher: none within 5c of the last point is lost
FLAT_BEND = tl.constexpr(0.2)  # a parabola over COARSE that bends less may hide two peaks
LOWEST = tl.constexpr(0.8)  # a point below this share of the best peak foretells none that matters
CLOSE = tl.constexpr(0.9)  # a second peak below this share of the best is not climbed
CROWDED = tl.constexpr(0.95)  # a third peak above this share of the best may be the highest
APART = tl.constexpr(0.4)  # of c: two peaks are at least so far apart


@triton.jit
def within(u: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(u, low), high)


@triton.jit
def log_ratio(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """log(a/b) of a >= b, as close as matters where b is a neighbor of a: 2·atanh(r), r = (a - b)/(a + b)."""
    r = (a - b) / (a + b)
    q = r * r
    return 2.0 * r * (1.0 + q * (1.0 / 3.0 + 0.2 * q))


@triton.jit
def vertex(before: tl.tensor, here: tl.tensor, after: tl.tensor) -> tl.tensor:
    """Of the parabola through the logarithms of three points of a grid, the middle one highest: where its peak lies, in
    steps from the middle, its height, and its bend, by how much the logarithms drop to both sides together."""
    left, right = log_ratio(here, before), log_ratio(here, after)
    bend = tl.maximum(left + right, 1e-6)
    lean = 0.5 * (left - right)
    aside = within(lean / bend, -0.5, 0.5)
    return aside, here * tl.exp2(lean * aside * (ROOT * ROOT)), bend


@triton.jit
def ranked(
    found: tl.tensor, u: tl.tensor, v: tl.tensor, bend: tl.tensor, c: tl.tensor, peaks: tl.tensor
) -> tl.tensor:  # fmt: skip
    """`peaks`, after rows that found one at u, of height v and of this bend.

    These are where the highest lies, its height and its bend, where the second lies and its height, and the height of
    the third. A height of 0 stands for no peak.
    """
    u1, v1, bend1, u2, v2, v3 = peaks
    apart = tl.abs(u - u1) > c * APART
    better = found & (v > v1)
    handed, second = better & apart, found & ~better & apart & (v > v2)
    v3 = tl.where(found & apart, tl.maximum(v3, tl.minimum(v, v2)), v3)
    u2 = tl.where(handed, u1, tl.where(second, u, u2))
    v2 = tl.where(handed, v1, tl.where(second, v, v2))
    u1, v1, bend1 = tl.where(better, u, u1), tl.where(better, v, v1), tl.where(better, bend, bend1)
    v2 = tl.where(tl.abs(u2 - u1) > c * APART, v2, 0.0)
    return u1, v1, bend1, u2, v2, v3


@triton.jit
def run_of_points(
    SPACING: tl.constexpr, u: tl.tensor, mass: tl.tensor, tile: tl.tensor, law: tl.tensor, WEIGHTED: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """w·exp(-t²/2)·2^LIFT of every sample of a tile at u, and the factor to the next point, SPACING·c away.

    Weights are shares of Σ w, and the factor is held where the power is 0 anyway, so that no product overflows.
    """
    x, w, inside = tile
    t = (x - u) * (law[1] * ROOT)
    power = weighted(tl.exp2(t * t * -1.0 + LIFT), w * (1.0 / mass) if WEIGHTED else w, inside, WEIGHTED)
    return power, tl.exp2(tl.minimum(t * (2.0 * ROOT * SPACING), 100.0))


@triton.jit
def grid_peaks(
    SPACING: tl.constexpr, wanted: tl.tensor, first: tl.tensor, points: tl.tensor, mass: tl.tensor, tile: tl.tensor,
    law: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`ranked` of the peaks that so many points from `first` on foretell in wanted rows, the outermost excepted."""
    c = law[0]
    step = c * SPACING
    u1, u2 = first, first
    v1, v2, v3 = tl.zeros([BR, 1], tl.float32), tl.zeros([BR, 1], tl.float32), tl.zeros([BR, 1], tl.float32)
    bend1 = tl.zeros([BR, 1], tl.float32)
    before = tl.full([BR, 1], float("inf"), tl.float32)
    here = tl.full([BR, 1], float("inf"), tl.float32)
    count = tl.max(tl.max(tl.where(wanted, points, 0), axis=1), axis=0)
    for start in range(0, count, RUN):
        power, factor = run_of_points(SPACING, first + step * start, mass, tile, law, WEIGHTED)
        for k in range(start, tl.minimum(start + RUN, count)):
            j = tl.zeros([BR, 1], tl.float32) + (k - start)
            after = row_sum(power) * tl.exp2(j * j * -(ROOT * ROOT * SPACING * SPACING) - LIFT)
            if WEIGHTED:
                after *= mass
            if LOOP:
                untold = place[3] > BN  # samples that this tile does not hold
                if untold:
                    after = scores(
                        "welsch", first + step * k, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN
                    )
            power = power * factor
            found = wanted & (here > before) & (here >= after) & (here > v1 * LOWEST)
            if somewhere(found):
                aside, v, bend = vertex(before, here, after)
                u1, v1, bend1, u2, v2, v3 = ranked(
                    found, first + step * (aside + (k - 1)), v, bend, c, (u1, v1, bend1, u2, v2, v3)
                )
            before, here = here, after
    return u1, v1, bend1, u2, v2, v3


@triton.jit
def sample_peaks(
    wanted: tl.tensor, low: tl.tensor, high: tl.tensor, live: tl.tensor, tile: tl.tensor, law: tl.tensor,
    unit: tl.tensor, place: tl.tensor, peaks: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`ranked` of the peaks that the samples of wanted rows foretell, one of which is within c of any peak.

    With m = Σ w·psi/(c·S) and k = Σ w·psi'/S + m² the parabola that log S is at a sample has its peak m/k below it.
    """
    c, over, n = law[0], law[1], place[2]
    u1, v1, bend1, u2, v2, v3 = peaks
    count = tl.where(wanted, n, 0)
    for i in range(0, tl.max(tl.max(count, axis=1), axis=0)):
        u = within(sample_at(i, live, unit, place, FLAT, WIDE, BR), low, high)
        g, q, s = all_bells(u, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        share = 1.0 / tl.maximum(s, 1e-37)
        m = within(g * share * over, -8.0, 8.0)
        k = tl.maximum(1.0 - q * share + m * m, 0.1)
        peak = within(u - within(m / k, -BESIDE, BESIDE) * c, low, high)
        held = (u - peak) * over
        v = s * tl.exp2((m - 0.5 * k * held) * held * (2.0 * ROOT * ROOT))
        found = (i < count) & (v > v1 * LOWEST) & ((tl.abs(m) <= k * COARSE) | (v > v1))
        u1, v1, bend1, u2, v2, v3 = ranked(found, peak, v, k * (COARSE * COARSE), c, (u1, v1, bend1, u2, v2, v3))
    return u1, v1, bend1, u2, v2, v3


@triton.jit
def highest_peaks(
    several: tl.tensor, low: tl.tensor, high: tl.tensor, mass: tl.tensor, live: tl.tensor, tile: tl.tensor,
    law: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Of rows with several samples about where the highest peak lies, and how far from there at most; the same of the
    second; and whether that may be the higher."""
    c, n = law[0], place[2]
    step = c * COARSE
    cells = tl.where(several, tl.minimum((high - low) / step, 1e9), 0.0)
    scattered = cells > n.to(tl.float32)
    u1, v1, bend1, u2, v2, v3 = grid_peaks(
        COARSE, several & ~scattered, low - 0.75 * step, (cells + 0.5).to(tl.int32) + 3, mass, tile, law, unit, place,
        WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN,
    )  # fmt: skip
    if somewhere(scattered):
        u1, v1, bend1, u2, v2, v3 = sample_peaks(
            scattered, low, high, live, tile, law, unit, place, (u1, v1, bend1, u2, v2, v3), WEIGHTED, EVEN, FLAT, WIDE,
            LOOP, BR, BN,
        )  # fmt: skip
    reach1, reach2 = 1.5 * step, 1.5 * step
    crowded = several & ~scattered & (v3 > v1 * CROWDED)
    again = crowded | (several & (bend1 < FLAT_BEND))
    if somewhere(again):
        step = c * FINE
        first = tl.where(crowded, low - 0.75 * step, u1 - step * (0.5 * (LOOKS - 1)))
        points = tl.where(crowded, tl.minimum((high - low) / step + 0.5, 1e9).to(tl.int32) + 3, LOOKS)
        f1, w1, _, f2, w2, _ = grid_peaks(
            FINE, again, first, points, mass, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN
        )
        again = again & (w1 > 0)
        u1, v1, reach1 = tl.where(again, f1, u1), tl.where(again, w1, v1), tl.where(again, 1.5 * step, reach1)
        v2 = tl.where(again & (crowded | (tl.abs(u2 - u1) <= c * APART)), 0.0, v2)
        twin = again & (w2 > v2)
        u2, v2, reach2 = tl.where(twin, f2, u2), tl.where(twin, w2, v2), tl.where(twin, 1.5 * step, reach2)
    return u1, reach1, u2, reach2, several & (v2 > v1 * CLOSE)


@triton.jit
def bells(y: tl.tensor, tile: tl.tensor, law: tl.tensor, WEIGHTED: tl.constexpr) -> tl.tensor:
    """Σ w·(z·e, t²·e, e) of one tile at y, with z = y - x, t = z/c and e = exp(-t²/2)."""
    x, w, inside = tile
    z = y - x
    t = z * (law[1] * ROOT)
    q = tl.minimum(t * t, 1e30)
    e = weighted(tl.exp2(q * -1.0), w, inside, WEIGHTED)
    return row_sum(z * e), row_sum(q * e) * (1.0 / (ROOT * ROOT)), row_sum(e)


@triton.jit
def all_bells(
    y: tl.tensor, tile: tl.tensor, law: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr,
    EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`bells` of whole rows."""
    g, q, s = bells(y, tile, law, WEIGHTED)
    if LOOP:
        for at in range(BN, place[3], BN):
            part = fetch_scaled(place, at, unit, WEIGHTED, EVEN, FLAT, WIDE, BN)
            g1, q1, s1 = bells(y, part, law, WEIGHTED)
            g, q, s = g + g1, q + q1, s + s1
    return g, q, s


@triton.jit
def climb(
    y: tl.tensor, low: tl.tensor, high: tl.tensor, taken: tl.tensor, idle: tl.tensor, tile: tl.tensor, law: tl.tensor,
    unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The peak between low and high by Newton's method from y, its height, and the steps, to which its own are added.

    With m = Σ w·psi/S and k = Σ w·psi'/S a step is -m/k. What a step of r·c leaves of Σ w·psi is about r² of
    Σ w·|psi|, itself at most c·sqrt(1 - k)·S: a step whose r² is below rounding is the last.
    """
    c, over, _far, _shape = law
    height = tl.zeros([BR, 1], tl.float32)
    last = tl.full([BR, 1], float("inf"), tl.float32)
    before = tl.full([BR, 1], float("inf"), tl.float32)
    done = idle
    i = 0
    while somewhere(~done) & (i < STEPS):
        g, q, s = all_bells(y, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        share = 1.0 / tl.maximum(s, 1e-37)
        m, spread = g * share, q * share
        k = 1.0 - spread
        low, high = tl.where(m < 0, y, low), tl.where(m > 0, y, high)
        curved = k > 1e-4
        target = y - m / tl.where(curved, k, 1.0)
        accepted = (target >= low) & (target <= high) & (tl.abs(target - y) <= before * 0.5)
        target = tl.where(accepted, target, low * 0.5 + high * 0.5)
        moved = tl.abs(target - y)
        r = moved * over
        small = ~(tl.abs(m) > c * EPS * tl.sqrt(spread)) | ~(moved > tl.abs(y) * (2.0 * EPS))
        small = small | tl.where(accepted, curved & (r * r <= 0.125 * EPS), (high - low) * over <= 1e-4)
        height = tl.where(done, height, s)
        y = tl.where(done | (small & ~accepted), y, target)
        done = done | small
        before, last = last, moved
        taken += tl.where(done, 0, 1)
        i += 1
    return y, height, taken


@triton.jit
def highest_peak(
    low: tl.tensor, high: tl.tensor, mass: tl.tensor, broken: tl.tensor, live: tl.tensor, tile: tl.tensor,
    law: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, LOOP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """welsch's center of every row, and its steps."""
    several = ~broken & (high > low)
    y = low
    taken = tl.zeros([BR, 1], tl.int32)
    if somewhere(several):
        u, reach, second, reach2, rival = highest_peaks(
            several, low, high, mass, live, tile, law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN
        )
        idle, height = ~several, tl.zeros([BR, 1], tl.float32)
        for _ in range(0, 1 + somewhere(rival).to(tl.int32)):
            found, higher, taken = climb(
                within(u, low, high), within(u - reach, low, high), within(u + reach, low, high), taken, idle, tile,
                law, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BR, BN,
            )  # fmt: skip
            better = ~idle & (higher > height)
            y, height = tl.where(better, found, y), tl.where(better, higher, height)
            u, reach, idle = second, reach2, ~rival
    return y, taken
