/* Contexts on disk, through sessions: what a restart keeps, and that it changes no answer. */
#include "disks.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>

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
    enum { N = 2000, GROWS = 30, ROUNDS = 5, OUT = 8, MOST = N + ROUNDS * (GROWS + OUT) };
    t_rng r = t_seed(43);
    for (int percent = 150; percent <= 180; percent += 30) {
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
            ck_assert_msg(round < 4 || t.cache_n >= (uint32_t)(percent - 100) * N / 400, "%d %%, round %d: %u of %u tokens", percent, round, t.cache_n, n[i]);
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
    rest(e); /* room is for a context with its codes, which are built when there is time */
    random_ids(e, &r, other, N);
    for (int i = 0; i < 3; i++) {
        answer(e, request(other, N, ENG_ATTN_AUTO), other + N, OUT, NULL);
        rest(e);
    }
    eng_prefix_stop stop = stop_of(e, request(ids, N, ENG_ATTN_AUTO));
    ck_assert_msg(stop.why == ENG_MISS_EVICTED && stop.position > 0 && stop.position < N / 2, "%u: %s", stop.position, eng_miss_name(stop.why)); /* a part stays */
    eng_close(e);
}
END_TEST

static char largest[256];
static off_t largest_bytes;

static int note_largest(const char *path, const struct stat *st, int type, struct FTW *f)
{
    (void)f;
    if (type == FTW_F && strstr(path, ".seg") && st->st_size > largest_bytes) {
        snprintf(largest, sizeof largest, "%s", path);
        largest_bytes = st->st_size;
    }
    return 0;
}

/* Changes a bit in the middle of a section of the largest segment's file (engine/README.md: the table stands behind 256 bytes). */
static void damage(uint32_t section)
{
    enum { TABLE = 256, ENTRY = 32 };
    uint64_t place[2];
    uint8_t byte;
    largest_bytes = 0;
    nftw(dir, note_largest, 16, FTW_PHYS);
    int fd = open(largest, O_RDWR);
    ck_assert_int_eq(pread(fd, place, sizeof place, TABLE + section * ENTRY + 8), sizeof place);
    off_t at = (off_t)(place[0] + place[1] / 2);
    ck_assert_int_eq(pread(fd, &byte, 1, at), 1);
    byte ^= 4;
    ck_assert_int_eq(pwrite(fd, &byte, 1, at), 1);
    ck_assert_int_eq(close(fd), 0);
}

/* A file is read while the prompt is computed behind it. Keys that turn out to be damaged are computed again, damaged codes are made again, and either way the answer is the cold one,
 * is counted as what it was, and the context is there after the next restart. */
