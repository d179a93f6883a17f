/* Segments, views and the RAM tier: prefix matching against a naive one, budget, what may be evicted. */
#include "context_cache.h"
#include "segments.h"

#include <stdlib.h>
#include <string.h>

static int64_t find(eng_cache *c, const int32_t *ids, uint32_t n, bool exact_only, eng_view *view)
{
    eng_prefix p = {0, ids, n, exact_only};
    eng_prefix_stop stop;
    return eng_cache_find(c, &p, view, &stop);
}

START_TEST(copy_and_shift)
{
    int32_t ids[100];
    for (int i = 0; i < 100; i++)
        ids[i] = i * 3;
    eng_segment *s = segment(NULL, 0, ids, 100, true), *c;
    ck_assert_int_eq(eng_segment_copy(s, 30, 80, s, false, &c), 0);
    ck_assert(c->n == 50 && c->start == 30 && c->parent == s && !c->exact && s->refs == 2);
    eng_view v = {0};
    ck_assert_int_eq(eng_view_add(&v, s, 0, 30), 0);
    ck_assert_int_eq(eng_view_add(&v, c, 30, 80), 0);
    check_rows(&v, ids, 80);
    eng_view_done(&v);
    eng_segment_unref(c);
    eng_segment_shift(s, 60);
    ck_assert(s->start == 60 && s->n == 40);
    ck_assert_int_eq(eng_view_add(&v, s, 60, 100), 0);
    for (int i = 0; i < 40; i++)
        ck_assert_int_eq(eng_segment_k(s, 1, 1, (uint32_t)i)[0], (ids[60 + i] + 8) & 255);
    eng_view_done(&v);
    ck_assert_uint_eq(s->refs, 1);
    eng_segment_unref(s);
}
END_TEST

/* Random trees over a three-letter alphabet; the longest reachable match by trying every chain. */
START_TEST(find_longest_prefix)
{
    t_rng r = t_seed(3);
    for (int round = 0; round < 60; round++) {
        eng_cache *c;
        ck_assert_int_eq(eng_cache_new((size_t)1 << 30, &c), 0);
        enum { MAX = 14 };
        eng_segment *segs[MAX];
        int32_t texts[MAX][600];
        uint32_t ends[MAX], n_segs = 0;
        for (int i = 0; i < MAX; i++) {
            eng_segment *parent = i && t_u64(&r) % 4 ? segs[t_u64(&r) % n_segs] : NULL;
            uint32_t start = 0, p = 0;
            if (parent) {
                for (p = 0; segs[p] != parent; p++)
                    ;
                start = parent->start + 1 + (uint32_t)(t_u64(&r) % parent->n);
                memcpy(texts[i], texts[p], start * sizeof(int32_t));
            }
            uint32_t n = 1 + (uint32_t)(t_u64(&r) % 100);
            for (uint32_t j = 0; j < n; j++)
                texts[i][start + j] = t_u64(&r) % 20 ? 1 : (int32_t)(t_u64(&r) % 3);
            ends[i] = start + n;
            segs[n_segs++] = segment(parent, start, texts[i] + start, n, !parent || (parent->exact && t_u64(&r) % 3));
            ck_assert(eng_cache_insert(c, segs[i]));
        }
        for (int ask = 0; ask < 40; ask++) {
            int32_t ids[700];
            int like = (int)(t_u64(&r) % MAX);
            uint32_t n = 1 + (uint32_t)(t_u64(&r) % (ends[like] + 30));
            for (uint32_t j = 0; j < n; j++)
                ids[j] = j < ends[like] && t_u64(&r) % 150 ? texts[like][j] : 1;
            bool exact_only = t_u64(&r) & 1;
            int64_t best = 0;
            for (int i = 0; i < MAX; i++) {
                if (exact_only && !segs[i]->exact)
                    continue;
                int64_t common = 0;
                while (common < n && common < ends[i] && ids[common] == texts[i][common])
                    common++;
                best = common > best ? common : best;
            }
            if (best < ENG_CACHE_MIN_PREFIX)
                best = 0;
            eng_view v = {0};
            int64_t got = find(c, ids, n, exact_only, &v);
            ck_assert_int_eq(got, best);
            for (uint32_t i = 0; i < v.n_spans; i++) {
                ck_assert_uint_eq(v.spans[i].lo, i ? v.spans[i - 1].hi : 0);
                ck_assert(!exact_only || v.spans[i].seg->exact);
            }
            if (got) {
                ck_assert_uint_eq(v.spans[v.n_spans - 1].hi, (uint32_t)got);
                check_rows(&v, ids, (uint32_t)got);
            }
            eng_view_done(&v);
        }
        for (uint32_t i = 0; i < n_segs; i++)
            eng_segment_unref(segs[i]);
        eng_cache_free(c);
    }
}
END_TEST

