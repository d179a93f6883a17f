/* Each kind is built once over all rows, as over a segment, and searched in [n_sink, n - n_local), as in decoding. What is right comes from scores and
 * attention in float64 over all rows. Time is taken apart from that: rounds in which every kind in turn searches every replica once, so that neither a
 * slower clock nor another program's share of the memory makes one kind look better than another; CPU time, because a benchmark is rarely alone. */
#include "index_bench.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "index.h"
#include "kernels.h"
#include "memory.h"
#include "quant.h"

enum { SEEDS = 8, BEST = 16, GOOD = 100, MAX_CUTS = 2 }; /* sinks and window cut a run each */

typedef struct {
    const eng_bench_head *h;
    const eng_bench_params *p;
    idx_rows keys, values;
    idx_queries train;
    float power[ENG_BENCH_MAX_DIM]; /* of the training queries */
    float *k, *v;   /* widened */
    float *q;       /* [n_steps][group][dim] */
    uint16_t *train_q;
    uint32_t *train_pos;
    float *floor;   /* [n_steps][group]: best score in the window */
    uint32_t lo, hi, max_k;
    idx_budget budget;
    float scale;
    idx_scratch *scratch;
    uint8_t *copies; /* of the keys, [replicas] */
    uint32_t replicas;
} bench;

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef int (*build_fn)(const bench *b, idx_builder **ret);

/* A kind on trial. */
typedef struct {
    const char *name;
    build_fn build;   /* NULL: no index */
    idx_index *ix, **copies;
    idx_cut cuts[MAX_CUTS];
    uint32_t n_cuts, first, end; /* clusters */
    float *weights, *coef, *hit_coef;
    uint32_t *taken;
    uint32_t *seeds, *n_seeds; /* [n_steps][group * SEEDS]: of the step before */
    double *rounds;            /* [rounds]: seconds a search */
} subject;

/* ---- kinds ------------------------------------------------------------------------------------------------------ */

static int build_codes(const bench *b, idx_builder **ret)
{
    return idx_builder_new_codes(&b->keys, &b->values, b->power, 8, NULL, ret);
}

static int build_int4(const bench *b, idx_builder **ret)
{
    return idx_builder_new_codes(&b->keys, &b->values, b->power, 4, NULL, ret);
}

static int build_graph(const bench *b, idx_builder **ret)
{
    idx_graph_params params = idx_graph_params_default();
    return idx_builder_new(&b->keys, &b->train, &params, ret);
}

static int build_cluster(const bench *b, idx_builder **ret)
{
    return idx_builder_new_lists(IDX_CLUSTER, &b->keys, &b->values, &b->train, ret);
}

static int build_ivf(const bench *b, idx_builder **ret)
{
    return idx_builder_new_lists(IDX_IVF, &b->keys, &b->values, &b->train, ret);
}

static const char *const kind_names[] = {"f16", "int8", "int4", "graph", "cluster", "ivf", NULL};
static const build_fn builds[] = {NULL, build_codes, build_int4, build_graph, build_cluster, build_ivf};
enum { BASE = 1 };

static bool has_clusters(const subject *s)
{
    return s->ix && idx_kind_of(s->ix) != IDX_GRAPH;
}

static int make_cuts(const bench *b, subject *s)
{
    for (uint32_t run = 0; run < idx_codes_runs(b->h->n); run++) {
        uint32_t from, to;
        idx_codes_run_rows(b->h->n, run, &from, &to);
        if ((b->lo <= from && to <= b->hi) || to <= b->lo || from >= b->hi)
            continue;
        size_t most = idx_codes_max_clusters(to - from);
        idx_cut *cut = &s->cuts[s->n_cuts++];
        *cut = (idx_cut){run, b->lo, b->hi, malloc(most * idx_codes_sum_stride(b->h->dim) * 4), malloc(most * 4)};
        if (!cut->sums || !cut->counts)
            return -ENOMEM;
        int r = idx_codes_cut(s->ix, &b->values, cut);
        if (r < 0)
            return r;
    }
    return 0;
}

