/* What the files of index/ share beside the kernels: the arena, the scratch, the parts of a search. */
#ifndef IDX_PRIVATE_H
#define IDX_PRIVATE_H

#include "select.h"

/* ---- arena ----------------------------------------------------------------------------------------------------
 * Little-endian, no pointers: header, entries u32[n_entries], first u32[n + 1], links u32[n_links]. Node i's links are
 * links[first[i] .. first[i + 1]). */

enum {
    IDX_MAGIC = 0x58444e49, /* "INDX" */
    IDX_VERSION = 1,
    IDX_MAX_ROWS = 1 << 26,
    IDX_MAX_DIM = 4096,
    IDX_MAX_GROUP = 1024,
    IDX_MAX_DEGREE = 1024,
    IDX_MAX_ENTRIES = 4096,
    IDX_MAX_SPARE = 1024,
};

typedef struct {
    uint32_t magic, version, kind, n, dim;
    uint32_t max_degree; /* bound on a node's links */
    uint32_t n_entries;
    uint32_t spare; /* keys a search keeps for a head beyond those it returns: the width of its beam (graph_tune.c) */
    uint64_t n_links, bytes;
    uint32_t reserved[4]; /* zero */
} idx_header;

struct idx_index {
    size_t bytes;
    uint8_t *arena; /* owned, 64-byte aligned */
    const idx_header *header;
    const uint32_t *entries, *first, *links;
};

/* Bytes of an arena, or 0 when the counts are out of bounds. */
size_t idx_arena_bytes(uint32_t n, uint32_t n_entries, uint64_t n_links);

/* Takes over the arena and points into it. */
void idx_index_bind(idx_index *ix, uint8_t *arena, size_t bytes);

/* Memory for vectors; not cleared. n * size must not overflow. */
void *idx_alloc(size_t n, size_t size);

/* ---- scratch -------------------------------------------------------------------------------------------------- */

/* A node a graph search has scored and may expand. */
typedef struct {
    float priority;
    uint32_t id;
    float score; /* of the head that wants it most */
    uint32_t head;
} idx_node;

struct idx_scratch {
    uint32_t max_n, max_dim, max_group, max_k, max_keep;
    float *q;      /* [max_group][dim_pad] */
    float *rows;   /* [IDX_BLOCK][dim_pad] */
    float *scores; /* [max_group][IDX_TILE] */
    float *tmp;    /* [2 * idx_top_cap(max_keep)] */
    idx_top *tops; /* [max_group], their buffers in top_ids, top_scores */
    uint32_t *top_ids;
    float *top_scores;
    idx_hits *hits; /* [max_group] */

    /* graph */
    uint32_t *stamp; /* [max_n]: visited in this search when equal to `generation` */
    uint32_t generation;
    idx_node *frontier; /* [max_n], a heap */
    uint32_t n_frontier;
    idx_aim *aims; /* [max_group] */
};

/* Copies n vectors to rows of dim_pad, zero padded. */
void idx_pad_queries(float *dst, const float *q, uint32_t n, uint32_t dim);

/* Offers the scores of rows [lo, hi) for n_heads queries (padded, [n_heads][dim_pad]) to tops. rows and scores as in idx_scratch. */
void idx_scan(const idx_kernels *k, const idx_rows *keys, const float *q, uint32_t n_heads, float scale, uint32_t lo, uint32_t hi,
              idx_top *tops, float *rows, float *scores, float *tmp);

/* Searches into s->tops (already reset to the budget); returns the number of keys scored. */
uint32_t idx_flat_search(const idx_rows *keys, const idx_query *q, idx_scratch *s);
uint32_t idx_graph_search(const idx_index *ix, const idx_rows *keys, const idx_query *q, idx_scratch *s);

#endif
