/* Llama 2 and 3, Mistral, Yi, SmolLM2: pre-norm, grouped-query attention without biases, SwiGLU. */
#include "arch.h"

static const eng_tensor_role top[] = {
    {"token_embd.weight", DIM_VOCAB, DIM_EMBD, false, offsetof(eng_model, tok_embd)},
    {"output_norm.weight", DIM_ONE, DIM_EMBD, false, offsetof(eng_model, output_norm)},
    {"output.weight", DIM_VOCAB, DIM_EMBD, true, offsetof(eng_model, output)},
    {NULL},
};

static const eng_tensor_role layer[] = {
    {"attn_norm.weight", DIM_ONE, DIM_EMBD, false, offsetof(eng_layer, attn_norm)},
    {"attn_q.weight", DIM_Q, DIM_EMBD, false, offsetof(eng_layer, wq)},
    {"attn_k.weight", DIM_KV, DIM_EMBD, false, offsetof(eng_layer, wk)},
    {"attn_v.weight", DIM_KV, DIM_EMBD, false, offsetof(eng_layer, wv)},
    {"attn_output.weight", DIM_EMBD, DIM_Q, false, offsetof(eng_layer, wo)},
    {"ffn_norm.weight", DIM_ONE, DIM_EMBD, false, offsetof(eng_layer, ffn_norm)},
    {"ffn_gate.weight", DIM_FF, DIM_EMBD, false, offsetof(eng_layer, w_gate)},
    {"ffn_up.weight", DIM_FF, DIM_EMBD, false, offsetof(eng_layer, w_up)},
    {"ffn_down.weight", DIM_EMBD, DIM_FF, false, offsetof(eng_layer, w_down)},
    {NULL},
};

static const eng_neutral_key neutral[] = {
    {"expert_count", 0, "mixtures of experts are"},
    {"attention.sliding_window", 0, "sliding windows are"},
    {"attention.clamp_kqv", 0, "clamped q, k and v are"},
    {"attention.scale", 0, "another scale of attention scores is"},
    {"logit_scale", 1, "scaled logits are"},
    {"embedding_scale", 1, "scaled embeddings are"},
    {"residual_scale", 1, "scaled residuals are"},
    {"rope.scaling.attn_factor", 1, "YaRN is"},
    {"rope.scale_linear", 1, "linear RoPE scaling is"},
    {NULL},
};

const eng_arch eng_arch_llama = {"llama", ENG_ROPE_ADJACENT, top, layer, neutral};
