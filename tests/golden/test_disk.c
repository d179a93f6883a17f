/* Contexts on disk, through sessions: what a restart keeps, and that it changes no answer. */
#include "capture.h"
#include "contexts.h"
#include "sessions.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[] = "/tmp/retrievald-test.XXXXXX";

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *f)
{
    (void)st, (void)type, (void)f;
    return remove(path);
}

static void empty_dir(void)
{
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    ck_assert_int_eq(mkdir(dir, 0700), 0);
}

/* A clock of the test's. */
static int64_t the_time = 1000;

static int64_t test_clock(void *ctx)
{
    (void)ctx;
    return the_time;
}

static eng_engine *open_disk(size_t cache_ram, uint64_t limit)
{
    char err[256] = "";
    eng_engine *e = open_tiny(cache_ram, 2, false);
    eng_disk_params p = {.dir = dir, .limit = limit, .now = test_clock};
    ck_assert_msg(eng_disk_open(e, &p, err, sizeof err) == 0, "%s", err);
    return e;
}

static eng_disk_stats stats(const eng_engine *e)
{
    eng_disk_stats st;
    eng_disk_stats_get(e, &st);
    return st;
}

static void rest(eng_engine *e)
{
    while (eng_idle(e, 1000, NULL) || stats(e).saving)
        usleep(1000); /* the store thread's turn */
}

/* `full` after a restart gives the cold answer to the bit, from disk first and from memory then. */
START_TEST(restart_is_warm)
{
    enum { BIG = 1 << 30 };
    empty_dir();
    eng_engine *e = open_disk(BIG, BIG), *cold = open_tiny(0, 1, false);
    t_rng r = t_seed(31);
    int32_t ids[3000], a[30], b[30], first[30];
    float la[VOCAB], lb[VOCAB];
    random_ids(e, &r, ids, 3000);
    answer(e, request(ids, 2500, ENG_ATTN_AUTO), first, 30, NULL);
    ck_assert_uint_eq(stats(e).misses[ENG_MISS_ABSENT], 1);
    eng_close(e); /* writes all */
    e = open_disk(BIG, BIG);
    ck_assert_uint_gt(stats(e).bytes, 0);
    for (int round = 0; round < 3; round++) {
        static const size_t lengths[] = {2900, 2500, 2700};
        static const uint32_t shared[] = {2300, 2499, 1000};
        int32_t prompt[3000];
        memcpy(prompt, ids, sizeof ids);
        if (round != 1)
            prompt[shared[round]] = prompt[shared[round]] == 7 ? 8 : 7;
        eng_timings t = answer(e, request(prompt, lengths[round], ENG_ATTN_FULL), a, 30, la);
        ck_assert_uint_eq(t.cache_n, shared[round]);
        ck_assert_uint_eq(t.prompt_n, lengths[round] - shared[round]);
        ck_assert_uint_eq(t.disk_n > 0, round == 0);
        answer(cold, request(prompt, lengths[round], ENG_ATTN_FULL), b, 30, lb);
        ck_assert_int_eq(memcmp(a, b, sizeof a), 0);
        ck_assert_int_eq(memcmp(la, lb, sizeof la), 0);
    }
    ck_assert_uint_eq(stats(e).hits, 1);
    eng_close(e);
    eng_close(cold);
}
END_TEST

/* A conversation that goes on after a restart finds its answers, too, and the codes are there at once. */
START_TEST(conversations_go_on)
{
    enum { BIG = 1 << 30 };
    empty_dir();
    eng_engine *e = open_disk(BIG, BIG);
    t_rng r = t_seed(32);
    int32_t prompt[2700], out[30];
    random_ids(e, &r, prompt, 2700);
    answer(e, request(prompt, 2500, ENG_ATTN_FLAT), out, 30, NULL);
    rest(e);
    memcpy(prompt + 2500, out, sizeof out);
    for (int round = 0; round < 2; round++) { /* the second time without the RAM tier */
        eng_close(e);
        e = open_disk(round ? 0 : BIG, BIG);
        char err[256];
        eng_session *s;
        eng_request q = request(prompt, 2600, ENG_ATTN_FLAT);
        ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), 0);
        eng_stats st;
        eng_stats_get(e, &st);
        ck_assert_uint_eq(st.index_pending, 0);
        ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
        eng_timings t;
        eng_session_timings(s, &t);
        ck_assert_uint_eq(t.cache_n, round ? 2599 : 2529); /* the last token chosen was never computed */
        ck_assert_uint_eq(t.disk_n, t.cache_n);
        eng_session_close(s);
        rest(e);
    }
    eng_close(e);
}
END_TEST

