/* Penalties on lanes, and their sums over a tile: a row a lane, or one row whose samples are dealt out to the lanes. */

#include "lanes.h"

enum { HUBER, PSEUDO_HUBER, BARRON, WELSCH, TRUNCATED, ABSOLUTE, QUADRATIC, LONE_HUBER };
enum { CHUNK = 256, LEVELS = LANES == 16 ? 4 : LANES == 8 ? 3 : LANES == 4 ? 2 : 1 }; /* LEVELS: of a transposition */

typedef struct { /* a row a lane, or one row alone; n is in vectors, and the last one counts where `tail` is 1 */
    const REAL *x, *w;
    int64_t n;
    int alone, ragged, has_tail, wide;
    const int64_t *widths; /* samples of each lane's row; of lane 0 only for a row alone */
    vec tail, total, c, over_c, far, power, shape;
    int together;      /* rows, each alone, that `solve_plainly` solves at once, one a lane, */
    int64_t apart;     /* so far from each other, */
    const REAL *ahead; /* and what will be solved after them, or NULL */
} Tile;

/* The lanes of two vectors that go to the first, and to the second, in level k of a transposition. */
INLINE void exchange(int k, ivec *low, ivec *high) {
    for (int l = 0, s = 1 << k; l < LANES; ++l)
        (*low)[l] = l & s ? LANES + l - s : l, (*high)[l] = l & s ? LANES + l : l + s;
}

/* [r][l] to [l][r] of as many vectors as lanes. */
INLINE void transpose(vec *v) {
#ifdef __clang__
    for (int r = 0; r < LANES; ++r)
        for (int l = 0; l < r; ++l) {
            REAL kept = v[r][l];
            v[r][l] = v[l][r], v[l][r] = kept;
        }
#else
#pragma GCC unroll 4
    for (int k = 0; k < LEVELS; ++k) {
        ivec low, high;
        exchange(k, &low, &high);
#pragma GCC unroll 16
        for (int r = 0; r < LANES; ++r)
            if (!(r >> k & 1)) {
                vec a = v[r], b = v[r + (1 << k)];
                v[r] = __builtin_shuffle(a, b, low), v[r + (1 << k)] = __builtin_shuffle(a, b, high);
            }
    }
#endif
}

/* The sum over the lanes of vector r in lane r, pair by pair, for as many vectors as lanes; `v` is lost. */
INLINE vec sums_of_all(vec *v) {
#ifdef __clang__
    for (int r = 0; r < LANES; ++r) v[r][0] = (REAL)sum(v[r]);
    for (int r = 1; r < LANES; ++r) v[0][r] = v[r][0];
#else
#pragma GCC unroll 4
    for (int k = 0; k < LEVELS; ++k) {
        ivec low, high;
        exchange(k, &low, &high);
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r += 2 << k)
            v[r] = __builtin_shuffle(v[r], v[r + (1 << k)], low) + __builtin_shuffle(v[r], v[r + (1 << k)], high);
    }
#endif
    return v[0];
}

/* Each row's weights times the power of two that brings the greatest near 1: only their ratios count, and products
   with samples that are as small must not vanish. */
static void level(REAL *w, int64_t n, int alone) {
    vec most = splat(0), factor = splat(1);
    for (int64_t i = 0; i < n; ++i) most = vmax(most, *(const vec *)(w + i * LANES));
    if (alone) most = splat(-least(-most));
    ivec kept = ~(most > 0) | ((most >= (REAL)0.5) & (most < 2)) | (most > 8 * HUGEST);
    if (all(kept)) return;
    for (int l = 0, exponent; l < LANES; ++l) {
        if (kept[l]) continue;
        frexp(most[l], &exponent);
        factor[l] = (REAL)ldexp(1, exponent < 1 - BIAS ? BIAS - 1 : -exponent);
    }
    for (int64_t i = 0; i < n; ++i) *(vec *)(w + i * LANES) *= factor;
}

/* log(1 + u^2) and u^2/(1 + u^2), also where u^2 is too large for a number, or 1 + u^2 is 1. */
INLINE vec log_one_plus_square(vec u, vec *share) {
    vec length = vmin(vabs(u), splat(BARRON_FAR)), square = u * u, w = square + 1, over = 1 / w;
    ivec away = length > FAR;
    vec log = vlog(pick(away, length, w)), lost = (square - (w - 1)) * over; /* what adding 1 took from it */
    *share = pick(away, splat(1), square * over);
    return pick(away, log + log, log + lost);
}

/* psi, psi' and the gain s = psi/z of a penalty. */
INLINE void influence(int penalty, int fine, const Tile *t, vec z, vec *psi, vec *curvature, vec *gain) {
    if (penalty == HUBER || penalty == LONE_HUBER) {
        *psi = vmin(t->c, vmax(-t->c, z)); /* in this order a NaN stays one */
        *curvature = (vec)((*psi == z) & (ivec)splat(1));
        *gain = t->c / vmax(vabs(z), t->c);
        return;
    }
    if (t->wide || penalty != PSEUDO_HUBER) z = vmin(t->far, vmax(-t->far, z));
    vec u = z * t->over_c, square = u * u;
    if (penalty == BARRON) {
        vec share, log = log_one_plus_square(u, &share);
        *gain = vexp(log * t->power);
        *curvature = *gain * (1 + (t->shape - 2) * share);
    }
    if (penalty == PSEUDO_HUBER) {
        *gain = rsqrt(square + 1, fine);
        *curvature = *gain * *gain * *gain;
    } else if (penalty == WELSCH) {
        *gain = vexp(square * (REAL)-0.5);
        *curvature = (1 - square) * *gain;
    }
    *psi = z * *gain;
}

