/* The exact scan and idx_select() against float64 brute force, on every instruction set of the machine. */
#include "index.h"
#include "support.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static t_rng rng;
static idx_scratch *scratch; /* for all of them: reuse is part of what is tested */

/* Keys as the index sees them, and the same values as doubles. */
typedef struct {
    idx_rows rows;
    uint8_t *bytes;
    double *exact; /* [n][dim] */
} keyset;

/* A row in blocks of 32: a scale that keeps small whole numbers what they are, then codes; zeros beyond dim. */
static void quantize(const float *v, uint32_t dim, uint8_t *to, double *exact)
{
    for (uint32_t b = 0; b < dim; b += 32, to += 34) {
        float max = 0;
        for (uint32_t j = b; j < b + 32 && j < dim; j++)
            max = fmaxf(max, fabsf(v[j]));
        _Float16 d = (_Float16)(max <= 127 && max == floorf(max) ? 1 : max / 127);
        memcpy(to, &d, 2);
        memset(to + 2, 0, 32);
        for (uint32_t j = b; j < b + 32 && j < dim; j++) {
            int8_t q = (int8_t)lrintf(fmaxf(-127, fminf(127, v[j] / (float)d)));
            memcpy(to + 2 + j - b, &q, 1);
            exact[j] = (double)q * (double)d;
        }
    }
}

static keyset keys_new(const float *values, uint32_t n, uint32_t dim, idx_type type, size_t pad)
{
    size_t size = type == IDX_F32 ? 4 : 2, stride = (type == IDX_Q8_0 ? (dim + 31) / 32 * 34 : dim * size) + pad;
    keyset k = {.bytes = malloc(n * stride + 1), .exact = malloc((size_t)n * dim * sizeof(double) + 1)};
    ck_assert(k.bytes && k.exact);
    memset(k.bytes, 0xff, n * stride); /* padding is NaN: reading it would show */
    for (uint32_t i = 0; i < n; i++) {
        if (type == IDX_Q8_0) {
            quantize(values + (size_t)i * dim, dim, k.bytes + i * stride, k.exact + (size_t)i * dim);
            continue;
        }
        for (uint32_t j = 0; j < dim; j++) {
            float v = values[(size_t)i * dim + j];
            uint8_t *to = k.bytes + i * stride + j * size;
            if (type == IDX_F16) {
                _Float16 h = (_Float16)v;
                memcpy(to, &h, 2);
                v = (float)h;
            } else if (type == IDX_BF16) {
                uint32_t u;
                memcpy(&u, &v, 4);
                uint16_t b = (uint16_t)(u >> 16);
                memcpy(to, &b, 2);
                u &= 0xffff0000u;
                memcpy(&v, &u, 4);
            } else {
                memcpy(to, &v, 4);
            }
            k.exact[(size_t)i * dim + j] = (double)v;
        }
    }
    k.rows = (idx_rows){k.bytes, stride, n, dim, type};
    return k;
}

static void keys_free(keyset *k)
{
    free(k->bytes);
    free(k->exact);
}

typedef struct {
    double score;
    uint32_t id;
} pair;

static int better(const void *a, const void *b)
{
    const pair *x = a, *y = b;
    if (x->score != y->score)
        return x->score < y->score ? 1 : -1;
    return x->id > y->id ? 1 : -1;
}

enum { MAX_N = 5000, MAX_GROUP = 7 };

/* Per head: all rows of [lo, hi) with a score, best first; and the largest sum of |q_j k_j|, by which a rounding error is measured. */
static pair all[MAX_GROUP][MAX_N];
static uint32_t n_all[MAX_GROUP];
static double size_of[MAX_GROUP];

static void brute(const keyset *k, const idx_query *q)
{
    uint32_t dim = k->rows.dim;
    for (uint32_t h = 0; h < q->group; h++) {
        n_all[h] = 0;
        size_of[h] = 0;
        for (uint32_t i = q->lo; i < q->hi; i++) {
            double s = 0, size = 0;
            for (uint32_t j = 0; j < dim; j++) {
                double p = (double)q->q[h * dim + j] * k->exact[(size_t)i * dim + j] * (double)q->scale;
                s += p;
                size += fabs(p);
            }
            if (s != s)
                continue;
            size_of[h] = size > size_of[h] ? size : size_of[h];
            all[h][n_all[h]++] = (pair){s, i};
        }
        qsort(all[h], n_all[h], sizeof all[h][0], better);
    }
}