/* Two conversations that alternate under a RAM budget for one and a half: both go on from what is kept. Budgets hold in both tiers. */
START_TEST(small_budgets)
{
    empty_dir();
    eng_engine *e = open_disk((size_t)1 << 30, (uint64_t)1 << 30);
    t_rng r = t_seed(33);
    int32_t texts[4][2000], out[8], want[4][8];
    for (int i = 0; i < 4; i++) {
        random_ids(e, &r, texts[i], 2000);
        if (i == 0)
            answer(e, request(texts[0], 2000, ENG_ATTN_FULL), want[0], 8, NULL);
    }
    rest(e);
    eng_stats st;
    eng_stats_get(e, &st);
    size_t budget = st.cache_bytes * 3 / 2;
    uint64_t disk = stats(e).bytes * 5 / 2;
    for (int i = 1; i < 4; i++)
        answer(e, request(texts[i], 2000, ENG_ATTN_FULL), want[i], 8, NULL);
    eng_close(e);
    e = open_disk(budget, disk);
    for (int round = 0; round < 12; round++) {
        int i = round < 6 ? round & 1 : (int)(t_u64(&r) % 4);
        eng_timings t = answer(e, request(texts[i], 2000, ENG_ATTN_FULL), out, 8, NULL);
        ck_assert_int_eq(memcmp(out, want[i], sizeof out), 0);
        ck_assert(round < 2 || round >= 6 || t.cache_n == 1999);
        rest(e);
        eng_stats_get(e, &st);
        ck_assert_uint_le(st.cache_bytes, budget);
        ck_assert_uint_le(stats(e).bytes, disk);
    }
    ck_assert_uint_gt(stats(e).hits, 4);
    ck_assert_uint_gt(stats(e).evictions, 0);
    eng_close(e);
}
END_TEST

/* The same with memory alone: each goes on from a part that stays, the answers are those of an engine that keeps nothing, and the budget holds after each step. */
START_TEST(half_in_memory)
{
    enum { N = 3000, GROWS = 30, ROUNDS = 8, OUT = 8, MOST = N + ROUNDS * (GROWS + OUT) };
    t_rng r = t_seed(43);
    for (int percent = 140; percent <= 180; percent += 20) {
        eng_engine *cold = open_tiny(0, 2, false), *e = open_tiny((size_t)1 << 30, 2, false);
        int32_t ids[2][MOST], want[OUT];
        uint32_t n[2] = {N, N};
        eng_stats st;
        for (int i = 0; i < 2; i++)
            random_ids(e, &r, ids[i], N);
        eng_request q = request(ids[0], N, ENG_ATTN_FULL);
        q.max_tokens = OUT;
        answer(e, q, want, OUT, NULL);
        rest(e);
        eng_stats_get(e, &st);
        eng_close(e);
        e = open_tiny(st.cache_bytes * (size_t)percent / 100, 2, false);
        for (int round = 0; round < 2 * ROUNDS; round++) {
            int i = round & 1;
            q = request(ids[i], n[i], ENG_ATTN_FULL);
            q.max_tokens = OUT;
            answer(cold, q, want, OUT, NULL);
            eng_timings t = answer(e, q, ids[i] + n[i], OUT, NULL);
            ck_assert_int_eq(memcmp(ids[i] + n[i], want, sizeof want), 0);
            ck_assert_msg(round < 6 || t.cache_n >= (uint32_t)(percent - 100) * N / 400, "%d %%, round %d: %u of %u tokens", percent, round, t.cache_n, n[i]);
            for (int resting = 0; resting < 2; resting++) {
                eng_stats_get(e, &st);
                ck_assert_uint_le(st.cache_bytes, st.cache_limit);
                rest(e);
            }
            n[i] += OUT;
            random_ids(e, &r, ids[i] + n[i], GROWS);
            n[i] += GROWS;
        }
        eng_close(e);
        eng_close(cold);
    }
}
END_TEST

/* Opens a session for its look-up alone. */
static eng_prefix_stop stop_of(eng_engine *e, eng_request q)
{
    char err[256];
    eng_session *s;
    ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), 0);
    eng_prefix_stop stop = eng_session_miss(s);
    eng_session_close(s);
    return stop;
}

