"""What a context on disk costs after a restart: the first request that a daemon gets goes on from it, by a token and by some, with its file in the page cache, and cold beside a plain
reading of the same bytes a moment before, all in turn. Medians (smallest to largest) of --rounds. The page cache is asked to forget the files alone; no rights are needed."""

import argparse
import pathlib
import statistics

import server_costs

ROOT = pathlib.Path(__file__).resolve().parents[2]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="a GGUF file")
    p.add_argument("-n", type=int, default=32000, help="tokens of the context (default %(default)s)")
    p.add_argument("--new", default="1,32", help="tokens of the prompt behind it, which are computed (default %(default)s)")
    p.add_argument("-f", "--text", help="a text of so many tokens; without it, numbers in words")
    p.add_argument("--rounds", type=int, default=8, help="(default %(default)s)")
    p.add_argument("-t", "--threads", type=int, default=2, help="(default %(default)s)")
    p.add_argument("--retrievald", default=ROOT / "build/server/retrievald", help="default: %(default)s")
    return p.parse_args()


def line(what, values, unit="ms", digits=0):
    m, low, high = (f"{x:.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    print(f"{what:<46} {m} {unit} ({low} to {high})")


def table(n, rounds):
    """Of each part its own median, so that the parts need not add up. A file is read while the new tokens are computed, its codes last, for which the first token does not wait."""
    what = "the new token" if n == 1 else f"the {n} new tokens"
    for cold in ("", "cold_"):
        read, prompt, first, plain = ([r[f"{cold}{k}_ms"] for r in rounds] for k in ("read", "prompt", "first", "plain"))
        line(f"{n} new, {'cold' if cold else 'page cache'}: first token", first)
        line(f"  of it {what}, with what it waits for", prompt)
        line("  of it the rest", [f - p for f, p in zip(first, prompt, strict=True)], digits=1)
        line("  reading all of the file, beside it", read)
        line("  without a decode step", [f - r[f"{cold}step_ms"] for f, r in zip(first, rounds, strict=True)])
        line(f"  a plain reading, {rounds[0]['bytes'] / 1e6:.0f} MB", plain)
        line("  reading / plain reading", [a / b for a, b in zip(read, plain, strict=True)], "", 2)
        line("  first token / plain reading", [a / b for a, b in zip(first, plain, strict=True)], "", 2)
    line("a decode step", [r[f"{cold}step_ms"] for r in rounds for cold in ("", "cold_")])


def main():
    a = arguments()
    daemon = [str(a.retrievald), "-m", a.model, "-t", str(a.threads)]
    news = [int(n) for n in a.new.split(",")]
    ids = server_costs.tokens(daemon, a.text, a.n + max(news))
    for n, rounds in server_costs.restarted(daemon, ids, a.n, news, a.rounds).items():
        table(n, rounds)


if __name__ == "__main__":
    main()
