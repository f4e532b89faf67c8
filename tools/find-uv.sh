#!/bin/sh
# Prints the path of a uv that can read our lock file. When the machine has none, puts one into .tools/uv with pip:
# `--target` leaves the user's environment alone and also works where the system's Python is externally managed.
# Usage: find-uv.sh [PYTHON], the Python whose pip is tried first.
set -eu
cd "$(dirname "$0")/.."

usable() {
    "$1" sync --help 2>/dev/null </dev/null | grep -q -e '--check'
}

with_pip() {
    for python in "$@"; do
        if "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 8))' 2>/dev/null </dev/null; then
            printf '%s\n' "$python"
            return
        fi
    done
    echo "error: no Python with pip was found, so uv cannot be installed" >&2
    echo "hint: install uv yourself: https://docs.astral.sh/uv/getting-started/installation/" >&2
    exit 1
}

own="$PWD/.tools/uv/bin/uv"
for uv in "$(command -v uv || true)" "${HOME:-}/.local/bin/uv" "${HOME:-}/.cargo/bin/uv" "$own"; do
    if [ -n "$uv" ] && usable "$uv"; then
        printf '%s\n' "$uv"
        exit
    fi
done

python=$(with_pip ${1:+"$1"} python3 python /usr/bin/python3 /usr/local/bin/python3)
echo "installing uv into .tools/uv ..." >&2
rm -rf .tools/uv
# Settings that forbid an install outside a virtual environment, or ask for one in the home folder, are not meant for this.
PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_ROOT_USER_ACTION=ignore \
    "$python" -m pip install --quiet --disable-pip-version-check --target .tools/uv 'uv>=0.8' >&2
printf '%s\n' "$own"
