"""Contexts that outlast the daemon, with the real model."""

import os
import pathlib
import signal
import stat

import pytest
import requests
from daemon import Daemon, until
from test_real import chat, document

OPTIONS = {"max_tokens": 16, "attention": {"mode": "full"}, "logprobs": True}


def ask(question):
    return [{"role": "system", "content": document(100)}, {"role": "user", "content": question}]


@pytest.fixture
def kept(real_bin, real_model, tmp_path):
    """kept(...): a daemon that keeps its contexts in this test's folder; the one before must have ended."""
    daemons = []

    def launch(*args):
        daemons.append(Daemon(real_bin, real_model, "-c", "4096", "--state-dir", str(tmp_path / "state"), *args))
        return daemons[-1]

    yield launch
    for d in daemons:
        d.process.poll() is None and d.stop()


def resting(daemon):
    """All that was answered is on disk."""
    p = daemon.get("/props").json()
    return p["index_pending"] == 0 and p["cache"]["disk"]["saving"] == 0 and p["cache"]["disk"]["segments"] > 0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_second_question_after_a_restart(kept, end, tmp_path):
    """The answer from a context on disk is the cold one."""
    daemon = kept()
    first = chat(daemon, ask("On which shelf is item 7?"), **OPTIONS)
    assert first["timings"]["cache_miss"] == {"position": 0, "reason": "absent"}
    assert first["timings"]["disk_n"] == 0
    if end == signal.SIGKILL:
        until(lambda: resting(daemon), 300)
    daemon.stop(end)
    daemon = kept("--log-level", "debug")
    warm = chat(daemon, ask("In which room is item 11?"), **OPTIONS)
    again = chat(daemon, ask("In which room is item 11?"), **OPTIONS)
    assert warm["timings"]["cache_miss"] == {"position": warm["timings"]["cache_n"], "reason": "differs"}
    assert again["timings"]["cache_miss"] is None
    cold = chat(daemon, ask("In which room is item 11?"), cache_prompt=False, **OPTIONS)
    assert warm["timings"]["disk_n"] == warm["timings"]["cache_n"] > 1000
    assert again["timings"]["disk_n"] == 0 and again["timings"]["cache_n"] > warm["timings"]["cache_n"]
    assert cold["timings"]["cache_n"] == 0
    assert warm["choices"] == cold["choices"] == again["choices"]
    assert any("it stops: differs" in line and "In which room is item 11" in line.split('and "')[1] for line in daemon.lines)
    m = daemon.metrics()
    assert m['retrievald_cache_stops_total{reason="differs"}'] == m['retrievald_cache_stops_total{reason="none"}'] == 1
    assert m["retrievald_disk_hits_total"] == 1 and m["retrievald_disk_loaded_bytes_total"] > 0 and m["retrievald_disk_bytes"] > 0
    for path in pathlib.Path(tmp_path / "state").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    with_disk_off = (daemon.stop(), kept("--cache-disk", "0"))[1]
    assert with_disk_off.metrics()["retrievald_disk_limit_bytes"] == 0
    assert chat(with_disk_off, ask("In which room is item 11?"), **OPTIONS)["choices"] == cold["choices"]


def test_keys_do_not_share(kept, tmp_path):
    """What was read for one key is as good as unread for another, in memory and on disk, also when the keys' file changes."""
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("first\nsecond\n")
    daemon = kept("--api-key-file", str(keys))

    def answer(key):
        body = {"messages": ask("On which shelf is item 9?"), "temperature": 0, **OPTIONS}
        a = daemon.post("/v1/chat/completions", body, headers={"Authorization": f"Bearer {key}"}).json()
        return a["timings"]["cache_n"], a["timings"]["disk_n"], a["timings"]["prompt_n"], a["choices"]

    cold = answer("first")
    n = cold[2]
    assert cold[:3] == (0, 0, n) and n > 1000
    assert answer("second") == cold
    assert answer("first") == answer("second") == (n - 1, 0, 1, cold[3])
    daemon.stop()
    keys.write_text("third\nsecond\nfirst\n")
    daemon = kept("--api-key-file", str(keys))
    assert answer("third") == cold
    assert answer("second") == answer("first") == (n - 1, n - 1, 1, cold[3])
    daemon.stop()
    daemon = kept()  # no keys: a tenant of its own
    assert daemon.post("/v1/chat/completions", {"messages": ask("On which shelf is item 9?"), "max_tokens": 1}).json()["timings"]["cache_n"] == 0
    daemon.stop()
    daemon = kept("--state-dir", str(tmp_path / "other"), "--api-key-file", str(keys), "--cache-shared", "on")  # all of them are one
    assert answer("third") == cold
    assert answer("second") == (n - 1, 0, 1, cold[3])
    first, second = {"X-Api-Key": "first"}, {"X-Api-Key": "second"}
    assert daemon.post("/v1/contexts", {"name": "a", "text": "shared"}, headers=first).status_code == 202
    assert daemon.get("/v1/contexts/a", headers=second).status_code == 200 and daemon.get("/v1/contexts/a").status_code == 401


