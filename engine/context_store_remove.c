/* What leaves the disk tier: for what comes, with a name that goes, because its file cannot be used. */
#include "context_store_private.h"

#include "fault.h"

#include <stdlib.h>

int eng_store_forget(eng_store *s, eng_mirror_entry *e)
{
    int r = eng_catalog_remove(s->catalog, &e->head.id);
    eng_fault_point("remove:row");
    if (r == 0)
        r = eng_folder_remove(&s->folder, &e->head.id);
    eng_fault_point("remove:file");
    pthread_mutex_lock(&s->lock);
    if (r == 0)
        eng_mirror_remove(&s->mirror, e);
    else
        e->unusable = true;
    pthread_mutex_unlock(&s->lock);
    return r;
}

int eng_store_forget_tree(eng_store *s, const eng_segment_id *id)
{
    for (;;) {
        pthread_mutex_lock(&s->lock);
        eng_mirror_entry *e = eng_mirror_get(&s->mirror, id);
        e = e ? eng_mirror_leaf(&s->mirror, e) : NULL;
        pthread_mutex_unlock(&s->lock);
        int r = e ? eng_store_forget(s, e) : 0;
        if (!e || r < 0)
            return r;
    }
}

static void mark_tokens(void *ctx, const eng_prefix *p)
{
    eng_mirror *m = ctx;
    eng_mirror_trace(m, p);
    for (uint32_t i = 0; i < m->n; i++)
        m->entries[i]->named = m->entries[i]->named || m->entries[i]->path;
}

/* With the lock held. */
static void mark_named(eng_store *s)
{
    for (uint32_t i = 0; i < s->mirror.n; i++)
        s->mirror.entries[i]->named = false;
    if (s->p.names)
        eng_names_each(s->p.names, mark_tokens, &s->mirror);
}

/* Chooses what goes for `bytes` more, and lets nobody begin to read it. The number of victims; ENG_STORE_REFUSED: they may not make that room. -EFBIG, -ENOMEM. */
static int64_t choose_victims(eng_store *s, uint64_t bytes, const eng_segment_id *parent, uint64_t claim, eng_mirror_entry ***ret)
{
    eng_room room = {.limit = s->p.disk.limit, .bytes = bytes, .claim = claim};
    pthread_mutex_lock(&s->lock);
    eng_mirror_entry *e = eng_mirror_get(&s->mirror, parent);
    if (e)
        e->pins++;
    if (s->mirror.bytes + bytes > room.limit)
        mark_named(s);
    int64_t n = bytes > room.limit ? -EFBIG : eng_mirror_choose(&s->mirror, &room, ret);
    if (n == -ENOSPC && claim == UINT64_MAX) { /* a smaller budget than names were given under: they keep their tokens' ids */
        for (uint32_t i = 0; i < s->mirror.n; i++)
            s->mirror.entries[i]->named = false;
        n = eng_mirror_choose(&s->mirror, &room, ret);
    }
    for (int64_t i = 0; i < n; i++) {
        eng_mirror_entry *v = (*ret)[i];
        v->unusable = true;
        eng_evicted_add(&s->mirror.evicted, v->head.tenant, v->head.start, v->ids, v->head.n);
    }
    if (e)
        e->pins--;
    pthread_mutex_unlock(&s->lock);
    return n == -ENOSPC ? ENG_STORE_REFUSED : n;
}

int eng_store_make_room(eng_store *s, uint64_t bytes, const eng_segment_id *parent, uint64_t claim)
{
    eng_mirror_entry **victims = NULL;
    int64_t n = choose_victims(s, bytes, parent, claim, &victims);
    int r = n < 0 ? (int)n : 0;
    for (int64_t i = 0; i < n; i++)
        if (r == 0 && (r = eng_store_forget(s, victims[i])) == 0) {
            pthread_mutex_lock(&s->lock);
            s->stats.evictions++;
            pthread_mutex_unlock(&s->lock);
        }
    free(victims);
    uint64_t space = eng_folder_free(&s->folder);
    return r == 0 && (space < bytes || space - bytes < s->p.disk.keep_free) ? -ENOSPC : r;
}

/* The last entry of a name's, which merging may have joined with what goes on from there. With the lock held. */
static eng_mirror_entry *last_of(eng_store *s, const eng_prefix *p)
{
    eng_mirror_entry *last = NULL;
    eng_mirror_trace(&s->mirror, p);
    for (uint32_t i = 0; i < s->mirror.n; i++) {
        eng_mirror_entry *e = s->mirror.entries[i];
        if (!e->unusable && eng_mirror_ends(e, p) && (!last || e->match > last->match))
            last = e;
    }
    return last;
}

static bool has_usable_children(const eng_store *s, const eng_mirror_entry *e)
{
    for (uint32_t i = 0; i < s->mirror.n; i++)
        if (s->mirror.entries[i]->parent == e && !s->mirror.entries[i]->unusable)
            return true;
    return false;
}

/* The next of what goes with a name, which nobody can begin to read any more. *io_end: where its tokens end on disk; -1 at first.
 * With the lock held. */
static bool condemn_next(eng_store *s, const eng_prefix *p, int64_t *io_end, eng_segment_id *ret)
{
    mark_named(s);
    eng_mirror_entry *e = last_of(s, p);
    *io_end = *io_end < 0 && e ? e->match : *io_end;
    bool goes = e && (e->match == *io_end || !has_usable_children(s, e)) && eng_mirror_condemn(&s->mirror, e);
    if (goes)
        *ret = e->head.id;
    return goes;
}

void eng_store_drop_name(void *ctx, const eng_prefix *p)
{
    eng_store *s = ctx;
    int64_t end = -1;
    for (;;) {
        eng_segment_id id;
        pthread_mutex_lock(&s->lock);
        bool goes = condemn_next(s, p, &end, &id);
        pthread_mutex_unlock(&s->lock);
        if (!goes || eng_store_forget_tree(s, &id) < 0)
            return;
    }
}

/* A job is not wanted when what it writes agrees with these tokens, and neither a name needs that, nor what continues it and is on its way, too. With the lock held. */
static void disown(eng_store *s, eng_store_job *j, const eng_prefix *p)
{
    bool needed = !j->seg || !eng_prefix_agrees(p, j->seg);
    for (eng_store_job *k = s->queue.first; k && !needed; k = k->next)
        for (const eng_segment *seg = k->seg; seg && !needed; seg = seg->parent)
            needed = seg == j->seg && s->p.names && eng_names_need(s->p.names, k->seg);
    j->unwanted = j->unwanted || !(needed || (s->p.names && eng_names_need(s->p.names, j->seg)));
}

void eng_store_forget_tokens(eng_store *s, const eng_prefix *p)
{
    int64_t end = -1;
    bool goes = true;
    pthread_mutex_lock(&s->lock);
    if (s->running)
        disown(s, s->running, p);
    for (eng_store_job *j = s->queue.first; j; j = j->next)
        disown(s, j, p);
    pthread_mutex_unlock(&s->lock);
    while (goes) {
        eng_store_job *j = calloc(1, sizeof *j);
        if (!j)
            return; /* what was written meanwhile is left to eviction */
        pthread_mutex_lock(&s->lock);
        goes = condemn_next(s, p, &end, &j->head.id);
        if (goes)
            eng_store_enqueue_locked(s, j);
        pthread_mutex_unlock(&s->lock);
        if (!goes)
            free(j);
    }
}
