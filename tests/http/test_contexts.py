"""Contexts that outlast the daemon, with the real model."""

import os
import pathlib
import signal
import stat

import pytest
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
