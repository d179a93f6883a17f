/* A disk that is full, read-only or failing: every call that writes, syncs, renames or reads fails once, and from then on. A context that cannot be
 * written is not kept, one that cannot be read is a miss; what was kept before stays right, and no stray file is left. The calls are replaced for the
 * whole program, SQLite included. */
#include "built_segments.h"
#include "stores.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>

enum { TOKENS = 300 };

static atomic_int countdown = -1; /* writing calls until the first that fails; negative: none does */
static atomic_bool forever;       /* and all after it */
static atomic_bool halves;        /* what can be is written by half, and by half of the rest */
static atomic_int reading_fails;  /* errno of every pread, 0: none */
static atomic_int opening_fails;  /* of every opening of a segment's file, to read it */
static atomic_int direct_reads;   /* preads past the page cache */
static atomic_int direct_fails;   /* errno of each of them; -1: it brings half of what it should; 0: none fails */
static atomic_int direct_refused; /* errno of opening a file for them */
static int error;
static atomic_int calls;

static bool fails(void)
{
    atomic_fetch_add(&calls, 1);
    int left = atomic_load(&countdown);
    if (left < 0)
        return false;
    if (left > 0) {
        atomic_fetch_sub(&countdown, 1);
        return false;
    }
    if (!atomic_load(&forever))
        atomic_store(&countdown, -1);
    errno = error;
    return true;
}

ssize_t pwrite64(int fd, const void *p, size_t n, off64_t offset)
{
    return fails() ? -1 : syscall(SYS_pwrite64, fd, p, atomic_load(&halves) && n > 1 ? n / 2 : n, offset);
}

ssize_t pread64(int fd, void *p, size_t n, off64_t offset)
{
    int e = atomic_load(&reading_fails);
    if (e) {
        errno = e;
        return -1;
    }
    if (fcntl(fd, F_GETFL) & O_DIRECT) {
        atomic_fetch_add(&direct_reads, 1);
        e = atomic_load(&direct_fails);
        if (e > 0) {
            errno = e;
            return -1;
        }
        n = e ? n / 2 : n;
        memset(p, 0x5a, e ? n : 0);
    }
    return syscall(SYS_pread64, fd, p, n, offset);
}

