/* Gemma 3: five layers of six see a sliding window and rotate by a base of their own; q and k are normed head by head; a block's output is
 * normed before it is added (norm weights hold the +1 already); tanh GELU. The file says neither the period nor, as a rule, the local base.
 */
#include "arch.h"

static const eng_tensor_role top[] = {ENG_TOP_ROLES, {NULL}};

static const eng_tensor_role layer[] = {
    ENG_ATTN_ROLES,
    ENG_QK_NORM_ROLES,
    {"post_attention_norm.weight", DIM_ONE, DIM_EMBD, false, offsetof(eng_layer, attn_post_norm)},
    ENG_FFN_ROLES,
    {"post_ffw_norm.weight", DIM_ONE, DIM_EMBD, false, offsetof(eng_layer, ffn_post_norm)},
    {NULL},
};

/* 62 layers: the 27B, whose query_pre_attn_scalar is n_embd / n_head and not the head size; no key says so. */
const eng_arch eng_arch_gemma3 = {
    .name = "gemma3",
    .rope_pairs = ENG_ROPE_HALVES,
    .top = top,
    .layer = layer,
    .act = ENG_GELU_TANH,
    .scales_embedding = true,
    .local_rope = true,
    .sliding_period = 6,
    .embd_scale_layers = 62,
};
