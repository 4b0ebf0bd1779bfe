/* The rows of the radial and angular tables on lanes of float: gains, curvatures, slopes and derivatives by parameters.

   They are the formulas of radial_functions.py and angular.py; NaN stays NaN, since minima and maxima return their
   second argument where either is one. */

#include "lanes.h"
#include <float.h>

enum { SPHERE, BALL, TANH, LINEAR, SEG, LOG, MIX, BARRON };
enum { ARC, COSINE, SIGMOID, SQUARE_COSINE, POWER, RECTIFIED };
enum { ALPHA, BETA, RHO, SHAPE, ANGLE, FACTOR, STRETCH, OVER, GIVEN }; /* a channel's numbers as they are given */
enum { OVER_RHO = GIVEN, POWER_OF, BEYOND_TWO, MOVES, BOUND, OVER_ANGLE, NUMBERS }; /* and what follows from them */

typedef struct { /* numbers of the channels: number k of channel i at [k * pitch + i] */
    const float *at;
    int64_t pitch;
    float eps, angular_eps;
} Numbers;

typedef struct { /* of one vector: s, h', and what a parameter beside alpha and the radius multiplies */
    vec s, curvature, extra;
} Gain;

typedef struct { /* g, dg/dc and dg/dparameter */
    vec g, slope, partial;
} Angle;

/* Number k for the vector at i: one a lane where lanes are channels, else the same in all. */
INLINE vec number(const Numbers *of, int k, int64_t i, int wise) {
    const float *p = of->at + k * of->pitch + i;
    return wise ? *(const vec *)p : splat(*p);
}

INLINE vec at_least(vec bound, vec v) { /* torch's clamp(min=bound): NaN where either is */
    return pick(bound == bound, vmax(bound, v), bound);
}

/* e^v: infinite where it is too large for a number, and below the normal numbers as exact as these allow. */
INLINE vec exponential(vec v) {
    ivec low = v < -80;
    vec power = vexp(vmin(splat(88.72f), v + pick(low, splat(40), splat(0)))) * pick(low, splat(4.2483543e-18f), splat(1));
    return pick(v > 88.72f, splat(INFINITY), power);
}

INLINE vec log_one_plus(vec x) { /* log(1 + x), x >= 0, from the logarithm of w = 1 + x rounded */
    vec w = x + 1;
    return vlog(w) + (x - (w - 1)) / w;
}

/* tanh of t >= 0 and 1 - tanh^2: a polynomial below 0.625, else (1 - e)/(1 + e) with e = exp(-2t). */
INLINE vec hyperbolic(vec t, vec *complement) {
    vec e = vexp(t * -2), inverse = 1 / (e + 1), q = t * t, p;
    p = q * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * q - 5.37397155531e-2f;
    p = p * q + 1.33314422036e-1f;
    p = p * q - 3.33332819422e-1f;
    *complement = 4 * e * inverse * inverse;
    return pick(t < 0.625f, t + t * q * p, (1 - e) * inverse);
}

INLINE vec signed_as(vec size, vec like) { return (vec)((ivec)size | ((ivec)like & ~ALL_BUT_SIGN)); }

/* asin of c, cut to [-1, 1]: a polynomial up to 1/2, else pi/2 - 2 asin(sqrt((1 - c)/2)). */
INLINE vec arcsine(vec c) {
    vec a = vmin(splat(1), vabs(c)), half = (1 - a) * 0.5f;
    ivec far = a > 0.5f;
    vec x = pick(far, vsqrt(half), a), z = pick(far, half, a * a);
    vec p = z * 4.2163199048e-2f + 2.4181311049e-2f;
    p = p * z + 4.5470025998e-2f;
    p = p * z + 7.4953002686e-2f;
    p = p * z + 1.6666752422e-1f;
    p = x + x * z * p;
    return signed_as(pick(far, 1.57079632679f - 2 * p, p), c);
}

INLINE vec log_gain(vec u) {
    u = vmax(splat(1e-20f), u);
    return log_one_plus(u) * (1 / u);
}

INLINE void barron(const Numbers *of, int64_t i, int wise, vec u, Gain *out) {
    vec over = number(of, OVER_RHO, i, wise), r = u * over, bounded = vmin(splat(1e18f), r), x = bounded * bounded;
    vec log = log_one_plus(x), share = x / (x + 1);
    if (!all(r <= 1e18f)) /* sqrt(r/1e18), a number where r itself is none */
        log += 4 * vlog(vmax(splat(1), vsqrt(u) * 1e-9f * vsqrt(over)));
    out->s = exponential(log * number(of, POWER_OF, i, wise)) * number(of, ALPHA, i, wise);
    out->curvature = out->s * (1 + number(of, BEYOND_TWO, i, wise) * share);
    out->extra = out->s * (log - share * number(of, MOVES, i, wise)) * 0.5f;
}

