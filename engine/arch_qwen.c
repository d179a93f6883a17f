/* Qwen2 and 2.5: biases on q, k and v. Qwen3: none, but q and k normed head by head. Qwen3 MoE: its FFN is a mixture of experts. */
#include "arch.h"

static const eng_tensor_role top[] = {ENG_TOP_ROLES, {NULL}};

static const eng_tensor_role qwen2_layer[] = {
    ENG_ATTN_ROLES,
    {"attn_q.bias", DIM_ONE, DIM_Q, false, offsetof(eng_layer, bq)},
    {"attn_k.bias", DIM_ONE, DIM_KV, false, offsetof(eng_layer, bk)},
    {"attn_v.bias", DIM_ONE, DIM_KV, false, offsetof(eng_layer, bv)},
    ENG_FFN_ROLES,
    {NULL},
};

static const eng_tensor_role qwen3_layer[] = {ENG_ATTN_ROLES, ENG_QK_NORM_ROLES, ENG_FFN_ROLES, {NULL}};

static const eng_tensor_role qwen3moe_layer[] = {
    ENG_ATTN_ROLES,
    ENG_QK_NORM_ROLES,
    {"ffn_gate_inp.weight", DIM_EXPERTS, DIM_EMBD, false, offsetof(eng_layer, w_router)},
    {"ffn_gate_exps.weight", DIM_EXPERT_FF, DIM_EMBD, false, offsetof(eng_layer, w_gate), DIM_EXPERTS},
    {"ffn_up_exps.weight", DIM_EXPERT_FF, DIM_EMBD, false, offsetof(eng_layer, w_up), DIM_EXPERTS},
    {"ffn_down_exps.weight", DIM_EMBD, DIM_EXPERT_FF, false, offsetof(eng_layer, w_down), DIM_EXPERTS},
    {NULL},
};

static const eng_neutral_key qwen3moe_neutral[] = {
    {"expert_weights_norm", 1, "expert weights that are not normalised are"},
    {"expert_gating_func", 1, "another gating of experts than softmax is"},
    {"expert_shared_count", 0, "shared experts are"},
    {NULL},
};

const eng_arch eng_arch_qwen2 = {.name = "qwen2", .rope_pairs = ENG_ROPE_HALVES, .top = top, .layer = qwen2_layer};
const eng_arch eng_arch_qwen3 = {.name = "qwen3", .rope_pairs = ENG_ROPE_HALVES, .top = top, .layer = qwen3_layer};
const eng_arch eng_arch_qwen3moe = {
    .name = "qwen3moe", .rope_pairs = ENG_ROPE_HALVES, .top = top, .layer = qwen3moe_layer, .neutral = qwen3moe_neutral, .experts = true};