static int subject_build(const bench *b, subject *s, eng_bench_result *ret)
{
    idx_builder *builder = NULL;
    double start = cpu_seconds();
    size_t bytes = 0;
    int r = s->build ? s->build(b, &builder) : 0;
    if (builder) {
        r = idx_builder_step(builder, 0);
        if (!r)
            r = idx_builder_finish(builder, &s->ix);
        idx_builder_free(builder);
    }
    if (r < 0)
        return r;
    if (s->ix) {
        ret->build_s = cpu_seconds() - start;
        idx_arena(s->ix, &bytes);
        ret->bytes_per_key = (double)bytes / b->h->n;
    }
    if (!has_clusters(s))
        return 0;
    uint32_t n_clusters = idx_codes_max_clusters(b->h->n);
    idx_codes_part(s->ix, b->lo, b->hi, 0, 1, &s->first, &s->end);
    s->weights = malloc((size_t)n_clusters * b->h->group * sizeof *s->weights);
    s->taken = calloc(n_clusters, sizeof *s->taken);
    s->hit_coef = malloc(((size_t)b->max_k + 1) * sizeof *s->hit_coef);
    return s->weights && s->taken && s->hit_coef ? make_cuts(b, s) : -ENOMEM;
}

static void subject_free(const bench *b, subject *s)
{
    for (uint32_t i = 0; i < s->n_cuts; i++) {
        free(s->cuts[i].sums);
        free(s->cuts[i].counts);
    }
    for (uint32_t i = 0; s->copies && i < b->replicas; i++)
        idx_free(s->copies[i]);
    free(s->copies);
    idx_free(s->ix);
    free(s->weights);
    free(s->taken);
    free(s->hit_coef);
    free(s->seeds);
    free(s->n_seeds);
    free(s->rounds);
}

/* One search for heads [head, head + group) of a step. m: [group], of the weights. */
static int search(const bench *b, const subject *s, const idx_index *ix, const idx_rows *keys, uint32_t step, uint32_t head, uint32_t group, float *m,
                  idx_hits **ret_hits, uint32_t *ret_visited)
{
    size_t at = (size_t)step * b->h->group + head;
    idx_query q = {.q = b->q + at * b->h->dim,
                   .floor = b->floor + at,
                   .seeds = s->seeds + (size_t)step * b->h->group * SEEDS,
                   .n_seeds = s->n_seeds[step],
                   .group = group,
                   .lo = b->lo,
                   .hi = b->hi,
                   .scale = b->scale,
                   .budget = b->budget};
    if (!has_clusters(s))
        return idx_search(ix, keys, &q, b->scratch, ret_hits, ret_visited);
    int r = idx_codes_scan(ix, keys, &q, s->first, s->end, b->scratch, b->p->estimate ? s->weights : NULL, s->end - s->first, m, ret_hits);
    *ret_visited = idx_visited(b->scratch);
    return r;
}

/* ---- quality ---------------------------------------------------------------------------------------------------- */

typedef struct {
    double *x;
    uint32_t n;
} samples;

typedef struct {
    samples recall16, recall100, mass, error, error_estimate;
    double hits, visited_head, visited_group;
    /* of one head at one step */
    float *scores; /* [n] */
    float *best_score;
    uint32_t *best_id; /* [n + 16] */
    uint8_t *hit;      /* [n] */
    double *full, *found;   /* [dim] */
} quality;

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static eng_bench_spread spread_of(samples *s)
{
    eng_bench_spread r = {0};
    if (!s->n)
        return r;
    qsort(s->x, s->n, sizeof *s->x, by_size);
    for (uint32_t i = 0; i < s->n; i++)
        r.mean += s->x[i] / s->n;
    r.p10 = s->x[s->n / 10];
    r.p90 = s->x[s->n - 1 - s->n / 10];
    r.min = s->x[0];
    r.max = s->x[s->n - 1];
    return r;
}

static void add(samples *s, double x)
{
    s->x[s->n++] = x;
}