int open64(const char *path, int flags, ...)
{
    int e = flags & O_DIRECT ? atomic_load(&direct_refused) : 0;
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    if (e) {
        errno = e;
        return -1;
    }
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int openat64(int dir, const char *path, int flags, ...)
{
    int e = atomic_load(&opening_fails);
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    if (e && strstr(path, ".seg") && (flags & O_ACCMODE) == O_RDONLY) {
        errno = e;
        return -1;
    }
    return (int)syscall(SYS_openat, dir, path, flags, mode);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t n)
{
    return fails() ? -1 : (int)syscall(SYS_fallocate, fd, mode, offset, n);
}

int fsync(int fd)
{
    return fails() ? -1 : (int)syscall(SYS_fsync, fd);
}

int fdatasync(int fd)
{
    return fails() ? -1 : (int)syscall(SYS_fdatasync, fd);
}

int renameat(int a, const char *from, int b, const char *to)
{
    return fails() ? -1 : (int)syscall(SYS_renameat, a, from, b, to);
}

int mkdirat(int dir, const char *path, mode_t mode)
{
    return fails() ? -1 : (int)syscall(SYS_mkdirat, dir, path, mode);
}

static eng_segment *text(int32_t k, int32_t *ids)
{
    for (int32_t i = 0; i < TOKENS; i++)
        ids[i] = (k * 7919 + i * i) % 50000;
    return segment(NULL, 0, ids, TOKENS, true);
}

static void save_segment(t_store *t, eng_segment *s)
{
    ck_assert_int_eq(eng_store_save(t->store, s), 0);
    eng_store_flush(t->store);
}

static void save_text(t_store *t, int32_t k)
{
    int32_t ids[TOKENS];
    eng_segment *s = text(k, ids);
    save_segment(t, s);
    eng_segment_unref(s);
}

static bool has_text(t_store *t, int32_t k)
{
    int32_t ids[TOKENS];
    eng_segment_unref(text(k, ids));
    return t_store_read(t, ids, TOKENS, true) == TOKENS;
}

START_TEST(writing)
{
    static const int errors[] = {ENOSPC, EIO, EDQUOT, EROFS};
    uint32_t failures = 0;
    for (size_t k = 0; k < sizeof errors / sizeof *errors; k++)
        for (int on = 0; on < 2; on++) {
            t_store t = t_store_new(1 << 30);
            t_store_open(&t, 1 << 30);
            save_text(&t, 0);
            error = errors[k];
            int n = 0;
            for (bool reached = true; reached; n++) {
                uint64_t before = t_store_stats(&t).save_failures, listed;
                atomic_store(&forever, on);
                atomic_store(&countdown, n);
                save_text(&t, 1 + n);
                reached = atomic_load(&countdown) < 0 || on;
                atomic_store(&countdown, -1);
                atomic_store(&forever, false);
                eng_disk_stats st = t_store_stats(&t);
                bool kept = st.save_failures == before;
                failures += !kept;
                listed = st.segments;
                ck_assert_msg(has_text(&t, 1 + n) == kept, "call %d, %s: what was reported is not so", n, strerror(error));
                ck_assert_msg(has_text(&t, 0), "call %d, %s: the first context is lost", n, strerror(error));
                ck_assert(kept || strstr(t.log, strerror(error)) || strstr(t.log, strerror(EIO)) || n);
                if (kept && on)
                    reached = false; /* beyond the last call of a save */
                if (n % 5 == 4 || !reached) { /* a restart tells the same */
                    t_store_reopen(&t, 1 << 30);
                    uint32_t segments, all;
                    t_store_count(&t, &segments, &all);
                    ck_assert_uint_eq(all, segments);
                    ck_assert_uint_eq(t_store_stats(&t).segments, segments);
                    ck_assert_msg(segments == listed, "%s: %u segments after the restart, %u before", strerror(error), segments, (uint32_t)listed);
                    ck_assert_int_eq(has_text(&t, 1 + n), kept);
                    ck_assert(has_text(&t, 0));
                }
            }
            save_text(&t, 1000); /* and it goes on */
            ck_assert(has_text(&t, 1000));
            t_store_done(&t);
        }
    printf("writing: %u saves failed\n", failures);
    ck_assert_uint_gt(failures, 30);
}
END_TEST

/* The one file there is holds what the store says, and gives back all of it. True: with the clusters. */
static bool check_file(t_store *t, const eng_segment *whole, const char *when)
{
    char path[400];
    struct stat st;
    uint32_t segments, all;
    eng_store_chain c = {0};
    eng_segment_reader reader = {.pool = t->pool};
    eng_segment *back;
    t_store_path(t, &whole->id, path, sizeof path);
    t_store_count(t, &segments, &all);
    ck_assert_msg(segments == 1 && all == 1, "%s: %u files, %u of them segments", when, all, segments);
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert_msg(t_store_stats(t).bytes == (uint64_t)st.st_size, "%s: a file of %lld bytes counts as %llu", when, (long long)st.st_size, (unsigned long long)t_store_stats(t).bytes);
    ck_assert_msg(t_store_find(t, 0, whole->ids, whole->n, true, 0, &c) == ENG_MISS_NONE && c.n == 1, "%s: it is not listed", when);
    eng_miss why = t_store_load(t, &c.links[0].id, &reader, NULL, &back);
    ck_assert_msg(!why, "%s: it cannot be read: %s", when, eng_miss_name(why));
    bool clusters = eng_segment_has(back, back->cluster);
    ck_assert_msg(same_as_built(back, whole, clusters), "%s: other rows or indexes than were saved", when);
    eng_segment_unref(back);
    free(c.links);
    return clusters;
}

/* A context whose clusters have come is written once more, and a call of that fails. False: no call did. */
static bool second_write(int n, bool *ret_kept)
{
    enum { N = 1500 };
    int32_t ids[N];
    char when[80];
    for (int32_t i = 0; i < N; i++)
        ids[i] = (i * i + 7 * n) % 50000;
    t_store t = t_store_new(1 << 30);
    t_store_open(&t, 1 << 30);
    eng_segment *half = built_segment(t.pool, ids, N, false), *whole = built_segment(t.pool, ids, N, true);
    save_segment(&t, half);
    snprintf(when, sizeof when, "call %d%s, %s", n, atomic_load(&forever) ? " and all after it" : "", strerror(error));
    atomic_store(&countdown, n);
    save_segment(&t, whole);
    bool reached = atomic_load(&countdown) < 0 || atomic_load(&forever);
    atomic_store(&countdown, -1);
    bool failed = t_store_stats(&t).save_failures, written = check_file(&t, whole, when);
    ck_assert_msg(reached || !failed, "%s: it was not reached, and the save failed", when);
    ck_assert_msg(written || failed, "%s: it was reported as saved", when);
    ck_assert_msg(!failed || strstr(t.log, strerror(error)) || strstr(t.log, strerror(EIO)), "%s: '%s' is all that was said", when, t.log);
    t_store_reopen(&t, 1 << 30);
    ck_assert_msg(check_file(&t, whole, when) == written, "%s: another file after a restart", when);
    save_segment(&t, whole);
    ck_assert_msg(check_file(&t, whole, when) && !t_store_stats(&t).save_failures, "%s: and then it does not go on", when);
    *ret_kept = written;
    eng_segment_unref(half);
    eng_segment_unref(whole);
    t_store_done(&t);
    return reached && !(atomic_load(&forever) && !failed);
}

START_TEST(writing_again)
{
    static const int errors[] = {ENOSPC, EIO};
    uint32_t failures = 0, kept = 0;
    for (size_t k = 0; k < sizeof errors / sizeof *errors; k++)
        for (int how = 0; how < 4; how++) {
            error = errors[k];
            atomic_store(&forever, how & 1);
            atomic_store(&halves, how & 2);
            bool written;
            for (int n = 0; second_write(n, &written); n += how & 2 ? 31 : 1) {
                failures++;
                kept += !written;
            }
            ck_assert(written);
        }
    atomic_store(&forever, false);
    atomic_store(&halves, false);
    printf("writing_again: %u calls failed, %u times the old file stayed\n", failures, kept);
    ck_assert_uint_gt(kept, 100);
}
END_TEST

START_TEST(reading)
{
    static const struct {
        atomic_int *fails;
        int error;
    } how[] = {{&reading_fails, EIO}, {&opening_fails, EACCES}, {&opening_fails, EIO}};
    t_store t = t_store_new(1 << 30);
    t_store_open(&t, 1 << 30);
    save_text(&t, 0);
    for (size_t i = 0; i < sizeof how / sizeof *how; i++) {
        atomic_store(how[i].fails, how[i].error);
        ck_assert(!has_text(&t, 0));
        atomic_store(how[i].fails, 0);
        ck_assert_uint_eq(t_store_stats(&t).misses[ENG_MISS_IO], 1);
        ck_assert_ptr_nonnull(strstr(t.log, strerror(how[i].error)));
        ck_assert(!has_text(&t, 0)); /* not tried again, */
        t_store_reopen(&t, 1 << 30);
        ck_assert(has_text(&t, 0)); /* and not removed */
    }
    atomic_store(&opening_fails, EMFILE); /* nothing that the file could be blamed for */
    ck_assert(!has_text(&t, 0));
    atomic_store(&opening_fails, 0);
    ck_assert_uint_eq(t_store_stats(&t).misses[ENG_MISS_MEMORY], 1);
    ck_assert(has_text(&t, 0));
    t_store_done(&t);
}
END_TEST

/* Whether the system keeps any of a file in memory. */
static bool cached(const char *path)
{
    unsigned char in[1 << 14];
    struct stat st;
    int fd = open(path, O_RDONLY);
    bool any = false;
    ck_assert_int_eq(fstat(fd, &st), 0);
    size_t pages = ((size_t)st.st_size + 4095) / 4096;
    void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne(p, MAP_FAILED);
    ck_assert_uint_le(pages, sizeof in);
    ck_assert_int_eq(mincore(p, (size_t)st.st_size, in), 0);
    for (size_t i = 0; i < pages; i++)
        any = any || (in[i] & 1);
    munmap(p, (size_t)st.st_size);
    close(fd);
    return any;
}

static void forget(const char *path)
{
    int fd = open(path, O_RDONLY);
    ck_assert_int_eq((int)syscall(SYS_fsync, fd), 0);
    ck_assert_int_eq(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(fd);
}

static void load_as_saved(t_store *t, const eng_segment *saved)
{
    eng_segment_reader reader = {.pool = t->pool};
    eng_view v = {0};
    eng_segment *s;
    ck_assert_int_eq(t_store_load(t, &saved->id, &reader, NULL, &s), ENG_MISS_NONE);
    ck_assert_int_eq(eng_view_add(&v, s, 0, s->n), 0);
    check_rows(&v, saved->ids, s->n);
    ck_assert(eng_segment_coded(s));
    for (uint32_t i = 0; i < shape.n_layer * shape.n_head_kv; i++) {
        size_t a, b;
        const void *pa = idx_arena(s->codes[i], &a), *pb = idx_arena(saved->codes[i], &b);
        ck_assert(a == b && !memcmp(pa, pb, a));
    }
    eng_view_done(&v);
    eng_segment_unref(s);
}

/* A file that the system has nothing of is read past the page cache, one that it has is not; and where such reads fail, stop half-way or are not to be had, the same comes by others. */
START_TEST(past_the_page_cache)
{
    enum { N = 40000 };
    static const int how[] = {0, EINVAL, EIO, -1};
    static int32_t ids[N];
    char path[400];
    t_store t = t_store_new(1 << 30);
    t_store_open(&t, 1 << 30);
    for (int32_t i = 0; i < N; i++)
        ids[i] = (int32_t)((uint32_t)i * 2654435761u >> 8 & 0xffff);
    eng_segment *s = segment(NULL, 0, ids, N, true);
    build_all(t.pool, s);
    save_segment(&t, s);
    t_store_path(&t, &s->id, path, sizeof path);
    forget(path);
    int fd = open(path, O_RDONLY | O_DIRECT);
    bool can = fd >= 0 && !cached(path);
    if (!can)
        printf("past_the_page_cache: not looked at how it is read: the file system of %s has no such reads, or is memory\n", t.dir);
    close(fd);
    for (size_t i = 0; i < sizeof how / sizeof *how; i++) {
        forget(path);
        atomic_store(&direct_reads, 0);
        atomic_store(&direct_fails, how[i]);
        load_as_saved(&t, s);
        atomic_store(&direct_fails, 0);
        ck_assert_msg(!can || atomic_load(&direct_reads), "no read past the page cache, case %zu", i);
    }
    fd = open(path, O_RDONLY);
    for (char part[4096]; syscall(SYS_read, fd, part, sizeof part) > 0;)
        ;
    close(fd);
    ck_assert(cached(path));
    atomic_store(&direct_reads, 0);
    load_as_saved(&t, s);
    ck_assert_int_eq(atomic_load(&direct_reads), 0);
    forget(path);
    atomic_store(&direct_refused, EINVAL);
    load_as_saved(&t, s);
    atomic_store(&direct_refused, 0);
    ck_assert_int_eq(atomic_load(&direct_reads), 0);
    eng_segment_unref(s);
    t_store_done(&t);
}
END_TEST

START_TEST(no_room)
{
    t_store t = t_store_new(1 << 30);
    char err[256] = "";
    eng_store_params p = {.disk = {.dir = t.dir, .limit = 1 << 30, .keep_free = UINT64_MAX / 2}, .owner = {.fingerprint = FINGERPRINT, .shape = &shape},
                          .pool = t.pool, .log = t_store_log, .log_ctx = &t};
    ck_assert_int_eq(eng_store_open(&p, &t.store, err, sizeof err), 0);
    save_text(&t, 0);
    ck_assert_uint_eq(t_store_stats(&t).save_failures, 1);
    ck_assert_ptr_nonnull(strstr(t.log, strerror(ENOSPC)));
    uint32_t segments, all;
    t_store_count(&t, &segments, &all);
    ck_assert_uint_eq(all, 0);
    t_store_done(&t);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("io_errors");
    TCase *c = tcase_create("io_errors");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, writing);
    tcase_add_test(c, writing_again);
    tcase_add_test(c, reading);
    tcase_add_test(c, past_the_page_cache);
    tcase_add_test(c, no_room);
    suite_add_tcase(s, c);
    return t_run(s);
}
