"""Start, loading, keys, end of the daemon; clients that are slow, many, or gone."""

import os
import signal
import socket
import subprocess
import threading

import pytest
import requests
from daemon import events, exchange, receive_all, request_bytes, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def run_until_it_ends(binary, *args, env=None):
    return subprocess.run([binary, "serve", *args], capture_output=True, text=True, timeout=120, env={**os.environ, **(env or {})})


@pytest.fixture
def cancel_log(tmp_path):
    path = tmp_path / "cancelled"
    path.write_text("")
    return path


class Call(threading.Thread):
    """A request on a thread of its own."""

    def __init__(self, daemon, path, body, **kw):
        super().__init__()
        self.call, self.answer = lambda: daemon.post(path, body, **kw), None
        self.start()

    def run(self):
        self.answer = self.call()

    def result(self):
        self.join()
        return self.answer


def waiting(daemon):
    m = daemon.metrics()
    return m["llamacpp:requests_processing"], m["llamacpp:requests_deferred"]


# ---- start


def test_loading(start, tmp_path):
    gate = tmp_path / "loaded"
    d = start(env={"FAKE_LOAD_GATE": str(gate)}, wait=False)
    for path in ("/health", "/v1/health", "/v1/models", "/props", "/metrics"):
        a = d.get(path)
        assert a.status_code == 503
        assert a.json() == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error", "param": None}}
    a = d.post(CHAT, {"messages": [{"role": "user", "content": "x"}]})
    assert a.status_code == 503 and "Retry-After" in a.headers
    assert d.get("/nothing").status_code == 404
    gate.touch()
    d.wait_ready()
    assert d.post(TEXT, {"prompt": "[[say:a]]"}).status_code == 200


def test_end_while_loading(start, tmp_path):
    d = start(env={"FAKE_LOAD_GATE": str(tmp_path / "never")}, wait=False)
    assert d.stop() == 0


def test_missing_model(fake_bin, tmp_path):
    r = run_until_it_ends(fake_bin, "-m", str(tmp_path / "none.gguf"), "--port", "0")
    assert r.returncode == 1 and "none.gguf" in r.stderr and "No such file" in r.stderr
    r = run_until_it_ends(fake_bin, "--port", "0")
    assert r.returncode != 0 and "-m" in r.stderr


def test_port_in_use(fake_bin, fake_model):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        r = run_until_it_ends(fake_bin, "-m", fake_model, "--port", str(port))
    assert r.returncode == 1 and f"port {port} on 127.0.0.1 is in use" in r.stderr and "--port" in r.stderr


def test_bad_address(fake_bin, fake_model):
    r = run_until_it_ends(fake_bin, "-m", fake_model, "--host", "no.such.host.invalid")
    assert r.returncode == 1 and "no.such.host.invalid" in r.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_public_address_needs_a_key(fake_bin, fake_model, host):
    r = run_until_it_ends(fake_bin, "-m", fake_model, "--host", host, "--port", "0")
    assert r.returncode == 1 and "--api-key-file" in r.stderr


def test_tells_systemd(start, tmp_path):
    """Ready when the model is loaded, alive after that, stopping at the end."""
    gate = tmp_path / "loaded"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(str(tmp_path / "notify"))
        s.settimeout(60)

        def wait_for(what):
            got = ""
            while what not in got:
                got = s.recv(4096).decode()
            return got

        d = start(env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "4000000", "FAKE_LOAD_GATE": str(gate)}, wait=False)
        assert "READY" not in wait_for("EXTEND_TIMEOUT_USEC=")
        gate.touch()
        wait_for("READY=1")
        for _ in range(3):
            wait_for("WATCHDOG=1")
        call = Call(d, TEXT, {"prompt": "[[pace]]", "max_tokens": 3500})
        until(lambda: waiting(d)[0] == 1)
        wait_for("WATCHDOG=1")  # while it computes, too
        assert call.result().status_code == 200
        assert d.stop() == 0
        wait_for("STOPPING=1")


# ---- keys


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# a comment\nsecret-one\n\n  secret-two  \r\n")
    path.chmod(0o600)
    return path


def test_keys(start, key_file):
    d = start("--api-key-file", str(key_file))
    assert d.get("/health").status_code == 200
    good = [{"Authorization": "Bearer secret-one"}, {"Authorization": "bearer secret-two"}, {"X-Api-Key": "secret-two"}]
    bad = [{}, {"Authorization": "Bearer secret"}, {"Authorization": "secret-one"}, {"X-Api-Key": "secret-one "+"x"}, {"Authorization": "Bearer "},
           {"Authorization": "Bearer # a comment"}, {"Authorization": "Bearer secret-one\tx"}]  # fmt: skip
    for headers in good:
        assert d.get("/v1/models", headers=headers).status_code == 200
        assert d.post(TEXT, {"prompt": "[[say:a]]"}, headers=headers).status_code == 200
    for headers in bad:
        for a in (d.get("/v1/models", headers=headers), d.post(TEXT, {"prompt": "x"}, headers=headers), d.get("/nothing", headers=headers),
                  d.get("/metrics", headers=headers)):  # fmt: skip
            assert a.status_code == 401 and a.json()["error"]["type"] == "authentication_error"
            assert a.headers["WWW-Authenticate"] == "Bearer"
    assert not any("secret" in line for line in d.lines)


