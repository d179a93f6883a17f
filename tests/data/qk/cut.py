#!/usr/bin/env python3
"""Cuts the query/key sets down to what the index tests carry.

usage: cut.py SOURCE DESTINATION SET...

SOURCE holds one folder per set, as README.md describes. The first SINKS and the newest rows are kept, ROWS in all, with the prefill queries
made at a kept position after the gap, and the first STEPS decode steps. Nothing is rounded or shuffled.
"""
import array
import ast
import os
import sys

SINKS, ROWS, STEPS = 128, 6000, 48
WITH_VALUES = {"text_l6_kv0"}


def load(path):
    with open(path, "rb") as f:
        if f.read(6) != b"\x93NUMPY":
            sys.exit(f"{path}: not a .npy file")
        major = f.read(2)[0]
        length = int.from_bytes(f.read(2 if major == 1 else 4), "little")
        head = ast.literal_eval(f.read(length).decode("latin1"))
        if head["fortran_order"]:
            sys.exit(f"{path}: not in C order")
        return head["descr"], head["shape"], f.read()


def save(path, descr, shape, data):
    head = repr({"descr": descr, "fortran_order": False, "shape": tuple(shape)})
    head += " " * (63 - (10 + len(head)) % 64) + "\n"
    with open(path, "wb") as f:
        f.write(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + data)


def take(source, destination, name, rows):
    descr, shape, data = load(os.path.join(source, name))
    size = len(data) // shape[0]
    save(os.path.join(destination, name), descr, (len(rows),) + shape[1:], b"".join(data[i * size:(i + 1) * size] for i in rows))


def cut(source, destination):
    os.makedirs(destination, exist_ok=True)
    pos = array.array("i", load(os.path.join(source, "key_pos.npy"))[2])
    kept = list(range(SINKS)) + list(range(len(pos) - ROWS + SINKS, len(pos)))
    query_pos = array.array("i", load(os.path.join(source, "prefill_q_pos.npy"))[2])
    queries = [i for i, p in enumerate(query_pos) if p >= pos[kept[SINKS]]]
    for name, rows in (("keys.npy", kept), ("key_pos.npy", kept), ("prefill_q.npy", queries), ("prefill_q_pos.npy", queries),
                       ("decode_q.npy", range(STEPS))):
        take(source, destination, name, rows)
    if os.path.basename(source) in WITH_VALUES:
        take(source, destination, "values.npy", kept)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    for name in sys.argv[3:]:
        cut(os.path.join(sys.argv[1], name), os.path.join(sys.argv[2], name))
