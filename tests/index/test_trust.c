/* Every kind of index over every kind of keys, sizes of head and group, and ranges, against float64 brute force, on every instruction set of the machine: what any build and search must keep to. */
#include "index.h"
#include "support.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOP = 20, BEST = 16, MAX_N = 900, MAX_DIM = 256, MAX_GROUP = 16, TRAIN = 120 };
enum { SCAN, CODES, FOUR_BITS, CLUSTER, IVF, GRAPH, KINDS };
enum { RANDOM, CLUMPS, EQUAL, ZERO, HUGE_NORM, SHAPES };

static const char *const kind_names[] = {"scan", "codes", "codes of 4 bits", "cluster", "ivf", "graph"};
static const uint32_t dims[] = {64, 80, 96, 128, 256}, sizes[] = {1, TOP / 2, MAX_N};
enum { N_DIMS = sizeof dims / sizeof *dims, N_SIZES = sizeof sizes / sizeof *sizes };

static t_rng rng;
static _Float16 k[MAX_N * MAX_DIM], v[MAX_N * MAX_DIM], train[TRAIN * MAX_GROUP * MAX_DIM];
static uint32_t pos[TRAIN];

static void fill(int shape, uint32_t n, uint32_t dim, uint32_t group)
{
    float centres[8][MAX_DIM];
    for (uint32_t i = 0; i < 8 * dim; i++)
        centres[i / dim][i % dim] = 2 * t_normal(&rng);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < dim; j++) {
            float x = t_normal(&rng);
            x = shape == CLUMPS ? centres[i % 8][j] + x / 4 : shape == EQUAL ? centres[0][j] : shape == ZERO ? 0 : shape == HUGE_NORM && i % 50 == 7 ? 5000 * x : x;
            k[i * dim + j] = (_Float16)x;
            v[i * dim + j] = (_Float16)t_normal(&rng);
        }
    for (uint32_t i = 0; i < TRAIN * group * dim; i++)
        train[i] = (_Float16)(centres[i / dim % 8][i % dim] / 2 + t_normal(&rng));
    for (uint32_t i = 0; i < TRAIN; i++)
        pos[i] = (uint32_t)((uint64_t)(i + 1) * n / TRAIN);
}

static int builder_new(int kind, const idx_rows *keys, const idx_rows *values, uint32_t group, idx_builder **ret)
{
    idx_queries queries = {(const uint16_t *)(const void *)train, pos, TRAIN, group};
    idx_graph_params params = idx_graph_params_default();
    return kind == GRAPH                        ? idx_builder_new(keys, &queries, &params, ret)
           : kind == CODES || kind == FOUR_BITS ? idx_builder_new_codes(keys, values, NULL, kind == CODES ? 8 : 4, NULL, ret)
                                                : idx_builder_new_lists(kind == IVF ? IDX_IVF : IDX_CLUSTER, keys, values, &queries, ret);
}

static idx_index *build_in(int kind, const idx_rows *keys, const idx_rows *values, uint32_t group, uint64_t deadline_ns)
{
    idx_builder *b;
    idx_index *ix;
    int r;
    ck_assert_int_eq(builder_new(kind, keys, values, group, &b), 0);
    while ((r = idx_builder_step(b, deadline_ns)) == 1) {
    }
    ck_assert_int_eq(r, 0);
    ck_assert_int_eq(idx_builder_finish(b, &ix), 0);
    idx_builder_free(b);
    return ix;
}

/* Builds it twice, whole and in the smallest steps: the same bytes. */
static idx_index *build(int kind, const idx_rows *keys, const idx_rows *values, uint32_t group)
{
    if (kind == SCAN)
        return NULL;
    idx_index *ix = build_in(kind, keys, values, group, 0), *again = build_in(kind, keys, values, group, 1);
    size_t n, n_again;
    const void *arena = idx_arena(ix, &n), *same = idx_arena(again, &n_again);
    ck_assert(n == n_again && !memcmp(arena, same, n));
    idx_free(again);
    char err[200];
    ck_assert_msg(idx_check(ix, err, sizeof err) == 0, "%s", err);
    return ix;
}

static int rising(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* How many of n rising numbers are no less than x. */
static uint32_t no_less(const double *sorted, uint32_t n, double x)
{
    uint32_t lo = 0, hi = n;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (sorted[mid] < x)
            lo = mid + 1;
        else
            hi = mid;
    }
    return n - lo;
}

