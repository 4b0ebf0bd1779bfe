/* The job, what a thread works in, and how rows are read into tiles, measured and bounded. */

typedef struct {
    const REAL *x, *w, *c, *shape; /* w may be NULL; c and shape advance by their step a row */
    int64_t c_step, shape_step, rows, taps;
    int64_t row_dims, tap_dims;
    const int64_t *sizes, *x_strides, *w_strides; /* of the row dimensions, then of the tap dimensions */
    const int64_t *bases, *lengths;               /* of ragged rows, else NULL: where each begins, how long it is */
    REAL *y; /* filled by `pool`, read by `pull` */
    int32_t *steps;
    const REAL *v;        /* for `pull`: the gradient of y, */
    REAL *share, *radius; /* that of every tap, [rows, taps], and of every row's c; else NULL */
    int32_t penalty, threads;
    void (*parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags); /* GOMP_parallel, or NULL */
} Job;

typedef struct { /* what one thread works in */
    const Job *job;
    const int64_t *x_offsets, *w_offsets;
    REAL *tile, *weights;
    Scratch own;
    int flat;      /* whether the samples of a row lie one after the other, in the order of its taps */
    int64_t apart; /* from row to row, where rows are flat and without weights; else 0 */
    Tile one;      /* the penalty, where it is the same for all rows */
    ivec unusable;
} Worker;

static int64_t offset(const int64_t *sizes, const int64_t *strides, int64_t dims, int64_t index) {
    int64_t at = 0;
    for (int64_t d = dims - 1; d > 0; --d) at += index % sizes[d] * strides[d], index /= sizes[d];
    return dims ? at + index * strides[0] : 0;
}

INLINE int64_t width_of(const Job *job, int64_t r) { return job->lengths ? job->lengths[r] : job->taps; }

/* Row r into x[0], x[step], …, and its weights; what is absent (weight 0, or beyond the row's end) is 0 in both. */
static void read_row(const Worker *k, int64_t r, REAL *x, REAL *w, int64_t step, int64_t room) {
    const Job *job = k->job;
    int64_t n = width_of(job, r);
    const REAL *from = job->x + (job->bases ? job->bases[r] : offset(job->sizes, job->x_strides, job->row_dims, r));
    if (step == 1 && k->flat)
        memcpy(x, from, (size_t)n * sizeof(REAL));
    else
        for (int64_t i = 0; i < n; ++i) x[i * step] = from[k->x_offsets[i]];
    if (!w) return;
    int64_t base = job->bases ? job->bases[r] : job->w ? offset(job->sizes, job->w_strides, job->row_dims, r) : 0;
    const REAL *weight = job->w ? job->w + base : NULL;
    for (int64_t i = 0; i < room; ++i) {
        REAL value = i >= n ? 0 : weight ? weight[k->w_offsets[i]] : 1;
        w[i * step] = value > 0 ? value : 0;
        if (!(value > 0)) x[i * step] = 0;
    }
}

/* A tile of rows that are contiguous and `apart` from each other: [lane][i] to [i][lane]. */
static void read_block(const REAL *from, int64_t apart, REAL *tile, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec v[LANES];
#pragma GCC unroll 16
        for (int l = 0; l < LANES; ++l) v[l] = *(const vec *)(from + l * apart + i);
        transpose(v);
#pragma GCC unroll 16
        for (int l = 0; l < LANES; ++l) *(vec *)(tile + (i + l) * LANES) = v[l];
    }
    for (; i < n; ++i)
        for (int l = 0; l < LANES; ++l) tile[i * LANES + l] = from[l * apart + i];
}

INLINE int measure_some(const REAL *x, const REAL *w, int64_t n, vec *least, vec *most, vec *mass) {
    vec low = splat(INFINITY), high = -low, total = splat(0), odd = splat(0);
    for (int64_t i = 0; i < n; ++i) {
        vec v = *(const vec *)(x + i * LANES);
        odd += v * 0; /* NaN where v is not finite */
        if (w) {
            vec weight = *(const vec *)(w + i * LANES);
            low = vmin(low, pick(weight > 0, v, splat(INFINITY)));
            high = vmax(high, pick(weight > 0, v, splat(-INFINITY)));
            total += weight;
        } else {
            low = vmin(low, v), high = vmax(high, v);
        }
    }
    *least = low, *most = high, *mass = total;
    return all((odd == 0) & ~(low < -HUGEST) & ~(high > HUGEST));
}

/* The range and weight of the samples that count; 0 where some are not finite, or next to it. */
static int measure(const REAL *x, const REAL *w, int64_t n, vec *low, vec *high, vec *total) {
    return w ? measure_some(x, w, n, low, high, total) : measure_some(x, NULL, n, low, high, total);
}

/* Copies the samples and bounds them; returns the lanes that hold a NaN. */
static ivec bound(const REAL *from, REAL *x, int64_t n) {
    ivec broken = {0};
    for (int64_t i = 0; i < n * LANES; i += LANES) {
        vec v = *(const vec *)(from + i);
        broken |= v != v;
        *(vec *)(x + i) = vmin(vmax(v, splat(-HUGEST)), splat(HUGEST));
    }
    return broken;
}
