#!/usr/bin/env python3
"""make_slice.py OUT.gguf: a model of Llama-3-8B's shape with 4 layers, a vocabulary of 16,032 and random Q4_K weights (0.6 GB), to measure speed
with. Needs numpy and gguf."""
import sys

import gguf
import numpy as np

N_LAYER, N_EMBD, N_HEAD, N_HEAD_KV, N_FF, N_VOCAB = 4, 4096, 32, 8, 14336, 16032
HEAD_DIM = N_EMBD // N_HEAD
BLOCK, BLOCK_BYTES = 256, 144  # Q4_K: d and dmin in f16, twelve bytes of six-bit scales and minima, 256 codes of four bits
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def q4_k(rng, rows, cols):
    """Random blocks whose values have mean 0 and the variance 1/cols, so that a product keeps the size of what goes in."""
    n = rows * cols // BLOCK
    blocks = rng.integers(0, 256, (n, BLOCK_BYTES), np.uint8)
    scales = rng.integers(32, 64, (n, 8), np.uint8)
    # a value is d * scale * code - dmin * minimum; with equal scales and minima and dmin = 7.5 d it is d * scale * (code - 7.5)
    code_std, scale_rms = np.sqrt((16**2 - 1) / 12), np.sqrt(np.mean(np.arange(32, 64) ** 2.0))
    d = (rng.uniform(0.7, 1.3, n) / (code_std * scale_rms * np.sqrt(cols))).astype(np.float16)
    blocks[:, 0:2] = d.view(np.uint8).reshape(n, 2)
    blocks[:, 2:4] = (d.astype(np.float32) * 7.5).astype(np.float16).view(np.uint8).reshape(n, 2)
    low, high = scales[:, :4], scales[:, 4:]
    blocks[:, 4:8] = blocks[:, 8:12] = low | (high >> 4) << 6
    blocks[:, 12:16] = (high & 15) * 17
    return blocks.reshape(rows, -1)


def byte_names():
    """The printable characters that stand for the 256 bytes in a byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {b: chr(b) for b in plain}
    for i, b in enumerate(b for b in range(256) if b not in names):
        names[b] = chr(256 + i)
    return [names[b] for b in range(256)]


def vocabulary():
    """All bytes, all pairs of small letters, and as many triples as there is room for: (tokens, merges)."""
    tokens = byte_names()
    merges = [a + " " + b for a in LETTERS for b in LETTERS]
    pairs = [m.replace(" ", "") for m in merges]
    merges += [p + " " + c for p in pairs for c in LETTERS]
    merges = merges[:N_VOCAB - 2 - len(tokens)]
    return tokens + [m.replace(" ", "") for m in merges] + ["<|begin_of_text|>", "<|end_of_text|>"], merges


def main(path):
    rng = np.random.default_rng(8)
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("Random slice of Llama 3 8B's shape")
    w.add_block_count(N_LAYER)
    w.add_context_length(131072)
    w.add_embedding_length(N_EMBD)
    w.add_feed_forward_length(N_FF)
    w.add_head_count(N_HEAD)
    w.add_head_count_kv(N_HEAD_KV)
    w.add_rope_dimension_count(HEAD_DIM)
    w.add_rope_freq_base(500000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(N_VOCAB)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_S)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    tokens, merges = vocabulary()
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("llama-bpe")
    w.add_token_list(tokens)
    w.add_token_types([gguf.TokenType.NORMAL] * (N_VOCAB - 2) + [gguf.TokenType.CONTROL] * 2)
    w.add_token_merges(merges)
    w.add_bos_token_id(N_VOCAB - 2)
    w.add_eos_token_id(N_VOCAB - 1)
    w.add_add_bos_token(True)

    def matrix(name, rows, cols):
        w.add_tensor(name + ".weight", q4_k(rng, rows, cols), raw_dtype=gguf.GGMLQuantizationType.Q4_K)

    def norm(name):
        w.add_tensor(name + ".weight", np.ones(N_EMBD, np.float32))

    matrix("token_embd", N_VOCAB, N_EMBD)
    for i in range(N_LAYER):
        layer = f"blk.{i}."
        norm(layer + "attn_norm")
        matrix(layer + "attn_q", N_EMBD, N_EMBD)
        matrix(layer + "attn_k", N_HEAD_KV * HEAD_DIM, N_EMBD)
        matrix(layer + "attn_v", N_HEAD_KV * HEAD_DIM, N_EMBD)
        matrix(layer + "attn_output", N_EMBD, N_EMBD)
        norm(layer + "ffn_norm")
        matrix(layer + "ffn_gate", N_FF, N_EMBD)
        matrix(layer + "ffn_up", N_FF, N_EMBD)
        matrix(layer + "ffn_down", N_EMBD, N_FF)
    norm("output_norm")
    matrix("output", N_VOCAB, N_EMBD)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