/* In the range, once, with its score, as many as asked for; of the best, how many of those that there are. */
static void check_head(const idx_query *q, const float *query, uint32_t dim, const idx_hits *hits, double *found, double *wanted)
{
    static double score[MAX_N], size[MAX_N], sorted[MAX_N];
    static uint8_t hit[MAX_N];
    uint32_t span = q->hi - q->lo;
    ck_assert_uint_eq(hits->n, span < TOP ? span : TOP);
    memset(hit, 0, sizeof hit);
    for (uint32_t i = q->lo; i < q->hi; i++) {
        score[i] = size[i] = 0;
        for (uint32_t j = 0; j < dim; j++) {
            double x = (double)query[j] * (double)k[i * dim + j];
            score[i] += x;
            size[i] += fabs(x);
        }
        sorted[i - q->lo] = score[i];
    }
    qsort(sorted, span, sizeof *sorted, rising);
    for (uint32_t i = 0; i < hits->n; i++) {
        uint32_t id = hits->ids[i];
        ck_assert(id >= q->lo && id < q->hi && !hit[id]);
        hit[id] = 1;
        ck_assert_double_eq_tol(hits->scores[i], score[id], 1e-6 * size[id] + 1e-9);
    }
    for (uint32_t i = q->lo; i < q->hi; i++) {
        uint32_t better = no_less(sorted, span, score[i] - 1e-6 * size[i]); /* itself, and what rounding may put before it */
        wanted[0] += better <= BEST;
        found[0] += better <= BEST && hit[i];
    }
}

START_TEST(against_brute_force)
{
    int kind = _i % KINDS;
    idx_cpu_set((idx_cpu)(_i / KINDS));
    double found[SHAPES] = {0}, wanted[SHAPES] = {0};
    for (int c = 0; c < SHAPES * N_DIMS * N_SIZES; c++) {
        int shape = c % SHAPES;
        uint32_t dim = dims[c / SHAPES % N_DIMS], n = sizes[c / SHAPES / N_DIMS], group = 1 + (uint32_t)c % MAX_GROUP; /* each one with several shapes and sizes of head */
        float q[MAX_GROUP * MAX_DIM];
        fill(shape, n, dim, group);
        idx_rows keys = {k, (size_t)dim * 2, n, dim, IDX_F16}, values = {v, (size_t)dim * 2, n, dim, IDX_F16};
        idx_index *ix = build(kind, &keys, &values, group);
        idx_scratch *s;
        ck_assert_int_eq(idx_scratch_new(n, dim, group, TOP, &s), 0);
        for (uint32_t i = 0; i < group * dim; i++)
            q[i] = t_normal(&rng) + (float)train[i] / 2;
        uint32_t a = n / 5, b = n - n / 7, ranges[][2] = {{0, 0}, {0, 1}, {n, n}, {a, b}, {0, n}};
        for (size_t r = 0; r < sizeof ranges / sizeof *ranges; r++) {
            idx_query query = {.q = q, .group = group, .lo = ranges[r][0], .hi = ranges[r][1], .scale = 1, .budget = {TOP, 0}};
            idx_hits *hits;
            ck_assert_int_eq(idx_search(ix, &keys, &query, s, &hits, NULL), 0);
            for (uint32_t h = 0; h < group; h++)
                check_head(&query, q + (size_t)h * dim, dim, &hits[h], &found[shape], &wanted[shape]);
        }
        idx_scratch_free(s);
        idx_free(ix);
    }
    for (int shape = 0; shape < SHAPES; shape++) {
        double least = kind == SCAN || (kind == CODES && shape != HUGE_NORM) ? 1 : kind == FOUR_BITS && shape == HUGE_NORM ? 0.9 : 0.98;
        double share = found[shape] / wanted[shape];
        ck_assert_msg(!(wanted[shape] > 0) || share >= least, "%s, keys of shape %d: %.5f of the best %d", kind_names[kind], shape, share, BEST);
        if (wanted[shape] > 0)
            printf("%s, keys of shape %d: %.5f of the best %d\n", kind_names[kind], shape, share, BEST);
    }
}
END_TEST

/* No keys: nothing to build from, and nothing to find. */
START_TEST(no_keys)
{
    float q[64] = {1};
    for (int kind = CODES; kind < KINDS; kind++) {
        idx_rows none = {k, 64 * 2, 0, 64, IDX_F16};
        idx_builder *b = NULL;
        ck_assert_int_eq(builder_new(kind, &none, &none, 1, &b), -EINVAL);
        ck_assert_ptr_null(b);
    }
    idx_rows none = {NULL, 64 * 2, 0, 64, IDX_F16};
    idx_query query = {.q = q, .group = 1, .scale = 1, .budget = {TOP, 0}};
    idx_scratch *s;
    idx_hits *hits;
    uint32_t visited = 1;
    ck_assert_int_eq(idx_scratch_new(0, 64, 1, TOP, &s), 0);
    ck_assert_int_eq(idx_search(NULL, &none, &query, s, &hits, &visited), 0);
    ck_assert(!hits[0].n && !visited);
    idx_scratch_free(s);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("trust");
    TCase *c = tcase_create("trust");
    tcase_set_timeout(c, 0);
    rng = t_seed(3);
    tcase_add_loop_test(c, against_brute_force, 0, KINDS * ((int)idx_cpu_detect() + 1));
    tcase_add_test(c, no_keys);
    suite_add_tcase(s, c);
    return t_run(s);
}
