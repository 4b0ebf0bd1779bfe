/* The quadratic penalty: y = sum w x / sum w, summed in double about a sample of the row. A row's samples are summed in
   one order wherever they lie in memory. */

enum { WAYS = 8 };

/* A weight in units of the heaviest: one that counts stays above 0, so that an infinite sample keeps its say. */
INLINE double lightened(REAL w, double heaviest) {
    double share = w / heaviest;
    return w > 0 && share < DBL_MIN ? DBL_MIN : share;
}

/* sum w (x scale - origin), or without weights: several sums, so that one need not wait for the other. */
INLINE double shifted_sum(const REAL *x, const REAL *w, int64_t n, double origin, double scale, double heaviest) {
    double part[WAYS] = {0};
    int64_t i = 0;
    for (; i + WAYS <= n; i += WAYS)
#pragma GCC unroll 8
        for (int k = 0; k < WAYS; ++k)
            part[k] += (x[i + k] * scale - origin) * (w ? lightened(w[i + k], heaviest) : 1);
    for (; i < n; ++i) part[i % WAYS] += (x[i] * scale - origin) * (w ? lightened(w[i], heaviest) : 1);
    return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

typedef struct { /* the weights of a row: their number or sum in units of the heaviest, which is 0 where none counts */
    double heaviest, total;
} Mass;

static Mass mass_of(const REAL *w, int64_t n) {
    Mass m = {.heaviest = n > 0, .total = (double)n};
    if (!w) return m;
    m.heaviest = m.total = 0;
    for (int64_t i = 0; i < n; ++i) m.heaviest = w[i] > m.heaviest ? w[i] : m.heaviest;
    for (int64_t i = 0; i < n && m.heaviest > 0; ++i) m.total += lightened(w[i], m.heaviest);
    return m;
}

/* The mean in units of 1/scale. Samples of weight 0 are 0, and do not serve as the origin. */
INLINE double scaled_mean(const REAL *x, const REAL *w, int64_t n, Mass m, double scale) {
    int64_t first = 0;
    while (w && !(w[first] > 0)) ++first;
    double origin = x[first] * scale;
    if (!(fabs(origin) < INFINITY)) origin = 0;
    double sum = w ? shifted_sum(x, w, n, origin, scale, m.heaviest) : shifted_sum(x, NULL, n, origin, scale, 1);
    return origin + sum / m.total;
}

/* y, or the nearest number among the samples that count: a mean of finite samples is finite. */
static double among(const REAL *x, const REAL *w, int64_t n, double y) {
    double low = INFINITY, high = -INFINITY;
    for (int64_t i = 0; i < n; ++i) {
        if (w && !(w[i] > 0)) continue;
        low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    }
    return y < low ? low : y > high ? high : y;
}

static const REAL *samples_of(Worker *k, int64_t r, REAL *w) {
    if (k->apart && !w) return k->job->x + r * k->apart;
    read_row(k, r, k->tile, w, 1, width_of(k->job, r));
    return k->tile;
}

static void mean_row(Worker *k, int64_t r) {
    const Job *job = k->job;
    int64_t n = width_of(job, r);
    REAL *w = job->w ? k->weights : NULL;
    const REAL *x = samples_of(k, r, w);
    Mass m = mass_of(w, n);
    double y = NAN, small = 0x1p-128;
    if (m.heaviest > 0) {
        y = scaled_mean(x, w, n, m, 1);
        if (!(fabs(y) < INFINITY)) y = among(x, w, n, scaled_mean(x, w, n, m, small) / small); /* a sum too large */
    }
    job->y[r] = (REAL)y, job->steps[r] = 0;
}

/* The gradient of row r: v w / sum w for every tap; a broken row that is used spoils its own. */
static void pull_mean(Worker *k, int64_t r) {
    const Job *job = k->job;
    int64_t n = job->taps;
    REAL y = job->y[r], v = job->v[r], *out = job->share + r * n, *w = job->w ? k->weights : NULL;
    if (w) read_row(k, r, k->tile, w, 1, n);
    Mass m = mass_of(w, n);
    double each = y != y && v != 0 ? y : v / m.total;
    job->radius[r] = m.heaviest > 0 && y != y && v != 0 ? y : 0;
    if (w)
        for (int64_t i = 0; i < n; ++i) out[i] = w[i] > 0 ? (REAL)(each * lightened(w[i], m.heaviest)) : 0;
    else
        for (int64_t i = 0; i < n; ++i) out[i] = (REAL)each;
}
