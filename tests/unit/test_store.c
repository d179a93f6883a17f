/* The disk tier: what comes back after a restart, look-ups against naive ones, the budget, catalogs that are lost. */
#include "built_segments.h"
#include "stores.h"

#include <fcntl.h>

static void number_ids(int32_t *ids, uint32_t n, int32_t seed)
{
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)((i * 2654435761u + (uint32_t)seed * 40503u) >> 8 & 0xffff);
}

static void save(t_store *t, eng_segment *s)
{
    ck_assert_int_eq(eng_store_save(t->store, s), 0);
}

/* A text, an answer below it, a second text that leaves the first one in its middle: all come back from files, with the codes. */
START_TEST(survives_a_restart)
{
    enum { N = 9000, CUT = 5000, M = 800 };
    t_store t = t_store_new((uint64_t)1 << 30);
    t_store_open(&t, (uint64_t)1 << 30);
    int32_t a[N + M], b[N];
    number_ids(a, N + M, 1);
    memcpy(b, a, CUT * sizeof *a);
    number_ids(b + CUT, N - CUT, 2);
    eng_segment *root = segment(NULL, 0, a, N, true), *answer = segment(root, N, a + N, M, false), *other = segment(root, CUT, b + CUT, N - CUT, true);
    build_all(t.pool, root);
    ck_assert(eng_segment_coded(root));
    size_t index_bytes = root->index_bytes;
    save(&t, answer); /* takes the root along */
    save(&t, other);
    save(&t, answer); /* is there already */
    eng_store_flush(t.store);
    eng_disk_stats st = t_store_stats(&t);
    ck_assert_uint_eq(st.saves, 3);
    ck_assert_uint_eq(st.segments, 3);
    ck_assert_uint_eq(st.saving, 0);
    ck_assert_uint_eq(root->refs, 3);
    size_t memory = eng_segment_bytes(root) + eng_segment_bytes(answer) + eng_segment_bytes(other);
    ck_assert_uint_le(st.bytes, memory + memory * 3 / 100);
    eng_segment_unref(answer);
    eng_segment_unref(other);
    eng_segment_unref(root);

    for (int round = 0; round < 2; round++) { /* the second time without the catalog */
        char path[128];
        snprintf(path, sizeof path, "%s/catalog.db", t.dir);
        eng_store_close(t.store);
        t.store = NULL;
        if (round)
            ck_assert_int_eq(unlink(path), 0);
        t_store_open(&t, (uint64_t)1 << 30);
        ck_assert(!round == !strstr(t.log, "catalog"));
        ck_assert_uint_eq(t_store_read(&t, a, N + M, false), N + M);
        ck_assert_uint_eq(t_store_read(&t, a, N + M, true), N);
        ck_assert_uint_eq(t_store_read(&t, b, N, true), N);
        ck_assert_uint_eq(t_store_read(&t, b, CUT - 7, false), CUT - 7);
        eng_store_chain c = {0};
        eng_segment *s;
        eng_segment_reader reader = {.pool = t.pool};
        ck_assert_int_eq(t_store_find(&t, 0, a, N, false, N - ENG_CACHE_MIN_PREFIX + 1, &c), ENG_MISS_ABSENT); /* hardly more than is had */
        ck_assert_int_eq(t_store_find(&t, 0, a, 700, false, 0, &c), ENG_MISS_SHORT);                           /* a small part of a file */
        ck_assert_int_eq(t_store_find(&t, 0, a, N, false, 0, &c), ENG_MISS_NONE);
        ck_assert_uint_eq(c.n, 1);
        ck_assert_int_eq(t_store_load(&t, &c.links[0].id, &reader, NULL, &s), ENG_MISS_NONE);
        ck_assert(eng_segment_coded(s));
        ck_assert_uint_eq(s->index_bytes, index_bytes);
        eng_segment_unref(s);
        free(c.links);
    }
    t_store_done(&t);
}
END_TEST

static void put_file(const char *path, const char *bytes, size_t n)
{
    FILE *f = fopen(path, "wb");
    ck_assert(f && fwrite(bytes, 1, n, f) == n && !fclose(f));
}