def test_what_counts_over_all_keys_is_for_the_first(start, key_file):
    first, second = ({"X-Api-Key": "secret-" + k} for k in ("one", "two"))

    def of_props(d, headers):
        p = d.get("/props", headers=headers).json()
        assert {"model", "scratch", "kv_bytes_per_token"} <= p["memory"].keys() and p["total_slots"] == 1
        return {"cache", "index_pending"} & p.keys() | {"cache", "index"} & p["memory"].keys()

    d = start("--api-key-file", str(key_file))
    assert "retrievald_cache_hits_total" in d.get("/metrics", headers=first).text
    a = d.get("/metrics", headers=second)
    assert a.status_code == 403 and a.json()["error"]["type"] == "permission_error" and "first key" in a.json()["error"]["message"]
    assert of_props(d, first) == {"cache", "index", "index_pending"} and of_props(d, second) == set()
    assert "hits" not in d.get("/health").text
    d.stop()
    d = start("--api-key-file", str(key_file), "--cache-shared", "on")  # nothing is one key's alone
    assert d.get("/metrics", headers=second).status_code == 200 and of_props(d, second) == {"cache", "index", "index_pending"}


def test_a_key_opens_a_public_address(start, key_file):
    d = start("--host", "0.0.0.0", "--api-key-file", str(key_file))
    assert d.get("/v1/models", headers={"X-Api-Key": "secret-one"}).status_code == 200
    assert d.get("/v1/models").status_code == 401


def test_bad_key_files(fake_bin, fake_model, key_file, tmp_path):
    def refused(path):
        r = run_until_it_ends(fake_bin, "-m", fake_model, "--port", "0", "--api-key-file", str(path))
        assert r.returncode == 1, r.stderr
        return r.stderr

    for mode in (0o644, 0o640, 0o604, 0o660):
        key_file.chmod(mode)
        assert "chmod 600" in refused(key_file)
    key_file.chmod(0o600)
    key_file.write_text("# nothing\n\n")
    assert "no key" in refused(key_file)
    key_file.write_text("k" * 2000)
    assert "1024" in refused(key_file)
    assert "No such file" in refused(tmp_path / "none")
    assert "regular" in refused(tmp_path)


# ---- queue


def test_queue_is_bounded(start):
    d = start("--max-queue", "2")
    with d.connect() as running, d.connect() as second, d.connect() as third:
        for s in (running, second, third):
            s.sendall(request_bytes(TEXT, {"prompt": "[[hang]]"}))
            # One after the other: what is asked is that the fourth is refused, whoever comes first.
        until(lambda: waiting(d) == (1, 2))
        for stream in (False, True):
            a = d.post(TEXT, {"prompt": "[[say:a]]", "stream": stream})
            assert a.status_code == 429 and int(a.headers["Retry-After"]) > 0
            assert a.json()["error"]["type"] == "rate_limit_error" and "queue is full" in a.json()["error"]["message"]
        # What does not generate is not in that queue.
        assert d.post("/tokenize", {"content": "x"}).status_code == 200
    until(lambda: waiting(d) == (0, 0))
    assert d.post(TEXT, {"prompt": "[[say:a]]"}).status_code == 200


def test_waiting_requests_are_answered_in_order(start, tmp_path):
    gate = tmp_path / "go"
    d = start()
    first = Call(d, TEXT, {"prompt": f"[[gate:{gate}]]", "max_tokens": 5})
    until(lambda: waiting(d)[0] == 1)
    rest = []
    for i in range(5):
        rest.append(Call(d, TEXT, {"prompt": f"[[say:{i}]]"}))
        until(lambda: waiting(d) == (1, len(rest)))
    gate.touch()
    assert first.result().json()["choices"][0]["text"] == "tick "
    for i, call in enumerate(rest):
        assert call.result().json()["choices"][0]["text"] == str(i)


