/* An index is published while other threads search: what they need is the index and a scratch of their own, and nothing else is shared. To be run under the thread
 * sanitizer (tests/run.sh does): it is that which finds what asserts cannot. */
#include "index.h"
#include "support.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { N = 3000, DIM = 32, GROUP = 3, TRAIN = 600, KINDS = 4, SEARCHERS = 3, STEPS = 16 };

typedef struct {
    float keys[N * DIM], values[N * DIM], q[STEPS][GROUP * DIM];
    uint16_t train[TRAIN * GROUP * DIM];
    uint32_t pos[TRAIN], best[STEPS][GROUP];
    _Atomic(idx_index *) published[KINDS];
    atomic_bool failed;
} world;

static idx_rows rows_of(const float *x)
{
    return (idx_rows){x, DIM * sizeof *x, N, DIM, IDX_F32};
}

/* Clumps of keys, and queries that look at them. */
static world *make(void)
{
    t_rng r = t_seed(2);
    world *w = calloc(1, sizeof *w);
    float centres[20][DIM];
    for (int i = 0; i < 20 * DIM; i++)
        centres[i / DIM][i % DIM] = t_normal(&r);
    for (int i = 0; i < N * DIM; i++) {
        w->keys[i] = centres[i / DIM % 20][i % DIM] + t_normal(&r) / 2;
        w->values[i] = t_normal(&r);
    }
    for (int i = 0; i < TRAIN * GROUP * DIM; i++)
        w->train[i] = ((union { _Float16 f; uint16_t u; }){(_Float16)(2 * centres[i / DIM % 20][i % DIM] + t_normal(&r))}).u;
    for (uint32_t i = 0; i < TRAIN; i++)
        w->pos[i] = (i + 1) * (N / TRAIN) - 1;
    for (int s = 0; s < STEPS; s++)
        for (int h = 0; h < GROUP; h++) {
            double most = -INFINITY;
            for (int j = 0; j < DIM; j++)
                w->q[s][h * DIM + j] = 2 * centres[(s + h) % 20][j] + t_normal(&r);
            for (uint32_t i = 0; i < N; i++) {
                double score = 0;
                for (int j = 0; j < DIM; j++)
                    score += (double)w->q[s][h * DIM + j] * (double)w->keys[i * DIM + j];
                if (score > most) {
                    most = score;
                    w->best[s][h] = i;
                }
            }
        }
    return w;
}

/* Builds each kind in slices and gives it away. */
static void *publish(void *arg)
{
    world *w = arg;
    idx_rows keys = rows_of(w->keys), values = rows_of(w->values);
    idx_queries train = {w->train, w->pos, TRAIN, GROUP};
    idx_graph_params params = idx_graph_params_default();
    for (int kind = 0; kind < KINDS; kind++) {
        idx_builder *b;
        idx_index *ix;
        int r = kind == IDX_FLAT    ? idx_builder_new_codes(&keys, &values, NULL, 8, NULL, &b)
                : kind == IDX_GRAPH ? idx_builder_new(&keys, &train, &params, &b)
                                    : idx_builder_new_lists((idx_kind)kind, &keys, &values, &train, &b);
        while (r == 0 && (r = idx_builder_step(b, 1)) == 1)
            r = 0;
        if (r < 0 || idx_builder_finish(b, &ix) < 0) {
            atomic_store(&w->failed, true);
            return NULL;
        }
        idx_builder_free(b);
        atomic_store_explicit(&w->published[kind], ix, memory_order_release);
    }
    return NULL;
}

/* Searches by whatever there is, or by a scan, until all kinds are there and have been searched. */
static void *search(void *arg)
{
    world *w = arg;
    idx_rows keys = rows_of(w->keys);
    idx_scratch *s;
    bool all = false;
    if (idx_scratch_new(N, DIM, GROUP, 100, &s) < 0)
        atomic_store(&w->failed, true);
    for (uint32_t round = 0; !all && !atomic_load(&w->failed); round++) {
        all = true;
        for (int kind = -1; kind < KINDS; kind++) {
            idx_index *ix = kind < 0 ? NULL : atomic_load_explicit(&w->published[kind], memory_order_acquire);
            idx_query q = {.q = w->q[round % STEPS], .group = GROUP, .hi = N, .scale = 1, .budget = {.top_k = 100}};
            idx_hits *hits;
            all = all && (ix || kind < 0);
            if (idx_search(ix, &keys, &q, s, &hits, NULL) < 0) {
                atomic_store(&w->failed, true);
                continue;
            }
            for (int h = 0; h < GROUP; h++) {
                bool found = false;
                for (uint32_t i = 0; i < hits[h].n; i++)
                    found |= hits[h].ids[i] == w->best[round % STEPS][h];
                if (!found)
                    atomic_store(&w->failed, true);
            }
        }
    }
    idx_scratch_free(s);
    return NULL;
}

START_TEST(searched_while_published)
{
    pthread_t threads[SEARCHERS + 1];
    world *w = make();
    for (int i = 0; i < SEARCHERS + 1; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, i < SEARCHERS ? search : publish, w), 0);
    for (int i = 0; i < SEARCHERS + 1; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
    ck_assert(!atomic_load(&w->failed));
    for (int kind = 0; kind < KINDS; kind++)
        idx_free(atomic_load(&w->published[kind]));
    free(w);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("publish");
    TCase *c = tcase_create("publish");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, searched_while_published);
    suite_add_tcase(s, c);
    return t_run(s);
}
