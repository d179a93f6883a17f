"""What is said when a command, flag, setting or file is wrong: status 2 for usage, 1 for failures, one clear line, never a crash."""

import os
import re
import socket

import pytest

COMMANDS = (["serve"], ["run"], ["bench", "decode"], ["bench", "prefill"], ["bench", "index"], ["eval", "logits"], ["eval", "dump"], ["inspect"])
COMMANDS += tuple(["contexts", c] for c in ("list", "show", "add", "pin", "unpin", "rm", "verify"))


def refused(result, status, *parts):
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("retrievald: ") and result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


def test_help_and_version(tool):
    assert re.fullmatch(r"retrievald \d+\.\d+\.\d+\n", tool("--version").stdout)
    overview = tool("--help")
    assert overview.returncode == 0
    for command in COMMANDS:
        assert "retrievald " + " ".join(command) in overview.stdout
        own = tool(*command, "--help")
        assert ("--model" in own.stdout) == (command != ["bench", "index"] and command[0] != "contexts")
        assert own.returncode == 0 and own.stderr == ""
        assert max(map(len, own.stdout.splitlines())) <= 130
    assert "--port" in overview.stdout and "--port" not in tool("run", "--help").stdout


@pytest.mark.parametrize(
    "args, parts",
    [
        (["rnu"], ["unknown command 'rnu'", "did you mean 'run'?"]),
        (["bench", "decod"], ["unknown command 'bench decod'", "did you mean 'bench decode'?"]),
        (["bench"], ["bench what?", "'bench decode'", "'bench prefill'", "'bench index'"]),
        (["model.gguf"], ["unknown command 'model.gguf'", "--help"]),
        (["--prot", "80"], ["did you mean --port?"]),
        (["--port", "80000"], ["--port", "'80000'", "from 0 to 65535"]),
        (["run", "--port", "80"], ["not a flag of this command"]),
        (["run", "-m"], ["--model needs a value"]),
        (["--temp", "nan"], ["--temp"]),
        (["contexts"], ["contexts what?", "'contexts list'", "'contexts verify'"]),
        (["contexts", "lst"], ["did you mean 'contexts list'?"]),
        (["contexts", "list", "book"], ["unexpected argument 'book'"]),
        (["contexts", "list", "-m", "x"], ["unknown flag '-m'"]),
        (["contexts", "show"], ["which context?"]),
        (["contexts", "rm", "a/b"], ["'a/b' is no context's name"]),
        (["contexts", "rm", ".."], ["'..' is no context's name"]),
        (["contexts", "add", "--name", "a"], ["which text?", "-f"]),
        (["contexts", "add", "-f", "x"], ["which context?"]),
        (["contexts", "list", "--port", "0"], ["from 1 to 65535"]),
        ([], ["no model"]),
        (["run"], ["no model"]),
        (["bench", "decode", "-m", "x", "-d", "1,x"], ["--depth"]),
        (["bench", "decode", "-m", "x", "--attention", "full,grap"], ["'grap'", "did you mean 'graph'?"]),
        (["bench", "decode", "-m", "x", "--attention-budget", "fast,precis"], ["'precis'", "did you mean 'precise'?"]),
        (["serve", "-m", "x", "--attention-budget", "fast,precise"], ["--attention-budget", "'fast,precise'"]),
    ],
)
def test_usage(tool, args, parts):
    refused(tool(*args), 2, *parts)


def test_bad_setting_from_file_and_environment(tool, tmp_path):
    conf = tmp_path / "r.conf"
    conf.write_text("port = 8080\nctx-szie = 10\n")
    refused(tool("--config", conf), 2, f"{conf}:2", "'ctx-szie'", "did you mean 'ctx-size'?")
    refused(tool(env={"RETRIEVALD_PORT": "x"}), 2, "RETRIEVALD_PORT", "from 0 to 65535")


@pytest.mark.parametrize("command", (["run", "-p", "hi", "-m"], ["bench", "decode", "-m"], ["bench", "prefill", "-m"], ["inspect"]))
def test_bad_model(tool, tmp_path, command):
    refused(tool(*command, tmp_path / "none.gguf"), 1, "none.gguf", "No such file")
    refused(tool(*command, tmp_path), 1, str(tmp_path))
    text = tmp_path / "text.gguf"
    text.write_text("this is no model\n" * 100)
    refused(tool(*command, text), 1, "GGUF")
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    refused(tool(*command, empty), 1, "empty.gguf")


def test_unreadable_model(tool, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path = tmp_path / "secret.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    refused(tool("inspect", path), 1, "Permission denied")


def test_truncated_model(tool, model, tmp_path):
    path = tmp_path / "short.gguf"
    with open(model, "rb") as f:
        whole = f.read(8 << 20)
    for size in (len(whole), 1 << 20, 4096, 25, 5):
        path.write_bytes(whole[:size])
        refused(tool("inspect", path), 1, "short.gguf")


def test_bad_document(tool, model, tmp_path):
    refused(tool("run", "-m", model, "-f", tmp_path / "none.txt", "-p", "hi"), 1, "none.txt: No such file")
    refused(tool("run", "-m", model, "-f", tmp_path, "-p", "hi"), 1, "Is a directory")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 au lait")
    refused(tool("run", "-m", model, "-f", latin, "-p", "hi"), 1, "latin.txt", "not UTF-8", "byte 4")
    refused(tool("eval", "logits", "-m", model), 1, "-f FILE")
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    refused(tool("eval", "logits", "-m", model, "-f", short), 1, "too few")
    refused(tool("bench", "prefill", "-m", model, "-f", short, "-p", "512"), 1, "512 are needed")


def test_prompt_over_the_context(tool, model, book):
    result = tool("run", "-m", model, "-c", 256, "-f", book, "-p", "Who?")
    assert result.returncode == 1
    assert "256" in result.stderr


def test_contexts_without_a_daemon(tool, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # nobody listens
        port = s.getsockname()[1]
        for command in (["list"], ["show", "a"], ["pin", "a"], ["unpin", "a"], ["rm", "a"]):
            refused(tool("contexts", *command, "--port", port), 1, f"no daemon answers on http://127.0.0.1:{port}", "--port")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    refused(tool("contexts", "add", "--name", "a", "-f", latin), 1, "latin.txt", "not UTF-8", "byte 4")
    refused(tool("contexts", "add", "--name", "a", "-f", tmp_path / "none"), 1, "No such file")
    keys = tmp_path / "keys"
    keys.write_text("k")
    keys.chmod(0o644)
    refused(tool("contexts", "list", "--api-key-file", keys), 1, "chmod 600")
    refused(tool("contexts", "verify", tmp_path / "none"), 1, "none/segments: no contexts are kept there")
