/* Exact nearest keys of the training queries, and what follows from them: pivots and entry points. */
#include "graph_build.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SCAN_PIECE = 4096, QUERY_PIECE = 512, ENTRY_QUERIES = 1024, OPEN_EVERY = 4 };

int idx_knn_new(idx_builder *b)
{
    size_t n = b->keys.n, nq = b->n_queries, knn = b->params.knn, cap = idx_top_cap((uint32_t)knn), group = b->train.group;
    b->hits = (idx_lists){idx_alloc(nq * knn, 4), calloc(nq + 1, 4), (uint32_t)knn};
    b->pivots = (idx_runs){calloc(n + 2, 4), idx_alloc(nq * b->params.pivots, 4)};
    b->tops = calloc(group + 1, sizeof *b->tops);
    b->top_ids = idx_alloc(group * cap, 4);
    b->top_scores = idx_alloc(group * cap, 4);
    b->entries = calloc(b->params.entries, 4);
    if (!b->hits.ids || !b->hits.count || !b->pivots.first || !b->pivots.ids || !b->tops || !b->top_ids || !b->top_scores || !b->entries)
        return -ENOMEM;
    for (size_t h = 0; h < group; h++) {
        b->tops[h].ids = b->top_ids + h * cap;
        b->tops[h].scores = b->top_scores + h * cap;
    }
    return 0;
}

/* at = training position, sub = first row not yet scanned. Causal: a query meets only the rows it could attend to when it was made. Every
 * fourth meets all rows, because else the newest keys have hardly any training query (measured at 32K keys: recall .984 -> .991). */
bool idx_knn_search(idx_builder *b)
{
    uint32_t m = b->train.m, group = b->train.group, dim = b->keys.dim, n = b->keys.n;
    if (b->at == m)
        return true;
    size_t i = (size_t)b->at;
    uint32_t number;
    bool tune = idx_tune_owns(b, (uint32_t)i, &number);
    uint32_t rows = (i % OPEN_EVERY == 0 && !tune) || b->train.pos[i] >= n ? n : b->train.pos[i] + 1;
    if (!b->sub) {
        idx_rows q = {b->train.q + i * group * dim, (size_t)dim * 2, group, dim, IDX_F16};
        b->k->widen(b->q, &q, NULL, 0, group);
        for (uint32_t h = 0; h < group; h++)
            idx_top_reset(&b->tops[h], b->params.knn, INFINITY, -INFINITY);
    }
    uint32_t end = rows - b->sub > SCAN_PIECE ? b->sub + SCAN_PIECE : rows;
    idx_scan(b->k, &b->keys, b->q, group, 1, b->sub, end, b->tops, b->rows, b->scores, b->tmp);
    b->sub = end;
    if (end < rows)
        return false;
    b->sub = 0;
    b->at++;
    if (tune) {
        idx_tune_take(b, number);
        return false;
    }
    for (uint32_t h = 0; h < group; h++) {
        idx_top *t = &b->tops[h];
        idx_top_finish(b->k, t, b->tmp);
        uint32_t p = idx_select(t->ids, t->scores, t->n, b->params.pivots);
        memcpy(b->hits.ids + (i * group + h) * b->hits.stride, t->ids, (size_t)t->n * 4);
        b->hits.count[i * group + h] = t->n;
        for (uint32_t j = 0; j < p; j++)
            b->pivots.first[t->ids[j] + 2]++;
    }
    return false;
}

/* Inverts "query -> pivots". first[] was counted two places ahead, so that filling leaves it right. */
bool idx_knn_pivots(idx_builder *b)
{
    if (!b->at)
        for (uint32_t i = 1; i <= b->keys.n; i++)
            b->pivots.first[i + 1] += b->pivots.first[i];
    for (uint32_t c = 0; c < QUERY_PIECE && b->at < b->n_queries; c++, b->at++) {
        const uint32_t *hits = b->hits.ids + (size_t)b->at * b->hits.stride;
        uint32_t p = b->hits.count[b->at] < b->params.pivots ? b->hits.count[b->at] : b->params.pivots;
        for (uint32_t j = 0; j < p; j++)
            b->pivots.ids[b->pivots.first[hits[j] + 1]++] = (uint32_t)b->at;
    }
    return b->at == b->n_queries;
}

/* Entry points: greedily, the key that is among the hits of most queries not yet led to one; at the end, keys at even distances. */
bool idx_knn_entries(idx_builder *b)
{
    uint32_t n = b->keys.n, want = b->params.entries < n ? b->params.entries : n;
    uint32_t *count = b->queue, step = b->n_queries / ENTRY_QUERIES + 1;
    if (b->n_entries == want)
        return true;
    memset(count, 0, (size_t)n * 4);
    uint32_t left = 0;
    for (uint32_t i = 0; i < b->n_queries; i += step) {
        const uint32_t *hits = b->hits.ids + (size_t)i * b->hits.stride;
        bool done = false;
        for (uint32_t j = 0; j < b->hits.count[i] && !done; j++)
            done = b->stamp[hits[j]] == 1;
        if (done)
            continue;
        left++;
        for (uint32_t j = 0; j < b->hits.count[i]; j++)
            count[hits[j]]++;
    }
    uint32_t best = (uint32_t)((uint64_t)b->n_entries * n / want);
    if (left) {
        for (uint32_t i = 0; i < n; i++)
            if (b->stamp[i] != 1 && count[i] > count[best])
                best = i;
    } else {
        while (b->stamp[best] == 1)
            best = (best + 1) % n;
    }
    b->stamp[best] = 1;
    b->entries[b->n_entries++] = best;
    return false;
}
