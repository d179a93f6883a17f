/* Named contexts: who may have which name and until when, with a clock of the test's; budgets; what the catalog keeps, what the disk keeps for them. */
#include "stores.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>

static int64_t the_time;

static int64_t test_clock(void *ctx)
{
    (void)ctx;
    return the_time;
}

static eng_names *names_in_memory(uint64_t ram, uint64_t disk)
{
    eng_names *n;
    eng_names_budget b = {.ram_limit = ram, .disk_limit = disk, .token_bytes = 10};
    ck_assert_int_eq(eng_names_new(MODEL, &n), 0);
    eng_names_setup(n, &b, test_clock, NULL, NULL, NULL);
    return n;
}

static void count_ids(int32_t *ids, uint32_t n, int32_t from)
{
    for (uint32_t i = 0; i < n; i++)
        ids[i] = from + (int32_t)i;
}

static eng_context_params params(const char *name, const int32_t *ids, size_t n)
{
    return (eng_context_params){.name = name, .content = {.kind = ENG_SOURCE_TEXT, .source = "the text", .source_len = 8, .rendered = 5, .ids = ids, .n_ids = n}};
}

static int try_make(eng_names *n, eng_context_params p, char err[256])
{
    eng_context *c;
    int r = eng_names_make(n, &p, &c, err, 256);
    if (r == 0)
        eng_context_release(c);
    return r;
}

static void make(eng_names *n, eng_context_params p)
{
    char err[256] = "";
    ck_assert_msg(try_make(n, p, err) == 0, "%s: %s", p.name, err);
}

static int find(eng_names *n, uint64_t tenant, const char *name)
{
    eng_context *c;
    int r = eng_names_use(n, tenant, name, &c);
    if (r == 0)
        eng_context_release(c);
    return r;
}

static eng_context_info info(eng_names *n, const char *name)
{
    eng_context_info *all, one;
    ck_assert_int_eq(eng_names_list(n, 0, name, NULL, NULL, &all), 1);
    one = all[0];
    free(all);
    return one;
}

static int alter(eng_names *n, const char *name, eng_context_change change)
{
    char err[256];
    return eng_names_alter(n, 0, name, &change, err, sizeof err);
}

START_TEST(who_has_a_name)
{
    static const char *const bad[] = {"", ".", "..", "-x", "_x", "a b", "a/b", "a%62", "\xc3\xa9", "12345678901234567890123456789012345678901234567890123456789012345"};
    static const char *const good[] = {"a", "0", "A.b-c_9", "1234567890123456789012345678901234567890123456789012345678901234"};
    eng_names *n = names_in_memory(1 << 20, 0);
    int32_t ids[100];
    char err[256];
    count_ids(ids, 100, 1);
    the_time = 1000;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        ck_assert_int_eq(try_make(n, params(bad[i], ids, 100), err), -EINVAL);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        make(n, params(good[i], ids, 100));
    ck_assert_int_eq(try_make(n, params("a", ids, 50), err), -EEXIST);
    ck_assert_ptr_nonnull(strstr(err, "named a "));
    eng_context_params p = params("a", ids, 50);
    p.tenant = 7; /* another one's names are free, and not there */
    make(n, p);
    ck_assert_int_eq(find(n, 7, "a"), 0);
    ck_assert_int_eq(find(n, 7, "0"), -ENOENT);
    ck_assert_int_eq(eng_names_remove(n, 7, "0"), -ENOENT);
    p.tenant = 0;
    p.replace = true;
    make(n, p);
    ck_assert_uint_eq(info(n, "a").tokens, 50);
    eng_context *c;
    ck_assert_int_eq(eng_names_use(n, 0, "a", &c), 0);
    const eng_context_content *k = eng_context_get(c);
    ck_assert(k->kind == ENG_SOURCE_TEXT && k->rendered == 5 && k->source_len == 8 && !strcmp(k->source, "the text"));
    ck_assert(k->n_ids == 50 && !memcmp(k->ids, ids, 50 * sizeof *ids));
    ck_assert_int_eq(eng_names_remove(n, 0, "a"), 0);
    ck_assert_int_eq(find(n, 0, "a"), -ENOENT);
    ck_assert_int_eq(k->ids[49], 50); /* still there for whoever uses it */
    eng_context_release(c);
    /* to another name, which is free then and was not before */
    ck_assert_int_eq(alter(n, "0", (eng_context_change){.name = "A.b-c_9"}), -EEXIST);
    ck_assert_int_eq(alter(n, "0", (eng_context_change){.name = "a b"}), -EINVAL);
    ck_assert_int_eq(alter(n, "0", (eng_context_change){.name = "a"}), 0);
    ck_assert_int_eq(find(n, 0, "0"), -ENOENT);
    ck_assert_int_eq(find(n, 0, "a"), 0);
    eng_context_info *all;
    ck_assert_int_eq(eng_names_list(n, 0, NULL, NULL, NULL, &all), 3);
    free(all);
    eng_names_free(n);
}
END_TEST

