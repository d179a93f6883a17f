/* A segment is made of its file: threads of its own read keys and values, in the order in which a prefill wants them, then what stands beside them. */
#include "segment_file_private.h"

#include "clock.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    PART = 8,    /* blocks of keys and values that are read at once */
    READERS = 4, /* at least, where there is so much to read: who waits for the disk takes no core, and a disk wants more than one request */
};

/* What went wrong first. */
typedef struct {
    eng_miss why;
    char text[256];
} failure;

/* A task is a part of keys and values, or, after these, a section beside them. */
struct eng_segment_load {
    const eng_segment_file *f;
    eng_segment_reader reader;
    eng_direct direct;
    eng_segment *seg; /* the caller's */
    uint32_t kv_parts, tasks;
    atomic_uint next;         /* task; parts that were checked before, and are where they were, are left out */
    atomic_bool rows_failed, failed; /* a part; anything */
    pthread_t *readers;
    uint32_t n_readers;
    pthread_mutex_t lock;
    pthread_cond_t progress;
    /* guarded by lock */
    bool *done; /* [kv_parts] */
    uint32_t n_done; /* of these, before the first that is not */
    failure rows, beside;
    uint64_t end_ns;
};

static eng_miss check_mapped(const eng_segment_load *l, uint32_t lo, uint32_t hi, const uint8_t *kv, char *err, size_t errlen)
{
    eng_miss why = ENG_MISS_NONE;
    for (uint32_t b = lo; !why && b < hi; b++, kv += SEG_BLOCK)
        why = seg_check_sum(kv, seg_block_bytes(&l->f->sections[1], b), seg_sums_of(l->f, 1)[b], 1, b, err, errlen);
    return eng_mapping_failed(l->seg->map) ? seg_miss(err, errlen, ENG_MISS_IO, "cannot be read") : why;
}

static eng_miss load_kv(const eng_segment_load *l, uint32_t part, char *err, size_t errlen)
{
    uint32_t blocks = seg_block_count(&l->f->sections[1]), lo = part * PART, hi = lo + PART < blocks ? lo + PART : blocks;
    uint8_t *kv = l->seg->kv + (size_t)lo * SEG_BLOCK;
    return l->seg->map ? check_mapped(l, lo, hi, kv, err, errlen) : seg_read_blocks(l->f, &l->direct, 1, lo, hi, kv, err, errlen);
}

static eng_miss load_index(const eng_segment_load *l, uint32_t sec, char *err, size_t errlen)
{
    const seg_section *s = &l->f->sections[sec];
    idx_index **to = &seg_indexes(l->seg, s->kind)[s->item];
    size_t at = s->offset % SEG_PAGE;
    if (s->kind == SEG_CODES)
        return seg_read_index(l->f, &l->direct, sec, l->seg->code_memory + s->item * l->seg->code_stride + at, true, to, err, errlen);
    uint8_t *buffer = aligned_alloc(SEG_PAGE, seg_whole_pages(at + s->bytes));
    eng_miss why = buffer ? seg_read_index(l->f, &l->direct, sec, buffer + at, false, to, err, errlen) : seg_miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    free(buffer);
    return why;
}

static eng_miss load_section(const eng_segment_load *l, uint32_t sec, char *err, size_t errlen)
{
    const seg_section *s = &l->f->sections[sec];
    uint32_t heads = l->seg->shape->n_head_kv;
    if (s->kind >= SEG_QUERY_ROWS && !l->seg->kept)
        return ENG_MISS_NONE;
    if (s->kind == SEG_QUERY_ROWS)
        return seg_read_rows(l->f, sec, l->seg->query_row, err, errlen);
    if (eng_kv_window(l->seg->shape, s->item / heads)) /* with another context length this layer slides */
        return ENG_MISS_NONE;
    if (s->kind == SEG_QUERIES)
        return seg_read_blocks(l->f, NULL, sec, 0, seg_block_count(s), eng_segment_kept(l->seg, s->item / heads, s->item % heads), err, errlen);
    return l->reader.skip & ENG_STORE_CODES << (s->kind - SEG_CODES) ? ENG_MISS_NONE : load_index(l, sec, err, errlen);
}

