"""--trace: what a run writes is JSON that trace viewers take, says what happened, in order, and fits the run's own numbers."""

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "http"))
from daemon import Daemon  # noqa: E402


def read(path):
    """Events of each track by its name: dicts with name, ts, dur (microseconds) and args, in order of their beginning."""
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if (e["ph"], e["name"]) == ("M", "thread_name")}
    assert len({e["pid"] for e in events}) == 1 and trace["otherData"]["forgotten_events"] == 0
    tracks = collections.defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            assert e["ts"] >= 0 and e["dur"] >= 0
            tracks[names[e["tid"]]].append(e)
    for track in tracks.values():
        track.sort(key=lambda e: (e["ts"], -e["dur"]))
    return tracks


def named(track, name):
    return [e for e in track if e["name"] == name]


def inside(event, track):
    """The track's events that lie within this one; those that begin within it must not end after it (a nanosecond for rounding)."""
    begun = [e for e in track if event["ts"] <= e["ts"] < event["ts"] + event["dur"] and e is not event and e["dur"] <= event["dur"]]
    for e in begun:
        assert e["ts"] + e["dur"] <= event["ts"] + event["dur"] + 0.002, (event, e)
    return begun


def check_nesting(track):
    """One thing after the other, or one within the other."""
    open_ends = []
    for e in track:
        while open_ends and open_ends[-1] <= e["ts"] + 0.001:
            open_ends.pop()
        assert not open_ends or e["ts"] + e["dur"] <= open_ends[-1] + 0.002, e
        open_ends.append(e["ts"] + e["dur"])


def test_bench_decode(tool, model, tmp_path):
    path, layers, steps = tmp_path / "trace.json", 30, 3
    start = time.monotonic()
    done = tool("bench", "decode", "-m", model, "-t", "2", "-d", "2200", "-n", steps, "-r", "1", "--attention", "flat", "-o", "jsonl", "--trace", path)
    wall = 1e6 * (time.monotonic() - start)
    assert done.returncode == 0, done.stderr
    tracks = read(path)
    assert set(tracks) == {"engine", "pool 1"}
    for track in tracks.values():
        check_nesting(track)
    engine = tracks["engine"]
    assert engine[-1]["ts"] + engine[-1]["dur"] < wall

    chunks = [c for c in named(engine, "prefill chunk") if c["args"]["tokens"] > 1]  # one token: the warming up, and the last one of what is kept
    assert [c["args"]["tokens"] for c in chunks] == [512, 512, 512, 512, 152]
    decoded = named(engine, "decode step")[-steps:]
    assert [s["args"]["position"] for s in decoded] == [2200, 2201, 2202]
    shares = []
    for whole in chunks + decoded:
        parts = inside(whole, engine)
        found = collections.Counter(e["name"] for e in parts)
        assert [e["args"]["layer"] for e in named(parts, "layer")] == list(range(layers))
        for name in "q k v", "attention", "attention output", "gate up", "down", "rotate and store":
            assert found[name] == layers, name
        assert found["norm"] == 2 * layers + 1 and found["embed"] == found["logits"] == 1
        used = {"attend keys", "dense", "search", "merge"} if whole in decoded else {"pack keys", "attend"}
        for name in used:
            assert found[name] >= layers, name
        shares.append(sum(e["dur"] for e in named(parts, "layer")) / whole["dur"])
    assert 0.5 < max(shares) <= 1  # the layers are nearly all of it, where the thread kept its CPU
    codes = named(engine, "codes") + named(tracks["pool 1"], "codes")
    assert {e["args"]["layer"] for e in codes} == set(range(layers))
    assert len(named(engine, "sample")) >= steps
    assert named(tracks["pool 1"], "product")

    # the steps take the time that the run says they take
    rate = json.loads(done.stdout)["tokens_per_second"]["median"]
    assert sum(s["dur"] for s in decoded) <= 1e6 * steps / rate * 1.01


