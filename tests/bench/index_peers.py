#!/usr/bin/env python3
"""index_peers.py RETRIEVALD SET [--top-k N] [--steps N] [--replicas N]: other libraries' indexes beside `retrievald bench index`, in one table.

SET is what index_sets.py says. Needs numpy, faiss-cpu and hnswlib. IVF-SQ8 is faiss's inverted lists of 8-bit codes by inner
product; HNSW is hnswlib's graph, on keys to which a coordinate is added that turns the largest inner product into the least distance. Each is built over the same
rows with one thread and searched for a group's heads one after another, as wide as it takes for recall@16 >= .999, or else as wide as the ladder goes. Times are CPU time of one
thread, over as many copies in turn; "of int8" divides by flat int8's of the run of retrievald just before.
"""
import argparse
import copy
import json
import pathlib
import subprocess
import time

import faiss
import hnswlib
import numpy as np

from index_sets import files

SINK, LOCAL, BEST = 128, 512, 16
LADDER = [8, 16, 32, 64, 128, 256, 512, 1024, 2048]


def ours(program, where, args):
    command = [program, "bench", "index", "-o", "jsonl", "--estimate", "off", "--n-sink", SINK, "--n-local", LOCAL, "--attn-top-k", args.top_k]
    command += ["-n", args.steps, "--replicas", args.replicas]
    for flag, path in files(where).items():
        command += [f"--{flag}", path]
    result = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


class Ivf:
    name = "IVF-SQ8"

    def __init__(self, keys):
        lists = int(4 * np.sqrt(len(keys)))
        dim = keys.shape[1]
        self.index = faiss.IndexIVFScalarQuantizer(faiss.IndexFlatIP(dim), dim, lists, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
        self.index.train(keys)
        self.index.add(keys)
        self.bytes = len(faiss.serialize_index(self.index))

    def copy(self):
        twin = copy.copy(self)
        twin.index = faiss.clone_index(self.index)
        return twin

    def width(self, n):
        self.index.nprobe = n

    def search(self, queries, k):
        return self.index.search(queries, k)[1]


class Hnsw:
    name = "HNSW"

    def __init__(self, keys):
        norms = (keys**2).sum(1)
        keys = np.concatenate([keys, np.sqrt(norms.max() - norms)[:, None]], 1)
        self.index = hnswlib.Index("l2", keys.shape[1])
        self.index.init_index(len(keys), M=16, ef_construction=200)
        self.index.set_num_threads(1)
        self.index.add_items(keys, num_threads=1)
        self.bytes = self.index.index_file_size()

    def copy(self):
        twin = copy.copy(self)
        twin.index = copy.deepcopy(self.index)
        twin.index.set_num_threads(1)
        return twin

    def width(self, n):
        self.index.set_ef(n)

    def search(self, queries, k):
        return self.index.knn_query(np.pad(queries, ((0, 0), (0, 1))), k, num_threads=1)[0]


def recalls(found, exact):
    """Mean shares of the best 16 and of all of `exact` [queries][k], best first, that were found."""
    best = np.mean([len(np.intersect1d(f, e[:BEST])) / min(BEST, len(e)) for f, e in zip(found, exact)])
    return best, np.mean([len(np.intersect1d(f, e)) / len(e) for f, e in zip(found, exact)])


def measure(kind, keys, queries, exact, args):
    start = time.process_time()
    index = kind(keys)
    built = time.process_time() - start
    flat = queries.reshape(-1, queries.shape[-1])
    for width in [w for w in LADDER if kind is Ivf or w >= args.top_k]:
        index.width(width)
        found = index.search(flat, args.top_k)
        if recalls(found, exact)[0] >= 0.999:
            break
    copies = [index.copy() for _ in range(args.replicas)]
    for twin in copies:
        twin.width(width)
    rounds = []
    for r in range(6):
        start = time.process_time()
        for i, twin in enumerate(copies):
            twin.search(queries[(r + i) % len(queries)], args.top_k)
        rounds.append((time.process_time() - start) / len(copies))
    return f"{kind.name} {width}", *recalls(found, exact), built, index.bytes / len(keys), 1e6 * float(np.median(rounds[1:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("set", type=pathlib.Path)
    parser.add_argument("--top-k", type=int, default=100)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--replicas", type=int, default=16)
    args = parser.parse_args()
    faiss.omp_set_num_threads(1)
    lines = ours(args.program, args.set, args)
    base = next(x for x in lines if x["kind"] == "int8")["us"]["median"]
    rows = [(x["kind"], x["recall16"]["mean"], x["recall100"]["mean"], x["build_s"], x["bytes_per_key"], x["us"]["median"]) for x in lines]
    paths = files(args.set)
    keys = np.load(paths["keys"]).astype(np.float32)[SINK:-LOCAL]
    queries = np.load(paths["queries"]).astype(np.float32)[: args.steps]
    scores = queries.reshape(-1, queries.shape[-1]) @ keys.T
    exact = np.argsort(-scores, axis=1)[:, : args.top_k]
    rows += [measure(kind, keys, queries, exact, args) for kind in (Ivf, Hnsw)]
    print(f"{args.set.name}: {len(keys)} keys searched, top {args.top_k}, {args.replicas} replicas")
    print(f"{'kind':<14}{'recall@16':>10}{'recall@100':>11}{'build s':>9}{'B/key':>8}{'us':>10}{'of int8':>9}")
    for name, best, all_, built, size, us in rows:
        print(f"{name:<14}{best:>10.4f}{all_:>11.4f}{built:>9.3f}{size:>8.1f}{us:>10.1f}{us / base:>9.2f}")


if __name__ == "__main__":
    main()