# ---- cancel


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["[[hang]]", "[[gate:/nonexistent/gate]]"], ids=["prefill", "decode"])
def test_cancel_running(start, cancel_log, how, stream, prompt):
    d = start(env={"FAKE_CANCEL_LOG": str(cancel_log)})
    with d.connect() as s:
        s.sendall(request_bytes(TEXT, {"prompt": prompt, "stream": stream}))
        until(lambda: waiting(d)[0] == 1)
        if how == "half-close":
            s.shutdown(socket.SHUT_WR)
            until(lambda: waiting(d)[0] == 0)
        if how == "reset":
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    until(lambda: cancel_log.read_text().startswith("cancelled"))
    until(lambda: d.metrics()["retrievald_requests_cancelled_total"] == 1)
    assert d.post(TEXT, {"prompt": "[[say:a]]"}).json()["choices"][0]["text"] == "a"


def test_cancel_while_tokens_come(start, cancel_log):
    """The answer has no end but the context's; the client leaves after some of it."""
    d = start("-c", "100000", env={"FAKE_CANCEL_LOG": str(cancel_log)})
    with requests.post(d.base + TEXT, json={"prompt": "[[pace]]", "stream": True, "logprobs": 20}, stream=True, timeout=60) as a:
        for _, e in zip(range(10), events(a)):
            assert e["choices"][0]["text"]
    until(lambda: "cancelled" in cancel_log.read_text())
    assert d.metrics()["llamacpp:tokens_predicted_total"] < 99000
    assert d.post(TEXT, {"prompt": "[[say:a]]"}).status_code == 200


def test_cancel_queued(start, cancel_log):
    """Each frees the one place that there is."""
    d = start("--max-queue", "1", env={"FAKE_CANCEL_LOG": str(cancel_log)})
    with d.connect() as running:
        running.sendall(request_bytes(TEXT, {"prompt": "[[hang]]"}))
        until(lambda: waiting(d)[0] == 1)
        for how in ("close", "half-close"):
            for stream in (False, True):
                with d.connect() as s:
                    s.sendall(request_bytes(TEXT, {"prompt": "[[hang]] queued", "stream": stream}))
                    until(lambda: waiting(d)[1] == 1)
                    if how == "half-close":
                        s.shutdown(socket.SHUT_WR)
                        until(lambda: waiting(d)[1] == 0)
                until(lambda: waiting(d)[1] == 0)
        assert waiting(d) == (1, 0) and cancel_log.read_text() == ""  # the engine never saw them
    until(lambda: waiting(d) == (0, 0))


