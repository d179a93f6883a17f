#!/bin/sh
# The HTTP tests as a suite of meson's. $1: a python that may have what tests/requirements.txt names; else the system's is tried.
python=$1
[ -x "$python" ] || python=python3
if ! "$python" -c 'import openai, pytest, requests' 2>/dev/null; then
    echo "skipped: $python lacks the packages of tests/requirements.txt; sh tests/run.sh installs them"
    exit 77
fi
exec "$python" -m pytest -q -p no:cacheprovider "$(dirname "$0")"