START_TEST(to_the_second)
{
    eng_names *n = names_in_memory(1 << 20, 0);
    int32_t ids[100];
    char err[256];
    count_ids(ids, 100, 1);
    the_time = 5000;
    eng_context_params p = params("hour", ids, 100);
    p.ttl = 3600;
    make(n, p);
    p.name = "ever";
    p.ttl = 0;
    make(n, p);
    p.name = "long";
    p.ttl = -1;
    ck_assert_int_eq(try_make(n, p, err), -EINVAL);
    p.ttl = INT64_MAX;
    ck_assert_int_eq(try_make(n, p, err), -EINVAL);
    ck_assert_int_eq(info(n, "hour").expires, 8600);
    ck_assert_int_eq(info(n, "ever").expires, 0);
    the_time = 8599;
    ck_assert_int_eq(find(n, 0, "hour"), 0);
    ck_assert_int_eq(info(n, "hour").used, 8599);
    ck_assert_uint_eq(info(n, "hour").hits, 1);
    the_time = 8600;
    ck_assert_int_eq(find(n, 0, "hour"), -ESTALE);
    ck_assert_int_eq(alter(n, "hour", (eng_context_change){.set_ttl = true, .ttl = 10}), -ESTALE); /* it does not come back */
    eng_names_tick(n);
    ck_assert_int_eq(find(n, 0, "hour"), -ESTALE); /* and is not forgotten at once */
    ck_assert_int_eq(find(n, 0, "never-was"), -ENOENT);
    p.name = "hour";
    p.ttl = 1;
    make(n, p);
    ck_assert_int_eq(find(n, 0, "hour"), 0);
    ck_assert_int_eq(alter(n, "hour", (eng_context_change){.set_ttl = true, .ttl = 100}), 0);
    the_time += 99;
    ck_assert_int_eq(alter(n, "hour", (eng_context_change){.set_ttl = true, .ttl = 0}), 0); /* for ever */
    the_time += 1000000;
    ck_assert_int_eq(find(n, 0, "hour"), 0);
    ck_assert_int_eq(find(n, 0, "ever"), 0);
    eng_names_free(n);
}
END_TEST

/* A budget counts what begins alike once, as the tiers keep it once: against a set of all prefixes. */
START_TEST(budgets)
{
    enum { MAX = 40, N = 60, ROUNDS = 600 };
    static uint64_t prefixes[MAX * N];
    int32_t ids[MAX][N];
    uint32_t length[MAX];
    bool pinned[MAX] = {false}, there[MAX] = {false};
    t_rng r = t_seed(61);
    eng_names *n = names_in_memory(4000, 9000);
    uint32_t refused = 0, pins_refused = 0;
    the_time = 0;
    for (int i = 0; i < MAX; i++) {
        length[i] = 20 + (uint32_t)(t_u64(&r) % (N - 20));
        for (int j = 0; j < N; j++)
            ids[i][j] = i && j < 30 && t_u64(&r) % 16 ? ids[i / 2][j] : (int32_t)(t_u64(&r) % 3);
    }
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t i = (uint32_t)(t_u64(&r) % MAX);
        char name[16], err[256] = "";
        bool before = there[i], was_pinned = pinned[i], pin = t_u64(&r) & 1;
        snprintf(name, sizeof name, "n%u", i);
        if (before && t_u64(&r) % 3 == 0) {
            ck_assert_int_eq(eng_names_remove(n, 0, name), 0);
            there[i] = false;
            continue;
        }
        there[i] = true;
        pinned[i] = pin;
        uint64_t tokens[2] = {0, 0};
        for (int pins = 0; pins < 2; pins++)
            for (uint32_t k = 0; k < MAX; k++)
                for (uint32_t j = 0; there[k] && (!pins || pinned[k]) && j < length[k]; j++) {
                    uint64_t h = 1469598103934665603u;
                    for (uint32_t x = 0; x <= j; x++)
                        h = (h ^ (uint64_t)ids[k][x]) * 1099511628211u;
                    uint64_t m = 0;
                    while (m < tokens[pins] && prefixes[m] != h)
                        m++;
                    prefixes[m] = h;
                    tokens[pins] += m == tokens[pins];
                }
        bool fits = tokens[0] * 10 <= 9000 && (!pin || tokens[1] * 10 <= 4000);
        int got;
        if (before) {
            got = alter(n, name, (eng_context_change){.set_pinned = true, .pinned = pin});
            fits = !pin || was_pinned || tokens[1] * 10 <= 4000;
        } else {
            eng_context_params p = params(name, ids[i], length[i]);
            p.pinned = pin;
            got = try_make(n, p, err);
        }
        ck_assert_msg(got == (fits ? 0 : -ENOSPC), "round %d: %d, %s", round, got, err);
        if (got) {
            there[i] = before;
            pinned[i] = was_pinned;
            refused++;
            pins_refused += strstr(err, "--cache-ram") && strstr(err, "pinned");
        }
    }
    ck_assert_uint_gt(pins_refused, 10);
    ck_assert_uint_gt(refused, pins_refused + 10);
    eng_names_free(n);
}
END_TEST

