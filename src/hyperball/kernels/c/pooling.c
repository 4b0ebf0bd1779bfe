/* Robust pooling of rows on a CPU: y = argmin_u sum_i w_i phi(u - x_i; c), one u a row.

   Compiled once with float and once with double; the eager twin is pooling_rows.py. Short rows are solved a vector of
   them at a time, one a lane; a long row is solved alone. What a lane does depends on its own row only, so a row's bits
   do not depend on the batch or on the number of threads. Threads are those of torch's own pool: the caller passes the
   address of its GOMP_parallel. */

#include "pooling_lanes.h"
#include "pooling_newton.h"
#include "pooling_plain.h"
#include "pooling_global.h"
#include "pooling_barron.h"
#include "pooling_reading.h"
#include "pooling_mean.h"

enum { LONG = 128, TOGETHER = LANES }; /* samples of a long row, and how many are solved at once */

/* The radius, in units of `unit`, and shape of lane l from those of row r; returns whether the radius is usable. */
static int set_penalty(const Job *job, Tile *t, int64_t r, int l, double unit) {
    double c = job->c[r * job->c_step] * unit, shape = fmin(fmax(job->shape[r * job->shape_step], -1e15), 1e15);
    int usable = c > 0;
    c = c > SMALLEST ? (c < LARGEST ? c : LARGEST) : SMALLEST;
    double root = job->penalty == BARRON ? sqrt(fmax(fabs(shape - 2), 1e-6)) : 1;
    t->c[l] = (REAL)c, t->over_c[l] = (REAL)(1 / (c * root));
    t->shape[l] = (REAL)shape, t->power[l] = (REAL)(shape / 2 - 1);
    double far = (job->penalty == WELSCH ? 1e4 : FAR) * c;
    if (job->penalty == BARRON) /* psi is about c (z/c)^(shape - 1) */
        far = shape > 2 ? fmin(c * root * pow(LARGEST / fmax(c, 1), 1 / (shape - 1)), SUMMABLE) : SUMMABLE;
    t->far[l] = (REAL)fmin(far, 4 * HUGEST);
    return usable;
}

/* The factor by which each lane of a tile is made smaller, so that sums of samples and of c stay numbers. */
INLINE vec shrinking(const Tile *t, vec low, vec high) {
    ivec large = (t->c > LARGE_C) & ((low < -LARGE_X) | (high > LARGE_X));
    return pick(large, splat(SHRINK), splat(1));
}

/* Makes samples and radii smaller by `factor`; the samples go to `x`. */
static void shrink(const Job *job, Tile *t, const REAL *from, REAL *x, const int64_t *row, vec factor) {
    for (int l = 0; l < LANES; ++l) set_penalty(job, t, row[t->alone ? 0 : l], l, factor[l]);
    for (int64_t i = 0; i < t->n * LANES; i += LANES) *(vec *)(x + i) = *(const vec *)(from + i) * factor;
    t->x = x;
}

static void store(const Job *job, int64_t r, REAL y, int broken, int32_t steps) {
    job->y[r] = broken ? (REAL)NAN : fabs(y) > HUGEST / 2 ? (REAL)copysign(INFINITY, y) : y;
    job->steps[r] = steps;
}

/* One row out of the tile into the worker's own, which may be reordered. */
static REAL *copy_lane(Worker *k, const Tile *t, int lane, int64_t n) {
    int64_t step = t->alone ? 1 : LANES, first = t->alone ? 0 : lane;
    for (int64_t i = 0; i < n; ++i) {
        k->own.row[i] = t->x[first + i * step];
        if (t->w) k->own.weights[i] = t->w[first + i * step];
    }
    for (int64_t i = n; i % LANES; ++i) k->own.row[i] = k->own.row[0], k->own.weights[i] = 0;
    return t->w ? k->own.weights : NULL;
}

/* The lanes whose penalty has minima besides the global one. */
INLINE ivec several_minima(int penalty, const Tile *t) {
    return penalty == BARRON ? (ivec)(t->shape < 1) : penalty == WELSCH ? ~(ivec){0} : (ivec){0};
}

