/* Newton without a bracket for rows without weights: Huber and pseudo-Huber, which seldom need more.

   Pseudo-Huber is summed without its c: psi = c z r, psi' = c^3 r^3 and psi'' = -3 c^3 z r^5, r = 1/sqrt(c^2 + z^2).
   Where roots are coarse, r (1 + e/2 + 3 e^2/8) is the exact one, e = 1 - r^2 (c^2 + z^2): psi e is summed beside psi,
   and of e itself the mean does for psi'. */

enum { PLAIN_STEPS = 8, PROBED = 512, PROBE = 4, DEPTH = 8 };
enum { MANY_HUBER, ONE_HUBER, ROUGH, FINE }; /* Huber's inliers are counted in lanes, or by masks */

typedef struct { /* sums of psi (`rest` is what rounding took from it, `off` that of psi e), psi', |psi|, z r^5 and e */
    vec g, rest, off, h, size, bend, error;
    int64_t inside;
} Plain;

/* A one that the compiler does not know: y - x one is made where products are, beside minima, maxima and sums. */
INLINE vec hidden_one(void) {
    vec one = splat(1);
#ifdef __AVX512F__
    __asm__("" : "+v"(one));
#elif defined(__FMA__)
    __asm__("" : "+x"(one));
#endif
    return one;
}

INLINE void take(int kind, const Tile *t, vec y, vec x, vec one, Plain *p) {
    if (kind == MANY_HUBER || kind == ONE_HUBER) {
        vec z = y - x * one, psi = vmin(t->c, vmax(-t->c, z)); /* in this order a NaN stays one */
        p->g += psi * one;
        if (kind == ONE_HUBER && COUNTS_MASKS) p->inside += equal_lanes(psi, z);
        else p->h = count_equal(p->h, psi, z);
        return;
    }
    vec z = y - x, q = z * z + t->c * t->c, r = rsqrt(q, 0), psi = z * r, square = r * r;
    p->g += psi, p->h += square * r;
    if (kind == ROUGH) return;
    vec e = 1 - q * square;                                  /* NaN where z^2 is no number */
    if (COARSE_ROOTS && LANES < 16) e += (REAL)0.75 * e * e; /* twelve bits, where wider vectors have fourteen */
    p->off += psi * e, p->error += e;
    p->size += vabs(psi), p->bend += psi * square * square;
}

/* total += part; near the minimum g is a difference, so what rounding takes from it is kept. */
INLINE void merge(Plain *total, const Plain *part, int ways) {
    vec added = splat(0);
    for (int k = 0; k < ways; ++k) {
        added += part[k].g, total->off += part[k].off, total->h += part[k].h, total->size += part[k].size;
        total->bend += part[k].bend, total->error += part[k].error, total->inside += part[k].inside;
    }
    vec g = total->g + added, shifted = g - total->g;
    total->rest += (total->g - (g - shifted)) + (added - shifted);
    total->g = g;
}

/* Several sums at a time, so that one addition need not wait for the other, each of few numbers. */
INLINE Plain plain_run(int kind, const Tile *t, vec y, int64_t i, int64_t end, int64_t stride) {
    enum { MOST = 4 };
    int rooted = kind == ROUGH || kind == FINE, ways = rooted ? 2 : MOST, depth = rooted ? 4 * DEPTH : DEPTH;
    Plain total = {0};
    vec one = hidden_one();
    while (i < end) {
        Plain part[MOST] = {0};
        int64_t whole = i + depth * ways * stride, stop = whole < end ? whole : end;
        for (; i + (ways - 1) * stride < stop; i += ways * stride)
#pragma GCC unroll 4
            for (int k = 0; k < ways; ++k)
                take(kind, t, y, *(const vec *)(t->x + (i + k * stride) * LANES), one, part + k);
        for (; i < stop; i += stride) take(kind, t, y, *(const vec *)(t->x + i * LANES), one, part);
        merge(&total, part, ways);
    }
    return total;
}

