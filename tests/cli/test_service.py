"""The systemd unit is as closed as deploy/README.md says."""

import re
import shutil
import subprocess

import pytest


def test_exposure(root):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    result = subprocess.run(
        ["systemd-analyze", "security", "--no-pager", "--offline=true", str(root / "deploy/retrievald.service")], capture_output=True, text=True
    )
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", result.stdout)
    assert exposure, result.stdout + result.stderr
    assert float(exposure.group(1)) <= 1.5
