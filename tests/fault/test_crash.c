/* A process that keeps contexts on disk is killed: at each point of a save, of a file's second writing, a load, a merge, a removal (by eviction, with a name), a change of names and a start (fault points, compiled into this program only), and
 * at random instants. After each kill the store opens, has all that was reported as saved, reads it right, and no other file is there.
 *
 *   test_crash          every point, and 40 random kills of each kind
 *   test_crash KILLS    that many random kills of each kind
 */
#include "built_segments.h"
#include "stores.h"

#include "fault.h"

#include <signal.h>
#include <sys/wait.h>

enum { TOKENS = 150, MAX = 400, KEEP_ALL = 1 << 30 };

static const char *const points[] = {"save:begin",   "save:created", "save:section", "save:written",  "save:synced",  "save:renamed",
                                     "save:row",     "remove:row",   "remove:file",  "start:settled", "name:begin",  "name:written", "name:dropped",
                                     "merge:saved",  "merge:dropped", "load:opened", "load:read"};

static const char *fatal_point; /* in the child: dies there, the fatal_count-th time */
static int fatal_count;
static int kills = 40;

void eng_fault_point(const char *name)
{
    if (fatal_point && !strcmp(name, fatal_point) && --fatal_count == 0)
        kill(getpid(), SIGKILL);
}

/* Text k: a root, and below it a second segment. */
static void text_of(uint32_t k, int32_t *ids)
{
    for (uint32_t i = 0; i < 2 * TOKENS; i++)
        ids[i] = (int32_t)((k * 7919 + i * i + 1) % 50000);
}

static void save_text(t_store *t, uint32_t k)
{
    int32_t ids[2 * TOKENS];
    text_of(k, ids);
    eng_segment *a = segment(NULL, 0, ids, TOKENS, true), *b = segment(a, TOKENS, ids + TOKENS, TOKENS, k % 2);
    ck_assert_int_eq(eng_store_save(t->store, b), 0);
    eng_store_flush(t->store);
    eng_segment_unref(a);
    eng_segment_unref(b);
}

/* Its two segments become one. */
static void merge_text(t_store *t, uint32_t k)
{
    int32_t ids[2 * TOKENS];
    text_of(k, ids);
    eng_store_chain c = {0};
    ck_assert_int_eq(t_store_find(t, 0, ids, 2 * TOKENS, false, 0, &c), 0);
    ck_assert_uint_eq(c.n, 2);
    eng_segment *merged = segment(NULL, 0, ids, 2 * TOKENS, k % 2);
    merged->replaces = malloc(2 * sizeof *merged->replaces);
    merged->n_replaces = 2;
    for (int i = 0; i < 2; i++)
        merged->replaces[i] = c.links[i].id;
    free(c.links);
    ck_assert_int_eq(eng_store_save(t->store, merged), 0);
    eng_store_flush(t->store);
    eng_segment_unref(merged);
    ck_assert_int_eq(t_store_find(t, 0, ids, 2 * TOKENS, false, 0, &c), 0);
    ck_assert_uint_eq(c.n, 1);
    free(c.links);
}

static bool merges(void)
{
    return !fatal_point || !strncmp(fatal_point, "merge", 5);
}

static bool has_text(t_store *t, uint32_t k)
{
    int32_t ids[2 * TOKENS];
    text_of(k, ids);
    return t_store_read(t, ids, 2 * TOKENS, false) == 2 * TOKENS;
}

static void make_name(t_store *t, const char *format, uint32_t k, uint32_t n)
{
    int32_t ids[2 * TOKENS];
    char name[16], err[256] = "";
    eng_context *c;
    text_of(k, ids);
    snprintf(name, sizeof name, format, k);
    eng_context_params p = {.name = name, .replace = true, .content = {.ids = ids, .n_ids = n}};
    ck_assert_msg(eng_names_make(t->names, &p, &c, err, sizeof err) == 0, "%s", err);
    eng_context_release(c);
}

