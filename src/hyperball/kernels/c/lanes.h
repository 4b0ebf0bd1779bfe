/* Lanes: vectors as wide as the processor's, and the functions that they lack.

   REAL is float, or double where DOUBLE is defined. Vector types are GCC's and Clang's own; the processor's instructions
   add what they lack. Minima and maxima return their second argument where either is NaN. */

#include <float.h>
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

enum { LANES = BYTES / sizeof(REAL) };

typedef REAL vec __attribute__((vector_size(LANES * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
typedef INT ivec __attribute__((vector_size(LANES * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
#define INLINE static inline __attribute__((always_inline))

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

#if defined(__AVX512F__) && defined(DOUBLE)
INLINE vec vsqrt(vec a) { return (vec)_mm512_sqrt_pd((__m512d)a); }
#elif defined(__AVX512F__)
INLINE vec vsqrt(vec a) { return (vec)_mm512_sqrt_ps((__m512)a); }
#elif defined(__AVX__) && defined(DOUBLE)
INLINE vec vsqrt(vec a) { return (vec)_mm256_sqrt_pd((__m256d)a); }
#elif defined(__AVX__)
INLINE vec vsqrt(vec a) { return (vec)_mm256_sqrt_ps((__m256)a); }
#else
INLINE vec vsqrt(vec a) {
    for (int l = 0; l < LANES; ++l) a[l] = sizeof(REAL) == 4 ? (REAL)sqrtf((float)a[l]) : (REAL)sqrt(a[l]);
    return a;
}
#endif

INLINE void order(vec *a, vec *b) {
    vec low = vmin(*a, *b);
    *b = vmax(*a, *b), *a = low;
}

#if defined(__AVX512F__) && defined(DOUBLE)
INLINE int all(ivec m) { return _mm512_cmpeq_epi64_mask((__m512i)m, _mm512_setzero_si512()) == 0; }
#elif defined(__AVX512F__)
INLINE int all(ivec m) { return _mm512_cmpeq_epi32_mask((__m512i)m, _mm512_setzero_si512()) == 0; }
#else
INLINE int all(ivec m) {
    INT every = -1;
    for (int l = 0; l < LANES; ++l) every &= m[l];
    return every != 0;
}
#endif

INLINE vec vexp(vec v) { /* e^v = 2^k e^r, |r| <= log(2)/2; 0 where that would not be a normal number */
    ivec none = v < LEAST_EXPONENT;
    v = vmax(splat(LEAST_EXPONENT), v);
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
