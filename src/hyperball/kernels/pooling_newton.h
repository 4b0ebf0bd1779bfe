/* Safeguarded Newton on a tile: every lane keeps its own bracket and stops on its own. */

enum { MAX_STEPS = 120 };

/* -g/H where H > 1e-4 W, else -g/W; W <= sum of weights, so it is only summed where that bound does not decide. */
INLINE vec divisor(int penalty, const Tile *t, vec y, vec h, ivec done) {
    if (all((h > t->total * (REAL)1e-4) | done)) return h;
    Sums s;
    gains(penalty, t, y, &s);
    return pick(h > s.gain * (REAL)1e-4, h, s.gain);
}

/* |psi''| <= 0.86/c for pseudo-Huber, so the error after a Newton step d is at most 0.43 d^2 sum w/(c H). */
#define BEND ((REAL)0.43)

/* Where to look when a step is too short to count though g is not small: past the next numbers, then halfway. */
INLINE vec beyond(vec y, vec g, vec low, vec high, ivec nudged) {
    vec near = y - pick(g < 0, splat(-4 * EPS), splat(4 * EPS)) * vabs(y), middle = low * (REAL)0.5 + high * (REAL)0.5;
    return pick(nudged | ~((near > low) & (near < high)), middle, near);
}

/* Moves *answer to the minimum in [low, high] where not done; returns sum w psi' as it was last seen. */
static vec solve(int penalty, const Tile *t, vec *answer, vec low, vec high, ivec done, ivec *taken) {
    vec y = *answer, before = splat(INFINITY), last = before, size = splat(0), h = size;
    ivec nudged = {0};
    int rough = penalty == PSEUDO_HUBER && COARSE_ROOTS ? (t->alone ? 1 : 2) : 0;
    Sums s;
    for (int k = 0; k < MAX_STEPS && !all(done); ++k) {
        if (k < rough)
            coarse(penalty, t, 1, y, &s);
        else if (k == rough)
            slopes_and_sizes(penalty, t, y, &s), size = s.size;
        else
            slopes(penalty, t, y, &s);
        if (k >= rough) low = pick(s.g < 0, y, low), high = pick(s.g > 0, y, high); /* the sign must be right */
        h = pick(done, h, s.h);
        vec slope = divisor(penalty, t, y, s.h, done), target = y - s.g / slope;
        ivec newton = (target >= low) & (target <= high) & (vabs(target - y) <= before * (REAL)0.5);
        target = pick(newton, target, low * (REAL)0.5 + high * (REAL)0.5);
        vec moved = vabs(target - y);
        *taken += done + 1;
        ivec still = {0}, final = {0};
        if (k >= rough) {
            ivec short_step = ~(moved > 2 * EPS * vabs(y)), flat = ~(vabs(s.g) > EPS * size);
            ivec fine = 64 * EPS * vabs(y) * t->over_c <= 1; /* else H may be y's own sample's, and no guide */
            still = flat | (short_step & (fine | ~(high - low > 4 * EPS * vabs(y))));
            ivec stuck = short_step & ~still;
            target = pick(stuck, beyond(y, s.g, low, high, nudged), target);
            moved = pick(stuck, vabs(target - y), moved), nudged |= stuck, newton &= ~stuck;
        }
        if (k >= rough && penalty == PSEUDO_HUBER) {
            final = newton & (BEND * t->total * t->over_c * moved * moved <= EPS / 16 * size);
        }
        y = pick(done | (still & ~newton), y, target); /* the last step is taken too: g is better than its size */
        done |= still | final;
        before = last, last = moved;
    }
    *answer = y;
    return h;
}

/* Huber without an inlier: every point between the two middle samples, c away from both, is a minimum; take the
   middle. Newton may have stopped at the edge of that flat, so it is looked for wherever at most half are inliers. */
static void middle_of_flat(const Tile *t, vec *y, int lane) {
    double below = 0, above = 0;
    REAL at = (*y)[lane], low = -INFINITY, high = INFINITY;
    REAL near = t->c[lane] > 4096 * EPS * (REAL)fabs(at) ? (REAL)0.99 * t->c[lane] : 0; /* a sample there: no flat */
    int64_t step = t->alone ? 1 : LANES, first = t->alone ? 0 : lane;
    for (int64_t i = 0; i < t->widths[lane]; ++i) {
        REAL x = t->x[first + i * step], w = t->w ? t->w[first + i * step] : 1;
        if (w <= 0) continue;
        if (fabs(x - at) < near) return;
        if (x < at) below += w, low = x > low ? x : low;
        if (x > at) above += w, high = x < high ? x : high;
        if (x == at) return;
    }
    if (fabs(below - above) <= 8 * EPS * (below + above) && high - low > 2 * t->c[lane]) {
        REAL middle = low + (high - low) / 2;
        for (int l = t->alone ? 0 : lane; l <= (t->alone ? LANES - 1 : lane); ++l) (*y)[l] = middle;
    }
}