static bool has_name(t_store *t, const char *format, uint32_t k)
{
    char name[16];
    eng_context_info *all;
    snprintf(name, sizeof name, format, k);
    if (eng_names_list(t->names, 0, name, NULL, NULL, &all) < 0)
        return false;
    free(all);
    return true;
}

/* Synced writes take time: names are changed where that is what dies, and at random. */
static bool has_names(void)
{
    return !fatal_point || !strncmp(fatal_point, "name", 4);
}

/* A name that stays, of a text that is there, and one that is made, gets another name, and goes. */
static void change_names(t_store *t, uint32_t k, bool stays)
{
    char old[16], new[16], err[256] = "";
    snprintf(old, sizeof old, "t%u", k);
    snprintf(new, sizeof new, "u%u", k);
    if (stays)
        make_name(t, "n%u", k, 2 * TOKENS);
    eng_names_remove(t->names, 0, new); /* of one that was killed */
    make_name(t, "t%u", k, TOKENS / 2);
    eng_context_change change = {.name = new};
    ck_assert_msg(eng_names_alter(t->names, 0, old, &change, err, sizeof err) == 0, "%s", err);
    ck_assert_int_eq(eng_names_remove(t->names, 0, new), 0);
}

/* Saves text after text from `from` on, and says so, until it is killed or done. */
static void child(t_store t, uint64_t limit, uint32_t from, int report)
{
    ck_assert_int_eq(eng_pool_new(1, &t.pool), 0);
    t_store_open(&t, limit);
    for (uint32_t k = from; k < MAX; k++) {
        save_text(&t, k);
        if (has_names())
            change_names(&t, k, limit == KEEP_ALL);
        if (t_store_stats(&t).save_failures || write(report, &k, sizeof k) != sizeof k)
            _exit(2);
        has_text(&t, from + (k - from) / 2); /* a load between them */
        if (merges() && limit == KEEP_ALL && k % 2)
            merge_text(&t, k);
    }
    eng_store_close(t.store);
    _exit(0);
}

