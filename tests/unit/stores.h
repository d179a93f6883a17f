/* A folder of its own for a test's contexts, and stores over it. */
#ifndef RETRIEVALD_TESTS_STORES_H
#define RETRIEVALD_TESTS_STORES_H

#include "context_cache.h"
#include "context_store.h"
#include "segments.h"

#include <dirent.h>
#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FINGERPRINT = 77, MODEL = 78 };

typedef struct {
    char dir[64];
    eng_store *store;
    eng_pool *pool;
    char log[4096]; /* all lines since the store was opened */
    bool with_names; /* a table of names, too, made with the store */
    eng_names *names;
    int64_t clock; /* theirs and the store's */
} t_store;

static inline int64_t t_store_clock(void *ctx)
{
    const t_store *t = ctx;
    return t->clock;
}

static inline void t_store_sync(void *ctx, bool wait)
{
    t_store *t = ctx;
    eng_store_sync_names(t->store, wait);
}

static inline void t_store_log(void *ctx, int level, const char *text)
{
    t_store *t = ctx;
    size_t n = strlen(t->log);
    (void)level;
    snprintf(t->log + n, sizeof t->log - n, "%s\n", text);
}

static inline int t_store_try(t_store *t, uint64_t limit, uint64_t fingerprint, const eng_kv_shape *s)
{
    char err[256] = "";
    eng_store_params p = {.disk = {.dir = t->dir, .limit = limit, .now = t_store_clock, .now_ctx = t}, .owner = {.fingerprint = fingerprint, .shape = s},
                          .pool = t->pool, .log = t_store_log, .log_ctx = t};
    eng_names_budget budget = {.ram_limit = limit, .disk_limit = limit, .token_bytes = 512};
    t->log[0] = 0;
    eng_names_free(t->names);
    t->names = NULL;
    if (t->with_names) {
        ck_assert_int_eq(eng_names_new(MODEL, &t->names), 0);
        eng_names_setup(t->names, &budget, t_store_clock, t, t_store_sync, t);
    }
    p.names = t->names;
    int r = eng_store_open(&p, &t->store, err, sizeof err);
    if (r < 0)
        t_store_log(t, 0, err);
    return r;
}

static inline void t_store_open(t_store *t, uint64_t limit)
{
    int r = t_store_try(t, limit, FINGERPRINT, &shape);
    ck_assert_msg(r == 0, "%s", t->log);
}

static inline t_store t_store_new(uint64_t limit)
{
    t_store t = {.dir = "/tmp/retrievald-test.XXXXXX", .clock = 1000000};
    ck_assert_ptr_nonnull(mkdtemp(t.dir));
    ck_assert_int_eq(eng_pool_new(2, &t.pool), 0);
    t_store_open(&t, limit); /* the log is this copy's: opened again by the caller where it matters */
    eng_store_close(t.store);
    t.store = NULL;
    return t;
}

static inline int t_remove_one(const char *path, const struct stat *st, int type, struct FTW *f)
{
    (void)st, (void)type, (void)f;
    return remove(path);
}

static inline void t_store_done(t_store *t)
{
    eng_store_close(t->store);
    eng_names_free(t->names);
    eng_pool_free(t->pool);
    nftw(t->dir, t_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static inline void t_store_reopen(t_store *t, uint64_t limit)
{
    eng_store_close(t->store);
    t->store = NULL;
    t_store_open(t, limit);
}

static inline eng_miss t_store_find(t_store *t, uint64_t tenant, const int32_t *ids, uint32_t n, bool exact_only, uint32_t have, eng_store_chain *ret)
{
    eng_prefix p = {tenant, ids, n, exact_only};
    eng_prefix_stop stop;
    return eng_store_find(t->store, &p, have, ret, &stop);
}

/* A reference to a segment as a whole. */
static inline eng_miss t_store_load(t_store *t, const eng_segment_id *id, const eng_segment_reader *reader, eng_segment *parent, eng_segment **ret)
{
    eng_store_load *l;
    bool rows;
    eng_miss why = eng_store_load_begin(t->store, id, reader, parent, &l, ret);
    if (!why && (why = eng_store_load_end(t->store, l, &rows)))
        eng_segment_unref(*ret);
    return why;
}

/* Length of what was found and could be read of ids[0, n); the rows are checked. */
static inline uint32_t t_store_read(t_store *t, const int32_t *ids, uint32_t n, bool exact_only)
{
    eng_store_chain c = {0};
    eng_segment_reader reader = {.pool = t->pool};
    if (t_store_find(t, 0, ids, n, exact_only, 0, &c))
        return 0;
    eng_view v = {0};
    eng_segment *parent = NULL;
    uint32_t end = 0;
    for (uint32_t i = 0; i < c.n; i++) {
        eng_segment *s;
        if (t_store_load(t, &c.links[i].id, &reader, parent, &s))
            break;
        ck_assert(!exact_only || s->exact);
        ck_assert_uint_eq(s->start, c.links[i].start);
        end = i + 1 < c.n ? c.links[i + 1].start : c.length;
        ck_assert_int_eq(eng_view_add(&v, s, s->start, end), 0);
        eng_segment_unref(s);
        parent = s;
    }
    free(c.links);
    if (end)
        check_rows(&v, ids, end);
    eng_view_done(&v);
    return end;
}

/* Files below segments/, those with a segment's name and all. */
static inline void t_store_count(const t_store *t, uint32_t *ret_segments, uint32_t *ret_all)
{
    char path[400];
    *ret_segments = *ret_all = 0;
    for (int i = 0; i < 256; i++) {
        snprintf(path, sizeof path, "%s/segments/%02x", t->dir, i);
        DIR *d = opendir(path);
        for (struct dirent *e; d && (e = readdir(d));)
            if (e->d_name[0] != '.' || e->d_name[1]) {
                *ret_all += strcmp(e->d_name, "..") != 0;
                *ret_segments += strlen(e->d_name) == 36 && !strcmp(e->d_name + 32, ".seg");
            }
        if (d)
            closedir(d);
    }
}

static inline eng_disk_stats t_store_stats(t_store *t)
{
    eng_disk_stats st;
    eng_store_stats(t->store, &st);
    return st;
}

/* Path of the file of a segment that has an id. */
static inline void t_store_path(const t_store *t, const eng_segment_id *id, char *ret, size_t size)
{
    char name[ENG_SEGMENT_NAME];
    eng_segment_id_text(id, name);
    snprintf(ret, size, "%s/segments/%.2s/%s.seg", t->dir, name, name);
}

#endif
