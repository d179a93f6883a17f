/* A model as the forward pass sees it: hyper-parameters and weights by role. What differs between architectures is data here
 * (arch_llama.c and its like fill it in), so that there is one forward pass.
 */
#ifndef RETRIEVALD_MODEL_H
#define RETRIEVALD_MODEL_H

#include "gguf.h"
#include "quant.h"

/* W [rows][cols]: y = W x maps cols -> rows. data == NULL: absent. */
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

typedef struct {
    const float *attn_norm;              /* [n_embd] */
    eng_weight wq;                       /* [n_head * head_dim][n_embd] */
    eng_weight wk, wv;                   /* [n_head_kv * head_dim][n_embd] */
    eng_weight wo;                       /* [n_embd][n_head * head_dim] */
    const float *ffn_norm;               /* [n_embd] */
    eng_weight w_gate, w_up;             /* [n_ff][n_embd] */
    eng_weight w_down;                   /* [n_embd][n_ff] */
} eng_layer;

typedef struct {
    eng_gguf *file;                      /* owned */
    const char *architecture, *name;     /* owned strings */
    const char *type;                    /* name of the type most weight bytes have */
    uint64_t n_params, bytes;
    uint32_t n_vocab, n_embd, n_layer, n_head, n_head_kv, head_dim, n_ff, n_ctx_train;
    float rms_eps, rope_base;
    uint32_t rope_dim;                   /* first dims of a head that are rotated; even, <= head_dim */
    eng_rope_pairs rope_pairs;
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

#endif
