#!/bin/sh
# Installs the Debian packages that retrievald is built from and runs with, and those named as arguments, as far as they are missing.
set -eu

packages="meson ninja-build pkg-config python3 python3-jinja2 python3-pip ca-certificates
    libmicrohttpd-dev nettle-dev libuv1-dev libcjson-dev libjemalloc-dev libpcre2-dev libutf8proc-dev libxxhash-dev libsqlite3-dev libinih-dev libsystemd-dev libseccomp-dev
    libcurl4-openssl-dev $*"
command -v cc >/dev/null 2>&1 || packages="$packages gcc libc6-dev"

if ! command -v dpkg-query >/dev/null 2>&1; then
    # shellcheck disable=SC2086 # a list of words
    echo "install_packages.sh: this is no Debian system; the build needs what these packages hold there:" $packages >&2
    exit 0
fi

missing=
for package in $packages; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) in
    installed) ;;
    *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0

as_root=
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || {
        echo "install_packages.sh: packages are missing; as root: apt-get install$missing" >&2
        exit 1
    }
    as_root=sudo
fi
echo "installing:$missing" >&2
export DEBIAN_FRONTEND=noninteractive
# Lists that another source spoils may still hold all that is needed: the installation decides.
$as_root apt-get update -q >&2 || echo "install_packages.sh: apt-get update had errors; going on" >&2
# shellcheck disable=SC2086 # a list of words
$as_root apt-get install -q -y --no-install-recommends $missing >&2
