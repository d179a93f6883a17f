"""`bench decode` and `bench prefill` with -ngl all: on the emulated GPU its layers are there; the program itself, where there is no device, says so once and measures the CPU.

bench_emulated.py EMULATED PROGRAM"""

import json
import os
import pathlib
import subprocess
import sys

MODEL = pathlib.Path(os.environ["RETRIEVALD_TESTS"]) / "golden/gguf/tiny-llama-q8_0.gguf"
LAYERS = 3
RUNS = {"decode": ["-d", "0,300", "-n", "2", "-c", "512", "--attention", "flat"], "prefill": ["-p", "7,64"]}


def bench(program, name):
    args = [program, "bench", name, "-m", MODEL, "-ngl", "all", "-r", "1", "-o", "jsonl", *RUNS[name]]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2 and all(line["tokens_per_second"]["median"] > 0 for line in lines), done.stdout
    return lines, done.stderr


def main():
    emulated, program = sys.argv[1:]
    for name in RUNS:
        lines, said = bench(emulated, name)
        assert all(line["gpu"] == "emulated GPU" and line["n_gpu_layers"] == LAYERS for line in lines), lines
        assert "serving from the CPU" not in said, said
        lines, said = bench(program, name)
        on_cpu = all("gpu" not in line and line["n_gpu_layers"] == 0 for line in lines)
        assert said.count("serving from the CPU: device 0") == on_cpu, said
        print(f"bench {name}: {lines[0].get('gpu', 'no device: ' + said.strip().splitlines()[-1])}")


main()
