/* Barron's loss below shape 1, which is not convex: what a row costs, and a start in the basin of its least minimum. */

enum { FOLLOWED = 8, TRIED = 256, SCANNED = 64, MOST_CELLS = 8192 };

typedef struct { /* points of low cost, no two of which are nearer than c/8, and what they cost */
    REAL at[FOLLOWED];
    double cost[FOLLOWED];
} Best;

/* phi/c^2 = b (L/2) (e^o - 1)/o with L = log(1 + u^2), u = z/(c sqrt b), o = shape L/2. */
INLINE vec barron_cost(const Tile *t, vec z) {
    vec share, log = log_one_plus_square(vmin(t->far, vmax(-t->far, z)) * t->over_c, &share);
    vec o = log * t->shape * (REAL)0.5, series = splat(1), b = vmax(vabs(t->shape - 2), splat((REAL)1e-6));
#pragma GCC unroll 16
    for (int j = EXP_TERMS + 1; j > 1; --j) series = series * o * ((REAL)1 / j) + 1;
    return b * log * (REAL)0.5 * pick(vabs(o) < (REAL)0.5, series, (vexp(o) - 1) / o);
}

/* sum w phi(u - x)/c^2 over a row that is alone. */
static double row_cost(const Tile *row, REAL u) {
    double total = 0;
    for (int64_t i = 0; i < row->n;) {
        vec some = splat(0);
        for (int64_t stop = i + 16 < row->n ? i + 16 : row->n; i < stop; ++i) {
            vec cost = barron_cost(row, u - *(const vec *)(row->x + i * LANES));
            if (row->w) cost *= *(const vec *)(row->w + i * LANES);
            if (row->has_tail && i == row->n - 1) cost *= row->tail;
            some += cost;
        }
        total += sum(some);
    }
    return total;
}

static Best nothing_yet(void) {
    Best best;
    for (int k = 0; k < FOLLOWED; ++k) best.at[k] = 0, best.cost[k] = INFINITY;
    return best;
}

/* Takes u, one step downhill, in place of the point next to it, or of the worst, if it costs less; returns the cost. */
static double offer(Best *best, const Tile *row, REAL u) {
    Sums s;
    int place = 0;
    slopes_and_gains(BARRON, row, splat(u), &s);
    REAL step = s.gain[0] > 0 ? s.g[0] / s.gain[0] : 0; /* which never leads uphill */
    if (fabs(step) > 4 * EPS * fabs(u)) u -= step;
    double cost = row_cost(row, u);
    for (int k = 1; k < FOLLOWED; ++k)
        if (best->cost[k] > best->cost[place]) place = k;
    for (int k = 0; k < FOLLOWED; ++k)
        if (best->cost[k] < INFINITY && fabs(best->at[k] - u) <= row->c[0] * (REAL)0.125) place = k;
    if (cost < best->cost[place]) best->cost[place] = cost, best->at[place] = u;
    return cost;
}

/* The deepest of the minima downhill from the points that were kept. */
static REAL deepest(const Best *best, const Tile *row, REAL low, REAL high, ivec *taken) {
    double least = INFINITY;
    REAL found = low;
    for (int k = 0; k < FOLLOWED; ++k) {
        if (!(best->cost[k] < INFINITY)) continue;
        vec u = splat(best->at[k]), from = splat(low), to = splat(high);
        ivec steps = {0};
        local_bracket(BARRON, row, u, &from, &to);
        solve(BARRON, row, &u, from, to, (ivec){0}, &steps);
        double cost = row_cost(row, u[0]), rounding = 32 * EPS * best->cost[k];
        if (row->c[0] < 4 * EPS * fabs(u[0])) rounding = -rounding; /* a sample that is its own only inlier stays */
        if (cost > best->cost[k] + rounding) cost = best->cost[k], u = splat(best->at[k]);
        if (cost < least) least = cost, found = u[0], *taken = steps;
    }
    return found;
}

/* The cost at the histogram's cells, and one to either side: cell i is density[1 + i]. A sample shared between two
   cells spreads by 1/6 of a cell's square on average, which psi'/192 takes away again. */
static void cell_costs(Scratch *m, const Tile *row, int64_t cells) {
    vec psi, curvature, gain, cell;
    REAL *table = m->table + cells; /* of distances from -cells on */
    for (int l = 0; l < LANES; ++l) cell[l] = (REAL)l;
    for (int64_t j = -cells; j <= cells; j += LANES) {
        vec z = ((REAL)j + cell) * row->c[0] * (REAL)0.25;
        influence(BARRON, 1, row, z, &psi, &curvature, &gain);
        *(vec *)(table + j) = barron_cost(row, z) - curvature * (REAL)(1 / 192.0);
    }
    memset(m->density, 0, (size_t)(cells + 2 + LANES) * sizeof(REAL));
    for (int64_t k = 0; k < cells; ++k) {
        REAL weight = m->histogram[REACH + k];
        if (!(weight > 0)) continue;
        for (int64_t i = 0; i < cells + 2; i += LANES)
            *(vec *)(m->density + i) += weight * *(const vec *)(table + i - 1 - k);
    }
}

