/* Named contexts, through sessions: what of them is in memory and on disk, and when it goes. */
#include "disks.h"

#include <errno.h>

/* A pinned context stays in memory whatever else is asked, and is there again after a restart, before anybody asks. A pin that goes holds nothing; a name that
 * expires takes its tokens along. */
START_TEST(pins)
{
    enum { N = 2000, BIG = 1 << 30 };
    empty_dir();
    eng_engine *e = open_disk(BIG, BIG);
    t_rng r = t_seed(35);
    int32_t texts[6][N], out[4];
    for (int i = 0; i < 6; i++)
        random_ids(e, &r, texts[i], N);
    answer(e, request(texts[0], N, ENG_ATTN_FULL), out, 4, NULL);
    rest(e);
    eng_stats st;
    eng_stats_get(e, &st);
    size_t budget = st.cache_bytes * 5 / 2;
    ck_assert_int_eq(name_it(e, "book", texts[0], N, true, 0), 0);
    ck_assert_int_eq(name_it(e, "other", texts[5], N, false, 0), 0);
    rest(e);
    eng_context_info i = named(e, "book");
    ck_assert(i.ram_tokens == N && i.disk_tokens == N && i.ram_bytes > 0 && i.disk_bytes > 0 && i.indexes == 1 && i.indexes_ready == 1);
    ck_assert(named(e, "other").ram_tokens == 0 && named(e, "other").disk_tokens == 0);
    eng_close(e);
    for (int unpinned = 0; unpinned < 3; unpinned++) {
        e = open_disk(budget, BIG);
        rest(e);
        ck_assert_uint_eq(named(e, "book").ram_tokens, unpinned ? 0 : N);
        for (int round = 0; round < 3; round++)
            for (int k = 1; k < 5; k++) {
                answer(e, request(texts[k], N, ENG_ATTN_FULL), out, 4, NULL);
                rest(e);
                eng_stats_get(e, &st);
                ck_assert_uint_le(st.cache_bytes, budget);
            }
        ck_assert_uint_gt(stats(e).hits, 0); /* these did not fit */
        ck_assert_uint_eq(named(e, "book").ram_tokens, unpinned ? 0 : N);
        eng_timings t = answer(e, request(texts[0], N, ENG_ATTN_FULL), out, 4, NULL);
        ck_assert_uint_eq(t.cache_n, unpinned < 2 ? N - 1 : 0); /* 2: it went with its name */
        ck_assert_uint_eq(t.disk_n, unpinned == 1 ? N - 1 : 0);
        eng_context_change change = {.set_pinned = true, .pinned = unpinned == 1, .set_ttl = true, .ttl = unpinned == 1 ? 50 : 0};
        char err[256];
        ck_assert_int_eq(eng_context_alter(e, 0, "book", &change, err, sizeof err), 0);
        if (unpinned == 1) { /* expires now */
            the_time += 50;
            eng_contexts_tick(e);
            rest(e);
            ck_assert_int_eq(name_it(e, "book", texts[0], N, false, 0), 0);
        }
        eng_close(e);
    }
    /* what the budget does not hold is refused, with numbers */
    e = open_disk(budget / 4, BIG);
    ck_assert_int_eq(name_it(e, "book", texts[0], N, true, 0), -ENOSPC);
    ck_assert_int_eq(name_it(e, "book", texts[0], N, false, 0), 0);
    eng_close(e);
}
END_TEST

static uint32_t cached_of(eng_engine *e, const int32_t *ids, size_t n)
{
    int32_t out[2];
    return answer(e, request(ids, n, ENG_ATTN_FULL), out, 2, NULL).cache_n;
}

static void remove_name(eng_engine *e, const char *name)
{
    ck_assert_int_eq(eng_context_remove(e, 0, name), 0);
}

