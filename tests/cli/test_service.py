"""The systemd unit is as closed as deploy/README.md says, and its drop-in for a GPU opens what a GPU needs and no more."""

import json
import re
import shutil
import subprocess

import pytest

DROP_IN = "deploy/retrievald.service.d/gpu.conf"


@pytest.fixture
def analyze(root, tmp_path):
    """What systemd-analyze says of the unit, with or without the drop-in: its verdicts by setting, and the exposure in all."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")

    def run(with_drop_in):
        unit = tmp_path / f"{with_drop_in}/retrievald.service"
        unit.parent.mkdir()
        shutil.copy(root / "deploy/retrievald.service", unit)
        if with_drop_in:
            drop_in = unit.parent / "retrievald.service.d/gpu.conf"
            drop_in.parent.mkdir()
            shutil.copy(root / DROP_IN, drop_in)
        command = ["systemd-analyze", "security", "--no-pager", "--offline=true", unit]
        text = subprocess.run(command, capture_output=True, text=True)
        exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", text.stdout)
        assert exposure, text.stdout + text.stderr
        verdicts = json.loads(subprocess.run([*command, "--json=short"], capture_output=True, text=True).stdout)
        return {v["json_field"]: v for v in verdicts}, float(exposure.group(1))

    return run


def test_exposure(analyze):
    _, exposure = analyze(False)
    assert exposure <= 1.5


def test_gpu_drop_in(analyze):
    closed, _ = analyze(False)
    opened, exposure = analyze(True)
    assert closed.keys() == opened.keys()
    assert {k for k in closed if closed[k]["set"] != opened[k]["set"]} == {"PrivateDevices", "ProcSubset"}
    assert exposure <= 1.5
    devices = set(opened["DeviceAllow"]["description"].split()) - set(closed["DeviceAllow"]["description"].split())
    nodes = {f"/dev/nvidia{name}:rw" for name in ("ctl", "-uvm", "-uvm-tools")}
    groups = {f"char-nvidia{name}:rw" for name in ("", "ctl", "-frontend", "-uvm", "-caps")}
    assert devices == nodes | groups
