/* Lanes: vectors as wide as the processor's, the penalties on them, and their sums over a tile.

   REAL is float, or double where DOUBLE is defined. Vector types are GCC's and Clang's own; the processor's instructions
   add what they lack. A tile is a row a lane, or one row whose samples are dealt out to the lanes. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
enum { BYTES = 64 };
#elif defined(__AVX__)
#include <immintrin.h>
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif

#ifdef DOUBLE
typedef double REAL;
typedef int64_t INT;
#define ALL_BUT_SIGN INT64_MAX
#define EPS 2.220446049250313e-16
#define HUGEST (1.7976931348623157e308 / 8)
#define FAR 1e150
#define SMALLEST 1e-300
#define LARGEST 1e290
#define LARGE_C 1e270
#define LARGE_X 1e250
#define SHRINK 0x1p-130
#define BARRON_FAR 1e300
#define SUMMABLE 1e300
#define MANTISSA 52
#define BIAS 1023
#define LEAST_EXPONENT -708
#define EXP_TERMS 13
#define LOG_TERMS 11
#else
typedef float REAL;
typedef int32_t INT;
#define ALL_BUT_SIGN INT32_MAX
#define EPS 1.1920929e-7f
#define HUGEST (3.4028235e38f / 8)
#define FAR 1e18f
#define SMALLEST 1e-36f
#define LARGEST 1e30f
#define LARGE_C 1e22f
#define LARGE_X 1e18f
#define SHRINK 0x1p-50f
#define BARRON_FAR 1e37f
#define SUMMABLE 1e33f
#define MANTISSA 23
#define BIAS 127
#define LEAST_EXPONENT -87
#define EXP_TERMS 7
#define LOG_TERMS 5
#endif

enum { HUBER, PSEUDO_HUBER, BARRON, WELSCH, TRUNCATED, ABSOLUTE, LONE_HUBER };
enum { LANES = BYTES / sizeof(REAL), CHUNK = 256 };

typedef REAL vec __attribute__((vector_size(LANES * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
typedef INT ivec __attribute__((vector_size(LANES * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
#define INLINE static inline __attribute__((always_inline))

typedef struct { /* a row a lane, or one row alone; n is in vectors, and the last one counts where `tail` is 1 */
    const REAL *x, *w;
    int64_t n;
    int alone, ragged, has_tail, wide;
    const int64_t *widths; /* samples of each lane's row; of lane 0 only for a row alone */
    vec tail, total, c, over_c, far, power, shape;
} Tile;

INLINE vec splat(REAL a) { return a - (vec){0}; }
INLINE vec pick(ivec m, vec a, vec b) { return (vec)((m & (ivec)a) | (~m & (ivec)b)); }
INLINE vec vabs(vec a) { return (vec)((ivec)a & ALL_BUT_SIGN); }

