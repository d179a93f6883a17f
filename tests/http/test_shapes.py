"""What answers look like, on the fake engine: OpenAI's shapes, llama-server's additions."""

import threading

import pytest
import requests
from daemon import events, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(say, **more):
    return {"messages": [{"role": "user", "content": f"[[say:{say}]]"}], **more}


def text(say, **more):
    return {"prompt": f"[[say:{say}]]", **more}


def check_usage(answer, completion_tokens):
    u = answer["usage"]
    assert u["completion_tokens"] == completion_tokens
    assert u["total_tokens"] == u["prompt_tokens"] + completion_tokens
    assert u["prompt_tokens_details"]["cached_tokens"] == answer["timings"]["cache_n"]
    assert u["prompt_tokens"] == answer["timings"]["cache_n"] + answer["timings"]["prompt_n"]


def test_chat(fake):
    a = fake.post(CHAT, chat("hello", model="some-name")).json()
    assert a["object"] == "chat.completion" and a["id"].startswith("chatcmpl-") and a["model"] == "some-name"
    assert a["system_fingerprint"] and isinstance(a["created"], int)
    (choice,) = a["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "hello"
    check_usage(a, 6)  # five bytes and the end token


def test_text(fake):
    a = fake.post(TEXT, text("hello")).json()
    assert a["object"] == "text_completion" and a["id"].startswith("cmpl-")
    (choice,) = a["choices"]
    assert choice == {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}
    check_usage(a, 6)


def test_timings(fake):
    t = fake.post(TEXT, text("hello")).json()["timings"]
    assert t["predicted_n"] == 6 and t["predicted_ms"] == 3.0
    assert t["predicted_per_token_ms"] == 0.5 and t["predicted_per_second"] == 2000.0
    assert t["prompt_ms"] == 1.0 and t["prompt_per_second"] == pytest.approx(t["prompt_n"] * 1000)
    assert set(t) == {"cache_n", "disk_n", "cache_miss", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms",
                      "predicted_per_token_ms", "predicted_per_second", "index_ms", "keys_held", "keys_attended", "retrieved", "probed",
                      "estimated", "attention", "n_graph", "n_cluster", "n_flat"}  # fmt: skip


def test_chat_stream(fake):
    got = fake.stream(CHAT, chat("hey", stream_options={"include_usage": True}))
    assert got[-1] == "[DONE]"
    chunks = [g for g in got[:-1] if g != ":"]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"].get("content") for c in chunks[1:-2]] == ["h", "e", "y"]
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-2])
    assert chunks[-2]["choices"][0]["delta"] == {} and chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    check_usage(chunks[-1], 4)
    assert all("usage" not in c for c in chunks[:-1])


def test_no_usage_chunk_unless_asked(fake):
    got = fake.stream(CHAT, chat("hey"))
    assert all("usage" not in c for c in got[:-1])
    assert got[-2]["choices"][0]["finish_reason"] == "stop" and got[-2]["timings"]["predicted_n"] == 4


def test_text_stream(fake):
    got = fake.stream(TEXT, text("hey", stream_options={"include_usage": True}))
    assert got[-1] == "[DONE]"
    assert [c["choices"][0]["text"] for c in got[:-2]] == ["h", "e", "y", ""]
    assert [c["choices"][0]["finish_reason"] for c in got[:-2]] == [None, None, None, "stop"]
    assert got[-2]["choices"] == [] and got[-2]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path, say", [(CHAT, chat), (TEXT, text)])
def test_characters_stay_whole(fake, path, say):
    """The fake's tokens are bytes: what is sent must be whole characters."""
    got = fake.stream(path, say("aé漢🙂"))
    pieces = [c["choices"][0].get("text") or c["choices"][0].get("delta", {}).get("content") or "" for c in got[:-1]]
    assert [p for p in pieces if p] == ["a", "é", "漢", "🙂"]


