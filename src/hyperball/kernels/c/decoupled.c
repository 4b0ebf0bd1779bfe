/* A decoupled layer around a plain convolution on a CPU: lengths of patches before it, scale and angle after it.

   The eager twins are norms.py and epilogue.py. f = factor n s(u) g(y/n), u = n stretch, in one pass over y, which is the
   convolution's output times `over`, 1/m where the filters were not divided by their lengths m; the backward
   reads y and v once, writes dy, and sums over channels (for n) and over positions (for the parameters). Work is cut
   into pieces whose number does not depend on the threads, and partial sums are added in their order, so the bits do not
   depend on the threads either. Threads are those of torch's own pool: the caller passes its GOMP_parallel. */

#include "decoupled_table.h"
#include "decoupled_maps.h"
#include "decoupled_filters.h"

enum { TILE = 1024, ROWS = 64, PIECES = 32 };
enum { BY_GAIN, BY_CURVATURE, BY_BEND, BY_EXTRA, BY_ONE, BY_ANGLE, BY_OVER, SUMS }; /* sums over positions, of W = v n g times … */

typedef struct { /* y is [batch, groups, channels, positions] or [batch, positions, groups, channels] */
    const float *y, *n, *v; /* v is NULL for the forward; n is [batch, groups, positions] */
    float *f, *dy, *dn;     /* dy and dn may be NULL */
    double *sums;           /* [SUMS, groups channels]: s, h', s - h', the row's extra, 1; v n s dg/dparameter; v df/dover */
    const float *given[GIVEN];
    int64_t steps[GIVEN]; /* 0 for one number, 1 for one a channel */
    float eps, angular_eps;
    int64_t batch, groups, channels, positions;
    int32_t channels_last, magnitude, angular, has_factor, has_stretch, has_over, need, threads;
    Parallel parallel;
} Job;

typedef struct {
    const Job *job;
    const float *numbers;
    int64_t pitch, units, pieces, next; /* a unit is ROWS positions, or a TILE of one image */
    double *partial;                    /* [pieces, SUMS, groups channels] */
    int failed;
} Shared;

typedef struct { /* a run of numbers: the channels of a position (wise), or positions of a channel */
    Numbers of;
    const float *y, *n, *v;
    float *f, *dy, *dn; /* dn: one number where wise, else one a position, to which is added */
    float *sums;        /* [SUMS, pitch] */
    int64_t count;
    int has_factor, has_stretch, has_over, need;
    float s[TILE], curvature[TILE], extra[TILE];
} Run;

INLINE vec read(const float *from, int64_t left) {
    if (left >= LANES) return *(const vec *)from;
    vec out = {0};
    for (int64_t l = 0; l < left; ++l) out[l] = from[l];
    return out;
}

INLINE void write(float *to, vec value, int64_t left) {
    if (left >= LANES) *(vec *)to = value;
    else for (int64_t l = 0; l < left; ++l) to[l] = value[l];
}

INLINE vec lengths_at(const Run *r, int64_t i, int wise) { return wise ? splat(*r->n) : read(r->n + i, r->count - i); }

INLINE vec inverse(vec n) { return (vec)((n > 0) & (ivec)(1 / vmax(splat(FLT_MIN), n))); }

/* Gains of the run; their derivatives too where `both`. */
INLINE void gains_of(int magnitude, int wise, int both, int stretched, Run *r) {
    for (int64_t i = 0; i < r->count; i += LANES) {
        vec u = lengths_at(r, i, wise);
        if (stretched) u *= number(&r->of, STRETCH, wise ? i : 0, wise);
        Gain found = gain(magnitude, &r->of, wise ? i : 0, wise, u);
        *(vec *)(r->s + i) = found.s;
        if (both) *(vec *)(r->curvature + i) = found.curvature, *(vec *)(r->extra + i) = found.extra;
    }
}

/* f = factor n s g(y/n), which is factor y s for cosine. */
INLINE void scale(int angular, int wise, Run *r) {
    vec n = splat(*r->n), over = inverse(n);
    for (int64_t i = 0; i < r->count; i += LANES) {
        int64_t left = r->count - i, c = wise ? i : 0;
        vec s = *(const vec *)(r->s + i), y = read(r->y + i, left);
        if (r->has_over) y *= number(&r->of, OVER, c, wise);
        if (angular == COSINE) {
            y *= s;
        } else {
            if (!wise) n = lengths_at(r, i, wise), over = inverse(n);
            y = angle(angular, &r->of, c, wise, y * over).g * (n * s);
        }
        if (r->has_factor) y *= number(&r->of, FACTOR, c, wise); /* last: s factor may be no number where n s is one */
        write(r->f + i, y, left);
    }
}

INLINE void gather(Run *r, int what, int wise, int64_t i, vec value, vec *total) {
    if (wise) *(vec *)(r->sums + what * r->of.pitch + i) += value;
    else total[what] += value;
}

