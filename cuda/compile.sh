#!/bin/sh
# Runs nvcc, $2 and on, and keeps in $1 what it says of the kernels' registers and memory (tests/simt/resources.py reads that).
log=$1
shift
"$@" -Xptxas -v 2>"$log" || { cat "$log" >&2; exit 1; }
