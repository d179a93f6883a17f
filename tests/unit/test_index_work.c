/* What index builds leave beside keys and values: how much memory that is, and the queries that stay for a segment that this one is merged into. And how soon builds stop when asked to. */
#include "index_work.h"
#include "memory.h"
#include "quant.h"
#include "support.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { N = 16384, LAYERS = 2, SAMPLED = 8192 };

static const struct {
    uint32_t dim, group;
    double share; /* of keys and values in f16, at most, beside them */
} heads[] = {{64, 7, .40}, {64, 3, .40}, {128, 8, .35}, {128, 4, .35}};
enum { N_HEADS = sizeof heads / sizeof *heads };

static const uint32_t window[LAYERS] = {64, 0}; /* the first layer slides: nothing is kept of it */

static void fill(uint16_t *to, size_t n, t_rng *r)
{
    for (size_t i = 0; i < n; i++)
        to[i] = eng_f32_to_f16(t_normal(r));
}

static eng_segment *sealed(const eng_kv_shape *shape, uint32_t n, unsigned wants)
{
    t_rng r = t_seed(5);
    eng_segment *s;
    ck_assert_int_eq(eng_segment_new(shape, NULL, 0, n, true, &s), 0);
    s->n = n;
    s->wants = wants;
    uint32_t m = SAMPLED / shape->group < n / 2 ? SAMPLED / shape->group : n / 2;
    for (uint32_t head = 0; head < shape->n_head_kv; head++) {
        fill((uint16_t *)(void *)eng_segment_k(s, 1, head, 0), (size_t)n * shape->head_dim, &r);
        fill((uint16_t *)(void *)eng_segment_v(s, 1, head, 0), (size_t)n * shape->head_dim, &r);
    }
    ck_assert_int_eq(eng_segment_alloc_queries(s, m), 0);
    for (uint32_t head = 0; head < shape->n_head_kv; head++)
        fill(eng_segment_query(s, 1, head, 0), (size_t)m * shape->group * shape->head_dim, &r);
    for (s->m = 0; s->m < m; s->m++)
        s->query_row[s->m] = (uint32_t)((uint64_t)(s->m + 1) * n / m) - 1;
    return s;
}

static void build(eng_segment *s, uint32_t threads)
{
    eng_pool *pool;
    eng_index_work *w;
    ck_assert_int_eq(eng_pool_new(threads, &pool), 0);
    ck_assert_int_eq(eng_index_work_new(pool, &w), 0);
    ck_assert_int_eq(eng_index_work_add(w, s), 0);
    ck_assert_int_eq(eng_index_work_run(w, UINT64_MAX, NULL), 0);
    eng_index_work_free(w);
    eng_pool_free(pool);
}

static size_t bytes_of(idx_index *const *all)
{
    size_t bytes;
    ck_assert_ptr_null(all[0]);
    idx_arena(all[1], &bytes);
    return bytes;
}

/* All that is beside keys and values is as much as memory.h announces, and little less. */
static void check_plan(const eng_segment *s, const eng_kv_shape *shape, unsigned wants, double least)
{
    double planned = (double)eng_index_bytes_per_token(shape, wants) * s->n, squares = (double)shape->n_layer * shape->n_head_kv * shape->head_dim * sizeof(float);
    double is = (double)eng_segment_bytes(s) - (double)eng_segment_kv_bytes(shape, s->n) - (double)s->n * sizeof *s->ids - squares;
    ck_assert_msg(is <= planned && is >= least * planned, "%.0f bytes where %.0f were planned", is, planned);
}