/* A file is written again when more has been built: in its place, where there is room for both. A program that dies between the file and its row is understood. */
START_TEST(written_again)
{
    enum { N = 1500 };
    int32_t ids[N];
    char path[200];
    number_ids(ids, N, 8);
    for (int small = 0; small < 2; small++) {
        t_store t = t_store_new((uint64_t)1 << 30);
        t_store_open(&t, (uint64_t)1 << 30);
        eng_segment *s = built_segment(t.pool, ids, N, false);
        save(&t, s);
        eng_store_flush(t.store);
        t_store_path(&t, &s->id, path, sizeof path);
        size_t n_old, n_new;
        char *old = t_read(path, &n_old);
        ck_assert_uint_eq(t_store_stats(&t).bytes, n_old);
        eng_segment *more = built_segment(t.pool, ids, N, true);
        if (small)
            t_store_reopen(&t, 2 * n_old);
        save(&t, more);
        eng_store_flush(t.store);
        char *new = t_read(path, &n_new);
        eng_disk_stats st = t_store_stats(&t);
        ck_assert(st.segments == 1 && st.bytes == n_new && st.refusals == (uint64_t)small && st.save_failures == 0);
        ck_assert(small ? n_new == n_old && !memcmp(new, old, n_old) : n_new > n_old + n_old / 10);
        save(&t, s); /* has less */
        eng_store_flush(t.store);
        ck_assert_uint_eq(t_store_stats(&t).bytes, n_new);
        for (int round = 0; round < 3 && !small; round++) { /* the old file where its row says the new one's size, then the new one again */
            eng_store_close(t.store);
            t.store = NULL;
            put_file(path, round == 1 ? old : new, round == 1 ? n_old : n_new);
            t_store_open(&t, (uint64_t)1 << 30);
            ck_assert_str_eq(t.log, "");
            ck_assert_uint_eq(t_store_stats(&t).bytes, round == 1 ? n_old : n_new);
            eng_store_chain c = {0};
            eng_segment *back;
            eng_segment_reader reader = {.pool = t.pool};
            ck_assert_int_eq(t_store_find(&t, 0, ids, N, true, 0, &c), ENG_MISS_NONE);
            ck_assert_int_eq(t_store_load(&t, &c.links[0].id, &reader, NULL, &back), ENG_MISS_NONE);
            ck_assert(same_as_built(back, more, round != 1));
            eng_segment_unref(back);
            free(c.links);
        }
        free(old);
        free(new);
        eng_segment_unref(s);
        eng_segment_unref(more);
        t_store_done(&t);
    }
}
END_TEST

/* What the prefill kernels computed behind an answer has the answer's history: a prompt that wants exact keys does not get it. */
START_TEST(exact_means_all_of_it)
{
    t_store t = t_store_new((uint64_t)1 << 30);
    t_store_open(&t, (uint64_t)1 << 30);
    int32_t ids[600];
    number_ids(ids, 600, 3);
    eng_segment *text = segment(NULL, 0, ids, 200, true), *answer = segment(text, 200, ids + 200, 200, false), *more = segment(answer, 400, ids + 400, 200, true);
    eng_segment *again = segment(text, 200, ids + 200, 200, true), *pure = segment(again, 400, ids + 400, 200, true);
    save(&t, more);
    eng_store_flush(t.store);
    ck_assert_uint_eq(t_store_read(&t, ids, 600, false), 600);
    ck_assert_uint_eq(t_store_read(&t, ids, 600, true), 200);
    save(&t, pure);
    eng_store_flush(t.store);
    ck_assert_uint_eq(t_store_stats(&t).segments, 5);
    ck_assert_uint_eq(t_store_read(&t, ids, 600, true), 600);
    eng_segment *all[] = {text, answer, more, again, pure};
    for (int i = 0; i < 5; i++)
        eng_segment_unref(all[i]);
    t_store_done(&t);
}
END_TEST