/* Newton from a start in the basin of the global minimum where there are several, else from a median. */
static vec solve_searching(Worker *k, const Tile *t, vec low, vec high, ivec done, ivec *taken) {
    int penalty = k->job->penalty;
    ivec several = several_minima(penalty, t);
    vec y = vmin(vmax(robust_start(t), low), high), least = low, most = high;
    for (int l = 0; l < (t->alone ? 1 : LANES); ++l) {
        if (done[l] || !several[l]) continue;
        int64_t n = t->widths[l];
        int settled = 0;
        ivec steps = {0};
        REAL *w = copy_lane(k, t, l, n);
        Tile row = lane_alone(t, l, k->own.row, w, n);
        y[l] = penalty == WELSCH ? welsch_start(&k->own, &row, w, n, low[l], high[l])
                                 : barron_start(&k->own, &row, w, n, low[l], high[l], &steps, &settled);
        if (settled) done[l] = -1, (*taken)[l] = steps[0];
    }
    if (t->alone) y = splat(y[0]), done = done[0] - (ivec){0};
    if (all(done)) return y;
    local_bracket(penalty, t, y, &least, &most);
    solve(penalty, t, &y, pick(several, least, low), pick(several, most, high), done, taken);
    return y;
}

static vec solve_tile(Worker *k, const Tile *t, vec low, vec high, ivec broken, ivec *taken) {
    int penalty = k->job->penalty;
    vec y = splat(0);
    if (!all(~several_minima(penalty, t))) return solve_searching(k, t, low, high, broken, taken);
    if (penalty < WELSCH) {
        solve_convex(penalty, t, &y, low, high, broken, taken);
        return y;
    }
    if (penalty == ABSOLUTE) return median(t, pick(broken, splat(0), low), pick(broken, splat(0), high));
    if (!t->alone) sort_tile(k->tile, t->w ? k->weights : NULL, t->n);
    for (int l = 0; l < (t->alone ? 1 : LANES); ++l) {
        if (broken[l]) continue;
        int64_t n = t->alone ? t->widths[l] : t->n;
        REAL *w = copy_lane(k, t, l, n);
        if (t->alone) sort(k->own.row, w, n);
        y[l] = truncated(k->own.row, w, n, t->c[l], k->own.prefix);
    }
    return y;
}

static void gather_lanes(Tile *t, vec *low, vec *high, ivec *broken) { /* what `measure` found, over a row alone */
    t->total = splat(t->w ? sum(t->total) : (REAL)t->widths[0]);
    *low = splat(least(*low)), *high = splat(-least(-*high));
    if (!all(~*broken)) *broken = ~(ivec){0};
}

static void pool_rows(Worker *k, int64_t first, int64_t count, int alone, int tried) {
    const Job *job = k->job;
    int64_t widths[LANES], longest = 0, row[LANES];
    ivec unusable = k->unusable, taken = {0};
    int weighted = job->w != NULL || (!alone && job->lengths);
    int each = job->c_step || job->shape_step;
    Tile t = k->one;
    t.w = weighted ? k->weights : NULL, t.widths = widths;
    t.alone = alone, t.ragged = !alone && job->lengths;
    for (int l = 0; l < LANES; ++l) {
        row[l] = first + (l < count ? l : count - 1);
        widths[l] = width_of(job, row[l]);
        longest = widths[l] > longest ? widths[l] : longest;
        if (each) unusable[l] = -(INT)!set_penalty(job, &t, row[l], l, 1);
    }
    const REAL *from = k->tile;
    if (k->apart && alone && longest % LANES == 0) {
        from = job->x + first * k->apart;
        for (int64_t i = 0; i < longest && first + 1 < job->rows; i += LANES) /* arrives while this one is solved */
            __builtin_prefetch(from + k->apart + i);
    } else if (k->apart && count == LANES) {
        const REAL *next = job->x + (first + LANES) * k->apart;
        for (int64_t i = 0; i < LANES * k->apart && first + 2 * LANES <= job->rows; i += LANES)
            __builtin_prefetch(next + i);
        read_block(job->x + first * k->apart, k->apart, k->tile, longest);
    } else {
        for (int l = 0; l < (alone ? 1 : LANES); ++l)
            read_row(k, row[l], k->tile + l, weighted ? k->weights + l : NULL, alone ? 1 : LANES, longest);
    }
    for (int64_t i = longest; alone && i % LANES; ++i) {
        k->tile[i] = k->tile[0];
        if (weighted) k->weights[i] = 0;
    }
    if (job->w) level(k->weights, alone ? (longest + LANES - 1) / LANES : longest, alone);
    t.n = alone ? (longest + LANES - 1) / LANES : longest, t.has_tail = alone && !weighted && longest % LANES != 0;
    for (int l = 0; t.has_tail && l < LANES; ++l) t.tail[l] = l < longest % LANES;
    vec low, high, found;
    ivec broken = {0}, solved = {0};
    if (!tried && is_plain(job->penalty, &t, unusable)) {
        t.x = from, t.total = splat((REAL)longest), t.wide = !COARSE_ROOTS, t.together = 1;
        solved = solve_plainly(job->penalty, &t, &found, &taken);
        if (alone && solved[0]) solved = ~(ivec){0};
        if (all(solved & (vabs(found) < HUGEST / 2)) && count == LANES) {
            *(vec *)(job->y + first) = found;
            for (int l = 0; l < LANES; ++l) job->steps[first + l] = (int32_t)taken[l];
            return;
        }
        for (int64_t l = 0; l < count; ++l)
            if (solved[l]) store(job, row[l], found[l], 0, (int32_t)taken[l]);
        if (all(solved)) return;
        taken &= solved;
    }
    if (!measure(from, t.w, t.n, &low, &high, &t.total)) {
        broken = bound(from, k->tile, t.n), from = k->tile;
        measure(from, t.w, t.n, &low, &high, &t.total);
    }
    t.x = from;
    if (!t.w) t.total = splat((REAL)longest);
    if (alone) gather_lanes(&t, &low, &high, &broken);
    broken |= unusable | ~(low <= high);
    vec factor = shrinking(&t, low, high);
    if (!all(factor == 1)) shrink(job, &t, from, k->tile, row, factor), low *= factor, high *= factor;
    t.wide = !all(~((high - low) * t.over_c > FAR / 4));
    vec y = solve_tile(k, &t, low, high, broken, &taken);
    y /= factor;
    for (int64_t l = 0; l < count; ++l)
        if (!solved[l]) store(job, row[l], y[l], broken[l] != 0, (int32_t)taken[l]);
}

