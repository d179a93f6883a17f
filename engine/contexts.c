/* The engine thread's side of the disk tier: what sessions leave waits here until its codes are built and nobody waits for an answer, and is written once more when a
 * graph has come behind these; what a prompt needs from disk is put together here with what memory has. */
#include "contexts.h"

#include "context_store.h"
#include "engine_private.h"
#include "worth.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* A segment that is being read; a reference to it. */
typedef struct {
    eng_store_load *load;
    eng_segment *seg;
} reading;

enum { READ_AT_ONCE = 8 }; /* each has threads of its own */

struct eng_disk {
    eng_store *store;
    reading reads[READ_AT_ONCE]; /* behind the running session's prefill, parents before their children */
    uint32_t n_reads;
    bool hit; /* which a request will have been, if they turn out to be good */
    eng_segment **waiting; /* oldest first, a reference each */
    uint32_t n, cap;
    size_t bytes; /* of those waiting */
};

static const char *const miss_names[ENG_MISS_COUNT] = {
    [ENG_MISS_NONE] = "none",       [ENG_MISS_ABSENT] = "absent",     [ENG_MISS_END] = "end",
    [ENG_MISS_DIFFERS] = "differs", [ENG_MISS_EVICTED] = "evicted",   [ENG_MISS_INEXACT] = "inexact",
    [ENG_MISS_SHORT] = "short",   [ENG_MISS_GONE] = "gone",
    [ENG_MISS_IO] = "io",           [ENG_MISS_KIND] = "kind",         [ENG_MISS_SIZE] = "size",     [ENG_MISS_HEADER] = "header",
    [ENG_MISS_VERSION] = "version", [ENG_MISS_MODEL] = "model",       [ENG_MISS_KV_TYPE] = "kv_type", [ENG_MISS_TOKENS] = "tokens",
    [ENG_MISS_CHECKSUM] = "checksum", [ENG_MISS_INDEX] = "index",     [ENG_MISS_MEMORY] = "memory", [ENG_MISS_CANCELED] = "canceled",
};

const char *eng_miss_name(eng_miss m)
{
    return miss_names[m];
}

static void sync_names(void *ctx, bool wait)
{
    eng_disk *d = ctx;
    eng_store_sync_names(d->store, wait);
}

int eng_disk_open(eng_engine *e, const eng_disk_params *p, char *err, size_t errlen)
{
    eng_disk *d = calloc(1, sizeof *d);
    if (!d) {
        snprintf(err, errlen, "out of memory");
        return -ENOMEM;
    }
    /* Levels of kernels round otherwise, and so may those of another release: what one computed is not exact for another. */
    uint64_t fingerprint = XXH3_64bits_withSeed(e->info.cpu, strlen(e->info.cpu), e->info.fingerprint + ENG_ARITHMETIC);
    if (e->key_shift)
        fingerprint = XXH3_64bits_withSeed(e->key_shift, (size_t)e->shape.n_layer * e->shape.n_head_kv * e->shape.head_dim * sizeof(float), fingerprint);
    eng_store_params sp = {.disk = *p, .owner = {.fingerprint = fingerprint, .shape = &e->shape}, .names = e->names, .pool = e->pool,
                           .log = e->params.log, .log_ctx = e->params.log_ctx};
    int r = eng_store_open(&sp, &d->store, err, errlen);
    if (r < 0) {
        free(d);
        return r;
    }
    e->disk = d;
    eng_cache_keep_parts(e->cache, NULL, NULL); /* whole ones come back from there */
    eng_named_backed(e, p, sync_names, d);
    return 0;
}

/* ---- saving -------------------------------------------------------------------------------------------------------- */

/* Memory that may be held by what waits, beyond what the RAM tier holds anyway. */
static size_t waiting_limit(const eng_engine *e)
{
    const size_t least = (size_t)256 << 20;
    return e->params.cache_ram > least ? e->params.cache_ram : least;
}

