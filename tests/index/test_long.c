/* Builds over many keys can be left soon, at any point: neither to begin one, nor a step of it, nor to drop it takes long, whatever the number of keys, and its progress rises.
 * In CPU time, so that other programs don't count. */
#include "index.h"
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 1 << 18, MAX_DIM = 128, MAX_GROUP = 7, TRAIN = 520 }; /* enough positions for margins to be measured */
enum { CODES, FOUR_BITS, CLUSTER, IVF, GRAPH, KINDS };

static const char *const kind_names[] = {"codes", "codes of 4 bits", "cluster", "ivf", "graph"};
static const struct {
    uint32_t dim, group;
} heads[] = {{64, 7}, {128, 6}};
enum { N_HEADS = sizeof heads / sizeof *heads };

#ifdef __SANITIZE_ADDRESS__
static const double most_ms = 200; /* several times as slow */
#else
static const double most_ms = 50;
#endif

/* Clumps along the text, with some noise; values are read from other rows of the same. */
static _Float16 *rows_new(uint32_t n, uint32_t dim, uint32_t clump)
{
    enum { POOL = 4099 };
    static float noise[POOL];
    t_rng r = t_seed(4);
    _Float16 *x = malloc((size_t)n * dim * sizeof *x);
    ck_assert_ptr_nonnull(x);
    for (int i = 0; i < POOL; i++)
        noise[i] = t_normal(&r);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t from = (uint32_t)(t_u64(&r) % POOL), centre = i / clump % 64 * 61;
        for (uint32_t j = 0; j < dim; j++)
            x[(size_t)i * dim + j] = (_Float16)(noise[(centre + j) % POOL] + noise[(from + j) % POOL] / 2);
    }
    return x;
}

/* Builds an index in the least possible steps. Whether all of it took less than most_ms at a time. */
static bool build(int kind, const idx_rows *keys, const idx_queries *train, const float *power)
{
    idx_graph_params params = idx_graph_params_default();
    idx_builder *b;
    idx_index *ix;
    double start = t_cpu_ms(CLOCK_THREAD_CPUTIME_ID), begun, longest = 0, at_longest = 0;
    ck_assert_int_eq(kind == GRAPH                          ? idx_builder_new(keys, train, &params, &b)
                     : kind == CODES || kind == FOUR_BITS ? idx_builder_new_codes(keys, keys, power, kind == CODES ? 8 : 4, NULL, &b)
                                                            : idx_builder_new_lists(kind == IVF ? IDX_IVF : IDX_CLUSTER, keys, keys, train, &b),
                     0);
    begun = t_cpu_ms(CLOCK_THREAD_CPUTIME_ID) - start;
    float progress = 0;
    bool rises = true;
    int r;
    do {
        start = t_cpu_ms(CLOCK_THREAD_CPUTIME_ID);
        r = idx_builder_step(b, 1); /* a deadline long past */
        double ms = t_cpu_ms(CLOCK_THREAD_CPUTIME_ID) - start;
        float now = idx_builder_progress(b);
        rises = rises && now >= progress && now <= 1;
        progress = now;
        if (ms > longest) {
            longest = ms;
            at_longest = (double)now;
        }
    } while (r == 1);
    ck_assert_int_eq(r, 0);
    ck_assert(rises && progress > .98f);
    ck_assert_int_eq(idx_builder_finish(b, &ix), 0);
    start = t_cpu_ms(CLOCK_THREAD_CPUTIME_ID);
    idx_builder_free(b);
    double freed = t_cpu_ms(CLOCK_THREAD_CPUTIME_ID) - start;
    printf("%s, %u keys of %u, a group of %u: begun in %.1f ms, longest step %.1f ms at %.3f of the build, dropped in %.1f ms\n", kind_names[kind], keys->n, keys->dim, train->group, begun,
           longest, at_longest, freed);
    idx_free(ix);
    return begun < most_ms && longest < most_ms && freed < most_ms;
}

START_TEST(left_at_any_point)
{
    uint32_t dim = heads[_i / KINDS].dim, group = heads[_i / KINDS].group, pos[TRAIN];
    _Float16 *k = rows_new(N, dim, 97), *q = rows_new(TRAIN * group, dim, 1);
    float power[MAX_DIM];
    for (uint32_t i = 0; i < TRAIN; i++)
        pos[i] = (uint32_t)((uint64_t)(i + 1) * N / TRAIN) - 1;
    idx_rows keys = {k, (size_t)dim * 2, N, dim, IDX_F16};
    idx_queries train = {(const uint16_t *)(const void *)q, pos, TRAIN, group};
    idx_query_power(&train, dim, power);
    bool soon = false; /* a virtual machine that is not run for a while counts that as its programs' time, but not in the same place again */
    for (int i = 0; i < 3 && !soon; i++)
        soon = build(_i % KINDS, &keys, &train, power);
    ck_assert(soon);
    free(k);
    free(q);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("long builds");
    TCase *c = tcase_create("long builds");
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, left_at_any_point, 0, KINDS * N_HEADS);
    suite_add_tcase(s, c);
    return t_run(s);
}
