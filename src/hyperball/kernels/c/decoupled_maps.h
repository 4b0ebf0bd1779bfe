/* Lengths of patches: a sum of squares over channels and a box sum over the window, in double; and their derivative. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags); /* GOMP_parallel */

enum { PARTS = 16, WORTH = 1 << 15 }; /* partial sums of a row; numbers below which one thread is enough */

typedef struct { /* x is [batch, groups, channels, *in] or [batch, *in, groups, channels]; n is [batch, groups, *out] */
    const float *x, *v; /* v, the gradient of n, NULL for the lengths themselves */
    float *n, *dx;      /* dx += x box'(v/n) */
    int64_t batch, groups, channels;
    int64_t in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
    int32_t channels_last, transposed, threads;
    Parallel parallel;
} Lengths;

typedef struct {
    const Lengths *job;
    int64_t next;
    int failed;
} LengthsShared;

/* Along one axis of [outer, in, inner]: out[i] = sum_k q[i stride + k dilation - padding], or its transpose. */
static void along(const Lengths *a, int d, const double *q, double *out, int64_t outer, int64_t inner, int64_t longer,
                  int64_t shorter, int scatter) {
    int64_t s = a->stride[d], from = scatter ? shorter : longer, to = scatter ? longer : shorter;
    memset(out, 0, (size_t)(outer * to * inner) * sizeof(double));
    for (int64_t o = 0; o < outer; ++o)
        for (int64_t k = 0; k < a->kernel[d]; ++k) {
            int64_t off = k * a->dilation[d] - a->padding[d], first = off < 0 ? (s - 1 - off) / s : 0;
            int64_t last = longer > off ? (longer - off + s - 1) / s : 0;
            last = last < shorter ? last : shorter;
            const double *src = q + o * from * inner;
            double *dst = out + o * to * inner;
            if (s == 1 && last > first) {
                int64_t count = (last - first) * inner, at = first * inner, moved = (first + off) * inner;
                src += scatter ? at : moved, dst += scatter ? moved : at;
                for (int64_t j = 0; j < count; ++j) dst[j] += src[j];
                continue;
            }
            for (int64_t i = first; i < last; ++i)
                for (int64_t j = 0; j < inner; ++j) {
                    int64_t at = i * inner + j, moved = (i * s + off) * inner + j;
                    dst[scatter ? moved : at] += src[scatter ? at : moved];
                }
        }
}

/* The box sum of a map over all axes, or its transpose; the answer lies in q or in spare, whose address is returned. */
static double *box(const Lengths *a, double *q, double *spare, int transpose) {
    int scatter = a->transposed ^ transpose;
    int64_t size[3];
    memcpy(size, transpose ? a->out : a->in, sizeof size);
    for (int d = 0; d < 3; ++d) {
        int64_t outer = 1, inner = 1, to = transpose ? a->in[d] : a->out[d];
        if (a->kernel[d] == 1 && a->stride[d] == 1 && a->padding[d] == 0 && size[d] == to) continue;
        for (int e = 0; e < d; ++e) outer *= size[e];
        for (int e = d + 1; e < 3; ++e) inner *= size[e];
        along(a, d, q, spare, outer, inner, scatter ? to : size[d], scatter ? size[d] : to, scatter);
        double *held = q;
        q = spare, spare = held, size[d] = to;
    }
    return q;
}

static double square_sum(const float *x, int64_t n) {
    double part[PARTS] = {0}, total = 0;
    int64_t i = 0;
    for (; i + PARTS <= n; i += PARTS)
        for (int l = 0; l < PARTS; ++l) part[l] += (double)x[i + l] * x[i + l];
    for (; i < n; ++i) total += (double)x[i] * x[i];
    for (int l = 0; l < PARTS; ++l) total += part[l];
    return total;
}

static int64_t volume(const int64_t *size) { return size[0] * size[1] * size[2]; }

