"""What is wrong gets a clear answer in OpenAI's error shape, and the daemon goes on."""

import json

import pytest
import requests
from daemon import exchange, request_bytes

CHAT, TEXT, TOKENIZE, DETOKENIZE, TEMPLATE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/apply-template"
USER = [{"role": "user", "content": "x"}]


def raw(daemon, path, data, content_type="application/json"):
    return requests.post(daemon.base + path, data=data, headers={"Content-Type": content_type} if content_type else {}, timeout=120)


def check_error(answer, status, *words, type="invalid_request_error", param=None):
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"].startswith("application/json")
    e = answer.json()["error"]
    assert e["code"] == status and e["type"] == type
    for word in words:
        assert word in e["message"], e["message"]
    if param:
        assert e["param"] == param, e
    return e


# What is sent, and what the message says: what is wrong and where.
NOT_JSON = [
    (b"", ["empty"]),
    (b"   ", ["empty"]),
    (b"hello", ["line 1, column 1"]),
    (b'{"prompt": "x"', ["line 1, column 15"]),
    (b'{"prompt": "x"}}', ["after the end", "byte 15"]),
    (b'{"prompt": "x"} x', ["after the end"]),
    (b'{\n  "prompt": "x",\n  "seed": 01\n}', ["line 3, column 11"]),
    (b'{"prompt": "x",}', ["member name"]),
    (b"{'prompt': 'x'}", ["member name"]),
    (b'{"prompt" "x"}', ["':'"]),
    (b'{"prompt": ["x" "y"]}', ["','"]),
    (b'{"temperature": NaN}', ["byte 16"]),
    (b'{"temperature": Infinity}', ["byte 16"]),
    (b'{"temperature": -Infinity}', ["number", "byte 16"]),
    (b'{"temperature": 1e999}', ["too large"]),
    (b'{"temperature": .5}', ["byte 16"]),
    (b'{"temperature": +5}', ["byte 16"]),
    (b'{"temperature": 5.}', ["malformed number"]),
    (b'{"temperature": 0x10}', ["byte 17"]),
    (b'{"temperature": ' + b"1" * 100 + b"}", ["60 characters"]),
    (b'{"prompt": "a\nb"}', ["control character"]),
    (b'{"prompt": "\xff"}', ["UTF-8", "byte 12"]),
    (b'{"prompt": "\xc0\xaf"}', ["UTF-8"]),  # overlong
    (b'{"prompt": "\xed\xa0\x80"}', ["UTF-8"]),  # a surrogate
    (b'{"prompt": "\xf4\x90\x80\x80"}', ["UTF-8"]),  # past U+10FFFF
    (b'{"prompt": "\xe6\xbc"}', ["UTF-8"]),  # cut short
    (b"\xef\xbb\xbf{}", ["byte 0"]),  # byte order mark
    (b'{"prompt": "a\\u0000b"}', ["\\u0000"]),
    (b'{"prompt": "\\ud800"}', ["surrogate"]),
    (b'{"prompt": "\\ud800\\u0041"}', ["surrogate"]),
    (b'{"prompt": "\\udc00"}', ["surrogate"]),
    (b'{"prompt": "\\u12"}', ["\\u escape"]),
    (b'{"prompt": "\\x41"}', ["escape"]),
    (b'{"prompt": "x\x00y"}', ["control character"]),
    (b'{"a":' * 65 + b"1" + b"}" * 65, ["64 levels"]),
    (b"[" * 100000, ["64 levels"]),
    (b"[" + b"[],".replace(b"]", b"]") * 10 + b"]", ["byte 31"]),
    (b"[1, 2]", ["must be a JSON object", "array"]),
    (b'"text"', ["must be a JSON object", "string"]),
    (b"12", ["must be a JSON object", "number"]),
    (b"null", ["must be a JSON object", "null"]),
]


@pytest.mark.parametrize("body, words", NOT_JSON, ids=[repr(b[:30]) for b, _ in NOT_JSON])
def test_not_json(fake, body, words):
    for path in (TEXT, CHAT, TOKENIZE):
        check_error(raw(fake, path, body), 400, *words)


def test_nesting_of_64_is_fine(fake):
    assert raw(fake, TEXT, b'{"prompt":"[[say:a]]","x":' + b"[" * 63 + b"]" * 63 + b"}").status_code == 200


