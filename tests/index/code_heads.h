/* Shared by the tests of codes and lists (test_codes.c, test_codes_arena.c): a head with an index, and what a search of it in parts found and estimated. */
#ifndef RETRIEVALD_TESTS_CODE_HEADS_H
#define RETRIEVALD_TESTS_CODE_HEADS_H

#include "index.h"
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_GROUP = 7 };

typedef struct {
    idx_rows keys, values;
    double *k, *v; /* [n][dim], as stored */
    idx_index *ix;
    idx_scratch *scratch;
    uint32_t n, dim;
} head;

/* Not a ck_assert: the table is also made outside of tests. */
static inline void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "not so: %s\n", what);
        exit(1);
    }
}
#define MUST(X) must(X, #X)

static inline void *need(void *p)
{
    must(p != NULL, "memory");
    return p;
}

static inline double *doubles(const _Float16 *x, size_t n)
{
    double *d = need(malloc(n * sizeof *d));
    for (size_t i = 0; i < n; i++)
        d[i] = (double)x[i];
    return d;
}

static const idx_queries no_queries;
enum { FOUR_BITS = IDX_IVF + 1 }; /* flat, too */
static const idx_kind code_kinds[] = {IDX_FLAT, IDX_CLUSTER, IDX_IVF, (idx_kind)FOUR_BITS};
enum { N_KINDS = 4 };

static inline bool is_flat(idx_kind kind)
{
    return kind == IDX_FLAT || (int)kind == FOUR_BITS;
}

/* memory: of flat only. power [dim]: for as long as the builder is. */
static inline int builder_new(idx_kind kind, const idx_rows *keys, const idx_rows *values, const idx_queries *train, float *power, void *memory, idx_builder **ret)
{
    idx_query_power(train, keys->dim, power);
    return is_flat(kind) ? idx_builder_new_codes(keys, values, power, kind == IDX_FLAT ? 8 : 4, memory, ret) : idx_builder_new_lists(kind, keys, values, train, ret);
}

static inline idx_index *build_in(idx_kind kind, const idx_rows *keys, const idx_rows *values, const idx_queries *train, uint64_t slice_ns, void *memory)
{
    idx_builder *b;
    idx_index *ix;
    int r;
    float power[1024];
    MUST(builder_new(kind, keys, values, train, power, memory, &b) == 0);
    while ((r = idx_builder_step(b, slice_ns)) == 1) {
    }
    MUST(r == 0);
    MUST(idx_builder_finish(b, &ix) == 0);
    idx_builder_free(b);
    return ix;
}

static inline idx_index *build(idx_kind kind, const idx_rows *keys, const idx_rows *values, const idx_queries *train, uint64_t slice_ns)
{
    return build_in(kind, keys, values, train, slice_ns, NULL);
}

/* k, v: f16 [n][dim], kept. */
static inline head head_trained(idx_kind kind, const void *k, const void *v, uint32_t n, uint32_t dim, const idx_queries *train)
{
    head x = {.keys = {k, (size_t)dim * 2, n, dim, IDX_F16}, .values = {v, (size_t)dim * 2, n, dim, IDX_F16}, .n = n, .dim = dim};
    x.k = doubles(k, (size_t)n * dim);
    x.v = doubles(v, (size_t)n * dim);
    x.ix = build(kind, &x.keys, &x.values, train, 0);
    MUST(idx_scratch_new(n, dim, MAX_GROUP, n, &x.scratch) == 0);
    return x;
}

static inline head head_new(idx_kind kind, const void *k, const void *v, uint32_t n, uint32_t dim)
{
    return head_trained(kind, k, v, n, dim, &no_queries);
}

static inline void head_free(head *x)
{
    free(x->k);
    free(x->v);
    idx_free(x->ix);
    idx_scratch_free(x->scratch);
}

/* The sums of every run that [lo, hi) cuts. */
static inline uint32_t make_cuts(const head *x, uint32_t lo, uint32_t hi, idx_cut *cuts)
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

static inline result result_new(const head *x, uint32_t group)
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

static inline void result_free(result *r)
{
    for (uint32_t h = 0; h < MAX_GROUP; h++) {
        free(r->retrieved[h]);
        free(r->score[h]);
        free(r->o[h]);
    }
}

static inline void add_estimate(const head *x, result *r, uint32_t h, const idx_cut *cuts, uint32_t n_cuts, uint32_t first, uint32_t end, float m,
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

static inline result search(const head *x, const idx_query *q, uint32_t parts)
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

static inline double score_of(const head *x, const float *q, uint32_t row, double scale)
{
    double s = 0;
    for (uint32_t j = 0; j < x->dim; j++)
        s += (double)q[j] * x->k[(size_t)row * x->dim + j];
    return s * scale;
}

static t_rng rng; /* to be seeded by main */

static inline _Float16 *random_rows(size_t n, double scale)
{
    _Float16 *x = need(malloc(n * sizeof *x));
    for (size_t i = 0; i < n; i++)
        x[i] = (_Float16)(scale * (double)t_normal(&rng));
    return x;
}

#endif
