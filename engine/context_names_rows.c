/* Named contexts as others see them: lists, and the catalog's rows. */
#include "context_names_private.h"

#include "fault.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

eng_prefix eng_names_prefix(const eng_context *c)
{
    return (eng_prefix){.tenant = c->tenant, .ids = c->ids, .n = (uint32_t)c->content.n_ids};
}

/* ---- listing ----------------------------------------------------------------------------------------------------- */

/* With the lock held. */
static eng_context_info describe(const eng_context *c)
{
    eng_context_info i = {
        .kind = c->content.kind, .state = atomic_load(&c->state), .pinned = c->pinned, .created = c->created, .expires = c->expires, .used = c->used,
        .hits = c->hits, .tokens = (uint32_t)c->content.n_ids, .read = atomic_load(&c->read), .ram_tokens = atomic_load(&c->ram_tokens),
        .ram_bytes = atomic_load(&c->ram_bytes), .indexes = atomic_load(&c->indexes), .indexes_ready = atomic_load(&c->indexes_ready),
    };
    memcpy(i.name, c->name, sizeof i.name);
    if (i.state == ENG_CONTEXT_FAILED)
        memcpy(i.error, c->error, sizeof i.error);
    return i;
}

/* The living ones of a tenant, or the one; a reference to each. */
static int collect(eng_names *n, uint64_t tenant, const char *name, eng_context **contexts, eng_context_info *infos)
{
    eng_context *one = NULL;
    int r = name ? eng_names_find(n, tenant, name, &one) : 0, found = 0;
    for (uint32_t i = 0; i < n->n && r == 0; i++) {
        eng_context *c = n->all[i];
        if (one ? c != one : c->gone || c->model != n->model || c->tenant != tenant || eng_names_expired(n, c))
            continue;
        contexts[found] = eng_names_ref(c);
        infos[found++] = describe(c);
    }
    return r < 0 ? r : found;
}

int eng_names_list(eng_names *n, uint64_t tenant, const char *name, eng_names_disk *disk, void *ctx, eng_context_info **ret)
{
    pthread_mutex_lock(&n->lock);
    eng_context_info *infos = calloc(n->n + 1, sizeof *infos);
    eng_context **contexts = calloc(n->n + 1, sizeof *contexts);
    int r = infos && contexts ? collect(n, tenant, name, contexts, infos) : -ENOMEM;
    pthread_mutex_unlock(&n->lock);
    for (int i = 0; i < r; i++) {
        eng_prefix p = eng_names_prefix(contexts[i]);
        if (disk)
            disk(ctx, &p, &infos[i].disk_tokens, &infos[i].disk_bytes);
        eng_names_unref(contexts[i]);
    }
    free(contexts);
    if (r < 0)
        free(infos);
    else
        *ret = infos;
    return r;
}

int eng_names_items(eng_names *n, eng_names_item **ret)
{
    int found = 0;
    pthread_mutex_lock(&n->lock);
    eng_names_item *items = calloc(n->n + 1, sizeof *items);
    for (uint32_t i = 0; i < n->n && items; i++) {
        eng_context *c = n->all[i];
        if (!c->gone && c->model == n->model && (!eng_names_expired(n, c) || atomic_load(&c->users)))
            items[found++] = (eng_names_item){eng_names_ref(c), eng_names_prefix(c), c->pinned};
    }
    n->served = items ? n->version : n->served;
    pthread_mutex_unlock(&n->lock);
    if (!items)
        return -ENOMEM;
    *ret = items;
    return found;
}

uint64_t eng_names_version(eng_names *n)
{
    pthread_mutex_lock(&n->lock);
    uint64_t version = n->version;
    pthread_mutex_unlock(&n->lock);
    return version;
}

void eng_names_each(eng_names *n, void (*each)(void *ctx, const eng_prefix *p), void *ctx)
{
    pthread_mutex_lock(&n->lock);
    for (uint32_t i = 0; i < n->n; i++) {
        const eng_context *c = n->all[i];
        if (atomic_load(&c->users) || (!c->gone && !eng_names_expired(n, c))) {
            eng_prefix p = eng_names_prefix(c);
            each(ctx, &p);
        }
    }
    pthread_mutex_unlock(&n->lock);
}

typedef struct {
    const eng_segment *seg;
    bool needed;
} need;

