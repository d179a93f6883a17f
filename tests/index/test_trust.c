/* Every kind of index over every kind of keys, sizes of head and group, and ranges, against float64 brute force: what any search must keep to. */
#include "index.h"
#include "support.h"

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

static idx_index *build(int kind, const idx_rows *keys, const idx_rows *values, uint32_t group)
{
    idx_queries queries = {(const uint16_t *)(const void *)train, pos, TRAIN, group};
    idx_graph_params params = idx_graph_params_default();
    idx_builder *b;
    idx_index *ix;
    if (kind == SCAN)
        return NULL;
    ck_assert_int_eq(kind == GRAPH                          ? idx_builder_new(keys, &queries, &params, &b)
                     : kind == CODES || kind == FOUR_BITS ? idx_builder_new_codes(keys, values, NULL, kind == CODES ? 8 : 4, NULL, &b)
                                                            : idx_builder_new_lists(kind == IVF ? IDX_IVF : IDX_CLUSTER, keys, values, &queries, &b),
                     0);
    ck_assert_int_eq(idx_builder_step(b, 0), 0);
    ck_assert_int_eq(idx_builder_finish(b, &ix), 0);
    idx_builder_free(b);
    char err[200];
    ck_assert_msg(idx_check(ix, err, sizeof err) == 0, "%s", err);
    return ix;
}

/* In the range, once, with its score, as many as asked for; of the best, how many of those that there are. */
static void check_head(const idx_query *q, const float *query, uint32_t dim, const idx_hits *hits, double *found, double *wanted)
{
    static double score[MAX_N];
    static uint8_t hit[MAX_N];
    uint32_t span = q->hi - q->lo;
    ck_assert_uint_eq(hits->n, span < TOP ? span : TOP);
    memset(hit, 0, sizeof hit);
    for (uint32_t i = q->lo; i < q->hi; i++) {
        score[i] = 0;
        for (uint32_t j = 0; j < dim; j++)
            score[i] += (double)query[j] * (double)k[i * dim + j];
    }
    for (uint32_t i = 0; i < hits->n; i++) {
        uint32_t id = hits->ids[i];
        double size = 0;
        ck_assert(id >= q->lo && id < q->hi && !hit[id]);
        hit[id] = 1;
        for (uint32_t j = 0; j < dim; j++)
            size += fabs((double)query[j] * (double)k[id * dim + j]);
        ck_assert_double_eq_tol(hits->scores[i], score[id], 1e-6 * size + 1e-9);
    }
    for (uint32_t i = q->lo; i < q->hi; i++) {
        uint32_t better = 0;
        double size = 0;
        for (uint32_t j = 0; j < dim; j++)
            size += fabs((double)query[j] * (double)k[i * dim + j]);
        for (uint32_t o = q->lo; o < q->hi; o++)
            better += score[o] >= score[i] - 1e-6 * size; /* itself, and what rounding may put before it */
        wanted[0] += better <= BEST;
        found[0] += better <= BEST && hit[i];
    }
}

START_TEST(against_brute_force)
{
    int kind = _i;
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

int main(void)
{
    Suite *s = suite_create("trust");
    TCase *c = tcase_create("trust");
    tcase_set_timeout(c, 0);
    rng = t_seed(3);
    tcase_add_loop_test(c, against_brute_force, 0, KINDS);
    suite_add_tcase(s, c);
    return t_run(s);
}