void eng_disk_keep(eng_engine *e, eng_segment *s)
{
    eng_disk *d = e->disk;
    size_t bytes = eng_segment_bytes(s);
    if (!d || (d->n && d->bytes + bytes > waiting_limit(e)))
        return;
    if (d->n == d->cap) {
        uint32_t cap = d->cap ? 2 * d->cap : 16;
        eng_segment **p = realloc(d->waiting, cap * sizeof *p);
        if (!p)
            return;
        d->waiting = p;
        d->cap = cap;
    }
    d->waiting[d->n++] = eng_segment_ref(s);
    d->bytes += bytes;
}

static uint32_t place_of(const eng_disk *d, const eng_segment *s)
{
    uint32_t i = 0;
    while (i < d->n && d->waiting[i] != s)
        i++;
    return i;
}

bool eng_disk_waits(const eng_engine *e, const eng_segment *s)
{
    return e->disk && place_of(e->disk, s) < e->disk->n;
}

void eng_disk_leave(eng_engine *e, eng_segment *s)
{
    eng_disk *d = e->disk;
    uint32_t i = d ? place_of(d, s) : 0;
    if (!d || i == d->n)
        return;
    d->bytes -= eng_segment_bytes(s) < d->bytes ? eng_segment_bytes(s) : d->bytes; /* codes have come since */
    memmove(d->waiting + i, d->waiting + i + 1, (d->n - i - 1) * sizeof *d->waiting);
    d->n--;
    eng_segment_unref(s);
}

/* Queues the first n that wait. */
static void save_first(eng_disk *d, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        eng_store_save(d->store, d->waiting[i]); /* if that fails: not kept */
        eng_segment_unref(d->waiting[i]);
    }
    for (uint32_t i = n; i < d->n; i++)
        d->waiting[i - n] = d->waiting[i];
    d->n -= n;
    if (!d->n)
        d->bytes = 0;
}

/* Clusters take a tenth of a graph's time and are waited for; graphs are not: a context should be safe by then. */
static bool is_ready(const eng_segment *s)
{
    return !s->indexing || (eng_segment_coded(s) && (s->wants & ENG_WANT_GRAPH));
}

/* What has its graphs now. */
static void save_again(eng_engine *e)
{
    uint32_t n;
    eng_segment *const *all = eng_cache_segments(e->cache, &n);
    for (uint32_t i = 0; i < n; i++)
        if (all[i]->half_saved && !all[i]->indexing)
            eng_store_save(e->disk->store, all[i]); /* if that fails: at the next turn */
}

void eng_disk_turn(eng_engine *e)
{
    eng_disk *d = e->disk;
    if (!d)
        return;
    eng_store_collect(d->store);
    if (e->in_session)
        return;
    uint32_t n = 0;
    while (n < d->n && is_ready(d->waiting[n]))
        n++;
    save_first(d, n);
    save_again(e);
}

void eng_disk_close(eng_engine *e)
{
    eng_disk *d = e->disk;
    if (!d)
        return;
    save_first(d, d->n);
    save_again(e);
    eng_store_close(d->store);
    free(d->waiting);
    free(d);
    e->disk = NULL;
}

/* ---- finding ------------------------------------------------------------------------------------------------------- */

/* What a segment that stays in its file is read without. */
static unsigned skipped(unsigned wants)
{
    unsigned skip = ENG_STORE_QUERIES;
    skip |= wants & ENG_WANT_CLUSTER ? 0 : ENG_STORE_CLUSTER;
    skip |= wants & ENG_WANT_IVF ? 0 : ENG_STORE_IVF;
    return skip | (wants & ENG_WANT_GRAPH ? 0 : ENG_STORE_GRAPH);
}

