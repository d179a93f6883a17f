"""Writes the seeds of tests/fuzz/corpus: the smallest models that the loader accepts, one a type and one with the other tokenizer, so that a mutation often hits what is read.

What the fuzzer found later is beside them, under its hash.
"""

import pathlib
import random
import struct

U32, F32, BOOL, STR, ARR, I32 = 4, 6, 7, 8, 9, 5
TYPES = {"f32": (0, 1, 4), "f16": (1, 1, 2), "bf16": (30, 1, 2), "q8_0": (8, 32, 34), "q4_0": (2, 32, 18), "q4_1": (3, 32, 20)}
EMBD, HEADS, KV, FF, LAYERS = 32, 4, 2, 32, 1
TOKENS = ["<s>", "</s>", "a", "b", "c", "Ġ", "ab", "Ġa"]


def text(s):
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind, v):
    if kind == STR:
        return text(v)
    if kind == ARR:
        item, values = v
        return struct.pack("<IQ", item, len(values)) + b"".join(value(item, x) for x in values)
    return struct.pack({U32: "<I", F32: "<f", BOOL: "<?", I32: "<i"}[kind], v)


KEYS = [
    ("general.architecture", STR, "llama"),
    ("llama.block_count", U32, LAYERS),
    ("llama.embedding_length", U32, EMBD),
    ("llama.feed_forward_length", U32, FF),
    ("llama.context_length", U32, 64),
    ("llama.attention.head_count", U32, HEADS),
    ("llama.attention.head_count_kv", U32, KV),
    ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
    ("tokenizer.ggml.model", STR, "gpt2"),
    ("tokenizer.ggml.pre", STR, "smollm"),
    ("tokenizer.ggml.tokens", ARR, (STR, TOKENS)),
    ("tokenizer.ggml.token_type", ARR, (I32, [3, 3] + [1] * (len(TOKENS) - 2))),
    ("tokenizer.ggml.merges", ARR, (STR, ["a b", "Ġ a"])),
    ("tokenizer.ggml.bos_token_id", U32, 0),
    ("tokenizer.ggml.eos_token_id", U32, 1),
    ("tokenizer.ggml.add_bos_token", BOOL, True),
    ("tokenizer.chat_template", STR, "{{ messages[0].content }}"),
]

# The same with SentencePiece's tokens, all bytes among them.
SPM_TOKENS = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + ["▁", "a", "b", "▁a", "ab"]
SPM_KEYS = [k for k in KEYS if not k[0].startswith("tokenizer")] + [
    ("tokenizer.ggml.model", STR, "llama"),
    ("tokenizer.ggml.tokens", ARR, (STR, SPM_TOKENS)),
    ("tokenizer.ggml.scores", ARR, (F32, [-float(i) for i in range(len(SPM_TOKENS))])),
    ("tokenizer.ggml.token_type", ARR, (I32, [2, 3, 3] + [6] * 256 + [1] * 5)),
    ("tokenizer.ggml.bos_token_id", U32, 1),
    ("tokenizer.ggml.eos_token_id", U32, 2),
    ("tokenizer.ggml.unknown_token_id", U32, 0),
    ("tokenizer.ggml.add_space_prefix", BOOL, True),
]


def tensors(n_vocab):
    yield "token_embd.weight", (EMBD, n_vocab)
    yield "output_norm.weight", (EMBD,)
    for i in range(LAYERS):
        b = f"blk.{i}."
        yield b + "attn_norm.weight", (EMBD,)
        yield b + "attn_q.weight", (EMBD, EMBD)
        yield b + "attn_k.weight", (EMBD, EMBD // HEADS * KV)
        yield b + "attn_v.weight", (EMBD, EMBD // HEADS * KV)
        yield b + "attn_output.weight", (EMBD, EMBD)
        yield b + "ffn_norm.weight", (EMBD,)
        yield b + "ffn_gate.weight", (EMBD, FF)
        yield b + "ffn_up.weight", (EMBD, FF)
        yield b + "ffn_down.weight", (FF, EMBD)


def data(kind, shape, rng):
    n = shape[0] * (shape[1] if len(shape) == 2 else 1)
    if len(shape) == 1:
        return 0, struct.pack(f"<{n}f", *[1.0] * n)
    number, block, size = TYPES[kind]
    half = struct.pack("<e", 0.01)
    if block == 1:
        values = [rng.uniform(-0.1, 0.1) for _ in range(n)]
        if kind == "bf16":
            return number, b"".join(struct.pack("<f", v)[2:] for v in values)
        return number, struct.pack(f"<{n}{'f' if kind == 'f32' else 'e'}", *values)
    head = half * (2 if kind == "q4_1" else 1)
    return number, b"".join(head + rng.randbytes(size - len(head)) for _ in range(n // block))


def model(kind, keys=KEYS, n_vocab=len(TOKENS)):
    rng = random.Random(kind)
    table, blob = b"", b""
    for name, shape in tensors(n_vocab):
        number, raw = data(kind, shape, rng)
        table += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, len(blob))
        blob += raw + b"\0" * (-len(raw) % 32)
    pairs = b"".join(text(k) + struct.pack("<I", t) + value(t, v) for k, t, v in keys)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(list(tensors(n_vocab))), len(keys)) + pairs + table
    return head + b"\0" * (-len(head) % 32) + blob


if __name__ == "__main__":
    folder = pathlib.Path(__file__).parent / "corpus"
    for kind in TYPES:
        (folder / f"llama-{kind}.gguf").write_bytes(model(kind))
    (folder / "llama-spm.gguf").write_bytes(model("q4_0", SPM_KEYS, len(SPM_TOKENS)))
