#include "context_catalog.h"

#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#define VERSION "2"

typedef enum { PUT, REMOVE, TOUCH, PUT_NAME, REMOVE_NAME, TOUCH_NAME, BEGIN, COMMIT, ROLLBACK, N_STATEMENTS } statement;

static const char *const sql[N_STATEMENTS] = {
    [PUT] = "INSERT OR REPLACE INTO segments VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)",
    [REMOVE] = "DELETE FROM segments WHERE id = ?1",
    [TOUCH] = "UPDATE segments SET used = ?2, hits = ?3 WHERE id = ?1",
    [PUT_NAME] = "INSERT OR REPLACE INTO contexts VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
    [REMOVE_NAME] = "DELETE FROM contexts WHERE tenant = ?1 AND model = ?2 AND name = ?3",
    [TOUCH_NAME] = "UPDATE contexts SET used = ?4, hits = ?5 WHERE tenant = ?1 AND model = ?2 AND name = ?3",
    [BEGIN] = "BEGIN IMMEDIATE",
    [COMMIT] = "COMMIT",
    [ROLLBACK] = "ROLLBACK",
};

static const char schema[] = "CREATE TABLE segments (id BLOB PRIMARY KEY, parent BLOB NOT NULL, tenant INTEGER, fingerprint INTEGER, start INTEGER, n INTEGER,"
                             " n_layer INTEGER, n_head_kv INTEGER, head_dim INTEGER, type_k INTEGER, type_v INTEGER, exact INTEGER, bytes INTEGER,"
                             " created INTEGER, used INTEGER, hits INTEGER, ids BLOB NOT NULL) WITHOUT ROWID;"
                             "CREATE TABLE contexts (tenant INTEGER, model INTEGER, name TEXT, kind INTEGER, rendered INTEGER, pinned INTEGER,"
                             " created INTEGER, expires INTEGER, used INTEGER, hits INTEGER, source BLOB, ids BLOB, checksum INTEGER,"
                             " PRIMARY KEY (tenant, model, name));"
                             "PRAGMA user_version = " VERSION ";";

struct eng_catalog {
    sqlite3 *db;
    sqlite3_stmt *statements[N_STATEMENTS];
};

static int fail(const eng_catalog *c)
{
    switch (sqlite3_errcode(c->db) & 0xff) {
    case SQLITE_FULL: return -ENOSPC;
    case SQLITE_READONLY: return -EROFS;
    case SQLITE_NOMEM: return -ENOMEM;
    default: return -EIO;
    }
}

static int step(eng_catalog *c, statement s)
{
    int rc = sqlite3_step(c->statements[s]), r = rc == SQLITE_DONE ? 0 : fail(c);
    sqlite3_reset(c->statements[s]);
    sqlite3_clear_bindings(c->statements[s]);
    return r;
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

static bool yields(sqlite3 *db, const char *query, const char *want)
{
    sqlite3_stmt *s = NULL;
    bool same = false;
    if (sqlite3_prepare_v2(db, query, -1, &s, NULL) == SQLITE_OK && sqlite3_step(s) == SQLITE_ROW) {
        const char *got = (const char *)sqlite3_column_text(s, 0);
        same = got && !strcmp(got, want);
    }
    sqlite3_finalize(s);
    return same;
}

/* Opens what is there; false: it cannot be used. */
static bool open_database(eng_catalog *c, const char *path, bool is_new)
{
    if (sqlite3_open_v2(path, &c->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOFOLLOW, NULL) != SQLITE_OK)
        return false;
    /* Alone with the file, SQLite needs no shared memory beside it. */
    if (!yields(c->db, "PRAGMA locking_mode = EXCLUSIVE", "exclusive") || !yields(c->db, "PRAGMA journal_mode = WAL", "wal") ||
        sqlite3_exec(c->db, "PRAGMA synchronous = FULL", NULL, NULL, NULL) != SQLITE_OK)
        return false;
    if (is_new ? sqlite3_exec(c->db, schema, NULL, NULL, NULL) != SQLITE_OK
               : !yields(c->db, "PRAGMA user_version", VERSION) || !yields(c->db, "PRAGMA quick_check(1)", "ok"))
        return false;
    for (int i = 0; i < N_STATEMENTS; i++)
        if (sqlite3_prepare_v3(c->db, sql[i], -1, SQLITE_PREPARE_PERSISTENT, &c->statements[i], NULL) != SQLITE_OK)
            return false;
    return true;
}

static void close_database(eng_catalog *c)
{
    for (int i = 0; i < N_STATEMENTS; i++) {
        sqlite3_finalize(c->statements[i]);
        c->statements[i] = NULL;
    }
    sqlite3_close(c->db);
    c->db = NULL;
}

/* 1: an empty file for it is there now, 0: one was there. Its own files get the same rights from SQLite. */
static int make_file(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return errno == EEXIST ? 0 : -errno;
    close(fd);
    return 1;
}

static int delete_files(const char *path)
{
    static const char *const suffixes[] = {"", "-wal", "-shm", "-journal"};
    char name[PATH_MAX];
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++)
        if ((size_t)snprintf(name, sizeof name, "%s%s", path, suffixes[i]) < sizeof name && unlink(name) < 0 && errno != ENOENT)
            return -errno;
    return 0;
}