START_TEST(not_too_many)
{
    eng_names *n = names_in_memory(1 << 20, 0);
    int32_t id = 5;
    char err[256], name[16];
    for (int i = 0; i < ENG_NAMES_MAX; i++) {
        snprintf(name, sizeof name, "n%d", i);
        make(n, params(name, &id, 1));
    }
    ck_assert_int_eq(try_make(n, params("more", &id, 1), err), -ENOSPC);
    ck_assert_ptr_nonnull(strstr(err, "1024"));
    eng_context_params p = params("n5", &id, 1);
    p.replace = true;
    make(n, p);
    ck_assert_int_eq(eng_names_remove(n, 0, "n7"), 0);
    make(n, params("more", &id, 1));
    eng_names_free(n);
}
END_TEST

/* ---- with a store ------------------------------------------------------------------------------------------------ */

enum { N = 300 };

static void save_text(t_store *t, const int32_t *ids, uint32_t n)
{
    eng_segment *s = segment(NULL, 0, ids, n, true);
    ck_assert_int_eq(eng_store_save(t->store, s), 0);
    eng_store_flush(t->store);
    eng_segment_unref(s);
}

static void open_with_names(t_store *t, uint64_t limit)
{
    *t = t_store_new(limit);
    t->with_names = true;
    t_store_open(t, limit);
}

static uint64_t file_bytes(const int32_t *ids)
{
    eng_segment_owner owner = {.shape = &shape};
    eng_segment *s = segment(NULL, 0, ids, N, true);
    uint64_t bytes = eng_segment_head_of(&owner, s, 0).bytes;
    eng_segment_unref(s);
    return bytes;
}

