"""retrievald beside llama.cpp on the same files and threads, in turn: llama-bench, then retrievald, as often as --rounds says. Of llama.cpp each
figure is the better one with flash attention on and off; its KV cache is f16, as ours. Prints medians, the spread over the rounds, and the median of
the rounds' ratios. Rows that only need retrievald: what its server's start, memory and first token cost."""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import server_costs

ROOT = pathlib.Path(__file__).resolve().parents[2]

# What a model is known by: layers and embedding
KINDS = {(30, 576): "SmolLM2", (24, 896): "Qwen", (4, 4096): "slice"}
# name: what, depth or length, models; those of None are for all
ROWS = {
    "decode-0": ("decode", 0, None),
    "decode-8k": ("decode", 8000, ("SmolLM2", "Qwen")),
    "decode-32k": ("decode", 32000, ("Qwen",)),
    "prefill-512": ("prefill", 512, None),
    "prefill-8k": ("prefill", 8000, ("SmolLM2",)),
    "prefill-16k": ("prefill", 16000, ("Qwen",)),
    "first-token": ("first-token", 32000, ("Qwen",)),
    "restart": ("restart", 32000, ("Qwen",)),
    "start": ("start", 0, ("Qwen",)),
    "memory-8k": ("memory", 8000, ("SmolLM2",)),
    "memory-32k": ("memory", 32000, ("Qwen",)),
}


def fail(text):
    sys.exit("vs_llama.sh: " + text)