/* Names, between a catalog and the one that takes its place. */
typedef struct {
    eng_catalog_name *rows;
    size_t n, cap;
} name_list;

static void list_done(name_list *l)
{
    for (size_t i = 0; i < l->n; i++) {
        free((void *)l->rows[i].name);
        free((void *)l->rows[i].content.source);
        free((void *)l->rows[i].content.ids);
    }
    free(l->rows);
}

static void *copy_of(const void *p, size_t n)
{
    void *copy = malloc(n ? n : 1);
    return copy && n ? memcpy(copy, p, n) : copy;
}

static int list_name(void *ctx, const eng_catalog_name *r)
{
    name_list *l = ctx;
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 16;
        eng_catalog_name *p = realloc(l->rows, cap * sizeof *p);
        if (!p)
            return -ENOMEM;
        l->rows = p;
        l->cap = cap;
    }
    eng_catalog_name *own = &l->rows[l->n];
    *own = *r;
    own->name = copy_of(r->name, strlen(r->name) + 1);
    own->content.source = copy_of(r->content.source, r->content.source_len);
    own->content.ids = copy_of(r->content.ids, r->content.n_ids * sizeof *r->content.ids);
    if (own->name && own->content.source && own->content.ids) {
        l->n++;
        return 0;
    }
    free((void *)own->name);
    free((void *)own->content.source);
    free((void *)own->content.ids);
    return -ENOMEM;
}

/* A catalog that is to go: its names, as far as they can be read. */
static void rescue_names(eng_catalog *c, const char *path, name_list *l)
{
    if (c->db || sqlite3_open_v2(path, &c->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOFOLLOW, NULL) == SQLITE_OK)
        eng_catalog_each_name(c, list_name, l);
    close_database(c);
}

static int put_back(eng_catalog *c, const name_list *l)
{
    int r = 0;
    for (size_t i = 0; i < l->n && r == 0; i++)
        r = eng_catalog_put_name(c, &l->rows[i], "");
    return r;
}

static int make_anew(const char *path)
{
    int r = delete_files(path);
    return r < 0 ? r : make_file(path);
}

int eng_catalog_open(const char *path, bool anew, eng_catalog **ret, bool *ret_new, char *err, size_t errlen)
{
    name_list names = {0};
    eng_catalog *c = calloc(1, sizeof *c);
    if (!c)
        return eng_fail(err, errlen, -ENOMEM, "out of memory");
    if (anew)
        rescue_names(c, path, &names);
    int made = anew ? make_anew(path) : make_file(path), r = 0;
    bool ok = made >= 0 && open_database(c, path, made > 0);
    if (made == 0 && !ok) { /* damaged */
        rescue_names(c, path, &names);
        made = make_anew(path);
        ok = made >= 0 && open_database(c, path, true);
    }
    if (ok)
        r = put_back(c, &names);
    list_done(&names);
    if (ok && r == 0) {
        *ret_new = made > 0;
        *ret = c;
        return 0;
    }
    r = made < 0 ? made : c->db ? fail(c) : -ENOMEM;
    eng_fail(err, errlen, r, "%s: %s", path, made >= 0 && c->db ? sqlite3_errmsg(c->db) : strerror(-r));
    eng_catalog_close(c);
    return r;
}

