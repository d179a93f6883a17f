"""Requests that a proxy in front may read differently than libmicrohttpd does: all are refused and the connection closed."""

import re
import socket

import pytest
from daemon import Daemon, exchange, receive_all

BODY = b'{"prompt":"[[say:a]]"}'
LENGTH = b"Content-Length: %d" % len(BODY)
JSON = b"Content-Type: application/json"
HOST = b"Host: localhost"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(*headers, line=b"POST /v1/completions HTTP/1.1", body=BODY, rest=b""):
    return line + b"\r\n" + b"\r\n".join(headers) + b"\r\n\r\n" + body + rest


CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)

ATTACKS = {
    "length and chunks": post(HOST, JSON, LENGTH, b"Transfer-Encoding: chunked", body=CHUNKED),
    "chunks and length": post(HOST, JSON, b"Transfer-Encoding: chunked", b"Content-Length: 5", body=CHUNKED),
    "two lengths": post(HOST, JSON, LENGTH, b"Content-Length: 5"),
    "two equal lengths": post(HOST, JSON, LENGTH, LENGTH),
    "length with a sign": post(HOST, JSON, b"Content-Length: +%d" % len(BODY)),
    "negative length": post(HOST, JSON, b"Content-Length: -1"),
    "length in hex": post(HOST, JSON, b"Content-Length: 0x16"),
    "length list": post(HOST, JSON, b"Content-Length: %d, %d" % (len(BODY), len(BODY))),
    "huge length": post(HOST, JSON, b"Content-Length: 99999999999999999999999"),
    "unknown encoding": post(HOST, JSON, b"Transfer-Encoding: gzip, chunked", body=CHUNKED),
    "two encodings": post(HOST, JSON, b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", body=CHUNKED),
    "encoding with a tail": post(HOST, JSON, b"Transfer-Encoding: chunked;x", body=CHUNKED),
    "old version with chunks": post(HOST, JSON, b"Transfer-Encoding: chunked", line=b"POST /v1/completions HTTP/1.0", body=CHUNKED),
    "two hosts": post(HOST, HOST, JSON, LENGTH),
    "no host": post(JSON, LENGTH),
    "blank before a colon": post(b"Host : localhost", JSON, LENGTH),
    "blank before a length's colon": post(HOST, JSON, b"Content-Length : 5"),
    "encoding with a blank": post(HOST, JSON, b"Transfer-Encoding : chunked", LENGTH),
    "control character in a name": post(HOST, b"X\x01Y: a", JSON, LENGTH),
    "control character in a value": post(HOST, b"X: a\x01b", JSON, LENGTH),
    "NUL in a path": post(HOST, JSON, LENGTH, line=b"POST /v1/completions%00x HTTP/1.1"),
    "not a path": post(HOST, JSON, LENGTH, line=b"POST v1/completions HTTP/1.1"),
    "unknown version": post(HOST, JSON, LENGTH, line=b"POST /v1/completions HTTP/1.7"),
}


@pytest.mark.parametrize("data", ATTACKS.values(), ids=ATTACKS.keys())
def test_refused(fake, data):
    """400 (or 413: a length past all bounds), once: what follows is not taken for another request."""
    got = exchange(fake.port, data + SMUGGLED)
    codes = set(re.findall(rb"HTTP/1\.\d (\d\d\d) ", got))  # libmicrohttpd 0.9.75 sends its own refusal of a bad length with two heads
    assert codes in ({b"400"}, {b"413"}) and b"owned_by" not in got, got
    assert fake.get("/health").status_code == 200


def test_the_plain_ones_are_fine(fake):
    for data in (post(HOST, JSON, LENGTH, b"Connection: close"), post(HOST, JSON, b"Transfer-Encoding: chunked", b"Connection: close", body=CHUNKED),
                 post(JSON, LENGTH, line=b"POST /v1/completions HTTP/1.0")):  # fmt: skip
        got = exchange(fake.port, data)
        assert b" 200 " in got.split(b"\r\n")[0] and b'"text":"a"' in got


def test_pipelined(fake):
    """Two requests in one packet: two answers, in order."""
    got = exchange(fake.port, post(HOST, JSON, LENGTH) + post(HOST, JSON, LENGTH, b"Connection: close"))
    assert got.count(b"HTTP/1.1 200") == 2 and got.count(b'"text":"a"') == 2


def test_head_too_large(fake):
    got = exchange(fake.port, post(HOST, b"X: " + b"x" * 60000, JSON, LENGTH))
    assert got.startswith((b"HTTP/1.1 431", b"HTTP/1.1 413"))
    got = exchange(fake.port, post(HOST, line=b"GET /" + b"x" * 60000 + b" HTTP/1.1", body=b""))
    assert got.startswith((b"HTTP/1.1 414", b"HTTP/1.1 431"))


@pytest.mark.parametrize(
    "garbage", [b"\x00" * 100 + b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 200 + b"\r\n\r\n", b"GET\r\n\r\n", b"\r\n" * 50]
)
def test_garbage(fake, garbage):
    with fake.connect() as s:
        s.sendall(garbage)
        s.shutdown(socket.SHUT_WR)
        receive_all(s)
    assert fake.get("/health").status_code == 200


@pytest.mark.parametrize("host, good", [
    (b"localhost", True), (b"LOCALHOST:8080", True), (b"127.0.0.1", True), (b"127.0.0.1:1", True), (b"[::1]:8080", True), (b"192.168.1.7:8080", True),
    (b"evil.example", False), (b"evil.example:8080", False), (b"localhost.evil.example", False), (b"127.0.0.1.evil.example", False), (b"localhost:x", False),
    (b"localhost:123456", False), (b"", False), (b"[::1", False), (b"a.example", True), (b"A.example:99", True), (b"b.example:81", True),
    (b"b.example:82", False), (b"b.example", False),
])  # fmt: skip
def test_host(named, host, good):
    """A name that a stranger can point here (DNS rebinding) is not served."""
    got = exchange(named.port, post(b"Host: " + host, JSON, LENGTH, b"Connection: close"))
    assert got.startswith(b"HTTP/1.1 200" if good else b"HTTP/1.1 403"), got
    assert good or b"--allowed-hosts" in got


@pytest.mark.parametrize("data", [
    post(HOST, b"Origin: http://evil.example", JSON, LENGTH, b"Connection: close"),
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\nConnection: close\r\n\r\n",
    b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\n"
    b"Access-Control-Request-Headers: content-type\r\nConnection: close\r\n\r\n",
], ids=["post", "get", "preflight"])  # fmt: skip
def test_no_page_of_others_may_read(fake, data):
    """Nothing lets a browser give another site's page what is answered, or send JSON for it (CORS)."""
    got = exchange(fake.port, data)
    assert got.startswith(b"HTTP/1.1 ") and b"access-control" not in got.lower()
    assert not data.startswith(b"OPTIONS") or not got.startswith(b"HTTP/1.1 2")


@pytest.fixture(scope="module")
def named(fake_bin, fake_model):
    d = Daemon(fake_bin, fake_model, "--allowed-hosts", "a.example, b.example:81")
    yield d
    assert d.stop() == 0