static void score_all(const bench *b, uint32_t step, uint32_t head, float *scores)
{
    uint32_t dim = b->h->dim;
    const float *q = b->q + ((size_t)step * b->h->group + head) * dim;
    for (uint32_t i = 0; i < b->h->n; i++) {
        double s = 0;
        const float *k = b->k + (size_t)i * dim;
        for (uint32_t j = 0; j < dim; j++)
            s += (double)q[j] * (double)k[j];
        scores[i] = (float)(s * (double)b->scale);
    }
}

/* Of the best `most` rows that an exact search returns, the share that was found. */
static double recall(const quality *x, uint32_t n_best, uint32_t most)
{
    uint32_t n = idx_select(x->best_id, x->best_score, n_best, most), found = 0;
    for (uint32_t i = 0; i < n; i++)
        found += x->hit[x->best_id[i]];
    return n ? (double)found / n : 1;
}

static void judge_recall(const bench *b, quality *x, float floor)
{
    uint32_t span = b->hi - b->lo, n;
    for (uint32_t i = 0; i < span; i++) {
        x->best_id[i] = b->lo + i;
        x->best_score[i] = x->scores[b->lo + i];
    }
    n = idx_select(x->best_id, x->best_score, span, b->max_k);
    if (b->budget.beta > 0) {
        float best = floor;
        uint32_t kept = 0;
        for (uint32_t i = 0; i < n; i++)
            best = fmaxf(best, x->best_score[i]);
        for (uint32_t i = 0; i < n; i++)
            if (x->best_score[i] >= best - b->budget.beta) {
                x->best_id[kept] = x->best_id[i];
                x->best_score[kept++] = x->best_score[i];
            }
        n = kept;
    }
    add(&x->recall100, recall(x, n, GOOD));
    add(&x->recall16, recall(x, n < GOOD ? n : GOOD, BEST));
}

static double distance(const bench *b, const double *full, double lf, const double *found, double l)
{
    double diff = 0, size = 0;
    for (uint32_t j = 0; j < b->h->dim; j++) {
        double f = full[j] / lf, d = found[j] / l - f;
        diff += d * d;
        size += f * f;
    }
    return size > 0 ? sqrt(diff / size) : 0;
}

/* Attention over all rows, over the window and the hits, and then with the estimate of the others. */
static void judge_output(const bench *b, const subject *s, quality *x, uint32_t head, float m_weights, const idx_hits *hits)
{
    uint32_t dim = b->h->dim;
    double m = -INFINITY, lf = 0, l = 0, l_range = 0, l_hits = 0;
    memset(x->full, 0, dim * sizeof *x->full);
    memset(x->found, 0, dim * sizeof *x->found);
    for (uint32_t i = 0; i < b->h->n; i++)
        m = fmax(m, (double)x->scores[i]);
    for (uint32_t i = 0; i < b->h->n; i++) {
        bool in = i >= b->lo && i < b->hi, read = !in || x->hit[i];
        double p = exp((double)x->scores[i] - m);
        const float *v = b->v + (size_t)i * dim;
        lf += p;
        l += read ? p : 0;
        l_range += in ? p : 0;
        l_hits += in && read ? p : 0;
        for (uint32_t j = 0; j < dim; j++) {
            x->full[j] += p * (double)v[j];
            x->found[j] += read ? p * (double)v[j] : 0;
        }
    }
    add(&x->mass, l_range > 0 ? l_hits / l_range : 1);
    add(&x->error, distance(b, x->full, lf, x->found, l));
    if (!has_clusters(s) || !b->p->estimate)
        return;
    float *w = s->weights + (size_t)head * (s->end - s->first);
    double g = m_weights > -INFINITY ? exp((double)m_weights - m) : 0;
    l += g * (double)idx_estimate(s->ix, s->cuts, s->n_cuts, s->first, s->end, m_weights, 1, w, hits->clusters, hits->scanned, hits->n, s->taken, s->hit_coef);
    for (uint32_t c = s->first; c < s->end;) {
        const float *sums;
        uint32_t next = idx_codes_sums(s->ix, s->cuts, s->n_cuts, c, s->end, &sums);
        for (; c < next; c++, sums += idx_codes_sum_stride(dim))
            for (uint32_t j = 0; j < dim; j++)
                x->found[j] += g * (double)w[c - s->first] * (double)sums[j];
    }
    for (uint32_t i = 0; i < hits->n; i++)
        for (uint32_t j = 0; j < dim; j++)
            x->found[j] -= g * (double)s->hit_coef[i] * (double)b->v[(size_t)hits->ids[i] * dim + j];
    add(&x->error_estimate, distance(b, x->full, lf, x->found, l));
}

