#include "index_work.h"

#include "clock.h"
#include "trace.h"

#include <errno.h>
#include <stdlib.h>

enum {
    SLICE_NS = 2000000,   /* between looks at `stop` */
};

typedef struct {
    eng_segment *seg;
    idx_builder *builder;
    uint32_t item; /* head_count() of each kind in turn: layer * n_head_kv + head of each */
    uint64_t spent_ns;
    bool failed;
} slot;

typedef struct {
    eng_segment *seg;
    uint32_t next, left; /* items not yet begun begin at next; left: not finished */
} job;

struct eng_index_work {
    eng_pool *pool;
    slot *slots; /* one a worker */
    uint32_t n_slots;
    job *jobs; /* oldest first */
    size_t n_jobs, cap_jobs;
    uint32_t pending;
    uint64_t spent_ns;
    uint64_t deadline;
};

static uint32_t head_count(const eng_segment *s)
{
    return s->shape->n_layer * s->shape->n_head_kv;
}

/* Kinds in the order in which they are built. A graph's estimate needs the clusters. */
enum { CODES, CLUSTER, IVF, GRAPH, KINDS };

static uint32_t item_count(const eng_segment *s)
{
    return head_count(s) * KINDS;
}

static bool wants(const eng_segment *s, uint32_t kind)
{
    static const unsigned bit[KINDS] = {[CLUSTER] = ENG_WANT_CLUSTER, [IVF] = ENG_WANT_IVF, [GRAPH] = ENG_WANT_GRAPH};
    return kind == CODES || (s->queries && s->m && (s->wants & bit[kind]));
}

/* The first item from `item` on of a kind that is wanted and a layer that retrieves (a sliding one reads its window and no more). */
static uint32_t next_wanted(const eng_segment *s, uint32_t item)
{
    while (item < item_count(s) && (!wants(s, item / head_count(s)) || eng_kv_window(s->shape, item % head_count(s) / s->shape->n_head_kv)))
        item++;
    return item;
}

static uint32_t wanted_count(const eng_segment *s)
{
    uint32_t n = 0;
    for (uint32_t i = next_wanted(s, 0); i < item_count(s); i = next_wanted(s, i + 1))
        n++;
    return n;
}

int eng_index_work_new(eng_pool *pool, eng_index_work **ret)
{
    eng_index_work *w = calloc(1, sizeof *w);
    if (!w)
        return -ENOMEM;
    w->pool = pool;
    w->n_slots = eng_pool_threads(pool);
    w->slots = calloc(w->n_slots, sizeof *w->slots);
    if (!w->slots) {
        free(w);
        return -ENOMEM;
    }
    *ret = w;
    return 0;
}

static void release(eng_segment *s)
{
    s->indexing = false;
    eng_segment_unref(s);
}

void eng_index_work_free(eng_index_work *w)
{
    if (!w)
        return;
    for (uint32_t i = 0; i < w->n_slots; i++)
        idx_builder_free(w->slots[i].builder);
    for (size_t i = 0; i < w->n_jobs; i++)
        release(w->jobs[i].seg);
    free(w->jobs);
    free(w->slots);
    free(w);
}

int eng_index_work_add(eng_index_work *w, eng_segment *s)
{
    uint32_t wanted = wanted_count(s);
    if (s->n < ENG_INDEX_MIN_TOKENS || !wanted)
        return 0;
    if (w->n_jobs == w->cap_jobs) {
        size_t cap = w->cap_jobs ? 2 * w->cap_jobs : 8;
        job *p = realloc(w->jobs, cap * sizeof *p);
        if (!p)
            return -ENOMEM;
        w->jobs = p;
        w->cap_jobs = cap;
    }
    eng_segment_alloc_codes(s, idx_max_bytes(IDX_FLAT, s->n, s->shape->head_dim));
    s->indexing = true;
    w->jobs[w->n_jobs++] = (job){eng_segment_ref(s), next_wanted(s, 0), wanted};
    w->pending += wanted;
    return 0;
}

static int begin(slot *s)
{
    eng_segment *seg = s->seg;
    const eng_kv_shape *shape = seg->shape;
    uint32_t kind = s->item / head_count(seg), layer = s->item % head_count(seg) / shape->n_head_kv, head = s->item % shape->n_head_kv;
    idx_rows keys = {eng_segment_k(seg, layer, head, 0), shape->row_k, seg->n, shape->head_dim, (idx_type)shape->type_k};
    idx_rows values = {eng_segment_v(seg, layer, head, 0), shape->row_v, seg->n, shape->head_dim, (idx_type)shape->type_v};
    if (kind == CODES) {
        const float *power = seg->query_squares + (size_t)s->item * shape->head_dim;
        return idx_builder_new_codes(&keys, &values, power, 8, seg->code_memory ? seg->code_memory + s->item * seg->code_stride : NULL, &s->builder);
    }
    idx_queries train = {eng_segment_query(seg, layer, head, 0), seg->query_row, seg->m, shape->group};
    if (kind != GRAPH)
        return idx_builder_new_lists(kind == CLUSTER ? IDX_CLUSTER : IDX_IVF, &keys, &values, &train, &s->builder);
    idx_graph_params params = idx_graph_params_default();
    return idx_builder_new(&keys, &train, &params, &s->builder);
}

