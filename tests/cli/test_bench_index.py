"""bench index: what it measures against brute force in Python, and what it says of files that are wrong."""

import ast
import json
import math
import random
import struct

import pytest

FORMATS = {"<f2": "e", "<f4": "f", "<i4": "i"}


def npy(path, shape, numbers, descr="<f2", order="False"):
    header = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': ({', '.join(map(str, shape))},), }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + struct.pack(f"<{len(numbers)}{FORMATS.get(descr, 'd')}", *numbers))
    return path


def numbers(path):
    raw = path.read_bytes()
    return list(struct.unpack(f"<{(len(raw) - 128) // 2}e", raw[128:]))


N, DIM, GROUP, STEPS, SINK, LOCAL = 1300, 6, 2, 3, 20, 100


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Keys in clumps, values that depend on the clump; f16 as stored."""
    d = tmp_path_factory.mktemp("head")
    r = random.Random(1)
    clumps = [[r.gauss(0, 2) for _ in range(DIM)] for _ in range(9)]
    which = [r.randrange(9) for _ in range(N)]
    npy(d / "k.npy", (N, DIM), [c + r.gauss(0, 1) for w in which for c in clumps[w]])
    npy(d / "v.npy", (N, DIM), [c + r.gauss(0, 0.3) for w in which for c in clumps[w]])
    npy(d / "q.npy", (STEPS, GROUP, DIM), [r.gauss(0, 1.5) for _ in range(STEPS * GROUP * DIM)])
    npy(d / "t.npy", (64, GROUP, DIM), [r.gauss(0, 1.5) for _ in range(64 * GROUP * DIM)])
    return d


def flags(d, **other):
    files = {"keys": d / "k.npy", "values": d / "v.npy", "queries": d / "q.npy", "train-queries": d / "t.npy", **other}
    return ["bench", "index", *(x for k, v in files.items() for x in (f"--{k}", v)), "--n-sink", SINK, "--n-local", LOCAL, "-r", 2, "--replicas", 2]


def brute_force(d, top_k):
    """Mean and largest error of the output over window and best keys, and their mean share of the weight outside of the window."""
    k, v, q = (numbers(d / f"{x}.npy") for x in "kvq")
    errors, masses = [], []
    for s in range(STEPS * GROUP):
        scores = [sum(q[s * DIM + j] * k[i * DIM + j] for j in range(DIM)) / math.sqrt(DIM) for i in range(N)]
        weights = [math.exp(x - max(scores)) for x in scores]
        middle = range(SINK, N - LOCAL)
        best = set(sorted(middle, key=lambda i: -scores[i])[:top_k])
        read = [i for i in range(N) if i not in middle or i in best]

        def output(rows):
            total = sum(weights[i] for i in rows)
            return [sum(weights[i] * v[i * DIM + j] for i in rows) / total for j in range(DIM)]

        full, found = output(range(N)), output(read)
        errors.append(math.dist(full, found) / math.hypot(*full))
        masses.append(sum(weights[i] for i in best) / sum(weights[i] for i in middle))
    return sum(errors) / len(errors), max(errors), sum(masses) / len(masses)


def test_against_brute_force(tool, head):
    result = tool(*flags(head), "--attn-top-k", 30, "-o", "jsonl")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(x) for x in result.stdout.splitlines()]
    assert [x["kind"] for x in lines] == ["f16", "int8", "cluster", "ivf", "graph"]
    mean, most, mass = brute_force(head, 30)
    for x in lines:
        assert (x["n"], x["dim"], x["group"], x["steps"], x["top_k"], x["hits"]) == (N, DIM, GROUP, STEPS, 30, 30)
        assert x["recall100"]["mean"] >= (0.9 if x["kind"] == "ivf" else 0.99)
        if x["recall100"]["min"] < 1:
            continue
        assert x["error"]["mean"] == pytest.approx(mean, rel=0.02) and x["error"]["max"] == pytest.approx(most, rel=0.02)
        assert x["mass"]["mean"] == pytest.approx(mass, rel=0.01)
        assert x["us"]["min"] > 0 and x["relative"] > 0 and 0 < x["visited_head"] <= x["visited_group"] <= 1
    exact, codes, cluster, ivf, graph = lines
    assert exact["bytes_per_key"] == 0 and codes["bytes_per_key"] > DIM and graph["bytes_per_key"] > DIM  # both have a code of each key
    assert "error_estimate" in codes and "error_estimate" not in exact
    assert codes["error_estimate"]["mean"] < mean / 3
    assert cluster["error_estimate"]["mean"] < mean / 1.5 and "error_estimate" in ivf
    assert codes["relative"] == 1 and codes["recall100"]["min"] == exact["recall100"]["min"] == 1


def test_table_and_choices(tool, head):
    table = tool(*flags(head), "--kind", "flat", "--codes", "f16", "-n", 2, "--estimate", "off")
    assert table.returncode == 0, table.stderr
    assert f"{N} keys of {DIM}, a group of {GROUP}, 2 steps; beta 8, at most 1024; 2 replicas" in table.stdout
    assert len(table.stdout.splitlines()) == 3 and table.stdout.splitlines()[2].startswith("f16 ")


def refused(tool, args, *parts):
    result = tool(*args)
    assert result.returncode == 1 and result.stdout == "", result.stderr
    assert result.stderr.startswith("retrievald: ") and result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr, result.stderr


def test_damaged_files(tool, head, tmp_path):
    good = (head / "k.npy").read_bytes()

    def header(text):
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text

    shape = b"{'descr': '<f2', 'fortran_order': False, 'shape': %s, }"
    for raw, part in (
        (b"", "not a .npy file"),
        (b"\x93NUMPX" + good[6:], "not a .npy file"),
        (good[:9], "not a .npy file"),
        (good[:60], "cut short in its header"),
        (good[:6] + b"\x09" + good[7:], "version 9"),
        (good[:6] + b"\x02\x00" + struct.pack("<I", 1 << 31) + good[10:], "a header of 2147483648 bytes"),
        (good[:-1], "its shape needs 15600 bytes after the header, there are 15599"),
        (good + b"x", "there are 15601"),
        (good.replace(b"<f2", b">f2"), "little-endian"),
        (good.replace(b"<f2", b"|O8"), "little-endian"),
        (good.replace(b"False", b"True "), "C order"),
        (header(b""), "C order"),
        (header(shape % b"()"), "single number"),
        (header(shape % b"7"), "no shape"),
        (header(shape % b"(0, 4)"), "none of them 0"),
        (header(shape % b"(-3, 4)"), "1 to 3 dimensions"),
        (header(shape % b"(1, 2, 3, 4)"), "1 to 3 dimensions"),
        (header(shape % b"(1, 2"), "1 to 3 dimensions"),
        (header(shape % b"(1 2)"), "damaged shape"),
        (header(shape % b"(99999999999999999999, 4)"), "1 to 3 dimensions"),
        (header(shape % b"(2147483647, 2147483647, 2147483647)"), "GiB"),
        (header(shape % b"(1048576, 64)"), "needs 134217728 bytes"),
    ):
        path = tmp_path / "bad.npy"
        path.write_bytes(raw)
        refused(tool, flags(head, keys=path), str(path), part)
    refused(tool, flags(head, keys=tmp_path / "none.npy"), "No such file")
    refused(tool, flags(head, keys=tmp_path), str(tmp_path))


def test_what_does_not_fit(tool, head, tmp_path):
    x = tmp_path / "x.npy"
    refused(tool, ["bench", "index", "--keys", head / "k.npy"], "--values and --queries")
    refused(tool, flags(head, values=head / "q.npy"), "3 dimensions, it takes 2")
    refused(tool, flags(head, values=npy(x, (N - 1, DIM), [0] * (N - 1) * DIM)), "doesn't fit that of the keys")
    refused(tool, flags(head, queries=npy(x, (1, 1, 4), [0] * 4)), "queries of 4 dimensions, keys of 6")
    refused(tool, flags(head, queries=npy(x, (1, 99, DIM), [0] * 99 * DIM), **{"train-queries": x}), "at most 64 heads")
    refused(tool, flags(head, values=npy(x, (N, DIM), [0] * N * DIM, "<i4")), "float16 or float32")
    refused(tool, flags(head, **{"train-positions": npy(x, (64,), list(range(64, 0, -1)), "<i4")}), "positions must rise")
    refused(tool, flags(head, **{"train-positions": npy(x, (63,), list(range(63)), "<i4")}), "63 positions for 64")
    refused(tool, flags(head, **{"key-positions": npy(x, (63,), list(range(63)), "<i4")}), "63 positions for 1300 keys")
    refused(tool, flags(head, keys=npy(x, (N, DIM), [0] * (N * DIM - 1) + [math.nan])), "the keys hold a number that is not finite")
    refused(tool, flags(head, queries=npy(x, (1, GROUP, DIM), [math.inf] * GROUP * DIM)), "the queries hold")
    refused(tool, [*flags(head), "--n-local", N], "the window leaves no keys")


def shape_of(path):
    """Type and shape in a .npy file's head."""
    raw = path.read_bytes()
    assert raw[:8] == b"\x93NUMPY\x01\x00" and (10 + raw[8]) % 64 == 0
    head = ast.literal_eval(raw[10 : 10 + raw[8]].decode())
    assert head["fortran_order"] is False
    count = math.prod(head["shape"]) * int(head["descr"][-1])
    assert len(raw) == 10 + raw[8] + count
    return head["descr"], head["shape"]