/* (Check writes a file at each passing assertion: the inner loops ask first.)
 * Hits of one head against brute force; exact: the arithmetic has no rounding, so the very ids must agree, ties included. */
static void check_head(const idx_query *q, uint32_t head, const idx_hits *hits, bool exact)
{
    static double score_of[MAX_N];
    static uint8_t got[MAX_N];
    const pair *by_rank = all[head];
    uint32_t n = n_all[head], want = 0;
    double tol = exact ? 0 : size_of[head] * 1e-6 + 1e-30, best = n ? by_rank[0].score : -INFINITY, least = -INFINITY, worst = INFINITY;
    bool dynamic = q->budget.beta > 0;
    if (dynamic && q->floor && (double)q->floor[head] > best)
        best = (double)q->floor[head];
    if (dynamic)
        least = best - (double)q->budget.beta;
    while (want < n && want < q->budget.top_k && by_rank[want].score >= least)
        want++;

    memset(got, 0, sizeof got);
    for (uint32_t i = q->lo; i < q->hi; i++)
        score_of[i] = NAN;
    for (uint32_t i = 0; i < n; i++)
        score_of[by_rank[i].id] = by_rank[i].score;
    for (uint32_t i = 0; i < hits->n; i++) {
        uint32_t id = hits->ids[i];
        if (id < q->lo || id >= q->hi || got[id])
            ck_abort_msg("id %u twice or outside [%u, %u)", id, q->lo, q->hi);
        got[id] = 1;
        if (!(fabs((double)hits->scores[i] - score_of[id]) <= tol && score_of[id] >= least - tol))
            ck_abort_msg("score of %u: %g, not %g >= %g", id, (double)hits->scores[i], score_of[id], least);
        worst = score_of[id] < worst ? score_of[id] : worst;
    }
    ck_assert_uint_le(hits->n, q->budget.top_k);
    if (!dynamic || exact)
        ck_assert_uint_eq(hits->n, want);
    for (uint32_t i = 0; i < n; i++) {
        const pair *p = &by_rank[i];
        if (exact ? got[p->id] != (i < want)
                  : !got[p->id] && p->score >= least + tol && (hits->n < q->budget.top_k || p->score > worst + tol))
            ck_abort_msg("rank %u, id %u, score %g: %s", i, p->id, p->score, i < want ? "lost" : "extra");
    }
}

/* After brute() for the same queries and range. */
static void check(const keyset *k, idx_query q, uint32_t top_k, float beta, bool exact)
{
    idx_hits *hits;
    uint32_t visited = 0;
    q.budget = (idx_budget){top_k, beta};
    ck_assert_int_eq(idx_search(NULL, &k->rows, &q, scratch, &hits, &visited), 0);
    ck_assert_uint_eq(visited, top_k ? q.hi - q.lo : 0);
    for (uint32_t h = 0; h < q.group; h++)
        check_head(&q, h, &hits[h], exact);
}

static float *values_new(size_t n, int kind)
{
    float *v = malloc(n * sizeof *v + 1);
    for (size_t i = 0; i < n; i++) {
        switch (kind) {
        case 0:
            v[i] = t_normal(&rng);
            break;
        case 1: /* small integers: exact sums, many ties */
            v[i] = (float)((int)(t_u64(&rng) % 5) - 2);
            break;
        case 2: /* scores of +-1e4 and more */
            v[i] = t_normal(&rng) * 30;
            break;
        default: /* all equal */
            v[i] = 1;
        }
    }
    return v;
}

