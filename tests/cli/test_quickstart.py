"""What the quickstart says when it cannot go on; that it works is checked by tests/run.sh."""

import socket
import subprocess


def quickstart(root, *args):
    return subprocess.run(["sh", str(root / "deploy/quickstart.sh"), *args], capture_output=True, text=True, timeout=300)


def test_bad_arguments(root):
    for args in (["--prot", "1"], ["--port"], ["--port", "0"], ["--port", "65536"], ["--port=x"], ["--port", "123456789012"]):
        result = quickstart(root, *args)
        assert result.returncode == 2, args
        assert "--port" in result.stderr


def test_taken_port(root, binary):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        result = quickstart(root, "--check", "--port", port)
    assert result.returncode == 1
    assert f"port {port} is taken" in result.stderr and "--port" in result.stderr
