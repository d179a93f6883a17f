/* Recall of the graph on real queries and keys against exact search, and what it costs. Prints a table.
 *
 * usage: test_recall [SET...]     with folders: only the table, for them (data/qk/README.md gives the layout)
 *
 * The newest 512 rows are the window, as in decoding; the index covers the rows before it, and searches leave out the first 128. Seeds are
 * the 8 best hits per head of the step before.
 */
#include "index.h"
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SINKS = 128, WINDOW = 512, MAX_STEPS = 96, SEEDS = 8, BEST = 16 };

typedef struct {
    t_npy keys, key_pos, train, train_pos, decode;
    idx_rows rows;
    idx_queries queries;
    uint32_t *pos; /* row of the newest key each training query sees */
    uint32_t group, dim, n_all;
    idx_index *ix;
    double build_s;
} set;

/* Not a ck_assert: the table is also made outside of tests. */
static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "test_recall: %s failed\n", what);
        exit(1);
    }
}

static t_npy load(const char *dir, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.npy", dir, name);
    return t_npy_load(path);
}

/* CPU time, because tests share the machine. */
static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void set_load(set *x, const char *dir)
{
    *x = (set){.keys = load(dir, "keys"),
               .key_pos = load(dir, "key_pos"),
               .train = load(dir, "prefill_q"),
               .train_pos = load(dir, "prefill_q_pos"),
               .decode = load(dir, "decode_q")};
    x->n_all = (uint32_t)x->keys.dims[0];
    x->dim = (uint32_t)x->keys.dims[1];
    x->group = (uint32_t)x->train.dims[1];
    x->rows = (idx_rows){x->keys.data, (size_t)x->dim * 2, x->n_all - WINDOW, x->dim, IDX_F16};
    uint32_t m = (uint32_t)x->train.dims[0], row = 0;
    const int32_t *key_pos = x->key_pos.data, *query_pos = x->train_pos.data;
    x->pos = malloc(m * sizeof *x->pos);
    for (uint32_t i = 0; i < m; i++) {
        while (row + 1 < x->n_all && key_pos[row + 1] <= query_pos[i])
            row++;
        x->pos[i] = row;
    }
    x->queries = (idx_queries){x->train.data, x->pos, m, x->group};

    idx_graph_params params = idx_graph_params_default();
    idx_builder *b;
    must(idx_builder_new(&x->rows, &x->queries, &params, &b) == 0, "idx_builder_new");
    double start = seconds();
    must(idx_builder_step(b, 0) == 0, "idx_builder_step");
    x->build_s = seconds() - start;
    must(idx_builder_finish(b, &x->ix) == 0, "idx_builder_finish");
    idx_builder_free(b);
}

static void set_free(set *x)
{
    t_npy_free(&x->keys);
    t_npy_free(&x->key_pos);
    t_npy_free(&x->train);
    t_npy_free(&x->train_pos);
    t_npy_free(&x->decode);
    free(x->pos);
    idx_free(x->ix);
}

