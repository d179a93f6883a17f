#include "context_stock.h"

#include "fault.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <syslog.h>

/* A segment that the catalog or the folder says is there. */
typedef struct {
    eng_catalog_row row; /* ids owned; NULL: nothing can be made of it */
    bool listed, found;  /* by the catalog, in the folder with the right size */
} candidate;

typedef struct {
    const eng_stock *s;
    candidate *all; /* those that the catalog lists come first, in the order of their ids */
    size_t n, n_listed, cap;
    bool failed;
} inventory;

static candidate *add_candidate(inventory *v)
{
    if (v->n == v->cap) {
        size_t cap = v->cap ? 2 * v->cap : 64;
        candidate *p = realloc(v->all, cap * sizeof *p);
        if (!p) {
            v->failed = true;
            return NULL;
        }
        v->all = p;
        v->cap = cap;
    }
    v->all[v->n] = (candidate){0};
    return &v->all[v->n++];
}

static int list_row(void *ctx, const eng_catalog_row *row)
{
    inventory *v = ctx;
    candidate *c = add_candidate(v);
    int32_t *ids = c ? malloc((size_t)row->head.n * sizeof *ids) : NULL;
    if (!ids) {
        v->failed = true;
        return -ENOMEM;
    }
    memcpy(ids, row->ids, (size_t)row->head.n * sizeof *ids);
    c->row = *row;
    c->row.ids = ids;
    c->listed = true;
    return 0;
}

/* A file that has to go; another one may stand for it in a later prompt. */
static void drop(const inventory *v, eng_miss why, const char *reason)
{
    char text[320];
    v->s->misses[why]++;
    if (!v->s->log)
        return;
    snprintf(text, sizeof text, "a file of a kept context is removed (%s): %s", eng_miss_name(why), reason);
    v->s->log(v->s->log_ctx, LOG_WARNING, text);
}

/* A file says itself what it is, where the catalog does not know it or is wrong about its size. */
static void read_file(inventory *v, candidate *c, const eng_segment_id *id)
{
    eng_segment_file *f = NULL;
    char err[256] = "its name is another segment's";
    int32_t *ids = NULL;
    eng_miss why = eng_folder_file(v->s->folder, id, &f, err, sizeof err);
    if (!why && !eng_segment_id_equal(&eng_segment_file_head(f)->id, id))
        why = ENG_MISS_TOKENS;
    if (!why)
        why = eng_segment_file_ids(f, &ids, err, sizeof err);
    if (why == ENG_MISS_MEMORY)
        v->failed = true;
    else if (why)
        drop(v, why, err);
    free((void *)c->row.ids);
    c->row = why ? (eng_catalog_row){.head.id = *id} : (eng_catalog_row){.head = *eng_segment_file_head(f), .ids = ids};
    c->listed = false;
    c->found = true;
    eng_segment_file_close(f);
}

static int by_id(const void *a, const void *b)
{
    return memcmp(&((const candidate *)a)->row.head.id, &((const candidate *)b)->row.head.id, sizeof(eng_segment_id));
}

static void find_file(void *ctx, const eng_segment_id *id, int64_t bytes)
{
    inventory *v = ctx;
    candidate key = {.row.head.id = *id}, *c = v->n_listed ? bsearch(&key, v->all, v->n_listed, sizeof key, by_id) : NULL;
    if (c && bytes == (int64_t)c->row.head.bytes)
        c->found = true;
    else if (c || (c = add_candidate(v)))
        read_file(v, c, id);
}

static int by_start(const void *a, const void *b)
{
    uint32_t x = ((const candidate *)a)->row.head.start, y = ((const candidate *)b)->row.head.start;
    return (x > y) - (x < y);
}

/* qsort() takes no NULL, which no candidates are. */
static void sort(inventory *v, int (*order)(const void *, const void *))
{
    if (v->n)
        qsort(v->all, v->n, sizeof *v->all, order);
}

/* Catalog, folder and mirror agree after this: what lacks its row gets one, what lacks its file, its ancestors or its sense goes. -EBADMSG: a row and
 * its file may both be right for all one can tell, but not together with others. */
static int settle(const eng_stock *s, inventory *v)
{
    int r = eng_catalog_begin(s->catalog);
    sort(v, by_start);
    for (size_t i = 0; i < v->n && r == 0; i++) {
        candidate *c = &v->all[i];
        eng_mirror_entry *e;
        int added = c->row.ids && c->found ? eng_mirror_add(s->mirror, &c->row, s->owner, &e) : -ENOENT;
        if (added == 0)
            r = c->listed ? 0 : eng_catalog_put(s->catalog, &c->row);
        else if (added == -ENOMEM || (c->listed && c->found))
            r = added == -ENOMEM ? added : -EBADMSG;
        else if ((r = eng_catalog_remove(s->catalog, &c->row.head.id)) == 0)
            eng_folder_remove(s->folder, &c->row.head.id);
    }
    eng_fault_point("start:settled");
    return r < 0 ? r : eng_catalog_commit(s->catalog);
}

int eng_stock_take(const eng_stock *s)
{
    inventory v = {.s = s};
    int r = eng_catalog_each(s->catalog, list_row, &v);
    v.n_listed = v.n;
    if (r == 0) {
        sort(&v, by_id);
        r = eng_folder_each(s->folder, find_file, &v);
    }
    if (r == 0 && v.failed)
        r = -ENOMEM;
    if (r == 0)
        r = settle(s, &v);
    for (size_t i = 0; i < v.n; i++)
        free((void *)v.all[i].row.ids);
    free(v.all);
    return r;
}