/* What had a name is gone with it, from memory, from disk, and on the way there: no prompt finds it, and nothing holds bytes for it. What another name needs stays. */
START_TEST(removed_is_gone)
{
    enum { N = 2000, SHARED = 700, QUESTION = 300, BIG = 1 << 30 };
    static const struct {
        size_t ram;
        uint64_t disk;
    } tiers[] = {{BIG, BIG}, {BIG, 0}, {0, BIG}};
    t_rng r = t_seed(41);
    for (int k = 0; k < 3; k++) {
        empty_dir();
        eng_engine *e = tiers[k].disk ? open_disk(tiers[k].ram, tiers[k].disk) : open_tiny(tiers[k].ram, 2, false);
        int32_t a[N + QUESTION], b[N], other[N];
        random_ids(e, &r, a, N + QUESTION);
        random_ids(e, &r, other, N);
        memcpy(b, a, sizeof b);
        random_ids(e, &r, b + SHARED, N - SHARED);
        for (int resting = 0; resting < 2; resting++) { /* removed on the way to disk, and at rest */
            cached_of(e, a, N);
            cached_of(e, a, N + QUESTION); /* goes on from it, and has no name */
            cached_of(e, other, N);
            ck_assert_int_eq(name_it(e, "a", a, N, tiers[k].ram > 0, 0), 0);
            ck_assert_int_eq(name_it(e, "a2", a, N - 10, false, 0), 0);
            if (resting)
                rest(e);
            remove_name(e, "a");
            if (k < 2 || resting) /* a2 needs it */
                ck_assert_uint_eq(cached_of(e, a, N), N - 1);
            remove_name(e, "a2");
            if (!resting)
                ck_assert_uint_eq(cached_of(e, a, N), 0);
            rest(e);
            ck_assert_uint_eq(cached_of(e, other, N), N - 1);
            ck_assert_int_eq(name_it(e, "a", a, N, false, 0), 0); /* of what was read again just now, or of nothing */
            rest(e);
            remove_name(e, "a");
            ck_assert_uint_eq(cached_of(e, a, N + QUESTION), 0);
            ck_assert_int_eq(name_it(e, "a", a, N + QUESTION, false, 0), 0);
            remove_name(e, "a");
            ck_assert_int_eq(name_it(e, "other", other, N, false, 5), 0);
            rest(e);
            the_time += 5; /* expires: also where nothing else is asked */
            if (!tiers[k].disk) /* the system's clock */
                remove_name(e, "other");
            ck_assert(eng_contexts_tick(e));
            rest(e);
            ck_assert(!eng_contexts_tick(e));
            eng_stats st;
            eng_stats_get(e, &st);
            ck_assert_uint_eq(st.cache_bytes, 0);
            ck_assert_uint_eq(st.segments, 0);
            ck_assert_uint_eq(stats(e).bytes, 0);
            ck_assert_uint_eq(stats(e).segments, 0);
        }
        /* two names that begin alike: the one that goes leaves what the other continues */
        cached_of(e, a, N);
        ck_assert_int_eq(name_it(e, "a", a, N, false, 0), 0);
        ck_assert_int_eq(name_it(e, "b", b, N, false, 0), 0);
        cached_of(e, b, N);
        rest(e);
        remove_name(e, "b");
        ck_assert_uint_eq(cached_of(e, a, N), N - 1);
        ck_assert_uint_eq(cached_of(e, b, N), SHARED);
        eng_close(e);
    }
}
END_TEST

/* A history that grows from a pinned text, and is merged at rest: the text stays where it is, and each step goes on from all before it. */
START_TEST(pinned_history)
{
    enum { N = 1500, STEPS = 10, STEP = 90, OUT = 8, BIG = 1 << 30 };
    empty_dir();
    eng_engine *e = open_disk(BIG, BIG);
    t_rng r = t_seed(37);
    int32_t ids[N + STEPS * (STEP + OUT)];
    uint32_t n = N;
    random_ids(e, &r, ids, N);
    answer(e, request(ids, N, ENG_ATTN_AUTO), ids + N, OUT, NULL);
    ck_assert_int_eq(name_it(e, "book", ids, N, true, 0), 0);
    rest(e);
    for (int step = 0; step < STEPS - 1; step++) {
        random_ids(e, &r, ids + n + OUT, STEP);
        eng_timings t = answer(e, request(ids, n + OUT + STEP, ENG_ATTN_AUTO), ids + n + OUT + STEP, OUT, NULL);
        ck_assert_uint_eq(t.cache_n, n + OUT - 1);
        ck_assert_uint_eq(t.disk_n, 0);
        n += OUT + STEP;
        rest(e);
        ck_assert(named(e, "book").ram_tokens == N && named(e, "book").disk_tokens == N);
    }
    eng_close(e);
    e = open_disk(BIG, BIG);
    rest(e);
    ck_assert_uint_eq(named(e, "book").ram_tokens, N);
    eng_timings t = answer(e, request(ids, n + OUT, ENG_ATTN_AUTO), ids + n + OUT, OUT, NULL);
    ck_assert_uint_eq(t.cache_n, n + OUT - 1);
    eng_close(e);
}
END_TEST

static void add_tests(TCase *c)
{
    tcase_add_test(c, pins);
    tcase_add_test(c, removed_is_gone);
    tcase_add_test(c, pinned_history);
}

int main(void)
{
    return run_disk("disk_names", add_tests);
}