static int rising(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct {
    double recall, p10, best16, visited, hits, us_graph, us_flat;
} measure;

/* Best score of each head in the sinks and the window, which a dynamic budget is measured from. */
static void window_best(const set *x, const float *q, idx_scratch *s, float *ret)
{
    idx_rows all = x->rows;
    all.n = x->n_all;
    for (uint32_t h = 0; h < x->group; h++)
        ret[h] = -INFINITY;
    for (int part = 0; part < 2; part++) {
        idx_query w = {.q = q, .group = x->group, .scale = 0.125f, .budget = {1, 0}};
        w.lo = part ? x->n_all - WINDOW : 0;
        w.hi = part ? x->n_all : SINKS;
        idx_hits *hits;
        must(idx_search(NULL, &all, &w, s, &hits, NULL) == 0, "idx_search");
        for (uint32_t h = 0; h < x->group; h++)
            ret[h] = fmaxf(ret[h], hits[h].scores[0]);
    }
}

/* Compares one step's hits; appends recalls to r[0] (all) and r[1] (best 16). */
static void compare(const set *x, const idx_hits *graph, idx_hits *flat, uint8_t *mark, double (*r)[MAX_STEPS * 64], int *n)
{
    for (uint32_t h = 0; h < x->group; h++) {
        if (!flat[h].n)
            continue;
        for (uint32_t i = 0; i < graph[h].n; i++)
            mark[graph[h].ids[i]] = 1;
        uint32_t found = 0, found_best = 0, best = idx_select(flat[h].ids, flat[h].scores, flat[h].n, BEST);
        for (uint32_t i = 0; i < flat[h].n; i++) {
            found += mark[flat[h].ids[i]];
            found_best += i < best && mark[flat[h].ids[i]];
        }
        for (uint32_t i = 0; i < graph[h].n; i++)
            mark[graph[h].ids[i]] = 0;
        r[0][*n] = (double)found / flat[h].n;
        r[1][(*n)++] = (double)found_best / best;
    }
}

static measure measure_set(const set *x, uint32_t top_k, float beta)
{
    static double r[2][MAX_STEPS * 64];
    uint32_t steps = (uint32_t)x->decode.dims[0] < MAX_STEPS ? (uint32_t)x->decode.dims[0] : MAX_STEPS, group = x->group, n_seeds = 0;
    uint32_t seeds[64 * SEEDS], visited;
    float q[64 * 256], floor[64];
    uint8_t *mark = calloc(x->rows.n, 1);
    idx_scratch *s, *s_flat;
    measure m = {0};
    int n = 0;
    must(group <= 64 && group * x->dim <= 64 * 256, "shape");
    must(idx_scratch_new(x->rows.n, x->dim, group, top_k, &s) == 0, "idx_scratch_new");
    must(idx_scratch_new(x->n_all, x->dim, group, top_k, &s_flat) == 0, "idx_scratch_new");
    for (uint32_t t = 0; t < steps; t++) {
        const _Float16 *from = (const _Float16 *)x->decode.data + (size_t)t * group * x->dim;
        for (uint32_t i = 0; i < group * x->dim; i++)
            q[i] = (float)from[i];
        window_best(x, q, s_flat, floor);
        idx_query query = {.q = q, .floor = floor, .seeds = seeds, .n_seeds = n_seeds, .group = group, .lo = SINKS, .hi = x->rows.n};
        query.scale = 0.125f;
        query.budget = (idx_budget){top_k, beta};
        idx_hits *graph, *flat;
        double start = seconds();
        must(idx_search(NULL, &x->rows, &query, s_flat, &flat, NULL) == 0, "idx_search");
        double between = seconds();
        must(idx_search(x->ix, &x->rows, &query, s, &graph, &visited) == 0, "idx_search");
        m.us_flat += (between - start) * 1e6 / steps;
        m.us_graph += (seconds() - between) * 1e6 / steps;
        m.visited += (double)visited / (query.hi - query.lo) / steps;
        compare(x, graph, flat, mark, r, &n);
        n_seeds = 0;
        for (uint32_t h = 0; h < group; h++) {
            m.hits += (double)flat[h].n / group / steps;
            uint32_t best = idx_select(graph[h].ids, graph[h].scores, graph[h].n, SEEDS);
            memcpy(seeds + n_seeds, graph[h].ids, best * sizeof *seeds);
            n_seeds += best;
        }
    }
    for (int i = 0; i < n; i++) {
        m.recall += r[0][i] / n;
        m.best16 += r[1][i] / n;
    }
    qsort(r[0], (size_t)n, sizeof r[0][0], rising);
    m.p10 = r[0][n / 10];
    free(mark);
    idx_scratch_free(s);
    idx_scratch_free(s_flat);
    return m;
}

/* Floors hold for the cut in data/qk with some margin below what README.md reports. */
static void table(const char *dir, bool judge)
{
    static bool head;
    static const struct {
        const char *name;
        uint32_t top_k;
        float beta;
    } budgets[] = {{"top 100", 100, 0}, {"b 8 <= 1024", 1024, 8}};
    set x;
    if (!head)
        printf("%-16s %6s %6s %7s %6s | %-12s %5s  %6s %6s %7s %8s %9s %8s\n", "set", "keys", "train", "build s", "B/key", "budget", "hits",
               "recall", "p10", "best 16", "visited", "graph us", "flat us");
    head = true;
    set_load(&x, dir);
    size_t bytes;
    idx_arena(x.ix, &bytes);
    const char *name = strrchr(dir, '/');
    for (int i = 0; i < 2; i++) {
        measure m = measure_set(&x, budgets[i].top_k, budgets[i].beta);
        printf("%-16s %6u %6u %7.3f %6.0f | %-12s %5.0f  %6.4f %6.3f %7.4f %7.1f%% %9.0f %8.0f\n", name ? name + 1 : dir, x.rows.n,
               x.queries.m * x.group, x.build_s, (double)bytes / x.rows.n, budgets[i].name, m.hits, m.recall, m.p10, m.best16,
               100 * m.visited, m.us_graph, m.us_flat);
        if (judge) {
            ck_assert_msg(m.recall >= 0.992, "recall %.4f", m.recall);
            ck_assert_msg(m.p10 >= 0.97, "recall, p10 %.4f", m.p10);
            ck_assert_msg(m.best16 >= 0.997, "recall of the best 16 %.4f", m.best16);
        }
    }
    fflush(stdout);
    set_free(&x);
}

START_TEST(test_real)
{
    static const char *const sets[] = {"data/qk/code_l18_kv1", "data/qk/text_l6_kv0", "data/qk/text_l22_kv1"};
    table(t_path(sets[_i]), true);
}
END_TEST

/* The training queries must matter: without them the same graph misses far more. */
START_TEST(test_training_matters)
{
    set x;
    set_load(&x, t_path("data/qk/text_l6_kv0"));
    idx_graph_params params = idx_graph_params_default();
    idx_queries none = {0};
    idx_builder *b;
    measure with = measure_set(&x, 100, 0);
    idx_free(x.ix);
    must(idx_builder_new(&x.rows, &none, &params, &b) == 0, "idx_builder_new");
    must(idx_builder_step(b, 0) == 0, "idx_builder_step");
    must(idx_builder_finish(b, &x.ix) == 0, "idx_builder_finish");
    idx_builder_free(b);
    measure without = measure_set(&x, 100, 0);
    ck_assert_msg(1 - without.recall > 4 * (1 - with.recall), "recall %.4f with, %.4f without", with.recall, without.recall);
    set_free(&x);
}
END_TEST

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        table(argv[i], false);
    if (argc > 1)
        return 0;
    Suite *s = suite_create("recall");
    TCase *t = tcase_create("recall");
    tcase_set_timeout(t, 600);
    tcase_add_loop_test(t, test_real, 0, 3);
    tcase_add_test(t, test_training_matters);
    suite_add_tcase(s, t);
    return t_run(s);
}
