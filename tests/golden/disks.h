/* Engines over a folder of the test's own, with a clock of the test's. */
#ifndef RETRIEVALD_TESTS_DISKS_H
#define RETRIEVALD_TESTS_DISKS_H

#include "contexts.h"
#include "sessions.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[] = "/tmp/retrievald-test.XXXXXX";

static inline int remove_one(const char *path, const struct stat *st, int type, struct FTW *f)
{
    (void)st, (void)type, (void)f;
    return remove(path);
}

static inline void empty_dir(void)
{
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    ck_assert_int_eq(mkdir(dir, 0700), 0);
}

/* A clock of the test's. */
static int64_t the_time = 1000;

static inline int64_t test_clock(void *ctx)
{
    (void)ctx;
    return the_time;
}

static inline eng_engine *open_disk(size_t cache_ram, uint64_t limit)
{
    char err[256] = "";
    eng_engine *e = open_tiny(cache_ram, 2, false);
    eng_disk_params p = {.dir = dir, .limit = limit, .now = test_clock};
    ck_assert_msg(eng_disk_open(e, &p, err, sizeof err) == 0, "%s", err);
    return e;
}

static inline eng_disk_stats stats(const eng_engine *e)
{
    eng_disk_stats st;
    eng_disk_stats_get(e, &st);
    return st;
}

static inline void rest(eng_engine *e)
{
    while (eng_idle(e, 1000, NULL) || stats(e).saving)
        usleep(1000); /* the store thread's turn */
}

static inline int name_it(eng_engine *e, const char *name, const int32_t *ids, size_t n, bool pinned, int64_t ttl)
{
    eng_context *c;
    char err[256];
    eng_context_params p = {.name = name, .pinned = pinned, .ttl = ttl, .replace = true, .content = {.ids = ids, .n_ids = n}};
    int r = eng_context_make(e, &p, &c, err, sizeof err);
    if (r == 0)
        eng_context_release(c);
    return r;
}

static inline eng_context_info named(eng_engine *e, const char *name)
{
    eng_context_info *all, one;
    ck_assert_int_eq(eng_context_list(e, 0, name, &all), 1);
    one = all[0];
    free(all);
    return one;
}

/* Runs a suite of one case, whose folder goes with it. */
static inline int run_disk(const char *name, void (*add)(TCase *c))
{
    Suite *s = suite_create(name);
    TCase *c = tcase_create(name);
    if (!mkdtemp(dir))
        return 1;
    tcase_set_timeout(c, 0);
    add(c);
    suite_add_tcase(s, c);
    int status = t_run(s);
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return status;
}

#endif