static void check_stop(eng_engine *e, eng_request q, uint32_t position, eng_miss why)
{
    eng_prefix_stop stop = stop_of(e, q);
    ck_assert_msg(stop.position == position && stop.why == why, "prompt of %zu: stopped at %u: %s; expected %u: %s", q.n_ids, stop.position, eng_miss_name(stop.why), position,
                  eng_miss_name(why));
}

/* Where and why a prompt's kept prefix ends, from memory, from disk, and without either. */
START_TEST(where_prefixes_stop)
{
    enum { BIG = 1 << 30, N = 2500, OUT = 30 };
    empty_dir();
    eng_engine *e = open_disk(BIG, BIG);
    t_rng r = t_seed(36);
    int32_t ids[N + 600], other[N + 600];
    random_ids(e, &r, ids, N + 600);
    check_stop(e, request(ids, N, ENG_ATTN_AUTO), 0, ENG_MISS_ABSENT);
    answer(e, request(ids, N, ENG_ATTN_AUTO), ids + N, OUT, NULL);
    rest(e);
    eng_stats st;
    eng_stats_get(e, &st);
    size_t room = st.cache_bytes * 3 / 2; /* for one such context */
    for (int round = 0; round < 2; round++) { /* the second time from disk */
        check_stop(e, request(ids, N, ENG_ATTN_FULL), N - 1, ENG_MISS_NONE);
        check_stop(e, request(ids, N + 500, ENG_ATTN_AUTO), N + OUT - 1, ENG_MISS_END);
        check_stop(e, request(ids, N + 500, ENG_ATTN_FULL), N, ENG_MISS_INEXACT);
        memcpy(other, ids, sizeof ids);
        other[1777] = ids[1777] == 7 ? 8 : 7;
        check_stop(e, request(other, N, ENG_ATTN_AUTO), 1777, ENG_MISS_DIFFERS);
        other[40] = ids[40] == 7 ? 8 : 7;
        check_stop(e, request(other, N, ENG_ATTN_AUTO), 40, ENG_MISS_ABSENT);
        eng_request theirs = request(ids, N, ENG_ATTN_AUTO);
        theirs.tenant = 5;
        check_stop(e, theirs, 0, ENG_MISS_ABSENT);
        rest(e);
        eng_close(e);
        e = open_disk(BIG, BIG);
    }
    uint64_t stops[ENG_MISS_COUNT];
    check_stop(e, request(ids, 150, ENG_ATTN_AUTO), 149, ENG_MISS_SHORT); /* a small part of a file */
    check_stop(e, request(other, N, ENG_ATTN_AUTO), 40, ENG_MISS_ABSENT);
    eng_prefix_stops(e, stops);
    ck_assert(stops[ENG_MISS_SHORT] == 1 && stops[ENG_MISS_ABSENT] == 1 && stops[ENG_MISS_NONE] == 0);
    eng_close(e);
    e = open_tiny(room, 2, false);
    answer(e, request(ids, N, ENG_ATTN_AUTO), ids + N, OUT, NULL);
    random_ids(e, &r, other, N);
    for (int i = 0; i < 3; i++)
        answer(e, request(other, N, ENG_ATTN_AUTO), other + N, OUT, NULL);
    eng_prefix_stop stop = stop_of(e, request(ids, N, ENG_ATTN_AUTO));
    ck_assert(stop.why == ENG_MISS_EVICTED && stop.position > 0 && stop.position < N / 2); /* a part stays */
    eng_close(e);
}
END_TEST

static int name_it(eng_engine *e, const char *name, const int32_t *ids, size_t n, bool pinned, int64_t ttl)
{
    eng_context *c;
    char err[256];
    eng_context_params p = {.name = name, .pinned = pinned, .ttl = ttl, .replace = true, .content = {.ids = ids, .n_ids = n}};
    int r = eng_context_make(e, &p, &c, err, sizeof err);
    if (r == 0)
        eng_context_release(c);
    return r;
}

static eng_context_info named(eng_engine *e, const char *name)
{
    eng_context_info *all, one;
    ck_assert_int_eq(eng_context_list(e, 0, name, &all), 1);
    one = all[0];
    free(all);
    return one;
}

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

/* A history that grows by a few tokens a turn is kept in four segments at most, in memory and on disk, and goes on from all of it; in `full` mode, with the answers
 * of an engine that keeps nothing. */
