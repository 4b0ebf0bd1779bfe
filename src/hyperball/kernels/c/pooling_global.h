/* Penalties that are not convex, and the median: sorted rows, prefix sums, and the histogram that starts Welsch. */

enum { CELLS = 480, REACH = 16, GAP = 24 };

typedef struct { /* memory for one row and what is derived from it */
    REAL *row, *weights, *position, *histogram, *density, *table;
    int64_t cells; /* for which histogram and density have room */
    double *prefix;
    int failed;
} Scratch;

/* Room for a histogram of so many cells, its density and a table of their distances; whether there is. */
static int reserve(Scratch *m, int64_t cells) {
    if (cells <= m->cells) return 1;
    free(m->histogram);
    m->cells = 2 * cells;
    m->histogram = malloc((size_t)(4 * m->cells + 12 * (REACH + LANES)) * sizeof(REAL));
    m->density = m->histogram + m->cells + 4 * (REACH + LANES);
    m->table = m->density + m->cells + 4 * (REACH + LANES);
    if (!m->histogram) m->failed = 1, m->cells = 0;
    return !m->failed;
}

INLINE void swap(REAL *x, REAL *w, int64_t i, int64_t j) {
    REAL a = x[i];
    x[i] = x[j], x[j] = a;
    if (w) a = w[i], w[i] = w[j], w[j] = a;
}

static void sort(REAL *x, REAL *w, int64_t n) { /* quicksort by the median of three, the smaller part first */
    while (n > 24) {
        int64_t i = 0, j = n - 1, m = n / 2;
        if (x[m] < x[0]) swap(x, w, m, 0);
        if (x[j] < x[0]) swap(x, w, j, 0);
        if (x[j] < x[m]) swap(x, w, j, m);
        REAL pivot = x[m];
        while (i <= j) {
            while (x[i] < pivot) ++i;
            while (x[j] > pivot) --j;
            if (i <= j) swap(x, w, i++, j--);
        }
        if (j + 1 < n - i) {
            sort(x, w, j + 1);
            x += i, w = w ? w + i : w, n -= i;
        } else {
            sort(x + i, w ? w + i : w, n - i);
            n = j + 1;
        }
    }
    for (int64_t i = 1; i < n; ++i) {
        REAL a = x[i], b = w ? w[i] : 0;
        int64_t j = i;
        for (; j > 0 && x[j - 1] > a; --j) {
            x[j] = x[j - 1];
            if (w) w[j] = w[j - 1];
        }
        x[j] = a;
        if (w) w[j] = b;
    }
}

/* Every lane of a tile at once, by Batcher's merge exchange. */
static void sort_tile(REAL *x, REAL *w, int64_t n) {
    for (int64_t p = 1; p < n; p *= 2)
        for (int64_t k = p; k >= 1; k /= 2)
            for (int64_t j = k % p; j + k < n; j += 2 * k)
                for (int64_t i = j; i < j + k && i + k < n; ++i) {
                    if (i / (2 * p) != (i + k) / (2 * p)) continue;
                    vec *a = (vec *)(x + i * LANES), *b = (vec *)(x + (i + k) * LANES);
                    if (w) {
                        vec *u = (vec *)(w + i * LANES), *v = (vec *)(w + (i + k) * LANES), kept = *u;
                        *u = pick(*b < *a, *v, *u), *v = pick(*b < *a, kept, *v);
                    }
                    order(a, b);
                }
}

/* The bits of a number as an integer of the same order; its own inverse. */
INLINE ivec key(vec a) { return (ivec)a ^ ((ivec)a >> (sizeof(INT) * 8 - 1) & ALL_BUT_SIGN); }

/* The weight of the samples whose key is at most v; and, if asked for, the least sample beyond. */
INLINE vec weight_up_to(const Tile *t, ivec v, vec *beyond) {
    vec mass = splat(0), next = splat(INFINITY);
    for (int64_t i = 0; i < t->n; ++i) {
        vec x = *(const vec *)(t->x + i * LANES), w = splat(1);
        if (t->w) w = *(const vec *)(t->w + i * LANES);
        if (t->has_tail && i == t->n - 1) w = t->tail;
        ivec inside = key(x + 0) <= v;
        mass += (vec)(inside & (ivec)w);
        if (beyond) next = vmin(next, pick(~inside & (w > 0), x, splat(INFINITY)));
    }
    if (beyond) *beyond = next;
    if (!t->alone) return mass;
    if (beyond) *beyond = splat(least(next));
    return splat(sum(mass));
}

