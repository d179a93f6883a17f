/* Phi-3 and 4: q, k and v are one tensor, gate and up another; long contexts by longrope; where the file has a window, every layer slides.
 */
#include "arch.h"

static const eng_tensor_role top[] = {ENG_TOP_ROLES, ENG_LONGROPE_ROLES, {NULL}};

static const eng_tensor_role layer[] = {
    {"attn_norm.weight", DIM_ONE, DIM_EMBD, false, offsetof(eng_layer, attn_norm)},
    {"attn_qkv.weight", DIM_QKV, DIM_EMBD, false, offsetof(eng_layer, wqkv)},
    {"attn_output.weight", DIM_EMBD, DIM_Q, false, offsetof(eng_layer, wo)},
    {"ffn_norm.weight", DIM_ONE, DIM_EMBD, false, offsetof(eng_layer, ffn_norm)},
    {"ffn_up.weight", DIM_FF2, DIM_EMBD, false, offsetof(eng_layer, w_gate_up)},
    {"ffn_down.weight", DIM_EMBD, DIM_FF, false, offsetof(eng_layer, w_down)},
    {NULL},
};

const eng_arch eng_arch_phi3 = {.name = "phi3", .rope_pairs = ENG_ROPE_HALVES, .top = top, .layer = layer, .sliding_period = 1};
