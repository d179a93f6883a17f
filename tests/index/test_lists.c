/* Lists (cluster, ivf): what a search may return for keys of every kind, against float64 brute force; what is refused; the estimate where it is exact. */
#include "index.h"
#include "support.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DIM = 256, MAX_GROUP = 16, TRAIN = 120 };

static t_rng rng;

typedef enum { RANDOM, CLUMPS, EQUAL, ZERO, HUGE_NORMS, N_SHAPES } shape;

/* Keys of a shape; values at random; training queries as those of searches. */
typedef struct {
    _Float16 *k, *v, *q;
    uint32_t pos[TRAIN], n, dim, group;
    idx_rows keys, values;
    idx_queries train;
} problem;

static void random_query(const problem *p, float *q)
{
    for (uint32_t j = 0; j < p->group * p->dim; j++)
        q[j] = t_normal(&rng);
}

static problem problem_new(shape s, uint32_t n, uint32_t dim, uint32_t group)
{
    problem p = {.n = n, .dim = dim, .group = group};
    p.k = malloc((size_t)n * dim * 2);
    p.v = malloc((size_t)n * dim * 2);
    p.q = malloc((size_t)TRAIN * group * dim * 2);
    float centre[8][MAX_DIM];
    for (int c = 0; c < 8; c++)
        for (uint32_t j = 0; j < dim; j++)
            centre[c][j] = 2 * t_normal(&rng);
    for (uint32_t i = 0; i < n; i++) {
        const float *c = centre[t_u64(&rng) % 8];
        float size = s == HUGE_NORMS && i % 37 == 5 ? 5000 : 1;
        for (uint32_t j = 0; j < dim; j++) {
            float x = t_normal(&rng);
            p.k[(size_t)i * dim + j] = (_Float16)(s == ZERO ? 0 : s == EQUAL ? centre[0][j] : s == CLUMPS ? 5 + c[j] + 0.5f * x : size * x);
            p.v[(size_t)i * dim + j] = (_Float16)t_normal(&rng);
        }
    }
    for (size_t i = 0; i < (size_t)TRAIN * group * dim; i++)
        p.q[i] = (_Float16)t_normal(&rng);
    for (uint32_t i = 0; i < TRAIN; i++)
        p.pos[i] = (uint32_t)((uint64_t)(i + 1) * n / TRAIN);
    p.keys = (idx_rows){p.k, (size_t)dim * 2, n, dim, IDX_F16};
    p.values = (idx_rows){p.v, (size_t)dim * 2, n, dim, IDX_F16};
    return p;
}

static idx_index *build(problem *p, idx_kind kind)
{
    idx_builder *b;
    idx_index *ix;
    char err[200] = "";
    p->train = (idx_queries){(const uint16_t *)(const void *)p->q, p->pos, TRAIN, p->group};
    ck_assert_int_eq(idx_builder_new_lists(kind, &p->keys, &p->values, &p->train, &b), 0);
    ck_assert_int_eq(idx_builder_step(b, 0), 0);
    ck_assert_int_eq(idx_builder_finish(b, &ix), 0);
    idx_builder_free(b);
    ck_assert_msg(idx_check(ix, err, sizeof err) == 0, "%s", err);
    ck_assert_int_eq(idx_kind_of(ix), kind);
    return ix;
}

static void problem_free(problem *p)
{
    free(p->k);
    free(p->v);
    free(p->q);
}

static double exact_score(const problem *p, const float *q, uint32_t row, double scale, double *ret_size)
{
    double s = 0, size = 0;
    for (uint32_t j = 0; j < p->dim; j++) {
        double x = (double)q[j] * (double)p->k[(size_t)row * p->dim + j];
        s += x;
        size += fabs(x);
    }
    *ret_size = size * scale;
    return s * scale;
}