/* One long row alone, its samples dealt out to the lanes: its sums are in lane 0, and 0 in the others. */
INLINE Plain alone_sums(int kind, const Tile *t, vec y, int64_t stride) {
    double g = 0, h = 0, size = 0, bend = 0, error = 0;
    for (int64_t from = 0; from < t->n; from += CHUNK * stride) {
        int64_t to = from + CHUNK * stride < t->n ? from + CHUNK * stride : t->n;
        Plain p = plain_run(kind, t, y, from, to, stride);
        g += sum(p.g) + sum(p.rest + p.off * (REAL)0.5);
        h += kind == ONE_HUBER && COUNTS_MASKS ? (double)p.inside : sum(p.h);
        if (kind == FINE) size += sum(p.size), bend += sum(p.bend), error += sum(p.error);
    }
    return (Plain){.g = {(REAL)g}, .h = {(REAL)h}, .size = {(REAL)size}, .bend = {(REAL)bend}, .error = {(REAL)error},
                   .inside = (int64_t)h};
}

/* Rows that are each alone, one after the other; the sums of row r are in lane r. Those over the lanes are taken of all
   rows at once, in the same order wherever a row stands, or of each by itself where it is long. */
INLINE Plain sums_together(int kind, Tile *t, vec y, ivec done, int64_t stride) {
    const REAL *first = t->x;
    int lone = t->n > CHUNK * stride;
    REAL at[LANES], inside[LANES];
    INT skip[LANES];
    vec part[5][LANES];
    *(vec *)at = y, *(ivec *)skip = done, *(vec *)inside = splat(1);
    for (int r = 0; r < LANES; ++r, t->x += t->apart) {
        Plain p = {0};
        if (r < t->together && !skip[r]) {
            for (int64_t i = 0; t->ahead && stride == 1 && i < t->n * LANES; i += LANES) /* while these are solved */
                __builtin_prefetch(t->ahead + r * t->apart + i, 0, 2);
            p = lone ? alone_sums(kind, t, splat(at[r]), stride) : plain_run(kind, t, splat(at[r]), 0, t->n, stride);
        }
        inside[r] = (REAL)p.inside, part[1][r] = p.h;
        part[0][r] = kind == FINE || kind == ROUGH ? p.g + (p.rest + p.off * (REAL)0.5) : p.g + p.rest;
        if (kind == FINE) part[2][r] = p.size, part[3][r] = p.bend, part[4][r] = p.error;
    }
    t->x = first, t->ahead = stride == 1 ? NULL : t->ahead;
    Plain all = {.g = sums_of_all(part[0])};
    all.h = kind == ONE_HUBER && COUNTS_MASKS ? *(vec *)inside : sums_of_all(part[1]);
    if (kind == FINE) all.size = sums_of_all(part[2]), all.bend = sums_of_all(part[3]);
    if (kind == FINE) all.error = sums_of_all(part[4]);
    return all;
}

static __attribute__((noinline)) void evaluate(int huber, int fine, Tile *t, vec y, ivec done, int64_t stride,
                                               Plain *p) {
    if (t->alone) {
        if (huber) *p = sums_together(ONE_HUBER, t, y, done, stride);
        else if (fine) *p = sums_together(FINE, t, y, done, stride);
        else *p = sums_together(ROUGH, t, y, done, stride);
        return;
    }
    if (huber) *p = plain_run(MANY_HUBER, t, y, 0, t->n, 1);
    else if (fine) *p = plain_run(FINE, t, y, 0, t->n, 1);
    else *p = plain_run(ROUGH, t, y, 0, t->n, 1);
    p->g += p->rest + p->off * (REAL)0.5;
}

/* The step of Newton's method and, for pseudo-Huber, of Chebyshev's, which takes psi'' along; sums get their c. *left
   times the step's cube bounds what it leaves of g, since the next derivative is at most 3/c^2. */
INLINE vec step_from(int huber, int fine, const Tile *t, Plain *p, vec *left) {
    if (huber) return p->g / p->h;
    if (fine) p->h *= 1 + (REAL)1.5 * p->error / t->total;
    vec c = t->c, over = 1 / p->h, step = p->g * over * t->over_c * t->over_c;
    p->g *= c, p->h *= c * c * c;
    if (!fine) return step;
    vec bent = p->bend * over * -3, turn = bent * step * (REAL)0.5;
    *left = (t->total * t->over_c * t->over_c + bent * bent * p->h) * (REAL)0.5;
    p->size *= c;
    return step * (1 + vmin(splat((REAL)0.5), vmax(splat((REAL)-0.5), turn)));
}