/* Long rows without more ado, some at a time; those that are not solved so are left to `pool_rows`. */
static void pool_long_rows(Worker *k, int64_t first, int64_t count) {
    const Job *job = k->job;
    int64_t n = job->taps;
    Tile t = k->one;
    vec found;
    ivec taken = {0}, solved = {0};
    t.alone = 1, t.widths = &n, t.n = n / LANES, t.total = splat((REAL)n), t.wide = !COARSE_ROOTS;
    t.x = job->x + first * k->apart, t.apart = k->apart, t.together = (int)count;
    t.ahead = first + 2 * count <= job->rows ? t.x + count * k->apart : NULL;
    if (is_plain(job->penalty, &t, k->unusable)) solved = solve_plainly(job->penalty, &t, &found, &taken);
    for (int64_t l = 0; l < count; ++l)
        if (solved[l]) store(job, first + l, found[l], 0, (int32_t)taken[l]);
        else pool_rows(k, first + l, 1, 1, 1);
}

/* One half on the greatest sample <= y and one on the least >= y, shared among equal samples. */
static void middle_share(const Tile *t, REAL y, REAL v, REAL *share) {
    REAL low = -INFINITY, high = INFINITY;
    int64_t lows = 0, highs = 0, n = t->widths[0];
    for (int64_t i = 0; i < n; ++i) {
        if (t->w && t->w[i] <= 0) continue;
        if (t->x[i] <= y && t->x[i] > low) low = t->x[i];
        if (t->x[i] >= y && t->x[i] < high) high = t->x[i];
    }
    for (int64_t i = 0; i < n; ++i) {
        int present = !t->w || t->w[i] > 0;
        lows += present && t->x[i] == low, highs += present && t->x[i] == high;
    }
    for (int64_t i = 0; i < n; ++i) {
        int present = !t->w || t->w[i] > 0;
        REAL below = t->x[i] == low ? (REAL)0.5 / lows : 0, above = t->x[i] == high ? (REAL)0.5 / highs : 0;
        share[i] = present ? v * (below + above) : 0;
    }
}

/* scale w psi' over the tile, in place of its samples; returns sum z times that, lane by lane. */
INLINE vec shares_of(int penalty, const Tile *t, vec y, vec scale, REAL *x) {
    vec moment = splat(0);
    for (int64_t i = 0; i < t->n; ++i) {
        vec z = y - *(vec *)(x + i * LANES), psi, curvature, gain;
        influence(penalty, 1, t, z, &psi, &curvature, &gain);
        curvature *= scale;
        if (t->w) curvature *= *(const vec *)(t->w + i * LANES);
        if (t->has_tail && i == t->n - 1) curvature *= t->tail;
        moment += z * curvature;
        *(vec *)(x + i * LANES) = curvature;
    }
    return moment;
}

static vec write_shares(int penalty, const Tile *t, vec y, vec scale, REAL *x) {
    switch (penalty) {
        case HUBER: return shares_of(HUBER, t, y, scale, x);
        case PSEUDO_HUBER: return shares_of(PSEUDO_HUBER, t, y, scale, x);
        case BARRON: return shares_of(BARRON, t, y, scale, x);
        default: return shares_of(WELSCH, t, y, scale, x);
    }
}