static int judge_step(const bench *b, subject *s, quality *x, uint32_t step)
{
    float m[ENG_BENCH_MAX_GROUP];
    idx_hits *hits;
    uint32_t visited, group = b->h->group, span = b->hi - b->lo;
    for (uint32_t h = 0; h < group; h++) {
        int r = search(b, s, s->ix, &b->keys, step, h, 1, m, &hits, &visited);
        if (r < 0)
            return r;
        x->visited_head += visited < span ? (double)visited / span : 1;
    }
    int r = search(b, s, s->ix, &b->keys, step, 0, group, m, &hits, &visited);
    if (r < 0)
        return r;
    x->visited_group += visited < span ? (double)visited / span : 1;
    for (uint32_t h = 0; h < group; h++) {
        idx_hits *found = &hits[h];
        x->hits += found->n;
        for (uint32_t i = 0; i < found->n; i++)
            x->hit[found->ids[i]] = 1;
        score_all(b, step, h, x->scores);
        judge_recall(b, x, b->floor[(size_t)step * group + h]);
        judge_output(b, s, x, h, m[h], found);
        for (uint32_t i = 0; i < found->n; i++)
            x->hit[found->ids[i]] = 0;
        if (step + 1 < b->h->n_steps) { /* last, since it changes the order of ids and scores only */
            uint32_t *n_seeds = &s->n_seeds[step + 1], n = idx_select(found->ids, found->scores, found->n, SEEDS);
            memcpy(s->seeds + (size_t)(step + 1) * group * SEEDS + *n_seeds, found->ids, n * sizeof *s->seeds);
            *n_seeds += n;
        }
    }
    return 0;
}

static int quality_new(quality *x, uint32_t n, uint32_t dim, uint32_t n_samples)
{
    samples *all[] = {&x->recall16, &x->recall100, &x->mass, &x->error, &x->error_estimate};
    *x = (quality){0};
    bool good = true;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        all[i]->x = malloc(n_samples * sizeof(double));
        good = good && all[i]->x;
    }
    x->scores = malloc(n * sizeof *x->scores);
    x->best_score = malloc(((size_t)n + 16) * sizeof *x->best_score);
    x->best_id = malloc(((size_t)n + 16) * sizeof *x->best_id);
    x->hit = calloc(n, 1);
    x->full = malloc(dim * sizeof *x->full);
    x->found = malloc(dim * sizeof *x->found);
    return good && x->scores && x->best_score && x->best_id && x->hit && x->full && x->found ? 0 : -ENOMEM;
}

static void quality_free(quality *x)
{
    void *parts[] = {x->recall16.x, x->recall100.x, x->mass.x, x->error.x, x->error_estimate.x, x->scores, x->best_score, x->best_id, x->hit, x->full, x->found};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
}

static int judge(const bench *b, subject *s, eng_bench_result *ret)
{
    quality x;
    uint32_t steps = b->h->n_steps, n = steps * b->h->group;
    int r = quality_new(&x, b->h->n, b->h->dim, n);
    for (uint32_t step = 0; step < steps && !r; step++)
        r = judge_step(b, s, &x, step);
    if (!r) {
        ret->hits = x.hits / n;
        ret->visited_head = x.visited_head / n;
        ret->visited_group = x.visited_group / steps;
        ret->recall16 = spread_of(&x.recall16);
        ret->recall100 = spread_of(&x.recall100);
        ret->mass = spread_of(&x.mass);
        ret->error = spread_of(&x.error);
        ret->has_estimate = x.error_estimate.n;
        ret->error_estimate = spread_of(&x.error_estimate);
    }
    quality_free(&x);
    return r;
}