WRONG = [
    ({"prompt": 1}, "prompt", ["string or an array", "a number"]),
    ({"prompt": {}}, "prompt", ["an object"]),
    ({}, "prompt", ["missing"]),
    ({"prompt": ""}, "prompt", ["empty"]),
    ({"prompt": []}, "prompt", ["empty"]),
    ({"prompt": ["a", "b"]}, "prompt", ["several prompts", "not supported yet"]),
    ({"prompt": [[1], [2]]}, "prompt", ["several prompts"]),
    ({"prompt": [1, "a"]}, "prompt", ["[1]", "token id"]),
    ({"prompt": [1, -1]}, "prompt", ["[1]", "0 to 258"]),
    ({"prompt": [259]}, "prompt", ["[0]"]),
    ({"prompt": [1.5]}, "prompt", ["[0]"]),
    ({"prompt": "x", "temperature": "0.5"}, "temperature", ["number from 0 to 100", "a string"]),
    ({"prompt": "x", "temperature": -1}, "temperature", ["not -1"]),
    ({"prompt": "x", "temperature": True}, "temperature", ["a boolean"]),
    ({"prompt": "x", "top_p": 1.5}, "top_p", ["0 to 1"]),
    ({"prompt": "x", "min_p": -0.5}, "min_p", []),
    ({"prompt": "x", "top_k": 1.5}, "top_k", ["whole number"]),
    ({"prompt": "x", "seed": "1"}, "seed", ["whole number"]),
    ({"prompt": "x", "seed": 1e300}, "seed", []),
    ({"prompt": "x", "presence_penalty": 3}, "presence_penalty", []),
    ({"prompt": "x", "frequency_penalty": -3}, "frequency_penalty", []),
    ({"prompt": "x", "repeat_penalty": 0}, "repeat_penalty", []),
    ({"prompt": "x", "max_tokens": "10"}, "max_tokens", ["whole number", "a string"]),
    ({"prompt": "x", "max_tokens": -2}, "max_tokens", []),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", []),
    ({"prompt": "x", "max_completion_tokens": []}, "max_completion_tokens", []),
    ({"prompt": "x", "stream": 1}, "stream", ["true or false", "a number"]),
    ({"prompt": "x", "stream": "true"}, "stream", []),
    ({"prompt": "x", "stream_options": []}, "stream_options", ["an object"]),
    ({"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage", []),
    ({"prompt": "x", "cache_prompt": 0}, "cache_prompt", []),
    ({"prompt": "x", "model": 5}, "model", ["string"]),
    ({"prompt": "x", "model": "m" * 200}, "model", ["127"]),
    ({"prompt": "x", "stop": 5}, "stop", ["array of strings"]),
    ({"prompt": "x", "stop": ["a", 5]}, "stop", []),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop", ["at most 16"]),
    ({"prompt": "x", "stop": "s" * 1025}, "stop", ["1024"]),
    ({"prompt": "x", "logprobs": True}, "logprobs", ["0 to 20"]),
    ({"prompt": "x", "logprobs": 21}, "logprobs", ["0 to 20"]),
    ({"prompt": "x", "attention": "full"}, "attention", ["an object"]),
    ({"prompt": "x", "attention": {"mode": "fast"}}, "attention.mode", ["full, streaming, flat, cluster, ivf, graph or auto", "fast"]),
    ({"prompt": "x", "attention": {"mode": 1}}, "attention.mode", []),
    ({"prompt": "x", "attention": {"budget": "quick"}}, "attention.budget", ["fast, default or precise", "quick"]),
    ({"prompt": "x", "attention": {"budget": 8}}, "attention.budget", []),
    ({"prompt": "x", "attention": {"top_k": -1}}, "attention.top_k", []),
    ({"prompt": "x", "attention": {"beta": "x"}}, "attention.beta", []),
    ({"prompt": "x", "attention": {"beta": 0}}, "attention.beta", []),
    ({"prompt": "x", "attention": {"k_max": 0}}, "attention.k_max", []),
    ({"prompt": "x", "attention": {"estimate": "off"}}, "attention.estimate", []),
    ({"prompt": "x", "attention": {"n_sink": 1e12}}, "attention.n_sink", []),
    ({"prompt": "x", "attention": {"n_local": 0}}, "attention.n_local", []),
    # not there yet
    ({"prompt": "x", "n": 2}, "n", ["not supported yet"]),
    ({"prompt": "x", "n": 0}, "n", []),
    ({"prompt": "x", "best_of": 2}, "best_of", ["not supported yet"]),
    ({"prompt": "x", "echo": True}, "echo", ["not supported yet"]),
    ({"prompt": "x", "suffix": "s"}, "suffix", ["not supported yet"]),
    ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias", ["not supported yet"]),
    ({"prompt": "x", "grammar": "root ::= x"}, "grammar", ["not supported yet"]),
    ({"prompt": "x", "json_schema": {"type": "object"}}, "json_schema", ["not supported yet"]),
    ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format", ["not supported yet"]),
    ({"prompt": "x", "response_format": {"type": 1}}, "response_format.type", []),
    ({"prompt": "x", "response_format": "json"}, "response_format", []),
]  # fmt: skip


@pytest.mark.parametrize("body, param, words", WRONG, ids=[json.dumps(b)[:60] for b, _, _ in WRONG])
def test_wrong_fields(fake, body, param, words):
    check_error(fake.post(TEXT, body), 400, *words, param=param)
    if body.get("stream") is None:  # before anything is sent: the same answer, not an event
        check_error(fake.post(TEXT, {**body, "stream": True}), 400, *words, param=param)


WRONG_CHAT = [
    ({}, "messages", ["missing"]),
    ({"messages": None}, "messages", ["missing"]),
    ({"messages": []}, "messages", ["empty"]),
    ({"messages": "hello"}, "messages", ["must be an array", "a string"]),
    ({"messages": [1]}, "messages", ["messages[0]"]),
    ({"messages": [{"content": "x"}]}, "messages", ["messages[0].role"]),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages", ["messages[0].role"]),
    ({"messages": [{"role": "user"}]}, "messages", ["messages[0].content"]),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", ["messages[0].content"]),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "messages", ["image_url", "not supported"]),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", ["not supported yet"]),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice", ["not supported yet"]),
    ({"messages": USER, "tool_choice": {"type": "function"}}, "tool_choice", ["not supported yet"]),
    ({"messages": USER, "functions": [{}]}, "functions", ["not supported yet"]),
    ({"messages": USER, "response_format": {"type": "json_schema"}}, "response_format", ["not supported yet"]),
    ({"messages": USER, "logprobs": 5}, "logprobs", ["true or false"]),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", ["0 to 20"]),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs", ["needs"]),
    ({"messages": USER, "chat_template_kwargs": 1}, None, ["chat_template_kwargs"]),
    ({"messages": USER, "n": 3}, "n", ["not supported yet"]),
]  # fmt: skip