def test_what_was_prefilled_stays(start):
    """A retry after a cancel goes on from there."""
    d = start()
    prompt = "[[gate:/nonexistent/gate]]" + "d" * 300
    with d.connect() as s:
        s.sendall(request_bytes(TEXT, {"prompt": prompt}))
        until(lambda: waiting(d)[0] == 1)
    until(lambda: waiting(d)[0] == 0)
    a = d.post(TEXT, {"prompt": prompt + "[[say:a]]" + "[[gate:/]]"}).json()
    assert a["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) + 1


def test_silent_streams_ping(start, tmp_path):
    """Headers at once, comments while nothing else is to be said: running and queued."""
    gate = tmp_path / "go"
    d = start()
    with d.connect() as running, d.connect() as queued:
        running.sendall(request_bytes(TEXT, {"prompt": f"[[gate:{gate}]]", "max_tokens": 2, "stream": True}, "Connection: close"))
        until(lambda: waiting(d)[0] == 1)
        queued.sendall(request_bytes(TEXT, {"prompt": "[[say:a]]", "stream": True}, "Connection: close"))
        for s in (running, queued):
            got = b""
            while b":\n\n" not in got:
                got += s.recv(4096)
            assert got.startswith(b"HTTP/1.1 200") and b"text/event-stream" in got
        gate.touch()
        assert b"[DONE]" in receive_all(running)
        assert b"[DONE]" in receive_all(queued)


def test_a_client_that_does_not_read(start, cancel_log):
    """Its answer grows past what is kept for it: it is given up, and others go on."""
    d = start("-c", "2000000", env={"FAKE_CANCEL_LOG": str(cancel_log)})
    with d.connect() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.sendall(request_bytes(TEXT, {"prompt": "x", "stream": True, "logprobs": 20}))
        until(lambda: "cancelled" in cancel_log.read_text(), 120)
        assert d.post(TEXT, {"prompt": "[[say:a]]"}).status_code == 200


# ---- slow and many clients


def test_slow_body(fake):
    """Byte by byte, and others meanwhile."""
    data = request_bytes(TEXT, {"prompt": "[[say:hi]]"}, "Connection: close")
    with fake.connect() as s:
        for i in range(len(data)):
            s.sendall(data[i : i + 1])
            if i % 50 == 0:
                assert fake.get("/health").status_code == 200
        assert b'"text":"hi"' in receive_all(s)


def test_dribbled_head(fake):
    """Byte after byte keeps a connection from being idle; its head must be complete in time all the same."""
    wait = threading.Event()
    with fake.connect() as s:
        s.settimeout(0.01)
        s.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        closed = False
        while not closed:
            wait.wait(0.2)
            try:
                s.sendall(b"x")
                closed = s.recv(4096) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
    assert fake.get("/health").status_code == 200


def test_idle_connections_end(start):
    d = start("--timeout", "1")
    with d.connect() as silent, d.connect() as half, d.connect() as used:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        used.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for s in (silent, half, used):
            receive_all(s)  # returns: the server closed


def test_timeout_does_not_end_a_running_request(start, tmp_path):
    """The connection waits for longer than --timeout: three pings' time is not needed, two seconds are."""
    gate = tmp_path / "go"
    d = start("--timeout", "1")
    with d.connect() as idle:
        call = Call(d, TEXT, {"prompt": f"[[gate:{gate}]]", "max_tokens": 2})
        until(lambda: waiting(d)[0] == 1)
        receive_all(idle)  # a connection that came at that time has timed out by now
    with d.connect() as idle:
        receive_all(idle)
    gate.touch()
    assert call.result().json()["choices"][0]["text"] == "ti"


def test_connection_limit(start):
    d = start("--max-connections", "4")
    held = [d.connect() for _ in range(4)]
    for s in held:
        s.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert s.recv(100).startswith(b"HTTP/1.1 200")
    held.pop().close()
    assert d.get("/health").status_code == 200
    for s in held:
        s.close()
    assert d.get("/health").status_code == 200


def test_many_at_once(start):
    d = start("--max-queue", "100")
    calls = [Call(d, CHAT, {"messages": [{"role": "user", "content": f"[[say:answer {i}]]"}], "stream": False}) for i in range(40)]
    for i, c in enumerate(calls):
        assert c.result().json()["choices"][0]["message"]["content"] == f"answer {i}"


# ---- end


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_drain(start, tmp_path, sig):
    """Running and waiting requests are finished, new ones are not taken, the status is 0."""
    gate = tmp_path / "go"
    d = start()
    running = Call(d, TEXT, {"prompt": f"[[gate:{gate}]]", "max_tokens": 10})
    until(lambda: waiting(d)[0] == 1)
    queued = Call(d, TEXT, {"prompt": "[[say:queued]]"})
    kept = requests.Session()
    assert kept.get(d.base + "/health", timeout=60).status_code == 200
    until(lambda: waiting(d) == (1, 1))
    with d.connect() as s:
        s.sendall(request_bytes(TEXT, {"prompt": "[[say:streamed]]", "stream": True}))
        until(lambda: waiting(d) == (1, 2))
        d.process.send_signal(sig)
        until(lambda: any("finishing 3 requests" in line for line in d.lines))
        with pytest.raises(requests.exceptions.ConnectionError):
            d.get("/health")
        a = kept.get(d.base + "/v1/models", timeout=60)
        assert a.status_code == 503 and "shutting down" in a.json()["error"]["message"] and a.headers["Connection"] == "close"
        gate.touch()
        assert running.result().json()["choices"][0]["text"] == "tick tick "
        assert queued.result().json()["choices"][0]["text"] == "queued"
        assert b"[DONE]" in receive_all(s)
    assert d.join() == 0


def test_second_signal_ends_at_once(start):
    d = start()
    with d.connect() as s:
        s.sendall(request_bytes(TEXT, {"prompt": "[[hang]]"}))
        until(lambda: waiting(d)[0] == 1)
        d.process.send_signal(signal.SIGTERM)
        until(lambda: any("finishing 1 requests" in line for line in d.lines))
        assert d.process.poll() is None
        d.process.send_signal(signal.SIGTERM)
        assert d.join() == 0
        assert receive_all(s) == b""


def test_hanging_requests_are_cancelled_at_the_limit(start, cancel_log):
    """A request that does not end in time is answered with an error: whole, streamed, and queued."""
    d = start(env={"FAKE_CANCEL_LOG": str(cancel_log)})
    with d.connect() as stream:
        stream.sendall(request_bytes(TEXT, {"prompt": "[[gate:/nonexistent/gate]]", "stream": True}))
        until(lambda: waiting(d)[0] == 1)
        queued = Call(d, TEXT, {"prompt": "[[hang]]"})
        until(lambda: waiting(d) == (1, 1))
        assert d.stop() == 0
        assert b'"error":{"code":503' in receive_all(stream)
    a = queued.result()
    assert a.status_code == 503 and "shutting down" in a.json()["error"]["message"]
    assert cancel_log.read_text().count("cancelled") == 1


def test_version_one_client(fake):
    got = exchange(fake.port, b"GET /health HTTP/1.0\r\n\r\n")
    assert b" 200 " in got.split(b"\r\n")[0]
    body = b'{"prompt":"[[say:hi]]","stream":true}'
    got = exchange(fake.port, b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert got.endswith(b"data: [DONE]\n\n")
