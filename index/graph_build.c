/* The course of a graph build: phases in order, each cut into steps, so that it can stop at any deadline.
 *
 * Sources: RoarGraph (VLDB 2024, section 4): each query's exact nearest keys, projected to links between keys around its nearest one, pruned by occlusion, then a connectivity pass. RetrievalAttention
 * (arXiv 2409.10516, section 3.2) builds one for each query head from its own prefill queries. Neither says what becomes of a key that is nearest to many queries (RoarGraph's program keeps the last one's
 * candidates), of keys at the end that no query could see, how many queries and which widths suit a few thousand keys, or how wide a search must be; there is one entry point, and deletion is not offered.
 * Here: one graph for the group (AlayaDB), candidates accumulate over queries and over 8 pivots a query, distances are those of expected scores, many entries, every key reachable, a measured width.
 * README.md has each deviation with what it brings. */
#include "graph_build.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static bool emit(idx_builder *b);

static const idx_phase phases[] = {
    {idx_space_gram, .02f},
    {idx_space_mean, .01f},
    {idx_space_basis, .01f},
    {idx_space_rows, .02f},
    {idx_knn_search, .3f},
    {idx_knn_pivots, .01f},
    {idx_knn_entries, .02f},
    {idx_link_project, .15f},
    {idx_link_reverse, .01f},
    {idx_link_connect, .25f},
    {idx_link_merge, .19f},
    {idx_link_reach, .01f},
    {emit, .01f},
    {idx_tune, .05f},
};
enum {
    DEFAULT_SPARE = 128, /* without training queries to measure it by */
    EMIT_PIECE = 2048,   /* nodes per step */
};
enum { N_PHASES = sizeof phases / sizeof phases[0] };

idx_graph_params idx_graph_params_default(void)
{
    return (idx_graph_params){.knn = 100, .degree = 16, .beam = 32, .pivots = 8, .entries = 32};
}

bool idx_train_fits(const idx_queries *train)
{
    return !train->m || (train->group && train->group <= IDX_MAX_GROUP && train->m <= IDX_MAX_ROWS / train->group);
}

static bool params_fit(const idx_rows *keys, const idx_queries *train, const idx_graph_params *p)
{
    if (!keys->n || keys->n > IDX_MAX_ROWS || !keys->dim || keys->dim > IDX_MAX_DIM || keys->type > IDX_Q8_0 ||
        (keys->n > 1 && keys->stride < idx_row_bytes(keys)))
        return false;
    if (!idx_train_fits(train))
        return false;
    return p->knn && p->knn <= IDX_MAX_GATHER && p->degree && p->degree <= IDX_MAX_CANDIDATES / 2 && p->beam && p->beam <= IDX_MAX_BEAM &&
           p->pivots && p->pivots <= p->knn && p->entries && p->entries <= IDX_MAX_ENTRIES;
}

int idx_build_scratch(idx_builder *b)
{
    size_t heads = b->train.m ? b->train.group : 1, cap = idx_top_cap(IDX_MAX_GATHER);
    b->q = idx_alloc(heads * b->dim_pad, 4);
    b->rows = idx_alloc((size_t)IDX_BLOCK * b->dim_pad, 4);
    b->scores = idx_alloc(heads * IDX_TILE, 4);
    b->tmp = idx_alloc(2 * cap, 4);
    if (!b->q || !b->rows || !b->scores || !b->tmp)
        return -ENOMEM;
    memset(b->rows, 0, (size_t)IDX_BLOCK * b->dim_pad * 4);
    return 0;
}

int idx_builder_new(const idx_rows *keys, const idx_queries *train, const idx_graph_params *params, idx_builder **ret)
{
    if (!params_fit(keys, train, params))
        return -EINVAL;
    idx_builder *b = calloc(1, sizeof *b);
    if (!b)
        return -ENOMEM;
    b->keys = *keys;
    b->there = keys->n;
    b->train = *train;
    b->params = *params;
    b->phases = phases;
    b->n_phases = N_PHASES;
    b->k = idx_kernels_get();
    b->dim_pad = idx_dim_pad(keys->dim);
    b->n_queries = train->m ? train->m * train->group : 0;
    b->generation = 1; /* the marks of idx_knn_entries() */
    int r = idx_build_scratch(b);
    if (!r)
        r = idx_space_new(b);
    if (!r)
        r = idx_knn_new(b);
    if (!r)
        r = idx_link_new(b);
    if (!r)
        r = idx_tune_new(b);
    if (r < 0) {
        idx_builder_free(b);
        return r;
    }
    *ret = b;
    return 0;
}