/* The same tokens of two tenants are two contexts, also after the catalog was made again from the files. */
START_TEST(tenants)
{
    t_store t = t_store_new((uint64_t)1 << 30);
    t_store_open(&t, (uint64_t)1 << 30);
    int32_t ids[600];
    number_ids(ids, 600, 4);
    eng_segment *one = segment(NULL, 0, ids, 200, true), *two = segment(NULL, 0, ids, 400, true);
    one->tenant = 11;
    two->tenant = UINT64_MAX - 1;
    eng_segment *more = segment(two, 400, ids + 400, 200, true);
    ck_assert(more->tenant == two->tenant);
    save(&t, one);
    save(&t, more);
    for (int round = 0; round < 3; round++) {
        eng_store_flush(t.store);
        for (uint64_t tenant = 10; tenant < 13; tenant++) {
            eng_store_chain c = {0};
            ck_assert_int_eq(t_store_find(&t, tenant, ids, 600, false, 0, &c), tenant == 11 ? ENG_MISS_NONE : ENG_MISS_ABSENT);
            ck_assert_uint_eq(c.length, tenant == 11 ? 200 : 0);
            free(c.links);
        }
        eng_store_chain c = {0};
        eng_segment_reader reader = {.pool = t.pool};
        eng_segment *s;
        ck_assert_int_eq(t_store_find(&t, two->tenant, ids, 600, false, 0, &c), ENG_MISS_NONE);
        ck_assert(c.n == 2 && c.length == 600);
        ck_assert_int_eq(t_store_load(&t, &c.links[0].id, &reader, NULL, &s), ENG_MISS_NONE);
        ck_assert(s->tenant == two->tenant);
        eng_segment_unref(s);
        free(c.links);
        if (round == 1) {
            char path[128];
            snprintf(path, sizeof path, "%s/catalog.db", t.dir);
            ck_assert_int_eq(unlink(path), 0);
        }
        t_store_reopen(&t, (uint64_t)1 << 30);
    }
    eng_segment_unref(one);
    eng_segment_unref(two);
    eng_segment_unref(more);
    t_store_done(&t);
}
END_TEST

/* A merged segment takes the place of its parts on disk; what continued them continues it, and what left in their middle keeps what it needs. */
START_TEST(merged)
{
    enum { STEP = 200 };
    t_store t = t_store_new((uint64_t)1 << 30);
    t_store_open(&t, (uint64_t)1 << 30);
    int32_t ids[4 * STEP], branch[3 * STEP];
    number_ids(ids, 4 * STEP, 6);
    memcpy(branch, ids, sizeof branch);
    number_ids(branch + 2 * STEP, STEP, 7);
    eng_segment *s[4], *other = NULL, *one;
    for (int i = 0; i < 4; i++)
        s[i] = segment(i ? s[i - 1] : NULL, (uint32_t)i * STEP, ids + i * STEP, STEP, true);
    other = segment(s[1], 2 * STEP, branch + 2 * STEP, STEP, false);
    save(&t, s[3]);
    save(&t, other);
    one = segment(s[0], STEP, ids + STEP, 2 * STEP, true); /* the second and the third */
    one->replaces = malloc(2 * sizeof *one->replaces);
    one->n_replaces = 2;
    one->replaces[0] = s[1]->id;
    one->replaces[1] = s[2]->id;
    save(&t, one);
    for (int round = 0; round < 3; round++) {
        eng_store_flush(t.store);
        ck_assert_uint_eq(t_store_stats(&t).segments, 5); /* the third is gone */
        ck_assert_uint_eq(t_store_read(&t, ids, 4 * STEP, true), 4 * STEP);
        ck_assert_uint_eq(t_store_read(&t, branch, 3 * STEP, false), 3 * STEP);
        eng_store_chain c = {0};
        ck_assert_int_eq(t_store_find(&t, 0, ids, 4 * STEP, true, 0, &c), ENG_MISS_NONE);
        ck_assert(c.n == 3 && c.links[1].start == STEP && c.links[2].start == 3 * STEP);
        free(c.links);
        if (round == 1) {
            char path[128];
            eng_store_close(t.store);
            snprintf(path, sizeof path, "%s/catalog.db", t.dir);
            ck_assert_int_eq(unlink(path), 0);
            t_store_open(&t, (uint64_t)1 << 30);
        } else {
            t_store_reopen(&t, (uint64_t)1 << 30);
        }
    }
    for (int i = 0; i < 4; i++)
        eng_segment_unref(s[i]);
    eng_segment_unref(other);
    eng_segment_unref(one);
    t_store_done(&t);
}
END_TEST

