/* What is found on disk, and read, by the engine thread. */
#include "context_store_private.h"

#include "clock.h"
#include "fault.h"

#include <stdio.h>
#include <stdlib.h>
#include <syslog.h>

enum { WORTH = 8 }; /* a file is read for a part of it when that is at least 1/WORTH: even a slow disk reads 8 times as fast as a prefill computes */

/* ---- finding ----------------------------------------------------------------------------------------------------- */

/* The end of what is worth reading of e and those before it, which agree with a prompt up to `match`; *io_e becomes the last one. */
static uint32_t worth_reading(eng_mirror_entry **io_e, uint32_t match)
{
    while (*io_e && (uint64_t)(match - (*io_e)->head.start) * WORTH < (*io_e)->head.n) {
        match = (*io_e)->head.start;
        *io_e = (*io_e)->parent;
    }
    return *io_e ? match : 0;
}

static eng_miss copy_links(const eng_mirror_entry *last, eng_store_chain *ret)
{
    uint32_t n = 0;
    for (const eng_mirror_entry *e = last; e; e = e->parent)
        n++;
    ret->links = malloc(n * sizeof *ret->links);
    if (!ret->links)
        return ENG_MISS_MEMORY;
    ret->n = n;
    for (const eng_mirror_entry *e = last; e; e = e->parent)
        ret->links[--n] = (eng_store_link){e->head.id, e->head.start};
    return ENG_MISS_NONE;
}

eng_miss eng_store_find(eng_store *s, const eng_prefix *p, uint32_t have, eng_store_chain *ret, eng_prefix_stop *ret_stop)
{
    eng_miss why = ENG_MISS_ABSENT;
    pthread_mutex_lock(&s->lock);
    eng_mirror_entry *e = eng_mirror_find(&s->mirror, p, ret_stop);
    if (e && e->match >= (int64_t)have + ENG_CACHE_MIN_PREFIX) {
        uint32_t length = worth_reading(&e, (uint32_t)e->match);
        why = ENG_MISS_SHORT;
        if (length >= have + ENG_CACHE_MIN_PREFIX) {
            ret->length = length;
            why = copy_links(e, ret);
        }
        if (why)
            ret_stop->why = why;
    }
    pthread_mutex_unlock(&s->lock);
    return why;
}

bool eng_store_evicted(eng_store *s, const eng_prefix *p, uint32_t position)
{
    pthread_mutex_lock(&s->lock);
    bool evicted = eng_evicted_has(&s->mirror.evicted, p, position);
    pthread_mutex_unlock(&s->lock);
    return evicted;
}

size_t eng_store_size(eng_store *s, const eng_segment_id *id, size_t *ret_beside, uint64_t *ret_worth)
{
    pthread_mutex_lock(&s->lock);
    eng_mirror_entry *e = eng_mirror_get(&s->mirror, id);
    size_t bytes = e ? (size_t)e->head.bytes : 0; /* keys, values, ids and indexes, as in memory */
    uint32_t n = e ? e->head.n : 0;
    *ret_worth = e ? e->worth : 0;
    pthread_mutex_unlock(&s->lock);
    size_t kv = eng_segment_kv_bytes(s->p.owner.shape, n);
    *ret_beside = bytes > kv ? bytes - kv : 0;
    return bytes;
}

void eng_store_residence(eng_store *s, const eng_prefix *p, uint32_t *ret_tokens, uint64_t *ret_bytes)
{
    *ret_tokens = 0;
    *ret_bytes = 0;
    pthread_mutex_lock(&s->lock);
    eng_mirror_trace(&s->mirror, p);
    for (uint32_t i = 0; i < s->mirror.n; i++) {
        const eng_mirror_entry *e = s->mirror.entries[i];
        if (!e->path || !e->ours || e->unusable)
            continue;
        *ret_tokens = e->match > *ret_tokens ? (uint32_t)e->match : *ret_tokens;
        *ret_bytes += e->head.bytes;
    }
    pthread_mutex_unlock(&s->lock);
}

/* ---- reading ------------------------------------------------------------------------------------------------------- */

