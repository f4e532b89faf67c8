#!/bin/sh
# Makes an environment with Dockyard, one release of verifiers and what tests need, and prints the path of its Python.
# Not the project's own: verifiers asks for older clients than the rest. Quick when it is there already.
# Usage: install-verifiers.sh VERSION DIR
set -eu
cd "$(dirname "$0")/.."
[ $# -eq 2 ] || { echo "usage: install-verifiers.sh VERSION DIR" >&2 && exit 2; }
unset VIRTUAL_ENV
mkdir -p "$2"
venv=$(cd "$2" && pwd)
done="$venv/verifiers-$1"
# Known to work; without them a new release of anything would be taken, and tried by nobody.
versions="tools/verifiers-$1.txt"
[ -e "$versions" ] || { echo "error: verifiers $1 has no list of versions, \`$versions\`" >&2 && exit 2; }
# What it was made from: another pyproject.toml means other dependencies.
stamp=$(cat pyproject.toml "$versions" | cksum)

if [ "$(cat "$done" 2>/dev/null)" != "$stamp" ]; then
    python=$(sh tools/find-python.sh) || {
        echo "error: no Python of 3.12 or newer was found" >&2
        echo "hint: install it with your package manager or pyenv, then try again" >&2
        exit 1
    }
    uv=$(sh tools/find-uv.sh "$python")
    . tools/pip-settings.sh
    borrow_pip_settings
    echo "installing verifiers $1 into $venv ..." >&2
    "$uv" venv --quiet --clear --python "$python" "$venv"
    # As in pyproject.toml: Harbor asks for a certifi newer than some registries carry.
    echo 'certifi>=2025.1.1' >"$venv/overrides.txt"
    # verifiers' client for training reads tokenizers by transformers, without torch.
    "$uv" pip install --quiet --python "$venv/bin/python" --override "$venv/overrides.txt" \
        --constraint "$versions" --editable '.[prime-rl]' "verifiers==$1" transformers 'pytest>=8.4' 'pytest-asyncio>=1.1'
    printf '%s\n' "$stamp" >"$done"
fi
printf '%s\n' "$venv/bin/python"