static eng_miss load_task(const eng_segment_load *l, uint32_t task, char *err, size_t errlen)
{
    if (task < l->kv_parts && l->reader.cancel && atomic_load(l->reader.cancel))
        return seg_miss(err, errlen, ENG_MISS_CANCELED, "canceled");
    if (l->reader.heartbeat)
        atomic_fetch_add(l->reader.heartbeat, 1);
    return task < l->kv_parts ? load_kv(l, task, err, errlen) : load_section(l, 2 + task - l->kv_parts, err, errlen);
}

static void note(eng_segment_load *l, uint32_t task, eng_miss why, const char *err)
{
    failure *of = task < l->kv_parts ? &l->rows : &l->beside;
    pthread_mutex_lock(&l->lock);
    if (why && !of->why) {
        of->why = why;
        snprintf(of->text, sizeof of->text, "%s", err);
    }
    if (why) {
        atomic_store(&l->failed, true);
        if (task < l->kv_parts)
            atomic_store(&l->rows_failed, true);
    } else if (task < l->kv_parts)
        l->done[task] = true;
    while (l->n_done < l->kv_parts && l->done[l->n_done])
        l->n_done++;
    l->end_ns = eng_now_ns();
    pthread_cond_broadcast(&l->progress);
    pthread_mutex_unlock(&l->lock);
}

/* Takes tasks in their order until none is left. An index that is damaged leaves the rows what they are. */
static void load_tasks(eng_segment_load *l)
{
    char err[sizeof l->rows.text] = "";
    uint32_t task;
    while ((task = atomic_fetch_add(&l->next, 1)) < l->tasks && !atomic_load(task < l->kv_parts ? &l->rows_failed : &l->failed))
        note(l, task, load_task(l, task, err, sizeof err), err);
}

static void *reader_main(void *ctx)
{
    eng_segment_load *l = ctx;
    eng_pool_unbind(l->reader.pool);
    load_tasks(l);
    return NULL;
}

/* Room for the queries, if they are wanted and there for every head of a layer that retrieves now. */
static void expect_queries(const eng_segment_file *f, const eng_segment_reader *reader, eng_segment *s)
{
    uint64_t bytes = 0;
    uint32_t wanted = 0, there = 0, m = 0;
    for (uint32_t i = 0; i < s->shape->n_layer; i++)
        wanted += eng_kv_window(s->shape, i) ? 0 : s->shape->n_head_kv;
    for (uint32_t i = 2; i < f->n_sections; i++) {
        const seg_section *sec = &f->sections[i];
        if (sec->kind == SEG_QUERY_ROWS)
            m = (uint32_t)(sec->bytes / sizeof *s->query_row);
        if (sec->kind == SEG_QUERIES && !eng_kv_window(s->shape, sec->item / s->shape->n_head_kv)) {
            bytes = sec->bytes;
            there++;
        }
    }
    s->m = m;
    if ((reader->skip & ENG_STORE_QUERIES) || there != wanted || !m || eng_segment_kept_bytes(s) != bytes || eng_segment_alloc_kept(s, m) < 0)
        s->m = 0;
}

/* Counts the indexes of a kind; if some are missing, there are none. */
static void count_indexes(eng_segment *s, uint32_t kind)
{
    idx_index **all = seg_indexes(s, kind);
    bool whole = eng_segment_has(s, all);
    for (uint32_t i = 0; i < seg_head_count(s->shape->n_layer, s->shape->n_head_kv); i++) {
        size_t bytes;
        if (all[i] && whole) {
            idx_arena(all[i], &bytes);
            s->index_bytes += bytes;
            s->n_codes += kind == SEG_CODES;
        } else {
            idx_free(all[i]);
            all[i] = NULL;
        }
    }
    if (kind == SEG_CODES && !whole)
        eng_segment_free_codes(s);
    static const unsigned wants[SEG_KINDS] = {[SEG_CLUSTER] = ENG_WANT_CLUSTER, [SEG_IVF] = ENG_WANT_IVF, [SEG_GRAPH] = ENG_WANT_GRAPH};
    s->wants |= whole ? wants[kind] : 0; /* what a segment is to have that this one becomes part of */
}