void eng_catalog_close(eng_catalog *c)
{
    if (!c)
        return;
    close_database(c);
    free(c);
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

static bool column_id(sqlite3_stmt *s, int column, eng_segment_id *ret)
{
    const void *p = sqlite3_column_blob(s, column);
    if (!p || sqlite3_column_bytes(s, column) != (int)sizeof *ret)
        return false;
    memcpy(ret, p, sizeof *ret);
    return true;
}

static bool column_row(sqlite3_stmt *s, eng_catalog_row *ret)
{
    enum { FIRST = 2, NUMBERS = 14 };
    eng_segment_head *h = &ret->head;
    int64_t v[NUMBERS];
    for (int i = 0; i < NUMBERS; i++)
        v[i] = sqlite3_column_int64(s, FIRST + i);
    for (int i = 2; i < 10; i++) /* start to exact */
        if (v[i] < 0 || v[i] > UINT32_MAX)
            return false;
    *h = (eng_segment_head){
        .tenant = (uint64_t)v[0], .fingerprint = (uint64_t)v[1], .start = (uint32_t)v[2], .n = (uint32_t)v[3], .n_layer = (uint32_t)v[4],
        .n_head_kv = (uint32_t)v[5], .head_dim = (uint32_t)v[6], .type_k = (uint32_t)v[7], .type_v = (uint32_t)v[8], .exact = v[9] != 0,
        .bytes = (uint64_t)v[10], .created = v[11],
    };
    ret->used = (uint64_t)v[12];
    ret->hits = (uint64_t)v[13];
    ret->ids = sqlite3_column_blob(s, FIRST + NUMBERS);
    size_t bytes = (size_t)sqlite3_column_bytes(s, FIRST + NUMBERS);
    return column_id(s, 0, &h->id) && column_id(s, 1, &h->parent) && h->n && ret->ids && bytes == (size_t)h->n * sizeof(int32_t);
}

int eng_catalog_each(eng_catalog *c, int (*row)(void *ctx, const eng_catalog_row *r), void *ctx)
{
    sqlite3_stmt *s = NULL;
    int rc, r = 0;
    if (sqlite3_prepare_v2(c->db, "SELECT * FROM segments", -1, &s, NULL) != SQLITE_OK)
        return fail(c);
    while (r == 0 && (rc = sqlite3_step(s)) == SQLITE_ROW) {
        eng_catalog_row one;
        r = column_row(s, &one) ? row(ctx, &one) : -EBADMSG;
    }
    if (r == 0 && rc != SQLITE_DONE)
        r = fail(c);
    sqlite3_finalize(s);
    return r;
}

int eng_catalog_put(eng_catalog *c, const eng_catalog_row *r)
{
    sqlite3_stmt *s = c->statements[PUT];
    const eng_segment_head *h = &r->head;
    int64_t v[] = {(int64_t)h->tenant, (int64_t)h->fingerprint, h->start, h->n, h->n_layer, h->n_head_kv, h->head_dim, h->type_k, h->type_v, h->exact,
                   (int64_t)h->bytes, h->created, (int64_t)r->used, (int64_t)r->hits};
    sqlite3_bind_blob(s, 1, &h->id, sizeof h->id, SQLITE_STATIC);
    sqlite3_bind_blob(s, 2, &h->parent, sizeof h->parent, SQLITE_STATIC);
    for (size_t i = 0; i < sizeof v / sizeof *v; i++)
        sqlite3_bind_int64(s, (int)(3 + i), v[i]);
    sqlite3_bind_blob64(s, 17, r->ids, (uint64_t)h->n * sizeof *r->ids, SQLITE_STATIC);
    return step(c, PUT);
}

int eng_catalog_remove(eng_catalog *c, const eng_segment_id *id)
{
    sqlite3_bind_blob(c->statements[REMOVE], 1, id, sizeof *id, SQLITE_STATIC);
    return step(c, REMOVE);
}

int eng_catalog_touch(eng_catalog *c, const eng_segment_id *id, uint64_t used, uint64_t hits)
{
    sqlite3_stmt *s = c->statements[TOUCH];
    sqlite3_bind_blob(s, 1, id, sizeof *id, SQLITE_STATIC);
    sqlite3_bind_int64(s, 2, (int64_t)used);
    sqlite3_bind_int64(s, 3, (int64_t)hits);
    return step(c, TOUCH);
}

int eng_catalog_begin(eng_catalog *c)
{
    return step(c, BEGIN);
}

int eng_catalog_commit(eng_catalog *c)
{
    int r = step(c, COMMIT);
    if (r < 0)
        step(c, ROLLBACK);
    return r;
}

/* ---- names ------------------------------------------------------------------------------------------------------- */

/* Of what does not change with every use. */
static int64_t name_checksum(const eng_catalog_name *r)
{
    const eng_context_content *k = &r->content;
    int64_t v[] = {(int64_t)r->tenant, (int64_t)r->model, k->kind, (int64_t)k->rendered, r->pinned, r->created, r->expires, (int64_t)k->source_len, (int64_t)k->n_ids};
    uint64_t h = XXH3_64bits(v, sizeof v);
    h = XXH3_64bits_withSeed(r->name, strlen(r->name), h);
    h = XXH3_64bits_withSeed(k->source, k->source_len, h);
    return (int64_t)XXH3_64bits_withSeed(k->ids, k->n_ids * sizeof *k->ids, h);
}

static bool column_name(sqlite3_stmt *s, eng_catalog_name *ret)
{
    int64_t v[10];
    for (int i = 0; i < 10; i++)
        v[i] = sqlite3_column_int64(s, i);
    const void *source = sqlite3_column_blob(s, 10), *ids = sqlite3_column_blob(s, 11);
    size_t source_len = (size_t)sqlite3_column_bytes(s, 10), id_bytes = (size_t)sqlite3_column_bytes(s, 11);
    *ret = (eng_catalog_name){
        .tenant = (uint64_t)v[0], .model = (uint64_t)v[1], .name = (const char *)sqlite3_column_text(s, 2), .pinned = v[5] != 0, .created = v[6],
        .expires = v[7], .used = v[8], .hits = (uint64_t)v[9],
        .content = {.kind = (eng_source)v[3], .rendered = (size_t)v[4], .source = source ? source : "", .source_len = source_len, .ids = ids,
                    .n_ids = id_bytes / sizeof(int32_t)},
    };
    return ret->name && ids && v[3] >= ENG_SOURCE_TOKENS && v[3] <= ENG_SOURCE_MESSAGES && id_bytes % sizeof(int32_t) == 0 &&
           name_checksum(ret) == sqlite3_column_int64(s, 12);
}

int eng_catalog_each_name(eng_catalog *c, int (*row)(void *ctx, const eng_catalog_name *r), void *ctx)
{
    sqlite3_stmt *s = NULL;
    int r = 0;
    if (sqlite3_prepare_v2(c->db,
                           "SELECT tenant, model, name, kind, rendered, pinned, created, expires, used, hits, source, ids, checksum FROM contexts"
                           " ORDER BY created, rowid",
                           -1, &s, NULL) != SQLITE_OK)
        return fail(c);
    while (r == 0 && sqlite3_step(s) == SQLITE_ROW) {
        eng_catalog_name one;
        r = column_name(s, &one) ? row(ctx, &one) : 0;
    }
    sqlite3_finalize(s);
    return r;
}

static sqlite3_stmt *bind_key(eng_catalog *c, statement s, uint64_t tenant, uint64_t model, const char *name)
{
    sqlite3_bind_int64(c->statements[s], 1, (int64_t)tenant);
    sqlite3_bind_int64(c->statements[s], 2, (int64_t)model);
    sqlite3_bind_text(c->statements[s], 3, name, -1, SQLITE_STATIC);
    return c->statements[s];
}

static int put_name(eng_catalog *c, const eng_catalog_name *r)
{
    const eng_context_content *k = &r->content;
    sqlite3_stmt *s = bind_key(c, PUT_NAME, r->tenant, r->model, r->name);
    int64_t v[] = {k->kind, (int64_t)k->rendered, r->pinned, r->created, r->expires, r->used, (int64_t)r->hits};
    for (size_t i = 0; i < sizeof v / sizeof *v; i++)
        sqlite3_bind_int64(s, (int)(4 + i), v[i]);
    sqlite3_bind_blob64(s, 11, k->source, k->source_len, SQLITE_STATIC);
    sqlite3_bind_blob64(s, 12, k->ids, k->n_ids * sizeof *k->ids, SQLITE_STATIC);
    sqlite3_bind_int64(s, 13, name_checksum(r));
    return step(c, PUT_NAME);
}

int eng_catalog_put_name(eng_catalog *c, const eng_catalog_name *r, const char *old)
{
    if (!*old || !strcmp(old, r->name))
        return put_name(c, r);
    int rc = eng_catalog_begin(c);
    if (rc < 0)
        return rc;
    rc = eng_catalog_remove_name(c, r->tenant, r->model, old);
    if (rc == 0)
        rc = put_name(c, r);
    if (rc == 0)
        return eng_catalog_commit(c);
    step(c, ROLLBACK);
    return rc;
}

int eng_catalog_remove_name(eng_catalog *c, uint64_t tenant, uint64_t model, const char *name)
{
    bind_key(c, REMOVE_NAME, tenant, model, name);
    return step(c, REMOVE_NAME);
}

int eng_catalog_touch_name(eng_catalog *c, const eng_catalog_name *r)
{
    sqlite3_stmt *s = bind_key(c, TOUCH_NAME, r->tenant, r->model, r->name);
    sqlite3_bind_int64(s, 4, r->used);
    sqlite3_bind_int64(s, 5, (int64_t)r->hits);
    return step(c, TOUCH_NAME);
}
