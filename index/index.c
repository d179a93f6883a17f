/* The parts of the interface that belong to no kind: memory, scratch, the way into a search. */
#include "graph_build.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

void *idx_alloc(size_t n, size_t size)
{
    size_t bytes = (n * size + IDX_ALIGN - 1) / IDX_ALIGN * IDX_ALIGN;
    return aligned_alloc(IDX_ALIGN, bytes ? bytes : IDX_ALIGN);
}

void idx_free(idx_index *ix)
{
    if (!ix)
        return;
    if (!ix->borrowed)
        free(ix->arena);
    free(ix);
}

const void *idx_arena(const idx_index *ix, size_t *ret_bytes)
{
    *ret_bytes = ix->bytes;
    return ix->arena;
}

size_t idx_max_bytes(idx_kind kind, uint32_t n, uint32_t dim)
{
    size_t at[IDX_CODE_PARTS];
    if (kind != IDX_GRAPH)
        return idx_codes_layout(kind, false, n, dim, idx_codes_max_clusters(n), at);
    return idx_graph_max_bytes(n, dim, IDX_MAX_GROUP, idx_graph_params_default().degree);
}

idx_kind idx_kind_of(const idx_index *ix)
{
    return (idx_kind)ix->header->kind;
}

int idx_scratch_new(uint32_t max_n, uint32_t max_dim, uint32_t max_group, uint32_t max_k, idx_scratch **ret)
{
    if (!max_dim || max_dim > IDX_MAX_DIM || !max_group || max_group > IDX_MAX_GROUP)
        return -EINVAL;
    idx_scratch *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    s->max_n = max_n;
    s->max_dim = max_dim;
    s->max_group = max_group;
    s->max_k = max_k < max_n ? max_k : max_n;
    s->max_keep = s->max_k + IDX_MAX_SPARE;
    size_t dim_pad = idx_dim_pad(max_dim), cap = idx_top_cap(s->max_keep);
    s->q = idx_alloc(max_group * dim_pad, sizeof *s->q);
    s->rows = idx_alloc(IDX_BLOCK * dim_pad, sizeof *s->rows);
    s->scores = idx_alloc((size_t)max_group * IDX_TILE, sizeof *s->scores);
    s->tmp = idx_alloc(2 * cap, sizeof *s->tmp);
    s->tops = calloc(max_group, sizeof *s->tops);
    s->top_ids = idx_alloc(max_group * cap, sizeof *s->top_ids);
    s->top_scores = idx_alloc(max_group * cap, sizeof *s->top_scores);
    s->hits = calloc(max_group, sizeof *s->hits);
    size_t heads = max_group < IDX_HEADS ? max_group : IDX_HEADS;
    s->node_ld = (max_n / IDX_BLOCK + 1 + IDX_BLOCK - 1) & ~(IDX_BLOCK - 1u);
    s->node_score = idx_alloc(heads * s->node_ld, sizeof *s->node_score);
    s->node_best = idx_alloc(heads * s->node_ld, sizeof *s->node_best);
    s->node_votes = idx_alloc(s->node_ld, sizeof *s->node_votes);
    s->node_tmp = idx_alloc(3 * ((size_t)s->node_ld + IDX_BLOCK), sizeof *s->node_tmp);
    s->node_want = idx_alloc(s->node_ld, sizeof *s->node_want);
    s->node_done = idx_alloc(s->node_ld, sizeof *s->node_done);
    s->node_list = idx_alloc(s->node_ld, sizeof *s->node_list);
    s->code_q = idx_alloc(IDX_ROUNDINGS * max_group * dim_pad, 1);
    s->code_query = calloc(IDX_ROUNDINGS * (size_t)max_group, sizeof *s->code_query);
    s->weigh = idx_alloc((size_t)max_group * IDX_TILE + 16, sizeof *s->weigh);
    s->weigh_to = calloc(max_group, sizeof *s->weigh_to);
    s->scales = idx_alloc(IDX_TILE, sizeof *s->scales);
    s->tile_best = idx_alloc(max_group, sizeof *s->tile_best);
    s->clusters = idx_alloc(max_group * cap, sizeof *s->clusters);
    s->scanned = idx_alloc(max_group * cap, sizeof *s->scanned);
    s->list_ld = (idx_codes_max_clusters(max_n) + IDX_BLOCK - 1) & ~(IDX_BLOCK - 1u);
    s->list_score = idx_alloc((size_t)max_group * s->list_ld, sizeof *s->list_score);
    s->list_dev = idx_alloc((size_t)max_group * s->list_ld, sizeof *s->list_dev);
    s->list_along = idx_alloc((size_t)max_group * IDX_DIRECTIONS * s->list_ld, sizeof *s->list_along);
    s->list_query = calloc(max_group, sizeof *s->list_query);
    s->list_bound = idx_alloc((size_t)max_group * s->list_ld, sizeof *s->list_bound);
    s->list_tmp = idx_alloc(2 * ((size_t)s->list_ld + IDX_BLOCK), sizeof *s->list_tmp);
    s->list_want = idx_alloc(s->list_ld, sizeof *s->list_want);
    s->list_done = idx_alloc(s->list_ld, sizeof *s->list_done);
    if (!s->q || !s->rows || !s->scores || !s->tmp || !s->tops || !s->top_ids || !s->top_scores || !s->hits || !s->node_score || !s->node_best ||
        !s->node_votes || !s->node_tmp || !s->node_want || !s->node_done || !s->node_list || !s->code_q || !s->code_query || !s->weigh || !s->weigh_to || !s->scales || !s->tile_best || !s->clusters || !s->scanned ||
        !s->list_score || !s->list_dev || !s->list_along || !s->list_query || !s->list_bound || !s->list_tmp || !s->list_want || !s->list_done) {
        idx_scratch_free(s);
        return -ENOMEM;
    }
    memset(s->rows, 0, IDX_BLOCK * dim_pad * sizeof *s->rows);
    for (uint32_t h = 0; h < max_group; h++) {
        s->tops[h].ids = s->top_ids + h * cap;
        s->tops[h].scores = s->top_scores + h * cap;
    }
    *ret = s;
    return 0;
}