def arguments():
    p = argparse.ArgumentParser(prog="vs_llama.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("llama", metavar="PATH_TO_LLAMA_BIN", help="the folder that holds llama-bench")
    p.add_argument("models", nargs="*", help="GGUF files; without any, the demo models, as far as deploy/fetch_model.sh has fetched them")
    p.add_argument("--rows", default=",".join(ROWS), help="which rows, separated by commas (default: all, %(default)s)")
    p.add_argument("--rounds", type=int, default=3, help="pairs of runs (default %(default)s)")
    p.add_argument("-n", type=int, default=32, help="tokens that a run decodes (default %(default)s)")
    p.add_argument("-t", "--threads", type=int, default=2, help="of both (default %(default)s)")
    p.add_argument("--cpu", default="auto", help="retrievald's --cpu (default %(default)s)")
    p.add_argument("-f", "--text", help="a text that retrievald reads where there is a context; without it, random tokens")
    p.add_argument("--retrievald", default=ROOT / "build/server/retrievald", help="default: %(default)s")
    p.add_argument("--flash", default="0,1", help="llama-bench's -fa: 0 or 1 alone halves the time where one is known to be better (default %(default)s)")
    a = p.parse_args()
    unknown = [r for r in a.rows.split(",") if r not in ROWS]
    if unknown:
        fail(f"there is no row {unknown[0]}; the rows are {', '.join(ROWS)}")
    if not a.models:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "retrievald"
        a.models = [str(p) for p in sorted(cache.glob("*.gguf"))]
    a.llama = pathlib.Path(a.llama)
    if (a.llama / "llama-bench").exists():
        a.llama /= "llama-bench"
    for path in (a.llama, a.retrievald, *a.models):
        if not os.path.isfile(path):
            fail(f"{path} is not there")
    return a


def run(command, **kw):
    result = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw)
    if result.returncode:
        fail(f"{' '.join(map(str, command))} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def of_llama(a, model, what, length):
    """Tokens a second."""
    test = ["-p", length, "-n", 0] if what == "prefill" else ["-p", 0, "-n", a.n, "-d", length]
    if what == "prefill" and length > 1000:
        test += ["--no-warmup"]  # it would be the whole prompt
    rows = run([a.llama, "-m", model, "-t", a.threads, "-r", 1 if what == "prefill" else 3, "-fa", a.flash, "-ngl", 0, "-o", "jsonl", *test],
               env={**os.environ, "LD_LIBRARY_PATH": str(a.llama.parent)})  # fmt: skip
    return max(statistics.median(r["samples_ts"]) for r in rows)


def of_retrievald(a, model, what, length):
    """{name of the line: its JSON}."""
    command = [a.retrievald, "bench", what, "-m", model, "-t", a.threads, "--cpu", a.cpu, "-r", 1 if what == "prefill" else 3, "-o", "jsonl"]
    if length and a.text:
        command += ["-f", a.text]
    if what == "prefill":
        (row,) = run([*command, "-p", length])
        return {"": row}
    modes = "full,auto" if length else "full"
    return {r["attention"]: r for r in run([*command, "-d", length, "-n", a.n, "--attention", modes])}


class Table:
    def __init__(self):
        self.rows = []

    def add(self, what, ours, theirs, ratio, goal=""):
        """Prints it at once too: a run is long."""
        row = (what, ours, theirs, ratio, goal)
        if not self.rows:
            print(f"{'':46} {'retrievald':>26} {'llama.cpp':>22} {'ratio':>7}  goal")
        self.rows.append(row)
        print(f"{what:46} {ours:>26} {theirs:>22} {ratio:>7}  {goal}", flush=True)


def spread(values, unit=""):
    if len(values) == 1:
        return f"{values[0]:.4g}{unit}"
    return f"{statistics.median(values):.4g}{unit} ({min(values):.4g}-{max(values):.4g})"


def ratio_goal(what, name, kind, cpu):
    """The goals of the project's issue on speed, for the levels they are set for."""
    level = "amx" if "amx" in cpu.lower() else "bf16" if "BF16" in cpu else ""
    if what == "prefill-512":
        return {"amx": ">= 6", "bf16": ">= 2.5"}.get(level, "")
    if what.startswith("prefill"):
        return {"amx": ">= 8", "bf16": ">= 4"}.get(level, "")
    if what == "decode-0":
        return {"SmolLM2": ">= 1.15", "slice": ">= 1.15", "Qwen": ">= 2"}.get(kind, "")
    if name == "full" and (what, kind) in (("decode-8k", "SmolLM2"), ("decode-32k", "Qwen")):
        return ">= 3"
    return ">= 10" if what == "decode-32k" else ""


def speed_rows(a, table, name, model, kind):
    what, length, _ = ROWS[name]
    theirs, ours = [], {}
    for _ in range(a.rounds):
        theirs.append(of_llama(a, model, what, length))
        for line, r in of_retrievald(a, model, what, length).items():
            ours.setdefault(line, []).append(r)
    medians = {}
    for line, rows in ours.items():
        rates = [r["tokens_per_second"]["median"] for r in rows]
        ratio = statistics.median(o / t for o, t in zip(rates, theirs))
        label = f"{kind} {what} " + (f"of {length:,} tokens" if what == "prefill" else f"at {length:,}") + (f", {line}" if length and line else "")
        table.add(label, spread(rates), spread(theirs), f"{ratio:.2f}", ratio_goal(name, line, kind, rows[0]["cpu"]))
        medians[line] = 1 / statistics.median(rates)
        if what == "decode":
            share = [r["gb_per_second"] / r["peak_gb_per_second"] for r in rows]
            keys = f"{rows[0]['keys_attended']:.0f} of {rows[0]['keys_held']:.0f} keys"
            table.add("  GB/s, share of peak; keys read", f"{rows[0]['gb_per_second']:.1f}, {100 * statistics.median(share):.0f} %; {keys}", "", "")
        elif rows[0]["index_cpu_seconds"]:
            shares = [100 * r["index_cpu_seconds"] / r["cpu_seconds"] for r in rows]
            table.add("  index, CPU time as a share of the prefill's", spread(shares, " %"), "", "", "<= 10 %")
    return rows[0]["cpu"], medians.get("auto")


def server_rows(a, table, name, model, kind):
    what, length, _ = ROWS[name]
    daemon = [str(a.retrievald), "-m", model, "-t", str(a.threads), "--cpu", a.cpu]
    if what == "start":
        table.add(f"{kind} ready after", spread(server_costs.start_seconds(daemon, a.rounds + 1)[1:], " s"), "", "", "<= 1 s")
        return
    ids = server_costs.tokens(daemon, a.text, length + 32)
    if what == "first-token":
        r = server_costs.first_token(daemon, ids, 32)
        steps = (r["first_ms"] - r["prompt_ms"]) / r["step_ms"]
        detail = f"{r['first_ms']:.0f} ms = {r['prompt_ms']:.0f} prefill + {steps:.2f} steps"
        table.add(f"{kind} first token, {length:,} cached + 32 new", detail, "", "", "<= 1.5 steps")
    elif what == "restart":
        (r,) = server_costs.restarted(daemon, ids, length, [1])[1]
        wait = r["first_ms"] - r["step_ms"]
        detail = f"{r['first_ms']:.0f} ms = {wait:.0f} + a step of {r['step_ms']:.0f}; read {r['read_ms']:.0f}, prefill {r['prompt_ms']:.0f}"
        table.add(f"{kind} first token after a restart, {length:,} kept + 1 new", detail, "", "", "<= 300 ms + a step")
        plain = r["cold_plain_ms"]
        detail = f"{r['cold_first_ms'] / plain:.2f} x plain reading ({r['bytes'] / plain / 1e6:.2f} GB/s, {r['bytes'] / 1e6:.0f} MB)"
        table.add("  the same from a cold disk", detail, "", "", "<= 1.2 x")
    else:
        r = server_costs.memory(daemon, ids[:length])
        detail = f"{r['rss'] / 1e6:.0f} MB = plan {(r['rss'] - r['plan']) / 1e6:+.0f}"
        table.add(f"{kind} RSS after {length:,} tokens", detail, "", "", "<= +300")
        parts = ", ".join(f"{k} {r[k] / 1e6:.0f}" for k in ("weights", "kv", "index"))
        table.add(f"  plan, MB: {parts}; highest RSS", f"{r['peak'] / 1e6:.0f} MB", "", "")


def main():
    a = arguments()
    table, cpus = Table(), set()
    for model in a.models:
        (facts,) = run([a.retrievald, "inspect", model, "-o", "json"])
        kind = KINDS.get((facts["n_layer"], facts["n_embd"]), pathlib.Path(model).stem[:20])
        at = {}
        for name in a.rows.split(","):
            what, _, kinds = ROWS[name]
            if kinds and kind not in kinds:
                continue
            if what in ("decode", "prefill"):
                cpu, at[name] = speed_rows(a, table, name, model, kind)
                cpus.add(cpu)
            else:
                server_rows(a, table, name, model, kind)
        if at.get("decode-8k") and at.get("decode-32k"):
            growth = 100 * (at["decode-32k"] / at["decode-8k"] - 1)
            table.add(f"{kind} a token of auto, 32K against 8K", f"{growth:+.0f} %", "", "", "<= +30 %")
    with open("/proc/cpuinfo") as f:
        machine = re.search(r"model name\s*: (.*)", f.read())
    print(f"\n{machine[1] if machine else 'unknown CPU'}; {a.threads} threads; retrievald at {', '.join(sorted(cpus)) or a.cpu}; tokens a second but where "
          f"said otherwise, medians (spread) of {a.rounds} pairs")  # fmt: skip


if __name__ == "__main__":
    main()