/* Runs a child and kills it, unless that does itself, `after_us` after its first report. Returns how many texts it reported. */
static uint32_t run_child(t_store *t, uint64_t limit, uint32_t from, useconds_t after_us)
{
    int report[2], status;
    uint32_t k, n = 0;
    ck_assert_int_eq(pipe(report), 0);
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (!pid) {
        close(report[0]);
        child(*t, limit, from, report[1]);
    }
    close(report[1]);
    while (read(report[0], &k, sizeof k) == sizeof k) {
        ck_assert_uint_eq(k, from + n);
        if (!n++ && !fatal_point) {
            usleep(after_us);
            kill(pid, SIGKILL);
        }
    }
    close(report[0]);
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_msg((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "the child ended with %d", status);
    if (fatal_point)
        ck_assert_msg(WIFSIGNALED(status), "'%s' was not passed", fatal_point);
    return n;
}

/* What must hold after a start: reported texts [0, n) are there (with a budget, the newest of them but those that made room for an unfinished save). */
static void check_store(t_store *t, uint64_t limit, uint32_t n, bool names)
{
    const char *point = fatal_point;
    fatal_point = NULL;
    t_store_open(t, limit);
    uint32_t segments, all, have = 0;
    for (uint32_t k = 0; k < n; k++)
        have += has_text(t, k);
    for (uint32_t k = 0; k < n; k++) {
        ck_assert_msg(!names || has_name(t, "n%u", k), "%s: name %u of %u is lost", point ? point : "random", k, n);
        ck_assert_msg(!has_name(t, "t%u", k) && !has_name(t, "u%u", k), "%s: name %u of %u is back", point ? point : "random", k, n);
    }
    if (limit == KEEP_ALL)
        ck_assert_msg(have == n, "%s: %u of %u texts are there", point ? point : "random", have, n);
    else
        ck_assert_msg(have + 2 >= (n < 4 ? n : 4), "%s: %u of the last texts are there", point ? point : "random", have);
    eng_disk_stats st = t_store_stats(t);
    t_store_count(t, &segments, &all);
    ck_assert_msg(segments == st.segments && all == segments, "%s: %u files, %u segments", point ? point : "random", all, st.segments);
    ck_assert_uint_le(st.bytes, limit);
    for (int i = ENG_MISS_GONE; i < ENG_MISS_COUNT; i++)
        ck_assert_uint_eq(st.misses[i], 0);
    save_text(t, MAX + n); /* and it goes on */
    ck_assert(has_text(t, MAX + n));
    eng_store_close(t->store);
    t->store = NULL;
}

static void clear(t_store *t)
{
    nftw(t->dir, t_remove_one, 16, FTW_DEPTH | FTW_PHYS);
    ck_assert_int_eq(mkdir(t->dir, 0700), 0);
}

START_TEST(every_point)
{
    t_store t = t_store_new(KEEP_ALL);
    t.with_names = true;
    eng_segment_owner owner = {.shape = &shape};
    int32_t ids[TOKENS] = {0};
    eng_segment *s = segment(NULL, 0, ids, TOKENS, true);
    uint64_t one = eng_segment_head_of(&owner, s, 0).bytes;
    eng_segment_unref(s);
    for (size_t i = 0; i < sizeof points / sizeof *points; i++)
        for (int budget = 0; budget < 2; budget++)
            for (int count = 1; count <= 6; count++) {
                bool removes = !strncmp(points[i], "remove", 6), merging = !strncmp(points[i], "merge", 5), starts = !strncmp(points[i], "start", 5);
                if ((removes && !budget) || (merging && budget) || (starts && count > 1))
                    continue;
                uint64_t limit = budget ? 8 * one + one / 2 : KEEP_ALL;
                clear(&t);
                uint32_t n = 0;
                if (starts) { /* with something to settle */
                    fatal_point = NULL;
                    t_store_open(&t, limit);
                    save_text(&t, n++);
                    eng_store_close(t.store);
                    t.store = NULL;
                    char path[128];
                    snprintf(path, sizeof path, "%s/catalog.db", t.dir);
                    ck_assert_int_eq(unlink(path), 0);
                }
                fatal_point = points[i];
                fatal_count = count;
                n += run_child(&t, limit, n, 0);
                check_store(&t, limit, n, !budget && has_names());
            }
    fatal_point = NULL;
    t_store_done(&t);
}
END_TEST

enum { GROWN = 1500 };

/* Saves a text with codes, says so, and saves it again with clusters, until it is killed or done. */
static void rewriting_child(t_store t, const int32_t *ids, int report)
{
    const char *point = fatal_point;
    fatal_point = NULL;
    ck_assert_int_eq(eng_pool_new(1, &t.pool), 0);
    t_store_open(&t, KEEP_ALL);
    eng_segment *half = built_segment(t.pool, ids, GROWN, false), *whole = built_segment(t.pool, ids, GROWN, true);
    ck_assert_int_eq(eng_store_save(t.store, half), 0);
    eng_store_flush(t.store);
    if (write(report, "", 1) != 1)
        _exit(2);
    fatal_point = point;
    ck_assert_int_eq(eng_store_save(t.store, whole), 0);
    eng_store_flush(t.store);
    eng_store_close(t.store);
    _exit(0);
}

/* True: it was killed, and not done before. */
static bool run_rewriting_child(t_store *t, const int32_t *ids, useconds_t after_us)
{
    int report[2], status;
    char said;
    ck_assert_int_eq(pipe(report), 0);
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (!pid) {
        close(report[0]);
        rewriting_child(*t, ids, report[1]);
    }
    close(report[1]);
    ck_assert_int_eq(read(report[0], &said, 1), 1);
    close(report[0]);
    if (!fatal_point) {
        usleep(after_us);
        kill(pid, SIGKILL);
    }
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    ck_assert_msg(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "the child ended with %d", status);
    return killed;
}

/* After a start: one file, the old one or the new one, in whole, and that is written again. True: the new one. */
static bool check_rewritten(t_store *t, const eng_segment *half, eng_segment *whole, const char *when)
{
    bool clusters = false;
    for (int again = 0; again < 2; again++) {
        uint32_t segments, all;
        eng_store_chain c = {0};
        eng_segment_reader reader = {.pool = t->pool};
        eng_segment *back;
        t_store_open(t, KEEP_ALL);
        t_store_count(t, &segments, &all);
        ck_assert_msg(segments == 1 && all == 1, "%s: %u files, %u of them segments", when, all, segments);
        ck_assert_msg(t_store_find(t, 0, whole->ids, GROWN, true, 0, &c) == ENG_MISS_NONE && c.n == 1, "%s: it is not listed", when);
        ck_assert_msg(t_store_load(t, &c.links[0].id, &reader, NULL, &back) == ENG_MISS_NONE, "%s: it cannot be read", when);
        bool whole_now = eng_segment_has(back, back->cluster);
        ck_assert_msg(same_as_built(back, whole_now ? whole : half, whole_now), "%s: other rows or indexes than were saved", when);
        ck_assert_msg(whole_now || !again, "%s: it is not written again", when);
        clusters = again ? clusters : whole_now;
        eng_segment_unref(back);
        free(c.links);
        ck_assert_int_eq(eng_store_save(t->store, whole), 0);
        eng_store_close(t->store);
        t->store = NULL;
    }
    return clusters;
}

/* A file that is written once more, with clusters: at each point of that, and at random instants, it is the old one or the new one. */
START_TEST(rewriting)
{
    static const struct {
        const char *point;
        int times; /* that it is passed: sections are ids, keys and values, 4 codes, 4 clusters, rows and 4 of queries */
        bool done; /* the new file is there then */
    } at[] = {{"save:begin", 1, false}, {"save:created", 1, false}, {"save:section", 15, false}, {"save:written", 1, false}, {"save:synced", 1, false},
              {"save:renamed", 1, true}, {"save:row", 1, true}};
    t_rng r = t_seed(52);
    t_store t = t_store_new(KEEP_ALL);
    int32_t ids[GROWN];
    char when[64];
    for (int32_t i = 0; i < GROWN; i++)
        ids[i] = (i * i + 1) % 50000;
    eng_segment *half = built_segment(t.pool, ids, GROWN, false), *whole = built_segment(t.pool, ids, GROWN, true);
    for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        for (int count = 1; count <= at[i].times; count++) {
            fatal_point = at[i].point;
            fatal_count = count;
            clear(&t);
            snprintf(when, sizeof when, "%s, %d", fatal_point, count);
            ck_assert_msg(run_rewriting_child(&t, ids, 0), "'%s' was not passed", when);
            fatal_point = NULL;
            ck_assert_msg(check_rewritten(&t, half, whole, when) == at[i].done, "%s: the %s file is there", when, at[i].done ? "old" : "new");
        }
    int old = 0;
    for (int i = 0; i < kills; i++) {
        clear(&t);
        run_rewriting_child(&t, ids, (useconds_t)(t_u64(&r) % 8000));
        old += !check_rewritten(&t, half, whole, "random");
    }
    printf("rewriting: %d kills at random, after %d of them the old file was there\n", kills, old);
    eng_segment_unref(half);
    eng_segment_unref(whole);
    t_store_done(&t);
}
END_TEST

START_TEST(random_kills)
{
    t_rng r = t_seed(51);
    t_store t = t_store_new(KEEP_ALL);
    t.with_names = true;
    uint32_t n = 0;
    for (int i = 0; i < kills; i++) {
        if (n + 100 > MAX) {
            clear(&t);
            n = 0;
        }
        n += run_child(&t, KEEP_ALL, n, (useconds_t)(t_u64(&r) % 30000));
        check_store(&t, KEEP_ALL, n, true);
    }
    printf("random_kills: %d kills, %u texts kept since the folder was last empty\n", kills, n);
    t_store_done(&t);
}
END_TEST

int main(int argc, char **argv)
{
    Suite *s = suite_create("crash");
    TCase *c = tcase_create("crash");
    tcase_set_timeout(c, 0);
    if (argc > 1)
        kills = atoi(argv[1]);
    else
        tcase_add_test(c, every_point);
    tcase_add_test(c, rewriting);
    tcase_add_test(c, random_kills);
    suite_add_tcase(s, c);
    return t_run(s);
}
