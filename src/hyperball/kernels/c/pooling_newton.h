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

INLINE vec middle(vec a, vec b, vec c) { return vmax(vmin(a, b), vmin(vmax(a, b), c)); }

/* The median of nine evenly spaced samples of each lane. */
INLINE vec lane_medians(const Tile *t) {
    vec v[9];
    REAL own[9 * LANES]; /* of ragged rows */
    int64_t whole = t->n - t->has_tail;
    for (int i = 0; t->ragged && i < 9 * LANES; ++i) {
        int64_t l = i % LANES, width = t->widths[l];
        own[i] = t->x[(i / LANES * width + width / 2) / 9 * LANES + l];
    }
#pragma GCC unroll 9
    for (int j = 0; j < 9; ++j)
        v[j] = *(const vec *)(t->ragged ? own + j * LANES : t->x + (j * whole + whole / 2) / 9 * LANES);
    order(v + 1, v + 2), order(v + 4, v + 5), order(v + 7, v + 8), order(v, v + 1), order(v + 3, v + 4);
    order(v + 6, v + 7), order(v + 1, v + 2), order(v + 4, v + 5), order(v + 7, v + 8), order(v, v + 3);
    order(v + 5, v + 8), order(v + 4, v + 7), order(v + 3, v + 6), order(v + 1, v + 4), order(v + 2, v + 5);
    order(v + 4, v + 7), order(v + 4, v + 2), order(v + 6, v + 4), order(v + 4, v + 2);
    return v[4];
}

/* The median of three medians of three of nine vectors. */
INLINE vec ninther(const vec *a) {
    return middle(middle(a[0], a[1], a[2]), middle(a[3], a[4], a[5]), middle(a[6], a[7], a[8]));
}

/* The median of nine samples of each lane, and for a row alone the ninther of nine of these. */
static vec robust_start(const Tile *t) {
    vec found = lane_medians(t), a[9]; /* vectors all along: these comparisons cannot be predicted */
    if (!t->alone) return found;
    for (int j = 0; j < 9; ++j) a[j] = splat(found[j * LANES / 9]);
    return ninther(a);
}

static void solve_convex(int penalty, const Tile *t, vec *y, vec low, vec high, ivec done, ivec *taken) {
    *y = vmin(vmax(robust_start(t), low), high);
    vec h = solve(penalty, t, y, low, high, done, taken);
    for (int l = 0; penalty == HUBER && l < (t->alone ? 1 : LANES); ++l)
        if (!done[l] && h[l] <= t->total[l] * (REAL)0.5001) middle_of_flat(t, y, l);
}