/* Under any order of insertions and look-ups the budget holds, and what is in use stays. */
START_TEST(budget_and_pins)
{
    t_rng r = t_seed(5);
    int32_t ids[200];
    size_t one = eng_segment_bytes_for(&shape, 200), limit = (10 * one + one / 2) * 16 / 15; /* a sixteenth is for guests */
    eng_cache *c;
    ck_assert_int_eq(eng_cache_new(limit, &c), 0);
    eng_view used = {0};
    int32_t used_ids[200];
    for (int round = 0; round < 500; round++) {
        for (int i = 0; i < 200; i++)
            ids[i] = (int32_t)(t_u64(&r) % 1000);
        ids[0] = round;
        eng_segment *s = segment(NULL, 0, ids, 200, true);
        ck_assert(eng_cache_insert(c, s));
        eng_segment_unref(s);
        ck_assert_uint_le(eng_cache_info_get(c).bytes, limit);
        if (round % 50 == 0) { /* pin the newest, drop the last pin */
            eng_view_done(&used);
            memcpy(used_ids, ids, sizeof ids);
            ck_assert_int_eq(find(c, ids, 200, true, &used), 200);
        }
        eng_view again = {0};
        ck_assert_int_eq(find(c, used_ids, 200, true, &again), 200);
        eng_view_done(&again);
    }
    ck_assert_uint_eq(eng_cache_info_get(c).segments, 10);
    ck_assert_uint_eq(eng_cache_info_get(c).evictions, 490);
    eng_view_done(&used);

    /* too large for the budget: not kept, nothing lost beyond what had to go */
    eng_segment *big;
    ck_assert_int_eq(eng_segment_new(&shape, NULL, 0, 200 * 20, true, &big), 0);
    ck_assert(!eng_cache_insert(c, big));
    ck_assert_uint_le(eng_cache_info_get(c).bytes, limit);
    eng_segment_unref(big);
    eng_cache_free(c);
}
END_TEST

static void count_cut(void *ctx, eng_segment *s)
{
    uint32_t *n = ctx;
    *n += s->n;
}