def test_dump_is_what_bench_reads(tool, model, book, tmp_path):
    """eval dump on the demo model: 30 layers, 3 KV heads of 64 dimensions, groups of 3."""
    args = ["eval", "dump", "-m", model, "-f", book, "-c", 1400, "-n", 5, "--folder", tmp_path]
    done = tool(*args, "--layers", "29,3")
    assert done.returncode == 0, done.stderr
    n = 1400 - 5 - 1
    names = {f"layer{layer}_head{head}_{what}.npy" for layer in (3, 29) for head in range(3) for what in ("keys", "values", "queries", "train_queries")}
    assert {p.name for p in tmp_path.iterdir()} == names | {"train_positions.npy"}
    (m,) = shape_of(tmp_path / "train_positions.npy")[1]
    for name in names:
        want = ("<f2", (n, 64)) if "keys" in name or "values" in name else ("<f4", (m if "train" in name else 5, 3, 64))
        assert shape_of(tmp_path / name) == want
    head = {k: tmp_path / f"layer29_head1_{v}.npy" for k, v in (("keys", "keys"), ("values", "values"), ("queries", "queries"), ("train-queries", "train_queries"))}
    flags = [x for k, v in head.items() for x in (f"--{k}", v)]
    rows = tool("bench", "index", *flags, "--train-positions", tmp_path / "train_positions.npy", "--attn-top-k", 20, "--kind", "flat,graph", "--replicas", 2, "-r", 2, "-o", "jsonl")
    assert rows.returncode == 0, rows.stderr
    f16, int8, graph = (json.loads(line) for line in rows.stdout.splitlines())
    assert f16["n"] == n and f16["steps"] == 5 and f16["recall16"]["min"] == 1 and int8["recall16"]["min"] == 1 and graph["recall16"]["mean"] > 0.9
    # 8-bit keys go out as float32
    assert tool(*args, "--layers", "3", "-ctk", "q8_0").returncode == 0
    assert shape_of(tmp_path / "layer3_head0_keys.npy") == ("<f4", (n, 64)) and shape_of(tmp_path / "layer3_head0_values.npy")[0] == "<f2"
    for flags, what in ((["--layers", "30"], "there is no layer 30"), (["--folder", tmp_path / "none"], "none/train_positions.npy: No such file"), (["-n", "1400"], "too few")):
        bad = tool(*args, *flags)
        assert bad.returncode == 1 and what in bad.stderr