/* The mean of the two middle samples, found by bisecting the bits of the answer, in every lane at once. */
static vec median(const Tile *t, vec low, vec high) {
    ivec least = key(low), most = key(high);
    vec half = t->total * (REAL)0.5, slack = splat(1 + 4 * EPS), next;
    for (int k = 0; k < (int)sizeof(INT) * 8 && !all(least == most); ++k) {
        ivec middle = (least >> 1) + (most >> 1) + (least & most & 1);
        ivec enough = weight_up_to(t, middle, NULL) * slack >= half;
        ivec further = ~enough & (least < most);
        most = (enough & middle) | (~enough & most);
        least = (further & (middle + 1)) | (~further & least);
    }
    vec found = (vec)key((vec)most), mass = weight_up_to(t, most, &next);
    next = pick((mass > half * slack) | (next == INFINITY), found, next);
    return found + (next - found) * (REAL)0.5;
}

/* The best mean of a window of the sorted row no wider than 2c, by prefix sums; gaps beyond 3c are cut to 3c, which
   changes no window and keeps the sums accurate. Windows end at a sample, or begin just after one. */
static REAL truncated(const REAL *x, const REAL *w, int64_t n, double c, double *prefix) {
    double *t = prefix, *mass = t + n + 1, *first = mass + n + 1, *second = first + n + 1;
    mass[0] = first[0] = second[0] = t[0] = 0;
    for (int64_t i = 0; i < n; ++i) {
        double weight = w ? w[i] : 1;
        if (i) t[i] = t[i - 1] + fmin(((double)x[i] - (double)x[i - 1]) / c, 3);
        mass[i + 1] = mass[i] + weight;
        first[i + 1] = first[i] + weight * t[i];
        second[i + 1] = second[i] + weight * t[i] * t[i];
    }
    double best = -1, y = x[0];
    for (int64_t i = 0, begin = 0, end = 0; i < n; ++i) {
        while (t[begin] < t[i] - 2) ++begin;
        while (end < n && t[end] <= t[i] + 2) ++end;
        for (int leaving = 0; leaving < 2; ++leaving) {
            int64_t a = leaving ? i + 1 : begin, b = leaving ? end : i + 1;
            double m = mass[b] - mass[a], center = (first[b] - first[a]) / m;
            if (!(a < b) || !(m > 0)) continue;
            double saved = m - (second[b] - second[a] - (first[b] - first[a]) * center);
            if (saved > best) best = saved, y = (double)x[a] + (center - t[a]) * c;
        }
    }
    double inside = 0, off = 0;
    for (int64_t i = 0; i < n; ++i)
        if (fabs(x[i] - y) <= c) inside += w ? w[i] : 1, off += (w ? w[i] : 1) * (x[i] - y);
    return (REAL)(inside > 0 ? y + off / inside : y);
}

/* Where cell k of the histogram lies: `position` holds the cell coordinate of each sample of the sorted row. */
static REAL cell_center(const Scratch *m, int64_t n, REAL cell, REAL c, REAL low, int sorted) {
    if (!sorted) return low + cell * c / 4;
    int64_t a = 0, b = n - 1;
    while (a < b) {
        int64_t middle = (a + b + 1) / 2;
        if (m->position[middle] <= cell) a = middle; else b = middle - 1;
    }
    if (a + 1 < n && m->position[a + 1] - cell < cell - m->position[a]) ++a; /* gaps are cut, so use the nearer end */
    return m->row[a] + (cell - m->position[a]) * c / 4;
}

static int64_t fill_histogram(Scratch *m, const REAL *w, int64_t n, REAL c, REAL low, REAL high, int sorted) {
    REAL inverse = 4 / c;
    if (sorted) sort(m->row, (REAL *)w, n);
    for (int64_t i = 0; i < n; ++i) { /* a sample of weight 0 may lie outside the range */
        REAL from = sorted ? (i ? m->row[i - 1] : m->row[i]) : low, gap = (m->row[i] - from) * inverse;
        REAL most = sorted ? GAP : (high - low) * inverse;
        gap = gap < 0 ? 0 : gap < most ? gap : most;
        m->position[i] = sorted && i ? m->position[i - 1] + gap : gap;
    }
    int64_t cells = 2 + (int64_t)(sorted ? m->position[n - 1] : (high - low) * inverse);
    if (!reserve(m, cells)) return 0;
    memset(m->histogram, 0, (size_t)(cells + 2 * REACH + LANES) * sizeof(REAL));
    for (int64_t i = 0; i < n; ++i) {
        int64_t cell = (int64_t)m->position[i];
        REAL share = m->position[i] - (REAL)cell, weight = w ? w[i] : 1;
        m->histogram[REACH + cell] += weight * (1 - share);
        m->histogram[REACH + cell + 1] += weight * share;
    }
    return cells;
}