static void count_all(eng_segment *s)
{
    s->index_bytes = 0;
    for (uint32_t kind = SEG_CODES; kind <= SEG_GRAPH; kind++)
        count_indexes(s, kind);
    for (uint32_t i = 0; i < seg_head_count(s->shape->n_layer, s->shape->n_head_kv); i++)
        if (s->index[i] && s->cluster[i] && eng_segment_note_members(s, i))
            s->index_bytes += s->n * sizeof **s->members;
}

static eng_miss check_owner(const eng_segment_file *f, const eng_segment_owner *owner, char *err, size_t errlen)
{
    const eng_segment_head *h = &f->head;
    const eng_kv_shape *s = owner->shape;
    if (h->fingerprint != owner->fingerprint || h->n_layer != s->n_layer || h->n_head_kv != s->n_head_kv || h->head_dim != s->head_dim)
        return seg_miss(err, errlen, ENG_MISS_MODEL, "of another model or other RoPE settings");
    if (h->type_k != s->type_k || h->type_v != s->type_v)
        return seg_miss(err, errlen, ENG_MISS_KV_TYPE, "keys or values of another type");
    return ENG_MISS_NONE;
}

/* Its memory, or the file's. */
static int new_segment(const eng_segment_file *f, const eng_segment_owner *owner, bool mapped, eng_segment *parent, eng_segment **ret)
{
    const eng_segment_head *h = &f->head;
    eng_mapping *map;
    if (mapped && eng_mapping_new(f->fd, f->sections[1].offset, f->sections[1].bytes, &map) == 0)
        return eng_segment_new_mapped(owner->shape, parent, h->start, h->n, h->exact, map, ret);
    return eng_segment_new(owner->shape, parent, h->start, h->n, h->exact, ret);
}

/* Whether a section will be an index in memory. */
static bool is_wanted(const eng_segment_load *l, const seg_section *s)
{
    return seg_is_index(s->kind) && !(l->reader.skip & ENG_STORE_CODES << (s->kind - SEG_CODES)) && !eng_kv_window(l->seg->shape, s->item / l->seg->shape->n_head_kv);
}

/* Memory for all that will be read. */
static eng_miss prepare(eng_segment_load *l, char *err, size_t errlen)
{
    const eng_segment_file *f = l->f;
    eng_segment *s = l->seg;
    size_t codes = l->reader.skip & ENG_STORE_CODES ? 0 : seg_largest_index(f, SEG_CODES);
    if (codes)
        eng_segment_alloc_codes(s, seg_whole_pages(codes + SEG_PAGE - 1)); /* wherever they begin in a page */
    l->done = calloc(l->kv_parts, sizeof *l->done);
    if (!l->done || (codes && !s->code_memory))
        return seg_miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    expect_queries(f, &l->reader, s);
    for (uint32_t i = 2; i < f->n_sections; i++) /* counted with it from the first, since it will take that */
        s->index_bytes += is_wanted(l, &f->sections[i]) ? f->sections[i].bytes : 0;
    if (s->map && l->reader.checked && !memcmp(l->reader.checked, &f->stamp, sizeof f->stamp))
        l->next = l->n_done = l->kv_parts;
    return ENG_MISS_NONE;
}

