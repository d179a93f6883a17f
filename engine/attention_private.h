/* Shared by attention_prefill.c and attention_decode.c. */
#ifndef RETRIEVALD_ATTENTION_PRIVATE_H
#define RETRIEVALD_ATTENTION_PRIVATE_H

#include "attention.h"

enum {
    ATTN_TILE = 64,     /* keys of a prefill tile: cut at absolute multiples */
    ATTN_BLOCK = 512,   /* keys of a dense decode part: likewise */
    ATTN_SEEDS = 8,     /* hits of a query head that seed its next search */
};

/* A stretch of retrievable keys that one task searches. */
typedef struct {
    uint32_t span, lo, hi;  /* positions */
    bool first;             /* of its span: takes the whole span when a graph answers */
} attn_range;

/* Hits of one (KV head, range, query head). */
typedef struct {
    uint32_t *ids;          /* rows of the segment */
    float *scores;
    uint32_t n;
} attn_hits;

/* What one query of a layer reads: dense blocks, and what lies between for retrieval. */
typedef struct {
    struct attn_block { uint32_t lo, hi; } *blocks;
    uint32_t n_blocks, n_dense, retrieve_lo, retrieve_hi;
} attn_plan;

typedef struct {
    /* prefill */
    float *q, *s, *o, *m, *l;   /* [rows][d], [rows][ATTN_TILE], [rows][d], [rows], [rows] */
    float *panel, *v, *tmp;     /* K packed [2][d][ENG_NR], V [ATTN_TILE][d], [ENG_NR][d] */
    uint8_t *k;                 /* rows of a tile that straddles segments */
    /* decode */
    float *scores;              /* [group][ATTN_BLOCK] */
    float *all;                 /* scores of a head over all ranges, for selection */
    uint32_t *all_ids;
    attn_hits **lists;          /* [range] of one query head */
    eng_partial *parts;
    idx_scratch *search;
} attn_worker;

struct eng_attn {
    eng_pool *pool;
    const eng_kernels *k;
    const eng_kv_shape *shape;
    uint32_t n_head, n_workers, block_tokens; /* query tokens of a prefill task */
    size_t bytes;
    attn_worker *workers;

    /* decode: fixed by setup */
    eng_attention policy;
    uint32_t max_blocks, k_cap, n_ranges, max_span;
    attn_range *ranges;
    attn_hits *hits;            /* [head_kv][range][group] */
    void *hit_memory;
    float *dense_o;             /* [head_kv][block][group][d] */
    float *dense_m, *dense_l;   /* [head_kv][block][group] */
    float *floor;               /* [n_head] */
    float *scaled;              /* queries / sqrt(d) */
    float *retrieved_o;         /* [n_head][d] */
    uint32_t *attended;         /* [n_head] of this layer */
    uint8_t *searched;          /* [head_kv][range]: 0 not, 1 flat, 2 graph */
    uint32_t *seeds;            /* [layer][n_head][ATTN_SEEDS] positions, ~0: none */
    uint32_t *local_seeds;      /* [worker][group * ATTN_SEEDS] */

    /* decode: this step */
    attn_plan step, sliding;    /* of ordinary layers; of the sliding layer at hand */
    const attn_plan *plan;      /* the layer's */
    uint32_t n_keys;
    eng_attn_counts counts;

    /* this call */
    const eng_view *view;
    uint32_t layer, pos0, n_tokens;
    const float *query;
    float *out;
};

void attn_decode_free(eng_attn *a);

#endif