/* What a restart keeps of a name: all of it; what a damaged catalog keeps: likewise, if its row can still be read; a lost one nothing. */
START_TEST(survives_a_restart)
{
    enum { BIG = 1 << 30 };
    t_store t;
    open_with_names(&t, BIG);
    int32_t ids[N];
    count_ids(ids, N, 7);
    eng_context_params p = params("book", ids, N);
    p.ttl = 500;
    p.pinned = true;
    make(t.names, p);
    p = params("other", ids, 100);
    p.content.kind = ENG_SOURCE_TOKENS;
    p.content.source_len = 0;
    make(t.names, p);
    make(t.names, params("third", ids, 3));
    ck_assert_int_eq(alter(t.names, "other", (eng_context_change){.name = "renamed", .set_pinned = true, .pinned = true}), 0);
    ck_assert_int_eq(eng_names_remove(t.names, 0, "third"), 0);
    ck_assert_int_eq(find(t.names, 0, "book"), 0);
    char path[128];
    snprintf(path, sizeof path, "%s/catalog.db", t.dir);
    for (int round = 0; round < 4; round++) {
        eng_store_close(t.store);
        t.store = NULL;
        if (round == 2) { /* a segment's row that makes no sense; names are not concerned */
            eng_catalog *c;
            bool is_new;
            char err[256];
            ck_assert_int_eq(eng_catalog_open(path, false, &c, &is_new, err, sizeof err), 0);
            eng_catalog_row row = {.head = {.id.b = {1}, .parent.b = {2}, .start = 5, .n = N}, .ids = ids};
            ck_assert_int_eq(eng_catalog_put(c, &row), 0);
            eng_catalog_close(c);
        }
        if (round == 3)
            ck_assert_int_eq(unlink(path), 0);
        t_store_open(&t, BIG);
        eng_context_info *all;
        ck_assert_int_eq(eng_names_list(t.names, 0, NULL, NULL, NULL, &all), round < 3 ? 2 : 0);
        if (round < 3) {
            ck_assert(!strcmp(all[0].name, "book") && all[0].tokens == N && all[0].pinned && all[0].created == 1000000 && all[0].expires == 1000500);
            ck_assert(all[0].hits == 1 && all[0].used == 1000000 && all[0].state == ENG_CONTEXT_READY && all[0].kind == ENG_SOURCE_TEXT);
            ck_assert(!strcmp(all[1].name, "renamed") && all[1].tokens == 100 && all[1].pinned && !all[1].expires && all[1].kind == ENG_SOURCE_TOKENS);
            eng_context *c;
            ck_assert_int_eq(eng_names_use(t.names, 0, "renamed", &c), 0);
            const eng_context_content *k = eng_context_get(c);
            ck_assert(k->n_ids == 100 && !memcmp(k->ids, ids, 100 * sizeof *ids) && k->source_len == 0 && k->rendered == 5);
            eng_context_release(c);
        }
        free(all);
    }
    t_store_done(&t);
}
END_TEST

/* Bytes anywhere in the catalog change: what is there after that is right. */
START_TEST(damaged_catalog)
{
    enum { BIG = 1 << 30, MANY = 30 };
    t_rng r = t_seed(62);
    t_store t;
    open_with_names(&t, BIG);
    int32_t ids[MANY * 50];
    uint32_t kept = 0;
    count_ids(ids, MANY * 50, 3);
    for (int round = 0; round < 30; round++) {
        char path[128], name[16];
        for (int i = 0; i < MANY; i++) {
            snprintf(name, sizeof name, "n%d", i);
            eng_context_params p = params(name, ids + i, 50 * (size_t)(i + 1) - (size_t)i);
            p.replace = true;
            make(t.names, p);
        }
        eng_store_close(t.store);
        t.store = NULL;
        snprintf(path, sizeof path, "%s/catalog.db", t.dir);
        size_t n;
        char *bytes = t_read(path, &n);
        for (int i = 0; i < 20; i++)
            bytes[t_u64(&r) % n] ^= (char)(1 << t_u64(&r) % 8);
        int fd = open(path, O_WRONLY | O_TRUNC);
        ck_assert_int_eq(write(fd, bytes, n), (ssize_t)n);
        close(fd);
        free(bytes);
        t_store_open(&t, BIG);
        for (int i = 0; i < MANY; i++) {
            eng_context *c;
            snprintf(name, sizeof name, "n%d", i);
            if (eng_names_use(t.names, 0, name, &c))
                continue;
            kept++;
            const eng_context_content *k = eng_context_get(c);
            ck_assert_uint_eq(k->n_ids, 50 * (size_t)(i + 1) - (size_t)i);
            ck_assert_int_eq(memcmp(k->ids, ids + i, k->n_ids * sizeof *ids), 0);
            eng_context_release(c);
        }
    }
    printf("damaged_catalog: %u of %d names kept\n", kept, 30 * MANY);
    ck_assert_uint_gt(kept, MANY);
    t_store_done(&t);
}
END_TEST

