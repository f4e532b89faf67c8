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

# One that is there stays as it is: asked again, uv would look for a Python by its own rules, and may download another.
make_venv() {
    runs_us "$venv/bin/python" || "$uv" venv --quiet --allow-existing "$venv"
}

# The lock file holds addresses on pypi.org, which `uv sync` follows whatever the index is. A mirror gets the same
# versions, checked by the same hashes, as a list of requirements. Packages in $left_out are not installed.
install_locked() {
    if [ -z "${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-}}" ]; then
        "$uv" sync $quiet --frozen --inexact $(each --no-install-package $left_out) "$@"
        return
    fi
    make_venv
    "$uv" export --quiet --frozen --no-emit-project $(each --no-emit-package $left_out) "$@" \
        --output-file "$venv/requirements.txt"
    # --no-deps: the list is complete but for what is left out.
    "$uv" pip install $quiet --python "$venv/bin/python" --no-deps --require-hashes --requirement "$venv/requirements.txt"
    "$uv" pip install $quiet --python "$venv/bin/python" --no-deps --editable .
}

install_without_gpu() {
    make_venv # whose Python the build must be for
    if has_torch; then
        install_locked "$@"
        return
    fi
    if index_has_torch; then
        install_locked "$@"
        echo "torch: no GPU here, so its CPU build from $cpu_index, without CUDA's libraries"
        install_torch_from "$cpu_index" $quiet
        return
    fi
    echo "torch: no GPU here, but $cpu_index has no CPU build of $(torch_version) for this Python or does not answer:"
    echo "  PyPI's build for CUDA, without what it does not need to start (DOCKYARD_TORCH_INDEX names another index)"
    left_out="torch $unneeded" && install_locked "$@"
    left_out=$unneeded && install_locked "$@"
    if ! torch_imports; then
        echo "torch: does not start without them, so everything is installed"
        left_out="" && install_locked "$@"
    fi
}

is_complete() {
    "$uv" sync --quiet --frozen --inexact --check $(each --no-install-package $left_out) "$@" 2>/dev/null || return 1
    [ -z "$left_out" ] || has_torch
}

quiet=--quiet
[ ! -t 2 ] || quiet="" # a download of GBs deserves a progress bar, a log file does not

python=""
choose_python
uv=$(sh tools/find-uv.sh "$python")
. tools/torch-build.sh
left_out="" # packages of the lock file
! wants_cpu_build || left_out="torch $(cuda_packages)"
# --inexact: what the user, or the other target, has installed as well stays.
if is_complete "$@"; then
    echo "dependencies: up to date"
    exit
fi
. tools/pip-settings.sh
borrow_pip_settings
echo "installing dependencies (up to 6 GB with torch, the first time) ..."
if wants_cpu_build; then
    install_without_gpu "$@"
else
    install_locked "$@"
fi
echo "dependencies: $(du -sh "$venv" | cut -f 1) in $venv"
