/* Shared by gpu_layers.c, gpu_prefill.c and gpu_decode.c. */
#ifndef RETRIEVALD_GPU_LAYERS_PRIVATE_H
#define RETRIEVALD_GPU_LAYERS_PRIVATE_H

#include "gpu_layers.h"

enum {
    GPUL_BLOCK = 2048,   /* keys of a block that streams in for a prefill; a multiple of GPU_TILE */
    GPUL_SLOTS = 2,      /* blocks on their way */
};

typedef struct {
    gpu_weight wq, wk, wv, wo, gate, up, down;
    float *attn_norm, *bq, *bk, *bv, *q_norm, *k_norm, *attn_post_norm, *ffn_norm, *ffn_post_norm, *key_shift;
    gpu_kv window;      /* rows [0, ENG_GPU_SINK) are these positions; behind them position p is at row (p - ENG_GPU_SINK) % ENG_GPU_LOCAL */
} gpul_layer;

/* A stretch of one layer's keys and values between the segments and the GPU. */
typedef struct {
    uint16_t *pinned;   /* K [n_head_kv][rows][d], then V */
    gpu_kv kv;          /* prefill: on the GPU */
    gpu_event *copied;  /* the pinned part may be written again */
    gpu_event *used;    /* so may the GPU's */
} gpul_slot;

struct eng_gpu {
    eng_gpu_params p;
    eng_gpu_plan plan;
    gpu_context *g;
    uint32_t first;     /* layer */
    gpul_layer *layers;  /* [plan.n_layer] */
    gpu_weight embd, output;
    float *output_norm;
    float q_scale;      /* forward.c */

    /* device; n_q, n_kv: of a token, all heads */
    uint32_t n_q, n_kv;
    int32_t *ids;       /* [n_chunk] */
    float *x, *h, *o, *gate, *up, *cs, *cs_local, *logits;
    float *qkv[2];      /* q [n][n_q], k [n][n_kv], v [n][n_kv], of layers in turn */
    gpu_parts state;    /* of a prefill */
    gpu_kv chunk;       /* likewise: its own keys and values, from the tile's begin that its first token is in */
    gpu_parts parts;    /* of a step: the window's, and the host's as the last */
    uint32_t n_parts;   /* the window's */
    gpul_slot slots[GPUL_SLOTS];
    uint32_t slot;      /* next */

    /* pinned */
    float *host_x;      /* [n_chunk][n_embd] */
    int32_t *host_ids;
    float *host_cs;     /* [2][n_chunk][rope_dim] */
    float *host_qkv[2]; /* of a prefill */
    float *host_layers; /* [plan.n_layer][n_q + 2 n_kv], of a step */
    float *host_m, *host_l, *host_o; /* [n_head] twice, [n_head][d]: the rest of a step */
    float *host_logits;

    gpu_event *turned[2], *copied[2], *done; /* q, k, v are there, are with the host; the end of a call */
    uint32_t window_end; /* the windows have the tokens before it; UINT32_MAX: of another session */

    struct gpul_trace *trace; /* gpu_trace.c; NULL: not traced */

    void **owned, **pinned;
    uint32_t n_owned, n_pinned, cap_owned, cap_pinned;

    /* of a call */
    const eng_gpu_run *run;
    uint32_t stage_lo, stage_hi, stage_rows;
    uint32_t stage_layer;
    uint16_t *stage_to;
};

int gpul_begin(eng_gpu *u, const eng_gpu_run *run);   /* x, from the embedding or the host; angles */
/* Logits, or the residual stream; waits for them. */
int gpul_end(eng_gpu *u, bool decode);
bool gpul_canceled(const eng_gpu_run *run);
int gpul_finish(eng_gpu *u, gpu_event *e); /* gpu_finish, with something else to do meanwhile */

/* q, k, v of n tokens in place: biases, norms, rotation, the model's scale, the keys' shift. */
void gpul_turn(eng_gpu *u, const gpul_layer *l, uint32_t layer, float *q, float *k, float *v, uint32_t n);

/* x += W in, with the norm that some models put behind a block. */
void gpul_add_block(eng_gpu *u, bool decode, const gpu_weight *w, const float *in, const float *post_norm);

/* Positions [lo, hi) of a layer from the segments into a slot, once its last copy is done: up to `rows` of each head, by the pool. */
void gpul_stage(eng_gpu *u, gpul_slot *slot, uint32_t layer, uint32_t lo, uint32_t hi);
/* Its rows [from, from + n) to rows [to, to + n) of kv. */
void gpul_send(eng_gpu *u, const gpul_slot *slot, const gpu_kv *kv, uint32_t from, uint32_t to, uint32_t n);

/* gpu_trace.c. What a queue gets between a mark's begin and its end is shown as one event, on the queue's track. A call that is traced waits for the GPU at both
 * ends. mark 0: none. */
int gpul_trace_open(eng_gpu *u);
void gpul_trace_close(eng_gpu *u);
void gpul_trace_start(eng_gpu *u);
void gpul_trace_end(eng_gpu *u);
uint32_t gpul_mark_begin(eng_gpu *u, gpu_queue q, const char *name, uint32_t layer);
void gpul_mark_end(eng_gpu *u, uint32_t mark);

#endif
