/* Llama 2 and 3, Mistral, Yi, SmolLM2: pre-norm, grouped-query attention without biases, SwiGLU. SmolLM3: the same, and every fourth layer
 * does not rotate. */
#include "arch.h"

static const eng_tensor_role top[] = {
    ENG_TOP_ROLES,
    {"rope_freqs.weight", DIM_ONE, DIM_PAIRS, true, offsetof(eng_model, rope.factors)}, /* Llama 3.x: "llama3" scaling */
    ENG_LONGROPE_ROLES,
    {NULL},
};

static const eng_tensor_role layer[] = {ENG_ATTN_ROLES, ENG_FFN_ROLES, {NULL}};

const eng_arch eng_arch_llama = {.name = "llama", .rope_pairs = ENG_ROPE_ADJACENT, .top = top, .layer = layer};

static const eng_tensor_role smollm3_top[] = {ENG_TOP_ROLES, {NULL}};

const eng_arch eng_arch_smollm3 = {
    .name = "smollm3", .rope_pairs = ENG_ROPE_ADJACENT, .top = smollm3_top, .layer = layer, .no_rope_period = 4};
