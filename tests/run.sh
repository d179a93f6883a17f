#!/bin/sh
# Installs what the tests need, builds, and runs them all: the C suites in a release build (build/) and again under the address and undefined behaviour
# sanitizers (build-asan/), what threads share under the thread sanitizer (build-tsan/), the Python tests, and the quickstart. The last line is "N passed, N failed";
# exits 0 only if all ran and nothing failed.
set -u
cd "$(dirname "$0")/.." || exit 1
root=$(pwd -P)
passed=0
failed=0

heading() {
    printf '\n==== %s\n' "$*"
}

# A step that could not run counts as a failure.
broken() {
    echo "FAILED: $*"
    failed=$((failed + 1))
}

finish() {
    heading result
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
}

# Adds up what tests/count.py finds in a report; $1 report, $2 name of the step, $3 exit status of the runner.
count() {
    if [ ! -s "$1" ] || ! counts=$(python3 tests/count.py "$1"); then
        broken "$2 did not run"
        return
    fi
    printf '%s\n' "$counts" | sed '$d'
    last=$(printf '%s\n' "$counts" | tail -n 1)
    passed=$((passed + ${last% *}))
    failed=$((failed + ${last#* }))
    echo "$2: ${last% *} passed, ${last#* } failed"
    if [ "${last% *}" -eq 0 ] && [ "${last#* }" -eq 0 ]; then
        broken "$2 ran no test"
    elif [ "$3" -ne 0 ] && [ "${last#* }" -eq 0 ]; then
        broken "$2 ended with status $3"
    fi
}

# Sets up a build folder, or looks again at the sources if it is there, and builds it, or only $target of it. $1 folder, the rest meson's options.
build() {
    dir=$1
    shift
    heading "build in $dir/"
    [ ! -f "$dir/build.ninja" ] || set -- --reconfigure "$@"
    meson setup "$dir" "$@" >"$dir.log" 2>&1 || { cat "$dir.log"; rm -f "$dir.log"; return 1; }
    rm -f "$dir.log"
    ninja -C "$dir" --quiet ${target:-}
}

suites() {
    dir=$1
    shift
    for suite in "$@"; do
        heading "$suite tests in $dir/"
        rm -f "$dir/meson-logs/testlog.json"
        # shellcheck disable=SC2086 # words: options of env
        env ${without:-} meson test -C "$dir" --no-rebuild --print-errorlogs --suite "$suite"
        count "$dir/meson-logs/testlog.json" "$suite ($dir)" $?
    done
}

heading packages
sh deploy/install_packages.sh check libsubunit-dev g++ python3-venv clang libclang-rt-14-dev || { broken "packages cannot be installed"; finish; }

sh deploy/install_packages.sh buildah debootstrap || echo "no buildah or debootstrap: tests/deploy will be skipped"

heading models
RETRIEVALD_SMOLLM2=$(sh deploy/fetch_model.sh) || { broken "the demo model cannot be fetched"; finish; }
RETRIEVALD_QWEN05=$(sh deploy/fetch_model.sh qwen05) || broken "qwen05 cannot be fetched"
RETRIEVALD_GEMMA3=$(sh deploy/fetch_model.sh gemma3) || broken "gemma3 cannot be fetched"
export RETRIEVALD_SMOLLM2 RETRIEVALD_QWEN05 RETRIEVALD_GEMMA3

build build || { broken "the release build"; finish; }
build build-asan -Db_sanitize=address,undefined -Dbuildtype=debugoptimized || broken "the sanitizer build"

suites build unit kernel golden index fault simt
if [ -f build-asan/build.ninja ]; then
    export ASAN_OPTIONS=detect_leaks=1:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
    # real models would take most of an hour here; the tiny ones in tests/golden are of every kind
    without='-u RETRIEVALD_SMOLLM2 -u RETRIEVALD_QWEN05 -u RETRIEVALD_GEMMA3'
    suites build-asan unit kernel golden index simt
    without=
    unset ASAN_OPTIONS UBSAN_OPTIONS
fi

if (target='tests/test_publish tests/test_pool tests/test_trace'; build build-tsan -Db_sanitize=thread -Dbuildtype=debugoptimized -Db_lundef=false); then
    heading "threads in build-tsan/"
    rm -f build-tsan/meson-logs/testlog.json
    meson test -C build-tsan --no-rebuild --print-errorlogs test_publish test_pool test_trace
    count build-tsan/meson-logs/testlog.json "threads (build-tsan)" $?
else
    broken "the thread sanitizer's build"
fi

# Finds go to build-fuzz/; what is worth keeping is copied to tests/fuzz/corpus by hand. $1 program, the rest its arguments.
fuzz() {
    name=$1
    shift
    mkdir -p "build-fuzz/corpus-$name"
    "build-fuzz/tests/$name" "build-fuzz/corpus-$name" "$@" -max_total_time=60 -rss_limit_mb=2048 -timeout=60 -print_final_stats=1 -artifact_prefix=build-fuzz/ \
        >"build-fuzz/$name.log" 2>&1
}

# $1 program, $2 its exit status.
fuzzed() {
    if [ "$2" -ne 0 ]; then
        tail -n 60 "build-fuzz/$1.log"
        broken "the fuzzer found something: build-fuzz/$1.log"
    else
        echo "$1:"
        grep -E '^(Done|stat::number_of_executed_units)' "build-fuzz/$1.log"
        passed=$((passed + 1))
    fi
}

if (
    target='tests/fuzz_model tests/fuzz_index tests/fuzz_segment'
    export CC=clang
    build build-fuzz -Db_sanitize=address,undefined -Dbuildtype=debugoptimized -Db_lundef=false -Dc_args=-fsanitize=fuzzer-no-link
); then
    heading "fuzzing the loaders of models, indexes and kept contexts, 60 s each"
    export ASAN_OPTIONS=detect_leaks=1:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
    fuzz fuzz_model tests/fuzz/corpus tests/golden/gguf/hostile -dict=tests/fuzz/gguf.dict -max_len=65536 -malloc_limit_mb=256 &
    models=$!
    fuzz fuzz_index -max_len=4096
    fuzzed fuzz_index $?
    wait $models
    fuzzed fuzz_model $?
    fuzz fuzz_segment -max_len=1024
    fuzzed fuzz_segment $?
    unset ASAN_OPTIONS UBSAN_OPTIONS
else
    broken "the fuzzer's build"
fi

heading "Python tests"
if python3 -m venv build/venv && build/venv/bin/pip install -q --disable-pip-version-check -r tests/requirements.txt; then
    rm -f build/pytest.xml
    RETRIEVALD=$root/build/server/retrievald build/venv/bin/python -m pytest -q -p no:cacheprovider -n 2 --dist loadfile --junitxml=build/pytest.xml tests
    count build/pytest.xml "Python tests" $?
    heading "HTTP tests, the server under the sanitizers"
    rm -f build/pytest-asan.xml
    ASAN_OPTIONS=detect_leaks=1:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 RETRIEVALD_FAKE_BIN=$root/build-asan/tests/retrievald-fake \
        build/venv/bin/python -m pytest -q -p no:cacheprovider -n 2 --dist loadfile --junitxml=build/pytest-asan.xml tests/http --ignore=tests/http/test_real.py
    count build/pytest-asan.xml "HTTP tests (build-asan)" $?
else
    broken "the Python tests' packages cannot be installed"
fi

heading quickstart
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
if sh deploy/quickstart.sh --check --port "$port"; then
    passed=$((passed + 1))
else
    broken "deploy/quickstart.sh --check"
fi

finish
