/* Codes and lists: retrieval by int8 codes and the estimate of what is not retrieved, against float64 brute force, on every instruction set of
 * the machine. What is true of lists alone is in test_lists.c.
 *
 * usage: test_codes [SET...]     with folders: prints errors and costs for them (data/qk/README.md gives the layout; values.npy is needed)
 */
#include "index.h"
#include "support.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_GROUP = 7, SINKS = 128, WINDOW = 512 };

typedef struct {
    idx_rows keys, values;
    double *k, *v; /* [n][dim], as stored */
    idx_index *ix;
    idx_scratch *scratch;
    uint32_t n, dim;
} head;

/* Not a ck_assert: the table is also made outside of tests. */
static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "test_codes: not so: %s\n", what);
        exit(1);
    }
}
#define MUST(X) must(X, #X)

static void *need(void *p)
{
    must(p != NULL, "memory");
    return p;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double *doubles(const _Float16 *x, size_t n)
{
    double *d = need(malloc(n * sizeof *d));
    for (size_t i = 0; i < n; i++)
        d[i] = (double)x[i];
    return d;
}

static const idx_queries no_queries;
static const idx_kind code_kinds[] = {IDX_FLAT, IDX_CLUSTER, IDX_IVF};
enum { N_KINDS = 3 };

/* memory: of flat only. */
static int builder_new(idx_kind kind, const idx_rows *keys, const idx_rows *values, const idx_queries *train, void *memory, idx_builder **ret)
{
    float power[1024];
    idx_query_power(train, keys->dim, power);
    return kind == IDX_FLAT ? idx_builder_new_codes(keys, values, power, memory, ret) : idx_builder_new_lists(kind, keys, values, train, ret);
}

static idx_index *build_in(idx_kind kind, const idx_rows *keys, const idx_rows *values, const idx_queries *train, uint64_t slice_ns, void *memory)
{
    idx_builder *b;
    idx_index *ix;
    int r;
    MUST(builder_new(kind, keys, values, train, memory, &b) == 0);
    while ((r = idx_builder_step(b, slice_ns)) == 1) {
    }
    MUST(r == 0);
    MUST(idx_builder_finish(b, &ix) == 0);
    idx_builder_free(b);
    return ix;
}

static idx_index *build(idx_kind kind, const idx_rows *keys, const idx_rows *values, const idx_queries *train, uint64_t slice_ns)
{
    return build_in(kind, keys, values, train, slice_ns, NULL);
}

/* k, v: f16 [n][dim], kept. */
static head head_trained(idx_kind kind, const void *k, const void *v, uint32_t n, uint32_t dim, const idx_queries *train)
{
    head x = {.keys = {k, (size_t)dim * 2, n, dim, IDX_F16}, .values = {v, (size_t)dim * 2, n, dim, IDX_F16}, .n = n, .dim = dim};
    x.k = doubles(k, (size_t)n * dim);
    x.v = doubles(v, (size_t)n * dim);
    x.ix = build(kind, &x.keys, &x.values, train, 0);
    MUST(idx_scratch_new(n, dim, MAX_GROUP, n, &x.scratch) == 0);
    return x;
}

static head head_new(idx_kind kind, const void *k, const void *v, uint32_t n, uint32_t dim)
{
    return head_trained(kind, k, v, n, dim, &no_queries);
}

static void head_free(head *x)
{
    free(x->k);
    free(x->v);
    idx_free(x->ix);
    idx_scratch_free(x->scratch);
}

/* The sums of every run that [lo, hi) cuts. */
static uint32_t make_cuts(const head *x, uint32_t lo, uint32_t hi, idx_cut *cuts)
{
    uint32_t n_cuts = 0;
    for (uint32_t run = 0; run < idx_codes_runs(x->n); run++) {
        uint32_t a, b;
        idx_codes_run_rows(x->n, run, &a, &b);
        if ((lo <= a && b <= hi) || b <= lo || a >= hi)
            continue;
        size_t most = idx_codes_max_clusters(b - a);
        idx_cut c = {run, lo, hi, need(malloc(most * idx_codes_sum_stride(x->dim) * 4)), need(malloc(most * 4))};
        MUST(idx_codes_cut(x->ix, &x->values, &c) == 0);
        cuts[n_cuts++] = c;
    }
    return n_cuts;
}

/* What a search in parts found and estimated, each head's parts put together. */
typedef struct {
    uint8_t *retrieved[MAX_GROUP]; /* [n] */
    double *score[MAX_GROUP];      /* [n], of retrieved rows */
    double *o[MAX_GROUP];          /* [dim]: the estimate's numerator, times exp(-m) */
    double m[MAX_GROUP], l[MAX_GROUP];
    uint32_t n_hits[MAX_GROUP];
} result;

static result result_new(const head *x, uint32_t group)
{
    result r = {0};
    for (uint32_t h = 0; h < group; h++) {
        r.retrieved[h] = need(calloc(x->n, 1));
        r.score[h] = need(calloc(x->n, sizeof(double)));
        r.o[h] = need(calloc(x->dim, sizeof(double)));
        r.m[h] = -INFINITY;
    }
    return r;
}

static void result_free(result *r)
{
    for (uint32_t h = 0; h < MAX_GROUP; h++) {
        free(r->retrieved[h]);
        free(r->score[h]);
        free(r->o[h]);
    }
}

static void add_estimate(const head *x, result *r, uint32_t h, const idx_cut *cuts, uint32_t n_cuts, uint32_t first, uint32_t end, float m,
                         float *w, const idx_hits *hits)
{
    uint32_t *taken = need(calloc(end - first + 1, 4));
    float *coef = need(malloc((hits->n + 1) * sizeof *coef));
    double l = (double)idx_estimate(x->ix, cuts, n_cuts, first, end, m, 1, w, hits->clusters, hits->scanned, hits->n, taken, coef);
    for (uint32_t i = 0; i < end - first; i++)
        MUST(taken[i] == 0);
    double old = r->m[h], big = fmax(old, (double)m), f = old > -INFINITY ? exp(old - big) : 0,
           g = m > -INFINITY ? exp((double)m - big) : 0;
    r->m[h] = big;
    r->l[h] = r->l[h] * f + l * g;
    for (uint32_t j = 0; j < x->dim; j++)
        r->o[h][j] *= f;
    for (uint32_t c = first; c < end;) {
        const float *sums;
        uint32_t next = idx_codes_sums(x->ix, cuts, n_cuts, c, end, &sums);
        MUST(next > c);
        for (; c < next; c++, sums += idx_codes_sum_stride(x->dim))
            for (uint32_t j = 0; j < x->dim; j++)
                r->o[h][j] += g * (double)w[c - first] * (double)sums[j];
    }
    for (uint32_t i = 0; i < hits->n; i++)
        for (uint32_t j = 0; j < x->dim; j++)
            r->o[h][j] -= g * (double)coef[i] * x->v[(size_t)hits->ids[i] * x->dim + j];
    free(taken);
    free(coef);
}

static result search(const head *x, const idx_query *q, uint32_t parts)
{
    idx_cut cuts[8];
    uint32_t n_cuts = make_cuts(x, q->lo, q->hi, cuts), at = UINT32_MAX, ld = idx_codes_max_clusters(x->n);
    result r = result_new(x, q->group);
    float *w = need(malloc((size_t)ld * q->group * sizeof *w)), m[MAX_GROUP];
    for (uint32_t part = 0; part < parts; part++) {
        uint32_t first, end;
        idx_hits *hits;
        idx_codes_part(x->ix, q->lo, q->hi, part, parts, &first, &end);
        MUST(at == UINT32_MAX || first == at);
        MUST(first <= end);
        at = end;
        MUST(idx_codes_scan(x->ix, &x->keys, q, first, end, x->scratch, w, ld, m, &hits) == 0);
        for (uint32_t h = 0; h < q->group; h++) {
            for (uint32_t i = 0; i < hits[h].n; i++) {
                uint32_t id = hits[h].ids[i];
                MUST(id >= q->lo && id < q->hi && !r.retrieved[h][id]);
                r.retrieved[h][id] = 1;
                r.score[h][id] = (double)hits[h].scores[i];
                MUST(hits[h].clusters[i] >= first && hits[h].clusters[i] < end);
            }
            r.n_hits[h] += hits[h].n;
            add_estimate(x, &r, h, cuts, n_cuts, first, end, m[h], w + (size_t)h * ld, &hits[h]);
        }
    }
    free(w);
    for (uint32_t i = 0; i < n_cuts; i++) {
        free(cuts[i].sums);
        free(cuts[i].counts);
    }
    return r;
}

static double score_of(const head *x, const float *q, uint32_t row, double scale)
{
    double s = 0;
    for (uint32_t j = 0; j < x->dim; j++)
        s += (double)q[j] * x->k[(size_t)row * x->dim + j];
    return s * scale;
}

/* Relative L2 error, against attention over all of [lo, hi) and the rows `also`, of what was retrieved with or without the estimate. */
static double error_of(const head *x, const float *q, double scale, uint32_t lo, uint32_t hi, uint32_t also, const result *r, uint32_t h,
                       bool estimate)
{
    double *full = need(calloc(2 * (size_t)x->dim, sizeof *full)), *got = full + x->dim, m = r->m[h], lf = 0, lg = 0, diff = 0, size = 0;
    for (uint32_t i = 0; i < x->n; i++) {
        bool in = i >= lo && i < hi;
        if (!in && !(i < also))
            continue;
        double p = exp(score_of(x, q, i, scale) - m);
        lf += p;
        lg += !in || r->retrieved[h][i] ? p : 0;
        for (uint32_t j = 0; j < x->dim; j++) {
            double v = p * x->v[(size_t)i * x->dim + j];
            full[j] += v;
            got[j] += !in || r->retrieved[h][i] ? v : 0;
        }
    }
    lg += estimate ? r->l[h] : 0;
    for (uint32_t j = 0; j < x->dim; j++) {
        double g = got[j] + (estimate ? r->o[h][j] : 0), d = g / lg - full[j] / lf;
        diff += d * d;
        size += full[j] / lf * (full[j] / lf);
    }
    free(full);
    return sqrt(diff / size);
}

/* ---- counting --------------------------------------------------------------------------------------------------- */

static t_rng rng;

static _Float16 *random_rows(size_t n, double scale)
{
    _Float16 *x = need(malloc(n * sizeof *x));
    for (size_t i = 0; i < n; i++)
        x[i] = (_Float16)(scale * (double)t_normal(&rng));
    return x;
}

/* A query of zeros gives each row weight 1, and then the estimate is exact whatever the clusters: the sum of the values of all rows that
 * are neither retrieved nor out of the range. So a row that is counted twice, forgotten or seen from outside of the range shows, for any
 * range, parts and budget. */
START_TEST(each_row_counts_once)
{
    idx_kind kind = code_kinds[_i % N_KINDS];
    idx_cpu_set((idx_cpu)(_i / N_KINDS));
    static const uint32_t sizes[] = {1, 15, 37, 1024, 12287, 12288, 20011};
    for (size_t t = 0; t < sizeof sizes / sizeof *sizes; t++) {
        uint32_t n = sizes[t], dim = 24;
        _Float16 *k = random_rows((size_t)n * dim, 1), *v = random_rows((size_t)n * dim, 1);
        head x = head_new(kind, k, v, n, dim);
        float q[MAX_GROUP * 24] = {0};
        for (int round = 0; round < 8; round++) {
            uint32_t lo = round ? (uint32_t)(t_u64(&rng) % n) : 0, hi = round ? lo + 1 + (uint32_t)(t_u64(&rng) % (n - lo)) : n;
            float floor[MAX_GROUP] = {0};
            idx_query query = {.q = q,
                               .floor = round % 2 ? floor : NULL,
                               .group = MAX_GROUP,
                               .lo = lo,
                               .hi = hi,
                               .scale = 1,
                               .budget = {(uint32_t)(t_u64(&rng) % 300), 0}};
            result r = search(&x, &query, 1 + (uint32_t)round);
            for (uint32_t h = 0; h < MAX_GROUP; h++) {
                double rest[24] = {0}, total = 0;
                for (uint32_t i = lo; i < hi; i++)
                    if (!r.retrieved[h][i]) {
                        total++;
                        for (uint32_t j = 0; j < dim; j++)
                            rest[j] += x.v[(size_t)i * dim + j];
                    }
                double left = r.m[h] > -INFINITY ? r.l[h] * exp(r.m[h]) : 0;
                ck_assert_double_eq_tol(left, total, 1e-5 * total + 1e-9);
                for (uint32_t j = 0; j < dim; j++)
                    ck_assert_double_eq_tol(r.o[h][j], rest[j], 0.02);
            }
            result_free(&r);
        }
        head_free(&x);
        free(k);
        free(v);
    }
}
END_TEST

/* ---- real queries ------------------------------------------------------------------------------------------------ */

typedef struct {
    t_npy keys, values, decode;
} set;

static t_npy load(const char *dir, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.npy", dir, name);
    return t_npy_load(path);
}

static void queries_at(const t_npy *decode, uint32_t step, float *q)
{
    size_t per = decode->dims[1] * decode->dims[2];
    const _Float16 *from = (const _Float16 *)decode->data + step * per;
    for (size_t i = 0; i < per; i++)
        q[i] = (float)from[i];
}

static int falling(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* Shares of the best 16 and best 100 rows of [lo, hi) that were retrieved. */
static void add_recall(const head *x, const float *q, double scale, uint32_t lo, uint32_t hi, const result *r, uint32_t h, double *ret16,
                       double *ret100)
{
    double *s = need(malloc((hi - lo) * sizeof *s)), *sorted = need(malloc((hi - lo) * sizeof *s));
    uint32_t best16 = 0, best100 = 0;
    for (uint32_t i = lo; i < hi; i++)
        s[i - lo] = score_of(x, q, i, scale);
    memcpy(sorted, s, (hi - lo) * sizeof *s);
    qsort(sorted, hi - lo, sizeof *s, falling);
    for (uint32_t i = lo; i < hi; i++) {
        best16 += r->retrieved[h][i] && s[i - lo] >= sorted[15];
        best100 += r->retrieved[h][i] && s[i - lo] >= sorted[99];
    }
    *ret16 += best16 / 16.;
    *ret100 += best100 / 100.;
    free(s);
    free(sorted);
}

/* Errors and recalls of top-k 100 over all steps and heads. */
typedef struct {
    double recall16, recall100, without, with, weight, n, hits;
} quality;

static quality measure(const head *x, const t_npy *decode, uint32_t lo, uint32_t hi, idx_budget budget, uint32_t steps, uint32_t parts)
{
    quality m = {0};
    uint32_t group = (uint32_t)decode->dims[1];
    for (uint32_t step = 0; step < steps; step++) {
        float q[MAX_GROUP * 256], floor[MAX_GROUP];
        queries_at(decode, step, q);
        for (uint32_t h = 0; h < group; h++) {
            double best = -INFINITY;
            for (uint32_t i = 0; i < lo; i++)
                best = fmax(best, score_of(x, q + (size_t)h * x->dim, i, 0.125));
            floor[h] = (float)best;
        }
        idx_query query = {.q = q, .floor = floor, .group = group, .lo = lo, .hi = hi, .scale = 0.125f, .budget = budget};
        result r = search(x, &query, parts);
        for (uint32_t h = 0; h < group; h++) {
            const float *qh = q + (size_t)h * x->dim;
            add_recall(x, qh, 0.125, lo, hi, &r, h, &m.recall16, &m.recall100);
            m.without += error_of(x, qh, 0.125, lo, hi, lo, &r, h, false);
            m.with += error_of(x, qh, 0.125, lo, hi, lo, &r, h, true);
            double l = 0;
            for (uint32_t i = lo; i < hi; i++)
                l += r.retrieved[h][i] ? 0 : exp(score_of(x, qh, i, 0.125) - r.m[h]);
            m.weight += fabs(r.l[h] / l - 1);
            m.hits += r.n_hits[h];
            m.n++;
        }
        result_free(&r);
    }
    m.recall16 /= m.n;
    m.recall100 /= m.n;
    m.without /= m.n;
    m.with /= m.n;
    m.weight /= m.n;
    m.hits /= m.n;
    return m;
}

static void table(const char *dir)
{
    set s = {load(dir, "keys"), load(dir, "values"), load(dir, "decode_q")};
    uint32_t n = (uint32_t)s.keys.dims[0], dim = (uint32_t)s.keys.dims[1], group = (uint32_t)s.decode.dims[1], hi = n - WINDOW;
    double start = seconds();
    head x = head_new(IDX_FLAT, s.keys.data, s.values.data, n, dim);
    double built = seconds() - start;
    size_t bytes;
    idx_arena(x.ix, &bytes);
    printf("%s: %u keys, build %.1f ms, %.1f bytes a key, %u clusters at most\n", strrchr(dir, '/') ? strrchr(dir, '/') + 1 : dir, n,
           built * 1e3, (double)bytes / n, idx_codes_max_clusters(n));
    static const idx_budget budgets[] = {{100, 0}, {512, 7}, {1024, 8}, {2048, 9}};
    for (int i = 0; i < 4; i++) {
        quality m = measure(&x, &s.decode, SINKS, hi, budgets[i], 24, 3);
        float q[MAX_GROUP * 256], *w = need(malloc((size_t)idx_codes_max_clusters(n) * MAX_GROUP * 4)), mm[MAX_GROUP];
        double scan[3] = {0};
        for (uint32_t step = 0; step < 24; step++) {
            queries_at(&s.decode, step, q);
            idx_query query = {.q = q, .group = group, .lo = SINKS, .hi = hi, .scale = 0.125f, .budget = budgets[i]};
            idx_hits *hits;
            uint32_t first, end;
            idx_codes_part(x.ix, SINKS, hi, 0, 1, &first, &end);
            start = seconds();
            idx_search(NULL, &x.keys, &query, x.scratch, &hits, NULL);
            scan[0] += seconds() - start;
            start = seconds();
            idx_codes_scan(x.ix, &x.keys, &query, first, end, x.scratch, NULL, 0, mm, &hits);
            scan[1] += seconds() - start;
            start = seconds();
            idx_codes_scan(x.ix, &x.keys, &query, first, end, x.scratch, w, idx_codes_max_clusters(n), mm, &hits);
            scan[2] += seconds() - start;
        }
        free(w);
        printf("  top %4u beta %.0f: hits %5.0f, recall@16 %.4f @100 %.4f, error %.4f -> %.4f, weight %.4f; ns a key: f16 scan %.2f, codes "
               "%.2f, + weights %.2f\n",
               budgets[i].top_k, (double)budgets[i].beta, m.hits, m.recall16, m.recall100, m.without, m.with, m.weight,
               scan[0] / 24 / n * 1e9, scan[1] / 24 / n * 1e9, scan[2] / 24 / n * 1e9);
    }
    head_free(&x);
    t_npy_free(&s.keys);
    t_npy_free(&s.values);
    t_npy_free(&s.decode);
}

/* Retrieval and estimate on real keys and values: what a budget must find (notes: int8 codes with spare candidates, recall >= .998; the
 * best 16 are never lost), and how much nearer to full attention the estimate comes. Measured once: .175 -> .0084 for top 100, .043 ->
 * .0014 for the default (of three parts each). */
START_TEST(real_queries)
{
    idx_kind kind = code_kinds[_i % N_KINDS];
    idx_cpu_set((idx_cpu)(_i / N_KINDS));
    const char *dir = t_path("data/qk/text_l6_kv0");
    set s = {load(dir, "keys"), load(dir, "values"), load(dir, "decode_q")};
    t_npy train = load(dir, "prefill_q"), train_pos = load(dir, "prefill_q_pos"), key_pos = load(dir, "key_pos");
    uint32_t n = (uint32_t)s.keys.dims[0], m = (uint32_t)train.dims[0], row = 0, *pos = need(malloc(m * sizeof *pos));
    for (uint32_t i = 0; i < m; i++) {
        while (row + 1 < n && ((const int32_t *)key_pos.data)[row + 1] <= ((const int32_t *)train_pos.data)[i])
            row++;
        pos[i] = row;
    }
    idx_queries queries = {train.data, pos, m, (uint32_t)train.dims[1]};
    head x = head_trained(kind, s.keys.data, s.values.data, n, (uint32_t)s.keys.dims[1], &queries);
    /* the clusters' estimate has each part's own clamp: in one part, as a search without others */
    uint32_t parts = kind == IDX_FLAT ? 3 : 1;
    quality top = measure(&x, &s.decode, SINKS, n - WINDOW, (idx_budget){100, 0}, 12, parts);
    quality dynamic = measure(&x, &s.decode, SINKS, n - WINDOW, (idx_budget){1024, 8}, 12, parts);
    printf("kind %d, top 100: recall@16 %.4f @100 %.4f, error %.4f -> %.4f, weights off by %.5f; beta 8: hits %.0f, error %.4f -> %.4f\n",
           (int)kind, top.recall16, top.recall100, top.without, top.with, top.weight, dynamic.hits, dynamic.without, dynamic.with);
    ck_assert_double_ge(top.recall16, kind == IDX_FLAT ? 1 : kind == IDX_CLUSTER ? 0.999 : 0.99);
    ck_assert_double_ge(top.recall100, kind == IDX_FLAT ? 0.998 : 0.99);
    ck_assert_double_le(top.with * (kind == IDX_FLAT ? 5 : 1.5), top.without);
    ck_assert_double_le(dynamic.with * (kind == IDX_FLAT ? 5 : 1.5), dynamic.without);
    if (kind == IDX_FLAT)
        ck_assert_double_le(top.weight, 0.002);
    head_free(&x);
    t_npy *all[] = {&s.keys, &s.values, &s.decode, &train, &train_pos, &key_pos};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        t_npy_free(all[i]);
    free(pos);
}
END_TEST

/* Values of a few kinds are clusters of one value each: then the estimate is exact but for the rounding of codes, in any range. */
START_TEST(exact_for_few_values)
{
    idx_cpu_set((idx_cpu)_i);
    enum { N = 9000, DIM = 40 };
    _Float16 *k = random_rows((size_t)N * DIM, 1), *kinds = random_rows(4 * DIM, 1), *v = need(malloc((size_t)N * DIM * 2));
    for (uint32_t i = 0; i < N; i++)
        memcpy(v + (size_t)i * DIM, kinds + (t_u64(&rng) % 4) * DIM, DIM * 2);
    head x = head_new(IDX_FLAT, k, v, N, DIM);
    for (int round = 0; round < 6; round++) {
        float q[MAX_GROUP * DIM];
        for (int i = 0; i < MAX_GROUP * DIM; i++)
            q[i] = t_normal(&rng);
        uint32_t lo = (uint32_t)(t_u64(&rng) % 4000), hi = N - (uint32_t)(t_u64(&rng) % 4000);
        idx_query query = {.q = q, .group = MAX_GROUP, .lo = lo, .hi = hi, .scale = 0.2f, .budget = {(uint32_t)(round * 30), 0}};
        result r = search(&x, &query, 1 + (uint32_t)round % 3);
        for (uint32_t h = 0; h < MAX_GROUP; h++)
            ck_assert_double_le(error_of(&x, q + (size_t)h * DIM, (double)0.2f, lo, hi, 0, &r, h, true), 5e-3);
        result_free(&r);
    }
    head_free(&x);
    free(k);
    free(v);
    free(kinds);
}
END_TEST

/* Codes and scores by them have the same bits on every level, scores for any number of dimensions and heads, and of each head those that a scan with fewer heads gives. */
START_TEST(levels_agree)
{
    enum { N = 1500, HEADS = 9, ALL = 1 << 30 };
    static const uint32_t dims[] = {4, 20, 64, 80, 128, 256};
    for (size_t t = 0; t < sizeof dims / sizeof *dims; t++) {
        uint32_t dim = dims[t];
        _Float16 *k = random_rows((size_t)N * dim, 3), *v = random_rows((size_t)N * dim, 1);
        idx_rows keys = {k, (size_t)dim * 2, N, dim, IDX_F16}, values = {v, (size_t)dim * 2, N, dim, IDX_F16};
        idx_index *ix = build(IDX_FLAT, &keys, &values, &no_queries, 0);
        idx_scratch *s;
        MUST(idx_scratch_new(N, dim, HEADS, N, &s) == 0);
        float q[HEADS * 256], m[HEADS], *want = need(malloc((size_t)HEADS * N * sizeof *want));
        for (uint32_t i = 0; i < HEADS * dim; i++)
            q[i] = t_normal(&rng);
        size_t bytes;
        const void *arena = idx_arena(ix, &bytes);
        for (int level = 0; level <= (int)idx_cpu_detect(); level++) {
            size_t again;
            idx_cpu_set((idx_cpu)level);
            idx_index *same = build(IDX_FLAT, &keys, &values, &no_queries, 0);
            ck_assert(!memcmp(idx_arena(same, &again), arena, bytes) && again == bytes);
            idx_free(same);
            for (uint32_t group = level ? 1 : HEADS; group <= HEADS; group++) {
                idx_query query = {.q = q, .group = group, .lo = 0, .hi = N, .scale = 0.3f, .budget = {ALL, 0}};
                idx_hits *hits;
                uint32_t first, end;
                idx_codes_part(ix, 0, N, 0, 1, &first, &end);
                ck_assert_int_eq(idx_codes_scan(ix, &keys, &query, first, end, s, NULL, 0, m, &hits), 0);
                for (uint32_t h = 0; h < group; h++) {
                    ck_assert_uint_eq(hits[h].n, N);
                    for (uint32_t i = 0; i < N; i++) {
                        float *at = &want[(size_t)h * N + hits[h].ids[i]];
                        if (!level)
                            *at = hits[h].scanned[i];
                        ck_assert(!memcmp(at, &hits[h].scanned[i], sizeof *at));
                    }
                }
            }
        }
        free(want);
        idx_scratch_free(s);
        idx_free(ix);
        free(k);
        free(v);
    }
}
END_TEST

START_TEST(steps_change_nothing)
{
    enum { N = 5000, DIM = 20 };
    _Float16 *k = random_rows((size_t)N * DIM, 1), *v = random_rows((size_t)N * DIM, 1);
    idx_kind kind = code_kinds[_i];
    uint32_t pos[60];
    for (uint32_t i = 0; i < 60; i++)
        pos[i] = i * 80 + 200;
    idx_queries train = {(const uint16_t *)(const void *)v, pos, 60, 2};
    idx_rows keys = {k, DIM * 2, N, DIM, IDX_F16}, values = {v, DIM * 2, N, DIM, IDX_F16};
    idx_index *a = build(kind, &keys, &values, &train, 0), *b, *c;
    size_t na, nb;
    void *memory = need(aligned_alloc(64, (idx_codes_max_bytes(N, DIM) + 63) & ~(size_t)63));
    memset(memory, 0xa5, idx_codes_max_bytes(N, DIM));
    b = build_in(kind, &keys, &values, &train, 1, memory);
    ck_assert((idx_arena(b, &nb) == memory) == (kind == IDX_FLAT));
    const void *pa = idx_arena(a, &na), *pb = idx_arena(b, &nb);
    ck_assert(na == nb && !memcmp(pa, pb, na));
    ck_assert_int_eq(idx_kind_of(a), kind);
    char err[200];
    ck_assert_int_eq(idx_check(a, err, sizeof err), 0);
    ck_assert_int_eq(idx_load(pa, na, N, DIM, &c, err, sizeof err), 0);
    ck_assert(!memcmp(idx_arena(c, &nb), pa, na));
    ck_assert_int_eq(idx_load(pa, na - 1, N, DIM, &c, err, sizeof err), -EBADMSG);
    ck_assert_int_eq(idx_load(pa, na, N + 1, DIM, &c, err, sizeof err), -EBADMSG);
    idx_free(a);
    idx_free(b);
    free(memory);
    idx_free(c);
    /* a build may be dropped at any point */
    for (int steps = 0; steps < 200; steps += 13) {
        idx_builder *w;
        ck_assert_int_eq(builder_new(kind, &keys, &values, &train, NULL, &w), 0);
        for (int i = 0; i < steps && idx_builder_step(w, 1) == 1; i++) {
        }
        idx_builder_free(w);
    }
    free(k);
    free(v);
}
END_TEST

/* Damaged arenas: refused, or else harmless to search (sanitizers watch). Structure, in the first bytes, is never taken as it is. */
START_TEST(damage)
{
    enum { N = 700, DIM = 8, TRIES = 4000 };
    _Float16 *k = random_rows((size_t)N * DIM, 1), *v = random_rows((size_t)N * DIM, 1);
    head x = head_new(code_kinds[_i], k, v, N, DIM);
    size_t bytes;
    const uint8_t *good = idx_arena(x.ix, &bytes);
    uint8_t *bad = need(malloc(bytes));
    idx_index *whole = x.ix;
    uint32_t refused = 0;
    char err[200];
    float q[MAX_GROUP * DIM];
    for (int i = 0; i < MAX_GROUP * DIM; i++)
        q[i] = t_normal(&rng);
    for (int i = 0; i < TRIES; i++) {
        memcpy(bad, good, bytes);
        size_t at = i % 2 ? (size_t)(t_u64(&rng) % bytes) : (size_t)(t_u64(&rng) % 512);
        bad[at] ^= (uint8_t)(1 + t_u64(&rng) % 255);
        int r = idx_load(bad, bytes, N, DIM, &x.ix, err, sizeof err);
        ck_assert(r == 0 || r == -EBADMSG);
        if (r) {
            refused++;
            continue;
        }
        ck_assert(at >= 64 || (at >= 48 && at < (_i ? 56 : 52))); /* no byte of the header is free, but for those of floats */
        idx_query query = {.q = q, .group = MAX_GROUP, .lo = 3, .hi = N - 5, .scale = 1, .budget = {20, 0}};
        result found = search(&x, &query, 2);
        result_free(&found);
        idx_free(x.ix);
    }
    ck_assert_uint_gt(refused, TRIES / 8);
    x.ix = whole;
    head_free(&x);
    free(bad);
    free(k);
    free(v);
}
END_TEST

/* A key that isn't a number has no score and no weight; a value that isn't counts as 0; an infinite query finds nothing. */
START_TEST(not_numbers)
{
    idx_cpu_set((idx_cpu)_i);
    enum { N = 2000, DIM = 16 };
    _Float16 *k = random_rows((size_t)N * DIM, 1), *v = random_rows((size_t)N * DIM, 1);
    k[37 * DIM + 5] = (_Float16)NAN;
    k[1500 * DIM] = (_Float16)INFINITY;
    v[99 * DIM + 3] = (_Float16)NAN;
    head x = head_new(IDX_FLAT, k, v, N, DIM);
    x.v[99 * DIM + 3] = 0;
    float q[MAX_GROUP * DIM] = {0};
    q[DIM] = INFINITY;
    q[2 * DIM] = NAN;
    idx_query query = {.q = q, .group = MAX_GROUP, .lo = 0, .hi = N, .scale = 1, .budget = {10, 0}};
    result r = search(&x, &query, 1);
    for (uint32_t h = 0; h < MAX_GROUP; h++) {
        ck_assert(!r.retrieved[h][37] && !r.retrieved[h][1500]);
        if (h != 1 && h != 2)
            ck_assert_double_eq_tol(r.l[h] * exp(r.m[h]), N - 2 - 10, 1e-2);
        for (uint32_t j = 0; j < DIM && h != 1 && h != 2; j++)
            ck_assert(isfinite(r.o[h][j]));
    }
    result_free(&r);
    head_free(&x);
    free(k);
    free(v);
}
END_TEST

static Suite *suite(void)
{
    Suite *s = suite_create("codes");
    TCase *t = tcase_create("codes");
    tcase_set_timeout(t, 0);
    tcase_add_loop_test(t, each_row_counts_once, 0, N_KINDS * ((int)idx_cpu_detect() + 1));
    tcase_add_loop_test(t, exact_for_few_values, 0, (int)idx_cpu_detect() + 1);
    tcase_add_loop_test(t, real_queries, 0, N_KINDS * ((int)idx_cpu_detect() + 1));
    tcase_add_loop_test(t, not_numbers, 0, (int)idx_cpu_detect() + 1);
    tcase_add_test(t, levels_agree);
    tcase_add_loop_test(t, steps_change_nothing, 0, N_KINDS);
    tcase_add_loop_test(t, damage, 0, N_KINDS);
    suite_add_tcase(s, t);
    return s;
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        for (int i = 1; i < argc; i++)
            table(argv[i]);
        return 0;
    }
    rng = t_seed(7);
    return t_run(suite());
}
