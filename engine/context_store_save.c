/* What comes to the disk tier: the engine thread gives segments their ids and queues them, the store thread writes them. */
#include "context_store_private.h"

#include "clock.h"
#include "fault.h"
#include "worth.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the engine thread --------------------------------------------------------------------------------------------- */

static int64_t now(const eng_store *s)
{
    return s->p.disk.now ? s->p.disk.now(s->p.disk.now_ctx) : (int64_t)time(NULL);
}

/* A segment and all before it, first one first. */
static eng_segment **chain_of(eng_segment *seg, uint32_t *ret_n, uint32_t *ret_end)
{
    uint32_t n = 0, end = 0;
    for (eng_segment *p = seg; p; p = p->parent, n++)
        end = p->start + p->n > end ? p->start + p->n : end;
    eng_segment **chain = malloc(n * sizeof *chain);
    *ret_n = n;
    *ret_end = end;
    for (eng_segment *p = seg; p && chain; p = p->parent)
        chain[--n] = p;
    return chain;
}

static bool is_known(eng_store *s, const eng_segment_id *id)
{
    eng_mirror_entry *e = eng_mirror_get(&s->mirror, id);
    bool known = (e && !e->unusable) || (s->running && s->running->seg && eng_segment_id_equal(&s->running->head.id, id));
    for (eng_store_job *j = s->queue.first; j && !known; j = j->next)
        known = j->seg && eng_segment_id_equal(&j->head.id, id);
    return known;
}

static int queue_segment(eng_store *s, eng_segment *seg, const eng_segment_head *head)
{
    pthread_mutex_lock(&s->lock);
    bool known = is_known(s, &head->id);
    pthread_mutex_unlock(&s->lock);
    if (known || seg->map) /* what a file gave is not written again: it could fail meanwhile */
        return 0;
    eng_store_job *j = malloc(sizeof *j);
    if (!j)
        return -ENOMEM;
    *j = (eng_store_job){.seg = eng_segment_ref(seg), .head = *head, .codes = eng_segment_coded(seg)};
    eng_store_enqueue(s, j);
    return 0;
}

/* What continues decoded tokens is not exact on disk, whatever computed it: an id stands for one history. */
int eng_store_save(eng_store *s, eng_segment *seg)
{
    uint32_t n, end;
    eng_segment **chain = chain_of(seg, &n, &end);
    int32_t *ids = chain ? malloc((size_t)end * sizeof *ids) : NULL;
    eng_segment_id parent = {0};
    bool exact = true;
    int r = ids ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < n && r == 0; i++) {
        eng_segment *p = chain[i];
        eng_segment_head head = eng_segment_head_of(&s->p.owner, p, eng_segment_coded(p));
        exact = exact && p->exact;
        head.exact = exact;
        head.parent = parent;
        head.created = now(s);
        memcpy(ids + p->start, p->ids, (size_t)p->n * sizeof *ids); /* over those of the parent that come after the cut */
        head.id = parent = p->id = eng_segment_id_of(&head, ids);
        p->has_id = true;
        r = head.bytes ? queue_segment(s, p, &head) : -ENOMEM;
    }
    free(ids);
    free(chain);
    return r;
}

/* ---- the store thread ---------------------------------------------------------------------------------------------- */

static int keep_entry(eng_store *s, const eng_store_job *j)
{
    eng_mirror_entry *e;
    pthread_mutex_lock(&s->lock);
    eng_catalog_row row = {.head = j->head, .ids = j->seg->ids, .used = ++s->mirror.clock};
    pthread_mutex_unlock(&s->lock);
    int r = eng_catalog_put(s->catalog, &row);
    eng_fault_point("save:row");
    if (r < 0)
        return r;
    pthread_mutex_lock(&s->lock);
    r = j->unwanted ? -ECANCELED : eng_mirror_add(&s->mirror, &row, &s->p.owner, &e);
    pthread_mutex_unlock(&s->lock);
    if (r < 0)
        eng_catalog_remove(s->catalog, &j->head.id);
    return r;
}

/* The files that a merged segment stands for, last one first. What continues the last of them continues the merged one; what leaves before that keeps those that it
 * needs. */
static void drop_replaced(eng_store *s, const eng_store_job *j)
{
    const eng_segment *merged = j->seg;
    for (uint32_t i = merged->n_replaces; i-- > 0;) {
        pthread_mutex_lock(&s->lock);
        eng_mirror_entry *e = eng_mirror_get(&s->mirror, &merged->replaces[i]);
        if (e && i + 1 == merged->n_replaces)
            eng_mirror_adopt(&s->mirror, eng_mirror_get(&s->mirror, &j->head.id), e);
        bool goes = e && !e->children && !e->pins;
        if (goes)
            e->unusable = true;
        pthread_mutex_unlock(&s->lock);
        if (e && (!goes || eng_store_forget(s, e) < 0))
            return;
        eng_fault_point("merge:dropped");
    }
}

int eng_store_write(eng_store *s, eng_store_job *j)
{
    pthread_mutex_lock(&s->lock);
    bool unwanted = j->unwanted, there = eng_mirror_get(&s->mirror, &j->head.id), orphan = j->head.start && !eng_mirror_get(&s->mirror, &j->head.parent);
    pthread_mutex_unlock(&s->lock);
    if (there || orphan || unwanted) {
        if (there)
            drop_replaced(s, j);
        return there || unwanted ? 0 : -ENOENT;
    }
    uint64_t begin = eng_now_ns();
    int r = eng_store_make_room(s, j->head.bytes, &j->head.parent, eng_worth_claim(eng_worth_used(0, j->head.start + j->head.n)));
    if (r == 0)
        r = eng_folder_save(&s->folder, &j->head, j->seg, j->codes);
    if (r == 0 && (r = keep_entry(s, j)) < 0)
        eng_folder_remove(&s->folder, &j->head.id);
    eng_fault_point("merge:saved");
    if (r == 0)
        drop_replaced(s, j);
    pthread_mutex_lock(&s->lock);
    if (r == 0) {
        s->stats.saves++;
        s->stats.saved_bytes += j->head.bytes;
        s->stats.save_seconds += (double)(eng_now_ns() - begin) * 1e-9;
    }
    pthread_mutex_unlock(&s->lock);
    return r == -ECANCELED ? 0 : r; /* not wanted any more: as it should be */
}
