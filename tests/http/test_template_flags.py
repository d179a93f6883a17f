"""--chat-template and --chat-template-file: another template than the model's, also a bad or a hostile one."""

import pytest

CHAT, TEMPLATE = "/v1/chat/completions", "/apply-template"
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
def template(tmp_path):
    def write(text):
        path = tmp_path / "t.jinja"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_given_as_text_or_file(start, template):
    source = "{% for m in messages %}<{{ m.role }}|{{ m.content }}>\n{% endfor %}{{ 'ü' }}"
    for flags in (("--chat-template", source), ("--chat-template-file", template(source))):
        d = start(*map(str, flags))
        assert d.post(TEMPLATE, {"messages": USER}).json() == {"prompt": "<user|hello>\nü"}
        assert d.get("/props").json()["chat_template"] == source
        # The say directive is in the prompt whatever the template makes of it.
        a = d.post(CHAT, {"messages": [{"role": "user", "content": "[[say:yes]]"}]})
        assert a.json()["choices"][0]["message"]["content"] == "yes"
        assert a.json()["usage"]["prompt_tokens"] == len("<user|[[say:yes]]>\nü".encode())


def test_given_by_environment(start, template):
    d = start(env={"RETRIEVALD_CHAT_TEMPLATE_FILE": str(template("E{{ messages[0].content }}"))})
    assert d.post(TEMPLATE, {"messages": USER}).json() == {"prompt": "Ehello"}


# What is given, and what the log says at the start.
BAD = [
    ("{% if %}", ["chat template cannot be used", "chat_template, line 1"]),
    ("line one\n{{ x", ["chat template cannot be used", "chat_template, line 2"]),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", ["chat template cannot be used", "nested too deep"]),
    (b"\xff", ["chat template cannot be used", "UTF-8"]),
    (b"a\0b", ["--chat-template-file", "t.jinja", "NUL"]),
    (b"", ["--chat-template-file", "t.jinja", "empty"]),
    (b"x" * ((1 << 20) + 1), ["--chat-template-file", "larger than 1 MiB"]),
    (None, ["--chat-template-file", "t.jinja", "No such file"]),
]


@pytest.mark.parametrize("text, words", BAD, ids=[repr(t)[:20] for t, _ in BAD])
def test_bad_template_ends_the_start(start, template, tmp_path, text, words):
    path = tmp_path / "t.jinja" if text is None else template(text)
    try:
        d = start("--chat-template-file", str(path), wait=False)
    except RuntimeError as e:  # it did not even listen
        log = str(e)
    else:
        assert d.join() == 1
        log = "".join(d.lines)
    for word in words:
        assert word in log, log
    assert "ready:" not in log


def test_both_are_one_too_many(start, template):
    with pytest.raises(RuntimeError, match="both given"):
        start("--chat-template", "x", "--chat-template-file", str(template("y")))
    with pytest.raises(RuntimeError, match="directory"):
        start("--chat-template-file", "/")


# What a template does when it is rendered, and what its request is told.
HOSTILE = [
    ("{{ raise_exception('Conversation roles must alternate, says the template') }}", ["Conversation roles must alternate, says the template"]),
    ("{{ messages[0].nothing.at_all }}", ["no attribute 'nothing'", "line 1"]),
    ("{{ 1 / 0 }}", ["division by zero"]),
    ("{% for i in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}", ["chat template"]),
    ("{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}", ["memory"]),
    ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", ["memory", "prints more"]),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ["unsafe"]),
    ("{{ raise_exception.__globals__['os'].system('id') }}", ["unsafe"]),
    ("{% include '/etc/passwd' %}", ["no loader"]),
]


@pytest.mark.parametrize("text, words", HOSTILE, ids=[t[:30] for t, _ in HOSTILE])
def test_hostile_template_costs_one_request(start, template, text, words):
    """Chat gets a 400 with what was wrong; a message that the template treats well gets its answer before and after."""
    d = start("--chat-template-file", str(template("{% if messages[0].content == 'bad' %}" + text + "{% else %}{{ messages[0].content }}{% endif %}")))
    good = {"messages": [{"role": "user", "content": "[[say:fine]]"}]}
    assert d.post(CHAT, good).json()["choices"][0]["message"]["content"] == "fine"
    for path in (CHAT, TEMPLATE):
        for more in ({}, {"stream": True}):
            a = d.post(path, {"messages": [{"role": "user", "content": "bad"}], **more})
            assert a.status_code == 400, a.text
            e = a.json()["error"]
            assert e["type"] == "invalid_request_error" and e["param"] == "messages"
            for word in words:
                assert word in e["message"], e
            if "range(99999)" in text:
                break  # its time is up after seconds
    assert d.post(CHAT, good).json()["choices"][0]["message"]["content"] == "fine"
    assert d.stop() == 0
