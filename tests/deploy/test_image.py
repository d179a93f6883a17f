"""deploy/Dockerfile's target for the CPU, built and started: by Debian's buildah in a chroot, on a base image that debootstrap makes from the mirror that apt
uses here. No container engine, no registry, no network namespace; needs root. Takes minutes, most of them in apt and the compiler.
"""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import pytest
import requests

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUITE = "bookworm"  # Debian 12, whose packages the Dockerfile names
USER = 10001
KEY = "sk-of-the-image-test"
SECONDS = 120


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def mirror():
    """The one that apt has here for this suite."""
    for line in output("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(ORIGIN)", "Created-By: Packages").splitlines():
        uri, release, origin = (line.split(" ") + ["", ""])[:3]
        if release == SUITE and origin in ("Debian", "") and uri.startswith("http://"):
            return uri
    return None


def why_not():
    """The reason why no image can be built here, or None."""
    if os.geteuid() != 0:
        return "only root can build an image in a chroot"
    for tool in "buildah", "debootstrap", "apt-get":
        if not shutil.which(tool):
            return f"{tool} is not installed"
    unshare = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    if unshare.returncode:
        return f"no mount namespaces here: {unshare.stderr.strip()}"
    if not mirror():
        return f"apt has no plain http source of Debian {SUITE} here"
    return None


