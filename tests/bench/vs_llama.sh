#!/bin/sh
# vs_llama.sh [options] PATH_TO_LLAMA_BIN [model.gguf ...]: retrievald beside llama.cpp's llama-bench, in turn, on the same files. What is measured and how:
# vs_llama.py, --help.
exec python3 "$(dirname "$0")/vs_llama.py" "$@"