@pytest.mark.parametrize("path, say", [(CHAT, chat), (TEXT, text)])
@pytest.mark.parametrize(
    "stop, expected", [("STOP", "one "), (["xx", "two", "STOP"], "one "), (["never"], "one STOP two"), ("", "one STOP two"), ([], "one STOP two")]
)
def test_stop(fake, path, say, stop, expected):
    body = say("one STOP two", stop=stop)
    choice = fake.post(path, body).json()["choices"][0]
    assert choice.get("text", choice.get("message", {}).get("content")) == expected and choice["finish_reason"] == "stop"
    got = fake.stream(path, body)
    pieces = [c["choices"][0].get("text") or c["choices"][0].get("delta", {}).get("content") or "" for c in got[:-1]]
    assert "".join(pieces) == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_length(fake, name):
    a = fake.post(TEXT, {"prompt": "x", name: 7}).json()
    assert a["choices"][0]["text"] == "tick ti" and a["choices"][0]["finish_reason"] == "length"
    assert a["usage"]["completion_tokens"] == 7
    assert fake.stream(TEXT, {"prompt": "x", name: 7})[-2]["choices"][0]["finish_reason"] == "length"


def test_nothing_wanted_only_prefills(fake):
    a = fake.post(TEXT, {"prompt": "x", "max_tokens": 0}).json()
    assert a["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}


def test_answer_ends_with_the_context(start):
    d = start("-c", "64")
    a = d.post(TEXT, {"prompt": "x" * 40}).json()
    assert a["choices"][0]["finish_reason"] == "length" and a["usage"]["total_tokens"] == 64


def test_chat_logprobs(fake):
    a = fake.post(CHAT, chat("é", logprobs=True, top_logprobs=2)).json()
    content = a["choices"][0]["logprobs"]["content"]
    assert [c["bytes"] for c in content] == [[0xC3], [0xA9]]  # the end token is not text
    assert [c["logprob"] for c in content] == [-0.5, -0.5]
    assert [t["logprob"] for t in content[0]["top_logprobs"]] == [-0.5, -1.5]
    assert content[0]["top_logprobs"][1]["bytes"] == [0xC4]
    # Streamed: both tokens come with the character that they make.
    got = fake.stream(CHAT, chat("é", logprobs=True))
    with_logprobs = [c["choices"][0] for c in got[:-1] if c["choices"][0]["logprobs"]]
    assert [c["delta"]["content"] for c in with_logprobs] == ["é"]
    assert [t["bytes"] for t in with_logprobs[0]["logprobs"]["content"]] == [[0xC3], [0xA9]]
    assert with_logprobs[0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_logprobs_end_with_the_text(fake):
    a = fake.post(CHAT, chat("abSTOP", logprobs=True, stop="STOP")).json()
    assert [c["token"] for c in a["choices"][0]["logprobs"]["content"]] == ["a", "b"]


def test_text_logprobs(fake):
    l = fake.post(TEXT, text("aéb", logprobs=2)).json()["choices"][0]["logprobs"]
    assert l["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert l["token_logprobs"] == [-0.5] * 4
    assert l["text_offset"] == [0, 1, 2, 2]
    assert l["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert fake.post(TEXT, text("a", logprobs=0)).json()["choices"][0]["logprobs"]["top_logprobs"] == [{}]
    got = fake.stream(TEXT, text("aéb", logprobs=0))
    offsets = [c["choices"][0]["logprobs"]["text_offset"] for c in got[:-1] if c["choices"][0]["logprobs"]]
    assert offsets == [[0], [1, 2], [2]]


def test_prompts(fake):
    """Text, ids, and an array of one are the same prompt; text gets BOS, ids are taken as they are."""
    say = "[[say:hi]]"
    ids = [256] + list(say.encode())
    for prompt in (say, [say], ids, [ids]):
        a = fake.post(TEXT, {"prompt": prompt}).json()
        assert a["choices"][0]["text"] == "hi" and a["usage"]["prompt_tokens"] == len(ids)


def test_raw_prompt_parses_special_tokens(fake):
    a = fake.post(TEXT, {"prompt": "<|im_start|>x", "max_tokens": 1}).json()
    assert a["usage"]["prompt_tokens"] == 3  # BOS, the control token, x


def test_null_means_absent_and_unknown_fields_pass(fake):
    body = text("ok", temperature=None, max_tokens=None, stop=None, stream=None, logprobs=None, attention=None, tools=None, n=None, model=None,
                stream_options=None, user="me", metadata={"a": [1]}, store=False, tool_choice="none", response_format={"type": "text"}, logit_bias={},
                echo=False, best_of=1)  # fmt: skip
    assert fake.post(TEXT, body).json()["choices"][0]["text"] == "ok"


def test_attention_is_passed_on(fake):
    for mode in ("full", "streaming", "flat", "graph", "auto"):
        a = fake.post(TEXT, text("ok", attention={"mode": mode, "top_k": 10, "beta": 7.5, "k_max": 9, "n_sink": 0, "n_local": 1, "estimate": False})).json()
        assert a["timings"]["attention"] == mode


def test_last_of_duplicate_keys_counts(fake):
    raw = b'{"prompt":"[[say:one]]","prompt":"[[say:two]]"}'
    a = requests.post(fake.base + TEXT, data=raw, headers={"Content-Type": "application/json"}, timeout=60).json()
    assert a["choices"][0]["text"] == "two"
    raw = b'{"messages":[{"role":"user","content":"[[say:one]]"}],"m\\u0065ssages":[{"role":"user","content":"[[say:two]]"}]}'
    a = requests.post(fake.base + CHAT, data=raw, headers={"Content-Type": "application/json"}, timeout=60).json()
    assert a["choices"][0]["message"]["content"] == "two"


def test_progress(fake):
    got = fake.stream(TEXT, {"prompt": "x" * 2000, "max_tokens": 1, "return_progress": True, "cache_prompt": False})
    progress = [c["prompt_progress"] for c in got[:-1] if "prompt_progress" in c]
    assert progress and progress[-1]["processed"] == progress[-1]["total"] == 2001 and progress[-1]["cache"] == 0
    assert [c for c in got[:-1] if "prompt_progress" in c] == got[: len(progress)]
    assert all("prompt_progress" not in c for c in fake.stream(TEXT, {"prompt": "x", "max_tokens": 1})[:-1])


def test_cached_tokens(start):
    d = start()
    document = "d" * 500
    assert d.post(TEXT, {"prompt": document + " one", "max_tokens": 1}).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    a = d.post(TEXT, {"prompt": document + " two", "max_tokens": 1}).json()
    assert a["usage"]["prompt_tokens_details"]["cached_tokens"] == 502 and a["timings"]["prompt_n"] == 3
    a = d.post(TEXT, {"prompt": document + " two", "max_tokens": 1, "cache_prompt": False}).json()
    assert a["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    m = d.metrics()
    assert m["retrievald_cache_hits_total"] == 1 and m["retrievald_cached_tokens_total"] == 502
    assert m["llamacpp:prompt_tokens_total"] == 505 + 3 + 505


def test_background_work_runs_when_idle(start):
    """The fake wants three turns of eng_idle after each session."""
    d = start()
    d.post(TEXT, {"prompt": "x", "max_tokens": 1})
    until(lambda: d.get("/props").json()["index_pending"] == 0)
    assert d.metrics()["retrievald_index_pending"] == 0


# ---- chat templates


def test_template(fake):
    a = fake.post("/apply-template", {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]})
    assert a.json() == {"prompt": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"}
    a = fake.post(
        "/apply-template", {"messages": [{"role": "developer", "content": [{"type": "text", "text": "S"}]}], "add_generation_prompt": False}
    )
    assert a.json() == {"prompt": "<|im_start|>system\nS<|im_end|>\n"}


def test_content_never_parses_special_tokens(fake):
    """Control tokens in what the user wrote stay text: ten bytes, not one token."""

    def tokens(content):
        return fake.post(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1}).json()["usage"]["prompt_tokens"]

    assert tokens("<|im_end|>") == tokens("0123456789")
    assert (
        fake.post("/apply-template", {"messages": [{"role": "user", "content": "<|im_end|>"}]})
        .json()["prompt"]
        .startswith("<|im_start|>user\n<|im_end|><|im_end|>\n")
    )


def test_hung_template_costs_one_request(fake):
    """While a render hangs until its limit, others are answered."""
    slow = []
    t = threading.Thread(target=lambda: slow.append(fake.post("/apply-template", {"messages": [{"role": "user", "content": "[[render-hang]]"}]})))
    t.start()
    for _ in range(5):
        assert fake.post(CHAT, chat("hello")).json()["choices"][0]["message"]["content"] == "hello"
    t.join()
    assert slow[0].status_code == 400 and "template" in slow[0].json()["error"]["message"]
    assert fake.post(CHAT, chat("hello")).status_code == 200


# ---- the other routes


def test_models(fake):
    for path in ("/v1/models", "/models"):
        a = fake.get(path).json()
        (m,) = a["data"]
        assert a["object"] == "list" and m["object"] == "model" and m["id"] and m["meta"]["n_ctx"] == 4096


def test_health(fake):
    for path in ("/health", "/v1/health"):
        a = fake.get(path)
        assert a.status_code == 200 and a.json() == {"status": "ok"}


def test_props(fake):
    p = fake.get("/props").json()
    assert p["total_slots"] == 1 and p["default_generation_settings"]["n_ctx"] == 4096 and p["chat_template"].startswith("{% for m in messages")
    assert p["default_generation_settings"]["params"]["temperature"] == 0.8
    assert p["bos_token"] == "<|endoftext|>" and p["eos_token"] == "<|im_end|>"
    assert p["attention"]["mode"] == "auto" and set(p["cache"]) >= {"bytes", "limit", "segments", "hits", "misses"}
    assert {"model_path", "model_alias", "build_info", "memory", "index_pending"} <= set(p)


def test_alias(start):
    d = start("--alias", "my/model")
    assert d.get("/v1/models").json()["data"][0]["id"] == "my/model"
    assert d.post(TEXT, text("a")).json()["model"] == "my/model"


def test_tokenize(fake):
    assert fake.post("/tokenize", {"content": "hé"}).json() == {"tokens": [104, 195, 169]}
    assert fake.post("/tokenize", {"content": "h", "add_special": True}).json() == {"tokens": [256, 104]}
    assert fake.post("/tokenize", {"content": "<|im_end|>"}).json() == {"tokens": [258]}
    assert fake.post("/tokenize", {"content": "<|im_end|>", "parse_special": False}).json() == {"tokens": list(b"<|im_end|>")}
    assert fake.post("/tokenize", {"content": "hé", "with_pieces": True}).json() == {
        "tokens": [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    }
    assert fake.post("/tokenize", {}).json() == {"tokens": []}


def test_detokenize(fake):
    assert fake.post("/detokenize", {"tokens": [104, 195, 169, 258]}).json() == {"content": "hé<|im_end|>"}
    assert fake.post("/detokenize", {"tokens": [104, 195]}).json() == {"content": "h\ufffd"}


def test_metrics(fake):
    before = fake.metrics()
    fake.post(TEXT, text("hello"))
    after = fake.metrics()
    assert after["llamacpp:tokens_predicted_total"] == before["llamacpp:tokens_predicted_total"] + 6
    assert after['retrievald_http_responses_total{code="200"}'] == before['retrievald_http_responses_total{code="200"}'] + 2
    assert after["llamacpp:requests_processing"] == 0 and after["llamacpp:requests_deferred"] == 0


def test_a_second_request_on_the_connection(fake):
    with requests.Session() as s:
        for _ in range(3):
            assert s.post(fake.base + TEXT, json=text("a"), timeout=60).json()["choices"][0]["text"] == "a"
            answer = s.post(fake.base + TEXT, json=text("ab", stream=True), stream=True, timeout=60)
            assert list(events(answer))[-1] == "[DONE]"
            assert s.get(fake.base + "/health", timeout=60).status_code == 200


@pytest.mark.parametrize("where", ["open", "prefill", "decode"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_engine_errors(fake, where, path):
    prompt = f"[[fail:{where}]]"
    body = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    a = fake.post(path, body)
    assert a.status_code == 500 and a.json()["error"]["type"] == "server_error" and "memory" in a.json()["error"]["message"]
    got = fake.stream(path, body)
    assert got[-1]["error"]["code"] == 500 and "[DONE]" not in got
    assert fake.post(TEXT, text("fine")).json()["choices"][0]["text"] == "fine"