/* Whether cell i is a peak that comes close to the highest, or an end of a top so flat that it may hide two. */
INLINE int is_start(const REAL *d, int64_t i, int64_t cells, REAL highest) {
    REAL flat = highest * (REAL)0.995;
    if (d[i] >= d[i - 1] && d[i] > d[i + 1] && d[i] >= highest * (REAL)0.98) return 1;
    if (!(d[i] >= flat)) return 0;
    return (i + 3 < cells && d[i - 1] < flat && d[i + 3] >= flat) || (i >= 3 && d[i + 1] < flat && d[i - 3] >= flat);
}

/* The row of one lane of a tile by itself, x and w its own n samples and weights, the penalty that of the lane. */
static Tile lane_alone(const Tile *like, int lane, REAL *x, const REAL *w, int64_t n) {
    Tile row = *like;
    row.alone = 1, row.x = x, row.w = w, row.n = (n + LANES - 1) / LANES, row.has_tail = !w && n % LANES != 0;
    row.c = splat(like->c[lane]), row.over_c = splat(like->over_c[lane]), row.far = splat(like->far[lane]);
    row.shape = splat(like->shape[lane]), row.power = splat(like->power[lane]);
    for (int l = 0; l < LANES; ++l) row.tail[l] = l < n % LANES;
    for (int64_t i = n; i < row.n * LANES; ++i) x[i] = x[0];
    return row;
}

/* The peak of the exact sum of bells uphill from u, and its height. */
static REAL climb(const Tile *row, REAL start, REAL *height) {
    vec u = splat(start);
    Sums s;
    for (int j = 0; j <= 30; ++j) {
        slopes_and_gains(WELSCH, row, u, &s);
        vec step = s.g / pick(s.h > s.gain * (REAL)0.1, s.h, s.gain);
        if (j == 30 || !(fabs(step[0]) > 1e-3 * row->c[0])) break;
        u -= step;
    }
    *height = s.gain[0];
    return u[0];
}

/* A start in the basin of the global minimum: the highest peak of the smoothed histogram; others that come close to it
   are compared by their exact peaks. Uses, and may sort, the scratch row. A sample shared between two cells spreads by
   1/6 of a cell's square on average, by which the bell is narrower. */
static REAL welsch_start(Scratch *m, const Tile *row, const REAL *w, int64_t n, REAL low, REAL high) {
    REAL c = row->c[0];
    int sorted = !((high - low) * (4 / c) <= CELLS), rivals = 0;
    int64_t cells = fill_histogram(m, w, n, c, low, high, sorted);
    if (!cells) return low;
    REAL bell[2 * REACH + 1], highest = 0, best = low, top = -1;
    for (int j = -REACH; j <= REACH; ++j) bell[j + REACH] = (REAL)exp(-j * j / (2 * (16 - 1 / 6.0)));
    for (int64_t i = 0; i < cells; i += LANES) {
        vec d = splat(0);
        for (int j = 0; j <= 2 * REACH; ++j) d += bell[j] * *(const vec *)(m->histogram + i + j);
        *(vec *)(m->density + 1 + i) = d;
    }
    m->density[0] = m->density[cells + 1] = 0;
    const REAL *d = m->density + 1;
    for (int64_t i = 0; i < cells; ++i) highest = d[i] > highest ? d[i] : highest;
    for (int64_t i = 0; i < cells; ++i)
        if (is_start(d, i, cells, highest)) ++rivals, best = cell_center(m, n, (REAL)i, c, low, sorted);
    if (rivals <= 1) return best;
    for (int64_t i = 0; i < cells; ++i) {
        if (!is_start(d, i, cells, highest)) continue;
        REAL height, u = climb(row, cell_center(m, n, (REAL)i, c, low, sorted), &height);
        if (height > top) top = height, best = u;
    }
    return best;
}

/* From u downhill to the first of u +- c/2, c, 2c, 4c, ... beyond which the objective rises, else to the row's end. */
static void local_bracket(int penalty, const Tile *t, vec u, vec *low, vec *high) {
    Sums s;
    slopes(penalty, t, u, &s);
    vec reach = vmax(t->c, 8 * EPS * vabs(u)); /* c may be below the spacing of numbers */
    vec down = pick(s.g > 0, splat(-1), splat(1)), far = u + down * reach * (REAL)0.5;
    ivec crossed = s.g == 0;
    int rounds = penalty == BARRON ? 12 : 4; /* near shape 1 a minimum may lie far from its sample */
    for (int k = 0; k < rounds && !all(crossed); ++k) {
        slopes(penalty, t, far, &s);
        crossed |= s.g * down >= 0;
        far = pick(crossed, far, u + down * reach * (REAL)(1 << k));
    }
    far = pick(crossed, far, pick(down < 0, *low, *high));
    *low = vmin(u, far), *high = vmax(u, far);
}