/* dy = v factor s g', dn = sum over channels of v factor (h' g - s g' c), and the sums over positions. */
INLINE void pull(int angular, int wise, Run *r) {
    vec total[SUMS] = {{0}}, along = splat(0), n = splat(*r->n), over = inverse(n);
    for (int64_t i = 0; i < r->count; i += LANES) {
        int64_t left = r->count - i, c = wise ? i : 0;
        vec s = *(const vec *)(r->s + i), h1 = *(const vec *)(r->curvature + i);
        vec given = read(r->y + i, left), v = read(r->v + i, left), over_m = splat(1), reach = splat(1), dy, dn, tilt = s;
        if (r->has_over) over_m = number(&r->of, OVER, c, wise);
        vec y = given * over_m, w = v * y, scaled = v;
        if (r->has_factor) scaled *= number(&r->of, FACTOR, c, wise);
        if (!wise) n = lengths_at(r, i, wise), over = inverse(n);
        if (angular == COSINE) {
            dy = scaled * s, dn = scaled * y * (h1 - s);
        } else {
            vec cosine = y * over;
            Angle a = angle(angular, &r->of, c, wise, cosine);
            tilt = s * a.slope, w = v * a.g, reach = n, dy = scaled * tilt, dn = scaled * (h1 * a.g - tilt * cosine);
            if (r->need & 1 << BY_ANGLE) gather(r, BY_ANGLE, wise, i, v * (n * s * a.partial), total);
        }
        if (angular == COSINE && !wise) dn *= over;
        if (r->dy) write(r->dy + i, dy * over_m, left);
        if (wise) along += dn;
        else if (r->dn) write(r->dn + i, read(r->dn + i, left) + dn, left);
        if (r->need & 1 << BY_GAIN) gather(r, BY_GAIN, wise, i, w * (s * reach), total);
        if (r->need & 1 << BY_CURVATURE) gather(r, BY_CURVATURE, wise, i, w * (h1 * reach), total);
        if (r->need & 1 << BY_BEND) gather(r, BY_BEND, wise, i, w * ((s - h1) * reach), total);
        if (r->need & 1 << BY_EXTRA) gather(r, BY_EXTRA, wise, i, w * (*(const vec *)(r->extra + i) * reach), total);
        if (r->need & 1 << BY_ONE) gather(r, BY_ONE, wise, i, w * reach, total);
        if (r->need & 1 << BY_OVER) gather(r, BY_OVER, wise, i, v * (tilt * given), total);
    }
    if (wise && r->dn) *r->dn += (float)(sum(along) * (angular == COSINE ? over[0] : 1));
    for (int k = 0; !wise && k < SUMS; ++k)
        if (r->need & 1 << k) r->sums[k * r->of.pitch] += (float)sum(total[k]);
}

#define GAINS(code, wise, both) (r->has_stretch ? gains_of(code, wise, both, 1, r) : gains_of(code, wise, both, 0, r))
#define MAGNITUDE(code) \
    case code: wise ? (both ? GAINS(code, 1, 1) : GAINS(code, 1, 0)) : (both ? GAINS(code, 0, 1) : GAINS(code, 0, 0)); break;
#define ANGULAR(code) \
    case code: wise ? (both ? pull(code, 1, r) : scale(code, 1, r)) : (both ? pull(code, 0, r) : scale(code, 0, r)); break;

static void run(const Job *job, Run *r) {
    int wise = job->channels_last, both = job->v != NULL;
    switch (job->magnitude) {
        MAGNITUDE(SPHERE) MAGNITUDE(BALL) MAGNITUDE(TANH) MAGNITUDE(LINEAR)
        MAGNITUDE(SEG) MAGNITUDE(LOG) MAGNITUDE(MIX) MAGNITUDE(BARRON)
    }
    switch (job->angular) {
        ANGULAR(ARC) ANGULAR(COSINE) ANGULAR(SIGMOID) ANGULAR(SQUARE_COSINE) ANGULAR(POWER) ANGULAR(RECTIFIED)
    }
}

/* One run: `count` numbers from number `at` of y on, channel `first` of group g, and length `length`. */
static void one(const Shared *shared, Run *r, int64_t at, int64_t channel, int64_t length, int64_t count, float *sums) {
    const Job *job = shared->job;
    r->of.at = shared->numbers + channel, r->sums = sums + channel;
    r->y = job->y + at, r->n = job->n + length, r->count = count;
    if (job->v) r->v = job->v + at, r->dy = job->dy ? job->dy + at : NULL, r->dn = job->dn ? job->dn + length : NULL;
    else r->f = job->f + at;
    run(job, r);
}

/* ROWS positions with the channels of each beside each other. */
static void rows_unit(const Shared *shared, Run *r, int64_t unit, float *sums) {
    const Job *job = shared->job;
    int64_t begin = unit * ROWS, all = job->batch * job->positions, end = begin + ROWS < all ? begin + ROWS : all;
    int64_t padded = shared->pitch / job->groups;
    for (int64_t p = begin; p < end; ++p)
        for (int64_t g = 0; g < job->groups; ++g) {
            int64_t length = (p / job->positions * job->groups + g) * job->positions + p % job->positions;
            if (job->dn) job->dn[length] = 0;
            for (int64_t c = 0; c < job->channels; c += TILE) {
                int64_t left = job->channels - c, at = (p * job->groups + g) * job->channels + c;
                one(shared, r, at, g * padded + c, length, left < TILE ? left : TILE, sums);
            }
        }
}

