"""Daemons for the HTTP tests.

RETRIEVALD_FAKE_BIN (default build/tests/retrievald-fake): the program with the engine of tests/unit/fake_engine.c, which most tests use: what it
answers is steered by the prompt. RETRIEVALD_BIN (or RETRIEVALD; default build/server/retrievald) and RETRIEVALD_SMOLLM2: the real program and
model; without the model, tests that need it are skipped.
"""

import os
import pathlib
import tempfile

import pytest
from daemon import Daemon

BUILD = pathlib.Path(__file__).resolve().parents[2] / "build"


def program(default, *names):
    path = next((os.environ[n] for n in names if os.environ.get(n)), str(default))
    assert os.access(path, os.X_OK), f"{path} is not built"
    return path


@pytest.fixture(scope="session")
def fake_bin():
    return program(BUILD / "tests/retrievald-fake", "RETRIEVALD_FAKE_BIN")


@pytest.fixture(scope="session")
def real_bin():
    return program(BUILD / "server/retrievald", "RETRIEVALD_BIN", "RETRIEVALD")


@pytest.fixture(scope="session")
def real_model():
    path = os.environ.get("RETRIEVALD_SMOLLM2")
    if not path:
        pytest.skip("RETRIEVALD_SMOLLM2 does not name the model")
    return path


@pytest.fixture(scope="session")
def fake_model():
    with tempfile.NamedTemporaryFile(prefix="fake-model-") as f:
        yield f.name


@pytest.fixture
def start(fake_bin, fake_model):
    """start(*args, env=...): a daemon of one test's own, with the fake engine."""
    daemons = []

    def launch(*args, env=None, wait=True):
        daemons.append(Daemon(fake_bin, fake_model, *args, env=env, wait=wait))
        return daemons[-1]

    yield launch
    for d in daemons:
        if d.process.poll() is None:
            d.stop()
            d.process.poll() is None and d.process.kill()


@pytest.fixture(scope="session")
def fake(fake_bin, fake_model):
    """The daemon that tests share which leave no traces."""
    d = Daemon(fake_bin, fake_model, "--max-body-mb", "2")
    yield d
    assert d.stop() == 0


@pytest.fixture(scope="session")
def real(real_bin, real_model):
    d = Daemon(real_bin, real_model, "-c", "4096")
    yield d
    assert d.stop() == 0