/* The gradient of row r: v w psi'/D for every tap, D = max(sum w psi', 1e-3 sum w s), and v sum z J / c. */
static void pull_row(Worker *k, int64_t r) {
    const Job *job = k->job;
    int64_t n = job->taps;
    REAL y = job->y[r], v = job->v[r], *out = job->share + r * n, *w = job->w ? k->weights : NULL;
    Tile t = k->one;
    if (job->c_step || job->shape_step)
        for (int l = 0; l < LANES; ++l) set_penalty(job, &t, r, l, 1);
    read_row(k, r, k->tile, w, 1, n);
    job->radius[r] = 0;
    if (y != y) { /* a broken row that is used spoils its own gradient, but not that of a sample that is absent */
        int held = 0;
        for (int64_t i = 0; i < n; ++i) {
            int present = !w || w[i] > 0;
            held |= present, out[i] = present && v != 0 ? y : 0;
        }
        if (held && v != 0) job->radius[r] = y;
        return;
    }
    for (int64_t i = n; i % LANES; ++i) {
        k->tile[i] = k->tile[0];
        if (w) w[i] = 0;
    }
    t.x = k->tile, t.w = w, t.widths = &n, t.alone = 1, t.n = (n + LANES - 1) / LANES, t.wide = 1;
    t.has_tail = !w && n % LANES != 0;
    for (int l = 0; t.has_tail && l < LANES; ++l) t.tail[l] = l < n % LANES;
    if (w) level(w, t.n, 1);
    bound(k->tile, k->tile, t.n);
    y = y < -HUGEST ? -HUGEST : y > HUGEST ? HUGEST : y;
    if (t.c[0] > LARGE_C) {
        vec low, high, total;
        measure(t.x, NULL, t.n, &low, &high, &total);
        vec factor = shrinking(&t, splat(least(low)), splat(-least(-high)));
        if (factor[0] != 1) shrink(job, &t, t.x, k->tile, &r, factor), y *= factor[0];
    }
    int penalty = job->penalty < TRUNCATED ? job->penalty : HUBER; /* both have psi' = [|z| <= c] */
    Sums s = {0};
    if (job->penalty != ABSOLUTE) slopes_and_gains(penalty, &t, splat(y), &s);
    if (penalty == HUBER && !(s.h[0] > 0)) {
        middle_share(&t, y, v, out);
        return;
    }
    REAL least = s.gain[0] * (REAL)1e-3, divisor = s.h[0] > least ? s.h[0] : least;
    REAL scale = divisor > 0 ? v / divisor : 0;
    double moment = sum(write_shares(penalty, &t, splat(y), splat(scale), k->tile));
    memcpy(out, k->tile, (size_t)n * sizeof(REAL));
    job->radius[r] = (REAL)(moment / t.c[0]);
}

/* The gradients of short rows, one a lane; what is out of the ordinary is left to `pull_row`. */
static void pull_short_rows(Worker *k, int64_t first, int64_t count) {
    const Job *job = k->job;
    int64_t n = job->taps, row[LANES];
    int penalty = job->penalty < TRUNCATED ? job->penalty : HUBER; /* both have psi' = [|z| <= c] */
    Tile t = k->one;
    vec y, v;
    for (int l = 0; l < LANES; ++l) {
        row[l] = first + (l < count ? l : count - 1);
        y[l] = job->y[row[l]], v[l] = job->v[row[l]];
        if (job->c_step || job->shape_step) set_penalty(job, &t, row[l], l, 1);
    }
    t.x = k->tile, t.w = job->w ? k->weights : NULL, t.n = n, t.wide = 1;
    if (k->apart && count == LANES) read_block(job->x + first * k->apart, k->apart, k->tile, n);
    else
        for (int l = 0; l < LANES; ++l)
            read_row(k, row[l], k->tile + l, job->w ? k->weights + l : NULL, LANES, n);
    if (job->w) level(k->weights, n, 0);
    ivec odd = (y != y) | (t.c > LARGE_C);
    bound(k->tile, k->tile, n);
    y = vmin(vmax(y, splat(-HUGEST)), splat(HUGEST));
    Sums s = {0};
    slopes_and_gains(penalty, &t, y, &s);
    if (penalty == HUBER) odd |= ~(s.h > 0);
    vec divisor = vmax(s.h, s.gain * (REAL)1e-3), scale = pick(divisor > 0, v / divisor, splat(0));
    vec moment = write_shares(penalty, &t, y, scale, k->tile) / t.c;
    for (int64_t l = 0; l < count; ++l) {
        for (int64_t i = 0; i < n; ++i) job->share[row[l] * n + i] = k->tile[i * LANES + l];
        job->radius[row[l]] = moment[l];
    }
    for (int64_t l = 0; l < count; ++l)
        if (odd[l]) pull_row(k, row[l]);
}