/* What has a name is not evicted; what had one is. */
START_TEST(names_hold_segments)
{
    int32_t texts[12][N];
    for (int i = 0; i < 12; i++)
        count_ids(texts[i], N, 1000 * i);
    uint64_t one = file_bytes(texts[0]), limit = 4 * one + one / 2;
    t_store t;
    open_with_names(&t, limit);
    save_text(&t, texts[0], N);
    save_text(&t, texts[1], N);
    eng_context_params p = params("for-ever", texts[0], N);
    make(t.names, p);
    p = params("a-while", texts[1], N - 50); /* the segment goes on beyond it */
    p.ttl = 100;
    make(t.names, p);
    for (int i = 2; i < 8; i++)
        save_text(&t, texts[i], N);
    ck_assert_uint_eq(t_store_read(&t, texts[0], N, true), N);
    ck_assert_uint_eq(t_store_read(&t, texts[1], N, true), N);
    ck_assert_uint_eq(t_store_read(&t, texts[5], N, true), 0);
    t_store_reopen(&t, limit); /* also after a restart */
    for (int i = 8; i < 11; i++)
        save_text(&t, texts[i], N);
    ck_assert_uint_eq(t_store_read(&t, texts[0], N, true), N);
    uint32_t tokens;
    uint64_t bytes;
    eng_store_residence(t.store, &(eng_prefix){.ids = texts[1], .n = N - 50}, &tokens, &bytes);
    ck_assert(tokens == N - 50 && bytes == one);
    eng_store_residence(t.store, &(eng_prefix){.tenant = 9, .ids = texts[1], .n = N - 50}, &tokens, &bytes); /* another's */
    ck_assert(tokens == 0 && bytes == 0);
    t.clock += 100;
    for (int i = 2; i < 6; i++)
        save_text(&t, texts[i], N);
    ck_assert_uint_eq(t_store_read(&t, texts[0], N, true), N);
    ck_assert_uint_eq(t_store_read(&t, texts[1], N, true), 0);
    t_store_done(&t);
}
END_TEST

/* A named text that leaves another one in the middle of a segment is not evicted, nor is what it begins with. */
START_TEST(named_branch)
{
    int32_t a[N], b[N], other[N];
    count_ids(a, N, 1);
    memcpy(b, a, sizeof b);
    count_ids(b + N / 2, N - N / 2, 5000);
    uint64_t one = file_bytes(a), limit = 4 * one + one / 2, bytes;
    t_store t;
    open_with_names(&t, limit);
    eng_segment *sa = segment(NULL, 0, a, N, true), *sb = segment(sa, N / 2, b + N / 2, N - N / 2, true);
    ck_assert_int_eq(eng_store_save(t.store, sb), 0);
    eng_store_flush(t.store);
    eng_segment_unref(sa);
    eng_segment_unref(sb);
    make(t.names, params("b", b, N));
    for (int i = 1; i < 10; i++) {
        count_ids(other, N, 10000 * i);
        save_text(&t, other, N);
    }
    ck_assert_uint_gt(t_store_stats(&t).evictions, 0);
    ck_assert_uint_eq(t_store_read(&t, b, N, true), N);
    uint32_t tokens;
    eng_store_residence(t.store, &(eng_prefix){.ids = b, .n = N}, &tokens, &bytes);
    ck_assert(tokens == N && bytes > one && bytes < 2 * one);
    ck_assert_int_eq(eng_names_remove(t.names, 0, "b"), 0); /* leaves what it did not have alone */
    ck_assert_uint_eq(t_store_read(&t, b, N, true), N / 2);
    ck_assert_uint_eq(t_store_read(&t, a, N, true), N);
    t_store_done(&t);
}
END_TEST

/* An expired one that is in use holds its segments until that ends; then what only it needed is gone, and no file more. */
START_TEST(in_use)
{
    int32_t texts[8][2 * N];
    for (int i = 0; i < 8; i++)
        count_ids(texts[i], 2 * N, 1000 * i);
    uint64_t one = file_bytes(texts[0]), limit = 3 * one + one / 2;
    t_store t;
    open_with_names(&t, limit);
    save_text(&t, texts[0], N);
    eng_context_params p = params("soon", texts[0], N);
    eng_context *c, *again;
    char err[256];
    p.ttl = 10;
    ck_assert_int_eq(eng_names_make(t.names, &p, &c, err, sizeof err), 0);
    t.clock += 10;
    eng_names_tick(t.names);
    ck_assert_int_eq(eng_names_use(t.names, 0, "soon", &again), -ESTALE);
    for (int i = 1; i < 8; i++)
        save_text(&t, texts[i], N);
    ck_assert_uint_eq(t_store_read(&t, texts[0], N, true), N);
    eng_context_release(c);
    eng_names_tick(t.names);
    eng_store_sync_names(t.store, true);
    ck_assert_uint_eq(t_store_read(&t, texts[0], N, true), 0);
    ck_assert_uint_eq(t_store_stats(&t).segments, 2);
    t_store_reopen(&t, limit);
    ck_assert_int_eq(find(t.names, 0, "soon"), -ENOENT);
    t_store_done(&t);
}
END_TEST