/* ---- time ------------------------------------------------------------------------------------------------------- */

/* As many copies of keys and indexes as fit a quarter of the memory that there is. */
static int copy_all(bench *b, subject *s, uint32_t n_subjects, char *err, size_t errlen)
{
    size_t row = b->keys.stride * b->h->n, each = row, bytes;
    for (uint32_t i = 0; i < n_subjects; i++) {
        if (!s[i].ix)
            continue;
        idx_arena(s[i].ix, &bytes);
        each += bytes;
    }
    size_t most = (size_t)eng_memory_limit("") / 4 / each;
    b->replicas = most && most < b->p->replicas ? (uint32_t)most : b->p->replicas;
    b->copies = malloc(row * b->replicas);
    if (!b->copies)
        return -ENOMEM;
    for (uint32_t i = 0; i < b->replicas; i++)
        memcpy(b->copies + row * i, b->keys.data, row);
    for (uint32_t i = 0; i < n_subjects; i++) {
        if (!s[i].ix)
            continue;
        s[i].copies = calloc(b->replicas, sizeof(idx_index *));
        if (!s[i].copies)
            return -ENOMEM;
        const void *arena = idx_arena(s[i].ix, &bytes);
        for (uint32_t r = 0; r < b->replicas; r++) {
            int rc = idx_load(arena, bytes, b->h->n, b->h->dim, NULL, &s[i].copies[r], err, errlen);
            if (rc < 0)
                return rc;
        }
    }
    return 0;
}

static int time_round(const bench *b, subject *s, uint32_t round)
{
    double start = cpu_seconds();
    idx_rows keys = b->keys;
    for (uint32_t i = 0; i < b->replicas; i++) {
        float m[ENG_BENCH_MAX_GROUP];
        idx_hits *hits;
        uint32_t visited, step = (uint32_t)(((uint64_t)round * b->replicas + i) % b->h->n_steps);
        keys.data = b->copies + (size_t)i * keys.stride * keys.n;
        int r = search(b, s, s->copies ? s->copies[i] : NULL, &keys, step, 0, b->h->group, m, &hits, &visited);
        if (r < 0)
            return r;
    }
    s->rounds[round] = (cpu_seconds() - start) / b->replicas;
    return 0;
}

/* The first round, which touches everything for the first time, isn't counted. */
static int time_all(const bench *b, subject *s, uint32_t n_subjects)
{
    for (uint32_t round = 0; round <= b->p->rounds; round++)
        for (uint32_t i = 0; i < n_subjects; i++) {
            int r = time_round(b, &s[i], round);
            if (r < 0)
                return r;
        }
    return 0;
}

static void print_times(const bench *b, const subject *s, const subject *base, eng_bench_result *ret)
{
    samples us = {malloc(b->p->rounds * sizeof(double)), 0}, ratio = {malloc(b->p->rounds * sizeof(double)), 0};
    for (uint32_t i = 1; i <= b->p->rounds && us.x && ratio.x; i++) {
        add(&us, s->rounds[i] * 1e6);
        add(&ratio, s->rounds[i] / base->rounds[i]);
    }
    eng_bench_spread u = spread_of(&us);
    spread_of(&ratio);
    if (us.n && ratio.n) {
        ret->us = us.x[us.n / 2];
        ret->us_min = u.min;
        ret->us_max = u.max;
        ret->relative = ratio.x[ratio.n / 2];
    }
    free(us.x);
    free(ratio.x);
}

/* ---- the whole -------------------------------------------------------------------------------------------------- */

static void to_f32(float *to, const eng_bench_rows *from, size_t n)
{
    const uint16_t *half = from->data;
    if (from->f32)
        memcpy(to, from->data, n * sizeof *to);
    for (size_t i = 0; i < n && !from->f32; i++)
        to[i] = eng_f16_to_f32(half[i]);
}

