#!/bin/sh
# Builds the image `dockyard/agents:test`: dockyard/base:1 with the agents of install-agents.sh and their Python. Quick
# when nothing has changed. Needs both install scripts first: `tools/install-docker.sh` and `tools/install-agents.sh`.
# Usage: build-agent-image.sh [DIR], where the agents are, by default .cache/agents
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/.cache/agents}
recipe=$root/tools/images/agents
[ ! -f "$root/.cache/docker/env" ] || . "$root/.cache/docker/env"

# Only what an interpreter needs to run, wherever it was installed.
copy_python() {
    rm -rf "$folder/python"
    "$folder/mini/bin/python" - "$folder/python" <<END
import shutil, sys, sysconfig
from pathlib import Path

target, stdlib = Path(sys.argv[1]), Path(sysconfig.get_path("stdlib"))
name = stdlib.name
skip = shutil.ignore_patterns("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "config-*")
shutil.copytree(stdlib, target / "lib" / name, ignore=skip)
(target / "bin").mkdir()
shutil.copy2(Path(sys._base_executable).resolve(), target / "bin" / name)
(target / "bin/python3").symlink_to(name)
for library in Path(sysconfig.get_config_var("LIBDIR")).glob(f"lib{name}.so.*"):
    shutil.copy2(library, target / "lib")
END
}

# The engine would keep the context as well, another 3 GB.
build() {
    copy_python
    cp "$recipe/setup.sh" "$folder/"
    docker buildx build --quiet --load --file "$recipe/Dockerfile" --tag "$image" "$folder" >/dev/null
    docker builder prune --force --filter type=source.local >/dev/null
    rm -rf "$folder/python" "$folder/setup.sh"
}

remove_older() {
    docker image ls --format '{{.Repository}}:{{.Tag}}' dockyard/agents | grep -v -e ":test$" -e "^$image$" |
        while IFS= read -r older; do
            docker image rm "$older" >/dev/null 2>&1 || true # a container may still use it
        done
}

base=$(docker image inspect --format '{{.Id}}' dockyard/base:1) || {
    echo "error: there is no image \`dockyard/base:1\` to build on" >&2
    echo "hint: sh tools/install-docker.sh" >&2
    exit 1
}
[ -f "$folder/openhands/versions" ] || {
    echo "error: the agents are not installed in $folder" >&2
    echo "hint: sh tools/install-agents.sh" >&2
    exit 1
}
python=$("$folder/mini/bin/python" -VV)
hash=$(cat "$folder"/*/versions "$recipe"/* "$0" | { cat && echo "$base $python"; } | sha256sum | cut -c 1-12)
image=dockyard/agents:$hash
if ! docker image inspect "$image" >/dev/null 2>&1; then
    echo "building $image (some minutes) ..."
    build
fi
docker tag "$image" dockyard/agents:test
remove_older
echo "docker: $image, also tagged dockyard/agents:test"