/* A file that turned out not to be what the catalog says. */
static void give_up(eng_store *s, const eng_segment_id *id, eng_miss why, const char *err)
{
    eng_store_job *j = NULL;
    bool keep = why == ENG_MISS_MEMORY || why == ENG_MISS_CANCELED;
    pthread_mutex_lock(&s->lock);
    eng_mirror_entry *e = eng_mirror_get(&s->mirror, id);
    if (e && !keep)
        e->unusable = true;
    s->stats.misses[why]++;
    pthread_mutex_unlock(&s->lock);
    if (keep)
        return;
    eng_store_log(s, LOG_WARNING, "a kept context on disk cannot be used (%s): %s", eng_miss_name(why), err);
    if (why != ENG_MISS_IO && (j = calloc(1, sizeof *j))) {
        j->head.id = *id;
        eng_store_enqueue(s, j);
    }
}

void eng_store_failed(eng_store *s, const eng_segment_id *id)
{
    give_up(s, id, ENG_MISS_IO, "it shrank, or could not be read, while it was in use");
}

struct eng_store_load {
    eng_mirror_entry *e; /* pinned */
    eng_segment_file *f;
    eng_segment_load *load;
    eng_segment *seg; /* the caller's */
    uint64_t begin_ns;
};

static eng_miss begin_entry(eng_store *s, eng_store_load *l, const eng_segment_reader *reader, eng_segment *parent, char *err, size_t errlen)
{
    eng_mirror_entry *e = l->e;
    eng_miss why = eng_folder_file(&s->folder, &e->head.id, &l->f, err, errlen);
    if (why)
        return why;
    eng_fault_point("load:opened");
    const eng_segment_head *h = eng_segment_file_head(l->f);
    eng_segment_reader trusting = *reader;
    trusting.checked = &e->checked;
    if (!eng_segment_id_equal(&h->id, &e->head.id) || !eng_segment_id_equal(&h->parent, &e->head.parent) || h->tenant != e->head.tenant || h->start != e->head.start ||
        h->n != e->head.n || h->exact != e->head.exact) {
        snprintf(err, errlen, "it is another segment's");
        why = ENG_MISS_TOKENS;
    } else
        why = eng_segment_load_begin(l->f, &s->p.owner, e->ids, &trusting, parent, &l->load, &l->seg, err, errlen);
    return why;
}

/* Lets go of it. */
static void end_entry(eng_store *s, eng_store_load *l, eng_miss why, uint64_t end_ns, const char *err)
{
    eng_segment_id id = l->e->head.id;
    eng_fault_point("load:read");
    pthread_mutex_lock(&s->lock);
    l->e->pins--;
    if (!why) {
        l->e->checked = *eng_segment_file_stamp(l->f);
        s->stats.loads++;
        s->stats.loaded_bytes += l->e->head.bytes;
        s->stats.load_seconds += (double)(end_ns - l->begin_ns) * 1e-9;
    }
    pthread_mutex_unlock(&s->lock);
    eng_segment_file_close(l->f);
    free(l);
    if (why)
        give_up(s, &id, why, err);
}

eng_miss eng_store_load_begin(eng_store *s, const eng_segment_id *id, const eng_segment_reader *reader, eng_segment *parent, eng_store_load **ret, eng_segment **ret_seg)
{
    char err[256] = "";
    eng_store_load *l = calloc(1, sizeof *l);
    if (!l)
        return ENG_MISS_MEMORY;
    l->begin_ns = eng_now_ns();
    pthread_mutex_lock(&s->lock);
    l->e = eng_mirror_get(&s->mirror, id);
    if (l->e && l->e->unusable)
        l->e = NULL;
    if (l->e)
        l->e->pins++;
    pthread_mutex_unlock(&s->lock);
    if (!l->e) {
        free(l);
        return ENG_MISS_GONE; /* evicted a moment ago */
    }
    eng_miss why = begin_entry(s, l, reader, parent, err, sizeof err);
    if (why)
        end_entry(s, l, why, 0, err);
    else {
        *ret_seg = l->seg;
        *ret = l;
    }
    return why;
}

eng_miss eng_store_load_end(eng_store *s, eng_store_load *l, bool *ret_rows)
{
    char err[256] = "";
    uint64_t end_ns, traced = eng_trace_begin();
    uint32_t n = l->seg->n;
    eng_miss why = eng_segment_load_end(l->load, ret_rows, &end_ns, err, sizeof err);
    eng_trace_end(traced, "read segment", "tokens", n);
    end_entry(s, l, why, end_ns, err);
    return why;
}
