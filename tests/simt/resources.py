"""Prints registers, static shared memory and local memory of each kernel on each architecture, from what ptxas said when it was built (cuda/compile.sh).
Fails when a kernel spills registers, or one of decoding's uses local memory at all. Shared memory that a launch gives is not known here.

resources.py LOG...: named as the .cu file, with .ptxas instead of .o"""

import collections
import pathlib
import re
import subprocess
import sys

DECODE = ("matvec.cu", "rows.cu", "attend_decode.cu", "dequantize.cu")
KERNEL = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers(.*?)$", re.S | re.M
)


def demangled(names):
    out = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: re.sub(r"^void |\(gpu_type\)|\([^()]*(\([^()]*\)[^()]*)*\)$", "", text) for name, text in zip(names, out)}


def main():
    failed = 0
    for log in map(pathlib.Path, sys.argv[1:]):
        kernels = collections.defaultdict(dict)
        for name, arch, stack, stores, loads, registers, rest in KERNEL.findall(log.read_text()):
            shared = re.search(r"(\d+) bytes smem", rest)
            kernels[name][int(arch)] = (int(registers), int(shared.group(1)) if shared else 0, int(stack), int(stores) + int(loads))
        if not kernels:
            continue
        archs = sorted({arch for of in kernels.values() for arch in of})
        names = demangled(list(kernels))
        print(f"\n{log.stem}: registers/shared bytes (local bytes) on sm_{', '.join(map(str, archs))}")
        for name in sorted(kernels, key=names.get):
            of = kernels[name]
            cells = (f"{of[a][0]}/{of[a][1]}" + (f"({of[a][2]})" if of[a][2] else "") if a in of else "-" for a in archs)
            print(f"  {names[name]:<60}" + "".join(f"{cell:>12}" for cell in cells))
            for a, (_, _, stack, spilled) in of.items():
                if spilled or (stack and log.stem in DECODE):
                    print(f"FAILED: {names[name]} on sm_{a}: {stack} bytes of local memory, {spilled} of spills")
                    failed += 1
    seen = {pathlib.Path(log).stem for log in sys.argv[1:]}
    missing = [name for name in DECODE if name not in seen]
    if missing:
        print(f"FAILED: no log of {', '.join(missing)}")
    return 1 if failed or missing else 0


sys.exit(main())