static void grow(eng_attn_mode mode)
{
    enum { BIG = 1 << 30, FIRST = 1500, TURNS = 14, QUESTION = 70, OUT = 20 };
    empty_dir();
    eng_engine *e = open_disk(BIG, BIG), *cold = open_tiny(0, 2, false);
    t_rng r = t_seed(37);
    int32_t ids[FIRST + TURNS * (QUESTION + OUT)], want[OUT];
    eng_stats st;
    uint32_t n = FIRST;
    random_ids(e, &r, ids, FIRST);
    for (int turn = 0; turn < TURNS; turn++) {
        eng_timings t = answer(e, request(ids, n, mode), ids + n, OUT, NULL);
        uint32_t kept = n - QUESTION - (mode == ENG_ATTN_FULL ? OUT : 1); /* full: all but the last answer */
        ck_assert_uint_eq(t.cache_n, turn ? kept : 0);
        if (mode == ENG_ATTN_FULL) {
            answer(cold, request(ids, n, mode), want, OUT, NULL);
            ck_assert_int_eq(memcmp(ids + n, want, sizeof want), 0);
        }
        n += OUT;
        random_ids(e, &r, ids + n, QUESTION);
        n += QUESTION;
        rest(e);
        eng_stats_get(e, &st);
        ck_assert_uint_le(st.segments, mode == ENG_ATTN_FULL ? 6 : 4); /* full: and two decoded answers, branches that the next prompts do not take */
    }
    ck_assert_uint_ge(st.merges, 5);
    if (mode != ENG_ATTN_FULL)
        ck_assert_uint_eq(stats(e).segments, st.segments);
    eng_close(e);
    e = open_disk(BIG, BIG);
    eng_timings t = answer(e, request(ids, n, mode), want, OUT, NULL);
    ck_assert_uint_eq(t.cache_n, n - QUESTION - (mode == ENG_ATTN_FULL ? OUT : 1));
    ck_assert_uint_eq(t.disk_n, t.cache_n);
    ck_assert_uint_le(stats(e).loads, 4);
    eng_close(e);
    eng_close(cold);
}

START_TEST(histories_merge)
{
    grow(ENG_ATTN_AUTO);
    grow(ENG_ATTN_FULL);
}
END_TEST

static void truncate_files(void)
{
    char path[700], sub[300];
    for (int i = 0; i < 256; i++) {
        snprintf(sub, sizeof sub, "%s/segments/%02x", dir, i);
        DIR *d = opendir(sub);
        for (struct dirent *f; d && (f = readdir(d));) {
            snprintf(path, sizeof path, "%s/%s", sub, f->d_name);
            if (f->d_name[0] != '.')
                ck_assert_int_eq(truncate(path, 4096), 0);
        }
        if (d)
            closedir(d);
    }
}

/* A context larger than the RAM budget runs from its file, with the cold answer; a file that shrinks under it costs that request an error, and the next one its
 * tokens' reading. */
START_TEST(larger_than_memory)
{
    enum { BIG = 1 << 30, N = 3000, OUT = 20 };
    t_rng r = t_seed(40);
    eng_engine *cold = open_tiny(0, 2, false);
    int32_t ids[N], want[OUT], out[OUT];
    random_ids(cold, &r, ids, N);
    answer(cold, request(ids, N, ENG_ATTN_FULL), want, OUT, NULL);
    for (int round = 0; round < 3; round++) { /* the file shrinks: not; before the prefill; while it answers */
        empty_dir();
        eng_engine *e = open_disk(BIG, BIG);
        answer(e, request(ids, N, ENG_ATTN_FULL), out, 1, NULL);
        rest(e);
        eng_close(e);
        e = open_disk(100000, BIG);
        char err[256];
        eng_session *s;
        eng_token token;
        eng_request q = request(ids, N, ENG_ATTN_FULL);
        ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), 0);
        eng_timings t;
        if (round == 1)
            truncate_files();
        ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), round == 1 ? -EIO : 0);
        eng_session_timings(s, &t);
        ck_assert_uint_ge(t.disk_n, N - 1);
        for (int i = 0; i < OUT && round != 1; i++) {
            if (round == 2 && i == OUT / 2)
                truncate_files();
            ck_assert_int_eq(eng_session_next(s, &token), round == 2 && i >= OUT / 2 ? -EIO : 0);
            ck_assert(token.id == want[i] || (round == 2 && i >= OUT / 2));
        }
        eng_session_close(s);
        eng_stats st;
        eng_stats_get(e, &st);
        ck_assert_uint_le(st.cache_bytes, 100000);
        ck_assert(round == 0 || stats(e).misses[ENG_MISS_IO] > 0);
        t = answer(e, request(ids, N, ENG_ATTN_FULL), out, OUT, NULL);
        ck_assert_int_eq(memcmp(out, want, sizeof out), 0);
        ck_assert(round == 0 || t.cache_n < N / 2);
        eng_close(e);
    }
    eng_close(cold);
}
END_TEST