START_TEST(memory)
{
    uint32_t d = heads[_i].dim, group = heads[_i].group;
    eng_kv_shape shape = {LAYERS, 1, group, d, ENG_KV_F16, ENG_KV_F16, 2 * d, 2 * d, window};
    eng_segment *s = sealed(&shape, N, ENG_WANT_CLUSTER);
    size_t before = eng_segment_bytes(s), kv = (size_t)N * 4 * d, raw = (size_t)LAYERS * (SAMPLED / group) * group * d * 2;
    ck_assert_uint_ge(before, LAYERS * kv + raw);
    uint16_t *was = malloc(raw), *q = malloc((size_t)group * d * 2);
    uint32_t m = s->m, *rows = malloc(m * sizeof *rows);
    memcpy(was, eng_segment_query(s, 1, 0, 0), raw / LAYERS);
    memcpy(rows, s->query_row, m * sizeof *rows);
    build(s, 2);
    size_t codes = bytes_of(s->codes), cluster = bytes_of(s->cluster);
    size_t rest = eng_segment_bytes(s) - LAYERS * kv - (size_t)N * sizeof *s->ids - codes - cluster; /* queries, and what is known of their sizes */
    ck_assert_uint_gt(rest, (size_t)s->m * group * d);
    printf("%u dimensions, a group of %u: of keys and values, codes %.1f %%, lists %.1f %%, queries %.1f %%\n", d, group, 100. * (double)codes / (double)kv,
           100. * (double)cluster / (double)kv, 100. * (double)rest / (double)kv);
    ck_assert_double_le((double)(codes + rest) / (double)kv, heads[_i].share);
    ck_assert_double_le((double)(cluster + rest) / (double)kv, heads[_i].share);
    check_plan(s, &shape, ENG_WANT_CLUSTER, .93);

    /* few, from everywhere, near what they were, with the rows they saw */
    ck_assert(s->m >= N / 33 / group && s->m <= N / 32 / group);
    for (uint32_t i = 0, from = 0; i < s->m; i++, from++) {
        while (from < m && rows[from] != s->query_row[i])
            from++;
        ck_assert_uint_lt(from, m);
        ck_assert_uint_le(s->query_row[i], (uint64_t)(i + 1) * N / s->m);
        eng_segment_load_query(s, 1, 0, i, q);
        for (uint32_t g = 0; g < group; g++) {
            const uint16_t *a = was + ((size_t)from * group + g) * d, *b = q + (size_t)g * d;
            float most = 0;
            for (uint32_t j = 0; j < d; j++)
                most = fmaxf(most, fabsf(eng_f16_to_f32(a[j])));
            for (uint32_t j = 0; j < d; j++)
                ck_assert_float_eq_tol(eng_f16_to_f32(a[j]), eng_f16_to_f32(b[j]), most * (.501f / 127 + 0x1p-10f));
        }
    }
    free(rows);
    free(was);
    free(q);
    eng_segment_unref(s);
}
END_TEST

/* Zeros, numbers near f16's largest, and what is no number. */
START_TEST(odd_queries)
{
    enum { D = 64 };
    eng_kv_shape shape = {LAYERS, 1, 1, D, ENG_KV_F16, ENG_KV_F16, 2 * D, 2 * D, window};
    eng_segment *s = sealed(&shape, N, 0);
    uint16_t q[D], *raw = eng_segment_query(s, 1, 0, 0);
    for (uint32_t i = 0; i < s->m; i++)
        for (int j = 0; j < D; j++)
            raw[i * D + j] = i % 3 == 0 ? 0 : i % 3 == 1 ? eng_f32_to_f16(j % 2 ? 65504 : -65504) : j ? eng_f32_to_f16(1) : 0x7e00;
    eng_segment_thin_queries(s);
    ck_assert_uint_eq(s->m, N / 32);
    for (uint32_t i = 0; i < s->m; i++) {
        uint32_t from = i * (SAMPLED / (N / 32));
        eng_segment_load_query(s, 1, 0, i, q);
        for (int j = 0; j < D; j++) {
            float x = eng_f16_to_f32(q[j]);
            ck_assert(isfinite(x));
            if (from % 3 == 0)
                ck_assert(x == 0);
            if (from % 3 == 1)
                ck_assert_float_eq_tol(x, j % 2 ? 65504.f : -65504.f, 300);
        }
    }
    eng_segment_unref(s);
}
END_TEST

/* Every kind of index has the same bytes, however many threads build it. */
START_TEST(threads_change_nothing)
{
    enum { SMALL = 2500, D = 64, HEADS = 3 };
    eng_kv_shape shape = {LAYERS, HEADS, 2, D, ENG_KV_F16, ENG_KV_F16, 2 * D, 2 * D, window};
    eng_segment *s[2];
    for (int i = 0; i < 2; i++) {
        s[i] = sealed(&shape, SMALL, ENG_WANT_CLUSTER | ENG_WANT_IVF | ENG_WANT_GRAPH);
        build(s[i], i ? 4 : 1);
        ck_assert(eng_segment_coded(s[i]) && eng_segment_has(s[i], s[i]->ivf) && eng_segment_estimates_graphs(s[i]));
    }
    idx_index **all[2][4] = {{s[0]->codes, s[0]->cluster, s[0]->ivf, s[0]->index}, {s[1]->codes, s[1]->cluster, s[1]->ivf, s[1]->index}};
    for (int kind = 0; kind < 4; kind++)
        for (int head = HEADS; head < 2 * HEADS; head++) { /* of the second layer */
            size_t n, m;
            const void *a = idx_arena(all[0][kind][head], &n), *b = idx_arena(all[1][kind][head], &m);
            ck_assert(n == m && !memcmp(a, b, n));
        }
    check_plan(s[0], &shape, ENG_WANT_CLUSTER | ENG_WANT_IVF | ENG_WANT_GRAPH, .75); /* of a graph most keys have fewer links than they may */
    for (int head = HEADS; head < 2 * HEADS; head++)
        ck_assert(!memcmp(s[0]->members[head], s[1]->members[head], SMALL * sizeof **s[0]->members));
    eng_segment_unref(s[0]);
    eng_segment_unref(s[1]);
}
END_TEST