static void run_kind(int kind, uint32_t n, uint32_t dim, uint32_t group, idx_type type, size_t pad)
{
    float *values = values_new((size_t)n * dim, kind), *q = values_new((size_t)group * dim, kind), floor[MAX_GROUP];
    keyset k = keys_new(values, n, dim, type, pad);
    bool exact = kind == 1 || kind == 3;
    uint32_t ranges[][2] = {{0, n}, {n / 3, n}, {0, n - n / 3}, {n / 4, n - n / 4}, {n / 2, n / 2}, {n ? n - 1 : 0, n}};
    uint32_t ks[] = {0, 1, 2, 16, 100, n / 2, n, n + 7};
    for (uint32_t h = 0; h < group; h++)
        floor[h] = h % 2 ? -INFINITY : 1.5f * sqrtf((float)dim);
    for (size_t r = 0; r < sizeof ranges / sizeof ranges[0]; r++) {
        idx_query base = {.q = q, .group = group, .lo = ranges[r][0], .hi = ranges[r][1], .scale = exact ? 0.25f : 0.125f};
        brute(&k, &base);
        for (size_t i = 0; i < sizeof ks / sizeof ks[0]; i++) {
            check(&k, base, ks[i], 0, exact);
            check(&k, base, ks[i], 2, exact);
            base.floor = floor;
            check(&k, base, ks[i], 3, exact);
            base.floor = NULL;
        }
    }
    keys_free(&k);
    free(values);
    free(q);
}

static void every_level(void (*body)(void))
{
    for (idx_cpu c = IDX_CPU_SCALAR; c <= idx_cpu_detect(); c++) {
        idx_cpu_set(c);
        body();
    }
}

static void body_brute(void)
{
    static const uint32_t sizes[] = {1, 2, 15, 17, 255, 257, 700}, dims[] = {1, 7, 16, 24, 64, 80, 129};
    rng = t_seed(1);
    for (int kind = 0; kind < 4; kind++)
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            run_kind(kind, sizes[i], dims[(i + (size_t)kind) % 7], 1 + (uint32_t)(i % 3), (idx_type)((i + (size_t)kind) % 4), (i % 2) * 3);
    for (int type = IDX_F32; type <= IDX_Q8_0; type++) {
        run_kind(0, 1501, 64, 7, (idx_type)type, 0);
        run_kind(1, 1501, 24, 7, (idx_type)type, 6);
    }
}

START_TEST(test_brute)
{
    every_level(body_brute);
}
END_TEST

static void body_rising(void)
{
    /* Scores that rise or fall with the row: the threshold moves with every tile, or never. */
    enum { N = MAX_N };
    float *v = malloc(N * sizeof *v), q = 1, down = -1;
    for (int i = 0; i < N; i++)
        v[i] = (float)(i / 3);
    keyset k = keys_new(v, N, 1, IDX_F32, 0);
    idx_query base = {.q = &q, .group = 1, .lo = 5, .hi = N - 2, .scale = 1};
    for (int turn = 0; turn < 2; turn++) {
        base.q = turn ? &down : &q;
        brute(&k, &base);
        for (uint32_t top = 1; top < N; top = top * 3 + 1) {
            check(&k, base, top, 0, true);
            check(&k, base, top, 50, true);
        }
    }
    keys_free(&k);
    free(v);
}

START_TEST(test_rising)
{
    every_level(body_rising);
}
END_TEST

static void body_nan(void)
{
    enum { N = 300, D = 20 };
    rng = t_seed(2);
    float *v = values_new(N * D, 1), *q = values_new(2 * D, 1);
    for (int i = 0; i < N; i += 7)
        v[i * D + i % D] = NAN;
    for (uint32_t j = 0; j < D; j++)
        q[j] = q[j] == 0 ? 1 : q[j];
    keyset k = keys_new(v, N, D, IDX_F16, 0);
    idx_query base = {.q = q, .group = 2, .hi = N, .scale = 1};
    brute(&k, &base);
    check(&k, base, 50, 0, true);
    check(&k, base, N, 0, true);
    check(&k, base, N, 4, true);
    keys_free(&k);
    free(v);
    free(q);
}

START_TEST(test_nan)
{
    every_level(body_nan);
}
END_TEST

