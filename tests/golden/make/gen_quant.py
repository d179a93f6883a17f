"""gen_quant.py OUT_DIR: random blocks of every GGUF type there is a decoder for, and their values by the `gguf` package.

For each type T.blocks.npy (uint8 [rows, bytes of a row]) and T.values.npy (float32 [rows, 256 elements]). The blocks are random bits,
not quantised numbers, so that every bit of a block matters; their half-precision scales are finite, and zero, subnormal, largest
and negative ones are among them. Bits must come out as they are here. Made with gguf 0.19.0, numpy 2.
"""
import os
import sys
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize

# Where a block keeps its float16 scales.
SCALES = {T.Q8_0: [0], T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2],
          T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_NL: [0], T.IQ4_XS: [0]}
ODD = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x0400], "<u2")
ELEMENTS = 256


def blocks(rnd, t, rows):
    block, size = GGML_QUANT_SIZES[t]
    b = rnd.integers(0, 256, (rows * ELEMENTS // block, size), np.uint8)
    for at in SCALES[t]:
        h = rnd.integers(0, 0x7C00, len(b)).astype("<u2") | (rnd.integers(0, 2, len(b)).astype("<u2") << 15)
        h[:len(ODD)] = rnd.permutation(ODD)[:len(b)]
        b[:, at:at + 2] = h.view(np.uint8).reshape(-1, 2)
    return b.reshape(rows, -1)


rnd = np.random.default_rng(20260101)
for t in SCALES:
    b = blocks(rnd, t, 8 if GGML_QUANT_SIZES[t][0] == ELEMENTS else 4)
    v = dequantize(b, t).astype(np.float32)
    assert v.shape == (len(b), ELEMENTS) and np.isfinite(v).all(), t
    np.save(os.path.join(sys.argv[1], f"{t.name}.blocks.npy"), b)
    np.save(os.path.join(sys.argv[1], f"{t.name}.values.npy"), v)
