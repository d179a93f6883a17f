"""Named contexts over HTTP, on the fake engine: its tokens are bytes and three control tokens, so prompts can be counted."""

import json
import threading

import openai
import pytest
import requests
from daemon import events, request_bytes, until
from test_life import Call

CHAT, TEXT, CONTEXTS = "/v1/chat/completions", "/v1/completions", "/v1/contexts"
BOOK = "It was the best of times, it was the worst of times. " * 10


def user(text):
    return {"role": "user", "content": text}


def make(daemon, name, status=202, **body):
    answer = daemon.post(CONTEXTS, {"name": name, **({} if {"text", "messages", "from"} & body.keys() else {"text": BOOK}), **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def show(daemon, name):
    return daemon.get(f"{CONTEXTS}/{name}")


def ready(daemon, name):
    until(lambda: show(daemon, name).json()["state"] == "ready")
    return show(daemon, name).json()


def change(daemon, method, name, body=None, **kw):
    return requests.request(method, f"{daemon.base}{CONTEXTS}/{name}", json=body, timeout=120, **kw)


def names(daemon, **kw):
    return [c["name"] for c in daemon.get(CONTEXTS, **kw).json()["data"]]


def error(answer, status, *parts, param=None):
    assert answer.status_code == status, answer.text
    e = answer.json()["error"]
    assert e["code"] == status and e["param"] == param
    for part in parts:
        assert part in e["message"], e["message"]
    return e


def prompt_tokens(answer):
    assert answer.status_code == 200, answer.text
    u = answer.json()["usage"]
    return u["prompt_tokens"], u["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def own(start):
    return start()


@pytest.fixture
def clock(tmp_path):
    class Clock:
        path = tmp_path / "clock"

        def set(self, seconds):
            new = tmp_path / "clock.new"
            new.write_text(str(seconds))
            new.rename(self.path)

    c = Clock()
    c.set(1000)
    return c


# ---- make, list, show, alter, remove


def test_life_of_a_name(own):
    made = make(own, "book", ttl="24h", pinned=True)
    assert made["object"] == "context" and made["name"] == "book" and made["state"] in ("queued", "reading", "ready")
    assert made["pinned"] and made["expires"] - made["created"] == 86400 and made["hits"] == 0 and made["source"] == "text" and made["error"] is None
    info = ready(own, "book")
    assert info["tokens"] == info["read"] == 1 + len("user\n" + BOOK + "\n\n")  # <|im_start|> is one token
    assert set(info["tiers"]) == {"ram", "disk"} and info["index"]["state"] in ("absent", "ready")
    make(own, "other", messages=[user("Hello")])
    assert names(own) == ["book", "other"]
    changed = change(own, "PATCH", "book", {"name": "tale", "ttl": None, "pinned": False}).json()
    assert changed["name"] == "tale" and changed["expires"] is None and not changed["pinned"] and changed["tokens"] == info["tokens"]
    error(show(own, "book"), 404, "no context named 'book'")
    assert change(own, "PATCH", "tale", {}).json()["name"] == "tale"
    gone = change(own, "DELETE", "tale")
    assert gone.status_code == 200 and gone.json() == {"object": "context.deleted", "name": "tale", "deleted": True}
    assert names(own) == ["other"]
    for answer in (change(own, "DELETE", "tale"), change(own, "PATCH", "tale", {}), show(own, "tale")):
        error(answer, 404, "tale")


def test_two_of_one_name(own):
    make(own, "a")
    tokens = ready(own, "a")["tokens"]
    error(own.post(CONTEXTS, {"name": "a", "text": "x"}), 409, "named a already", param="name")
    make(own, "a", text=BOOK + "x", replace=True)
    assert ready(own, "a")["tokens"] == tokens + 1
    make(own, "b")
    error(change(own, "PATCH", "b", {"name": "a"}), 409, param="name")
    assert names(own) == ["a", "b"]


def test_progress(own):
    got = own.stream(CONTEXTS, {"name": "book", "text": BOOK * 3})
    assert got[-1] == "[DONE]" and got[-2] == {**show(own, "book").json()}
    assert got[-2]["state"] == "ready"
    steps = [g for g in got[:-2] if g != ":"]
    assert steps and all(g["object"] == "context.progress" and g["name"] == "book" for g in steps)
    last = steps[-1]["prompt_progress"]
    assert last["processed"] == last["total"] == got[-2]["tokens"]


@pytest.mark.parametrize(
    "ttl, seconds", [(1, 1), (3600, 3600), ("90", 90), ("30s", 30), ("90m", 5400), ("24h", 86400), ("7d", 604800), (None, None)]
)
def test_ttl(fake, ttl, seconds):
    made = make(fake, "ttl", ttl=ttl, replace=True)
    assert made["expires"] == (made["created"] + seconds if seconds else None)


@pytest.mark.parametrize("ttl", [0, -1, 1.5, True, "", "h", "1x", "1hh", "-1h", " 1h", "0s", "99999999d", "9" * 40, 1e18, [1], {}])
def test_bad_ttl(fake, ttl):
    error(fake.post(CONTEXTS, {"name": "bad-ttl", "text": BOOK, "ttl": ttl}), 400, "ttl", param="ttl")
    assert "bad-ttl" not in names(fake)


@pytest.mark.parametrize(
    "body, param",
    [
        ({"text": "x"}, "name"),
        ({"name": "n"}, None),
        ({"name": "n", "text": "x", "from": "y"}, None),
        ({"name": "n", "text": ""}, "text"),
        ({"name": "n", "text": ["x"]}, "text"),
        ({"name": "n", "messages": []}, "messages"),
        ({"name": "n", "messages": "x"}, "messages"),
        ({"name": "n", "messages": [5]}, "messages"),
        ({"name": "n", "text": "x" * 5000}, "text"),
        ({"name": "", "text": "x"}, "name"),
        ({"name": 5, "text": "x"}, "name"),
        ({"name": "a b", "text": "x"}, "name"),
        ({"name": "../x", "text": "x"}, "name"),
        ({"name": "ü", "text": "x"}, "name"),
        ({"name": "n" * 65, "text": "x"}, "name"),
        ({"name": "n", "text": "x", "pinned": 1}, "pinned"),
    ],
)
def test_bad_requests(fake, body, param):
    error(fake.post(CONTEXTS, body), 400, param=param)
    assert "n" not in names(fake)


def test_routes(fake):
    for method, path, allow in (("PUT", "", "POST, GET, HEAD"), ("POST", "/x", "GET, HEAD, PATCH, DELETE")):
        a = requests.request(method, fake.base + CONTEXTS + path, json={}, timeout=60)
        assert a.status_code == 405 and a.headers["Allow"] == allow
    for path in ("/", "/a/b", "/a/"):
        assert fake.get(CONTEXTS + path).status_code == 404
    for name in ("%2e%2e", "a%20b", "n" * 300, "-"):
        error(show(fake, name), 404, "no context named")
    error(fake.post(CONTEXTS, {"name": "f", "from": "chatcmpl-none"}), 404, "chatcmpl-none", param="from")


# ---- expiry


def test_expiry_is_exact(start, clock):
    d = start(env={"FAKE_CLOCK": str(clock.path)})
    assert make(d, "a", ttl=60)["expires"] == 1060
    make(d, "b", ttl="2m")
    clock.set(1059)
    assert names(d) == ["a", "b"]
    clock.set(1060)
    assert names(d) == ["b"]
    for answer in (show(d, "a"), change(d, "PATCH", "a", {"ttl": 10}), change(d, "DELETE", "a")):
        error(answer, 404, "'a' has expired")
    error(d.post(CHAT, {"messages": [user("x")], "context": "a"}), 404, "'a' has expired", param="context")
    error(d.post(TEXT, {"prompt": "x", "context": "never"}), 404, "no context named 'never'", param="context")
    make(d, "a")
    assert names(d) == ["b", "a"]
    change(d, "PATCH", "b", {"ttl": 100})
    clock.set(1159)
    assert names(d) == ["b", "a"]
    clock.set(1160)
    assert names(d) == ["a"]


def test_expires_while_in_use(start, clock, tmp_path):
    """The request that has it is answered."""
    gate = tmp_path / "gate"
    d = start(env={"FAKE_CLOCK": str(clock.path)})
    make(d, "book", ttl=10)
    ready(d, "book")
    call = Call(d, CHAT, {"messages": [user(f"[[gate:{gate}]] go on")], "context": "book", "max_tokens": 10})
    until(lambda: d.metrics()["llamacpp:requests_processing"] == 1)
    clock.set(1010)
    assert names(d) == []
    gate.touch()
    assert prompt_tokens(call.result())[0] > len(BOOK)
    error(d.post(CHAT, {"messages": [user("x")], "context": "book"}), 404, "expired", param="context")


# ---- what follows a context


@pytest.mark.parametrize(
    "content",
    ["Who?", [{"type": "text", "text": "Who?"}], [{"type": "text", "text": "Who"}, {"type": "text", "text": "else?"}], None, "", "<|im_end|> \"quoted\" \\ é"],
)
def test_question_about_a_text(own, content):
    """The same prompt as the text and the question in one message; all of the context is found."""
    make(own, "book")
    tokens = ready(own, "book")["tokens"]
    got = own.post(CHAT, {"messages": [{"role": "user", "content": content}], "context": "book", "max_tokens": 5})
    flat = "\n".join(p["text"] for p in content) if isinstance(content, list) else content or ""
    whole = own.post(CHAT, {"messages": [user(BOOK + "\n\n" + flat)], "max_tokens": 5, "cache_prompt": False})
    assert prompt_tokens(got) == (prompt_tokens(whole)[0], tokens)
    assert show(own, "book").json()["hits"] == 1


def test_more_than_one_turn(own):
    make(own, "book")
    ready(own, "book")
    more = [{"role": "assistant", "content": "Dickens."}, user("When?")]
    got = own.post(CHAT, {"messages": [user("Who?"), *more], "context": "book", "max_tokens": 5})
    whole = own.post(CHAT, {"messages": [user(BOOK + "\n\nWho?"), *more], "max_tokens": 5})
    assert prompt_tokens(got)[0] == prompt_tokens(whole)[0]
    error(own.post(CHAT, {"messages": [{"role": "system", "content": "x"}, user("y")], "context": "book"}), 400, "role user", param="messages")
    error(own.post(CHAT, {"messages": [{"role": "user", "content": 5}], "context": "book"}), 400, "content", param="messages")
    error(own.post(CHAT, {"messages": [], "context": "book"}), 400, param="messages")
    error(own.post(CHAT, {"messages": [user("x")], "context": 5}), 400, param="context")


def test_conversation_goes_on(own):
    head = [{"role": "system", "content": BOOK}, user("Who?"), {"role": "assistant", "content": "Dickens."}]
    make(own, "talk", messages=head)
    tokens = ready(own, "talk")["tokens"]
    got = own.post(CHAT, {"messages": [user("When?")], "context": "talk", "max_tokens": 5})
    whole = own.post(CHAT, {"messages": [*head, user("When?")], "max_tokens": 5, "cache_prompt": False})
    assert prompt_tokens(got) == (prompt_tokens(whole)[0], tokens)


def test_raw_prompt_follows(own):
    make(own, "book")
    tokens = ready(own, "book")["tokens"]
    assert prompt_tokens(own.post(TEXT, {"prompt": "abcd", "context": "book", "max_tokens": 1})) == (tokens + 4, tokens)
    assert prompt_tokens(own.post(TEXT, {"prompt": [97, 98], "context": "book", "max_tokens": 1}))[0] == tokens + 2
    error(own.post(TEXT, {"context": "book"}), 400, param="prompt")
    over = own.post(TEXT, {"prompt": "x" * 4000, "context": "book"})
    assert error(over, 400, "context_length_exceeded", param="prompt")["n_prompt_tokens"] == tokens + 4000


def test_special_tokens_stay_text(own):
    """A text that looks like the end of a turn is no end of a turn."""
    plain = make(own, "plain", text=BOOK + "A" * len("<|im_end|>"))
    special = make(own, "special", text=BOOK + "<|im_end|>")
    assert plain["tokens"] == special["tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_from_an_answer(own, stream):
    body = {"messages": [user(BOOK)], "max_tokens": 7, "stream": stream}
    if stream:
        chunks = [c for c in own.stream(CHAT, body) if isinstance(c, dict)]
        answer, said = chunks[0]["id"], "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    else:
        got = own.post(CHAT, body).json()
        answer, said = got["id"], got["choices"][0]["message"]["content"]
    assert said == "tick ti"
    made = make(own, "talk", **{"from": answer})
    assert made["source"] == "messages"
    ready(own, "talk")
    got = own.post(CHAT, {"messages": [user("Go on")], "context": "talk", "max_tokens": 5})
    whole = own.post(CHAT, {"messages": [user(BOOK), {"role": "assistant", "content": said}, user("Go on")], "max_tokens": 5})
    assert prompt_tokens(got)[0] == prompt_tokens(whole)[0]
    again = own.post(CHAT, {"messages": [user("Go on")], "context": "talk", "max_tokens": 5}).json()["id"]
    longer = make(own, "talk2", **{"from": again})  # a conversation on a context is a conversation
    assert longer["tokens"] > made["tokens"] + len("Go on")


def test_from_a_raw_answer(own):
    got = own.post(TEXT, {"prompt": BOOK, "max_tokens": 7}).json()
    made = make(own, "raw", **{"from": got["id"]})
    assert made["source"] == "tokens" and made["tokens"] == 1 + len(BOOK) + 7
    ready(own, "raw")
    assert prompt_tokens(own.post(TEXT, {"prompt": "x", "context": "raw", "max_tokens": 1}))[0] == made["tokens"] + 1
    error(own.post(CHAT, {"messages": [user("x")], "context": "raw"}), 400, "/v1/completions", param="context")
    error(own.post(CONTEXTS, {"name": "x", "from": own.post(TEXT, {"prompt": BOOK, "cache_prompt": False, "max_tokens": 1}).json()["id"]}), 404, param="from")


# ---- limits, tenants, ends


def test_pins_over_the_budget(start):
    """A token is a KiB to the fake engine."""
    d = start("--cache-ram", "1")
    make(d, "a", text="x" * 500, pinned=True)
    make(d, "b", text="y" * 600)
    e = error(change(d, "PATCH", "b", {"pinned": True}), 400, "--cache-ram", "unpin", "1.0 MiB", param="pinned")
    assert e["type"] == "exceed_cache_size_error"
    error(d.post(CONTEXTS, {"name": "c", "text": "z" * 600, "pinned": True}), 400, "--cache-ram")
    assert not show(d, "b").json()["pinned"] and names(d) == ["a", "b"]
    change(d, "DELETE", "a")
    assert change(d, "PATCH", "b", {"pinned": True}).json()["pinned"]


def test_each_key_has_its_own(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice-key\nbob-key\n")
    keys.chmod(0o600)
    d = start("--api-key-file", str(keys))
    alice, bob = ({"headers": {"Authorization": f"Bearer {k}-key"}} for k in ("alice", "bob"))
    assert d.get(CONTEXTS).status_code == 401 and change(d, "DELETE", "x").status_code == 401
    answer = d.post(CHAT, {"messages": [user(BOOK)], "max_tokens": 3}, **alice).json()["id"]
    assert d.post(CONTEXTS, {"name": "book", "text": BOOK}, **alice).status_code == 202
    assert names(d, **alice) == ["book"] and names(d, **bob) == []
    error(d.get(CONTEXTS + "/book", **bob), 404)
    error(change(d, "PATCH", "book", {"name": "mine"}, **bob), 404)
    error(change(d, "DELETE", "book", **bob), 404)
    error(d.post(CHAT, {"messages": [user("x")], "context": "book"}, **bob), 404, param="context")
    error(d.post(CONTEXTS, {"name": "x", "from": answer}, **bob), 404, param="from")
    assert d.post(CONTEXTS, {"name": "book", "text": "bob's"}, **bob).status_code == 202
    assert d.post(CONTEXTS, {"name": "x", "from": answer}, **alice).status_code == 202
    assert names(d, **alice) == ["book", "x"] and names(d, **bob) == ["book"]


def test_client_gone_while_it_is_read(start):
    """A stream's name is free again, whether its text was being read or waited; one that was accepted stays."""
    d = start()
    hang = {"name": "hang", "text": BOOK + "[[hang]]", "stream": True}
    first, second = d.connect(), d.connect()
    first.sendall(request_bytes(CONTEXTS, hang))
    until(lambda: "hang" in names(d) and show(d, "hang").json()["state"] == "reading" or d.metrics()["llamacpp:requests_processing"] == 1)
    second.sendall(request_bytes(CONTEXTS, {"name": "waits", "text": BOOK, "stream": True}))
    until(lambda: "waits" in names(d))
    make(d, "stays")
    second.close()
    until(lambda: "waits" not in names(d))
    first.close()
    until(lambda: "hang" not in names(d))
    assert ready(d, "stays")["state"] == "ready" and names(d) == ["stays"]


def test_failures_are_told(own):
    got = own.stream(CONTEXTS, {"name": "a", "text": "[[fail:prefill]]"})
    assert got[-1]["error"]["code"] == 500 and names(own) == []
    make(own, "b", text="[[fail:open]]")
    until(lambda: show(own, "b").json()["state"] == "failed")
    assert "memory" in show(own, "b").json()["error"]
    error(own.post(CHAT, {"messages": [user("x")], "context": "b"}), 500)  # it is tried again


def test_end_with_jobs_without_clients(start):
    """One that is read and one that waits: the daemon ends all the same."""
    d = start()
    make(d, "hang", text="[[hang]]")
    until(lambda: show(d, "hang").json()["state"] == "reading" or d.metrics()["llamacpp:requests_processing"] == 1)
    make(d, "waits")
    assert d.stop() == 0


def test_openai_client(own):
    client = openai.OpenAI(base_url=own.base + "/v1", api_key="none", max_retries=0)
    client.post("/contexts", body={"name": "book", "text": BOOK}, cast_to=object)
    tokens = ready(own, "book")["tokens"]
    got = client.chat.completions.create(model="any", messages=[user("Who?")], max_tokens=3, extra_body={"context": "book"})
    assert got.usage.prompt_tokens_details.cached_tokens == tokens
    got = client.completions.create(model="any", prompt="Who?", max_tokens=3, extra_body={"context": "book"})
    assert got.usage.prompt_tokens == tokens + 4
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="any", messages=[user("Who?")], extra_body={"context": "none"})
    with pytest.raises(openai.ConflictError):
        client.post("/contexts", body={"name": "book", "text": BOOK}, cast_to=object)
    client.delete("/contexts/book", cast_to=object)
    assert names(own) == []


def test_many_at_once(own):
    """Of many that want one name one gets it; nothing breaks."""
    answers = []

    def want(i):
        answers.append(own.post(CONTEXTS, {"name": "one", "text": f"{i} {BOOK}"}).status_code)
        change(own, "PATCH", "one", {"name": "two"})
        change(own, "DELETE", "two")

    threads = [threading.Thread(target=want, args=(i,)) for i in range(16)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert set(answers) <= {202, 409} and 202 in answers
    assert len(names(own)) <= 1
    assert list(events(own.post(TEXT, {"prompt": "[[say:x]]", "stream": True})))[-1] == "[DONE]"
    json.dumps(own.get(CONTEXTS).json())