/* Rows [lo, hi) of a layer, and what is known of their queries. */
static void copy_rows(eng_segment *to, const eng_segment *from, uint32_t layer, uint32_t lo, uint32_t hi)
{
    const eng_kv_shape *h = from->shape;
    for (uint32_t head = 0; head < h->n_head_kv; head++) {
        memcpy(eng_segment_k(to, layer, head, lo), eng_segment_k(from, layer, head, lo), (hi - lo) * h->row_k);
        memcpy(eng_segment_v(to, layer, head, lo), eng_segment_v(from, layer, head, lo), (hi - lo) * h->row_v);
    }
    float *sizes = to->query_squares + (size_t)layer * h->n_head_kv * h->head_dim;
    for (uint32_t i = 0; i < h->n_head_kv * h->head_dim; i++)
        sizes[i] = (float)(hi + i);
}

/* A segment that is being filled, layer after layer in chunks: its codes are built as rows come, before it is sealed, and have the bytes of those built afterwards, on any number of threads.
 * Rows that are still to come are no numbers. What was begun for a segment that comes to nothing goes. */
START_TEST(while_it_is_filled)
{
    enum { ROWS = 13000, CHUNK = 1500, START = 700, D = 64, HEADS = 3 };
    eng_kv_shape shape = {LAYERS, HEADS, 2, D, ENG_KV_F16, ENG_KV_F16, 2 * D, 2 * D, _i == 1 ? window : NULL};
    eng_segment *whole = sealed(&shape, ROWS, ENG_WANT_CLUSTER), *s;
    t_rng r = t_seed(6);
    for (uint32_t head = 0; head < HEADS; head++) {
        fill((uint16_t *)(void *)eng_segment_k(whole, 0, head, 0), (size_t)ROWS * D, &r);
        fill((uint16_t *)(void *)eng_segment_v(whole, 0, head, 0), (size_t)ROWS * D, &r);
    }
    copy_rows(whole, whole, 0, 0, ROWS);
    copy_rows(whole, whole, 1, 0, ROWS);
    eng_pool *pool;
    eng_index_work *w;
    ck_assert_int_eq(eng_pool_new(_i ? 1 : 4, &pool), 0);
    ck_assert_int_eq(eng_index_work_new(pool, &w), 0);
    uint32_t first = _i == 1 ? 1 : 0, codes = (LAYERS - first) * HEADS, dropped = 0;
    for (uint32_t stop = 5; dropped < 3; dropped++) { /* dropped in the middle, dropped at the end, and sealed */
        ck_assert_int_eq(eng_segment_new(&shape, NULL, START, ROWS, true, &s), 0);
        memset(s->kv, 0xff, s->kv_bytes);
        ck_assert_int_eq(eng_index_work_begin(w, s), 0);
        ck_assert_uint_eq(eng_index_work_pending(w), codes);
        ck_assert_int_eq(eng_index_work_run(w, UINT64_MAX, NULL), 0);
        double before = eng_index_work_seconds(w);
        for (uint32_t n = 0, chunk = 0; n < ROWS && (dropped || chunk < stop); n += CHUNK, chunk++)
            for (uint32_t layer = 0; layer < LAYERS; layer++) {
                uint32_t end = n + CHUNK < ROWS ? n + CHUNK : ROWS;
                copy_rows(s, whole, layer, n, end);
                eng_index_work_rows(w, layer + 1, START + end + (end == ROWS ? 100 : 0)); /* the chunk may go on behind it */
                ck_assert_int_eq(eng_index_work_run(w, UINT64_MAX, NULL), 0);
                ck_assert_uint_eq(s->n_codes, end < ROWS || layer < first ? 0 : (layer + 1 - first) * HEADS);
            }
        ck_assert_double_gt(eng_index_work_seconds(w), before); /* also when it was stopped behind the first run */
        if (dropped < 2) {
            eng_index_work_drop(w);
            eng_index_work_drop(w);
            ck_assert_uint_eq(eng_index_work_pending(w), 0);
            ck_assert(s->refs == 1 && !s->n_codes && !s->index_bytes && !s->indexing);
            eng_segment_unref(s);
        }
    }
    s->n = ROWS;
    s->wants = ENG_WANT_CLUSTER;
    ck_assert_int_eq(eng_segment_alloc_queries(s, whole->m_cap), 0);
    memcpy(s->query_row, whole->query_row, whole->m * sizeof *s->query_row);
    memcpy(s->queries, whole->queries, (size_t)LAYERS * HEADS * whole->m_cap * shape.group * D * 2);
    s->m = whole->m;
    ck_assert_int_eq(eng_index_work_add(w, s), 0);
    ck_assert_uint_eq(eng_index_work_pending(w), codes); /* of the other kind */
    ck_assert_int_eq(eng_index_work_run(w, UINT64_MAX, NULL), 0);
    ck_assert(s->refs == 1 && !s->indexing && eng_segment_coded(s) && eng_segment_has(s, s->cluster));
    build(whole, 2);
    ck_assert_uint_eq(s->index_bytes, whole->index_bytes);
    for (uint32_t head = first * HEADS; head < LAYERS * HEADS; head++) {
        size_t n, m;
        const void *a = idx_arena(whole->codes[head], &n), *b = idx_arena(s->codes[head], &m);
        ck_assert(n == m && !memcmp(a, b, n));
    }
    eng_index_work_free(w);
    eng_pool_free(pool);
    eng_segment_unref(s);
    eng_segment_unref(whole);
}
END_TEST

