"""What a server costs: its start, its memory, the first token of a long context that it, or the one before it, has read."""

import contextlib
import http.client
import itertools
import json
import mmap
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import time


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(port, path, body=None):
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=1200)
    if body is None:
        c.request("GET", path)
    else:
        c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = c.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {text.decode(errors='replace')[:300]}")
    return json.loads(text)


def ready(port, process):
    """Waits until /health says so."""
    while True:
        try:
            c = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            c.request("GET", "/health")
            if c.getresponse().status == 200:
                return
        except OSError:
            pass
        if process.poll() is not None:
            raise RuntimeError(f"the daemon ended with {process.returncode}")
        time.sleep(0.002)


@contextlib.contextmanager
def running(command):
    """(port, process, seconds until it was ready)."""
    port = free_port()
    start = time.monotonic()
    process = subprocess.Popen([*command, "--port", str(port), "--log-level", "error"])
    try:
        ready(port, process)
        yield port, process, time.monotonic() - start
    finally:
        process.terminate()
        process.wait()


def start_seconds(command, times):
    seconds = []
    for _ in range(times):
        with running(command) as (_, _, s):
            seconds.append(s)
    return seconds


def tokens(command, text, n):
    """n token ids: of the text, or of numbers in words."""
    with running([*command, "-c", "512"]) as (port, _, _):
        if text:
            with open(text, encoding="utf-8") as f:
                content = f.read(8 * n)
        else:
            content = " ".join(f"Item {i} lies on shelf {i * 7919 % 997}." for i in range(n // 8))
        ids = ask(port, "/tokenize", {"content": content})["tokens"]
    if len(ids) < n:
        raise RuntimeError(f"{text}: has {len(ids)} tokens in its first {8 * n} bytes; {n} are needed")
    return ids[:n]


def rest(port):
    """Waits until nothing is left to be done in the background."""
    while ask(port, "/props")["index_pending"]:
        time.sleep(0.05)


def streamed(port, body):
    """Milliseconds to the first token of a streamed answer; of these, for the prompt; of a decode step."""
    c, data = http.client.HTTPConnection("127.0.0.1", port, timeout=1200), json.dumps({**body, "stream": True})
    start, first, timings = time.monotonic(), None, None
    c.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    for line in c.getresponse():
        if line.startswith(b"data: {"):
            first = first or 1000 * (time.monotonic() - start)
            timings = json.loads(line[6:]).get("timings") or timings
    step = timings["predicted_ms"] / max(1, timings["predicted_n"] - 1)
    return {"first_ms": first, "prompt_ms": timings["prompt_ms"], "step_ms": step, "timings": timings}


def first_token(command, ids, n_new):
    """A request whose prompt is known but for the last n_new tokens: as streamed()."""
    with running([*command, "-c", str(len(ids) + 64)]) as (port, _, _):
        ask(port, "/v1/completions", {"prompt": ids[:-n_new], "max_tokens": 1, "temperature": 0})
        rest(port)
        r = streamed(port, {"prompt": ids, "max_tokens": 24, "temperature": 0, "ignore_eos": True})
    if r["timings"]["cache_n"] < len(ids) - n_new - 1:
        raise RuntimeError(f"only {r['timings']['cache_n']} of {len(ids) - n_new} tokens came from the kept context")
    return r


def saved(port):
    """Waits until nothing is on its way to disk."""
    rest(port)
    while ask(port, "/props")["cache"]["disk"]["saving"] or not ask(port, "/props")["cache"]["disk"]["segments"]:
        time.sleep(0.05)


def disk_metrics(port):
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    c.request("GET", "/metrics")
    found = re.findall(r"^retrievald_disk_(loaded_bytes|load_seconds)_total (\S+)", c.getresponse().read().decode(), re.M)
    return {k: float(v) for k, v in found}


def forget_pages(files):
    """What the system keeps in memory of them."""
    for f in files:
        fd = os.open(f, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_seconds(files):
    """Of the files, in pieces of a MiB, one after the other, all to the same place."""
    piece = bytearray(1 << 20)
    start = time.monotonic()
    for path in files:
        with open(path, "rb", buffering=0) as f:
            while f.readinto(piece):
                pass
    return time.monotonic() - start


def touch_memory(size):
    """Takes so much memory and gives it back: a virtual machine has to get memory that lay idle from its host first, which would be measured instead."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as m:
        m.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, 4096):
            m[at] = 1


def restarted(command, ids, n_kept, news, times=1):
    """A context of n_kept tokens that another daemon left on disk, in a folder like new each time. {n: a dict of each of `times` rounds} for prompts that go on from it by n of
    `news` tokens, which are the first a daemon is asked for. Warm, the files in the page cache: milliseconds to the first token, of these for the new tokens and what they wait for, of reading beside that, of a decode step. Cold:
    the same, with the files' bytes and the seconds that a plain reading of them took a moment before."""
    rounds = {n: [] for n in news}
    with tempfile.TemporaryDirectory(prefix="retrievald-bench-") as place:
        saved_in, state = pathlib.Path(place, "saved"), pathlib.Path(place, "state")
        command = [*command, "-c", str(len(ids) + 64), "--state-dir"]
        with running([*command, str(saved_in)]) as (port, _, _):
            ask(port, "/v1/completions", {"prompt": ids[:n_kept], "max_tokens": 1, "temperature": 0})
            saved(port)
        files = list(saved_in.rglob("*.seg"))
        for _, n, cold in itertools.product(range(times), news, (False, True)):
            shutil.rmtree(state, ignore_errors=True)
            shutil.copytree(saved_in, state, copy_function=os.link, ignore=shutil.ignore_patterns("catalog*", "lock", "cost"))
            state.chmod(0o700)
            with running([*command, str(state)]) as (port, _, _):
                r = after_restart(port, files, ids[: n_kept + n], n_kept, cold)
            if cold:
                rounds[n][-1] |= {f"cold_{k}": v for k, v in r.items()}
            else:
                rounds[n].append(r)
    return rounds


def after_restart(port, files, ids, n_kept, cold):
    """One request to a daemon that has had none: as restarted()."""
    size = sum(f.stat().st_size for f in files)
    if cold:
        forget_pages(files)
    else:
        read_seconds(files)
    touch_memory(2 * size)
    plain = read_seconds(files)
    if cold:
        forget_pages(files)
    touch_memory(2 * size)
    r = streamed(port, {"prompt": ids, "max_tokens": 24, "temperature": 0, "ignore_eos": True})
    if r["timings"]["disk_n"] < n_kept - 1:
        raise RuntimeError(f"only {r['timings']['disk_n']} of {n_kept} tokens came from disk")
    disk = disk_metrics(port)
    return {k: r[k] for k in ("first_ms", "prompt_ms", "step_ms")} | {"read_ms": 1000 * disk["load_seconds"], "plain_ms": 1000 * plain, "bytes": disk["loaded_bytes"]}


def resident(process):
    """{VmRSS, VmHWM: bytes}."""
    with open(f"/proc/{process.pid}/status") as f:
        return {k: int(v) * 1024 for k, v in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", f.read(), re.M)}


def memory(command, ids):
    """Bytes: resident at rest, after a prompt and an answer; what weights, keys and values, and index account for; the highest it was."""
    with running([*command, "-c", str(len(ids) + 64)]) as (port, process, _):
        ask(port, "/v1/completions", {"prompt": ids, "max_tokens": 16, "temperature": 0})
        rest(port)
        props, now = ask(port, "/props")["memory"], resident(process)
    r = {"rss": now["VmRSS"], "peak": now["VmHWM"], "weights": props["model"], "kv": props["cache"] - props["index"], "index": props["index"]}
    r["plan"] = r["weights"] + r["kv"] + r["index"]
    return r