/* s(u) = h(u)/u, h'(u), and ds by the further parameter: seg's rho/max(u, rho), mix's log(1+u)/u, barron's shape. */
INLINE Gain gain(int magnitude, const Numbers *of, int64_t i, int wise, vec u) {
    vec alpha = number(of, ALPHA, i, wise), beta = number(of, BETA, i, wise), rho = number(of, RHO, i, wise);
    Gain out = {.extra = splat(0)};
    if (magnitude == SPHERE) {
        vec root = splat(of->eps), longest = vmax(splat(1e-20f), vmax(root, u)), over = 1 / longest;
        vec a = u * over, b = root * over, length = vmax(splat(1e-20f), longest * vsqrt(a * a + b * b));
        over = 1 / length, b = root * over, out.s = alpha * over, out.curvature = out.s * b * b;
    } else if (magnitude == BALL) {
        out.s = alpha / at_least(rho, vmax(splat(1e-30f), u));
        out.curvature = out.s * (vec)((u <= rho) & (ivec)splat(1));
    } else if (magnitude == TANH) {
        vec off = vmax(splat(1e-30f), u), complement, t = hyperbolic(off * number(of, OVER_RHO, i, wise), &complement);
        out.s = t * (1 / off) * alpha, out.curvature = complement * (alpha * number(of, OVER_RHO, i, wise));
    } else if (magnitude == LINEAR) {
        out.s = out.curvature = alpha;
    } else if (magnitude == SEG) {
        out.extra = rho / at_least(rho, u);
        out.s = beta + (alpha - beta) * out.extra, out.curvature = pick(u <= rho, alpha, beta);
    } else if (magnitude == LOG) {
        out.s = alpha * log_gain(u), out.curvature = alpha / (u + 1);
    } else if (magnitude == MIX) {
        out.extra = log_gain(u);
        out.s = alpha + beta * out.extra, out.curvature = alpha + beta / (u + 1);
    } else {
        barron(of, i, wise, u, &out);
    }
    return out;
}

/* g(c), dg/dc and dg by its parameter. */
INLINE Angle angle(int angular, const Numbers *of, int64_t i, int wise, vec c) {
    Angle out = {c, splat(1), splat(0)};
    vec parameter = number(of, ANGLE, i, wise);
    if (angular == SQUARE_COSINE) {
        out.g = c * vabs(c), out.slope = 2 * vabs(c);
    } else if (angular == RECTIFIED) {
        out.g = vmax(splat(0), c), out.slope = (vec)((c > 0) & (ivec)splat(1));
    } else if (angular == POWER) {
        vec log = vlog(vmax(splat(1e-30f), vabs(c))), power = exponential(log * (parameter - 1));
        out.g = c * power, out.slope = parameter * power, out.partial = out.g * log;
        out.slope = pick(c == c, out.slope, c);
    } else if (angular == ARC || angular == SIGMOID) {
        vec arc = arcsine(c), steep = 1 / vsqrt(vmax(splat(of->angular_eps), (1 - c) * (1 + c)));
        out.g = arc * 0.636619772368f, out.slope = steep * 0.636619772368f;
        if (angular == SIGMOID) {
            vec complement, bound = number(of, BOUND, i, wise), over = number(of, OVER_ANGLE, i, wise);
            vec u = arc * over * 0.5f, t = signed_as(hyperbolic(vabs(u), &complement), u), kappa = 0.785398163397f * over;
            out.g = t / bound, out.slope = complement * steep * over * 0.5f / bound;
            out.partial = (t * ((1 - bound * bound) * kappa / bound) - u * complement) * over / bound;
        }
    }
    return out;
}

/* A channel's numbers from those that were given, in double. */
static void derive(int magnitude, int angular, float *p, int64_t pitch) {
    double rho = p[RHO * pitch], shape = p[SHAPE * pitch], k = p[ANGLE * pitch];
    shape = shape > 1e15 ? 1e15 : shape < -1e15 ? -1e15 : shape;
    double apart = fabs(shape - 2), least = apart < 1e-6 ? 1e-6 : apart;
    p[OVER_RHO * pitch] = (float)(1 / (magnitude == BARRON ? rho * sqrt(least) : rho));
    p[POWER_OF * pitch] = (float)(shape / 2 - 1), p[BEYOND_TWO * pitch] = (float)(shape - 2);
    p[MOVES * pitch] = apart > 1e-6;
    p[BOUND * pitch] = angular == SIGMOID ? (float)tanh(0.78539816339744831 / k) : 1;
    p[OVER_ANGLE * pitch] = angular == SIGMOID ? (float)(1 / k) : 1;
}