class Buildah:
    """All that it writes is in this folder."""

    def __init__(self, folder):
        self.environment = {**os.environ, "TMPDIR": str(folder)}
        self.options = ["buildah", "--root", f"{folder}/storage", "--runroot", f"{folder}/run", "--storage-driver", "vfs"]

    def __call__(self, *arguments):
        done = subprocess.run([*self.options, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment)
        assert done.returncode == 0, f"buildah {arguments[0]}: {done.stdout[-8000:]}"
        return done.stdout


def make_base(folder):
    """Debian's smallest system, packages installed without waiting for the disk, as in the images that Debian publishes."""
    base = folder / "base"
    fetched = subprocess.run(["debootstrap", "--foreign", "--variant=minbase", SUITE, base, mirror()], capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"the mirror that apt uses here gives no base system: {(fetched.stdout + fetched.stderr).strip()[-300:]}")
    (base / "etc/dpkg/dpkg.cfg.d").mkdir(parents=True, exist_ok=True)
    (base / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")
    done = subprocess.run(["chroot", base, "/debootstrap/debootstrap", "--second-stage"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    (base / "etc/apt/apt.conf.d/90as-outside").write_text(output("apt-config", "dump", "--format", '%F "%v";%n', "Acquire"))
    subprocess.run(["tar", "-C", base, "-cf", folder / "base.tar", "."], check=True)
    shutil.rmtree(base)
    (folder / "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["sh"]\n')


@pytest.fixture(scope="module")
def image():
    """A Buildah that has the image "retrievald"."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="retrievald-image-", dir="/var/tmp"))
    buildah = Buildah(folder)
    try:
        make_base(folder)
        buildah("build", "--isolation", "chroot", "--tag", "debian-base", "--file", folder / "Dockerfile", folder)
        (folder / "base.tar").unlink()
        buildah(
            "build", "--isolation", "chroot", "--format", "docker", "--jobs", "2", "--target", "cpu", "--build-arg", "DEBIAN_IMAGE=localhost/debian-base",
            "--tag", "retrievald", "--file", ROOT / "deploy/Dockerfile", ROOT,
        )  # fmt: skip
        yield buildah
    finally:
        subprocess.run([*buildah.options, "rm", "--all"], capture_output=True)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def config(image):
    return json.loads(output(*image.options, "inspect", "--type", "image", "retrievald"))["Docker"]["config"]


class Container:
    """The image's entry point with these arguments, on a free port, its state and its key in folders of ours."""

    def __init__(self, image, config, folder, *arguments):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self.image, self.config, self.log = image, config, folder / f"{self.port}.log"
        self.name = image("from", "retrievald").split()[-1]
        # buildah mounts the image's own volume over the one that it is given, or not, as their order happens to be
        image("config", "--volume", "/var/lib/retrievald-", self.name)
        self.mounts = [f"--volume={folder}/{name}:{at}" for name, at in (("models", "/models:ro"), ("keys", "/keys:ro"), ("state", "/var/lib/retrievald"))]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(self.command(*config["Entrypoint"], *arguments), stdout=log, stderr=subprocess.STDOUT, env=image.environment)

    def command(self, *command):
        environment = f"--env=RETRIEVALD_PORT={self.port}"
        return [*self.image.options, "run", "--isolation", "chroot", environment, *self.mounts, self.name, "--", *command]

    def run(self, *command):
        return subprocess.run(self.command(*command), capture_output=True, text=True, env=self.image.environment)

    def daemon(self):
        """Its process: buildah does not pass signals on."""
        found, waiting = None, [self.process.pid]
        while waiting and not found:
            pid = waiting.pop()
            if pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == "retrievald":
                found = pid
            for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        return found

    def wait_ready(self):
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                status = requests.get(self.base + "/health", timeout=SECONDS).status_code
            except requests.ConnectionError:
                status = None  # it does not listen yet
            if status == 200:
                return
            time.sleep(0.05)

    def complete(self, prompt, key=KEY):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        return requests.post(self.base + "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=SECONDS)

    def stop(self):
        os.kill(self.daemon(), signal.SIGTERM)
        return self.process.wait(SECONDS)

    def remove(self):
        if self.process.poll() is None:
            os.kill(self.daemon() or self.process.pid, signal.SIGKILL)  # what buildah runs outlives it
            self.process.wait(SECONDS)
        self.image("rm", self.name)


@pytest.fixture
def folder(tmp_path):
    """What the container is given: a model, a key and a place for its state, which its user may read and nobody else write."""
    model = os.environ.get("RETRIEVALD_SMOLLM2")
    if not model:
        pytest.skip("RETRIEVALD_SMOLLM2 does not name the model")
    for name in "models", "keys", "state":
        (tmp_path / name).mkdir()
    shutil.copy(model, tmp_path / "models/model.gguf")
    (tmp_path / "keys/api").write_text(KEY + "\n")
    for name, owner, mode in (
        ("models", 0, 0o755), ("models/model.gguf", 0, 0o644), ("keys", 0, 0o755), ("keys/api", USER, 0o400), ("state", USER, 0o700),
    ):  # fmt: skip
        os.chown(tmp_path / name, owner, owner)
        (tmp_path / name).chmod(mode)
    return tmp_path


@pytest.fixture
def start(image, config, folder):
    containers = []

    def launch(*arguments):
        containers.append(Container(image, config, folder, *arguments))
        return containers[-1]

    yield launch
    for c in containers:
        c.remove()


def test_what_the_image_says(config):
    assert config["User"] == f"{USER}:{USER}"
    assert config["Entrypoint"][:2] == ["retrievald", "serve"]
    assert list(config["Volumes"]) == ["/var/lib/retrievald"]
    assert list(config["ExposedPorts"]) == ["8080/tcp"]
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"][0] == "CMD"


def test_refuses_to_be_open(start):
    """Without keys an address that others can reach is refused, and the log says what to do."""
    c = start("-m", "/models/model.gguf")
    assert c.process.wait(SECONDS) == 1
    assert "give an --api-key-file" in c.log.read_text()


def test_serves_and_remembers(start, config):
    text = "In the days when the judges ruled there was a famine in the land. " * 12 + "The capital of France is"
    arguments = ("-m", "/models/model.gguf", "--api-key-file", "/keys/api")
    c = start(*arguments)
    c.wait_ready()
    answer = c.complete("The capital of France is")
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["text"]
    assert c.complete("x", key="sk-another").status_code == 401
    assert c.complete(text).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    # as its own user, who cannot change the program; the build's tools stayed behind
    status = pathlib.Path(f"/proc/{c.daemon()}/status").read_text()
    assert f"Uid:\t{USER}\t{USER}\t{USER}\t{USER}" in status and f"Gid:\t{USER}\t{USER}\t{USER}\t{USER}" in status
    inside = c.run("sh", "-c", "id -u; test -w /usr/bin/retrievald || echo read-only; command -v cc gcc meson ninja || echo no compiler")
    assert inside.stdout.split("\n")[:3] == [str(USER), "read-only", "no compiler"], inside.stdout + inside.stderr

    health = config["Healthcheck"]["Test"][1:]
    assert c.run(*health).returncode == 0
    assert c.stop() == 0, c.log.read_text()
    assert c.run(*health).returncode == 1

    # another container with the same volume goes on from what the first one kept
    d = start(*arguments)
    d.wait_ready()
    assert d.complete(text).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
    assert d.stop() == 0, d.log.read_text()
