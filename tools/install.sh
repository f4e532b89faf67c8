#!/bin/sh
# Brings the virtual environment up to what `make demo` or `make test` needs; quick when nothing has changed.
# Usage: install.sh demo|dev
set -eu
cd "$(dirname "$0")/.."
unset VIRTUAL_ENV # someone else's; ours is the project's
venv=${UV_PROJECT_ENVIRONMENT:-.venv}

case ${1:-} in
    demo) set -- --extra demo --no-dev ;;
    dev) set -- --extra demo --extra swebench --extra modal --group dev ;;
    *) echo "usage: install.sh demo|dev" >&2 && exit 2 ;;
esac

runs_us() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

# An environment that works keeps its Python. UV_PYTHON is the user's own choice, and uv reads it.
choose_python() {
    if [ -n "${UV_PYTHON:-}" ] || runs_us "$venv/bin/python"; then
        return
    fi
    if python=$(sh tools/find-python.sh); then
        echo "finding Python: $python ($("$python" -V))"
        export UV_PYTHON="$python"
    else
        python=""
        echo "finding Python: none of 3.12 or newer here; uv will download 3.12"
        export UV_PYTHON=3.12 UV_PYTHON_PREFERENCE=only-managed
        trap '[ $? -eq 0 ] || echo "hint: install Python 3.12 with your package manager or pyenv, then try again" >&2' EXIT
    fi
}

# The lock file holds addresses on pypi.org, which `uv sync` follows whatever the index is. A mirror gets the same
# versions, checked by the same hashes, as a list of requirements.
install_from_mirror() {
    "$uv" venv --quiet --allow-existing "$venv"
    "$uv" export --quiet --frozen --no-emit-project "$@" --output-file "$venv/requirements.txt"
    "$uv" pip install $quiet --python "$venv/bin/python" --require-hashes --requirement "$venv/requirements.txt"
    "$uv" pip install $quiet --python "$venv/bin/python" --no-deps --editable .
}

quiet=--quiet
[ ! -t 2 ] || quiet="" # 5 GB deserve a progress bar, a log file does not

python=""
choose_python
uv=$(sh tools/find-uv.sh "$python")
# --inexact: what the user, or the other target, has installed as well stays.
if "$uv" sync --quiet --frozen --inexact --check "$@" 2>/dev/null; then
    echo "dependencies: up to date"
    exit
fi
. tools/pip-settings.sh
borrow_pip_settings
echo "installing dependencies (about 5 GB with torch, the first time) ..."
if [ -n "${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-}}" ]; then
    install_from_mirror "$@"
else
    "$uv" sync $quiet --frozen --inexact "$@"
fi
