"""The official Python client, on the fake engine and on the real model."""

import openai
import pytest
from daemon import until


@pytest.fixture(params=["fake", "real"])
def daemon(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def client(daemon):
    return openai.OpenAI(base_url=daemon.base + "/v1", api_key="none", max_retries=0, timeout=300)


ASK = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Say hello."}]


def test_models(client):
    (model,) = client.models.list().data
    assert model.id and model.object == "model"


def test_chat(client):
    a = client.chat.completions.create(model="m", messages=ASK, max_tokens=8, temperature=0, seed=1)
    choice = a.choices[0]
    assert a.model == "m" and choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert 1 <= a.usage.completion_tokens <= 8 and a.usage.total_tokens == a.usage.prompt_tokens + a.usage.completion_tokens
    assert a.usage.prompt_tokens_details.cached_tokens >= 0


def test_chat_stream(client):
    whole = client.chat.completions.create(
        model="m", messages=ASK, max_completion_tokens=8, temperature=0, extra_body={"attention": {"mode": "full"}}
    )
    role, text, reasons, usage = [], "", [], None
    for chunk in client.chat.completions.create(model="m", messages=ASK, max_completion_tokens=8, temperature=0, stream=True,
                                                stream_options={"include_usage": True}, extra_body={"attention": {"mode": "full"}}):  # fmt: skip
        if chunk.usage:
            usage = chunk.usage
            assert chunk.choices == []
            continue
        (choice,) = chunk.choices
        role += [choice.delta.role] if choice.delta.role else []
        text += choice.delta.content or ""
        reasons.append(choice.finish_reason)
    assert role == ["assistant"] and text == whole.choices[0].message.content
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat_logprobs(client):
    a = client.chat.completions.create(model="m", messages=ASK, max_tokens=4, temperature=0, logprobs=True, top_logprobs=20)
    content = a.choices[0].logprobs.content
    assert content and b"".join(bytes(t.bytes) for t in content).decode() == a.choices[0].message.content
    for t in content:
        assert len(t.top_logprobs) == 20 and t.logprob <= 0
        assert [x.logprob for x in t.top_logprobs] == sorted((x.logprob for x in t.top_logprobs), reverse=True)
        assert t.token == t.top_logprobs[0].token and t.logprob == t.top_logprobs[0].logprob  # greedy


def test_completions(client):
    a = client.completions.create(model="m", prompt="Once upon a time", max_tokens=6, temperature=0, logprobs=3)
    l = a.choices[0].logprobs
    assert a.choices[0].finish_reason == "length" and a.usage.completion_tokens == 6
    assert "".join(l.tokens) == a.choices[0].text and len(l.token_logprobs) == 6 and all(len(t) == 3 for t in l.top_logprobs)
    assert l.text_offset == [len("".join(l.tokens[:i])) for i in range(6)]
    text = "".join(
        c.choices[0].text for c in client.completions.create(model="m", prompt="Once upon a time", max_tokens=6, temperature=0, stream=True)
    )
    assert text == a.choices[0].text


def test_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="m", messages=ASK, temperature="hot")
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
        client.completions.create(model="m", prompt=[70] * 10000)
    with pytest.raises(openai.BadRequestError, match="not supported yet"):
        client.chat.completions.create(model="m", messages=ASK, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    with pytest.raises(openai.BadRequestError, match="not supported yet"):
        client.chat.completions.create(model="m", messages=ASK, n=2)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="x")


def test_error_in_a_stream(fake):
    client = openai.OpenAI(base_url=fake.base + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="memory"):
        for _ in client.completions.create(model="m", prompt="[[fail:decode]]", stream=True):
            pass


def test_closing_a_stream_cancels(fake):
    client = openai.OpenAI(base_url=fake.base + "/v1", api_key="none", max_retries=0)
    before = fake.metrics()["retrievald_requests_cancelled_total"]
    stream = client.completions.create(model="m", prompt="[[gate:/nonexistent/gate]]", stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: fake.metrics()["retrievald_requests_cancelled_total"] == before + 1)
