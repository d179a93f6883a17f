"""retrievald contexts ...: the program beside a daemon; what it says about files is tested with a real one's."""

import json
import os
import pty
import re
import subprocess

import pytest
from daemon import until
from test_real import chat, document
from test_contexts import kept, resting  # noqa: F401, a fixture


@pytest.fixture
def contexts(real_bin):
    """contexts(daemon, command, ...): its status, output and errors."""

    def run(daemon, command, *args, **kw):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RETRIEVALD_")}
        where = ["--port", str(daemon.port)] if daemon else []
        return subprocess.run([real_bin, "contexts", command, *map(str, args), *where], capture_output=True, text=True, timeout=300, env={**clean, "TZ": "UTC"}, **kw)

    return run


def good(result):
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return result.stdout


def failed(result, *parts):
    assert result.returncode == 1 and result.stdout == "" and result.stderr.startswith("retrievald: ") and result.stderr.count("\n") == 1, result
    for part in parts:
        assert part in result.stderr


def test_from_add_to_rm(start, contexts, tmp_path):
    d = start()
    book = tmp_path / "book.txt"
    book.write_text('It was the best of times, "it was the worst" of times.\\n é\n' * 20)
    tokens = 1 + len("user\n") + len(book.read_bytes()) + 2
    assert good(contexts(d, "add", "-f", book, "--name", "tale", "--ttl", "24h")).startswith(f"tale: {tokens} tokens")
    assert good(contexts(d, "add", "-f", book, "--name", "pinned", "--pinned")).startswith("pinned:")
    failed(contexts(d, "add", "-f", book, "--name", "tale"), "named tale already")
    good(contexts(d, "add", "-f", book, "--name", "tale", "--replace", "--ttl", "90m"))
    failed(contexts(d, "add", "-f", book, "--name", "x", "--ttl", "soon"), "ttl")
    listed = good(contexts(d, "list")).splitlines()
    assert len(listed) == 3 and listed[0].split()[:2] == ["name", "tokens"]
    assert listed[1].split()[:2] == ["pinned", str(tokens)] and " never " in listed[1] and " yes " in listed[1]
    assert listed[2].split()[0] == "tale" and " never " not in listed[2] and " no " in listed[2]
    as_json = json.loads(good(contexts(d, "list", "-o", "json")))
    assert as_json == d.get("/v1/contexts").json()
    good(contexts(d, "pin", "tale"))
    good(contexts(d, "unpin", "pinned"))
    assert [c["pinned"] for c in d.get("/v1/contexts").json()["data"]] == [False, True]
    shown = good(contexts(d, "show", "tale"))
    assert f"tokens        {tokens}\n" in shown and "pinned        yes\n" in shown and "hits          0\n" in shown
    assert json.loads(good(contexts(d, "show", "tale", "-o", "json")))["name"] == "tale"
    assert good(contexts(d, "rm", "tale")) == ""
    for command in ("show", "pin", "unpin", "rm"):
        failed(contexts(d, command, "tale"), "no context named 'tale'")


def test_keys(start, contexts, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# mine\n\nfirst-key\nsecond-key\n")
    keys.chmod(0o600)
    d = start("--api-key-file", str(keys))
    failed(contexts(d, "list"), "API key is needed")
    assert good(contexts(d, "list", "--api-key-file", keys)).count("\n") == 1
    wrong = tmp_path / "wrong"
    wrong.write_text("third-key")
    wrong.chmod(0o600)
    failed(contexts(d, "list", "--api-key-file", wrong), "invalid API key")


def test_what_a_daemon_may_answer(contexts, tmp_path):
    """Something else listens there."""
    import http.server
    import threading

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        class There:
            port = server.server_port

        failed(contexts(There, "list"), "the answer is not the daemon's")
        server.shutdown()


def test_progress_bar(start, real_bin, tmp_path):
    """A bar on a terminal; elsewhere lines. Each byte of the text takes a millisecond."""
    daemon = start("-ub", "1")
    book = tmp_path / "book.txt"
    book.write_text("[[pace]]" + "x" * 2000)
    command = [real_bin, "contexts", "add", "-f", str(book), "--port", str(daemon.port), "--name"]
    plain = subprocess.run([*command, "plain"], capture_output=True, text=True, timeout=300)
    assert plain.returncode == 0 and "\r" not in plain.stderr and re.search(r"^plain: \d+ of 2016, \d+/s$", plain.stderr, re.M)
    book.write_text("[[pace]]" + "y" * 2000)
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*command, "bar"], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while more := os.read(ours, 65536):
            seen += more
    except OSError:  # its end
        pass
    os.close(ours)
    assert process.communicate()[0].startswith(b"bar: 2016 tokens") and process.returncode == 0
    assert b"\rbar [#" in seen and seen.endswith(b"\r\x1b[K")


def test_verify(kept, contexts, tmp_path):  # noqa: F811
    """Beside the daemon and without it; each kind of damage is told by its name."""
    daemon, state = kept(), tmp_path / "state"
    chat(daemon, [{"role": "system", "content": document(60)}, {"role": "user", "content": "Where is item 3?"}], max_tokens=4)
    until(lambda: resting(daemon), 300)
    beside = good(contexts(None, "verify", state))
    n = len(list(state.rglob("*.seg")))
    assert n >= 2 and f"{n} segments" in beside and ", 0 that cannot be used" in beside
    daemon.stop()
    assert good(contexts(None, "verify", "--state-dir", state)) == beside
    files = sorted(state.rglob("*.seg"), key=lambda p: p.stat().st_size)
    with open(files[-1], "r+b") as f:
        f.seek(files[-1].stat().st_size // 2)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 8]))
    os.truncate(files[0], files[0].stat().st_size - 1)
    (files[0].parent / "stray").write_text("x")
    os.mkfifo(files[0].parent / ("0" * 32 + ".seg"))
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in state.rglob("*")}
    result = contexts(None, "verify", state)
    assert result.returncode == 1
    assert f"{files[-1]}: checksum: " in result.stdout and f"{files[0]}: size: " in result.stdout
    assert f"{files[0].parent}/stray: kind: " in result.stdout and "4 that cannot be used" in result.stdout
    assert before == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in state.rglob("*")}  # nothing is changed
