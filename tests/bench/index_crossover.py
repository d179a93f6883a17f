#!/usr/bin/env python3
"""index_crossover.py RETRIEVALD SET... [--lengths N,N,...] [--steps N] [--replicas N] [--rows FILE] [-o FILE.svg]: from how many keys on which kind of index is cheaper, on real keys.

SET is what index_sets.py says. Each is cut to the lengths that it holds (all of its rows, where it lacks less than 2 % of one), the first 128 and the last rows, with the training queries
whose positions are among those, and measured by `retrievald bench index --attn-top-k 100 --estimate off`. Prints a table: CPU time of a search by flat int8's in the same run,
recall@16, share of the keys scored. What FILE of --rows holds already is not measured again, what is measured is added to it. With -o it is drawn (needs numpy and, for that, matplotlib): filled where recall@16 >= .999, a line for the mean over the sets of a length.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

import numpy as np

from index_sets import files

SINK, TARGET = 128, 0.999
KINDS = ["f16", "cluster", "ivf", "graph"]


def cut(where, n, to):
    """Writes the cut set to a folder; returns its files by flag."""
    x = {flag: np.load(path) for flag, path in files(where).items()}
    held = len(x["keys"])
    pos = x.pop("key-positions", np.arange(held, dtype=np.int32))
    n = min(n, held)
    keep = np.r_[0:SINK, held - (n - SINK) : held]
    trained = (x["train-positions"] < SINK) | (x["train-positions"] >= pos[keep[SINK]])
    for flag in ("keys", "values"):
        x[flag] = x[flag][keep]
    for flag in ("train-queries", "train-positions"):
        x[flag] = x[flag][trained]
    x["key-positions"] = pos[keep]
    for flag, array in x.items():
        np.save(to / f"{flag}.npy", array)
    return {flag: to / f"{flag}.npy" for flag in x}


def measure(program, paths, args):
    command = [program, "bench", "index", "-o", "jsonl", "--kind", "flat,cluster,ivf,graph", "--estimate", "off", "--attn-top-k", 100, "-n", args.steps]
    command += ["-r", args.rounds, "--replicas", args.replicas]
    for flag, path in paths.items():
        command += [f"--{flag}", path]
    result = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=True)
    return {row["kind"]: row for row in map(json.loads, result.stdout.splitlines())}


def draw(points, path):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "retrievald"
    figure, axes = plt.subplots(figsize=(6.5, 4))
    lengths = sorted({n for _, n, _ in points})
    for kind, colour in zip(KINDS, ["tab:gray", "tab:blue", "tab:green", "tab:red"]):
        for _, n, rows in points:
            good = rows[kind]["recall16"]["mean"] >= TARGET
            axes.plot(n, rows[kind]["relative"], "o", color=colour, markersize=4, fillstyle="full" if good else "none")
        means = [np.mean([rows[kind]["relative"] for _, m, rows in points if m == n]) for n in lengths]
        axes.plot(lengths, means, "-", color=colour, label=kind)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="keys", ylabel="CPU time of a search, of flat int8's", xticks=lengths, yticks=[0.25, 0.5, 1, 2, 5, 10])
    axes.set_xticklabels([f"{n / 1024:.0f}K" for n in lengths])
    axes.set_yticklabels([".25", ".5", "1", "2", "5", "10"])
    axes.minorticks_off()
    axes.set_ylim(0.2, 20)
    axes.legend(loc="upper center", ncol=len(KINDS))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("sets", type=pathlib.Path, nargs="+")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768,65536,131072")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--rows", type=pathlib.Path)
    parser.add_argument("-o", "--output", type=pathlib.Path)
    args = parser.parse_args()
    points = []
    kept = {}
    if args.rows and args.rows.exists():
        kept = {(name, n): rows for name, n, rows in map(json.loads, args.rows.read_text().splitlines())}
    print(f"{'set':<22}{'keys':>7}{'int8 us':>9}" + "".join(f"{kind + ': of int8, @16, scored':>34}" for kind in KINDS))
    for where in args.sets:
        held = len(np.load(files(where)["keys"], mmap_mode="r"))
        for n in [n for n in map(int, args.lengths.split(",")) if n <= 1.02 * held]:
            name = f"{where.parent.name}/{where.name}"
            rows = kept.get((name, n))
            if not rows:
                with tempfile.TemporaryDirectory() as to:
                    rows = measure(args.program, cut(where, n, pathlib.Path(to)), args)
                if args.rows:
                    with args.rows.open("a") as out:
                        print(json.dumps([name, n, rows]), file=out)
            points.append((name, n, rows))
            cells = "".join(f"{r['relative']:>20.2f}{r['recall16']['mean']:>8.4f}{100 * r['visited_group']:>5.0f}%" for r in (rows[k] for k in KINDS))
            print(f"{name:<22}{min(n, held):>7}{rows['int8']['us']['median']:>9.1f}{cells}", flush=True)
    if args.output:
        draw(points, args.output)


if __name__ == "__main__":
    main()
