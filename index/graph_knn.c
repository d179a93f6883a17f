/* Nearest keys of the training queries, by their codes: links are counts of hits, for which scores some hundredths off are as good. */
#include "graph_build.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TILES = 16, QUERY_PIECE = 512, OPEN_EVERY = 4 };

/* What a step of decoding reads anyway, the window, has the best keys of most queries, which would hide all others. */
enum { SINKS = 128, RECENT = 512, ENOUGH = 4096 };

void idx_train_range(const idx_builder *b, uint32_t position, uint32_t *ret_lo, uint32_t *ret_hi)
{
    uint32_t n = b->keys.n, rows = b->train.pos[position] >= n ? n : b->train.pos[position] + 1;
    *ret_lo = rows < ENOUGH ? 0 : SINKS;
    *ret_hi = rows < ENOUGH ? rows : rows - RECENT;
}

int idx_knn_new(idx_builder *b)
{
    size_t nodes = ((size_t)b->keys.n + IDX_BLOCK - 1) / IDX_BLOCK, nq = b->n_queries, stride = b->params.knn < nodes ? b->params.knn : nodes;
    b->hits = (idx_lists){idx_alloc(nq * stride, 4), calloc(nq + 1, 4), (uint32_t)stride};
    b->queries = (idx_runs){calloc(nodes + 2, 4), NULL};
    if (!b->hits.ids || !b->hits.count || !b->queries.first)
        return -ENOMEM;
    return b->n_queries ? idx_scratch_new(b->keys.n, b->keys.dim, b->train.group, b->params.knn > IDX_TUNE_K ? b->params.knn : IDX_TUNE_K, &b->scratch) : 0;
}

static void take_query(idx_builder *b, size_t position)
{
    uint32_t group = b->train.group, dim = b->keys.dim;
    idx_query q = {.group = group, .scale = 1};
    idx_rows rows = {b->train.q + position * group * dim, (size_t)dim * 2, group, dim, IDX_F16};
    b->k->widen(b->scratch->q, &rows, NULL, 0, group);
    idx_code_queries(b->result, &q, b->scratch);
    for (uint32_t h = 0; h < group; h++) {
        idx_top_reset(&b->scratch->tops[h], b->params.knn < b->keys.n ? b->params.knn : b->keys.n, INFINITY, -INFINITY);
        b->scratch->tops[h].thr = -FLT_MAX;
    }
}

/* The nodes of a query's hits, each once. */
static void take_hits(idx_builder *b, size_t query, const idx_top *t)
{
    uint32_t *to = b->hits.ids + query * b->hits.stride, n = 0;
    for (uint32_t i = 0; i < t->n; i++) {
        uint32_t node = t->ids[i] / IDX_BLOCK;
        if (b->count[node] == query + 1)
            continue;
        b->count[node] = (uint32_t)query + 1;
        to[n++] = node;
        b->queries.first[node + 2]++;
    }
    b->hits.count[query] = n;
}

/* at = training position, sub = nodes scanned. Causal, by whole nodes: a query meets only rows it could attend to when it was made. Every
 * fourth meets all newer ones, too, because else the newest keys have hardly any training query. */
bool idx_knn_search(idx_builder *b)
{
    uint32_t m = b->train.m, group = b->train.group, nodes = (b->keys.n + IDX_BLOCK - 1) / IDX_BLOCK, number;
    size_t i = (size_t)b->at;
    if (!b->n_queries || b->at == m) {
        memset(b->count, 0, nodes * sizeof *b->count);
        return true;
    }
    if (idx_tune_owns(b, (uint32_t)i, &number)) {
        b->at++;
        return false;
    }
    idx_scratch *s = b->scratch;
    const idx_index *ix = b->result;
    uint32_t lo, hi;
    idx_train_range(b, (uint32_t)i, &lo, &hi);
    uint32_t first = lo / IDX_BLOCK, seen = i % OPEN_EVERY == 0 ? nodes : (hi + IDX_BLOCK - 1) / IDX_BLOCK;
    if (!b->sub)
        take_query(b, i);
    for (uint32_t tile = 0; tile < TILES && first + b->sub < seen; tile++) {
        uint32_t node = first + b->sub, row = node * IDX_BLOCK, n = seen - node < IDX_TILE / IDX_BLOCK ? seen - node : IDX_TILE / IDX_BLOCK;
        b->k->codes(ix->code.codes + (size_t)node * ix->code.block_bytes, ix->code.scale + row, n, ix->code.quads, s->code_query + (size_t)(tile % IDX_ROUNDINGS) * group, group,
                    s->scores, IDX_TILE, s->tile_best);
        for (uint32_t h = 0; h < group; h++)
            idx_top_add_known(b->k, &s->tops[h], row, s->scores + (size_t)h * IDX_TILE, n * IDX_BLOCK, s->tile_best[h], s->tmp);
        b->sub += n;
    }
    if (first + b->sub < seen)
        return false;
    b->sub = 0;
    b->at++;
    for (uint32_t h = 0; h < group; h++) {
        idx_top_finish(b->k, &s->tops[h], s->tmp);
        take_hits(b, i * group + h, &s->tops[h]);
    }
    return false;
}

/* Inverts "query -> nodes". first[] was counted two places ahead, so that filling leaves it right. */
bool idx_knn_invert(idx_builder *b)
{
    uint32_t nodes = (b->keys.n + IDX_BLOCK - 1) / IDX_BLOCK, *first = b->queries.first;
    if (!b->queries.ids) {
        for (uint32_t i = 1; i <= nodes; i++)
            first[i + 1] += first[i];
        b->queries.ids = idx_alloc(first[nodes + 1], 4);
        if (!b->queries.ids) {
            b->error = -ENOMEM;
            return true;
        }
    }
    for (uint32_t c = 0; c < QUERY_PIECE && b->at < b->n_queries; c++, b->at++) {
        const uint32_t *hits = b->hits.ids + (size_t)b->at * b->hits.stride;
        for (uint32_t j = 0; j < b->hits.count[b->at]; j++)
            b->queries.ids[first[hits[j] + 1]++] = (uint32_t)b->at;
    }
    return b->at == b->n_queries;
}