static void look_for(void *ctx, const eng_prefix *p)
{
    need *w = ctx;
    w->needed = w->needed || (w->seg->start < p->n && eng_prefix_agrees(p, w->seg));
}

bool eng_names_need(eng_names *n, const eng_segment *s)
{
    need w = {.seg = s};
    eng_names_each(n, look_for, &w);
    return w.needed;
}

/* ---- the catalog ------------------------------------------------------------------------------------------------- */

int eng_names_load(eng_names *n, const eng_catalog_name *row)
{
    eng_context *c = eng_names_is_name(row->name) && row->content.n_ids ? eng_names_context(&row->content) : NULL;
    if (!c)
        return eng_names_is_name(row->name) && row->content.n_ids ? -ENOMEM : 0; /* of no use */
    c->tenant = row->tenant;
    c->model = row->model;
    c->created = row->created;
    c->expires = row->expires;
    c->pinned = row->pinned;
    c->used = row->used;
    c->hits = row->hits;
    snprintf(c->name, sizeof c->name, "%s", row->name);
    snprintf(c->row, sizeof c->row, "%s", row->name);
    atomic_store(&c->state, ENG_CONTEXT_READY);
    pthread_mutex_lock(&n->lock);
    int r = eng_names_add(n, c);
    pthread_mutex_unlock(&n->lock);
    eng_names_unref(c);
    return r;
}

static eng_catalog_name row_of(const eng_context *c, const eng_names_terms *t)
{
    return (eng_catalog_name){.tenant = c->tenant, .model = c->model, .name = t->name, .content = c->content, .pinned = t->pinned, .created = c->created,
                              .expires = t->expires, .used = c->used, .hits = c->hits};
}

/* The next one whose row is not as it should be, those that are gone first: another one may have their name by now. With the lock held. */
static eng_context *next_unwritten(eng_names *n)
{
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < n->n; i++) {
            eng_context *c = n->all[i];
            if (c->tried != n->pass && (pass ? !c->gone && (c->unsaved || c->touched) : c->gone && (*c->row || !atomic_load(&c->users))))
                return c;
        }
    return NULL;
}

/* Whether another one has that name by now: its row takes the place of this one's. With the lock held. */
static bool is_replaced(const eng_names *n, const eng_context *c)
{
    for (uint32_t i = 0; i < n->n; i++) {
        const eng_context *a = n->all[i];
        if (!a->gone && a->model == c->model && a->tenant == c->tenant && !strcmp(a->name, c->row))
            return true;
    }
    return false;
}

static void drop_tokens(const eng_context *c, void (*drop)(void *ctx, const eng_prefix *p), void *ctx)
{
    eng_prefix p = eng_names_prefix(c);
    drop(ctx, &p);
}

void eng_names_write(eng_names *n, eng_catalog *catalog, void (*drop)(void *ctx, const eng_prefix *p), void *ctx)
{
    eng_context *c;
    pthread_mutex_lock(&n->lock);
    n->pass++;
    while ((c = next_unwritten(n))) {
        eng_names_terms t = eng_names_terms_of(eng_names_ref(c));
        eng_catalog_name row = row_of(c, &t);
        char old[ENG_NAME_MAX + 1];
        bool gone = c->gone, unsaved = c->unsaved, has_row = *c->row && !(gone && is_replaced(n, c));
        memcpy(old, c->row, sizeof old);
        c->tried = n->pass;
        c->unsaved = c->touched = false;
        pthread_mutex_unlock(&n->lock);
        int r = 0;
        eng_fault_point("name:begin");
        if (gone)
            r = has_row ? eng_catalog_remove_name(catalog, row.tenant, row.model, old) : 0;
        else
            r = unsaved ? eng_catalog_put_name(catalog, &row, old) : eng_catalog_touch_name(catalog, &row);
        eng_fault_point("name:written");
        bool over = gone && r == 0 && !atomic_load(&c->users); /* nobody can begin to use it */
        if (over)
            drop_tokens(c, drop, ctx);
        eng_fault_point("name:dropped");
        pthread_mutex_lock(&n->lock);
        c->result = r;
        if (r == 0)
            snprintf(c->row, sizeof c->row, "%s", gone ? "" : t.name);
        if (over)
            eng_names_take_out(n, c);
        eng_names_unref(c);
    }
    pthread_mutex_unlock(&n->lock);
}