/* Whoever has waited for names finds nothing more of what was let go of before, though much is still to be written. */
START_TEST(let_go_of_first)
{
    enum { N = 2000, OTHERS = 8 };
    t_store t = t_store_new((uint64_t)1 << 30);
    t_store_open(&t, (uint64_t)1 << 30);
    int32_t ids[N], others[OTHERS][N];
    char path[128];
    number_ids(ids, N, 1);
    eng_segment *goes = segment(NULL, 0, ids, N, true);
    save(&t, goes);
    eng_store_flush(t.store);
    t_store_path(&t, &goes->id, path, sizeof path);
    ck_assert_int_eq(access(path, F_OK), 0);
    for (int i = 0; i < OTHERS; i++) {
        number_ids(others[i], N, 2 + i);
        eng_segment *s = segment(NULL, 0, others[i], N, true);
        save(&t, s);
        eng_segment_unref(s);
    }
    eng_prefix p = {0, ids, N, false};
    eng_store_forget_tokens(t.store, &p);
    eng_store_sync_names(t.store, true);
    ck_assert_int_eq(access(path, F_OK), -1);
    eng_store_flush(t.store);
    ck_assert_uint_eq(t_store_stats(&t).segments, OTHERS);
    for (int i = 0; i < OTHERS; i++)
        ck_assert_uint_eq(t_store_read(&t, others[i], N, true), N);
    eng_segment_unref(goes);
    t_store_done(&t);
}
END_TEST

/* Keys and values that stay in the file: the same rows; a file that shrinks under them marks the segment, and ends nothing. */
START_TEST(mapped)
{
    enum { N = 3000 };
    t_store t = t_store_new((uint64_t)1 << 30);
    t_store_open(&t, (uint64_t)1 << 30);
    int32_t *ids = malloc(N * sizeof *ids);
    number_ids(ids, N, 8);
    eng_segment *s = segment(NULL, 0, ids, N, true), *m[2];
    save(&t, s);
    eng_store_flush(t.store);
    atomic_ullong blocks = 0;
    eng_segment_reader reader = {.pool = t.pool, .map = true, .heartbeat = &blocks};
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(t_store_load(&t, &s->id, &reader, NULL, &m[i]), ENG_MISS_NONE);
        ck_assert_uint_eq(atomic_load(&blocks), 1); /* checked the first time only */
        ck_assert(m[i]->map && !eng_mapping_failed(m[i]->map));
        eng_view v = {0};
        ck_assert_int_eq(eng_view_add(&v, m[i], 0, N), 0);
        check_rows(&v, ids, N);
        eng_view_done(&v);
    }
    eng_segment_unref(m[1]);
    char file[200];
    t_store_path(&t, &s->id, file, sizeof file);
    ck_assert_int_eq(truncate(file, 65536), 0);
    uint32_t sum = 0;
    for (size_t i = 0; i < m[0]->kv_bytes; i += 64)
        sum += ((const volatile uint8_t *)m[0]->kv)[i];
    ck_assert_uint_gt(sum, 0); /* what is left of it */
    ck_assert(eng_mapping_failed(m[0]->map));
    ck_assert_int_eq(t_store_load(&t, &s->id, &reader, NULL, &m[1]), ENG_MISS_SIZE);
    eng_segment_unref(m[0]);
    eng_segment_unref(s);
    free(ids);
    t_store_done(&t);
}
END_TEST

/* A mapped file that was written to since it was checked is checked again, also when its time of writing was set back. */
START_TEST(mapped_again)
{
    enum { N = 3000 };
    t_store t = t_store_new((uint64_t)1 << 30);
    t_store_open(&t, (uint64_t)1 << 30);
    int32_t *ids = malloc(N * sizeof *ids);
    char file[200];
    struct stat st;
    uint8_t byte;
    number_ids(ids, N, 8);
    eng_segment *s = segment(NULL, 0, ids, N, true), *m;
    save(&t, s);
    eng_store_flush(t.store);
    eng_segment_reader reader = {.pool = t.pool, .map = true};
    ck_assert_int_eq(t_store_load(&t, &s->id, &reader, NULL, &m), ENG_MISS_NONE);
    eng_segment_unref(m);
    t_store_path(&t, &s->id, file, sizeof file);
    int fd = open(file, O_RDWR);
    ck_assert(fd >= 0 && fstat(fd, &st) == 0 && pread(fd, &byte, 1, 100000) == 1);
    byte ^= 1;
    do { /* until the clock of the file system has moved on */
        struct stat now;
        ck_assert_int_eq(pwrite(fd, &byte, 1, 100000), 1);
        ck_assert(futimens(fd, (struct timespec[]){st.st_atim, st.st_mtim}) == 0 && fstat(fd, &now) == 0);
        if (now.st_ctim.tv_sec != st.st_ctim.tv_sec || now.st_ctim.tv_nsec != st.st_ctim.tv_nsec)
            break;
    } while (true);
    close(fd);
    ck_assert_int_eq(t_store_load(&t, &s->id, &reader, NULL, &m), ENG_MISS_CHECKSUM);
    eng_segment_unref(s);
    free(ids);
    t_store_done(&t);
}
END_TEST