/* Where there are graphs, a merged segment gets one from the queries of its parts. */
START_TEST(merged_graphs)
{
    enum { STEP = 1600, TURNS = 6, N = STEP * TURNS };
    eng_params p = eng_params_default();
    p.n_ctx = CTX;
    p.n_threads = 2;
    p.index_modes = 1u << ENG_ATTN_GRAPH;
    eng_engine *e = t_open(t_path("golden/gguf/tiny-llama-q8_0.gguf"), &p);
    t_rng r = t_seed(39);
    int32_t ids[N], out[4];
    eng_stats st;
    random_ids(e, &r, ids, N);
    for (uint32_t n = STEP; n <= N; n += STEP) {
        answer(e, request(ids, n, ENG_ATTN_GRAPH), out, 1, NULL);
        rest(e);
    }
    eng_stats_get(e, &st);
    ck_assert(st.merges > 1 && st.segments <= 4 && st.index_pending == 0);
    eng_timings t = answer(e, request(ids, N, ENG_ATTN_GRAPH), out, 2, NULL);
    ck_assert_uint_eq(t.cache_n, N - 1);
    ck_assert_uint_gt(t.n_graph, t.n_flat); /* short segments have none */
    eng_close(e);
}
END_TEST

/* Another branch that leaves in the middle, and what a session uses, stay as they are. */
START_TEST(branches_stay)
{
    enum { BIG = 1 << 30, STEP = 100, N = 12 * STEP };
    empty_dir();
    eng_engine *e = open_disk(BIG, BIG);
    t_rng r = t_seed(38);
    int32_t ids[N], branch[N], out[4];
    random_ids(e, &r, ids, N);
    memcpy(branch, ids, sizeof ids);
    random_ids(e, &r, branch + 5 * STEP, N - 5 * STEP);
    eng_session *s;
    char err[256];
    for (uint32_t n = STEP; n <= N; n += STEP) {
        eng_request q = request(ids, n, ENG_ATTN_AUTO), b = request(branch, n, ENG_ATTN_AUTO);
        ck_assert_uint_eq(answer(e, q, out, 1, NULL).cache_n, n - STEP);
        if (n > 5 * STEP)
            ck_assert_uint_eq(answer(e, b, out, 1, NULL).cache_n, n - STEP);
        ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), 0);
        ck_assert_int_eq(eng_idle(e, 1000, NULL), 0); /* no merge under a session */
        eng_session_close(s);
        rest(e);
    }
    ck_assert_uint_eq(answer(e, request(ids, N, ENG_ATTN_AUTO), out, 1, NULL).cache_n, N - 1);
    ck_assert_uint_eq(answer(e, request(branch, N, ENG_ATTN_AUTO), out, 1, NULL).cache_n, N - 1);
    eng_stats st;
    eng_stats_get(e, &st);
    ck_assert(st.merges > 3 && st.segments <= 8);
    eng_close(e);
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

/* Damages one file, the catalog, or nothing. */
static void damage(t_rng *r)
{
    char path[700], sub[300];
    uint32_t n_files = 0, at;
    if (t_u64(r) % 4 == 0) {
        snprintf(path, sizeof path, "%s/catalog.db", dir);
        unlink(path);
    }
    for (int pass = 0; pass < 2; pass++) {
        at = pass ? (uint32_t)(t_u64(r) % (n_files ? n_files : 1)) : UINT32_MAX;
        for (int i = 0; i < 256; i++) {
            snprintf(sub, sizeof sub, "%s/segments/%02x", dir, i);
            DIR *d = opendir(sub);
            for (struct dirent *f; d && (f = readdir(d));) {
                if (f->d_name[0] == '.')
                    continue;
                n_files += !pass;
                if (!pass || at--)
                    continue;
                struct stat st;
                snprintf(path, sizeof path, "%s/%s", sub, f->d_name);
                int fd = open(path, O_RDWR);
                ck_assert(fd >= 0 && fstat(fd, &st) == 0);
                uint8_t bytes[64];
                for (size_t k = 0; k < sizeof bytes; k++)
                    bytes[k] = (uint8_t)t_u64(r);
                if (t_u64(r) % 4 == 0)
                    ck_assert_int_eq(ftruncate(fd, (off_t)(t_u64(r) % (uint64_t)st.st_size)), 0);
                else
                    ck_assert_int_eq(pwrite(fd, bytes, sizeof bytes, (off_t)(t_u64(r) % (uint64_t)(st.st_size - 64))), (ssize_t)sizeof bytes);
                close(fd);
            }
            if (d)
                closedir(d);
        }
    }
}