void idx_builder_free(idx_builder *b)
{
    if (!b)
        return;
    void *parts[] = {b->gram,        b->mean,         b->basis,      b->space,       b->half,          b->hits.ids,
                     b->hits.count,  b->pivots.first, b->pivots.ids, b->tops,        b->top_ids,       b->top_scores,
                     b->entries,     b->out.ids,      b->out.count,  b->near.ids,    b->near.count,    b->links.ids,
                     b->links.count, b->out_in.first, b->out_in.ids, b->near_in.ids, b->near_in.count, b->stamp,
                     b->queue,       b->tune_hits,    b->q,          b->rows,        b->scores,        b->tmp,
                     b->cand,        b->cand_score,   b->cand_rows};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        free(parts[i]);
    idx_codes_build_free(b->codes);
    idx_lists_build_free(b->lists);
    idx_free(b->result);
    idx_scratch_free(b->tune_scratch);
    free(b);
}

/* An arena with all but the links and their table. */
static int arena_new(idx_builder *b)
{
    uint32_t n = b->keys.n;
    uint64_t n_links = 0;
    for (uint32_t i = 0; i < n; i++)
        n_links += b->links.count[i];
    size_t bytes = idx_arena_bytes(n, b->n_entries, n_links);
    uint8_t *arena = bytes ? idx_alloc(bytes, 1) : NULL;
    idx_index *ix = calloc(1, sizeof *ix);
    if (!arena || !ix) {
        free(arena);
        free(ix);
        return -ENOMEM;
    }
    idx_header h = {.magic = IDX_MAGIC,
                    .version = IDX_VERSION,
                    .kind = IDX_GRAPH,
                    .n = n,
                    .dim = b->keys.dim,
                    .max_degree = b->links.stride,
                    .n_entries = b->n_entries,
                    .spare = DEFAULT_SPARE,
                    .n_links = n_links,
                    .bytes = bytes};
    memcpy(arena, &h, sizeof h);
    memcpy(arena + sizeof h, b->entries, (size_t)b->n_entries * 4);
    idx_index_bind(ix, arena, bytes);
    b->result = ix;
    return 0;
}

/* Lays the graph out. at: next node; sub: its first link. */
static bool emit(idx_builder *b)
{
    if (!b->at)
        b->error = arena_new(b);
    if (b->error)
        return true;
    uint32_t n = b->keys.n, end = n - (uint32_t)b->at < EMIT_PIECE ? n : (uint32_t)b->at + EMIT_PIECE;
    uint32_t *first = (uint32_t *)(void *)(b->result->arena + sizeof(idx_header)) + b->n_entries, *links = first + n + 1;
    for (uint32_t i = (uint32_t)b->at; i < end; i++) {
        first[i] = b->sub;
        memcpy(links + b->sub, b->links.ids + (size_t)i * b->links.stride, (size_t)b->links.count[i] * 4);
        b->sub += b->links.count[i];
    }
    first[end] = b->sub;
    b->at = end;
    return end == n;
}

static bool past(uint64_t deadline_ns)
{
    struct timespec t;
    if (!deadline_ns)
        return false;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec >= deadline_ns;
}

void idx_builder_rows(idx_builder *b, uint32_t rows)
{
    b->there = rows < b->keys.n ? rows : b->keys.n;
}

uint32_t idx_builder_needs(const idx_builder *b)
{
    bool clusters = b->phase < b->n_phases && b->phases[b->phase].step == idx_codes_cluster;
    return clusters ? idx_codes_needs(b) : b->keys.n;
}

int idx_builder_step(idx_builder *b, uint64_t deadline_ns)
{
    while (b->phase < b->n_phases && !b->error) {
        if (b->there < idx_builder_needs(b)) {
            idx_codes_rest(b);
            return 2;
        }
        if (b->phases[b->phase].step(b)) {
            b->phase++;
            b->at = 0;
            b->sub = 0;
        }
        if (b->phase < b->n_phases && past(deadline_ns))
            return b->error ? b->error : 1;
    }
    return b->error;
}

float idx_builder_progress(const idx_builder *b)
{
    float done = 0;
    for (int i = 0; i < b->phase; i++)
        done += b->phases[i].share;
    if (b->phase < b->n_phases) {
        uint32_t total = b->phases[b->phase].step == idx_knn_search ? b->train.m : b->keys.n;
        float part = total ? (float)b->at / (float)total : 0;
        done += b->phases[b->phase].share * (part < 1 ? part : 1);
    }
    return done < 1 ? done : 1;
}

int idx_builder_finish(idx_builder *b, idx_index **ret)
{
    if (b->error || b->phase < b->n_phases)
        return b->error ? b->error : -EINVAL;
    *ret = b->result;
    b->result = NULL;
    return 0;
}
