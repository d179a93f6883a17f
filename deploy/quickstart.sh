#!/bin/sh
# Two questions about a text that ships with the project, from a fresh machine: installs what is missing, builds, fetches the demo model, starts
# the daemon, asks. Leaves the daemon running. --check stops it again and exits 0 only if both answers came, the second one from the kept context
# with its keys found through the graph. --port N listens there instead of 8080.
set -eu

usage="usage: sh deploy/quickstart.sh [--check] [--port N]"
check=
port=8080
while [ $# -gt 0 ]; do
    case $1 in
    --check) check=--check ;;
    --port) [ $# -gt 1 ] || { echo "$usage" >&2; exit 2; }; shift; port=$1 ;;
    --port=*) port=${1#--port=} ;;
    -h | --help) echo "$usage"; exit 0 ;;
    *) echo "quickstart.sh: unknown argument '$1'
$usage" >&2; exit 2 ;;
    esac
    shift
done
case $port in
'' | *[!0-9]*) bad_port=1 ;;
*) bad_port=; [ "${#port}" -le 5 ] && [ "$port" -ge 1 ] && [ "$port" -le 65535 ] || bad_port=1 ;;
esac
[ -z "$bad_port" ] || { echo "quickstart.sh: --port must be a number from 1 to 65535, not '$port'" >&2; exit 2; }

cd "$(dirname "$0")/.."
root=$(pwd -P)
binary=$root/build/server/retrievald
state=$root/build/quickstart
pid_file=$state/$port.pid
log=$state/$port.log

port_open() {
    python3 -c 'import socket, sys; sys.exit(socket.socket().connect_ex(("127.0.0.1", int(sys.argv[1]))) != 0)' "$port"
}

# The daemon of an earlier run on this port: sets pid, and fresh if it is the program as it is built now.
find_running() {
    pid='' fresh=''
    [ -s "$pid_file" ] || return 0
    candidate=$(cat "$pid_file")
    case $candidate in *[!0-9]*) return 0 ;; esac
    case $(readlink "/proc/$candidate/exe" 2>/dev/null) in
    "$binary") pid=$candidate fresh=1 ;;
    "$binary (deleted)") pid=$candidate ;;
    esac
}

stop_daemon() {
    kill -TERM "$pid" 2>/dev/null || true
    if [ -n "$child" ]; then
        wait "$pid"
    else
        timeout 60 tail --pid="$pid" -f /dev/null
    fi
}

child=
finished=
on_exit() {
    status=$?
    trap - EXIT
    if [ -n "$child" ] && [ -z "$finished" ]; then
        stop_daemon || true
        rm -f "$pid_file"
    fi
    exit "$status"
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

sh deploy/install_packages.sh

find_running
if [ -z "$pid" ] && port_open; then
    echo "quickstart.sh: port $port is taken by another program; stop that, or choose another port with --port N" >&2
    exit 1
fi

if [ ! -f build/build.ninja ]; then
    echo "configuring build/" >&2
    meson setup build >build-setup.log 2>&1 || { cat build-setup.log >&2; echo "quickstart.sh: meson setup failed" >&2; exit 1; }
    mv build-setup.log build/setup.log
fi
mkdir -p "$state"
quiet=--quiet
[ -t 1 ] && quiet= # ninja's own progress line
[ -x "$binary" ] || echo "building (a minute or two)" >&2
ninja -C build $quiet server/retrievald >&2
model=$(sh deploy/fetch_model.sh)

find_running # the build may have made the running one stale
if [ -n "$pid" ] && [ -z "$fresh" ]; then
    echo "restarting the daemon: the program was built anew" >&2
    stop_daemon
    pid=
fi
if [ -n "$pid" ]; then
    echo "the daemon of an earlier run still serves port $port (process $pid)" >&2
else
    echo "starting the daemon on 127.0.0.1:$port" >&2
    [ -z "$check" ] || rm -rf "$state/$port.contexts" # the first answer is to be the first
    setsid nohup "$binary" serve -m "$model" --host 127.0.0.1 --port "$port" --alias smollm2 --state-dir "$state/$port.contexts" >"$log" 2>&1 </dev/null &
    pid=$!
    child=1
    echo "$pid" >"$pid_file"
fi

# shellcheck disable=SC2086 # $check is empty or one word
python3 deploy/ask.py --port "$port" --pid "$pid" --document deploy/demo/three-books.txt $check || {
    echo "quickstart.sh: failed; the daemon's log ends:" >&2
    tail -n 15 "$log" >&2 2>/dev/null || true
    exit 1
}

finished=1
if [ -n "$check" ]; then
    rm -f "$pid_file"
    stop_daemon || { echo "quickstart.sh: the daemon did not end cleanly; its log: $log" >&2; exit 1; }
    echo "check passed"
else
    echo "
The daemon goes on at http://127.0.0.1:$port (process $pid, log $log).
Stop it with: kill $pid"
fi