START_TEST(damaged_while_read)
{
    enum { BIG = 1 << 30, N = 2500, OUT = 30, KV = 1, CODES = 2 };
    int32_t ids[N + 600], want[OUT], got[OUT];
    float lw[VOCAB], lg[VOCAB];
    eng_stats st;
    uint64_t stops[ENG_MISS_COUNT];
    eng_engine *cold = open_tiny(0, 1, false);
    t_rng r = t_seed(41);
    random_ids(cold, &r, ids, N + 600);
    answer(cold, request(ids, N + 500, ENG_ATTN_FULL), want, OUT, lw);
    for (uint32_t section = KV; section <= CODES; section++) {
        empty_dir();
        eng_engine *e = open_disk(BIG, BIG);
        answer(e, request(ids, N, ENG_ATTN_AUTO), got, OUT, NULL);
        rest(e);
        eng_close(e);
        damage(section);
        e = open_disk(BIG, BIG);
        for (int round = 0; round < 3; round++) { /* damaged, from memory, from disk */
            eng_timings t = answer(e, request(ids, N + 500, ENG_ATTN_FULL), got, OUT, lg);
            bool again = round == 0 && section == KV;
            ck_assert_uint_eq(t.cache_n, again ? 0 : round ? N + 499 : N);
            ck_assert_uint_eq(t.disk_n > 0, round == 2 || (round == 0 && !again));
            ck_assert(!memcmp(got, want, sizeof want) && !memcmp(lg, lw, sizeof lw));
            ck_assert_uint_eq(stats(e).hits, round == 2 || (round == 1 && section == CODES) || (round == 0 && !again));
            ck_assert_uint_eq(stats(e).misses[ENG_MISS_CHECKSUM], round < 2);
            eng_stats_get(e, &st);
            ck_assert_uint_eq(st.hits + st.misses, round == 2 ? 1 : (uint64_t)round + 1);
            ck_assert_uint_eq(st.misses, round < 2 && section == KV);
            eng_prefix_stops(e, stops);
            ck_assert_uint_eq(stops[ENG_MISS_CHECKSUM], round < 2 && section == KV);
            rest(e);
            if (round == 1) {
                eng_close(e);
                e = open_disk(BIG, BIG);
            }
        }
        eng_stats_get(e, &st);
        ck_assert_uint_eq(st.index_pending, 0);
        eng_close(e);
    }
    eng_close(cold);
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

static eng_engine *open_mode(eng_attn_mode mode, size_t cache_ram)
{
    char err[256] = "";
    eng_params p = eng_params_default();
    p.n_ctx = CTX;
    p.n_threads = 2;
    p.cache_ram = cache_ram;
    p.index_modes = mode == ENG_ATTN_AUTO ? 0 : 1u << mode;
    eng_engine *e = t_open(t_path("golden/gguf/tiny-llama-q8_0.gguf"), &p);
    eng_disk_params d = {.dir = dir, .limit = (uint64_t)1 << 30, .now = test_clock};
    ck_assert_msg(eng_disk_open(e, &d, err, sizeof err) == 0, "%s", err);
    return e;
}

/* Whether a and b have searched the same index, and found the same. */
static bool same_search(const eng_timings *a, const eng_timings *b)
{
    return a->n_graph == b->n_graph && a->n_cluster == b->n_cluster && a->n_flat == b->n_flat && a->retrieved == b->retrieved && a->probed == b->probed &&
           a->estimated == b->estimated && a->keys_attended == b->keys_attended;
}

/* What is built beside codes is on disk, too: after a restart the same clusters or graphs are searched, with the same hits and logits, from memory and from a file
 * that is larger than that; in another mode's hands they are no harm. */
START_TEST(indexes_outlast)
{
    enum { BIG = 1 << 30, N = 4000, OUT = 12 };
    static const struct {
        eng_attn_mode mode;
        bool estimate;
    } cases[] = {{ENG_ATTN_CLUSTER, true}, {ENG_ATTN_CLUSTER, false}, {ENG_ATTN_IVF, true}, {ENG_ATTN_GRAPH, true}, {ENG_ATTN_GRAPH, false}};
    eng_attn_mode mode = cases[_i].mode;
    int32_t ids[N], want[OUT], out[OUT];
    float logits[VOCAB], again[VOCAB];
    t_rng r = t_seed(44);
    empty_dir();
    eng_engine *e = open_mode(mode, BIG);
    random_ids(e, &r, ids, N);
    eng_request q = request(ids, N, mode);
    q.max_tokens = OUT;
    q.attention.estimate = cases[_i].estimate;
    q.attention.top_k = 60;
    answer(e, q, want, 1, NULL);
    rest(e);
    eng_stats built, read;
    eng_stats_get(e, &built);
    eng_timings first = answer(e, q, want, OUT, logits);
    ck_assert_msg((mode == ENG_ATTN_GRAPH ? first.n_graph : first.n_cluster) > 0 && (first.n_flat == 0 || !q.attention.estimate), "%u %u %u", first.n_graph, first.n_cluster, first.n_flat);
    uint64_t saves = stats(e).saves;
    rest(e);
    ck_assert_uint_eq(stats(e).saves, saves + 2); /* the last answer alone: what is there is not written again */
    eng_close(e);
    for (int mapped = 0; mapped < 2; mapped++) {
        e = open_mode(ENG_ATTN_AUTO, mapped ? 100000 : BIG);
        ck_assert_uint_eq(answer(e, request(ids, N, ENG_ATTN_FULL), out, 1, NULL).disk_n, N - 1);
        eng_stats_get(e, &read);
        if (!mapped)
            ck_assert_uint_eq(read.index_bytes, built.index_bytes); /* what the budget counts */
        eng_timings t = answer(e, q, out, OUT, again);
        ck_assert_uint_eq(t.disk_n, mapped ? N - 1 : 0);
        ck_assert_msg(same_search(&t, &first), "graph %u, clusters %u, flat %u", t.n_graph, t.n_cluster, t.n_flat);
        ck_assert_int_eq(memcmp(out, want, sizeof out), 0);
        ck_assert_int_eq(memcmp(again, logits, sizeof again), 0);
        q.attention.mode = ENG_ATTN_FLAT;
        t = answer(e, q, out, OUT, NULL);
        ck_assert(t.n_flat > 0 && t.n_graph == 0 && t.n_cluster == 0);
        q.attention.mode = mode;
        eng_close(e);
    }
}
END_TEST

/* A graph comes long after codes: the context is on disk before, and with its graph then, in one file. */
START_TEST(written_again_with_graphs)
{
    enum { BIG = 1 << 30, N = 4000 };
    int32_t ids[N], out[2];
    t_rng r = t_seed(45);
    empty_dir();
    eng_engine *e = open_mode(ENG_ATTN_GRAPH, BIG);
    random_ids(e, &r, ids, N);
    answer(e, request(ids, N, ENG_ATTN_GRAPH), out, 1, NULL);
    eng_stats st;
    do {
        eng_idle(e, 1, NULL);
        eng_stats_get(e, &st);
    } while (stats(e).saves == 0 && st.index_pending);
    ck_assert_uint_gt(st.index_pending, 0);
    while (stats(e).saving)
        usleep(1000);
    uint64_t before = stats(e).bytes;
    uint32_t segments = stats(e).segments;
    rest(e);
    ck_assert_uint_ge(stats(e).segments, segments);
    ck_assert_uint_gt(stats(e).bytes, before + before / 5);
    eng_close(e);
    /* and a file that has none, written by a program that is told to end meanwhile, works as one */
    empty_dir();
    e = open_mode(ENG_ATTN_GRAPH, BIG);
    answer(e, request(ids, N, ENG_ATTN_GRAPH), out, 1, NULL);
    eng_close(e);
    e = open_mode(ENG_ATTN_GRAPH, BIG);
    eng_timings t = answer(e, request(ids, N, ENG_ATTN_GRAPH), out, 2, NULL);
    ck_assert(t.disk_n == N - 1 && t.n_graph == 0 && t.keys_attended <= t.keys_held);
    eng_close(e);
}
END_TEST

/* Queries that were kept for a merge are on disk, too: what was indexed before a restart and what comes after become one, with a graph. */
START_TEST(merged_after_a_restart)
{
    enum { BIG = 1 << 30, STEP = 1600, TURNS = 6, N = STEP * TURNS };
    int32_t ids[N], out[4];
    t_rng r = t_seed(46);
    eng_stats st;
    empty_dir();
    eng_engine *e = NULL;
    for (uint32_t n = STEP; n <= N; n += STEP) {
        e = open_mode(ENG_ATTN_GRAPH, BIG);
        if (n == STEP)
            random_ids(e, &r, ids, N);
        eng_timings t = answer(e, request(ids, n, ENG_ATTN_GRAPH), out, 1, NULL);
        ck_assert_msg(t.disk_n == n - STEP, "%u: %u of disk, %u kept", n, t.disk_n, t.cache_n);
        rest(e);
        eng_stats_get(e, &st);
        if (n < N)
            eng_close(e);
    }
    ck_assert(st.segments <= 4);
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

static void add_tests(TCase *c)
{
    tcase_add_test(c, restart_is_warm);
    tcase_add_test(c, conversations_go_on);
    tcase_add_test(c, small_budgets);
    tcase_add_test(c, half_in_memory);
    tcase_add_test(c, damaged_while_read);
    tcase_add_test(c, where_prefixes_stop);
    tcase_add_test(c, histories_merge);
    tcase_add_test(c, branches_stay);
    tcase_add_test(c, merged_graphs);
    tcase_add_loop_test(c, indexes_outlast, 0, 5);
    tcase_add_test(c, written_again_with_graphs);
    tcase_add_test(c, merged_after_a_restart);
    tcase_add_test(c, larger_than_memory);
}

int main(void)
{
    return run_disk("disk", add_tests);
}