/* Whether cell i is a minimum of the costs d; then where its parabola is least, what that costs and how it bends. */
INLINE int is_dip(const REAL *d, int64_t i, REAL *at, REAL *depth, REAL *bend) {
    if (!(d[i] <= d[i - 1] && d[i] < d[i + 1])) return 0;
    REAL slope = (d[i + 1] - d[i - 1]) / 2;
    *bend = d[i - 1] - 2 * d[i] + d[i + 1];
    *at = (REAL)i - slope / *bend, *depth = d[i] - slope * slope / (2 * *bend);
    return 1;
}

/* Offers the dips of the costs d that may be as deep as the lowest, and the ends of a bottom so flat that it may hide
   two; returns how many that were. Without `best` it only counts. */
static int offer_dips(Best *best, const Tile *row, const REAL *d, int64_t cells, REAL low, REAL lowest, REAL slack) {
    int offered = 0;
    for (int64_t i = 0; i < cells; ++i) {
        REAL at = 0, depth = 0, bend = 0;
        int dip = is_dip(d, i, &at, &depth, &bend), flat = d[i] <= lowest + slack;
        int ends = (i + 2 < cells && d[i - 1] > lowest + slack && d[i + 2] <= lowest + slack) ||
                   (i >= 2 && d[i + 1] > lowest + slack && d[i - 2] <= lowest + slack);
        if (!(dip && depth <= lowest + slack + (REAL)0.16 * bend) && !(flat && ends)) continue;
        ++offered;
        if (best) offer(best, row, low + (dip ? at : (REAL)i) * row->c[0] / 4);
    }
    return offered;
}

/* The least cell of the histogram; others that may be as deep are compared by their exact minima, and *settled. */
static REAL least_cell(Scratch *m, const Tile *row, int64_t cells, REAL low, REAL high, ivec *taken, int *settled) {
    const REAL *d = m->density + 1;
    REAL at, depth, bend, first = 0, lowest = INFINITY;
    Best best = nothing_yet();
    Sums s;
    for (int64_t i = 0; i < cells; ++i)
        if (is_dip(d, i, &at, &depth, &bend) && depth < lowest) lowest = depth, first = at;
    first = low + first * row->c[0] / 4;
    slopes_and_gains(BARRON, row, splat(first), &s);
    REAL slack = (REAL)0.015 * s.gain[0] + 64 * EPS * (REAL)fabs(lowest);
    *settled = offer_dips(NULL, row, d, cells, low, lowest, slack) > 1;
    if (!*settled) return first;
    offer_dips(&best, row, d, cells, low, lowest, slack);
    return deepest(&best, row, low, high, taken);
}

/* The first sample of each quarter of c that holds one, in order; how many there are. */
static int64_t sorted_heads(Scratch *m, const REAL *w, int64_t n, REAL c) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (w && !(w[i] > 0)) continue;
        if (!count || m->row[i] - m->position[count - 1] > c / 4) m->position[count++] = m->row[i];
    }
    return count;
}

/* Heads at equal distances, then ever nearer ones around the best. */
static void scan_heads(const Scratch *m, Best *best, const Tile *row, int64_t count) {
    int64_t center = count / 2;
    for (double reach = 0.5 * (double)count; reach > 1; reach *= 3.0 / SCANNED) {
        double least = INFINITY;
        int64_t middle = center;
        for (int j = 0; j <= SCANNED; ++j) {
            int64_t i = middle + (int64_t)((2.0 * j / SCANNED - 1) * reach);
            i = i < 0 ? 0 : i < count ? i : count - 1;
            double cost = offer(best, row, m->position[i]);
            if (cost < least) least = cost, center = i;
        }
    }
}

/* The heads that are followed by the greatest weight within 2c come first. */
static int sort_by_crowding(Scratch *m, const REAL *w, int64_t n, REAL c, int64_t count) {
    if (!reserve(m, count)) return 0;
    double inside = 0;
    for (int64_t k = 0, begin = 0, end = 0; k < count; ++k) {
        for (; begin < n && m->row[begin] < m->position[k]; ++begin) inside -= begin < end ? (w ? w[begin] : 1) : 0;
        end = end > begin ? end : begin;
        for (; end < n && m->row[end] - m->position[k] <= 2 * c; ++end) inside += w ? w[end] : 1;
        m->histogram[k] = (REAL)-inside;
    }
    sort(m->histogram, m->position, count);
    return 1;
}

/* A start in the basin of the least minimum of a row over a shape below 1, or, *settled, the minimum itself: by a
   histogram where the row's range has few enough cells, else from its samples, of which the most crowded do where there
   are many. May sort the scratch row. */
static REAL barron_start(Scratch *m, const Tile *row, REAL *w, int64_t n, REAL low, REAL high, ivec *taken,
                         int *settled) {
    REAL c = row->c[0];
    if ((high - low) * (4 / c) <= (n < CELLS ? CELLS : n < MOST_CELLS ? n : MOST_CELLS)) {
        int64_t cells = fill_histogram(m, w, n, c, low, high, 0);
        if (!cells) return low;
        cell_costs(m, row, cells);
        return least_cell(m, row, cells, low, high, taken, settled);
    }
    Best best = nothing_yet();
    sort(m->row, w, n);
    int64_t heads = sorted_heads(m, w, n, c), tried = heads < TRIED ? heads : TRIED;
    if (heads > TRIED) {
        scan_heads(m, &best, row, heads);
        if (!sort_by_crowding(m, w, n, c, heads)) return low;
    }
    for (int64_t k = 0; k < tried; ++k) offer(&best, row, m->position[k]);
    *settled = 1;
    return deepest(&best, row, low, high, taken);
}