static void start_readers(eng_segment_load *l)
{
    uint32_t n = eng_pool_threads(l->reader.pool);
    n = n > READERS ? n : READERS;
    n = n < l->tasks ? n : l->tasks;
    l->end_ns = eng_now_ns();
    /* Where they are not read past the page cache: blocks are taken in their order, so one stream with a long read-ahead. To ask for all of the file at once (WILLNEED) took twice
     * the time. */
    posix_fadvise(l->f->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    eng_direct_open(l->f->fd, l->f->head.bytes, &l->direct);
    l->readers = calloc(n, sizeof *l->readers);
    while (l->readers && l->n_readers < n && !pthread_create(&l->readers[l->n_readers], NULL, reader_main, l))
        l->n_readers++;
    if (!l->n_readers)
        load_tasks(l);
}

static void load_free(eng_segment_load *l)
{
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->progress);
    free(l->readers);
    free(l->done);
    free(l);
}

static eng_miss load_new(const eng_segment_file *f, const eng_segment_reader *reader, eng_segment *seg, eng_segment_load **ret, char *err, size_t errlen)
{
    eng_segment_load *l = calloc(1, sizeof *l);
    if (!l)
        return seg_miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    l->f = f;
    l->reader = *reader;
    l->seg = seg;
    l->kv_parts = (seg_block_count(&f->sections[1]) + PART - 1) / PART;
    l->tasks = l->kv_parts + f->n_sections - 2;
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->progress, NULL);
    eng_miss why = prepare(l, err, errlen);
    if (why)
        load_free(l);
    else
        *ret = l;
    return why;
}

eng_miss eng_segment_load_begin(const eng_segment_file *f, const eng_segment_owner *owner, const int32_t *ids, const eng_segment_reader *reader, eng_segment *parent,
                                eng_segment_load **ret, eng_segment **ret_seg, char *err, size_t errlen)
{
    eng_segment *s = NULL;
    eng_segment_load *l = NULL;
    int32_t *own = NULL;
    eng_miss why = check_owner(f, owner, err, errlen);
    if (!why)
        why = eng_segment_file_ids(f, &own, err, errlen);
    if (why)
        return why;
    if (memcmp(own, ids, (size_t)f->head.n * sizeof *ids) != 0)
        why = seg_miss(err, errlen, ENG_MISS_TOKENS, "its tokens are others than were listed");
    else if (new_segment(f, owner, reader->map, parent, &s) < 0)
        why = seg_miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    else
        why = load_new(f, reader, s, &l, err, errlen);
    if (!l)
        eng_segment_unref(s);
    else {
        memcpy(s->ids, own, (size_t)f->head.n * sizeof *own);
        s->n = f->head.n;
        s->tenant = f->head.tenant;
        s->id = f->head.id;
        s->has_id = true;
        s->load = l;
        start_readers(l);
        *ret_seg = s;
        *ret = l;
    }
    free(own);
    return why;
}

bool eng_segment_load_await(eng_segment_load *l, uint32_t layers)
{
    size_t bytes = (size_t)layers * l->seg->shape->n_head_kv * l->seg->head_bytes, part = (size_t)PART * SEG_BLOCK;
    uint32_t parts = bytes < (size_t)l->kv_parts * part ? (uint32_t)((bytes + part - 1) / part) : l->kv_parts;
    pthread_mutex_lock(&l->lock);
    while (!l->rows.why && l->n_done < parts)
        pthread_cond_wait(&l->progress, &l->lock);
    bool there = !l->rows.why;
    pthread_mutex_unlock(&l->lock);
    return there;
}

eng_miss eng_segment_load_end(eng_segment_load *l, bool *ret_rows, uint64_t *ret_end_ns, char *err, size_t errlen)
{
    for (uint32_t i = 0; i < l->n_readers; i++)
        pthread_join(l->readers[i], NULL);
    eng_direct_close(&l->direct);
    l->seg->load = NULL;
    count_all(l->seg);
    const failure *of = l->rows.why ? &l->rows : &l->beside;
    eng_miss why = of->why ? seg_miss(err, errlen, of->why, "%s", of->text) : ENG_MISS_NONE;
    *ret_rows = !l->rows.why;
    *ret_end_ns = l->end_ns;
    load_free(l);
    return why;
}