/* Where parts are kept, what goes and what comes is cut to what fits: the first rows, as they were. */
START_TEST(in_part)
{
    enum { N = 1500 };
    int32_t a[N], b[N];
    uint32_t cut = 0;
    size_t one = eng_segment_bytes_for(&shape, N);
    eng_cache *c;
    ck_assert_int_eq(eng_cache_new(one * 7 / 4, &c), 0);
    eng_cache_keep_parts(c, count_cut, &cut);
    for (int i = 0; i < N; i++) {
        a[i] = i * 31 % 1009;
        b[i] = i * 17 % 1013 + 1;
    }
    eng_segment *sa = segment(NULL, 0, a, N, true), *sb = segment(NULL, 0, b, N, true);
    ck_assert(eng_cache_insert(c, sa));
    eng_segment_unref(sa);
    ck_assert(eng_cache_insert(c, sb)); /* cuts a */
    eng_view va = {0}, vb = {0};
    uint32_t n = find(c, a, N, true, &va);
    ck_assert(n == cut && n % 64 == 0 && n > N / 4 && n < N * 3 / 4);
    check_rows(&va, a, n);
    ck_assert_uint_eq(find(c, b, N, true, &vb), N);
    check_rows(&vb, b, N);
    ck_assert_uint_le(eng_cache_info_get(c).bytes, one * 7 / 4);
    eng_view_done(&va);
    eng_segment_unref(sb);
    sa = segment(NULL, 0, a, N, true); /* in another cache b is in use: a comes in part */
    eng_cache_free(c);
    ck_assert_int_eq(eng_cache_new(one * 7 / 4, &c), 0);
    eng_cache_keep_parts(c, count_cut, &cut);
    sb = vb.spans[0].seg;
    ck_assert(eng_cache_insert(c, sb));
    cut = 0;
    ck_assert(!eng_cache_insert(c, sa));
    n = find(c, a, N, true, &va);
    ck_assert(n == cut && n > N / 4 && n < N * 3 / 4);
    check_rows(&va, a, n);
    ck_assert_uint_le(eng_cache_info_get(c).bytes, one * 7 / 4);
    eng_view_done(&va);
    eng_view_done(&vb);
    eng_segment_unref(sa);
    eng_cache_free(c);
}
END_TEST

START_TEST(least_recently_used_first)
{
    int32_t ids[200] = {0};
    size_t one = eng_segment_bytes_for(&shape, 200);
    eng_cache *c;
    ck_assert_int_eq(eng_cache_new(3 * one * 16 / 15 + 1, &c), 0);
    for (int32_t i = 1; i <= 4; i++) {
        for (int j = 0; j < 200; j++)
            ids[j] = i;
        eng_segment *s = segment(NULL, 0, ids, 200, true);
        ck_assert(eng_cache_insert(c, s));
        eng_segment_unref(s);
        if (i == 3) { /* use 1 again: 2 is now the oldest */
            eng_view v = {0};
            for (int j = 0; j < 200; j++)
                ids[j] = 1;
            ck_assert_int_eq(find(c, ids, 200, true, &v), 200);
            eng_view_done(&v);
        }
    }
    for (int32_t i = 1; i <= 4; i++) {
        eng_view v = {0};
        for (int j = 0; j < 200; j++)
            ids[j] = i;
        ck_assert_int_eq(find(c, ids, 200, true, &v), i == 2 ? 0 : 200);
        eng_view_done(&v);
    }
    eng_cache_free(c);
}
END_TEST

/* A parent outlives its children, whatever their age. */
START_TEST(leaves_go_first)
{
    int32_t ids[200] = {0};
    size_t one = eng_segment_bytes_for(&shape, 100);
    eng_cache *c;
    ck_assert_int_eq(eng_cache_new(3 * one * 16 / 15 + 1, &c), 0);
    eng_segment *root = segment(NULL, 0, ids, 100, true), *leaf[4];
    ck_assert(eng_cache_insert(c, root));
    for (int32_t i = 0; i < 4; i++) {
        ids[100] = i + 1;
        leaf[i] = segment(root, 100, ids + 100, 100, true);
        ck_assert(eng_cache_insert(c, leaf[i]));
        eng_segment_unref(leaf[i]);
    }
    ck_assert_uint_eq(eng_cache_info_get(c).segments, 3);
    ck_assert(root->cached);
    eng_segment_unref(root);
    eng_cache_free(c);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("cache");
    TCase *c = tcase_create("cache");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, copy_and_shift);
    tcase_add_test(c, find_longest_prefix);
    tcase_add_test(c, budget_and_pins);
    tcase_add_test(c, in_part);
    tcase_add_test(c, least_recently_used_first);
    tcase_add_test(c, leaves_go_first);
    suite_add_tcase(s, c);
    return t_run(s);
}
