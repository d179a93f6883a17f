"""A daemon under test, and how to talk to it."""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading

import requests

START_SECONDS = 120
STOP_SECONDS = 60


class Daemon:
    """A daemon on a free port. Its log is in .lines."""

    def __init__(self, binary, model, *args, env=None, wait=True):
        command = [binary, "serve", "-m", model, "--port", "0", *args]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RETRIEVALD_")}  # none of our own settings
        self.state = tempfile.TemporaryDirectory(prefix="retrievald-state-")  # contexts of its own
        clean["XDG_STATE_HOME"] = self.state.name
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**clean, **(env or {})}, text=True, errors="replace")
        self.lines = []
        self.port = None
        self.listening = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        if not self.listening.wait(START_SECONDS) or self.port is None:
            self.process.kill()
            raise RuntimeError("the daemon did not listen:\n" + "".join(self.lines))
        self.base = f"http://127.0.0.1:{self.port}"
        if wait:
            self.wait_ready()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"listening on http://.*:(\d+)", line)
            if found:
                self.port = int(found.group(1))
                self.listening.set()
        self.listening.set()

    def wait_ready(self):
        until(lambda: requests.get(self.base + "/health", timeout=60).status_code == 200, START_SECONDS)

    def get(self, path, **kw):
        return requests.get(self.base + path, timeout=120, **kw)

    def post(self, path, body, **kw):
        return requests.post(self.base + path, json=body, timeout=300, **kw)

    def stream(self, path, body):
        """All events of a stream: parsed chunks, "[DONE]" as text; comments as ":"."""
        answer = requests.post(self.base + path, json={**body, "stream": True}, stream=True, timeout=300)
        assert answer.status_code == 200, answer.text
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        return list(events(answer))

    def metrics(self):
        return parse_metrics(self.get("/metrics").text)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def stop(self, sig=signal.SIGTERM):
        """The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.join()

    def join(self):
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.reader.join()
        assert not any("Sanitizer" in line or "runtime error" in line for line in self.lines), "".join(self.lines)
        return status


def until(condition, seconds=60):
    """Waits for something another process does; what is tested never depends on how long it takes."""
    tick = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("did not happen")


def events(answer):
    for raw in answer.iter_lines(delimiter=b"\n\n"):
        line = raw.decode()
        if line.startswith(":"):
            yield ":"
        elif line:
            assert line.startswith("data: "), line
            data = line[len("data: ") :]
            yield data if data == "[DONE]" else json.loads(data)


def parse_metrics(text):
    values = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP \S+ .+|TYPE \S+ (counter|gauge))", line), line
        else:
            found = re.fullmatch(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[a-z]+="[^"]*"\})? (\S+)', line)
            assert found, line
            values[found.group(1) + (found.group(2) or "")] = float(found.group(3))
    return values


def exchange(port, data, half_close=False):
    """Sends raw bytes, returns all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as s:
        s.sendall(data)
        if half_close:
            s.shutdown(socket.SHUT_WR)
        return receive_all(s)


def receive_all(s):
    got = b""
    while True:
        try:
            more = s.recv(65536)
        except ConnectionResetError:
            return got
        if not more:
            return got
        got += more


def request_bytes(path, body, *headers, method="POST"):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(raw)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + raw