typedef struct { /* what the threads of one call share */
    const Job *job;
    const int64_t *offsets;
    int64_t block, next;
    int flat, failed;
} Shared;

/* One thread: scratch memory, and blocks of rows until there are none. */
static void work(void *argument) {
    Shared *shared = argument;
    const Job *job = shared->job;
    Worker k = {.job = job, .x_offsets = shared->offsets, .w_offsets = shared->offsets + job->taps, .flat = shared->flat};
    int64_t room = job->taps + 2 * LANES, tile = LANES * LONG > room ? LANES * LONG : room;
    int sorts = job->penalty >= BARRON, searches = job->penalty == BARRON || job->penalty == WELSCH;
    k.tile = malloc((size_t)(2 * tile + sorts * 3 * room) * sizeof(REAL));
    double *prefix = malloc((size_t)(job->penalty == TRUNCATED ? 4 * (job->taps + 1) : 1) * sizeof(double));
    k.weights = k.tile + tile;
    if (sorts) k.own = (Scratch){.row = k.weights + tile, .weights = k.weights + tile + room, .prefix = prefix};
    k.own.position = k.own.weights + room;
    k.own.failed = !k.tile || !prefix || (searches && !reserve(&k.own, CELLS + 2));
    for (int l = 0; l < LANES; ++l) k.unusable[l] = -(INT)!set_penalty(job, &k.one, 0, l, 1);
    if (!job->w && !job->lengths && job->row_dims <= 1 && k.flat)
        k.apart = job->row_dims ? job->x_strides[0] : 0;
    int64_t begin;
    int by_groups = k.apart && job->taps % LANES == 0 && job->penalty <= PSEUDO_HUBER && !job->c_step;
    while (!k.own.failed && (begin = __atomic_fetch_add(&shared->next, shared->block, __ATOMIC_RELAXED)) < job->rows) {
        int64_t end = begin + shared->block < job->rows ? begin + shared->block : job->rows;
        if (job->penalty == QUADRATIC) {
            for (int64_t r = begin; r < end; ++r) job->share ? pull_mean(&k, r) : mean_row(&k, r);
            continue;
        }
        for (int64_t r = begin, count; job->share && r < end; r += count) {
            int together = job->taps < LONG && job->penalty != ABSOLUTE;
            count = !together ? 1 : end - r < LANES ? end - r : LANES;
            if (together) pull_short_rows(&k, r, count);
            else pull_row(&k, r);
        }
        for (int64_t r = begin, count; !job->share && r < end; r += count) {
            int alone = width_of(job, r) >= LONG;
            count = end - r < TOGETHER ? end - r : TOGETHER;
            if (alone && by_groups) {
                pool_long_rows(&k, r, count);
                continue;
            }
            for (count = 1; !alone && count < LANES && r + count < end && width_of(job, r + count) < LONG;) ++count;
            pool_rows(&k, r, count, alone, 0);
        }
    }
    if (k.own.failed) __atomic_store_n(&shared->failed, 1, __ATOMIC_RELAXED);
    free(k.tile);
    free(prefix);
    free(k.own.histogram);
}

/* Fills y and steps, or share and radius where they are given; 0, or 1 where memory ran out. */
int pool(const Job *job) {
    int64_t *offsets = malloc((size_t)(2 * job->taps + 2) * sizeof(int64_t)), d = job->row_dims;
    if (!offsets) return 1;
    for (int64_t i = 0; i < job->taps; ++i) {
        offsets[i] = offset(job->sizes + d, job->x_strides + d, job->tap_dims, i);
        offsets[job->taps + i] = job->w ? offset(job->sizes + d, job->w_strides + d, job->tap_dims, i) : 0;
    }
    Shared shared = {.job = job, .offsets = offsets, .block = (16384 / job->taps / LANES + 1) * LANES, .flat = 1};
    for (int64_t i = 0; i < job->taps; ++i) shared.flat &= offsets[i] == i;
    int64_t useful = job->rows / shared.block;
    unsigned threads = (unsigned)(job->threads < useful ? job->threads : useful);
    if (job->parallel && threads > 1)
        job->parallel(work, &shared, threads, 0);
    else
        work(&shared);
    free(offsets);
    return shared.failed;
}