static int falling(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* Every hit once, in the range, with its score; never more than asked for, as many as there are when few are. Adds to found / wanted how many of the best k,
 * by score, were found. */
static void check_search(const problem *p, const idx_index *ix, const idx_query *q, idx_scratch *s, double *found, double *wanted)
{
    idx_hits *hits;
    uint32_t visited, span = q->hi - q->lo, k = q->budget.top_k < span ? q->budget.top_k : span;
    ck_assert_int_eq(idx_search(ix, &p->keys, q, s, &hits, &visited), 0);
    ck_assert_uint_le(visited, p->n);
    double *scores = malloc((span + 1) * sizeof *scores), *sorted = malloc((span + 1) * sizeof *sorted), size;
    uint8_t *seen = malloc(p->n);
    for (uint32_t h = 0; h < q->group; h++) {
        for (uint32_t i = 0; i < span; i++)
            sorted[i] = scores[i] = exact_score(p, q->q + (size_t)h * p->dim, q->lo + i, (double)q->scale, &size);
        qsort(sorted, span, sizeof *sorted, falling);
        memset(seen, 0, p->n);
        ck_assert_uint_le(hits[h].n, k);
        for (uint32_t i = 0; i < hits[h].n; i++) {
            uint32_t row = hits[h].ids[i];
            ck_assert(row >= q->lo && row < q->hi && !seen[row]);
            seen[row] = 1;
            double score = exact_score(p, q->q + (size_t)h * p->dim, row, (double)q->scale, &size);
            ck_assert_double_le(fabs((double)hits[h].scores[i] - score), 1e-5 * size + 1e-6);
            *found += q->budget.beta > 0 || score >= sorted[k - 1] - 1e-5 * size;
        }
        if (q->budget.beta > 0) {
            double edge = span ? sorted[0] - (double)q->budget.beta : 0;
            for (uint32_t i = 0; i < k; i++)
                *wanted += sorted[i] >= edge;
        } else {
            *wanted += k;
            if (k == span)
                ck_assert_uint_eq(hits[h].n, k);
        }
    }
    free(scores);
    free(sorted);
    free(seen);
}

START_TEST(against_brute_force)
{
    static const struct {
        uint32_t n, dim, group;
    } sizes[] = {{1, 64, 1}, {2, 80, 3}, {40, 96, 16}, {700, 128, 7}, {3000, 64, 5}, {12900, 16, 2}, {600, 256, 4}};
    idx_kind kind = _i % 2 ? IDX_IVF : IDX_CLUSTER;
    idx_cpu_set((idx_cpu)(_i / 2));
    for (size_t t = 0; t < sizeof sizes / sizeof *sizes; t++)
        for (int of = 0; of < N_SHAPES; of++) {
            problem p = problem_new((shape)of, sizes[t].n, sizes[t].dim, sizes[t].group);
            idx_index *ix = build(&p, kind);
            idx_scratch *s;
            float q[MAX_GROUP * MAX_DIM];
            double found = 0, wanted = 0;
            ck_assert_int_eq(idx_scratch_new(p.n, p.dim, p.group, p.n, &s), 0);
            for (int round = 0; round < 12; round++) {
                random_query(&p, q);
                idx_query query = {.q = q, .group = p.group, .hi = p.n, .scale = 1 / sqrtf((float)p.dim), .budget = {1u << (round % 9), round % 3 ? 0 : 4}};
                if (round > 5) {
                    query.lo = (uint32_t)(t_u64(&rng) % (p.n + 1));
                    query.hi = query.lo + (uint32_t)(t_u64(&rng) % (p.n - query.lo + 1));
                }
                if (round == 6)
                    query.lo = query.hi = 0;
                if (round == 7)
                    query.lo = 0, query.hi = 1;
                check_search(&p, ix, &query, s, &found, &wanted);
            }
            ck_assert_msg(found >= (kind == IDX_IVF ? 0.9 : 0.985) * wanted, "shape %d, %u of %u: %g of %g", of, p.n, p.dim, found, wanted);
            idx_scratch_free(s);
            idx_free(ix);
            problem_free(&p);
        }
}
END_TEST

/* A head whose scores are flat looks at more clusters than a peaked one: the share is not fixed. */
START_TEST(probing_adapts)
{
    problem p = problem_new(CLUMPS, 12000, 32, 1);
    idx_index *ix = build(&p, IDX_CLUSTER);
    idx_scratch *s;
    idx_hits *hits;
    uint32_t visited[2], few, all;
    float q[32];
    ck_assert_int_eq(idx_scratch_new(p.n, p.dim, 1, p.n, &s), 0);
    random_query(&p, q);
    idx_query query = {.q = q, .group = 1, .hi = p.n, .scale = 1, .budget = {4000, 0}};
    for (int i = 0; i < 2; i++) {
        query.budget.beta = i ? 1 : 12;
        ck_assert_int_eq(idx_search(ix, &p.keys, &query, s, &hits, &visited[i]), 0);
        ck_assert_uint_eq(idx_visited(s), visited[i]);
    }
    ck_assert_uint_lt(visited[1], visited[0] / 2);
    query.budget = (idx_budget){100, 0};
    ck_assert_int_eq(idx_search(ix, &p.keys, &query, s, &hits, &few), 0);
    query.budget.top_k = p.n;
    ck_assert_int_eq(idx_search(ix, &p.keys, &query, s, &hits, &all), 0);
    ck_assert_uint_lt(few, p.n / 2);
    ck_assert_uint_eq(all, p.n);
    ck_assert_uint_eq(hits[0].n, p.n);
    idx_scratch_free(s);
    idx_free(ix);
    problem_free(&p);
}
END_TEST

/* Where the keys of a cluster are equal its centroid is each of them, and where the values are, too, the estimate is exact but for the rounding of codes. A byte's
 * rounding moves a score by .009 (one sigma: .3 * sqrt(32) * unit / sqrt(12), units of 1/127 of some 2 for keys and queries), the same for all keys of a kind, so a
 * kind's weight is right within 3 %, and an output within that share of the values' mean distance from it. */
START_TEST(exact_for_equal_keys)
{
    enum { N = 9000, DIM = 32, KINDS = 6 };
    problem p = problem_new(RANDOM, N, DIM, 1);
    uint32_t kind[N];
    for (uint32_t i = 0; i < KINDS; i++)
        kind[i] = i;
    for (uint32_t i = KINDS; i < N; i++) {
        uint32_t like = kind[i] = (uint32_t)(t_u64(&rng) % KINDS);
        memcpy(p.k + (size_t)i * DIM, p.k + like * DIM, DIM * 2);
        memcpy(p.v + (size_t)i * DIM, p.v + like * DIM, DIM * 2);
    }
    idx_index *ix = build(&p, IDX_CLUSTER);
    idx_scratch *s;
    uint32_t n_clusters = idx_codes_max_clusters(N), first, end;
    float *w = malloc(n_clusters * sizeof *w), m, q[DIM], coef[64];
    uint32_t *taken = calloc(n_clusters, sizeof *taken);
    ck_assert_int_eq(idx_scratch_new(N, DIM, 1, 64, &s), 0);
    for (int round = 0; round < 5; round++) {
        idx_hits *hits;
        random_query(&p, q);
        idx_query query = {.q = q, .group = 1, .hi = N, .scale = 0.3f, .budget = {(uint32_t)round * 16, 0}};
        idx_codes_part(ix, 0, N, 0, 1, &first, &end);
        ck_assert_int_eq(idx_codes_scan(ix, &p.keys, &query, first, end, s, w, n_clusters, &m, &hits), 0);
        double full = 0, size, of_kind[KINDS], o[DIM] = {0}, away[DIM] = {0}, got[DIM] = {0};
        for (uint32_t i = 0; i < KINDS; i++)
            of_kind[i] = 0;
        for (uint32_t i = 0; i < N; i++) {
            double weight = exp(exact_score(&p, q, i, (double)0.3f, &size) - (double)m);
            full += weight;
            of_kind[kind[i]] += weight;
        }
        for (uint32_t j = 0; j < DIM; j++) {
            for (uint32_t i = 0; i < KINDS; i++)
                o[j] += of_kind[i] / full * (double)p.v[(size_t)i * DIM + j];
            for (uint32_t i = 0; i < KINDS; i++)
                away[j] += of_kind[i] / full * fabs((double)p.v[(size_t)i * DIM + j] - o[j]);
        }
        uint32_t n_hits = hits[0].n;
        double l = (double)idx_estimate(ix, NULL, 0, first, end, m, 1, w, hits[0].clusters, hits[0].scanned, n_hits, taken, coef);
        for (uint32_t c = first; c < end;) {
            const float *sums;
            uint32_t next = idx_codes_sums(ix, NULL, 0, c, end, &sums);
            for (; c < next; c++, sums += idx_codes_sum_stride(DIM))
                for (uint32_t j = 0; j < DIM; j++)
                    got[j] += (double)w[c - first] * (double)sums[j];
        }
        for (uint32_t i = 0; i < n_hits; i++) {
            double weight = exp((double)hits[0].scores[i] - (double)m);
            l += weight;
            for (uint32_t j = 0; j < DIM; j++)
                got[j] += (weight - (double)coef[i]) * (double)p.v[(size_t)hits[0].ids[i] * DIM + j];
        }
        ck_assert_uint_eq(n_hits, (uint32_t)round * 16);
        ck_assert_double_eq_tol(l, full, 0.02 * full);
        for (uint32_t j = 0; j < DIM; j++)
            ck_assert_double_eq_tol(got[j] / l, o[j], 0.03 * away[j]);
    }
    free(w);
    free(taken);
    idx_scratch_free(s);
    idx_free(ix);
    problem_free(&p);
}
END_TEST

/* When all but one key of a cluster are retrieved, the mean of what is left is that key. */
START_TEST(rest_of_a_cluster)
{
    enum { N = 32, DIM = 24 };
    for (int round = 0; round < 20; round++) {
        problem p = problem_new(RANDOM, N, DIM, 1);
        idx_index *ix = build(&p, IDX_CLUSTER);
        idx_scratch *s;
        idx_hits *hits;
        float q[DIM], w[8], m, coef[N];
        uint32_t taken[8] = {0}, first, end;
        double least = INFINITY, size;
        random_query(&p, q);
        for (uint32_t i = 0; i < N; i++)
            least = fmin(least, exact_score(&p, q, i, 0.25, &size));
        idx_query query = {.q = q, .group = 1, .hi = N, .scale = 0.25f, .budget = {N - 1, 0}};
        ck_assert_int_eq(idx_scratch_new(N, DIM, 1, N, &s), 0);
        idx_codes_part(ix, 0, N, 0, 1, &first, &end);
        ck_assert_uint_eq(end - first, 1);
        ck_assert_int_eq(idx_codes_scan(ix, &p.keys, &query, first, end, s, w, 8, &m, &hits), 0);
        ck_assert_uint_eq(hits[0].n, N - 1);
        float l = idx_estimate(ix, NULL, 0, first, end, m, 1, w, hits[0].clusters, hits[0].scanned, hits[0].n, taken, coef);
        ck_assert_double_eq_tol(log((double)l) + (double)m, least, 0.3); /* the codes' rounding, 31 times */
        idx_scratch_free(s);
        idx_free(ix);
        problem_free(&p);
    }
}
END_TEST

START_TEST(refused)
{
    problem p = problem_new(RANDOM, 500, 16, 2);
    idx_builder *b;
    idx_rows wrong = p.values;
    p.train = (idx_queries){(const uint16_t *)(const void *)p.q, p.pos, TRAIN, 2};
    ck_assert_int_eq(idx_builder_new_lists(IDX_GRAPH, &p.keys, &p.values, &p.train, &b), -EINVAL);
    ck_assert_int_eq(idx_builder_new_lists(IDX_FLAT, &p.keys, &p.values, &p.train, &b), -EINVAL);
    wrong.n--;
    ck_assert_int_eq(idx_builder_new_lists(IDX_CLUSTER, &p.keys, &wrong, &p.train, &b), -EINVAL);
    wrong = p.keys;
    wrong.n = 0;
    ck_assert_int_eq(idx_builder_new_lists(IDX_CLUSTER, &wrong, &wrong, &p.train, &b), -EINVAL);
    for (int i = 0; i < 4; i++) {
        idx_index *ix;
        p.k[77 * 16 + 3] = (_Float16)(i % 2 ? INFINITY : NAN);
        ck_assert_int_eq(idx_builder_new_lists(i < 2 ? IDX_CLUSTER : IDX_IVF, &p.keys, &p.values, &p.train, &b), 0);
        ck_assert_int_eq(idx_builder_step(b, 0), -EINVAL);
        ck_assert_int_eq(idx_builder_finish(b, &ix), -EINVAL);
        idx_builder_free(b);
    }
    problem_free(&p);
}
END_TEST

static Suite *suite(void)
{
    Suite *s = suite_create("lists");
    TCase *t = tcase_create("lists");
    tcase_set_timeout(t, 0);
    tcase_add_loop_test(t, against_brute_force, 0, 2 * ((int)idx_cpu_detect() + 1));
    tcase_add_test(t, probing_adapts);
    tcase_add_test(t, exact_for_equal_keys);
    tcase_add_test(t, rest_of_a_cluster);
    tcase_add_test(t, refused);
    suite_add_tcase(s, t);
    return s;
}

int main(void)
{
    rng = t_seed(11);
    return t_run(suite());
}
