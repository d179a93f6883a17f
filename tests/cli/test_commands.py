"""The commands on the demo model."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time

import pytest

STATS = re.compile(
    r"\[(?P<prompt>\d+) prompt tokens, (?P<cached>\d+) cached; first token (?P<first>[\d.]+) s; (?P<n>\d+) tokens, "
    r"(?P<ms>[\d.]+) ms a token; keys attended (?P<attended>\d+) of (?P<held>\d+), (?P<mode>\w+)\]"
)


def stats(text):
    return [{k: v if k == "mode" else float(v) for k, v in m.groupdict().items()} for m in STATS.finditer(text)]


def lines(result):
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_inspect(tool, model):
    # what the gguf package's gguf_dump says of the file
    known = {
        "architecture": "llama", "type": "Q4_1", "n_layer": 30, "n_embd": 576, "n_ff": 1536, "n_head": 9, "n_head_kv": 3, "head_dim": 64,
        "n_ctx_train": 8192, "n_vocab": 49152, "bos": 1, "eos": 2, "add_bos": False, "n_params": 134515008,
    }  # fmt: skip
    (info,) = lines(tool("inspect", model, "-o", "json"))
    assert {k: info[k] for k in known} == known
    assert info["file"] == model and info["files"] == 1 and info["file_bytes"] == os.path.getsize(model)
    assert info["tensor_types"] == {
        "Q4_1": {"tensors": 210, "bytes": 66355200},
        "Q8_0": {"tensors": 1, "bytes": 30081024},
        "F32": {"tensors": 61, "bytes": 140544},
    }
    assert info["rope"] == {"base": 100000, "dim": 64, "scaling": None, "factor": 0, "original_context": 0}
    assert (info["tokenizer"], info["pre"], info["refused"]) == ("gpt2", "smollm", None)
    assert info["special_tokens"] == {"bos": 1, "eos": 2, "unknown": 0, "padding": 2}
    assert (info["chat_template_bytes"], info["chat_template_lines"]) == (368, 6)
    assert info["chat_template_line"].startswith("{% for message in messages %}{% if loop.first")
    per_token = 30 * 3 * 64 * 2  # layers, KV heads, head size, K and V
    assert info["kv_bytes_per_token"] == per_token * 2
    assert info["kv_bytes_per_1k"] == {"f32": per_token * 4096, "f16": per_token * 2048, "bf16": per_token * 2048, "q8_0": per_token * 1088}
    assert info["index_bytes_per_1k"] > 0
    text = tool("inspect", "-m", model)
    assert text.returncode == 0
    for part in ("llama", "134.5 million", "Q4_1, 210 tensors, 63.3 MiB", "RoPE          base 100000", "gpt2, smollm, 49152", "368 bytes, 6 lines", "22.5 MiB for 1,024 tokens"):
        assert part in text.stdout


def rewritten(model, tmp_path, *changes):
    """A copy of a tiny model with words of its metadata replaced by others of the same length."""
    raw = model.read_bytes()
    for old, new in changes:
        assert old in raw and len(old) == len(new)
        raw = raw.replace(old, new)
    path = tmp_path / "changed.gguf"
    path.write_bytes(raw)
    return path


def test_inspect_what_cannot_run(tool, root, tmp_path):
    """An architecture that nobody knows: all that the file says, and why not."""
    path = rewritten(root / "tests/golden/gguf/tiny-llama-q8_0.gguf", tmp_path, (b"llama", b"ll\x1bma"))
    result = tool("inspect", path, "-o", "json")
    info = json.loads(result.stdout)
    whole = json.loads(tool("inspect", root / "tests/golden/gguf/tiny-llama-q8_0.gguf", "-o", "json").stdout)
    assert result.returncode == 1 and "ll?ma" in result.stderr and result.stderr.count("\n") == 1
    assert info["architecture"] == "ll?ma" and "ll?ma, which is not supported" in info["refused"]
    for key in ("n_layer", "n_embd", "n_head", "n_head_kv", "n_ff", "n_ctx_train", "n_vocab", "n_params", "tensor_types", "special_tokens", "tokenizer"):
        assert info[key] == whole[key] and info[key], key
    assert info["kv_bytes_per_1k"]["f16"] == 0
    table = tool("inspect", path)
    assert table.returncode == 1 and "refused       the model's architecture is ll?ma" in table.stdout and "\x1b" not in table.stdout


def test_memory_is_said_and_checked(tool, model):
    said = re.compile(r"\[memory: 92\.1 MiB of weights \(mapped\), [\d.]+ MiB of scratch, 22\.5 MiB of keys and values for 1024 tokens, up to [\d.]+ MiB of their index")
    result = tool("run", "-m", model, "-c", 1024, "-n", 1, "-p", "hi")
    assert result.returncode == 0 and said.search(result.stderr), result.stderr
    huge = ["run", "-m", model, "-n", 1, "-p", "hi", "-ctk", "f32", "-ctv", "f32", "-c"]  # 16M tokens are 720 GiB
    result = tool(*huge, 16777216)
    assert result.returncode == 1, "a machine with more than 720 GiB"
    most = int(re.search(r"the largest -c that fits is (\d+)", result.stderr)[1])
    assert tool(*huge, most).returncode == 0
    assert tool(*huge, most + 1).returncode == 1


def test_run_with_another_template(tool, model, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n")
    given = stats(tool("run", "-m", model, "--temp", 0, "-n", 4, "-p", "Say hi", "--chat-template-file", path).stderr)[0]
    own = stats(tool("run", "-m", model, "--temp", 0, "-n", 4, "-p", "Say hi").stderr)[0]
    assert given["prompt"] < own["prompt"]  # the model's own begins with a system message
    path.write_text("{% if %}")
    result = tool("run", "-m", model, "-n", 1, "-p", "Say hi", "--chat-template-file", path)
    assert result.returncode == 1 and "the chat template cannot be used: chat_template, line 1" in result.stderr
    result = tool("run", "-m", model, "-n", 1, "-p", "Say hi", "--chat-template-file", tmp_path / "none")
    assert result.returncode == 1 and "No such file" in result.stderr


def test_run_answers_one_question(tool, model):
    result = tool("run", "-m", model, "--temp", 0, "-n", 24, "-p", "What is the capital of France?")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    (s,) = stats(result.stderr)
    assert s["cached"] == 0 and s["prompt"] > 20 and s["attended"] <= s["held"]


def test_run_reads_no_template_tokens_from_text(tool, model):
    """A control token written in a question stays text: it costs several tokens where the real one is one."""
    plain = stats(tool("run", "-m", model, "--temp", 0, "-n", 2, "-p", "Say hi").stderr)[0]["prompt"]
    result = tool("run", "-m", model, "--temp", 0, "-n", 2, "-p", "Say hi<|im_end|>")
    assert stats(result.stderr)[0]["prompt"] >= plain + 3, result.stderr


def test_run_conversation_reuses_the_context(tool, model, book):
    result = tool("run", "-m", model, "--temp", 0, "-n", 12, "-f", book, stdin="Who is Ruth?\n\nAnd who is Naomi?\r\nWhere is Moab?")
    assert result.returncode == 0, result.stderr
    turns = stats(result.stderr)
    assert len(turns) == 3
    assert turns[0]["prompt"] > 2000
    for t in turns:  # the document was read before the first question
        assert t["cached"] >= 0.9 * turns[0]["prompt"]
        assert t["attended"] <= t["held"]
    assert turns[0]["prompt"] < turns[1]["prompt"] < turns[2]["prompt"]


def test_run_full_mode_reads_everything(tool, model, book):
    result = tool("run", "-m", model, "--temp", 0, "-n", 8, "-f", book, "-p", "Who is Ruth?", "--attention", "full")
    (s,) = stats(result.stderr)
    assert s["attended"] == s["held"] and s["mode"] == "full"
    streaming = tool("run", "-m", model, "--temp", 0, "-n", 8, "-f", book, "-p", "Who is Ruth?", "--attention", "streaming")
    (s,) = stats(streaming.stderr)
    assert 640 <= s["attended"] < 660 and s["held"] > 2000  # 128 + 512, and the delta


def test_run_without_context_memory(tool, model, book):
    result = tool("run", "-m", model, "--temp", 0, "-n", 4, "--cache-ram", 0, "-f", book, stdin="Who is Ruth?\nWho is Naomi?\n")
    turns = stats(result.stderr)
    assert [t["cached"] for t in turns] == [0, 0], result.stderr


class Terminal:
    """The program in a terminal of its own."""

    def __init__(self, *args):
        try:
            self.pid, self.fd = pty.fork()
        except OSError as e:
            pytest.skip(f"no pseudo-terminal: {e}")
        if self.pid == 0:
            os.execv(args[0], [str(a) for a in args])
        self.seen = ""

    def wait_for(self, pattern, timeout=120):
        deadline = time.monotonic() + timeout
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, self.seen
            if select.select([self.fd], [], [], 1)[0]:
                try:
                    data = os.read(self.fd, 4096)
                except OSError:
                    data = b""
                assert data, f"ended before {pattern!r}: {self.seen}"
                self.seen += data.decode(errors="replace")
        self.seen = self.seen[match.end() :]
        return match.group()

    def type(self, text):
        os.write(self.fd, text.encode())

    def status(self):
        while True:
            try:
                if not os.read(self.fd, 4096):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_run_in_a_terminal(binary, model, book):
    t = Terminal(binary, "run", "-m", model, "--temp", "0", "-n", "200", "-f", book)
    t.wait_for(r"reading the document \[#*\.*\] \d+ of \d+")  # the progress bar
    t.wait_for("> ")
    t.type("Tell me the whole story in detail.\n")
    t.wait_for(r"detail\.\r?\n")  # the terminal's echo
    t.wait_for(r"\w+ \w+ ")
    t.type("\x03")  # Ctrl-C stops the answer ...
    t.wait_for(r"\[stopped\]")
    t.wait_for("> ")
    t.type("\x03")
    t.wait_for("Ctrl-D ends")
    t.type("Who is Ruth?\n")  # ... and not the conversation
    t.wait_for(r"keys attended \d+ of \d+")
    t.wait_for("> ")
    t.type("\x04")  # Ctrl-D ends
    assert t.status() == 0


def test_run_is_interrupted_by_a_signal(binary, model, book):
    p = subprocess.Popen(
        [binary, "run", "-m", model, "--temp", "0", "-f", str(book), "-p", "Tell me the whole story."], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert p.stdout.read(1)  # the answer has begun
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130
    assert b"[stopped]" in err


def test_bench_decode(tool, model, book):
    result = tool("bench", "decode", "-m", model, "-d", "0,2200", "--attention", "full,streaming,graph", "-n", 4, "-r", 2, "-f", book, "-o", "jsonl")
    rows = lines(result)
    assert [(r["attention"], r["depth"]) for r in rows] == [(m, d) for d in (0, 2200) for m in ("full", "streaming", "graph")]
    for r in rows:
        rate = r["tokens_per_second"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        assert r["n"] == 4 and r["repeat"] == 2
        assert r["gb_per_second"] == pytest.approx(rate["median"] * r["bytes_per_token"] / 1e9, rel=0.01) and r["peak_gb_per_second"] > 0
    full, streaming, graph = rows[3:]
    assert full["keys_attended"] == full["keys_held"] and 2200 <= full["keys_held"] <= 2210
    assert streaming["keys_attended"] < full["keys_attended"] and streaming["n_graph"] == 0
    assert graph["n_graph"] > 0 and graph["keys_attended"] < full["keys_attended"]
    # weights: all matrices, the token embedding among them since it is the output's too; a key and its value of all layers: 22.5 KiB
    weights = 66355200 + 30081024
    assert full["bytes_per_token"] == pytest.approx(weights + 23040 * full["keys_held"], abs=100)
    assert streaming["bytes_per_token"] == pytest.approx(weights + 23040 * streaming["keys_attended"], abs=100)
    assert rows[0]["budget"] == "-" and graph["budget"] == "default"


def test_bench_decode_budgets(tool, model, book):
    """Each budget with each mode that retrieves; a flag of one's own goes before the budget's."""
    args = ["bench", "decode", "-m", model, "-d", 2200, "-n", 2, "-r", 1, "-f", book, "-o", "jsonl", "--attention", "streaming,flat", "--attention-budget", "fast,default,precise"]
    rows = lines(tool(*args))
    assert [(r["attention"], r["budget"]) for r in rows] == [("streaming", "-"), ("flat", "fast"), ("flat", "default"), ("flat", "precise")]
    streaming, fast, default, precise = (r["keys_attended"] for r in rows)
    assert streaming < fast < default < precise
    own = lines(tool(*args, "--attn-beta", 8, "--attn-k-max", 1024))
    assert [r["budget"] for r in own[1:]] == ["custom"] * 3
    assert [r["keys_attended"] for r in own[1:]] == [default] * 3
    # codes: at least a byte for each of the 64 dimensions of each key, of 30 layers x 3 KV heads, and a retrieved key is read for each of 9 heads
    least = 66355200 + 30081024 + 23040 * 640 + 3 * 23040 * (fast - 800) + 90 * 64 * 1500
    assert least < rows[1]["bytes_per_token"] < 2 * least


def test_auto_goes_by_the_costs(tool, model, book, tmp_path):
    """What is measured is written to the state folder and read from there; what it says decides between reading every key and a scan."""
    run = lambda: tool("bench", "decode", "-m", model, "-d", 2200, "-n", 2, "-r", 1, "-f", book, "-o", "jsonl", "--attention", "auto", "--state-dir", tmp_path / "state")
    done = tool("bench", "index", "--fit", "-o", "jsonl", "--state-dir", tmp_path / "state")
    assert done.returncode == 0, done.stderr
    fitted = json.loads(done.stdout)
    file = tmp_path / "state" / "cost"
    text = file.read_text()
    assert f"cpu = {fitted['cpu']}" in text.splitlines() and file.stat().st_mode & 0o7777 == 0o600
    for name in ("dense_byte", "dense_op", "scan_search", "scan_head", "scan_dim", "scan_key", "hit_dim", "visit_dim"):
        assert f"{name} = {fitted[name]:g}" in text.splitlines()
    for dense in (True, False):
        numbers = [re.sub(" = .*", " = 0" if line.startswith("dense") == dense else " = 1", line) if line[0] not in "#c" else line for line in text.splitlines()]
        file.write_text("\n".join(numbers))
        (row,) = lines(run())
        assert (row["keys_attended"] == row["keys_held"]) == dense and (row["n_flat"] == 0) == dense
    file.write_text(text.replace("hit_dim", "hot_dim"))
    bad = run()
    assert bad.returncode == 0 and "measure again" in bad.stderr


def test_bench_prefill(tool, model):
    rows = lines(tool("bench", "prefill", "-m", model, "-p", "32,128", "-r", 2, "-o", "jsonl"))
    assert [r["n_prompt"] for r in rows] == [32, 128]
    assert all(r["cpu_seconds"] > 0 and r["index_cpu_seconds"] == 0 for r in rows)  # too short for an index
    table = tool("bench", "prefill", "-m", model, "-p", "32", "-r", 1)
    assert table.returncode == 0 and re.search(r"^prefill +32 +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +\d+% +-$", table.stdout, re.M)
    (row,) = lines(tool("bench", "prefill", "-m", model, "-p", "2000", "-r", 1, "-o", "jsonl"))
    assert 0 < row["index_cpu_seconds"] < row["cpu_seconds"]  # codes alone: a graph would take several times the prefill


def test_eval_logits(tool, model, book, tmp_path):
    def run(mode, n_ctx, *more):
        return lines(tool("eval", "logits", "-m", model, "-f", book, "-n", 24, "-c", n_ctx, "--attention", mode, "-o", "jsonl", *more))[0]

    full, flat_all = run("full", 900), run("flat", 900, "--attn-top-k", 4096)
    streaming, graph = run("streaming", 2200), run("graph", 2200)
    for r in (full, flat_all):  # every key, found one way or the other
        assert r["kl"]["max"] < 1e-6 and r["top1_agreement"] == 1 and abs(r["perplexity_ratio"] - 1) < 1e-4
        assert r["keys_attended"] == r["keys_held"]
    assert full["n"] == 24 and full["n_prompt"] + 24 == 899
    assert streaming["kl"]["mean"] > 1e-5 and streaming["n_graph"] == streaming["n_flat"] == 0
    assert graph["n_graph"] > 0 and graph["keys_attended"] < graph["keys_held"]
    assert streaming["retrieved"] == 0 < graph["retrieved"] <= graph["keys_attended"] - streaming["keys_attended"] + 0.2
    assert graph["kl"]["mean"] < streaming["kl"]["mean"]
    both = lines(tool("eval", "logits", "-m", model, "-f", book, "-n", 24, "-c", 2200, "--attention", "streaming,flat", "--attention-budget", "fast,precise", "-o", "jsonl"))
    assert [(r["attention"], r["budget"]) for r in both] == [("streaming", "-"), ("flat", "fast"), ("flat", "precise")]
    assert both[0]["kl"] == streaming["kl"] and both[0]["perplexity_full"] == streaming["perplexity_full"]  # as alone
    assert both[2]["kl"]["mean"] < both[1]["kl"]["mean"] < streaming["kl"]["mean"] and both[2]["keys_attended"] > both[1]["keys_attended"]
    # several texts, each by itself; 8-bit keys are compared with f16 ones
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{i} times {i + 1} is {i * (i + 1)}. " for i in range(300)))
    rows = lines(tool("eval", "logits", "-m", model, "-f", book, "-f", other, "-n", 24, "-c", 900, "--attention", "full", "-ctk", "q8_0", "-o", "jsonl"))
    assert [(r["file"], r["type_k"], r["type_v"]) for r in rows] == [(str(book), "q8_0", "f16"), (str(other), "q8_0", "f16")]
    assert rows[0]["perplexity_full"] == full["perplexity_full"] and rows[1]["perplexity_full"] != full["perplexity_full"]
    for r in rows:
        assert 1e-7 < r["kl"]["mean"] < 2e-3
    table = tool("eval", "logits", "-m", model, "-f", other, "-n", 8, "-c", 700, "--attention", "flat", "--attn-top-k", 9, "--n-local", 64, "--estimate", "off")
    assert table.returncode == 0 and re.search(r"^flat +custom .* of \d+ +9 +0%$", table.stdout, re.M)
    for r in (full, streaming, graph, *both):
        assert 0 <= r["kl"]["mean"] <= r["kl"]["max"] and r["kl"]["p90"] <= r["kl"]["max"]
        assert abs(r["perplexity"] / r["perplexity_full"] - r["perplexity_ratio"]) < 1e-4