/* Where the channels of one group of one image begin, and how far one position is from the next. */
static int64_t begin_of(const Lengths *a, int64_t item, int64_t *step) {
    int64_t all = a->groups * a->channels, image = item / a->groups, group = item % a->groups;
    *step = a->channels_last ? all : 1;
    return image * all * volume(a->in) + group * a->channels * (a->channels_last ? 1 : volume(a->in));
}

static void measure_item(const Lengths *a, int64_t item, double *q, double *spare) {
    int64_t step, pixels = volume(a->in), patches = volume(a->out);
    const float *x = a->x + begin_of(a, item, &step);
    if (a->channels_last) {
        for (int64_t p = 0; p < pixels; ++p) q[p] = square_sum(x + p * step, a->channels);
    } else {
        memset(q, 0, (size_t)pixels * sizeof(double));
        for (int64_t c = 0; c < a->channels; ++c)
            for (int64_t p = 0; p < pixels; ++p) q[p] += (double)x[c * pixels + p] * x[c * pixels + p];
    }
    q = box(a, q, spare, 0);
    for (int64_t p = 0; p < patches; ++p) {
        double root = sqrt(q[p]);
        a->n[item * patches + p] = root > FLT_MAX ? FLT_MAX : (float)root;
    }
}

/* dx += x T, T = box'(v/n), with 0 for 1/n at n = 0; in double where a T is no float, as 1/n^2 beyond n = 1e19. */
static void pull_item(const Lengths *a, int64_t item, double *q, double *spare, float *restrict factor) {
    int64_t step, pixels = volume(a->in), patches = volume(a->out), begin = begin_of(a, item, &step);
    const float *restrict x = a->x + begin, *n = a->n + item * patches, *v = a->v + item * patches;
    float *restrict dx = a->dx + begin;
    int small = 0;
    for (int64_t p = 0; p < patches; ++p) {
        q[p] = v[p] * (n[p] == 0 ? 0 : 1 / (double)n[p]);
        small |= (v[p] != 0) & (fabsf(v[p]) * (1 / FLT_MIN) < n[p]);
    }
    q = box(a, q, spare, 1);
    for (int64_t p = 0; p < pixels; ++p)
        factor[p] = q[p] > FLT_MAX ? FLT_MAX : q[p] < -FLT_MAX ? -FLT_MAX : (float)q[p];
    for (int64_t c = 0, beside = a->channels_last ? 1 : pixels; small && c < a->channels; ++c)
        for (int64_t p = 0; p < pixels; ++p) dx[c * beside + p * step] += (float)(x[c * beside + p * step] * q[p]);
    if (small) return;
    for (int64_t p = 0; a->channels_last && p < pixels; ++p)
        for (int64_t c = 0; c < a->channels; ++c) dx[p * step + c] += x[p * step + c] * factor[p];
    for (int64_t c = 0; !a->channels_last && c < a->channels; ++c)
        for (int64_t p = 0; p < pixels; ++p) dx[c * pixels + p] += x[c * pixels + p] * factor[p];
}

static void lengths_work(void *argument) {
    LengthsShared *shared = argument;
    const Lengths *a = shared->job;
    int64_t room = 1, items = a->batch * a->groups, item;
    for (int d = 0; d < 3; ++d) room *= a->in[d] > a->out[d] ? a->in[d] : a->out[d];
    double *q = malloc((size_t)(3 * room) * sizeof(double));
    if (!q) __atomic_store_n(&shared->failed, 1, __ATOMIC_RELAXED);
    while (q && (item = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED)) < items)
        if (a->v) pull_item(a, item, q, q + room, (float *)(q + 2 * room));
        else measure_item(a, item, q, q + room);
    free(q);
}

/* Fills n, or adds to dx where v is given; 0, or 1 where memory ran out. */
int lengths(const Lengths *job) {
    LengthsShared shared = {.job = job};
    int64_t items = job->batch * job->groups, numbers = items * job->channels * volume(job->in);
    unsigned threads = (unsigned)(job->threads < items ? job->threads : items);
    if (job->parallel && threads > 1 && numbers >= WORTH) job->parallel(lengths_work, &shared, threads, 0);
    else lengths_work(&shared);
    return shared.failed;
}
