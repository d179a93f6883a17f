#!/usr/bin/env python3
"""gen_archs.py OUT_DIR: a tiny model for each architecture and RoPE scaling, and its logits by the float32 oracle at every position.

check_hf.py and check_llama.py compare the oracle with Hugging Face's transformers and with llama.cpp."""
import json
import os
import sys
import numpy as np
from oracle import Oracle
from tiny import ARCHS, RUNS

N_IDS = 80


def random_ids(n_vocab):
    return [int(i) for i in np.random.default_rng(9).integers(0, n_vocab, N_IDS)]


if __name__ == "__main__":
    out = sys.argv[1]
    for name, make in ARCHS.items():
        path = os.path.join(out, name + ".gguf")
        open(path, "wb").write(make().bytes())
        ids = None
        for run, n_ctx, rope in RUNS[name]:
            oracle = Oracle(path, n_ctx, dict(rope))
            ids = random_ids(oracle.n_vocab)
            logits = oracle.forward(ids)
            np.save(os.path.join(out, run + ".npy"), logits)
            print(run, os.path.getsize(path), f"std {logits.std():.2f}")
        json.dump({"model": name, "ids": ids}, open(os.path.join(out, name + ".json"), "w"))