typedef struct {
    atomic_bool cancel;
    uint32_t at;
} canceler;

static void cancel_at(void *ctx, uint32_t done, uint32_t cached, uint32_t total)
{
    canceler *c = ctx;
    (void)cached, (void)total;
    if (done >= c->at)
        atomic_store(&c->cancel, true);
}

enum { MAX_DIM = 128 };

/* The first layer's value of each token, which depends on nothing but the token: so rows tell whose they are. */
static float values_of[VOCAB][MAX_DIM];

static void learn_values(eng_engine *cold)
{
    const eng_info *info = eng_info_get(cold);
    int32_t ids[VOCAB];
    char err[256];
    eng_session *s;
    static float rows[VOCAB * MAX_DIM];
    for (int i = 0; i < VOCAB; i++)
        ids[i] = i;
    ck_assert_uint_le(info->head_dim, MAX_DIM);
    eng_request q = request(ids, VOCAB, ENG_ATTN_FULL);
    ck_assert_int_eq(eng_session_open(cold, &q, &s, err, sizeof err), 0);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    ck_assert_int_eq(eng_session_rows(s, 0, 0, true, VOCAB, rows), 0);
    for (int i = 0; i < VOCAB; i++)
        memcpy(values_of[i], rows + i * info->head_dim, info->head_dim * sizeof(float));
    eng_session_close(s);
}

/* Every token that the session sees is one of this conversation's: no other token has a value nearer to its row. */
static void check_values(const eng_engine *e, const eng_session *s, const int32_t *ids, uint32_t n)
{
    const eng_info *info = eng_info_get(e);
    float *rows = malloc((size_t)n * info->head_dim * sizeof *rows);
    ck_assert_int_eq(eng_session_rows(s, 0, 0, true, n, rows), 0);
    for (uint32_t i = 0; i < n; i++) {
        float best = INFINITY;
        int32_t nearest = -1;
        for (int32_t t = 0; t < VOCAB; t++) {
            float sum = 0;
            for (uint32_t k = 0; k < info->head_dim; k++)
                sum += (rows[i * info->head_dim + k] - values_of[t][k]) * (rows[i * info->head_dim + k] - values_of[t][k]);
            nearest = sum < best ? t : nearest;
            best = sum < best ? sum : best;
        }
        ck_assert_msg(nearest == ids[i], "token %u is %d, and its row that of %d", i, ids[i], nearest);
    }
    free(rows);
}

/* Answers, and looks at what it was answered from. */
static uint32_t checked_answer(eng_engine *e, eng_request q, int32_t *out, uint32_t n_out)
{
    char err[256];
    eng_session *s;
    eng_timings t;
    int32_t *all = malloc((q.n_ids + n_out) * sizeof *all);
    memcpy(all, q.ids, q.n_ids * sizeof *all);
    ck_assert_msg(eng_session_open(e, &q, &s, err, sizeof err) == 0, "%s", err);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    for (uint32_t i = 0; i < n_out; i++) {
        eng_token tok;
        ck_assert_int_eq(eng_session_next(s, &tok), 0);
        all[q.n_ids + i] = out[i] = tok.id;
    }
    check_values(e, s, all, (uint32_t)q.n_ids + n_out - 1); /* the last one is not computed */
    eng_session_timings(s, &t);
    eng_session_close(s);
    free(all);
    return t.cache_n;
}

/* Whatever was asked before, cancelled, evicted, lost or damaged: an answer is computed from its own conversation's tokens, and in `full` mode it is that of an engine
 * that keeps nothing. */