/* The job whose next item is to be built: codes before other kinds, then the oldest segment first. NULL: all are begun. */
static job *next_job(eng_index_work *w)
{
    job *others = NULL;
    for (size_t i = 0; i < w->n_jobs; i++) {
        job *b = &w->jobs[i];
        if (b->next < head_count(b->seg))
            return b;
        if (b->next < item_count(b->seg) && !others)
            others = b;
    }
    return others;
}

static void fill_slots(eng_index_work *w)
{
    for (uint32_t i = 0; i < w->n_slots; i++) {
        job *b = w->slots[i].seg ? NULL : next_job(w);
        if (!b)
            continue;
        w->slots[i] = (slot){.seg = b->seg, .item = b->next};
        b->next = next_wanted(b->seg, b->next + 1);
    }
}

/* A segment that nobody but this queue still wants. */
static void drop_unwanted(eng_index_work *w)
{
    for (size_t i = 0; i < w->n_jobs; i++) {
        job *b = &w->jobs[i];
        if (b->seg->refs > 1)
            continue;
        for (uint32_t k = 0; k < w->n_slots; k++)
            if (w->slots[k].seg == b->seg) {
                idx_builder_free(w->slots[k].builder);
                w->slots[k] = (slot){0};
            }
        w->pending -= b->left;
        release(b->seg);
        w->jobs[i--] = w->jobs[--w->n_jobs];
    }
}

static idx_index **index_of(const slot *s)
{
    idx_index **const all[KINDS] = {[CODES] = s->seg->codes, [CLUSTER] = s->seg->cluster, [IVF] = s->seg->ivf, [GRAPH] = s->seg->index};
    uint32_t n = head_count(s->seg);
    return &all[s->item / n][s->item % n];
}

static void step_task(void *ctx, uint32_t task, uint32_t worker)
{
    eng_index_work *w = ctx;
    slot *s = &w->slots[task];
    (void)worker;
    if (!s->seg)
        return;
    uint64_t start = eng_now_ns(), begin_ns = eng_trace_begin();
    int r = s->builder ? 0 : begin(s);
    if (r == 0)
        r = idx_builder_step(s->builder, w->deadline);
    idx_index **to = index_of(s);
    if (r == 0 && idx_builder_finish(s->builder, to) < 0)
        r = -ENOMEM;
    if (r == 0 && s->item / head_count(s->seg) == CLUSTER && (s->seg->wants & ENG_WANT_GRAPH))
        eng_segment_note_members(s->seg, s->item % head_count(s->seg)); /* for its estimate */
    if (r <= 0) {
        s->failed = r < 0; /* no memory: other ways to its keys are right too, only slower */
        idx_builder_free(s->builder);
        s->builder = NULL;
    }
    s->spent_ns += eng_now_ns() - start;
    uint32_t heads = head_count(s->seg);
    eng_trace_end(begin_ns, s->item < heads ? "codes" : "graph", "layer", s->item % heads / s->seg->shape->n_head_kv);
}

/* Takes finished indexes out of the slots. */
static void collect(eng_index_work *w)
{
    for (uint32_t i = 0; i < w->n_slots; i++) {
        slot *s = &w->slots[i];
        if (!s->seg)
            continue;
        w->spent_ns += s->spent_ns;
        s->spent_ns = 0;
        if (s->builder)
            continue;
        if (!s->failed) {
            size_t bytes;
            idx_arena(*index_of(s), &bytes);
            s->seg->index_bytes += bytes;
            s->seg->n_codes += s->item < head_count(s->seg);
            if (s->item / head_count(s->seg) == CLUSTER && s->seg->members[s->item % head_count(s->seg)])
                s->seg->index_bytes += s->seg->n * sizeof **s->seg->members;
        }
        w->pending--;
        for (size_t j = 0; j < w->n_jobs; j++)
            if (w->jobs[j].seg == s->seg && --w->jobs[j].left == 0) {
                eng_segment_thin_queries(s->seg);
                release(s->seg);
                for (size_t k = j + 1; k < w->n_jobs; k++)
                    w->jobs[k - 1] = w->jobs[k];
                w->n_jobs--;
                break;
            }
        *s = (slot){0};
    }
}

int eng_index_work_run(eng_index_work *w, uint64_t deadline_ns, const atomic_bool *stop)
{
    drop_unwanted(w);
    while (w->pending && !(stop && atomic_load(stop))) {
        uint64_t now = eng_now_ns();
        if (now >= deadline_ns)
            break;
        w->deadline = deadline_ns - now < SLICE_NS ? deadline_ns : now + SLICE_NS;
        fill_slots(w);
        eng_pool_run(w->pool, "build indexes", step_task, w, w->n_slots);
        collect(w);
    }
    return w->pending > 0;
}

uint32_t eng_index_work_pending(const eng_index_work *w)
{
    return w->pending;
}

double eng_index_work_seconds(const eng_index_work *w)
{
    return (double)w->spent_ns * 1e-9;
}