#if defined(__AVX512F__) && defined(DOUBLE)
INLINE vec vmin(vec a, vec b) { return (vec)_mm512_min_pd((__m512d)a, (__m512d)b); }
INLINE vec vmax(vec a, vec b) { return (vec)_mm512_max_pd((__m512d)a, (__m512d)b); }
INLINE double sum(vec a) { return _mm512_reduce_add_pd((__m512d)a); }
INLINE REAL least(vec a) { return _mm512_reduce_min_pd((__m512d)a); }
INLINE int equal_lanes(vec a, vec b) { return __builtin_popcount(_mm512_cmpeq_pd_mask((__m512d)a, (__m512d)b)); }
INLINE vec count_equal(vec n, vec a, vec b) {
    __mmask8 equal = _mm512_cmpeq_pd_mask((__m512d)a, (__m512d)b);
    return (vec)_mm512_mask_add_pd((__m512d)n, equal, (__m512d)n, (__m512d)splat(1));
}
INLINE vec rsqrt(vec q, int fine) { return (void)fine, 1 / (vec)_mm512_sqrt_pd((__m512d)q); }
#elif defined(__AVX512F__)
INLINE vec vmin(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vec vmax(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE double sum(vec a) {
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)a));
    __m512d high = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)a), 1)));
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}
INLINE REAL least(vec a) { return _mm512_reduce_min_ps((__m512)a); }
INLINE int equal_lanes(vec a, vec b) { return __builtin_popcount(_mm512_cmpeq_ps_mask((__m512)a, (__m512)b)); }
INLINE vec count_equal(vec n, vec a, vec b) {
    __mmask16 equal = _mm512_cmpeq_ps_mask((__m512)a, (__m512)b);
    return (vec)_mm512_mask_add_ps((__m512)n, equal, (__m512)n, (__m512)splat(1));
}
INLINE vec rsqrt(vec q, int fine) { /* to 14 bits, and one Newton step */
    vec r = (vec)_mm512_rsqrt14_ps((__m512)q);
    if (fine) r *= (REAL)1.5 - (REAL)0.5 * q * r * r;
    return r;
}
#else
#if defined(__AVX__) && defined(DOUBLE)
INLINE vec vmin(vec a, vec b) { return (vec)_mm256_min_pd((__m256d)a, (__m256d)b); }
INLINE vec vmax(vec a, vec b) { return (vec)_mm256_max_pd((__m256d)a, (__m256d)b); }
INLINE vec rsqrt(vec q, int fine) { return (void)fine, 1 / (vec)_mm256_sqrt_pd((__m256d)q); }
#elif defined(__AVX__)
INLINE vec vmin(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vec vmax(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec rsqrt(vec q, int fine) { /* to 12 bits, and two Newton steps */
    vec r = (vec)_mm256_rsqrt_ps((__m256)q);
    if (fine) r *= (REAL)1.5 - (REAL)0.5 * q * r * r;
    if (fine) r *= (REAL)1.5 - (REAL)0.5 * q * r * r;
    return r;
}
#else
INLINE vec vmin(vec a, vec b) { return pick(a < b, a, b); }
INLINE vec vmax(vec a, vec b) { return pick(a > b, a, b); }
INLINE vec rsqrt(vec q, int fine) {
    (void)fine;
    for (int l = 0; l < LANES; ++l) q[l] = sizeof(REAL) == 4 ? (REAL)sqrtf((float)q[l]) : (REAL)sqrt(q[l]);
    return 1 / q;
}
#endif
INLINE int equal_lanes(vec a, vec b) { return (void)a, (void)b, 0; }
INLINE vec count_equal(vec n, vec a, vec b) { return n + (vec)((a == b) & (ivec)splat(1)); }
INLINE double sum(vec a) {
    double total = 0;
    for (int l = 0; l < LANES; ++l) total += a[l];
    return total;
}
INLINE REAL least(vec a) {
    for (int l = 1; l < LANES; ++l) a[0] = a[l] < a[0] ? a[l] : a[0];
    return a[0];
}
#endif
#if defined(__AVX__) && !defined(DOUBLE)
enum { COARSE_ROOTS = 1 }; /* and that of infinity is NaN */
#else
enum { COARSE_ROOTS = 0 };
#endif
#ifdef __AVX512F__
enum { COUNTS_MASKS = 1 }; /* equal lanes are counted outside the vectors */
#else
enum { COUNTS_MASKS = 0 };
#endif

INLINE void order(vec *a, vec *b) {
    vec low = vmin(*a, *b);
    *b = vmax(*a, *b), *a = low;
}

INLINE int all(ivec m) {
    INT every = -1;
    for (int l = 0; l < LANES; ++l) every &= m[l];
    return every != 0;
}

INLINE vec vexp(vec v) { /* e^v = 2^k e^r, |r| <= log(2)/2; 0 where that would not be a normal number */
    ivec none = v < LEAST_EXPONENT;
    v = vmax(v, splat(LEAST_EXPONENT));
    vec rounded = v * (REAL)1.4426950408889634 + pick(v < 0, splat((REAL)-0.5), splat((REAL)0.5));
    ivec k = __builtin_convertvector(rounded, ivec);
    vec exponent = __builtin_convertvector(k, vec);
    vec r = v - exponent * (REAL)0.693145751953125 - exponent * (REAL)1.4286068203094173e-06;
    vec power = splat(1);
#pragma GCC unroll 16
    for (int j = EXP_TERMS; j > 0; --j) power = power * r * ((REAL)1 / j) + 1;
    return (vec)(~none & (ivec)(power * (vec)((k + BIAS) << MANTISSA)));
}

INLINE vec vlog(vec v) { /* log v = e log 2 + 2 artanh((m - 1)/(m + 1)), m in [0.7, 1.5) */
    ivec bits = (ivec)v, e = (bits >> MANTISSA) - BIAS;
    vec m = (vec)((bits & (((INT)1 << MANTISSA) - 1)) | ((INT)BIAS << MANTISSA));
    ivec high = m > (REAL)1.4142135;
    m = pick(high, m * (REAL)0.5, m);
    vec s = (m - 1) / (m + 1), square = s * s, series = splat(0);
#pragma GCC unroll 16
    for (int j = LOG_TERMS - 1; j >= 0; --j) series = series * square + (REAL)1 / (2 * j + 1);
    return __builtin_convertvector(e - high, vec) * (REAL)0.6931471805599453 + 2 * s * series;
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
    if (penalty == BARRON) { /* 1 + u^2 may be too large for a number, but its logarithm is not */
        vec length = vmin(vabs(u), splat(BARRON_FAR));
        ivec away = length > FAR;
        vec log = vlog(pick(away, length, square + 1)) * pick(away, splat(2), splat(1));
        *gain = vexp(log * t->power);
        *curvature = *gain * (1 + (t->shape - 2) * pick(away, splat(1), square / (square + 1)));
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
    int64_t run = stride * (fine && !(huber && what & SIZE) ? 4 : 64); /* short where it may be the last evaluation */
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