START_TEST(any_history)
{
    enum { TEXTS = 4, N = 1600, STEPS = 120 };
    empty_dir();
    t_rng r = t_seed(34);
    eng_engine *cold = open_tiny(0, 2, false), *e = NULL;
    int32_t texts[TEXTS][N];
    uint64_t disk_hits = 0, files_missed = 0, cached = 0;
    learn_values(cold);
    for (int i = 0; i < TEXTS; i++) {
        random_ids(cold, &r, texts[i], N);
        if (i) /* shares a beginning with the one before */
            memcpy(texts[i], texts[i - 1], (300 * (size_t)i) * sizeof(int32_t));
    }
    for (int step = 0; step < STEPS; step++) {
        if (!e)
            e = open_disk((size_t[]){0, 300000, 900000}[t_u64(&r) % 3], (uint64_t[]){400000, 900000, 4000000}[t_u64(&r) % 3]);
        int32_t prompt[N], out[6], want[6];
        uint32_t n = 200 + (uint32_t)(t_u64(&r) % (N - 200));
        memcpy(prompt, texts[t_u64(&r) % TEXTS], sizeof prompt);
        if (t_u64(&r) % 3 == 0) /* an edit */
            random_ids(cold, &r, prompt + t_u64(&r) % n, 1);
        bool full = t_u64(&r) % 3 != 0;
        eng_request q = request(prompt, n, full ? ENG_ATTN_FULL : ENG_ATTN_AUTO);
        q.max_tokens = 6;
        if (t_u64(&r) % 5 == 0) {
            canceler c = {.at = (uint32_t)(t_u64(&r) % n)};
            char err[256];
            eng_session *s;
            q.cancel = &c.cancel;
            ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), 0);
            eng_session_prefill(s, cancel_at, &c);
            eng_session_close(s);
        } else {
            cached += checked_answer(e, q, out, 6);
            if (full) {
                answer(cold, q, want, 6, NULL);
                ck_assert_msg(!memcmp(out, want, sizeof out), "step %d: another answer", step);
            } else {
                random_ids(cold, &r, texts[t_u64(&r) % TEXTS] + N - 100, 100);
            }
        }
        if (t_u64(&r) % 3 == 0) { /* names hold and let go of what they like */
            char name[2] = {(char)('a' + t_u64(&r) % 3), 0};
            int named = t_u64(&r) % 3 ? name_it(e, name, prompt, n, t_u64(&r) % 2, (int64_t)(t_u64(&r) % 3)) : eng_context_remove(e, 0, name);
            ck_assert(named == 0 || named == -ENOSPC || named == -ENOENT || named == -ESTALE);
            the_time += (int64_t)(t_u64(&r) % 2);
            eng_contexts_tick(e);
        }
        if (t_u64(&r) % 3 == 0)
            rest(e);
        if (t_u64(&r) % 3 == 0) {
            eng_disk_stats st = stats(e);
            ck_assert_uint_le(st.bytes, st.limit);
            disk_hits += st.hits;
            for (int i = ENG_MISS_GONE; i < ENG_MISS_COUNT; i++)
                files_missed += st.misses[i];
            eng_close(e);
            e = NULL;
            if (t_u64(&r) % 2)
                damage(&r);
        }
    }
    eng_close(e);
    eng_close(cold);
    printf("any_history: %llu hits on disk, %llu files missed, %llu tokens cached\n", (unsigned long long)disk_hits, (unsigned long long)files_missed,
           (unsigned long long)cached);
    ck_assert_uint_gt(disk_hits, 10);
    ck_assert_uint_gt(files_missed, 3);
    ck_assert_uint_gt(cached, 10000);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("disk");
    TCase *c = tcase_create("disk");
    if (!mkdtemp(dir))
        return 1;
    tcase_set_timeout(c, 0);
    tcase_add_test(c, restart_is_warm);
    tcase_add_test(c, conversations_go_on);
    tcase_add_test(c, small_budgets);
    tcase_add_test(c, half_in_memory);
    tcase_add_test(c, where_prefixes_stop);
    tcase_add_test(c, histories_merge);
    tcase_add_test(c, branches_stay);
    tcase_add_test(c, merged_graphs);
    tcase_add_test(c, larger_than_memory);
    tcase_add_test(c, pins);
    tcase_add_test(c, removed_is_gone);
    tcase_add_test(c, pinned_history);
    tcase_add_test(c, any_history);
    suite_add_tcase(s, c);
    int status = t_run(s);
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return status;
}