/* Begins to read a segment; `behind`: the prefill goes on meanwhile. */
static eng_miss load(eng_engine *e, const eng_segment_id *id, eng_segment *parent, unsigned wants, bool behind, const atomic_bool *cancel, eng_segment **ret)
{
    eng_disk *d = e->disk;
    eng_segment_reader reader = {.pool = e->pool, .cancel = cancel, .heartbeat = &e->counters.heartbeat};
    uint64_t worth;
    reading r;
    bool rows;
    size_t beside, bytes = eng_store_size(d->store, id, &beside, &worth);
    reader.map = !eng_cache_make_room(e->cache, bytes, eng_worth_claim(worth)); /* larger than the budget, or than what it may have of it */
    if (reader.map) {
        reader.skip = skipped(wants);
        eng_cache_make_room(e->cache, beside, eng_worth_claim(worth)); /* its indexes are read all the same, as the session's own memory */
    }
    eng_index_work_run(e->index_work, 0, NULL); /* lets go of what was just evicted */
    eng_miss why = eng_store_load_begin(d->store, id, &reader, parent, &r.load, &r.seg);
    if (why)
        return why;
    behind = behind && !reader.map && d->n_reads < READ_AT_ONCE;
    if (!behind && (why = eng_store_load_end(d->store, r.load, &rows))) {
        eng_segment_unref(r.seg);
        return why;
    }
    r.seg->worth = worth;
    if (!reader.map)
        eng_cache_insert(e->cache, r.seg);
    if (behind)
        d->reads[d->n_reads++] = (reading){r.load, eng_segment_ref(r.seg)};
    else if (!eng_segment_coded(r.seg))
        eng_index_work_add(e->index_work, r.seg); /* if that fails: its keys are read all the same */
    *ret = r.seg;
    return ENG_MISS_NONE;
}

/* The chain as far as it can be had; *io_read: tokens that were read from disk, *io_why: what a file failed for. */
static uint32_t view_chain(eng_engine *e, const eng_store_chain *c, unsigned wants, bool behind, const atomic_bool *cancel, eng_view *view, uint32_t *io_read, eng_miss *io_why)
{
    eng_segment *parent = NULL;
    uint32_t end = 0;
    if (eng_view_reserve(view, c->n) < 0) { /* so what is being read is in it */
        *io_why = ENG_MISS_MEMORY;
        return 0;
    }
    for (uint32_t i = 0; i < c->n; i++) {
        uint32_t start = c->links[i].start, hi = i + 1 < c->n ? c->links[i + 1].start : c->length;
        eng_segment *s = eng_cache_get(e->cache, &c->links[i].id);
        bool kept = s != NULL;
        if (kept)
            eng_segment_ref(s);
        else if ((*io_why = load(e, &c->links[i].id, parent, wants, behind, cancel, &s)))
            break;
        eng_view_add(view, s, start, hi);
        eng_segment_unref(s);
        *io_read += kept ? 0 : hi - start;
        parent = s;
        end = hi;
    }
    return end;
}

uint32_t eng_disk_find(eng_engine *e, const eng_prefix *p, uint32_t have, unsigned wants, const atomic_bool *cancel, eng_view *io_view, uint32_t *ret_read,
                       eng_prefix_stop *io_stop)
{
    eng_disk *d = e->disk;
    eng_store_chain chain = {0};
    eng_view view = {0};
    eng_prefix_stop stop;
    eng_miss failed = ENG_MISS_NONE;
    uint32_t read = 0;
    if (!d)
        return have;
    eng_store_collect(d->store);
    eng_miss why = eng_store_find(d->store, p, have, &chain, &stop);
    uint32_t length = why ? 0 : view_chain(e, &chain, wants, true, cancel, &view, &read, &failed);
    free(chain.links);
    if (failed)
        *io_stop = (eng_prefix_stop){length > have ? length : have, failed};
    else if (stop.position > io_stop->position || (stop.position == io_stop->position && stop.why > io_stop->why)) /* the more telling reason */
        *io_stop = stop;
    if (length > have) {
        eng_view_done(io_view);
        *io_view = view;
        *ret_read = read;
        d->hit = true;
        if (!d->n_reads)
            eng_disk_end_reading(e, io_view);
        return length;
    }
    eng_disk_end_reading(e, &view);
    eng_view_done(&view);
    if (why && !have)
        eng_store_count_miss(d->store, why);
    return have;
}

