/* A disk that is full, read-only or failing: every call that writes, syncs, renames or reads fails once, and from then on. A context that cannot be
 * written is not kept, one that cannot be read is a miss; what was kept before stays right, and no stray file is left. The calls are replaced for the
 * whole program, SQLite included. */
#include "stores.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/syscall.h>

enum { TOKENS = 300 };

static atomic_int countdown = -1; /* writing calls until the first that fails; negative: none does */
static atomic_bool forever;       /* and all after it */
static atomic_int reading_fails;  /* errno of every pread, 0: none */
static atomic_int opening_fails;  /* of every opening of a segment's file, to read it */
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
    return fails() ? -1 : syscall(SYS_pwrite64, fd, p, n, offset);
}

ssize_t pread64(int fd, void *p, size_t n, off64_t offset)
{
    int e = atomic_load(&reading_fails);
    if (e) {
        errno = e;
        return -1;
    }
    return syscall(SYS_pread64, fd, p, n, offset);
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

static void save_text(t_store *t, int32_t k)
{
    int32_t ids[TOKENS];
    eng_segment *s = text(k, ids);
    ck_assert_int_eq(eng_store_save(t->store, s), 0);
    eng_store_flush(t->store);
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
    tcase_add_test(c, reading);
    tcase_add_test(c, no_room);
    suite_add_tcase(s, c);
    return t_run(s);
}
