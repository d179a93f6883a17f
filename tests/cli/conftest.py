"""The program and the demo model: $RETRIEVALD (default build/server/retrievald) and $RETRIEVALD_SMOLLM2."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def binary():
    path = os.environ.get("RETRIEVALD", ROOT / "build/server/retrievald")
    assert os.access(path, os.X_OK), f"{path} is not built"
    return str(path)


@pytest.fixture(scope="session")
def model():
    path = os.environ.get("RETRIEVALD_SMOLLM2")
    if not path:
        pytest.skip("RETRIEVALD_SMOLLM2 does not name the model")
    return path


@pytest.fixture(scope="session")
def tool(binary):
    """Runs the program with these arguments and without any setting from our own environment."""

    def run(*args, stdin="", env=(), timeout=600):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RETRIEVALD_")}
        return subprocess.run(
            [binary, *map(str, args)], input=stdin, capture_output=True, text=True, timeout=timeout, env={**clean, **dict(env)}
        )

    return run


@pytest.fixture(scope="session")
def book(root, tmp_path_factory):
    """The Book of Ruth's first chapters: about 2,400 tokens, enough for a graph."""
    text = (root / "deploy/demo/three-books.txt").read_text()
    path = tmp_path_factory.mktemp("book") / "ruth.txt"
    path.write_text(text[:9600].rsplit("\n", 1)[0] + "\n")
    return path