def test_damaged_file(kept, tmp_path):
    """It costs a miss with its reason, and the answer is right."""
    daemon = kept()
    first = chat(daemon, ask("On which shelf is item 8?"), **OPTIONS)
    daemon.stop()
    largest = max((tmp_path / "state").rglob("*.seg"), key=lambda p: p.stat().st_size)
    with open(largest, "r+b") as f:
        f.seek(largest.stat().st_size // 2)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 1]))
    daemon = kept()
    second = chat(daemon, ask("On which shelf is item 8?"), **OPTIONS)
    assert second["timings"]["cache_miss"] == {"position": 0, "reason": "checksum"}
    assert second["timings"]["cache_n"] == 0 and second["choices"] == first["choices"]
    assert daemon.metrics()['retrievald_disk_misses_total{reason="checksum"}'] == 1
    until(lambda: any("checksum" in line for line in daemon.lines))


def test_folder_in_use(kept, real_bin, real_model, tmp_path):
    """The second daemon says so, and serves without."""
    kept()
    other = Daemon(real_bin, real_model, "-c", "4096", "--state-dir", str(tmp_path / "state"))
    try:
        until(lambda: any("another process keeps its contexts" in line for line in other.lines))
        assert other.metrics()["retrievald_disk_limit_bytes"] == 0
        assert chat(other, [{"role": "user", "content": "Hello"}], max_tokens=2)["usage"]["completion_tokens"] == 2
    finally:
        other.stop()


# ---- names


def tiers(daemon, name):
    return daemon.get("/v1/contexts/" + name).json()["tiers"]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_named_text_after_a_restart(kept, end, tmp_path):
    """All of it is found, from memory and from disk, and the answer is the one of a prompt that was read anew."""
    daemon = kept()
    text = document(100)
    made = daemon.stream("/v1/contexts", {"name": "shelves", "text": text, "ttl": "1h"})[-2]
    tokens = made["tokens"]
    assert made["state"] == "ready" and tokens > 1000 and made["tiers"]["ram"]["tokens"] == tokens
    question = [{"role": "user", "content": "On which shelf is item 7?"}]
    warm = chat(daemon, question, context="shelves", **OPTIONS)
    assert warm["timings"]["cache_n"] == tokens and warm["timings"]["disk_n"] == 0
    whole = chat(daemon, [{"role": "user", "content": text + "\n\n" + question[0]["content"]}], max_tokens=1)
    assert abs(whole["usage"]["prompt_tokens"] - warm["usage"]["prompt_tokens"]) <= 1  # where the two are joined
    until(lambda: resting(daemon) and tiers(daemon, "shelves")["disk"]["tokens"] == tokens, 300)
    daemon.stop(end)
    daemon = kept()
    listed = daemon.get("/v1/contexts").json()["data"]
    assert [c["name"] for c in listed] == ["shelves"] and listed[0]["tokens"] == tokens and listed[0]["expires"] == made["expires"]
    assert listed[0]["tiers"]["disk"]["tokens"] == tokens and listed[0]["tiers"]["disk"]["bytes"] > 0
    again = chat(daemon, question, context="shelves", **OPTIONS)
    cold = chat(daemon, question, context="shelves", cache_prompt=False, **OPTIONS)
    assert again["timings"]["cache_n"] >= tokens and again["timings"]["disk_n"] >= tokens
    assert warm["choices"] == again["choices"] == cold["choices"]
    raw = {"prompt": "In which room is item 11?", "context": "shelves", "max_tokens": 4, "temperature": 0}
    got = daemon.post("/v1/completions", raw).json()
    assert got["timings"]["cache_n"] == tokens
    until(lambda: resting(daemon), 300)
    assert requests.delete(daemon.base + "/v1/contexts/shelves").status_code == 200
    assert not list((tmp_path / "state").rglob("*.seg"))  # it was all there was
    until(lambda: daemon.metrics()["retrievald_cache_bytes"] == 0, 60)  # in memory, too, though nobody asks for anything
    assert chat(daemon, [{"role": "user", "content": text}], max_tokens=1)["timings"]["cache_n"] == 0
    daemon.stop()
    assert kept().get("/v1/contexts").json()["data"] == []


def test_removed_while_it_is_read(kept, tmp_path):
    """Its request ends as it would; then nothing of the text is there."""
    daemon = kept()
    text = document(100)
    assert daemon.post("/v1/contexts", {"name": "shelves", "text": text}).status_code == 202
    assert requests.delete(daemon.base + "/v1/contexts/shelves").status_code == 200
    assert daemon.get("/v1/contexts").json()["data"] == []
    assert chat(daemon, [{"role": "user", "content": text}], max_tokens=1, cache_prompt=False)["timings"]["cache_n"] == 0  # waits for it
    assert daemon.metrics()["llamacpp:prompt_tokens_total"] > 2000
    assert chat(daemon, [{"role": "user", "content": text[:2000]}], max_tokens=1)["timings"]["cache_n"] < 64
    until(lambda: resting(daemon), 300)
    assert chat(daemon, [{"role": "user", "content": text}], max_tokens=1)["timings"]["cache_n"] < 1000  # the second one's beginning


def test_named_conversation(kept):
    """A growing conversation by names of its answers; a pinned one is in memory again before anybody asks."""
    daemon = kept()
    first = chat(daemon, [{"role": "system", "content": document(80)}, {"role": "user", "content": "Where is item 5?"}], max_tokens=8)
    daemon.stream("/v1/contexts", {"name": "talk", "from": first["id"], "pinned": True})
    tokens = daemon.get("/v1/contexts/talk").json()["tokens"]
    assert tokens >= first["usage"]["prompt_tokens"] + 8
    second = chat(daemon, [{"role": "user", "content": "And item 6?"}], context="talk", max_tokens=4)
    assert second["timings"]["cache_n"] >= tokens - 1
    until(lambda: resting(daemon) and tiers(daemon, "talk")["disk"]["tokens"] == tokens, 300)
    daemon.stop()
    daemon = kept()
    until(lambda: tiers(daemon, "talk")["ram"]["tokens"] == tokens, 300)
    third = chat(daemon, [{"role": "user", "content": "And item 6?"}], context="talk", max_tokens=4)
    assert third["timings"]["cache_n"] >= tokens - 1