void idx_scratch_free(idx_scratch *s)
{
    if (!s)
        return;
    free(s->q);
    free(s->rows);
    free(s->scores);
    free(s->tmp);
    free(s->tops);
    free(s->top_ids);
    free(s->top_scores);
    free(s->hits);
    free(s->node_score);
    free(s->node_best);
    free(s->node_votes);
    free(s->node_tmp);
    free(s->node_want);
    free(s->node_done);
    free(s->node_list);
    free(s->code_q);
    free(s->code_query);
    free(s->weigh);
    free(s->weigh_to);
    free(s->scales);
    free(s->tile_best);
    free(s->clusters);
    free(s->scanned);
    free(s->list_score);
    free(s->list_dev);
    free(s->list_along);
    free(s->list_query);
    free(s->list_bound);
    free(s->list_tmp);
    free(s->list_want);
    free(s->list_done);
    free(s);
}

uint32_t idx_visited(const idx_scratch *s)
{
    return s->visited;
}

static bool query_fits(const idx_index *ix, const idx_rows *keys, const idx_query *q, const idx_scratch *s)
{
    if (!q->group || q->group > s->max_group || !keys->dim || keys->dim > s->max_dim)
        return false;
    if (q->lo > q->hi || q->hi > keys->n || (q->hi - q->lo > s->max_k && q->budget.top_k > s->max_k))
        return false;
    return !ix || (ix->header->n == keys->n && ix->header->dim == keys->dim && keys->n <= s->max_n);
}

int idx_search(const idx_index *ix, const idx_rows *keys, const idx_query *q, idx_scratch *s, idx_hits **ret_hits, uint32_t *ret_visited)
{
    if (!query_fits(ix, keys, q, s))
        return -EINVAL;
    uint32_t span = q->hi - q->lo, top_k = q->budget.top_k < span ? q->budget.top_k : span;
    if (ix && ix->header->kind != IDX_GRAPH) {
        float m[IDX_MAX_GROUP];
        int r = idx_codes_scan(ix, keys, q, 0, ix->header->n_clusters, s, NULL, 0, m, ret_hits);
        if (ret_visited)
            *ret_visited = s->visited;
        return r;
    }
    float beta = q->budget.beta > 0 ? q->budget.beta : INFINITY;
    idx_pad_queries(s->q, q->q, q->group, keys->dim);
    for (uint32_t h = 0; h < q->group; h++)
        idx_top_reset(&s->tops[h], top_k, beta, q->floor && beta < INFINITY ? q->floor[h] : -INFINITY);

    /* Where everything is wanted no graph can help. */
    s->visited = 0;
    if (top_k && ix && top_k < span)
        idx_graph_search(ix, keys, q, s);
    else if (top_k)
        idx_flat_search(keys, q, s);
    const idx_kernels *k = idx_kernels_get();
    for (uint32_t h = 0; h < q->group; h++) {
        idx_top *t = &s->tops[h];
        t->keep = top_k;
        t->beta = beta;
        if (q->floor && beta < INFINITY && q->floor[h] > t->best)
            t->best = q->floor[h];
        idx_top_finish(k, t, s->tmp);
        s->hits[h] = (idx_hits){.ids = t->ids, .scores = t->scores, .n = t->n};
    }
    *ret_hits = s->hits;
    if (ret_visited)
        *ret_visited = s->visited;
    return 0;
}