/* A number that isn't finite would make every mean one. */
static int check_finite(const float *x, size_t n, const char *what, char *err, size_t errlen)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(x[i])) {
            snprintf(err, errlen, "the %s hold a number that is not finite", what);
            return -EINVAL;
        }
    return 0;
}

static int take_train(bench *b, const eng_bench_head *h)
{
    size_t n = (size_t)h->n_train * h->group * h->dim;
    b->train_q = malloc(n * sizeof *b->train_q + 1);
    b->train_pos = malloc(h->n_train * sizeof *b->train_pos + 1);
    if (!b->train_q || !b->train_pos)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        b->train_q[i] = h->train.f32 ? eng_f32_to_f16(((const float *)h->train.data)[i]) : ((const uint16_t *)h->train.data)[i];
    for (uint32_t i = 0; i < h->n_train; i++)
        b->train_pos[i] = h->train_pos ? h->train_pos[i] : (uint32_t)((uint64_t)(i + 1) * h->n / h->n_train) - 1;
    b->train = (idx_queries){b->train_q, b->train_pos, h->n_train, h->group};
    idx_query_power(&b->train, h->dim, b->power);
    return 0;
}

/* Best scores in the window. */
static int find_floors(bench *b)
{
    const eng_bench_head *h = b->h;
    float *scores = malloc(h->n * sizeof *scores);
    if (!scores)
        return -ENOMEM;
    for (uint32_t i = 0; i < h->n_steps * h->group; i++) {
        score_all(b, i / h->group, i % h->group, scores);
        b->floor[i] = -INFINITY;
        for (uint32_t row = 0; row < h->n; row++)
            if (row < b->lo || row >= b->hi)
                b->floor[i] = fmaxf(b->floor[i], scores[row]);
    }
    free(scores);
    return 0;
}

static int open_bench(bench *b, char *err, size_t errlen)
{
    const eng_bench_head *h = b->h;
    size_t n = (size_t)h->n * h->dim, n_q = (size_t)h->n_steps * h->group;
    b->scale = 1 / sqrtf((float)h->dim);
    b->lo = b->p->n_sink;
    b->hi = h->n - b->p->n_local;
    b->budget = b->p->top_k ? (idx_budget){b->p->top_k, 0} : (idx_budget){b->p->k_max, b->p->beta};
    b->max_k = b->budget.top_k < b->hi - b->lo ? b->budget.top_k : b->hi - b->lo;
    b->keys = (idx_rows){h->keys.data, (size_t)h->dim * (h->keys.f32 ? 4 : 2), h->n, h->dim, h->keys.f32 ? IDX_F32 : IDX_F16};
    b->values = (idx_rows){h->values.data, (size_t)h->dim * (h->values.f32 ? 4 : 2), h->n, h->dim, h->values.f32 ? IDX_F32 : IDX_F16};
    b->k = malloc(n * sizeof *b->k);
    b->v = malloc(n * sizeof *b->v);
    b->q = malloc(n_q * h->dim * sizeof *b->q);
    b->floor = malloc(n_q * sizeof *b->floor);
    int r = b->k && b->v && b->q && b->floor ? take_train(b, h) : -ENOMEM;
    if (!r)
        r = idx_scratch_new(h->n, h->dim, h->group, b->max_k, &b->scratch);
    if (r < 0)
        return r;
    to_f32(b->k, &h->keys, n);
    to_f32(b->v, &h->values, n);
    to_f32(b->q, &h->queries, n_q * h->dim);
    r = check_finite(b->k, n, "keys", err, errlen);
    if (!r)
        r = check_finite(b->v, n, "values", err, errlen);
    if (!r)
        r = check_finite(b->q, n_q * h->dim, "queries", err, errlen);
    return r ? r : find_floors(b);
}

static void close_bench(bench *b)
{
    void *parts[] = {b->k, b->v, b->q, b->train_q, b->train_pos, b->floor, b->copies};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
    idx_scratch_free(b->scratch);
}

