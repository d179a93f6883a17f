/* Shared by attention_prefill.c, attention_decode.c, attention_search.c, attention_auto.c and attention_estimate.c. */
#ifndef RETRIEVALD_ATTENTION_PRIVATE_H
#define RETRIEVALD_ATTENTION_PRIVATE_H

#include "attention.h"

enum {
    ATTN_BLOCK = 512,   /* keys of a dense decode part: likewise */
    ATTN_SEEDS = 8,     /* hits of a query head that seed its next search */
    ATTN_MERGE_MAX = 16, /* query heads that a task merges, at most */
    ATTN_SKIP_MIN = 1024, /* fewer visible keys in a segment: a scan costs less than finding the way to them */
    ATTN_SPARE = 128,   /* keys beside top_k that a scan of codes scores again where no estimate is made (index/README.md) */
    ATTN_LOCAL_STEP = 64, /* where the window moves over a segment with codes: in steps, since each makes sums anew */
};

/* How a span or a range is searched. */
enum { ATTN_NOT, ATTN_SCAN, ATTN_GRAPH, ATTN_CODES, ATTN_CLUSTER, ATTN_IVF };

/* A stretch of retrievable keys that one task searches. */
typedef struct {
    uint32_t span, lo, hi;  /* positions */
    bool first;             /* of its span: takes the whole span when a graph answers */
    uint32_t part, parts;   /* of its span: which clusters are its own when codes or lists answer */
} attn_range;

/* A run of codes that the visible part of a span cuts. */
typedef struct {
    uint32_t span;
    const idx_index *ix;
    idx_cut cut;            /* of one (layer, KV head): cut.hi == 0: not made yet */
} attn_cut;

/* Hits of one (KV head, range, query head). */
typedef struct {
    uint32_t *ids;          /* rows of the segment */
    float *scores;
    uint32_t n;
    uint32_t *clusters;     /* as in idx_hits */
    float *scanned;
} attn_hits;

/* What one query of a layer reads: dense blocks, and what lies between for retrieval. */
typedef struct {
    struct attn_block { uint32_t lo, hi; } *blocks;
    uint32_t n_blocks, n_dense, retrieve_lo, retrieve_hi;
    uint32_t n_coded;           /* keys in there that a search with the estimate answers for */
    uint32_t sink, local;       /* [0, sink) and [local, n_keys) are dense, whatever lies between */
    uint32_t n_bounds;          /* blocks behind the n_blocks that others attend: only their maximum is wanted, for the budget */
} attn_plan;

typedef struct {
    /* prefill (attention_prefill.c) */
    void *q;                    /* a task's queries, packed */
    float *s;                   /* scores of a tile */
    float *rows, *tmp;          /* [ENG_NR][dim] twice */
    /* decode */
    float *scores;              /* [group][ATTN_BLOCK] */
    float *all;                 /* scores of a head over all ranges, for selection */
    float *kth;                 /* scratch of the selection */
    attn_hits **lists;          /* [query head of a merge][range] */
    eng_partial *parts;
    float *floor;               /* [group]: best scores among the dense keys of the KV head at hand */
    idx_scratch *search;
    uint32_t *taken;            /* [n_clusters], zero between uses */
    float *coef;                /* of the hits of a range */
    idx_cut *cuts;              /* [max_cuts], of one span */
} attn_worker;

struct eng_attn {
    eng_pool *pool;
    const eng_kernels *k;
    const eng_kv_shape *shape;
    uint32_t n_head, n_workers;
    size_t bytes;
    attn_worker *workers;

    /* prefill (attention_prefill.c) */
    bool bf16;
    uint32_t dim;               /* head size, rounded up to a multiple of 32 */
    uint32_t slab, max_cols;    /* keys that are packed at once; queries of a KV head in a chunk, rounded up to ENG_NR */
    uint8_t *packed_k, *packed_v; /* [head_kv][slab] */
    float *state;               /* [head_kv][max_cols / ENG_NR]: m [ENG_NR], l [ENG_NR], o [dim][ENG_NR] */
    uint32_t lo, hi, end;       /* of this call: the slab's positions; where the last query's keys end */
    uint32_t task_cols;         /* likewise */
    bool first_slab;
    bool packs_itself, few;     /* likewise: a KV head's one task packs its keys; in float32, and its columns are few */

    eng_cost cost;              /* auto's (attention_auto.c) */