/* Two texts on one beginning, questions below each: a name that goes takes its text and the questions about it along, and leaves what others need. */
START_TEST(removal)
{
    enum { BIG = 1 << 30 };
    t_store t;
    open_with_names(&t, BIG);
    int32_t a[3 * N], b[3 * N];
    count_ids(a, 3 * N, 1);
    memcpy(b, a, N * sizeof *a);
    count_ids(b + N, 2 * N, 5000);
    eng_segment *root = segment(NULL, 0, a, N, true), *ta = segment(root, N, a + N, N, true), *tb = segment(root, N, b + N, N, true),
                *qa = segment(ta, 2 * N, a + 2 * N, N, false), *qb = segment(tb, 2 * N, b + 2 * N, N, false);
    ck_assert_int_eq(eng_store_save(t.store, qa), 0);
    ck_assert_int_eq(eng_store_save(t.store, qb), 0);
    eng_store_flush(t.store);
    make(t.names, params("a", a, 2 * N));
    make(t.names, params("a2", a, 2 * N - 10));
    make(t.names, params("b", b, 2 * N));
    ck_assert_uint_eq(t_store_stats(&t).segments, 5);
    ck_assert_int_eq(eng_names_remove(t.names, 0, "a"), 0); /* a2 needs all of it but the question, which is left to eviction */
    ck_assert_uint_eq(t_store_read(&t, a, 2 * N, false), 2 * N);
    ck_assert_int_eq(eng_names_remove(t.names, 0, "b"), 0);
    ck_assert_uint_eq(t_store_read(&t, b, 3 * N, false), N);
    ck_assert_uint_eq(t_store_stats(&t).segments, 3);
    make(t.names, params("b", a, 2 * N));
    ck_assert_int_eq(eng_names_remove(t.names, 0, "a2"), 0);
    ck_assert_uint_eq(t_store_read(&t, a, 3 * N, false), 3 * N);
    ck_assert_int_eq(eng_names_remove(t.names, 0, "b"), 0);
    ck_assert_uint_eq(t_store_stats(&t).segments, 0);
    uint32_t segments, all;
    t_store_count(&t, &segments, &all);
    ck_assert_uint_eq(all, 0);
    eng_segment *every[] = {root, ta, tb, qa, qb};
    for (int i = 0; i < 5; i++)
        eng_segment_unref(every[i]);
    t_store_done(&t);
}
END_TEST

/* A name that cannot be written is not there. */
START_TEST(no_room_for_a_row)
{
    t_store t;
    open_with_names(&t, (uint64_t)1 << 40);
    int32_t ids[N];
    char err[256] = "";
    count_ids(ids, N, 1);
    make(t.names, params("a", ids, N));
    struct rlimit before, small;
    ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = 4096; /* every write beyond that fails with EFBIG */
    signal(SIGXFSZ, SIG_IGN);
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
    ck_assert_int_lt(try_make(t.names, params("b", ids, N), err), 0);
    int altered = alter(t.names, "a", (eng_context_change){.name = "c"});
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &before), 0);
    ck_assert_ptr_nonnull(strstr(err, "cannot be written"));
    ck_assert_int_lt(altered, 0);
    ck_assert_int_eq(find(t.names, 0, "b"), -ENOENT);
    ck_assert_int_eq(find(t.names, 0, "c"), -ENOENT);
    ck_assert_int_eq(find(t.names, 0, "a"), 0);
    make(t.names, params("b", ids, N)); /* with room again */
    t_store_reopen(&t, (uint64_t)1 << 40);
    ck_assert_int_eq(find(t.names, 0, "a"), 0);
    ck_assert_int_eq(find(t.names, 0, "b"), 0);
    ck_assert_int_eq(find(t.names, 0, "c"), -ENOENT);
    t_store_done(&t);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("names");
    TCase *c = tcase_create("names");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, who_has_a_name);
    tcase_add_test(c, to_the_second);
    tcase_add_test(c, budgets);
    tcase_add_test(c, not_too_many);
    tcase_add_test(c, survives_a_restart);
    tcase_add_test(c, damaged_catalog);
    tcase_add_test(c, names_hold_segments);
    tcase_add_test(c, named_branch);
    tcase_add_test(c, in_use);
    tcase_add_test(c, removal);
    tcase_add_test(c, no_room_for_a_row);
    suite_add_tcase(s, c);
    return t_run(s);
}
