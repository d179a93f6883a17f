"""What a server costs: its start, its memory, the first token of a long context that it has read before."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
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


def first_token(command, ids, n_new):
    """Milliseconds: from a request whose prompt is known but for the last n_new tokens to its first token; of these, for the prompt; of a decode step."""
    with running([*command, "-c", str(len(ids) + 64)]) as (port, _, _):
        body = {"prompt": ids[:-n_new], "max_tokens": 1, "temperature": 0}
        ask(port, "/v1/completions", body)
        rest(port)
        body = json.dumps({"prompt": ids, "max_tokens": 24, "temperature": 0, "stream": True, "ignore_eos": True})
        c = http.client.HTTPConnection("127.0.0.1", port, timeout=1200)
        start = time.monotonic()
        c.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer, first, timings = c.getresponse(), None, None
        for line in answer:
            if line.startswith(b"data: {") and first is None:
                first = 1000 * (time.monotonic() - start)
            if line.startswith(b"data: {"):
                timings = json.loads(line[6:]).get("timings") or timings
    if timings["cache_n"] < len(ids) - n_new - 1:
        raise RuntimeError(f"only {timings['cache_n']} of {len(ids) - n_new} tokens came from the kept context")
    return {"first_ms": first, "prompt_ms": timings["prompt_ms"], "step_ms": timings["predicted_ms"] / max(1, timings["predicted_n"] - 1)}


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
