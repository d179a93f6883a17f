"""Writes tests/golden/segments/v1.seg, v2.seg and v3.seg after engine/README.md, "Segment files", and index/README.md, "Arenas", with nothing of the engine's. Needs
the package xxhash.

200 tokens, id i * 37 % 1000, of a model with fingerprint 77, 2 layers, 2 KV heads of 16 dimensions; keys in f16 (v1, v3) or q8_0 (v2), values in f16; rows as
tests/unit/segments.h has them. v1 and v2 have no codes; v3 has every kind of index and 3 kept queries of groups of 2, made up: what an index may be, not what one would
build."""

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


def words(kind, values):
    return pad(struct.pack(f"<{len(values)}{kind}", *values), 64)


def lists(kind):
    """Codes in the order of 7 clusters of 28 or 29 rows, and, of lists (kind 2: 5 vectors each, 3: 1), what is beside each cluster."""
    clusters, blocks, vectors = 7, -(-N // 16), {0: 0, 2: 5, 3: 1}[kind]
    first = [N * c // clusters for c in range(clusters + 1)]
    parts = words("f", [0.25 * j for j in range(DIM)] + [0.5 + 0.125 * j for j in range(DIM)])
    parts += words("I", first) + words("I", [0, clusters])
    parts += words("I", [max(c for c in range(clusters) if first[c] <= 16 * b) for b in range(blocks)])
    parts += words("H", [i * 7 % N for i in range(N)] + [0] * (16 * blocks - N))
    parts += words("f", [0.01 + i / 1024 for i in range(N)] + [0] * (16 * blocks - N))
    parts += words("f", [c - j / 4 for c in range(clusters) for j in range(DIM)])
    parts += pad(bytes((i * 31 + kind) % 256 for i in range(blocks * DIM * 16)), 64)
    if vectors:
        parts += words("f", [0.5 + i / 64 for i in range(16 * vectors)]) + words("f", [i / 8 for i in range(16)])
        parts += pad(bytes((i * 29 + kind) % 256 for i in range(vectors * 16 * DIM)), 64)
    margin = 1.5 if vectors else 0
    return struct.pack("<8IQQffII", 0x58444E49, 2, kind, N, DIM, 0, clusters, 0, 0, 64 + len(parts), 0.25, margin, 0, 0) + parts


def graph():
    """Each node of 16 keys links to the next one and the one after."""
    nodes = -(-N // 16)
    padded = -(-nodes // 16) * 16
    links = [to << 8 | 100 + i for i in range(nodes) for to in sorted((i + k) % nodes for k in (1, 2))]
    parts = words("f", [0.25 * j for j in range(DIM)] + [0.5 + 0.125 * j for j in range(DIM)]) + words("f", [3, 2.5])
    parts += words("I", [2 * i for i in range(nodes + 1)])
    parts += words("f", [0.5 + i / 64 for i in range(padded)]) + words("f", [i / 8 for i in range(padded)])
    parts += words("f", [0.01 + i / 1024 for i in range(N)] + [0] * (16 * nodes - N))
    parts += pad(bytes(i * 29 % 256 for i in range(padded * DIM)), 64) + pad(bytes(i * 31 % 256 for i in range(nodes * DIM * 16)), 64)
    parts += words("I", links)
    return struct.pack("<8IQQffII", 0x58444E49, 2, 1, N, DIM, 4, 0, 2, len(links), 64 + len(parts), 0.25, 3, 0, 0) + parts


def everything():
    """Sections (kind, item, bytes) beside keys and values."""
    heads = range(LAYERS * HEADS)
    indexes = [(3, lists(0)), (4, lists(2)), (5, lists(3)), (6, graph())]
    rows = struct.pack("<3I", 60, 130, 222)
    queries = [b"".join(struct.pack(f"<{DIM}be", *[(q + head + j) % 255 - 127 for j in range(DIM)], 0.5 + q) for q in range(3 * 2)) for head in heads]
    return [(kind, head, data) for kind, data in indexes for head in heads] + [(7, 0, rows)] + [(8, head, queries[head]) for head in heads]


def segment(version, keys, more=()):
    ids = struct.pack(f"<{N}i", *IDS)
    kv = b"".join(rows(keys, 7 * layer + head) + rows(F16, 7 * layer + head + 3) for layer in range(LAYERS) for head in range(HEADS))
    identity = xxhash.xxh3_128_digest(xxhash.xxh3_128_digest(ids) + struct.pack("<6Q", 0, 0, 77, keys, F16, 1))
    sections = [(1, 0, ids), (2, 0, kv), *more]
    head_bytes = 256 + len(sections) * (32 + 8)  # every section is shorter than a block
    at, table, places = head_bytes, b"", []
    for kind, item, data in sections:
        align = 4096 if kind == 2 else 64
        at = -(-at // align) * align
        table += struct.pack("<IIQQQ", kind, item, at, len(data), 0)
        places.append(at)
        at += len(data)
    tail = table + b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(data)) for _, _, data in sections)

    def head(checksum):
        h = b"RVSEG\r\n\x1a" + struct.pack("<II", version, head_bytes) + identity + bytes(16) + struct.pack("<QQ", 0, 77)
        h += struct.pack("<8I", 0, N, LAYERS, HEADS, DIM, keys, F16, 1) + struct.pack("<QIIq", at, len(sections), len(sections), 1700000000)
        return h + bytes(128) + struct.pack("<Q", checksum)

    assert len(head(0)) == 256
    whole = head(xxhash.xxh3_64_intdigest(head(0) + tail)) + tail
    for place, (_, _, data) in zip(places, sections):
        whole += bytes(place - len(whole)) + data
    return whole


folder = pathlib.Path(__file__).resolve().parents[1] / "segments"
(folder / "v1.seg").write_bytes(segment(1, F16))
(folder / "v2.seg").write_bytes(segment(2, Q8_0))
(folder / "v3.seg").write_bytes(segment(3, F16, everything()))