/* Random trees, against the longest match by trying every chain; half of the look-ups after a restart. */
START_TEST(finds_the_longest_prefix)
{
    enum { MAX = 14 };
    t_rng r = t_seed(21);
    for (int round = 0; round < 20; round++) {
        t_store t = t_store_new((uint64_t)1 << 30);
        t_store_open(&t, (uint64_t)1 << 30);
        eng_segment *segs[MAX];
        int32_t texts[MAX][600];
        uint32_t ends[MAX];
        for (uint32_t i = 0; i < MAX; i++) {
            uint32_t p = (uint32_t)(t_u64(&r) % (i ? i : 1)), start = 0, n = 1 + (uint32_t)(t_u64(&r) % 100);
            eng_segment *parent = i && t_u64(&r) % 4 ? segs[p] : NULL;
            if (parent && ends[p] < 450) {
                start = parent->start + 1 + (uint32_t)(t_u64(&r) % parent->n);
                memcpy(texts[i], texts[p], start * sizeof(int32_t));
            } else {
                parent = NULL;
            }
            for (uint32_t j = 0; j < n; j++)
                texts[i][start + j] = t_u64(&r) % 20 ? 1 : (int32_t)(t_u64(&r) % 3);
            ends[i] = start + n;
            segs[i] = segment(parent, start, texts[i] + start, n, !parent || (parent->exact && t_u64(&r) % 3));
            save(&t, segs[i]);
        }
        eng_store_flush(t.store);
        for (int ask = 0; ask < 40; ask++) {
            int32_t ids[700];
            uint32_t like = (uint32_t)(t_u64(&r) % MAX), n = 1 + (uint32_t)(t_u64(&r) % (ends[like] + 30));
            for (uint32_t j = 0; j < n; j++)
                ids[j] = j < ends[like] && t_u64(&r) % 150 ? texts[like][j] : 1;
            bool exact_only = t_u64(&r) & 1;
            uint32_t best = 0;
            for (uint32_t i = 0; i < MAX; i++) {
                uint32_t same = 0;
                while (same < n && same < ends[i] && ids[same] == texts[i][same])
                    same++;
                if ((!exact_only || segs[i]->exact) && same > best)
                    best = same;
            }
            if (ask == 20)
                t_store_reopen(&t, (uint64_t)1 << 30);
            uint32_t got = t_store_read(&t, ids, n, exact_only);
            ck_assert_uint_le(got, best);
            /* a last segment of which less than an eighth is wanted is not read; what is left may be too short then */
            if (best < ENG_CACHE_MIN_PREFIX)
                ck_assert_uint_eq(got, 0);
            else if (best >= ENG_CACHE_MIN_PREFIX + 13)
                ck_assert_uint_ge(got + 12, best);
        }
        for (uint32_t i = 0; i < MAX; i++)
            eng_segment_unref(segs[i]);
        t_store_done(&t);
    }
}
END_TEST

/* The budget holds under any order of writes and look-ups, what was used last stays, a segment's ancestors are not evicted for it, and nothing else
 * than the listed files is there. */
