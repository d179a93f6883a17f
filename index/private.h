/* What the files of index/ share beside the kernels: the arena, the scratch, the parts of a search. */
#ifndef IDX_PRIVATE_H
#define IDX_PRIVATE_H

#include "select.h"

/* ---- arena ----------------------------------------------------------------------------------------------------
 * Little-endian, no pointers; README.md has the parts. */

enum {
    IDX_MAGIC = 0x58444e49, /* "INDX" */
    IDX_VERSION = 2,
    IDX_MAX_ROWS = 1 << 26,
    IDX_MAX_DIM = 4096,
    IDX_MAX_GROUP = 1024,
    IDX_MAX_DEGREE = 256,
    IDX_RUN = 8192,        /* rows of a run of codes, about: at most half as many more */
    IDX_CLUSTER_ROWS = 32, /* rows of a value cluster, on average */
    IDX_MAX_CLUSTER = 256, /* and at most: larger ones are cut */
    IDX_DIRECTIONS = 4,    /* of a cluster's variation, kept beside its mean key */
    IDX_HEADS = 32,        /* that a search of lists or a graph takes at once: a word of bits */
    IDX_CODE_SPARE = 128,  /* candidates a scan of codes keeps beyond those wanted; */
    IDX_NARROW_SPARE = 192, /* and where they have four bits */
    IDX_MAX_SPARE = 320,    /* any search, at most */
    IDX_LINK_ONE = 255,     /* a link's largest weight */
};

typedef struct {
    uint32_t magic, version, kind, n, dim;
    uint32_t max_degree; /* graph: bound on a node's links; else 0 */
    uint32_t n_clusters; /* graph: 0 */
    uint32_t n_margins;  /* graph: heads of the group it was tuned for; else 0 */
    uint64_t n_links, bytes; /* links of a graph; else 0 */
    float noise;          /* rms rounding error of a key's dimension, in its unit */
    float margin;         /* lists, graph: how far a cluster or node is searched (lists_search.c, graph_search.c; the largest of the heads); else 0 */
    uint32_t narrow;      /* flat: 1, codes of four bits (codes_narrow.c); else 0 */
    uint32_t reserved;    /* zero */
} idx_header;

struct idx_index {
    size_t bytes;
    uint8_t *arena; /* 64-byte aligned */
    bool borrowed;  /* the arena is the caller's */
    const idx_header *header;
    const float *margins;          /* graph, [n_margins] */
    const uint32_t *first, *links; /* graph, [n_blocks + 1], [n_links]: node i's are links[first[i] .. first[i + 1]) */
    /* Codes; of a graph, too, whose slots are its rows and whose nodes are blocks: what it has of these has a node where lists have a cluster. Slot: place of a row in cluster order; the slots of a run are the numbers of its rows. Slots are padded to whole blocks of 16.
     */
    struct {
        uint32_t n_runs, n_blocks, quads;
        size_t block_bytes;    /* of codes */
        const float *mean, *unit; /* [dim_pad] */
        const uint32_t *first; /* [n_clusters + 1]: first slot of each cluster */
        const uint32_t *run;   /* [n_runs + 1]: first cluster of each run */
        const uint32_t *at;    /* [n_blocks]: cluster of each block's first slot */
        const uint16_t *ids;   /* [16 * n_blocks]: row of each slot, less the first row of its run */
        const float *scale;    /* [16 * n_blocks]; NaN: the key isn't finite, it has no score */
        const float *sums;     /* [n_clusters][dim_pad]: summed values */
        const uint8_t *codes;  /* [n_blocks][quads][16][4], or as in distance_narrow.h */
        /* lists, [clusters in blocks of 16]: the mean key as a code; of clusters, too, [IDX_DIRECTIONS] directions in which the keys vary most, as long as
         * they vary in them; the rms of the rest */
        const float *cent_scale, *spread;
        const uint8_t *cent_codes;
    } code;
};

/* Largest absolute value of x[0..n); for NaN, something that is not usable. In integers, which order as they do and can be vectorised. */
static inline float idx_largest(const float *x, uint32_t n)
{
    int32_t most = 0;
    for (uint32_t i = 0; i < n; i++) {
        union {
            float f;
            int32_t i;
        } u = {x[i]};
        int32_t size = u.i & 0x7fffffff;
        most = size > most ? size : most;
    }
    union {
        int32_t i;
        float f;
    } u = {most};
    return u.f;
}

/* Whether a vector can be summed with others: all finite, and none so large that sums and products become infinite. */
static inline bool idx_usable(const float *x, uint32_t n)
{
    return idx_largest(x, n) < 0x1p115f;
}

/* Nearest integer, to even, of |x| < 2^22. */
static inline int32_t idx_round(float x)
{
    union {
        float f;
        int32_t i;
    } u = {x + 0x1.8p23f};
    return u.i - 0x4b400000;
}

static inline bool idx_is_lists(const idx_index *ix)
{
    return ix->header->kind == IDX_CLUSTER || ix->header->kind == IDX_IVF;
}

/* Bytes of a codes arena and where its parts begin, in the order of `code`; 0 when the counts are out of bounds. */
enum { IDX_CODE_PARTS = 11 };
size_t idx_codes_layout(idx_kind kind, bool narrow, uint32_t n, uint32_t dim, uint32_t n_clusters, size_t ret_offset[IDX_CODE_PARTS]);

/* idx_check()'s part for codes; the header has been checked. */
int idx_codes_check(const idx_index *ix, char *err, size_t errlen);

__attribute__((format(printf, 3, 4))) int idx_bad(char *err, size_t errlen, const char *format, ...);

