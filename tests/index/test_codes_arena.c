/* Arenas of codes and lists: the same bytes on every level and however a build is cut, damaged ones, and keys that are not numbers. */
#include "code_heads.h"

#include <errno.h>

/* Codes and scores by them have the same bits on every level, scores for any number of dimensions and heads, and of each head those that a scan with fewer heads gives. */
START_TEST(levels_agree)
{
    enum { N = 1500, HEADS = 9, ALL = 1 << 30 };
    static const uint32_t dims[] = {4, 20, 64, 80, 128, 256};
    for (size_t t = 0; t < 2 * sizeof dims / sizeof *dims; t++) {
        idx_kind kind = t % 2 ? (idx_kind)FOUR_BITS : IDX_FLAT;
        uint32_t dim = dims[t / 2];
        _Float16 *k = random_rows((size_t)N * dim, 3), *v = random_rows((size_t)N * dim, 1);
        idx_rows keys = {k, (size_t)dim * 2, N, dim, IDX_F16}, values = {v, (size_t)dim * 2, N, dim, IDX_F16};
        idx_index *ix = build(kind, &keys, &values, &no_queries, 0);
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
            idx_index *same = build(kind, &keys, &values, &no_queries, 0);
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
    void *memory = need(aligned_alloc(64, (idx_max_bytes(IDX_FLAT, N, DIM) + 63) & ~(size_t)63));
    memset(memory, 0xa5, idx_max_bytes(IDX_FLAT, N, DIM));
    b = build_in(kind, &keys, &values, &train, 1, memory);
    ck_assert((idx_arena(b, &nb) == memory) == is_flat(kind));
    const void *pa = idx_arena(a, &na), *pb = idx_arena(b, &nb);
    ck_assert(na == nb && !memcmp(pa, pb, na));
    ck_assert_int_eq(idx_kind_of(a), is_flat(kind) ? IDX_FLAT : kind);
    char err[200];
    ck_assert_int_eq(idx_check(a, err, sizeof err), 0);
    ck_assert_int_eq(idx_load(pa, na, N, DIM, NULL, &c, err, sizeof err), 0);
    ck_assert(!memcmp(idx_arena(c, &nb), pa, na));
    ck_assert_int_eq(idx_load(pa, na - 1, N, DIM, NULL, &c, err, sizeof err), -EBADMSG);
    ck_assert_int_eq(idx_load(pa, na, N + 1, DIM, NULL, &c, err, sizeof err), -EBADMSG);
    idx_free(a);
    idx_free(b);
    free(memory);
    idx_free(c);
    /* a build may be dropped at any point */
    for (int steps = 0; steps < 200; steps += 13) {
        idx_builder *w;
        float progress = 0, now, power[DIM];
        ck_assert_int_eq(builder_new(kind, &keys, &values, &train, power, NULL, &w), 0);
        bool rises = true;
        for (int i = 0; i < steps && idx_builder_step(w, 1) == 1; i++, progress = now) {
            now = idx_builder_progress(w);
            rises = rises && now >= progress && now < 1;
        }
        ck_assert(rises && (steps < 100 || progress > 0));
        ck_assert_int_eq(steps < 180 ? 0 : idx_builder_step(w, 0), 0);
        ck_assert(steps < 180 || idx_builder_progress(w) > .98f);
        idx_builder_free(w);
    }
    free(k);
    free(v);
}
END_TEST

/* Codes of rows that come while the build is at work: the same bytes as of rows that were there, and a run's clusters are made as soon as its rows are. Before they come, rows are
 * no numbers; so is what is known of the queries. */
START_TEST(rows_as_they_come)
{
    enum { N = 21000, DIM = 20 };
    _Float16 *k = random_rows((size_t)N * DIM, 1), *v = random_rows((size_t)N * DIM, 1), *got[2];
    idx_rows keys = {k, DIM * 2, N, DIM, IDX_F16}, values = {v, DIM * 2, N, DIM, IDX_F16};
    float power[DIM], sizes[DIM];
    for (uint32_t j = 0; j < DIM; j++)
        power[j] = (float)(j + 1);
    for (int turn = 0; turn < 4; turn++) {
        uint32_t bits = turn % 2 ? 4 : 8, step = turn < 2 ? 977 : 8000, there = 0;
        idx_builder *b;
        idx_index *whole, *ix;
        void *memory = turn % 2 ? NULL : need(aligned_alloc(64, (idx_max_bytes(IDX_FLAT, N, DIM) + 63) & ~(size_t)63));
        MUST(idx_builder_new_codes(&keys, &values, power, bits, NULL, &b) == 0);
        ck_assert_int_eq(idx_builder_step(b, 0), 0);
        MUST(idx_builder_finish(b, &whole) == 0);
        idx_builder_free(b);
        for (int i = 0; i < 2; i++) {
            got[i] = need(malloc((size_t)N * DIM * 2));
            memset(got[i], 0xff, (size_t)N * DIM * 2);
        }
        memset(sizes, 0xff, sizeof sizes);
        idx_rows new_keys = {got[0], DIM * 2, N, DIM, IDX_F16}, new_values = {got[1], DIM * 2, N, DIM, IDX_F16};
        MUST(idx_builder_new_codes(&new_keys, &new_values, sizes, bits, memory, &b) == 0);
        for (int r = 2; r;) {
            uint32_t n = there + step < N ? there + step : N;
            memcpy(got[0] + (size_t)there * DIM, k + (size_t)there * DIM, (size_t)(n - there) * DIM * 2);
            memcpy(got[1] + (size_t)there * DIM, v + (size_t)there * DIM, (size_t)(n - there) * DIM * 2);
            there = n;
            if (there == N)
                memcpy(sizes, power, sizeof sizes);
            idx_builder_rows(b, there);
            while ((r = idx_builder_step(b, 1)) == 1) {
            }
            ck_assert_int_eq(r, there < N ? 2 : 0);
            ck_assert_uint_gt(idx_builder_needs(b) + (there == N), there);
            ck_assert_float_ge(idx_builder_progress(b), there < N / 3 ? 0 : there < 2 * N / 3 ? .28f : .56f);
        }
        MUST(idx_builder_finish(b, &ix) == 0);
        idx_builder_free(b);
        size_t na, nb;
        const void *pa = idx_arena(whole, &na), *pb = idx_arena(ix, &nb);
        ck_assert(na == nb && !memcmp(pa, pb, na));
        idx_free(whole);
        idx_free(ix);
        free(memory);
        free(got[0]);
        free(got[1]);
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
        int r = idx_load(bad, bytes, N, DIM, NULL, &x.ix, err, sizeof err);
        ck_assert(r == 0 || r == -EBADMSG);
        if (r) {
            refused++;
            continue;
        }
        ck_assert(at >= 64 || (at >= 48 && at < (is_flat(code_kinds[_i]) ? 52 : 56))); /* no byte of the header is free, but for those of floats */
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

int main(void)
{
    Suite *s = suite_create("arenas of codes");
    TCase *t = tcase_create("arenas of codes");
    tcase_set_timeout(t, 0);
    tcase_add_loop_test(t, not_numbers, 0, (int)idx_cpu_detect() + 1);
    tcase_add_test(t, levels_agree);
    tcase_add_loop_test(t, steps_change_nothing, 0, N_KINDS);
    tcase_add_test(t, rows_as_they_come);
    tcase_add_loop_test(t, damage, 0, N_KINDS);
    suite_add_tcase(s, t);
    rng = t_seed(7);
    return t_run(s);
}