START_TEST(budget)
{
    enum { N = 300, MAX = 60 };
    t_rng r = t_seed(22);
    t_store t = t_store_new((uint64_t)1 << 30);
    int32_t texts[MAX][2 * N];
    t_store_open(&t, (uint64_t)1 << 30);
    eng_segment *s = segment(NULL, 0, texts[0], N, true);
    eng_segment_owner owner = {.shape = &shape};
    uint64_t one = eng_segment_head_of(&owner, s, 0).bytes, limit = 7 * one + one / 2;
    eng_segment_unref(s);
    t_store_reopen(&t, limit);
    for (int i = 0; i < MAX; i++) {
        number_ids(texts[i], 2 * N, 100 + i);
        s = segment(NULL, 0, texts[i], N, true);
        eng_segment *child = t_u64(&r) % 2 ? segment(s, N, texts[i] + N, N, true) : NULL;
        save(&t, child ? child : s);
        eng_store_flush(t.store);
        ck_assert_uint_le(t_store_stats(&t).bytes, limit);
        ck_assert_uint_eq(t_store_read(&t, texts[i], 2 * N, true), child ? 2 * N : N);
        ck_assert_uint_eq(t_store_read(&t, texts[0], N, true), N); /* always in use */
        if (i % 10 == 9)
            t_store_reopen(&t, limit);
        eng_segment_unref(child);
        eng_segment_unref(s);
    }
    uint32_t segments, all;
    t_store_count(&t, &segments, &all);
    ck_assert_uint_eq(t_store_stats(&t).segments, segments);
    ck_assert_uint_eq(all, segments);
    t_store_reopen(&t, 2 * one + one / 2); /* a smaller budget */
    ck_assert_uint_eq(t_store_stats(&t).segments, 2);
    ck_assert_uint_eq(t_store_read(&t, texts[0], N, true), N);

    /* larger than the budget: not written, and nothing evicted for it */
    int32_t big[3 * N];
    number_ids(big, 3 * N, 99);
    s = segment(NULL, 0, big, 3 * N, true);
    save(&t, s);
    eng_store_flush(t.store);
    ck_assert_uint_eq(t_store_stats(&t).segments, 2);
    ck_assert_uint_eq(t_store_stats(&t).save_failures, 1);
    ck_assert_ptr_nonnull(strstr(t.log, "--cache-disk"));
    eng_segment_unref(s);
    t_store_done(&t);
}
END_TEST

/* Short texts between questions on a long one take nothing from it; nor does one that is larger than the budget or than what may go. */
START_TEST(short_beside_long)
{
    enum { LONG = 2000, SHORT = 100 };
    t_store t = t_store_new((uint64_t)1 << 30);
    t_store_open(&t, (uint64_t)1 << 30);
    int32_t ids[2][LONG], few[SHORT];
    eng_segment *s[2];
    for (int i = 0; i < 2; i++) {
        number_ids(ids[i], LONG, i);
        s[i] = segment(NULL, 0, ids[i], LONG, true);
        save(&t, s[i]);
    }
    eng_store_flush(t.store);
    t_store_reopen(&t, t_store_stats(&t).bytes * 11 / 10);
    for (int i = 0; i < 60; i++) {
        number_ids(few, SHORT, 10 + i);
        eng_segment *one = segment(NULL, 0, few, SHORT, true);
        save(&t, one);
        eng_store_flush(t.store);
        ck_assert_uint_eq(t_store_read(&t, few, SHORT, true), SHORT);
        eng_segment_unref(one);
    }
    for (int i = 0; i < 2; i++) {
        ck_assert_uint_eq(t_store_read(&t, ids[i], LONG, true), LONG);
        eng_segment_unref(s[i]);
    }
    eng_disk_stats st = t_store_stats(&t);
    ck_assert_uint_le(st.bytes, st.limit);
    ck_assert(st.evictions > 40 && st.save_failures == 0);
    t_store_done(&t);
}
END_TEST

static void write_file(const char *path, const void *p, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(write(fd, p, n), (ssize_t)n);
    close(fd);
}