    /* decode: fixed by setup */
    eng_attention policy;
    uint32_t max_blocks, k_cap, n_ranges, max_span, merge_heads;
    attn_range *ranges;
    uint32_t *largest_first;    /* [n_ranges] */
    attn_hits *hits;            /* [head_kv][range][group] */
    void *hit_memory;
    float *dense_o;             /* [head_kv][block][group][d] */
    float *dense_m, *dense_l;   /* [head_kv][block][group] */
    float *scaled;              /* queries / sqrt(d) */
    float *retrieved_o;         /* [n_head][d] */
    uint32_t *attended;         /* [n_head] of this layer */
    uint8_t *searched;          /* [head_kv][range]: ATTN_... */
    uint32_t *probed;           /* likewise: keys scored */
    uint32_t *seeds;            /* [layer][n_head][ATTN_SEEDS] positions, ~0: none */
    uint32_t *local_seeds;      /* [worker][group * ATTN_SEEDS] */
    uint8_t *served;            /* [span]: ATTN_..., by which index as a whole; read from the segments at the beginning of a step. NOT: each head as it can */

    /* decode: the estimate (attention_estimate.c) */
    bool estimates;
    uint32_t n_clusters;        /* of all spans, at most */
    uint32_t *cluster_base;     /* [span]: number of its first */
    float *weights;             /* [head_kv][group][n_clusters] */
    float *m_ref;               /* [head_kv][range][group] */
    struct attn_clusters { uint32_t first, end; } *clusters; /* [head_kv][range] that were scanned */
    uint32_t max_cuts, cut_clusters; /* most clusters of a run */
    attn_cut *cuts;             /* [layer][head_kv][max_cuts] */
    void *cut_memory;
    attn_cut *wanted;           /* [max_cuts]: this step's */
    uint32_t n_cuts;

    /* decode: this step */
    attn_plan step, sliding;    /* of ordinary layers; of the sliding layer at hand */
    attn_plan rest;             /* of the layer at hand, without what is attended elsewhere */
    float *rest_m, *rest_l;     /* where that goes, with `out` for o. NULL: all is here, and normalised */
    const attn_plan *plan;      /* the layer's */
    uint32_t n_dense, n_searches; /* its tasks */
    struct attn_left { _Atomic uint32_t dense, searches; } *left; /* [head_kv]: tasks that are not done */
    uint32_t n_keys;
    eng_attn_counts counts;

    /* this call */
    const eng_view *view;
    uint32_t layer, pos0, n_tokens;
    const float *query;
    float *out;
};

void attn_decode_free(eng_attn *a);

/* Of a span that is served: the index whose clusters its estimate is made of. */
static inline const idx_index *attn_index_of(const eng_attn *a, uint32_t span, uint32_t head_kv)
{
    const eng_segment *seg = a->view->spans[span].seg;
    uint32_t i = a->layer * a->shape->n_head_kv + head_kv;
    return a->served[span] == ATTN_CODES ? seg->codes[i] : a->served[span] == ATTN_IVF ? seg->ivf[i] : seg->cluster[i];
}

/* Bounds of the visible rows of a span for retrieval; empty: lo >= hi. */
static inline void attn_visible(const eng_attn *a, const eng_span *s, uint32_t *ret_lo, uint32_t *ret_hi)
{
    *ret_lo = s->lo > a->step.retrieve_lo ? s->lo : a->step.retrieve_lo;
    *ret_hi = s->hi < a->step.retrieve_hi ? s->hi : a->step.retrieve_hi;
}

/* attention_auto.c: what serves a span of which so many keys are visible, and auto's parts of it: a scan costs less than reading all; a graph less than a scan. */
uint8_t attn_serves(const eng_attn *a, const eng_span *s, uint32_t visible);
bool attn_auto_scans(const eng_attn *a, uint32_t visible);
bool attn_auto_walks(const eng_attn *a, uint32_t visible);

/* attention_search.c: the search of a KV head's range; the worker's floors are known. */
void attn_search_task(eng_attn *a, uint32_t head_kv, uint32_t range, uint32_t worker);

/* attention_estimate.c */
int attn_estimate_setup(eng_attn *a, const eng_view *view);
void attn_estimate_free(eng_attn *a);
/* Which runs the visible part of the served spans cuts in this step. A span for which there is no room is not served, then. */
void attn_estimate_step(eng_attn *a, const eng_view *view);
void attn_estimate_cuts(eng_attn *a); /* makes the cuts of this layer that are not made yet */
/* The clusters' weights in a range for a query head, in units of exp(m), when its hits are taken out of them; takes the hits' share off their scores, which are
 * softmaxed already. Returns l. */
float attn_estimate_weigh(eng_attn *a, attn_worker *w, uint32_t head, uint32_t range, attn_hits *hits, float m);
/* Adds what these weights are worth, for n query heads of a KV head, to o [n][d]. */
void attn_estimate_values(eng_attn *a, attn_worker *w, uint32_t head, uint32_t n, uint32_t range, float *o);

#endif