#ifdef __SANITIZE_ADDRESS__
static const double most_ms = 200; /* several times as slow */
#else
static const double most_ms = 50;
#endif

typedef struct {
    atomic_bool stop;
    double after_ms, at_ms; /* of CPU time */
} stopper;

static void *stop_later(void *arg)
{
    stopper *s = arg;
    double until = t_cpu_ms(CLOCK_PROCESS_CPUTIME_ID) + s->after_ms;
    while (t_cpu_ms(CLOCK_PROCESS_CPUTIME_ID) < until)
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    s->at_ms = t_cpu_ms(CLOCK_PROCESS_CPUTIME_ID);
    atomic_store(&s->stop, true);
    return NULL;
}

/* Builds for a long segment, stopped every some ms; whether whoever waited for the engine got it within most_ms each time. */
static bool stop_often(unsigned wants)
{
    enum { LONG = 1 << 17, D = 128 };
    eng_kv_shape shape = {LAYERS, 1, 4, D, ENG_KV_F16, ENG_KV_F16, 2 * D, 2 * D, window};
    eng_segment *s = sealed(&shape, LONG, wants);
    eng_pool *pool;
    eng_index_work *w;
    ck_assert_int_eq(eng_pool_new(1, &pool), 0);
    ck_assert_int_eq(eng_index_work_new(pool, &w), 0);
    ck_assert_int_eq(eng_index_work_add(w, s), 0);
    double longest = 0;
    int stops = 0;
    for (int more = 1; more; stops++) {
        stopper x = {.after_ms = 1 + stops % 7 * 5};
        pthread_t thread;
        ck_assert_int_eq(pthread_create(&thread, NULL, stop_later, &x), 0);
        more = eng_index_work_run(w, UINT64_MAX, &x.stop);
        double returned = t_cpu_ms(CLOCK_PROCESS_CPUTIME_ID);
        while (!atomic_load(&x.stop)) { /* all is done: the other thread waits for this one to spend its time */
        }
        pthread_join(thread, NULL);
        if (more)
            longest = fmax(longest, returned - x.at_ms);
    }
    printf("wants %u: stopped %d times, after %.1f ms at the most\n", wants, stops - 1, longest);
    ck_assert_int_gt(stops, 3);
    ck_assert_uint_eq(eng_index_work_pending(w), 0);
    ck_assert(eng_segment_coded(s));
    eng_index_work_free(w);
    eng_pool_free(pool);
    eng_segment_unref(s);
    return longest < most_ms;
}

/* At whatever point of a long build of every kind, the engine stops soon when somebody waits for it, and what was begun goes on afterwards. In CPU time, so that other programs don't count. */
START_TEST(stops_soon)
{
    static const unsigned kinds[] = {0, ENG_WANT_CLUSTER, ENG_WANT_IVF, ENG_WANT_GRAPH};
    bool soon = false; /* a virtual machine that is not run for a while counts that as its programs' time, but not each time */
    for (int i = 0; i < 3 && !soon; i++)
        soon = stop_often(kinds[_i]);
    ck_assert(soon);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("index work");
    TCase *c = tcase_create("index work");
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, memory, 0, N_HEADS);
    tcase_add_test(c, odd_queries);
    tcase_add_test(c, threads_change_nothing);
    tcase_add_loop_test(c, while_it_is_filled, 0, 3);
    tcase_add_loop_test(c, stops_soon, 0, 4);
    suite_add_tcase(s, c);
    return t_run(s);
}
