"""RoPE flags through the command line, on a tiny model that was trained on 2,048 tokens."""

import pytest


@pytest.fixture
def prefill(tool, root):
    def run(*flags):
        model = root / "tests/golden/archs/tiny-qwen3.gguf"
        return tool("bench", "prefill", "-m", model, "-c", 8192, "-p", 64, "-r", 1, *flags)

    return run


def test_longer_than_trained(prefill):
    plain = prefill()
    assert plain.returncode == 0
    assert "8192 tokens is longer than the 2048 the model was trained for" in plain.stderr


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_stretched(prefill, kind):
    result = prefill("--rope-scaling", kind, "--rope-scale", 4)
    assert result.returncode == 0, result.stderr
    assert "longer than" not in result.stderr
    short = prefill("--rope-scaling", kind, "--rope-freq-scale", 0.5)
    assert "8192 tokens is longer than the 4096" in short.stderr


def test_original_context(prefill):
    assert "longer than" not in prefill("--rope-scaling", "yarn", "--rope-scale", 2, "--yarn-orig-ctx", 4096).stderr


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--rope-scaling", "dynamic"], "auto, none, linear"),
        (["--rope-scale", 4, "--rope-freq-scale", 0.25], "give one of them"),
        (["--rope-scaling", "yarn", "--rope-freq-base", 1, "--rope-scale", 4], "no finite angles"),
        (["--yarn-beta-fast", "fast"], "--yarn-beta-fast"),
    ],
)
def test_refused(prefill, flags, word):
    result = prefill(*flags)
    assert result.returncode in (1, 2) and result.stdout == ""
    assert word in result.stderr and result.stderr.count("\n") == 1, result.stderr
