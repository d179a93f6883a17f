"""Writes tests/golden/segments/v1.seg and v2.seg after engine/README.md, "Segment files", with nothing of the engine's. Needs the package xxhash.

200 tokens, id i * 37 % 1000, of a model with fingerprint 77, 2 layers, 2 KV heads of 16 dimensions; keys in f16 (v1) or q8_0 (v2), values in f16; rows as
tests/unit/segments.h has them. No codes."""

import pathlib
import struct

import xxhash

N, LAYERS, HEADS, DIM = 200, 2, 2, 16
IDS = [i * 37 % 1000 for i in range(N)]
F16, Q8_0 = 1, 3
ROW = {F16: 2 * DIM, Q8_0: 34}  # a block: scale, 32 codes


def pad(data, to):
    return data + bytes(-len(data) % to)


def rows(kind, add):
    return pad(b"".join(bytes([(i + add) & 255]) * ROW[kind] for i in IDS), 64)


def segment(version, keys):
    ids = struct.pack(f"<{N}i", *IDS)
    kv = b"".join(rows(keys, 7 * layer + head) + rows(F16, 7 * layer + head + 3) for layer in range(LAYERS) for head in range(HEADS))
    identity = xxhash.xxh3_128_digest(xxhash.xxh3_128_digest(ids) + struct.pack("<6Q", 0, 0, 77, keys, F16, 1))
    head_bytes = 256 + 2 * 32 + 2 * 8
    at_ids = -(-head_bytes // 64) * 64
    at_kv = -(-(at_ids + len(ids)) // 4096) * 4096
    tail = struct.pack("<IIQQQ", 1, 0, at_ids, len(ids), 0) + struct.pack("<IIQQQ", 2, 0, at_kv, len(kv), 0)
    tail += struct.pack("<QQ", xxhash.xxh3_64_intdigest(ids), xxhash.xxh3_64_intdigest(kv))

    def head(checksum):
        h = b"RVSEG\r\n\x1a" + struct.pack("<II", version, head_bytes) + identity + bytes(16) + struct.pack("<QQ", 0, 77)
        h += struct.pack("<8I", 0, N, LAYERS, HEADS, DIM, keys, F16, 1) + struct.pack("<QIIq", at_kv + len(kv), 2, 2, 1700000000)
        return h + bytes(128) + struct.pack("<Q", checksum)

    assert len(head(0)) == 256
    whole = head(xxhash.xxh3_64_intdigest(head(0) + tail)) + tail
    whole = whole + bytes(at_ids - len(whole)) + ids
    return whole + bytes(at_kv - len(whole)) + kv


folder = pathlib.Path(__file__).resolve().parents[1] / "segments"
(folder / "v1.seg").write_bytes(segment(1, F16))
(folder / "v2.seg").write_bytes(segment(2, Q8_0))
