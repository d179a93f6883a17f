/* A model as the forward pass sees it: hyper-parameters and weights by role. What differs between architectures is data here
 * (arch_llama.c and its like say it), so that there is one forward pass.
 */
#ifndef RETRIEVALD_MODEL_H
#define RETRIEVALD_MODEL_H

#include "gguf.h"
#include "quant.h"

/* W [rows][cols]: y = W x maps cols -> rows. data == NULL: absent. Weights of experts lie one after another; rows are those of one. */
typedef struct {
    const void *data;
    size_t row_bytes;
    uint32_t rows, cols;
    eng_type type;
} eng_weight;

typedef enum {
    ENG_ROPE_ADJACENT, /* rotates (2i, 2i+1): llama, whose q and k rows were permuted at conversion */
    ENG_ROPE_HALVES,   /* rotates (i, i + d/2) */
} eng_rope_pairs;

typedef enum { ENG_SILU, ENG_GELU_TANH } eng_act;

/* Which angles a layer rotates by. */
typedef enum { ENG_LAYER_ROPE, ENG_LAYER_ROPE_LOCAL, ENG_LAYER_NO_ROPE } eng_layer_rope;

typedef struct {
    const float *attn_norm;              /* [n_embd] */
    eng_weight wq;                       /* [n_head * head_dim][n_embd] */
    eng_weight wk, wv;                   /* [n_head_kv * head_dim][n_embd] */
    const float *bq, *bk, *bv;           /* added to q, k, v; NULL: none */
    const float *q_norm, *k_norm;        /* [head_dim], of each head before it is rotated; NULL: none */
    eng_weight wo;                       /* [n_embd][n_head * head_dim] */
    const float *attn_post_norm;         /* [n_embd], of the block's output; NULL: none */
    const float *ffn_norm;               /* [n_embd] */
    eng_weight w_gate, w_up;             /* [n_ff][n_embd]; of experts: [n_expert][n_ff_expert][n_embd] */
    eng_weight w_down;                   /* [n_embd][n_ff]; of experts: [n_expert][n_embd][n_ff_expert] */
    eng_weight w_router;                 /* [n_expert][n_embd]; absent: no experts */
    const float *ffn_post_norm;          /* [n_embd]; NULL: none */
    eng_weight wqkv, w_gate_up;          /* as some files have them; the parts above are slices of these */
    uint32_t window;                     /* keys a query sees: 0 <= pos_q - pos_k < window; 0: all */
    eng_layer_rope rope;
} eng_layer;

typedef enum { ENG_SCALING_NONE, ENG_SCALING_LINEAR, ENG_SCALING_YARN, ENG_SCALING_LONGROPE } eng_scaling;

/* RoPE as the file describes it; rope.h makes angles of it. */
typedef struct {
    eng_scaling scaling;
    float factor;                        /* > 0 */
    float attn_factor;                   /* of cosines and sines */
    uint32_t orig_ctx;                   /* context before it was extended */
    float ext_factor, beta_fast, beta_slow; /* YaRN's */
    float base_local;                    /* of ENG_LAYER_ROPE_LOCAL */
    const float *factors;                /* [rope_dim / 2] divisors of the frequencies; NULL: none */
    const float *factors_long, *factors_short; /* the same, for contexts over and up to orig_ctx */
} eng_rope_keys;

typedef struct {
    eng_gguf *file;                      /* owned */
    const char *architecture, *name;     /* owned strings */
    const char *type;                    /* name of the type most weight bytes have */
    uint64_t n_params, bytes;
    uint32_t n_vocab, n_embd, n_layer, n_head, n_head_kv, head_dim, n_ff, n_ctx_train;
    uint32_t n_expert, n_expert_used, n_ff_expert; /* 0: no experts */
    uint32_t window;                     /* of sliding layers; 0: there are none */
    float rms_eps, rope_base;
    uint32_t rope_dim;                   /* first dims of a head that are rotated; even, <= head_dim */
    eng_rope_pairs rope_pairs;
    eng_rope_keys rope;
    float embd_scale;                    /* of the embedding: 1 for most */
    float attn_scale;                    /* of q k: 1 / sqrt(head_dim) for most */
    eng_act act;
    eng_weight tok_embd;                 /* [n_vocab][n_embd] */
    eng_weight output;                   /* [n_vocab][n_embd]; tok_embd where tied */
    const float *output_norm;            /* [n_embd] */
    eng_layer *layers;                   /* [n_layer] */
    void **owned;                        /* converted tensors */
    size_t n_owned;
} eng_model;

/* Opens, checks every shape against the hyper-parameters, and refuses what the forward pass cannot compute, by name. */
int eng_model_open(const char *path, eng_model **ret, char *err, size_t errlen);
/* The same of an open file, which is the model's from here on, or closed on failure; `path` for its name only. */
int eng_model_from(eng_gguf *g, const char *path, eng_model **ret, char *err, size_t errlen);
void eng_model_close(eng_model *m);

/* Bytes of the matrices that one token is multiplied with: of experts, those it uses. */
uint64_t eng_model_step_bytes(const eng_model *m);

#endif