@pytest.mark.parametrize("body, param, words", WRONG_CHAT, ids=[json.dumps(b)[:60] for b, _, _ in WRONG_CHAT])
def test_wrong_chat(fake, body, param, words):
    check_error(fake.post(CHAT, body), 400, *words, param=param)


@pytest.mark.parametrize(
    "path, body",
    [
        (TOKENIZE, {"content": 5}),
        (TOKENIZE, {"content": "x", "add_special": "yes"}),
        (TOKENIZE, {"content": "x", "with_pieces": 1}),
        (DETOKENIZE, {"tokens": "x"}),
        (DETOKENIZE, {"tokens": ["x"]}),
        (DETOKENIZE, {"tokens": [259]}),
        (DETOKENIZE, {"tokens": [-1]}),
        (DETOKENIZE, {"tokens": [1e300]}),
        (DETOKENIZE, {"tokens": [0.5]}),
        (TEMPLATE, {"messages": {}}),
        (TEMPLATE, {}),
    ],
)
def test_wrong_others(fake, path, body):
    check_error(fake.post(path, body), 400)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_prompt_over_the_context(fake, path):
    content = "x" * 5000
    body = {"prompt": content} if path == TEXT else {"messages": [{"role": "user", "content": content}]}
    for stream in (False, True):
        e = check_error(fake.post(path, {**body, "stream": stream}), 400, "context_length_exceeded", "exceeds the available context size",
                        type="exceed_context_size_error")  # fmt: skip
        assert e["n_prompt_tokens"] >= 5001 and e["n_ctx"] == 4096 and str(e["n_prompt_tokens"]) in e["message"]


