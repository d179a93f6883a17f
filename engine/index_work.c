#include "index_work.h"

#include "clock.h"
#include "trace.h"

#include <errno.h>
#include <stdlib.h>

enum {
    SLICE_NS = 2000000,   /* between looks at `stop` */
};

/* One index: that of a kind for a layer and head. */
typedef struct {
    idx_builder *builder; /* NULL: not begun, or done with */
    enum { OPEN, TAKEN, CLOSED } state;
} item;

typedef struct {
    eng_segment *seg;
    item *items;   /* [item_count]: head_count() of each kind in turn, layer * n_head_kv + head of each */
    uint32_t first, left; /* items before `first` are closed; left: not closed */
    uint32_t *rows; /* [n_layer] that are there, of a segment that is being filled; NULL: all are */
} job;

/* What a worker is at. */
typedef struct {
    job *job;      /* NULL: nothing */
    uint32_t item;
    int r;         /* of its last step */
    uint64_t spent_ns;
} slot;

struct eng_index_work {
    eng_pool *pool;
    slot *slots; /* one a worker */
    uint32_t n_slots;
    job **jobs; /* oldest first */
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

/* A sliding layer reads its window and no more. */
static bool is_wanted(const eng_segment *s, uint32_t i)
{
    return wants(s, i / head_count(s)) && !eng_kv_window(s->shape, i % head_count(s) / s->shape->n_head_kv);
}

/* Of the whole segment. */
static uint32_t rows_of(const job *b)
{
    return b->rows ? b->seg->cap : b->seg->n;
}

/* Of the item's layer, for now. */
static uint32_t rows_there(const job *b, uint32_t i)
{
    return b->rows ? b->rows[i % head_count(b->seg) / b->seg->shape->n_head_kv] : b->seg->n;
}

/* Whether an open item could be stepped. */
static bool is_ready(const job *b, uint32_t i)
{
    uint32_t lo, needs;
    if (b->items[i].state != OPEN)
        return false;
    if (!b->rows)
        return true;
    if (b->items[i].builder)
        needs = idx_builder_needs(b->items[i].builder);
    else
        idx_codes_run_rows(rows_of(b), 0, &lo, &needs);
    return rows_there(b, i) >= needs;
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

/* Lets go of a job and of what was begun of it. No worker is at it. */
static void job_free(eng_index_work *w, job *b)
{
    for (uint32_t i = 0; i < item_count(b->seg); i++)
        idx_builder_free(b->items[i].builder);
    for (uint32_t i = 0; i < w->n_slots; i++)
        if (w->slots[i].job == b)
            w->slots[i] = (slot){0};
    w->pending -= b->left;
    b->seg->indexing = false;
    eng_segment_unref(b->seg);
    free(b->items);
    free(b->rows);
    free(b);
}

static void remove_job(eng_index_work *w, size_t at)
{
    job_free(w, w->jobs[at]);
    for (size_t i = at + 1; i < w->n_jobs; i++)
        w->jobs[i - 1] = w->jobs[i];
    w->n_jobs--;
}

void eng_index_work_free(eng_index_work *w)
{
    if (!w)
        return;
    while (w->n_jobs)
        remove_job(w, w->n_jobs - 1);
    free(w->jobs);
    free(w->slots);
    free(w);
}

/* Opens those of the items [from, end) that are wanted. */
static void open_items(eng_index_work *w, job *b, uint32_t from, uint32_t end)
{
    for (uint32_t i = from; i < end; i++)
        if (is_wanted(b->seg, i)) {
            b->items[i].state = OPEN;
            b->left++;
            w->pending++;
        }
    b->first = 0;
}

/* All indexes of the segment are there, or have failed. */
static void finish_job(eng_index_work *w, job *b)
{
    size_t at = 0;
    while (w->jobs[at] != b)
        at++;
    eng_segment_thin_queries(b->seg);
    remove_job(w, at);
}

/* filling: rows are still coming. */
static int add_job(eng_index_work *w, eng_segment *s, bool filling)
{
    if (w->n_jobs == w->cap_jobs) {
        size_t cap = w->cap_jobs ? 2 * w->cap_jobs : 8;
        job **p = realloc(w->jobs, cap * sizeof *p);
        if (!p)
            return -ENOMEM;
        w->jobs = p;
        w->cap_jobs = cap;
    }
    job *b = calloc(1, sizeof *b);
    if (!b)
        return -ENOMEM;
    b->seg = s;
    b->items = malloc(item_count(s) * sizeof *b->items);
    b->rows = filling ? calloc(s->shape->n_layer, sizeof *b->rows) : NULL;
    if (!b->items || (filling && !b->rows)) {
        free(b->items);
        free(b->rows);
        free(b);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < item_count(s); i++)
        b->items[i] = (item){.state = CLOSED};
    open_items(w, b, 0, filling ? head_count(s) : item_count(s));
    eng_segment_alloc_codes(s, idx_max_bytes(IDX_FLAT, rows_of(b), s->shape->head_dim));
    s->indexing = true;
    eng_segment_ref(s);
    w->jobs[w->n_jobs++] = b;
    return 0;
}

static bool is_worth(const eng_segment *s, uint32_t n)
{
    uint32_t i = 0;
    while (i < item_count(s) && !is_wanted(s, i))
        i++;
    return n >= ENG_INDEX_MIN_TOKENS && i < item_count(s);
}

/* The job of the segment that is being filled, or NULL. */
static job *filling_job(const eng_index_work *w)
{
    for (size_t i = 0; i < w->n_jobs; i++)
        if (w->jobs[i]->rows)
            return w->jobs[i];
    return NULL;
}

int eng_index_work_begin(eng_index_work *w, eng_segment *s)
{
    return is_worth(s, s->cap) ? add_job(w, s, true) : 0;
}

void eng_index_work_rows(eng_index_work *w, uint32_t layers, uint32_t end)
{
    job *b = filling_job(w);
    if (!b || end <= b->seg->start)
        return;
    uint32_t rows = end - b->seg->start < b->seg->cap ? end - b->seg->start : b->seg->cap;
    for (uint32_t i = 0; i < layers; i++)
        b->rows[i] = rows > b->rows[i] ? rows : b->rows[i];
}

void eng_index_work_drop(eng_index_work *w)
{
    for (size_t i = 0; i < w->n_jobs; i++) {
        eng_segment *s = w->jobs[i]->seg;
        if (!w->jobs[i]->rows)
            continue;
        eng_segment_free_codes(s);
        s->n_codes = 0;
        s->index_bytes = 0;
        remove_job(w, i);
        return;
    }
}

int eng_index_work_add(eng_index_work *w, eng_segment *s)
{
    job *b = filling_job(w);
    if (!b || b->seg != s)
        return is_worth(s, s->n) ? add_job(w, s, false) : 0;
    free(b->rows);
    b->rows = NULL;
    open_items(w, b, head_count(s), item_count(s));
    if (!b->left)
        finish_job(w, b);
    return 0;
}

static int begin(const job *b, uint32_t i, idx_builder **ret)
{
    eng_segment *seg = b->seg;
    const eng_kv_shape *shape = seg->shape;
    uint32_t kind = i / head_count(seg), layer = i % head_count(seg) / shape->n_head_kv, head = i % shape->n_head_kv, n = rows_of(b);
    idx_rows keys = {eng_segment_k(seg, layer, head, 0), shape->row_k, n, shape->head_dim, (idx_type)shape->type_k};
    idx_rows values = {eng_segment_v(seg, layer, head, 0), shape->row_v, n, shape->head_dim, (idx_type)shape->type_v};
    if (kind == CODES) {
        const float *power = seg->query_squares + (size_t)i * shape->head_dim;
        return idx_builder_new_codes(&keys, &values, power, 8, seg->code_memory ? seg->code_memory + i * seg->code_stride : NULL, ret);
    }
    idx_queries train = {eng_segment_query(seg, layer, head, 0), seg->query_row, seg->m, shape->group};
    if (kind != GRAPH)
        return idx_builder_new_lists(kind == CLUSTER ? IDX_CLUSTER : IDX_IVF, &keys, &values, &train, ret);
    idx_graph_params params = idx_graph_params_default();
    return idx_builder_new(&keys, &train, &params, ret);
}

/* Gives free workers what is ready of items [from, end) of a job; at: a worker that may be free. Returns where to look for the next free one. */
static uint32_t give_items(eng_index_work *w, job *b, uint32_t from, uint32_t end, uint32_t at)
{
    while (b->first < end && b->items[b->first].state == CLOSED)
        b->first++;
    for (uint32_t i = from > b->first ? from : b->first; i < end; i++) {
        while (at < w->n_slots && w->slots[at].job)
            at++;
        if (at == w->n_slots)
            break;
        if (!is_ready(b, i))
            continue;
        w->slots[at] = (slot){.job = b, .item = i};
        b->items[i].state = TAKEN;
    }
    return at;
}

/* Codes before other kinds, then the oldest segment first. Whether any worker has something to do. */
static bool fill_slots(eng_index_work *w)
{
    uint32_t at = 0;
    bool any = false;
    for (size_t i = 0; i < w->n_jobs; i++)
        at = give_items(w, w->jobs[i], 0, head_count(w->jobs[i]->seg), at);
    for (size_t i = 0; i < w->n_jobs; i++)
        at = give_items(w, w->jobs[i], head_count(w->jobs[i]->seg), item_count(w->jobs[i]->seg), at);
    for (uint32_t i = 0; i < w->n_slots; i++)
        any |= w->slots[i].job != NULL;
    return any;
}

/* Segments that nobody but this queue still wants. */
static void drop_unwanted(eng_index_work *w)
{
    for (size_t i = w->n_jobs; i > 0; i--)
        if (w->jobs[i - 1]->seg->refs == 1)
            remove_job(w, i - 1);
}

static idx_index **index_of(const slot *s)
{
    eng_segment *seg = s->job->seg;
    idx_index **const all[KINDS] = {[CODES] = seg->codes, [CLUSTER] = seg->cluster, [IVF] = seg->ivf, [GRAPH] = seg->index};
    return &all[s->item / head_count(seg)][s->item % head_count(seg)];
}

static void step_task(void *ctx, uint32_t task, uint32_t worker)
{
    eng_index_work *w = ctx;
    slot *s = &w->slots[task];
    (void)worker;
    if (!s->job)
        return;
    uint64_t start = eng_now_ns(), begin_ns = eng_trace_begin();
    idx_builder **b = &s->job->items[s->item].builder;
    uint32_t heads = head_count(s->job->seg);
    int r = *b ? 0 : begin(s->job, s->item, b);
    if (r == 0) {
        idx_builder_rows(*b, rows_there(s->job, s->item));
        r = idx_builder_step(*b, w->deadline);
    }
    if (r == 0 && idx_builder_finish(*b, index_of(s)) < 0)
        r = -ENOMEM;
    if (r == 0 && s->item / heads == CLUSTER && (s->job->seg->wants & ENG_WANT_GRAPH))
        eng_segment_note_members(s->job->seg, s->item % heads); /* for its estimate */
    if (r <= 0) {
        idx_builder_free(*b);
        *b = NULL;
    }
    s->r = r;
    s->spent_ns += eng_now_ns() - start;
    eng_trace_end(begin_ns, s->item < heads ? "codes" : "graph", "layer", s->item % heads / s->job->seg->shape->n_head_kv);
}

/* A finished index, or a failed one: no memory. Then other ways to its keys are right too, only slower. */
static void close_item(eng_index_work *w, const slot *s)
{
    job *b = s->job;
    eng_segment *seg = b->seg;
    uint32_t heads = head_count(seg);
    if (s->r == 0) {
        size_t bytes;
        idx_arena(*index_of(s), &bytes);
        seg->index_bytes += bytes;
        seg->n_codes += s->item < heads;
        if (s->item / heads == CLUSTER && seg->members[s->item % heads])
            seg->index_bytes += seg->n * sizeof **seg->members;
    }
    b->items[s->item].state = CLOSED;
    w->pending--;
    b->left--;
}

/* Takes out of the slots what goes no further. */
static void collect(eng_index_work *w)
{
    for (uint32_t i = 0; i < w->n_slots; i++) {
        slot s = w->slots[i];
        if (!s.job)
            continue;
        w->spent_ns += s.spent_ns;
        w->slots[i].spent_ns = 0;
        if (s.r == 1)
            continue;
        w->slots[i] = (slot){0};
        if (s.r == 2)
            s.job->items[s.item].state = OPEN;
        else
            close_item(w, &s);
        if (!s.job->left && !s.job->rows)
            finish_job(w, s.job);
    }
}

int eng_index_work_run(eng_index_work *w, uint64_t deadline_ns, const atomic_bool *stop)
{
    drop_unwanted(w);
    while (w->pending && !(stop && atomic_load(stop))) {
        uint64_t now = eng_now_ns();
        if (now >= deadline_ns)
            return 1;
        w->deadline = deadline_ns - now < SLICE_NS ? deadline_ns : now + SLICE_NS;
        if (!fill_slots(w))
            return 0;
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
