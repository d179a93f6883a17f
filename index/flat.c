/* The exact scan. Each key is read once for the whole query group: widened to f32 in a block of 16 that stays in L1, scored for every
 * head, and the scores of a tile compared with each head's threshold.
 *
 * Source: "Flat", the exact baseline of RetrievalAttention (arXiv 2409.10516), which reads float32 keys once for each query head. It says nothing of sharing them. Here a group reads them
 * once, in the cache's type, so that what other kinds are compared with is as fast as it can be. */
#include "private.h"

#include <string.h>

void idx_pad_queries(float *dst, const float *q, uint32_t n, uint32_t dim)
{
    uint32_t dim_pad = idx_dim_pad(dim);
    for (uint32_t h = 0; h < n; h++) {
        memcpy(dst + (size_t)h * dim_pad, q + (size_t)h * dim, (size_t)dim * sizeof(float));
        memset(dst + (size_t)h * dim_pad + dim, 0, (size_t)(dim_pad - dim) * sizeof(float));
    }
}

void idx_scan(const idx_kernels *k, const idx_rows *keys, const float *q, uint32_t n_heads, float scale, uint32_t lo, uint32_t hi,
              idx_top *tops, float *rows, float *scores, float *tmp)
{
    uint32_t dim_pad = idx_dim_pad(keys->dim);
    for (uint32_t at = lo; at < hi;) {
        uint32_t n = hi - at < IDX_TILE ? hi - at : IDX_TILE;
        for (uint32_t i = 0; i < n; i += IDX_BLOCK) {
            k->widen(rows, keys, NULL, at + i, n - i < IDX_BLOCK ? n - i : IDX_BLOCK);
            k->dots(rows, q, n_heads, dim_pad, scale, scores + i, IDX_TILE);
        }
        for (uint32_t h = 0; h < n_heads; h++)
            idx_top_add(k, &tops[h], NULL, at, scores + (size_t)h * IDX_TILE, n, tmp);
        at += n;
    }
}

void idx_flat_search(const idx_rows *keys, const idx_query *q, idx_scratch *s)
{
    idx_scan(idx_kernels_get(), keys, s->q, q->group, q->scale, q->lo, q->hi, s->tops, s->rows, s->scores, s->tmp);
    s->visited = q->hi - q->lo;
}
