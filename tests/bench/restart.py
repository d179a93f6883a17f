"""What a context on disk costs after a restart: with its file in the page cache, and cold beside a plain reading of the same bytes a moment before, in turn. Medians (smallest to
largest) of --rounds. The page cache is asked to forget the files alone; no rights are needed."""

import argparse
import pathlib
import statistics

import server_costs

ROOT = pathlib.Path(__file__).resolve().parents[2]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="a GGUF file")
    p.add_argument("-n", type=int, default=32000, help="tokens of the context (default %(default)s)")
    p.add_argument("-f", "--text", help="a text of so many tokens; without it, numbers in words")
    p.add_argument("--rounds", type=int, default=8, help="(default %(default)s)")
    p.add_argument("-t", "--threads", type=int, default=2, help="(default %(default)s)")
    p.add_argument("--retrievald", default=ROOT / "build/server/retrievald", help="default: %(default)s")
    return p.parse_args()


def main():
    a = arguments()
    daemon = [str(a.retrievald), "-m", a.model, "-t", str(a.threads)]
    ids = server_costs.tokens(daemon, a.text, a.n + 32)
    rounds = server_costs.restarted(daemon, ids, 32, a.rounds)

    def line(what, values, unit, digits=0):
        m, low, high = (f"{x:.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
        print(f"{what:<58} {m} {unit} ({low} to {high})")

    line("page cache: first token", [r["first_ms"] for r in rounds], "ms")
    line("  of it reading", [r["warm_read_ms"] for r in rounds], "ms")
    line("  of it the prompt's last 32 tokens", [r["prompt_ms"] for r in rounds], "ms")
    line("  of it a decode step", [r["step_ms"] for r in rounds], "ms")
    line(f"cold: {rounds[0]['bytes'] / 1e6:.0f} MB, a plain reading", [1000 * r["plain_s"] for r in rounds], "ms")
    line("  reading", [1000 * r["cold_s"] for r in rounds], "ms")
    line("  reading / plain reading", [r["cold_s"] / r["plain_s"] for r in rounds], "", 2)
    line("  first token", [r["cold_first_ms"] for r in rounds], "ms")


if __name__ == "__main__":
    main()