bool eng_disk_reading(const eng_engine *e)
{
    return e->disk && e->disk->n_reads;
}

/* The view's segments from s on: their files are gone, or go. Without their rows nothing of them is kept; else they are written again. */
static void without_files(eng_engine *e, const eng_view *v, const eng_segment *s, bool rows)
{
    uint32_t first = 0;
    while (first < v->n_spans && v->spans[first].seg != s)
        first++;
    for (uint32_t i = v->n_spans; i-- > first;) {
        eng_segment *seg = v->spans[i].seg;
        if (!rows && seg->cached)
            eng_cache_drop(e->cache, seg);
        if (rows && seg->has_id) {
            seg->has_id = false;
            eng_disk_keep(e, seg);
        }
    }
}

eng_miss eng_disk_end_reading(eng_engine *e, const eng_view *v)
{
    eng_disk *d = e->disk;
    eng_miss first = ENG_MISS_NONE;
    if (!d)
        return first;
    while (d->n_reads) {
        reading *at = &d->reads[--d->n_reads];
        bool rows, kept_file;
        eng_miss why = eng_store_load_end(d->store, at->load, &rows);
        kept_file = why == ENG_MISS_NONE || why == ENG_MISS_MEMORY || why == ENG_MISS_IO;
        if (!rows || !kept_file)
            without_files(e, v, at->seg, rows);
        if (!rows)
            first = why;
        else if (!eng_segment_coded(at->seg))
            eng_index_work_add(e->index_work, at->seg); /* if that fails: its keys are read all the same */
        eng_segment_unref(at->seg);
        if (!d->n_reads)
            eng_cache_recount(e->cache);
    }
    if (d->hit && !first)
        eng_store_count_hit(d->store);
    d->hit = false;
    return first;
}

void eng_disk_failed(eng_engine *e, const eng_segment *s)
{
    eng_store_failed(e->disk->store, &s->id);
}

void eng_disk_forget(eng_engine *e, const eng_prefix *p)
{
    eng_disk *d = e->disk;
    if (!d)
        return;
    for (uint32_t i = d->n; i-- > 0;)
        if (eng_prefix_agrees(p, d->waiting[i]) && !eng_names_need(e->names, d->waiting[i]))
            eng_disk_leave(e, d->waiting[i]);
    eng_store_forget_tokens(d->store, p);
}

bool eng_disk_evicted(eng_engine *e, const eng_prefix *p, uint32_t position)
{
    return e->disk && eng_store_evicted(e->disk->store, p, position);
}

void eng_disk_warm(eng_engine *e, const eng_prefix *p, uint32_t have, const atomic_bool *stop)
{
    eng_store_chain chain = {0};
    eng_prefix_stop where;
    eng_view view = {0};
    eng_miss failed = ENG_MISS_NONE;
    uint32_t read = 0;
    if (!e->disk || eng_store_find(e->disk->store, p, have, &chain, &where))
        return;
    view_chain(e, &chain, 0, false, stop, &view, &read, &failed);
    eng_view_done(&view);
    free(chain.links);
}

void eng_disk_residence(const eng_engine *e, const eng_prefix *p, uint32_t *ret_tokens, uint64_t *ret_bytes)
{
    *ret_tokens = 0;
    *ret_bytes = 0;
    if (e->disk)
        eng_store_residence(e->disk->store, p, ret_tokens, ret_bytes);
}

void eng_disk_stats_get(const eng_engine *e, eng_disk_stats *ret)
{
    *ret = (eng_disk_stats){0};
    if (e->disk)
        eng_store_stats(e->disk->store, ret);
}
