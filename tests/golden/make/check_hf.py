#!/usr/bin/env python3
"""check_hf.py ARCHS_DIR: the oracle against Hugging Face transformers (5.x, CPU, float32, eager attention) on the models of gen_archs.py.

The weights go from the GGUF file into HF's modules: q and k rows of llama and smollm3 are permuted back, gemma3's norms lose their +1."""
import os
import sys
import numpy as np
import torch
import transformers as hf
from gguf import GGUFReader
from gen_archs import random_ids
from oracle import Oracle
from tiny import ARCHS, LONG, RUNS, SHORT

CLASS = {"llama": "Llama", "smollm3": "SmolLM3", "qwen3": "Qwen3", "qwen3moe": "Qwen3Moe", "phi3": "Phi3", "gemma3": "Gemma3"}
NAMES = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
         "attn_qkv": "self_attn.qkv_proj", "ffn_gate_inp": "mlp.gate"}
GEMMA = {"ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
PHI = {"ffn_up": "mlp.gate_up_proj"}


def rope_of(name, o, run, rope):
    base = {"rope_type": "default", "rope_theta": float(o.base)}
    if rope:
        base["rope_theta"] = rope.get("base", base["rope_theta"])
        base.update(rope_type=rope["scaling"], factor=rope["factor"])
        if rope["scaling"] == "yarn":
            base["original_max_position_embeddings"] = rope["orig_ctx"]
            base.update({k: rope[k] for k in ("beta_fast", "beta_slow") if k in rope})
    if name == "tiny-llama3":
        base.update(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512)
    if name == "tiny-yarn":
        base.update(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048)
    if name == "tiny-phi3":     # HF takes the long factors when the text is longer than the original context
        base.update(rope_type="longrope", partial_rotary_factor=0.75, attention_factor=1.19, long_factor=list(map(float, LONG)),
                    short_factor=list(map(float, SHORT)), original_max_position_embeddings=16 if run.endswith("long") else 256)
    if o.arch == "gemma3":
        scaled = {"rope_type": "linear", "factor": 8.0} if name.endswith("linear") else {}
        return {"full_attention": {**base, **scaled}, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    return base


def config_of(name, o, run, rope):
    n_ff = int(o.r.fields[f"{o.arch}.feed_forward_length"].contents())
    args = dict(vocab_size=o.n_vocab, hidden_size=o.n_embd, intermediate_size=n_ff, num_hidden_layers=o.n_layer, num_attention_heads=o.n_head,
                num_key_value_heads=o.n_kv, head_dim=o.d, rms_norm_eps=o.eps, max_position_embeddings=int(o.r.fields[f"{o.arch}.context_length"].contents()),
                rope_parameters=rope_of(name, o, run, rope), tie_word_embeddings="output.weight" not in o.raw, attention_bias=False,
                pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if o.arch == "smollm3":
        args.update(no_rope_layer_interval=4, use_sliding_window=False)
    if o.arch == "qwen3moe":
        args.update(num_experts=8, num_experts_per_tok=o.n_used, moe_intermediate_size=n_ff, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    if o.arch == "phi3":
        args.update(sliding_window=o.window, original_max_position_embeddings=args["rope_parameters"]["original_max_position_embeddings"])
    if o.arch == "gemma3":
        args.update(sliding_window=o.window, query_pre_attn_scalar=int(round(o.scale ** -2)), hidden_activation="gelu_pytorch_tanh",
                    layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(o.n_layer)])
    cls = CLASS[o.arch]
    return getattr(hf, cls + ("TextConfig" if cls == "Gemma3" else "Config"))(**args, attn_implementation="eager")


def weights_of(path, o):
    t = {k: np.asarray(v) for k, v in Oracle.tensors(GGUFReader(path)).items()}
    out = {}
    for k, v in t.items():
        if k.startswith("rope_"):
            continue
        if o.arch == "gemma3" and "norm" in k:
            v = v - 1
        if k in ("token_embd.weight", "output_norm.weight", "output.weight"):
            out[{"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}[k]] = v
            continue
        _, il, part = k.split(".", 2)
        part = part.removesuffix(".weight")
        if part in ("ffn_gate_exps", "ffn_up_exps"):
            continue
        if part in ("attn_q", "attn_k") and o.arch in ("llama", "smollm3"):
            v = v.reshape(-1, o.d // 2, 2, v.shape[1]).swapaxes(1, 2).reshape(v.shape)
        where = f"model.layers.{il}."
        if part == "ffn_down_exps":
            out[where + "mlp.experts.down_proj"] = v
            out[where + "mlp.experts.gate_up_proj"] = np.concatenate([t[f"blk.{il}.ffn_gate_exps.weight"], t[f"blk.{il}.ffn_up_exps.weight"]], 1)
            continue
        name = (GEMMA if o.arch == "gemma3" else PHI if o.arch == "phi3" else {}).get(part) or NAMES[part]
        out[where + name + ".weight"] = v
    if "lm_head.weight" not in out:
        out["lm_head.weight"] = out["model.embed_tokens.weight"]
    return {k: torch.tensor(v) for k, v in out.items()}


worst = 0
for name in ARCHS:
    for run, n_ctx, rope in RUNS[name]:
        if "ext" in rope:
            print(f"{run}: HF has no such setting")
            continue
        path = os.path.join(sys.argv[1], name + ".gguf")
        o = Oracle(path, n_ctx, dict(rope))
        cls = getattr(hf, CLASS[o.arch] + "ForCausalLM")
        model = cls(config_of(name, o, run, rope)).eval()
        missing, unexpected = model.load_state_dict(weights_of(path, o), strict=False)
        assert not missing and not unexpected, (missing, unexpected)
        with torch.no_grad():
            got = model(torch.tensor([random_ids(o.n_vocab)])).logits[0].numpy()
        d = float(np.abs(got - np.load(os.path.join(sys.argv[1], run + ".npy"))).max())
        worst = max(worst, d)
        print(f"{run}: {d:.2g}", flush=True)
sys.exit(worst > 1e-3)