def test_run_and_prefill(tool, model, tmp_path):
    path = tmp_path / "trace.json"
    done = tool("run", "-m", model, "-t", "1", "-p", "Who is Boaz?", "-n", "4", "--temp", "0", "--trace", path)
    assert done.returncode == 0, done.stderr
    tracks = read(path)
    assert set(tracks) == {"engine"}
    check_nesting(tracks["engine"])
    assert len(named(tracks["engine"], "sample")) == 4
    assert f"{sum(map(len, tracks.values()))} events are in {path}" in done.stderr

    # the older trace gives way
    done = tool("bench", "prefill", "-m", model, "-t", "1", "-p", "40", "-r", "1", "--trace", path)
    assert done.returncode == 0, done.stderr
    assert not named(read(path)["engine"], "find prefix")
    assert named(read(path)["engine"], "prefill chunk")[-1]["args"]["tokens"] == 40


def test_without(tool, model, tmp_path):
    """Nothing is written unless it was asked for; the setting may come from the environment."""
    path = tmp_path / "trace.json"
    for env, there in ((), False), ((("RETRIEVALD_TRACE", str(path)),), True):
        done = tool("run", "-m", model, "-p", "Who?", "-n", "1", env=env)
        assert done.returncode == 0 and path.exists() == there and ("trace" in done.stderr) == there


def bad_names(folder):
    """Names, and what is said of them."""
    text = folder / "notes.txt"
    text.write_text("what I must not lose\n")
    os.mkfifo(folder / "pipe")
    yield folder / "none/trace.json", "No such file"
    yield folder, "Is a directory"
    yield text, "holds something else"
    yield folder / "pipe", "not a plain file"
    yield pathlib.Path("/dev/full"), "not a plain file"
    yield folder / ("x" * 300), "File name too long"


@pytest.mark.parametrize("command", [["run", "-p", "Who?"], ["bench", "decode"], ["bench", "prefill"], ["serve", "--port", "0"]], ids=lambda c: c[-2 if c[0] != "bench" else -1])
def test_bad_names(command, tool, model, tmp_path):
    """Said at the start, by name; what is there stays."""
    for path, part in bad_names(tmp_path):
        done = tool(*command, "-m", model, "--trace", path)
        assert done.returncode == 1
        assert f"trace file {path}: " in done.stderr and part in done.stderr, done.stderr
    assert (tmp_path / "notes.txt").read_text() == "what I must not lose\n"
    assert tool(*command, "-m", model, "--trace", "").returncode == 2


def test_full_disk(binary, model, tmp_path):
    """A trace that cannot be written is said, and is an error."""
    limited = f"ulimit -f 8; trap '' XFSZ; exec '{binary}' run -m '{model}' -p 'Who?' -n 2 --trace '{tmp_path}/trace.json'"
    done = subprocess.run(["sh", "-c", limited], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"trace file {tmp_path}/trace.json: File too large" in done.stderr


def test_daemon(binary, model, tmp_path):
    """SIGUSR1 writes it between requests, the end once more; the store's writing of a context is in it."""
    path = tmp_path / "trace.json"
    d = Daemon(binary, model, "-t", "2", "--trace", str(path))
    try:
        assert path.stat().st_size == 0
        body = {"prompt": "In the days when the judges ruled there was a famine in the land. " * 20, "max_tokens": 2}
        assert d.post("/v1/completions", body).status_code == 200
        d.process.send_signal(signal.SIGUSR1)
        while not any("events are in" in line for line in d.lines):
            assert d.process.poll() is None
            time.sleep(0.01)
        first = read(path)
        assert named(first["engine"], "decode step")
        assert d.post("/v1/completions", body).status_code == 200
    finally:
        assert d.stop() == 0
    last = read(path)
    assert len(named(last["engine"], "prefill chunk")) == len(named(first["engine"], "prefill chunk")) + 1
    assert sum(e["args"]["tokens"] for e in named(last["store"], "write segment")) > 256
    for track in last.values():
        check_nesting(track)


def test_daemon_without(binary, model):
    """The signal is answered, and ends nothing."""
    d = Daemon(binary, model)
    d.process.send_signal(signal.SIGUSR1)
    while not any("there is no trace" in line for line in d.lines):
        assert d.process.poll() is None
        time.sleep(0.01)
    assert d.get("/health").status_code == 200
    assert d.stop() == 0