static int refuse(char *err, size_t errlen, const char *why)
{
    snprintf(err, errlen, "%s", why);
    return -EINVAL;
}

static int check(const eng_bench_head *h, const eng_bench_params *p, char *err, size_t errlen)
{
    if (!h->n || !h->dim || h->dim > ENG_BENCH_MAX_DIM || !h->group || h->group > ENG_BENCH_MAX_GROUP || !h->n_steps)
        return refuse(err, errlen, "there must be keys of at most 1024 dimensions and a step of queries, for at most 64 heads");
    if (!p->n_local || (uint64_t)p->n_sink + p->n_local >= h->n)
        return refuse(err, errlen, "the window leaves no keys to search");
    if (!p->replicas || !p->rounds)
        return refuse(err, errlen, "nothing to time");
    for (uint32_t i = 0; h->train_pos && i + 1 < h->n_train; i++)
        if (h->train_pos[i] > h->train_pos[i + 1])
            return refuse(err, errlen, "the positions of the training queries don't rise");
    return 0;
}

static void choose_cpu(const char *name)
{
    static const char *const levels[] = {"scalar", "avx2", "avx512"}; /* amx has no more for an index */
    for (int i = 0; i < 3 && name; i++)
        if (!strcmp(name, levels[i]))
            idx_cpu_set((idx_cpu)i);
}

static int subject_new(const bench *b, subject *s, const char *name)
{
    size_t steps = b->h->n_steps;
    for (uint32_t i = 0; kind_names[i]; i++)
        if (!strcmp(kind_names[i], name)) {
            *s = (subject){.name = kind_names[i], .build = builds[i]};
            s->seeds = calloc(steps * b->h->group * SEEDS, sizeof *s->seeds);
            s->n_seeds = calloc(steps, sizeof *s->n_seeds);
            s->rounds = calloc((size_t)b->p->rounds + 1, sizeof *s->rounds);
            return s->seeds && s->n_seeds && s->rounds ? 0 : -ENOMEM;
        }
    return -EINVAL;
}

int eng_bench_index(const eng_bench_head *h, const eng_bench_params *p, const char *const *kinds, eng_bench_result *ret, uint32_t *ret_replicas, char *err,
                    size_t errlen)
{
    enum { MAX_SUBJECTS = 16 };
    subject subjects[MAX_SUBJECTS] = {0};
    eng_bench_result unasked;
    uint32_t n = 0, base = MAX_SUBJECTS;
    bench b = {.h = h, .p = p};
    int r = check(h, p, err, errlen);
    if (r < 0)
        return r;
    choose_cpu(p->cpu);
    *err = 0;
    r = open_bench(&b, err, errlen);
    for (; kinds[n] && !r; n++) {
        r = n + 1 < MAX_SUBJECTS ? subject_new(&b, &subjects[n], kinds[n]) : -EINVAL;
        if (!r && subjects[n].build == builds[BASE])
            base = n;
    }
    uint32_t n_subjects = n;
    if (base == MAX_SUBJECTS && !r)
        r = subject_new(&b, &subjects[base = n_subjects++], kind_names[BASE]);
    for (uint32_t i = 0; i < n_subjects && !r; i++) {
        eng_bench_result *to = i < n ? &ret[i] : &unasked;
        *to = (eng_bench_result){.kind = subjects[i].name};
        r = subject_build(&b, &subjects[i], to);
        if (!r && i < n)
            r = judge(&b, &subjects[i], to);
    }
    if (!r)
        r = copy_all(&b, subjects, n_subjects, err, errlen);
    if (!r)
        r = time_all(&b, subjects, n_subjects);
    for (uint32_t i = 0; i < n && !r; i++)
        print_times(&b, &subjects[i], &subjects[base], &ret[i]);
    *ret_replicas = b.replicas;
    for (uint32_t i = 0; i < MAX_SUBJECTS; i++)
        subject_free(&b, &subjects[i]);
    close_bench(&b);
    if (r < 0 && !*err)
        snprintf(err, errlen, "%s", strerror(-r));
    return r;
}