START_TEST(test_invalid)
{
    float v[4 * 8] = {0}, q[2 * 8] = {0};
    keyset k = keys_new(v, 4, 8, IDX_F32, 0);
    idx_scratch *s = NULL;
    idx_hits *hits = (idx_hits *)q;
    ck_assert_int_eq(idx_scratch_new(4, 0, 1, 1, &s), -EINVAL);
    ck_assert_int_eq(idx_scratch_new(4, 8, 0, 1, &s), -EINVAL);
    ck_assert_ptr_null(s);
    ck_assert_int_eq(idx_scratch_new(4, 8, 1, 2, &s), 0);
    idx_query good = {.q = q, .group = 1, .hi = 4, .scale = 1, .budget = {2, 0}}, bad = good;
    ck_assert_int_eq(idx_search(NULL, &k.rows, &good, s, &hits, NULL), 0);
    hits = (idx_hits *)q;
    bad.group = 2;
    ck_assert_int_eq(idx_search(NULL, &k.rows, &bad, s, &hits, NULL), -EINVAL);
    bad = good;
    bad.hi = 5;
    ck_assert_int_eq(idx_search(NULL, &k.rows, &bad, s, &hits, NULL), -EINVAL);
    bad = good;
    bad.lo = 3, bad.hi = 2;
    ck_assert_int_eq(idx_search(NULL, &k.rows, &bad, s, &hits, NULL), -EINVAL);
    bad = good;
    bad.budget.top_k = 3;
    ck_assert_int_eq(idx_search(NULL, &k.rows, &bad, s, &hits, NULL), -EINVAL);
    ck_assert_ptr_eq(hits, (idx_hits *)q);
    idx_scratch_free(s);
    idx_scratch_free(NULL);
    keys_free(&k);
}
END_TEST

START_TEST(test_select)
{
    rng = t_seed(3);
    for (int round = 0; round < 400; round++) {
        uint32_t n = (uint32_t)(t_u64(&rng) % 600), k = (uint32_t)(t_u64(&rng) % 700), kind = (uint32_t)(t_u64(&rng) % 4);
        uint32_t *ids = malloc(n * 4 + 1);
        float *scores = malloc(n * 4 + 1);
        pair *want = malloc(n * sizeof *want + 1);
        for (uint32_t i = 0; i < n; i++) {
            ids[i] = n - i; /* falling, so that ties need work */
            scores[i] = kind == 0 ? t_normal(&rng) : kind == 1 ? (float)(t_u64(&rng) % 4) : kind == 2 ? -0.0f : (float)i;
            if (kind == 2 && i % 2)
                scores[i] = 0;
            if (kind == 1 && t_u64(&rng) % 9 == 0)
                scores[i] = NAN;
            want[i] = (pair){scores[i] != scores[i] ? -INFINITY : (double)scores[i], ids[i]};
        }
        qsort(want, n, sizeof *want, better);
        uint32_t got = idx_select(ids, scores, n, k);
        ck_assert_uint_eq(got, k < n ? k : n);
        uint8_t *seen = calloc(n + 1, 1);
        for (uint32_t i = 0; i < n; i++) {
            if (!ids[i] || ids[i] > n || (seen[ids[i]] & 1))
                ck_abort_msg("id %u made up or twice", ids[i]);
            seen[ids[i]] |= (uint8_t)(1 | (i < got) << 1);
        }
        for (uint32_t i = 0; i < n; i++)
            if ((seen[want[i].id] >> 1) != (i < got))
                ck_abort_msg("rank %u of %u, k %u, kind %u", i, n, k, kind);
        free(ids);
        free(scores);
        free(want);
        free(seen);
    }
}
END_TEST

int main(void)
{
    if (idx_scratch_new(MAX_N, 129, MAX_GROUP, MAX_N, &scratch) < 0)
        return 1;
    Suite *s = suite_create("flat");
    TCase *t = tcase_create("flat");
    tcase_add_test(t, test_brute);
    tcase_add_test(t, test_rising);
    tcase_add_test(t, test_nan);
    tcase_add_test(t, test_invalid);
    tcase_add_test(t, test_select);
    suite_add_tcase(s, t);
    int r = t_run(s);
    idx_scratch_free(scratch);
    return r;
}