/* The median of nine evenly spaced samples of each lane, and that of nine of these for a row alone. */
static vec robust_start(const Tile *t) {
    static const char pairs[19][2] = {{1, 2}, {4, 5}, {7, 8}, {0, 1}, {3, 4}, {6, 7}, {1, 2}, {4, 5}, {7, 8}, {0, 3},
                                      {5, 8}, {4, 7}, {3, 6}, {1, 4}, {2, 5}, {4, 7}, {4, 2}, {6, 4}, {4, 2}};
    vec v[9];
    int64_t whole = t->n - t->has_tail;
    for (int j = 0; j < 9; ++j) {
        v[j] = *(const vec *)(t->x + (j * whole + whole / 2) / 9 * LANES);
        for (int l = 0; t->ragged && l < LANES; ++l)
            v[j][l] = t->x[(j * t->widths[l] + t->widths[l] / 2) / 9 * LANES + l];
    }
#pragma GCC unroll 19
    for (int j = 0; j < 19; ++j) order(&v[(int)pairs[j][0]], &v[(int)pairs[j][1]]);
    if (!t->alone) return v[4];
    REAL a[9];
    for (int j = 0; j < 9; ++j) a[j] = v[4][j * LANES / 9];
#pragma GCC unroll 19
    for (int j = 0; j < 19; ++j) {
        REAL *p = &a[(int)pairs[j][0]], *q = &a[(int)pairs[j][1]], low = *p < *q ? *p : *q;
        *q = *p < *q ? *q : *p, *p = low;
    }
    return splat(a[4]);
}

static void solve_convex(int penalty, const Tile *t, vec *y, vec low, vec high, ivec done, ivec *taken) {
    *y = vmin(vmax(robust_start(t), low), high);
    vec h = solve(penalty, t, y, low, high, done, taken);
    for (int l = 0; penalty == HUBER && l < (t->alone ? 1 : LANES); ++l)
        if (!done[l] && h[l] <= t->total[l] * (REAL)0.5001) middle_of_flat(t, y, l);
}

/* A long row without weights seldom needs a bracket: Newton from a good start. Gives up, and returns 0, at a sample
   that is not a number, where the curvature is weak and where steps do not shrink. */
static int try_newton(int penalty, const Tile *t, vec *answer, ivec *taken) {
    int rough = penalty == PSEUDO_HUBER && COARSE_ROOTS;
    REAL before = INFINITY, last = INFINITY, size = 0, total = t->total[0];
    Sums s;
    vec y = robust_start(t);
    coarse(penalty, t, 4, y, &s); /* a quarter of the samples brings it near */
    if (!(s.h[0] > (REAL)0.025 * total)) return 0;
    for (int k = -1; k < 8; ++k) {
        if (k >= 0) {
            if (k < rough)
                coarse(penalty, t, 1, y, &s);
            else if (k == rough)
                slopes_and_sizes(penalty, t, y, &s), size = s.size[0];
            else
                slopes(penalty, t, y, &s);
            ++*taken;
        }
        REAL g = s.g[0], h = s.h[0], moved = (REAL)fabs(g / h), at = (REAL)fabs(y[0]);
        if (k >= 0 && !(h > (REAL)0.1 * total && moved <= before / 2)) return 0;
        int flat = fabs(g) <= EPS * size, fine = 64 * EPS * at * t->over_c[0] <= 1; /* else y may be its own inlier */
        if (k >= rough && moved <= 2 * EPS * at && !flat && !fine) return 0;
        int still = k >= rough && (moved <= 2 * EPS * at || flat);
        int final = k >= rough && penalty == PSEUDO_HUBER && BEND * total * t->over_c[0] * moved * moved <= EPS / 16 * size;
        y -= splat(g / h);
        if (still || final) {
            *answer = y;
            if (penalty == HUBER && h <= total * (REAL)0.5001) middle_of_flat(t, answer, 0);
            return 1;
        }
        if (k >= 0) before = last, last = moved;
    }
    return 0;
}