/* The same for a graph: mean and unit, margins, first, cent_scale, spread, scale, cent_codes, codes, links. */
enum { IDX_GRAPH_PARTS = 9 };
size_t idx_graph_layout(uint32_t n, uint32_t dim, uint32_t n_margins, uint64_t n_links, size_t ret_offset[IDX_GRAPH_PARTS]);
size_t idx_graph_max_bytes(uint32_t n, uint32_t dim, uint32_t n_margins, uint32_t degree);

/* A link: a node in the upper 24 bits, a weight from 1 to IDX_LINK_ONE in the lower 8. */
static inline uint32_t idx_link_to(uint32_t link)
{
    return link >> 8;
}

static inline uint32_t idx_link_weight(uint32_t link)
{
    return link & 255;
}

/* Takes over the arena and points into it. */
void idx_index_bind(idx_index *ix, uint8_t *arena, size_t bytes);

/* Memory for vectors; not cleared. n * size must not overflow. */
void *idx_alloc(size_t n, size_t size);

/* ---- scratch -------------------------------------------------------------------------------------------------- */

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

    /* graph, [node_ld]: nodes */
    uint32_t node_ld;
    float *node_score;               /* [32 heads at most][node_ld]: of the mean keys */
    float *node_votes, *node_best;   /* [node_ld]; [node_ld][32 heads at most] */
    float *node_tmp;                 /* [3 * (node_ld + 16)] */
    uint32_t *node_want, *node_done; /* a bit for each of 32 heads */
    uint32_t *node_list;

    /* codes */
    int8_t *code_q;             /* [IDX_ROUNDINGS][group][dim_pad] */
    idx_code_query *code_query; /* [IDX_ROUNDINGS][group] */
    float *weigh;               /* [max_group][IDX_TILE], and 16 more */
    float **weigh_to;           /* [max_group] */
    float *scales;              /* [IDX_TILE] */
    float *tile_best;           /* [max_group] */
    uint32_t *clusters;         /* as top_ids */
    float *scanned;             /* as top_scores */

    /* lists */
    uint32_t list_ld;
    float *list_score, *list_dev, *list_bound; /* [max_group][list_ld] */
    float *list_along;              /* [max_group][IDX_DIRECTIONS * list_ld]: a direction's scores */
    idx_code_query *list_query;     /* [max_group]: without offset */
    float *list_tmp;                /* [2 * (list_ld + 16)] */
    uint32_t *list_want, *list_done; /* [list_ld]: a bit for each of 32 heads */

    uint32_t visited; /* keys that the last search scored for some head */
};

/* ---- codes_scan.c, lists_search.c ---- */

/* What a scan of codes works on. */
typedef struct {
    const idx_kernels *k;
    const idx_index *ix;
    const idx_query *q;
    idx_scratch *s;
    uint32_t first, end; /* clusters */
    float *weights;      /* NULL: not wanted */
    size_t ld;
    float *m;
    float cut; /* nothing this far below m has a weight */
} idx_scan_state;

/* The scales of a tile, slots [at, at + n), to score it with: of slots outside [from, to) and, where the run is cut, of rows outside [lo, hi) they are NaN, and
 * so are the scores, which makes them no hits and without weight. */
const float *idx_visible_scales(const idx_scan_state *c, uint32_t at, uint32_t n, uint32_t from, uint32_t to, uint32_t run_lo, bool cut);

/* Asks for the row numbers of a tile, slots [at, at + n): at the end of a search hits turn into rows, which lie anywhere. */
static inline void idx_ask_rows(const idx_index *ix, uint32_t at, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += IDX_ALIGN / sizeof *ix->code.ids)
        __builtin_prefetch(ix->code.ids + at + i, 0, 2);
}

/* s->q [group][dim_pad] as bytes, to s->code_query. */
void idx_code_queries(const idx_index *ix, const idx_query *q, idx_scratch *s);

/* Of clusters [first, end), and a few more, for all heads: the centroid's score to s->list_score, the standard deviation of its keys' scores to s->list_dev (ivf: 0), and the
 * scores' rounding errors with them. s->q and the coded queries are those of the search. */
void idx_lists_score(const idx_index *ix, uint32_t first, uint32_t end, uint32_t group, float scale, idx_scratch *s);

/* A search of lists: candidates to the tops; weights are the centroids' scores. */
void idx_lists_scan(const idx_scan_state *c, uint32_t top_k, float beta);

/* idx_estimate() of lists. */
float idx_lists_estimate(const idx_index *ix, const idx_cut *cuts, uint32_t n_cuts, uint32_t first, uint32_t end, float m, float factor,
                         float *weights, const uint32_t *clusters, const float *scanned, uint32_t n_hits, uint32_t *taken);

/* The cut of a run, or NULL. */
const idx_cut *idx_find_cut(const idx_cut *cuts, uint32_t n_cuts, uint32_t run);

/* Copies n vectors to rows of dim_pad, zero padded. */
void idx_pad_queries(float *dst, const float *q, uint32_t n, uint32_t dim);

/* Offers the scores of rows [lo, hi) for n_heads queries (padded, [n_heads][dim_pad]) to tops. rows and scores as in idx_scratch. */
void idx_scan(const idx_kernels *k, const idx_rows *keys, const float *q, uint32_t n_heads, float scale, uint32_t lo, uint32_t hi,
              idx_top *tops, float *rows, float *scores, float *tmp);

/* Search into s->tops and set s->visited. Flat: tops are reset to the budget already. Graph: leaves more than the budget has. */
void idx_flat_search(const idx_rows *keys, const idx_query *q, idx_scratch *s);
void idx_graph_search(const idx_index *ix, const idx_rows *keys, const idx_query *q, idx_scratch *s);

#endif
