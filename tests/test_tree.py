"""Rules of the tree that a compiler does not check: every header compiles alone, and no folder looks into another's private headers."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PUBLIC = {
    "config": {"config.h"},
    "index": {"index.h"},
    "cuda": {"gpu.h"},
    "engine": {"engine.h", "describe.h", "index_bench.h", "contexts.h", "capture.h", "cost.h", "trace.h"},
    "server": {"server.h"},
}
USES = {"config": set(), "index": set(), "cuda": set(), "engine": {"index", "cuda"}, "server": {"engine", "config"}}
HEADERS = sorted(p for folder in PUBLIC for p in (ROOT / folder).glob("*.h"))
SOURCES = sorted(p for folder in PUBLIC for p in (ROOT / folder).glob("*.[ch]"))


@pytest.fixture(scope="session")
def flags():
    packages = "libcjson libmicrohttpd libuv libsystemd libseccomp libpcre2-8 libutf8proc libxxhash inih sqlite3 libcurl"
    found = subprocess.run(["pkg-config", "--cflags", *packages.split()], capture_output=True, text=True, check=True)
    return found.stdout.split() + [f"-I{ROOT / folder}" for folder in PUBLIC]


@pytest.mark.parametrize("header", HEADERS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_header_compiles_alone(header, flags):
    isa = []
    if "avx" in header.name or "amx" in header.name:
        isa = ["-mavx2", "-mfma", "-mf16c"]
    if "avx512" in header.name or "amx" in header.name:
        isa += [f"-mavx512{x}" for x in ("f", "bw", "dq", "vl", "vnni", "bf16")]
    if "amx" in header.name:
        isa += ["-mamx-tile", "-mamx-bf16"]
    result = subprocess.run(
        ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wno-unused-function", "-Werror", "-fsyntax-only", *isa, *flags, "-x", "c", "-"],
        input=f'#include "{header}"\n', capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("folder", PUBLIC)
def test_folder_sees_public_headers_only(folder):
    owners = {p.name: p.parent.name for p in HEADERS}
    for source in (p for p in SOURCES if p.parent.name == folder):
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(), re.M):
            here = (source.parent / name).exists()
            owner = folder if here else owners.get(pathlib.Path(name).name)
            assert owner is not None, f"{source.name} includes {name}, which is nowhere"
            if owner != folder:
                assert owner in USES[folder] and name in PUBLIC[owner], f"{folder}/{source.name} includes {owner}/{name}"


def test_public_headers_are_short():
    for folder, names in PUBLIC.items():
        for name in names:
            lines = (ROOT / folder / name).read_text().count("\n")
            assert lines <= 200, f"{folder}/{name} has {lines} lines"
