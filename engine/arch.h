/* What an architecture is, as data: which tensors it has, where they go and what their shapes are, how it rotates, and which keys of
 * its metadata would change the computation in a way the forward pass does not know. model.c reads it. */
#ifndef RETRIEVALD_ARCH_H
#define RETRIEVALD_ARCH_H

#include "model.h"

/* A dimension by its meaning; model.c knows the number. */
typedef enum {
    DIM_ONE,
    DIM_EMBD,
    DIM_Q,
    DIM_KV,
    DIM_QKV, /* q, k and v in one */
    DIM_FF,
    DIM_FF2, /* gate and up in one */
    DIM_VOCAB,
    DIM_HEAD,  /* of one head */
    DIM_PAIRS, /* rotated pairs of a head */
    DIM_EXPERTS,
    DIM_EXPERT_FF,
} eng_dim;

typedef struct {
    const char *name;   /* of a layer's tensor: after "blk.N." */
    eng_dim rows, cols; /* rows DIM_ONE: a vector kept as float32 (a const float * field), else a matrix (an eng_weight) */
    bool optional;
    size_t field;  /* offset in eng_model or eng_layer */
    eng_dim depth; /* matrices of a 3D tensor; DIM_ONE: it has two dimensions */
} eng_tensor_role;

/* A number (or bool) in the metadata that must be absent, or have the value with which it does nothing. */
typedef struct {
    const char *key; /* after "ARCH." */
    float neutral;
    const char *what; /* "mixtures of experts are" ... not supported */
} eng_neutral_key;

typedef struct {
    const char *name; /* general.architecture, and the prefix of its keys */
    eng_rope_pairs rope_pairs;
    const eng_tensor_role *top, *layer; /* the lists end with name NULL */
    const eng_neutral_key *neutral;     /* beside those that hold for all; may be NULL */
    eng_act act;
    bool scales_embedding;   /* by sqrt(n_embd) */
    bool local_rope;         /* sliding layers rotate by a base of their own, unscaled */
    bool experts;            /* the FFN is a mixture of experts */
    uint32_t sliding_period; /* with a sliding_window: every so many-th layer sees everything, the others the window; 1: all slide; 0: not
                                known here */
    uint32_t no_rope_period; /* every so many-th layer does not rotate; 0: all do */
    uint32_t embd_scale_layers; /* a model of so many layers scales scores by 1 / sqrt(n_embd / n_head); 0: none does */
} eng_arch;

extern const eng_arch eng_arch_llama, eng_arch_smollm3, eng_arch_qwen2, eng_arch_qwen3, eng_arch_qwen3moe, eng_arch_gemma3, eng_arch_phi3;

/* Rows that most lists share. */
#define ENG_TOP_ROLES                                                                                                                      \
    {"token_embd.weight", DIM_VOCAB, DIM_EMBD, false, offsetof(eng_model, tok_embd)},                                                      \
        {"output_norm.weight", DIM_ONE, DIM_EMBD, false, offsetof(eng_model, output_norm)},                                                \
    {                                                                                                                                      \
        "output.weight", DIM_VOCAB, DIM_EMBD, true, offsetof(eng_model, output)                                                            \
    }
#define ENG_ATTN_ROLES                                                                                                                     \
    {"attn_norm.weight", DIM_ONE, DIM_EMBD, false, offsetof(eng_layer, attn_norm)},                                                        \
        {"attn_q.weight", DIM_Q, DIM_EMBD, false, offsetof(eng_layer, wq)},                                                                \
        {"attn_k.weight", DIM_KV, DIM_EMBD, false, offsetof(eng_layer, wk)},                                                               \
        {"attn_v.weight", DIM_KV, DIM_EMBD, false, offsetof(eng_layer, wv)},                                                               \
        {"attn_output.weight", DIM_EMBD, DIM_Q, false, offsetof(eng_layer, wo)},                                                           \
    {                                                                                                                                      \
        "ffn_norm.weight", DIM_ONE, DIM_EMBD, false, offsetof(eng_layer, ffn_norm)                                                         \
    }
#define ENG_FFN_ROLES                                                                                                                      \
    {"ffn_gate.weight", DIM_FF, DIM_EMBD, false, offsetof(eng_layer, w_gate)},                                                             \
        {"ffn_up.weight", DIM_FF, DIM_EMBD, false, offsetof(eng_layer, w_up)},                                                             \
    {                                                                                                                                      \
        "ffn_down.weight", DIM_EMBD, DIM_FF, false, offsetof(eng_layer, w_down)                                                            \
    }
#define ENG_QK_NORM_ROLES                                                                                                                  \
    {"attn_q_norm.weight", DIM_ONE, DIM_HEAD, false, offsetof(eng_layer, q_norm)},                                                         \
    {                                                                                                                                      \
        "attn_k_norm.weight", DIM_ONE, DIM_HEAD, false, offsetof(eng_layer, k_norm)                                                        \
    }
#define ENG_LONGROPE_ROLES                                                                                                                 \
    {"rope_factors_long.weight", DIM_ONE, DIM_PAIRS, true, offsetof(eng_model, rope.factors_long)},                                        \
    {                                                                                                                                      \
        "rope_factors_short.weight", DIM_ONE, DIM_PAIRS, true, offsetof(eng_model, rope.factors_short)                                     \
    }

#endif