/* A catalog that is damaged anywhere comes back from the files; files that no longer fit it do not stay. */
START_TEST(damaged_catalog)
{
    enum { N = 500 };
    t_rng r = t_seed(23);
    t_store t = t_store_new((uint64_t)1 << 30);
    t_store_open(&t, (uint64_t)1 << 30);
    int32_t ids[2 * N];
    number_ids(ids, 2 * N, 5);
    eng_segment *s = segment(NULL, 0, ids, N, true), *child = segment(s, N, ids + N, N, true);
    save(&t, child);
    eng_store_close(t.store);
    t.store = NULL;
    char path[128], file[200];
    snprintf(path, sizeof path, "%s/catalog.db", t.dir);
    for (int round = 0; round < 40; round++) {
        size_t n;
        char *bytes = t_read(path, &n);
        if (round < 2)
            memset(bytes, round ? 0x55 : 0, n);
        else
            for (int i = 0; i < 100; i++)
                bytes[t_u64(&r) % n] ^= (char)(1 << t_u64(&r) % 8);
        write_file(path, bytes, round % 5 == 4 ? n / 2 : n);
        free(bytes);
        t_store_open(&t, (uint64_t)1 << 30);
        ck_assert_uint_eq(t_store_read(&t, ids, 2 * N, true), 2 * N);
        ck_assert_uint_eq(t_store_stats(&t).segments, 2);
        eng_store_close(t.store);
        t.store = NULL;
    }
    /* a file under another's name, a stray one, one that was not finished, a folder: gone after a start */
    t_store_path(&t, &s->id, file, sizeof file);
    size_t n;
    char *bytes = t_read(file, &n);
    eng_segment_id other = s->id;
    for (int i = 0; i < 4; i++) {
        char name[220];
        other.b[1] ^= 1;
        t_store_path(&t, &other, name, sizeof name);
        strcpy(name + strlen(name) - 3, i == 0 ? "seg" : i == 1 ? "new" : i == 2 ? "x" : "dir");
        if (i == 3)
            ck_assert_int_eq(mkdir(name, 0700), 0);
        else
            write_file(name, bytes, n);
    }
    free(bytes);
    uint32_t segments, all;
    t_store_count(&t, &segments, &all);
    ck_assert_uint_eq(all, 6);
    t_store_open(&t, (uint64_t)1 << 30);
    t_store_count(&t, &segments, &all);
    ck_assert_uint_eq(all, 2);
    ck_assert_uint_eq(t_store_read(&t, ids, 2 * N, true), 2 * N);
    /* the file of the first part goes: so does the rest, which cannot be reached */
    eng_store_close(t.store);
    t.store = NULL;
    ck_assert_int_eq(unlink(file), 0);
    t_store_open(&t, (uint64_t)1 << 30);
    t_store_count(&t, &segments, &all);
    ck_assert_uint_eq(all, 0);
    ck_assert_uint_eq(t_store_read(&t, ids, 2 * N, true), 0);
    eng_segment_unref(child);
    eng_segment_unref(s);
    t_store_done(&t);
}
END_TEST

START_TEST(folder)
{
    t_store t = t_store_new(1 << 20), second;
    t_store_open(&t, 1 << 20);
    second = t;
    ck_assert_int_eq(t_store_try(&second, 1 << 20, FINGERPRINT, &shape), -EBUSY);
    ck_assert_ptr_nonnull(strstr(second.log, t.dir));
    struct stat st;
    char path[128];
    static const char *const names[] = {"catalog.db", "lock", "segments"};
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", t.dir, names[i]);
        ck_assert_int_eq(stat(path, &st), 0);
        ck_assert_uint_eq(st.st_mode & 0777, i == 2 ? 0700 : 0600);
    }
    eng_store_close(t.store);
    t.store = NULL;
    ck_assert_int_eq(chmod(t.dir, 0777), 0); /* others could plant files */
    ck_assert_int_eq(t_store_try(&t, 1 << 20, FINGERPRINT, &shape), -EPERM);
    ck_assert_int_eq(chmod(t.dir, 0700), 0);
    t_store_done(&t);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("store");
    TCase *c = tcase_create("store");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, survives_a_restart);
    tcase_add_test(c, written_again);
    tcase_add_test(c, exact_means_all_of_it);
    tcase_add_test(c, tenants);
    tcase_add_test(c, mapped);
    tcase_add_test(c, mapped_again);
    tcase_add_test(c, merged);
    tcase_add_test(c, let_go_of_first);
    tcase_add_test(c, finds_the_longest_prefix);
    tcase_add_test(c, budget);
    tcase_add_test(c, short_beside_long);
    tcase_add_test(c, damaged_catalog);
    tcase_add_test(c, folder);
    suite_add_tcase(s, c);
    return t_run(s);
}