/* A TILE of positions of one image, one channel after the other. */
static void tile_unit(const Shared *shared, Run *r, int64_t unit, float *sums) {
    const Job *job = shared->job;
    int64_t tiles = (job->positions + TILE - 1) / TILE, image = unit / tiles, begin = unit % tiles * TILE;
    int64_t left = job->positions - begin, count = left < TILE ? left : TILE, padded = shared->pitch / job->groups;
    for (int64_t g = 0; g < job->groups; ++g) {
        int64_t length = (image * job->groups + g) * job->positions + begin;
        if (job->dn) memset(job->dn + length, 0, (size_t)count * sizeof(float));
        for (int64_t c = 0; c < job->channels; ++c) {
            int64_t at = ((image * job->groups + g) * job->channels + c) * job->positions + begin;
            one(shared, r, at, g * padded + c, length, count, sums);
        }
    }
}

/* Adds the float sums of a unit to the piece's own and clears them. */
static void flush(const Shared *shared, float *sums, double *to) {
    const Job *job = shared->job;
    int64_t padded = shared->pitch / job->groups, all = job->groups * job->channels;
    for (int k = 0; k < SUMS; ++k) {
        if (!(job->need & 1 << k)) continue;
        float *from = sums + k * shared->pitch;
        for (int64_t g = 0; g < job->groups; ++g)
            for (int64_t c = 0; c < job->channels; ++c) to[k * all + g * job->channels + c] += from[g * padded + c];
        memset(from, 0, (size_t)shared->pitch * sizeof(float));
    }
}

static void work(void *argument) {
    Shared *shared = argument;
    const Job *job = shared->job;
    int64_t all = job->groups * job->channels, piece;
    Run *r = malloc(sizeof(Run));
    float *sums = calloc((size_t)(job->need ? SUMS * shared->pitch : 1), sizeof(float));
    if (!r || !sums) __atomic_store_n(&shared->failed, 1, __ATOMIC_RELAXED);
    else
        *r = (Run){.of = {NULL, shared->pitch, job->eps, job->angular_eps}, .has_factor = job->has_factor,
                   .has_stretch = job->has_stretch, .has_over = job->has_over, .need = job->need};
    while (r && sums && (piece = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED)) < shared->pieces) {
        int64_t end = shared->units * (piece + 1) / shared->pieces;
        for (int64_t unit = shared->units * piece / shared->pieces; unit < end; ++unit) {
            if (job->channels_last) rows_unit(shared, r, unit, sums);
            else tile_unit(shared, r, unit, sums);
            if (job->need) flush(shared, sums, shared->partial + piece * SUMS * all);
        }
    }
    free(r);
    free(sums);
}

/* All numbers of all channels, groups padded to whole vectors with their last channel. */
static void fill(const Job *job, float *numbers, int64_t pitch) {
    int64_t padded = pitch / job->groups;
    for (int64_t i = 0; i < pitch; ++i) {
        int64_t g = i / padded, c = i % padded < job->channels ? i % padded : job->channels - 1;
        for (int k = 0; k < GIVEN; ++k)
            numbers[k * pitch + i] = job->given[k] ? job->given[k][(g * job->channels + c) * job->steps[k]] : 1;
        derive(job->magnitude, job->angular, numbers + i, pitch);
    }
}

/* Fills f, or dy, dn and sums where v is given; 0, or 1 where memory ran out. */
int epilogue(const Job *job) {
    int64_t padded = (job->channels + LANES - 1) / LANES * LANES, pitch = padded * job->groups;
    int64_t all = job->groups * job->channels, numbers = all * job->batch * job->positions;
    int64_t units = job->channels_last ? (job->batch * job->positions + ROWS - 1) / ROWS
                                       : job->batch * ((job->positions + TILE - 1) / TILE);
    int64_t pieces = numbers / WORTH < PIECES ? numbers / WORTH : PIECES;
    pieces = pieces < units ? pieces : units;
    Shared shared = {.job = job, .pitch = pitch, .units = units, .pieces = pieces < 1 ? 1 : pieces};
    float *held = malloc((size_t)(NUMBERS * pitch) * sizeof(float));
    shared.partial = calloc((size_t)(job->need ? shared.pieces * SUMS * all : 1), sizeof(double));
    shared.numbers = held, shared.failed = !held || !shared.partial;
    if (!shared.failed) {
        fill(job, held, pitch);
        unsigned threads = (unsigned)(job->threads < shared.pieces ? job->threads : shared.pieces);
        if (job->parallel && threads > 1) job->parallel(work, &shared, threads, 0);
        else work(&shared);
        for (int64_t i = 0; job->need && i < shared.pieces * SUMS * all; ++i)
            job->sums[i % (SUMS * all)] += shared.partial[i];
    }
    free(held);
    free(shared.partial);
    return shared.failed;
}