INLINE vec middle_of_five(vec a, vec b, vec c, vec d, vec e) {
    order(&a, &b), order(&c, &d);
    return middle(vmax(a, c), vmin(b, d), e);
}

/* The median of five medians of five evenly spaced samples of each lane, or the robust start of rows that are alone. */
INLINE vec plain_start(Tile *t) {
    if (!t->alone) {
        vec v[5][5];
#pragma GCC unroll 25
        for (int64_t j = 0; j < 25; ++j) v[j % 5][j / 5] = *(const vec *)(t->x + (j * t->n + t->n / 2) / 25 * LANES);
#pragma GCC unroll 5
        for (int j = 0; j < 5; ++j) v[j][0] = middle_of_five(v[j][0], v[j][1], v[j][2], v[j][3], v[j][4]);
        return middle_of_five(v[0][0], v[1][0], v[2][0], v[3][0], v[4][0]);
    }
    const REAL *first = t->x;
    vec v[LANES], a[9];
    for (int r = 0; r < LANES; ++r, t->x += t->apart) v[r] = r < t->together ? lane_medians(t) : splat(0);
    t->x = first;
    transpose(v);
    for (int j = 0; j < 9; ++j) a[j] = v[j * LANES / 9];
    return ninther(a);
}

static void plain_flats(Tile *t, vec *y, vec h, ivec solved) {
    const REAL *first = t->x;
    for (int l = 0; l < (t->alone ? t->together : LANES); ++l) {
        if (!solved[l] || h[l] > t->total[l] * (REAL)0.5001) continue;
        if (!t->alone) {
            middle_of_flat(t, y, l);
            continue;
        }
        vec one = splat((*y)[l]);
        t->x = first + l * t->apart;
        middle_of_flat(t, &one, 0);
        (*y)[l] = one[0];
    }
    t->x = first;
}

/* Whether rows of this penalty and radius may be tried. */
INLINE int is_plain(int penalty, const Tile *t, ivec unusable) {
    ivec usual = ~unusable & (t->c < LARGE_C);
    if (penalty == PSEUDO_HUBER) usual &= (t->c > (REAL)1e-8) & (t->c < (REAL)1e8);
    return (penalty == HUBER || penalty == PSEUDO_HUBER) && t->n >= 9 && !t->w && !t->has_tail && all(usual);
}

/* Returns the lanes that it solved. It gives up at samples that are no numbers, where the curvature is weak, where
   steps do not shrink, and where y may be its own only inlier. What is evaluated depends on the count of steps only, so
   a lane's bits do not depend on the others. */
static ivec solve_plainly(int penalty, Tile *t, vec *answer, ivec *taken) {
    int huber = penalty == HUBER, rough = !huber && COARSE_ROOTS ? (t->alone ? 1 : 2) : 0;
    vec y = plain_start(t), before = splat(INFINITY), last = before, h = before, left = splat(0);
    ivec solved = {0}, failed = {0};
    Plain p;
    for (int l = t->alone ? t->together : LANES; l < LANES; ++l) solved[l] = -1;
    if (t->alone && t->n >= PROBED / LANES) { /* a part of the samples brings it near */
        evaluate(huber, 0, t, y, solved, PROBE, &p);
        y -= step_from(huber, 0, t, &p, &left);
        failed = ~(p.h > (REAL)(0.1 / PROBE) * t->total);
    }
    for (int k = 0; k < PLAIN_STEPS && !all(solved | failed); ++k) {
        evaluate(huber, k >= rough, t, y, solved | failed, 1, &p);
        vec step = step_from(huber, k >= rough, t, &p, &left), moved = vabs(step), at = vabs(y);
        ivec open = ~(solved | failed), still = moved <= 2 * EPS * at;
        *taken -= open;
        h = pick(open, p.h, h);
        failed |= open & ~((p.h > (REAL)0.1 * t->total) & (moved <= before * (REAL)0.5) & (64 * EPS * at <= t->c));
        y = pick(open, y - step, y);
        if (huber) still |= moved <= EPS * t->c; /* whoever crosses c by that is no more than rounding */
        else still |= moved * moved * moved * left <= EPS / 16 * p.size;
        if (k >= rough) solved |= open & ~failed & still;
        before = last, last = moved;
    }
    if (huber && !all(~solved | (h > t->total * (REAL)0.5001))) plain_flats(t, &y, h, solved);
    *answer = y;
    return solved;
}