def test_prompt_must_leave_room(start):
    d = start("-c", "64")
    assert d.post(TEXT, {"prompt": [65] * 63}).json()["usage"]["completion_tokens"] == 1
    for stream in (False, True):
        check_error(d.post(TEXT, {"prompt": [65] * 64, "stream": stream}), 400, type="exceed_context_size_error")


def test_content_type(fake):
    body = b'{"prompt":"[[say:a]]"}'
    for bad in (None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx", "application/js", "a", "multipart/form-data; boundary=a"):
        check_error(raw(fake, TEXT, body, bad), 415, "application/json")
    for good in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert raw(fake, TEXT, body, good).status_code == 200


def test_routes(fake):
    check_error(fake.get("/"), 404, type="not_found_error")
    check_error(fake.get("/v1/models/"), 404, type="not_found_error")
    check_error(fake.get("/V1/models"), 404, type="not_found_error")
    check_error(fake.get("/v1%2Fmodels"), 404, type="not_found_error")
    check_error(fake.post("/nothing", {}), 404, type="not_found_error")
    assert fake.get("/health?x=1").status_code == 200
    for path, allow in ((TEXT, "POST"), (CHAT, "POST"), (TOKENIZE, "POST")):
        a = fake.get(path)
        check_error(a, 405, "POST")
        assert a.headers["Allow"] == allow
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        a = requests.request(method, fake.base + "/v1/models", json={} if method == "POST" else None, timeout=60)
        check_error(a, 405)
        assert "GET" in a.headers["Allow"]
    a = requests.head(fake.base + "/v1/models", timeout=60)
    assert a.status_code == 200 and not a.content


def test_body_too_large(fake):
    """The limit of this daemon is 2 MiB. Announced, without Expect, with it, and in chunks without a length."""
    most = 2 << 20
    filler = b" " * (most - len(b'{"prompt":"[[say:a]]"}'))
    assert raw(fake, TEXT, filler + b'{"prompt":"[[say:a]]"}').status_code == 200
    a = exchange(fake.port, request_bytes(TEXT, b" ", "Expect: 100-continue").replace(b"Content-Length: 1\r", b"Content-Length: 999999999\r")[:-1])
    assert a.startswith(b"HTTP/1.1 413") and b"--max-body-mb" in a and b"100 Continue" not in a
    chunks = (b" " * 65536 for _ in range(most // 65536 + 1))
    check_error(requests.post(fake.base + TEXT, data=chunks, headers={"Content-Type": "application/json"}, timeout=120), 413)
    # Chunks without end: the connection is closed at last.
    with pytest.raises(requests.exceptions.ConnectionError):
        requests.post(fake.base + TEXT, data=(b" " * 65536 for _ in range(1000)), headers={"Content-Type": "application/json"}, timeout=120)
    assert fake.get("/health").status_code == 200


def test_chunked_body(fake):
    a = requests.post(fake.base + TEXT, data=iter([b'{"prompt":', b'"[[say:', b'hi]]"}']), headers={"Content-Type": "application/json"}, timeout=60)
    assert a.json()["choices"][0]["text"] == "hi"


def test_expect_continue(fake):
    body = b'{"prompt":"[[say:hi]]"}'
    with fake.connect() as s:
        head = request_bytes(TEXT, body, "Expect: 100-continue", "Connection: close")
        s.sendall(head[: -len(body)])
        assert s.recv(100).startswith(b"HTTP/1.1 100")
        s.sendall(body)
        got = b""
        while more := s.recv(65536):
            got += more
        assert got.startswith(b"HTTP/1.1 200") and b'"text":"hi"' in got


def test_many_values(fake):
    """A body cannot ask for much more memory than it brings."""
    body = b'{"prompt":[' + b"1," * 1000000 + b"1]}"
    check_error(raw(fake, TEXT, body), 400, type="exceed_context_size_error")


def test_still_alive(fake):
    assert fake.post(TEXT, {"prompt": "[[say:fine]]"}).json()["choices"][0]["text"] == "fine"