typedef struct { /* over a row, in every lane: sum w psi, w |psi|, w psi', w s */
    vec g, rest, size, h, gain;
    int64_t inside; /* how many samples a row alone has with |z| <= c */
} Sums;

enum { SLOPE = 1, SIZE = 2, GAIN = 4 };

INLINE void add(int penalty, int fine, int what, const Tile *t, vec y, const REAL *x, const REAL *w, Sums *s) {
    vec z = y - *(const vec *)x, psi, curvature, gain;
    influence(penalty, fine, t, z, &psi, &curvature, &gain);
    int lone = penalty == LONE_HUBER && COUNTS_MASKS && !w, counted = !lone && !w;
    counted = counted && (penalty == HUBER || penalty == LONE_HUBER);
    if (w) psi *= *(const vec *)w, curvature *= *(const vec *)w, gain *= *(const vec *)w;
    if (what & SLOPE) s->g += psi;
    if (what & SLOPE && counted) s->h = count_equal(s->h, psi, z);
    if (what & SLOPE && lone) s->inside += equal_lanes(psi, z);
    if (what & SLOPE && !counted && !lone) s->h += curvature;
    if (what & SIZE) s->size += vabs(psi);
    if (what & GAIN) s->gain += gain;
}

/* total += part, where total.rest keeps what rounding takes from total.g: near the minimum g is a difference. */
INLINE void fold(Sums *total, const Sums *a, const Sums *b) {
    vec part = a->g + b->g, g = total->g + part, shifted = g - total->g;
    total->rest += (total->g - (g - shifted)) + (part - shifted);
    total->g = g, total->h += a->h + b->h, total->size += a->size + b->size, total->gain += a->gain + b->gain;
    total->inside += a->inside + b->inside;
}

/* Short runs of two sums at a time, so that one addition need not wait for the other. */
INLINE Sums chunk(int penalty, int fine, int what, const Tile *t, const REAL *w, vec y, int64_t i, int64_t end,
                  int64_t stride) {
    Sums total = {0};
    int huber = penalty == HUBER || penalty == LONE_HUBER;
    int64_t run = stride * (fine && !(huber && what & SIZE) ? 16 : 64); /* short where it may be the last evaluation */
    while (i < end) {
        Sums a = {0}, b = {0};
        int64_t stop = i + run < end ? i + run : end;
        for (; i + stride < stop; i += 2 * stride) {
            add(penalty, fine, what, t, y, t->x + i * LANES, w ? w + i * LANES : NULL, &a);
            add(penalty, fine, what, t, y, t->x + (i + stride) * LANES, w ? w + (i + stride) * LANES : NULL, &b);
        }
        if (i < stop) add(penalty, fine, what, t, y, t->x + i * LANES, w ? w + i * LANES : NULL, &a), i += stride;
        fold(&total, &a, &b);
    }
    return total;
}

INLINE void totals(int penalty, int fine, int what, const Tile *t, int64_t stride, vec y, Sums *out) {
    double g = 0, size = 0, h = 0, gain = 0;
    int64_t full = t->n - t->has_tail;
    for (int64_t from = 0; from < t->n; from += CHUNK * stride) {
        int64_t to = from + CHUNK * stride < full ? from + CHUNK * stride : full;
        Sums s = t->w ? chunk(penalty, fine, what, t, t->w, y, from, to, stride)
                      : chunk(penalty, fine, what, t, NULL, y, from, to, stride);
        if (t->has_tail && from + CHUNK >= t->n && stride == 1)
            add(penalty, fine, what, t, y, t->x + full * LANES, (const REAL *)&t->tail, &s);
        if (!t->alone) {
            *out = s, out->g += s.rest;
            return;
        }
        if (what & SLOPE) g += sum(s.g) + sum(s.rest), h += sum(s.h) + (double)s.inside;
        if (what & SIZE) size += sum(s.size);
        if (what & GAIN) gain += sum(s.gain);
    }
    *out = (Sums){.g = splat((REAL)g), .size = splat((REAL)size), .h = splat((REAL)h), .gain = splat((REAL)gain)};
}

#define CASES(fine, what, t, stride, y, out)                                                                          \
    switch (penalty) {                                                                                                \
        case HUBER:                                                                                                   \
            if (t->alone && !t->w) totals(LONE_HUBER, fine, what, t, stride, y, out);                                 \
            else totals(HUBER, fine, what, t, stride, y, out);                                                        \
            break;                                                                                                    \
        case PSEUDO_HUBER: totals(PSEUDO_HUBER, fine, what, t, stride, y, out); break;                                \
        case BARRON: totals(BARRON, fine, what, t, stride, y, out); break;                                            \
        default: totals(WELSCH, fine, what, t, stride, y, out);                                                       \
    }

static void coarse(int penalty, const Tile *t, int64_t stride, vec y, Sums *s) { CASES(0, SLOPE, t, stride, y, s) }
static void slopes(int penalty, const Tile *t, vec y, Sums *s) { CASES(1, SLOPE, t, 1, y, s) }
static void slopes_and_sizes(int penalty, const Tile *t, vec y, Sums *s) { CASES(1, SLOPE | SIZE, t, 1, y, s) }
static void gains(int penalty, const Tile *t, vec y, Sums *s) { CASES(1, GAIN, t, 1, y, s) }
static void slopes_and_gains(int penalty, const Tile *t, vec y, Sums *s) { CASES(1, SLOPE | GAIN, t, 1, y, s) }
