#!/bin/sh
# Prints the path of a Python that Dockyard runs on; fails when this machine has none.
# A name on the PATH proves nothing: pyenv keeps commands for versions that are switched off, and Pythons built without
# their C libraries start but cannot run us. So each candidate is run.
set -u

# The order of preference: the oldest supported has the most wheels. `python3` and `python` may be anything.
names="python3.12 python3.13 python3.14 python3.15 python3 python"

folders() {
    printf '%s\n' "$PATH" | tr ':' '\n'
    for folder in "${PYENV_ROOT:-/nonexistent}"/versions/*/bin "${HOME:-/nonexistent}"/.pyenv/versions/*/bin \
        /usr/local/bin /usr/bin /opt/bin /opt/*/bin /opt/*/*/bin; do
        printf '%s\n' "$folder"
    done
}

# Prints the path that Python itself gives: a pyenv command stands for another file. Must parse in Python 2.
ask() {
    "$1" -c '
import sys
good = sys.version_info >= (3, 12) and sys.version_info[3] == "final" and sys.implementation.name == "cpython"
if not good:
    sys.exit(1)
import bz2, ctypes, lzma, sqlite3, ssl, zlib
print(sys.executable)
' 2>/dev/null </dev/null
}

search() {
    for name in $names; do
        folders | while IFS= read -r folder; do
            [ -x "$folder/$name" ] && ask "$folder/$name" && exit 10
        done
        [ $? -eq 10 ] && return 0
    done
    return 1
}

search
