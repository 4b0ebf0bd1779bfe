/* Lengths m of filters and their inverses, in double: one pass over the weight; and whether the filters may stay as they
   are, conv(x, w)/m for conv(x, w/m), because no length and no product with a patch is near the ends of float. */

enum { SPAN = 10, SHORTEST = -80, LONGEST = 100 }; /* powers of two: m from -SPAN to SPAN, n from SHORTEST to LONGEST */

typedef struct { /* w is [count, size], or NULL where m is given; n are the lengths of all patches */
    const float *w, *n;
    float *m, *over;
    int64_t count, size, patches;
    int32_t threads;
    Parallel parallel;
} Filters;

typedef struct {
    const Filters *job;
    int64_t next;
} FiltersShared;

static void filters_work(void *argument) {
    FiltersShared *shared = argument;
    const Filters *a = shared->job;
    int64_t at;
    while ((at = __atomic_fetch_add(&shared->next, PARTS, __ATOMIC_RELAXED)) < a->count)
        for (int64_t o = at; o < at + PARTS && o < a->count; ++o) {
            double root = sqrt(square_sum(a->w + o * a->size, a->size));
            a->m[o] = root > FLT_MAX ? FLT_MAX : (float)root;
        }
}

/* Fills m, unless it is given, and over, 0 where m is; 0 where the filters may stay as they are, else 1. */
int filters(const Filters *job) {
    FiltersShared shared = {.job = job};
    int64_t blocks = (job->count + PARTS - 1) / PARTS;
    unsigned threads = (unsigned)(job->threads < blocks ? job->threads : blocks);
    if (job->w && job->parallel && threads > 1 && job->count * job->size >= WORTH)
        job->parallel(filters_work, &shared, threads, 0);
    else if (job->w) filters_work(&shared);
    int near = 1;
    const float low = ldexpf(1, -SPAN), high = ldexpf(1, SPAN);
    for (int64_t o = 0; o < job->count; ++o) {
        float m = job->m[o];
        near &= (m >= low && m <= high) || m == 0;
        job->over[o] = m == 0 ? 0 : 1 / m;
    }
    const float shortest = ldexpf(1, SHORTEST), longest = ldexpf(1, LONGEST);
    for (int64_t p = 0; near && p < job->patches; p += WORTH) {
        int64_t end = p + WORTH < job->patches ? p + WORTH : job->patches;
        for (int64_t i = p; i < end; ++i) near &= ((job->n[i] >= shortest) & (job->n[i] <= longest)) | (job->n[i] == 0);
    }
    return !near;
}
