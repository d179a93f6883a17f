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

/* Bytes of the file that there is of this segment, or will be; 0: none. With the lock held. */
static uint64_t known_bytes(const eng_store *s, const eng_segment_id *id)
{
    const eng_mirror_entry *e = eng_mirror_get(&s->mirror, id);
    uint64_t bytes = e && !e->unusable ? e->head.bytes : 0;
    const eng_store_job *j = s->running ? s->running : s->queue.first;
    for (; j; j = j == s->running ? s->queue.first : j->next)
        if (j->seg && eng_segment_id_equal(&j->head.id, id) && j->head.bytes > bytes)
            bytes = j->head.bytes;
    return bytes;
}

/* A file differs from another of the same segment in its indexes alone: the larger one has more of them. */
static int queue_segment(eng_store *s, eng_segment *seg, const eng_segment_head *head, unsigned parts)
{
    pthread_mutex_lock(&s->lock);
    uint64_t known = known_bytes(s, &head->id);
    pthread_mutex_unlock(&s->lock);
    if (known >= head->bytes || (known && seg->indexing) || seg->map) /* what a file gave is not written again: it could fail meanwhile */
        return 0;
    eng_store_job *j = malloc(sizeof *j);
    if (!j)
        return -ENOMEM;
    *j = (eng_store_job){.seg = eng_segment_ref(seg), .head = *head, .parts = parts};
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
        unsigned parts = eng_segment_storable(p);
        eng_segment_head head = eng_segment_head_of(&s->p.owner, p, parts);
        exact = exact && p->exact;
        head.exact = exact;
        head.parent = parent;
        head.created = now(s);
        memcpy(ids + p->start, p->ids, (size_t)p->n * sizeof *ids); /* over those of the parent that come after the cut */
        head.id = parent = p->id = eng_segment_id_of(&head, ids);
        p->has_id = true;
        r = head.bytes ? queue_segment(s, p, &head, parts) : -ENOMEM;
        p->half_saved = p->indexing;
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

/* The file has taken the place of one without all of the indexes. */
static int update_entry(eng_store *s, const eng_store_job *j)
{
    pthread_mutex_lock(&s->lock);
    eng_mirror_entry *e = eng_mirror_get(&s->mirror, &j->head.id);
    s->mirror.bytes += j->head.bytes - e->head.bytes;
    e->head.bytes = j->head.bytes;
    e->head.created = j->head.created;
    eng_catalog_row row = {.head = e->head, .ids = e->ids, .used = e->used, .hits = e->hits};
    pthread_mutex_unlock(&s->lock);
    int r = eng_catalog_put(s->catalog, &row); /* if that fails: at the next start the file says its size itself */
    eng_fault_point("save:row");
    return r;
}

/* Whether the file has taken its place, though something failed then: its folder could not be synced. */
static bool is_in_place(const eng_store *s, const eng_store_job *j)
{
    eng_segment_file *f;
    char err[256];
    if (eng_folder_file(&s->folder, &j->head.id, &f, err, sizeof err))
        return false;
    bool there = eng_segment_file_head(f)->bytes == j->head.bytes;
    eng_segment_file_close(f);
    return there;
}

/* A new file, or one in the place of one without all of the indexes, which stays where that fails. */
static int put_file(eng_store *s, const eng_store_job *j, bool replaces)
{
    int r = eng_folder_save(&s->folder, &j->head, j->seg, j->parts);
    if (!replaces) {
        r = r < 0 ? r : keep_entry(s, j);
        if (r < 0)
            eng_folder_remove(&s->folder, &j->head.id);
        return r;
    }
    int updated = r == 0 || is_in_place(s, j) ? update_entry(s, j) : 0;
    return r < 0 ? r : updated;
}

/* Room for a file: without what can be done without, if there is none for all. What the segment is part of, or what there is of it, stays. */
static int make_room_for(eng_store *s, eng_store_job *j, bool replaces)
{
    const eng_segment_id *keeps = replaces ? &j->head.id : &j->head.parent;
    uint64_t claim = eng_worth_claim(eng_worth_used(0, j->head.start + j->head.n));
    int r = eng_store_make_room(s, j->head.bytes, keeps, claim);
    if (r < 0 && replaces)
        return ENG_STORE_REFUSED; /* it stays as it is */
    if (r == 0 || !(j->parts & ~(unsigned)ENG_STORE_CODES))
        return r;
    uint64_t fewer = eng_segment_head_of(&s->p.owner, j->seg, j->parts & ENG_STORE_CODES).bytes;
    pthread_mutex_lock(&s->lock);
    j->parts &= ENG_STORE_CODES;
    j->head.bytes = fewer;
    pthread_mutex_unlock(&s->lock);
    return fewer ? eng_store_make_room(s, fewer, keeps, claim) : -ENOMEM;
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
    const eng_mirror_entry *e = eng_mirror_get(&s->mirror, &j->head.id);
    bool replaces = e && !e->unusable && e->head.bytes < j->head.bytes, there = e && !replaces;
    bool unwanted = j->unwanted, orphan = !e && j->head.start && !eng_mirror_get(&s->mirror, &j->head.parent);
    if (replaces)
        j->head.parent = e->head.parent; /* whoever opens the file now may find either */
    pthread_mutex_unlock(&s->lock);
    if (there || orphan || unwanted) {
        if (there)
            drop_replaced(s, j);
        return there || unwanted ? 0 : -ENOENT;
    }
    uint64_t begin = eng_now_ns();
    int r = make_room_for(s, j, replaces);
    if (r == 0)
        r = put_file(s, j, replaces);
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
