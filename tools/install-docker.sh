#!/bin/sh
# Provides a Docker engine with compose v2 and buildx, and the image `dockyard/base:1`. An engine that answers is used;
# it gets what it lacks from Debian's packages. Without one, an engine of our own runs in .cache/docker, which needs
# neither an init system nor a way to Docker's registry. `. .cache/docker/env` leads to it. Quick when all is there.
# Usage: install-docker.sh [--stop], which stops that engine. INSTALL=0 keeps it from installing packages.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/.cache/docker
suite=trixie # the first with compose v2 and buildx
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
image=dockyard/base:1 # the number rises when the packages change
packages="bash ca-certificates curl git procps python3 tmux"

fail() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

usable() {
    docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1
}

may_install() {
    [ "${INSTALL:-1}" != 0 ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null
}

# $1: a pid file; $2: a word on the command line. The pid may have gone to another process since, and a dead process
# that nobody has reaped has no command line.
running() {
    pid=$(cat "$1" 2>/dev/null) && tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -qxF "$2"
}

own_engine_runs() {
    running "$folder/run/pid" "$folder/data"
}

stop() {
    rm -f "$folder/env"
    own_engine_runs || { echo "docker: no engine of ours is running" && return; }
    kill "$(cat "$folder/run/pid")"
    while own_engine_runs; do sleep 0.2; done
    # One that was killed leaves this mount behind, and the folder could not be removed.
    while mountpoint -q "$folder/data"; do umount "$folder/data"; done
    echo "docker: our engine is stopped"
}

# $@: packages; those that are there are left alone.
apt_install() {
    missing=""
    for name in "$@"; do
        dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || missing="$missing $name"
    done
    [ -n "$missing" ] || return 0
    echo "installing$missing ..."
    # shellcheck disable=SC2086 # several words
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes $missing; } \
        >"$folder/apt.log" 2>&1 </dev/null || fail "apt-get could not install$missing" "see $folder/apt.log"
}

# This machine may be sent to a mirror. The lists may be missing, as in images that were made small.
mirror() {
    [ -n "$(ls /var/lib/apt/lists/*Release 2>/dev/null)" ] || apt-get update -qq >&2
    address=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' |
        head -n 1)
    echo "${address:-http://deb.debian.org/debian/}"
}

# By an apt with a root of its own: nothing of the other release can get installed.
fetch_plugins() {
    plugins=$folder/config/cli-plugins
    [ ! -x "$plugins/docker-compose" ] || [ ! -x "$plugins/docker-buildx" ] || return 0
    echo "fetching compose and buildx ..."
    apt=$folder/apt
    rm -rf "$apt"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/etc/preferences.d" "$apt/unpacked" "$plugins"
    touch "$apt/status"
    cp -r /etc/apt/apt.conf.d /etc/apt/auth.conf* "$apt/etc/" 2>/dev/null || true # a proxy, a mirror's password
    echo "deb [signed-by=$keyring] $(mirror) $suite main" >"$apt/etc/sources.list"
    printf '%s "%s";\n' Dir "$apt" Dir::State "$apt" Dir::State::status "$apt/status" Dir::Cache "$apt/cache" \
        Dir::Etc "$apt/etc" APT::Sandbox::User root >"$apt/conf"
    (
        cd "$apt/unpacked" && export APT_CONFIG="$apt/conf" && apt-get update -qq &&
            apt-get download -qq docker-compose docker-buildx && for package in *.deb; do dpkg-deb -x "$package" .; done
    ) || fail "compose and buildx cannot be fetched from Debian's $suite" "is there a way to $(mirror)?"
    cp "$apt"/unpacked/usr/libexec/docker/cli-plugins/* "$plugins/"
    rm -rf "$apt"
}

# The path of a socket ends at 107 bytes: a checkout in a deep folder gets a short one elsewhere.
make_run_folder() {
    [ ! -d "$folder/run" ] || return 0
    rm -f "$folder/run"
    if [ ${#folder} -le 60 ]; then
        mkdir "$folder/run"
    else
        ln -s "$(mktemp -d /tmp/dockyard-docker.XXXXXX)" "$folder/run"
    fi
}

# $1: the folder for sockets and the pid file
start_engine() {
    if ! own_engine_runs; then
        rm -f "$1/pid"
        # dockerd would wait for the containerd that died with the one before it.
        containerd=$1/exec/containerd/containerd
        running "$containerd.pid" "$containerd.toml" || rm -f "$containerd.pid"
        setsid dockerd --data-root "$folder/data" --exec-root "$1/exec" --host "unix://$1/docker.sock" \
            --pidfile "$1/pid" </dev/null >>"$folder/dockerd.log" 2>&1 9>&- &
    fi
    for _ in $(seq 150); do
        ! usable || return 0
        sleep 0.2
    done
    tail -n 5 "$folder/dockerd.log" >&2
    fail "the Docker engine does not answer after 30 s" "see $folder/dockerd.log"
}

provide_engine() {
    may_install || fail "no Docker engine with compose v2 answers, and only root on Debian can be given one" \
        "start Docker, or install it: https://docs.docker.com/engine/install/"
    mkdir -p "$folder/config"
    exec 9>"$folder/lock" # another make may be at it
    flock 9
    apt_install docker.io iptables debian-archive-keyring
    fetch_plugins
    export DOCKER_CONFIG="$folder/config"
    # The machine's own engine may have lacked the plugins only.
    if ! usable; then
        make_run_folder
        run=$(cd -P "$folder/run" && pwd)
        export DOCKER_HOST="unix://$run/docker.sock"
        start_engine "$run"
    fi
    {
        [ -z "${DOCKER_HOST:-}" ] || echo "export DOCKER_HOST='$DOCKER_HOST'"
        echo "export DOCKER_CONFIG='$DOCKER_CONFIG'"
    } >"$folder/env"
}

# debootstrap fetches by wget, which does not know of apt's proxy. Minutes: the result is kept as a tarball.
bootstrap_base() {
    apt_install debootstrap debian-archive-keyring
    echo "making the root of $image by debootstrap (a minute or two) ..."
    rootfs=$folder/rootfs
    rm -rf --one-file-system "$rootfs"
    eval "$(apt-config shell http_proxy Acquire::http::Proxy)"
    export http_proxy="${http_proxy:-}"
    debootstrap --variant=minbase --keyring="$keyring" --include="$(echo "$packages" | tr ' ' ,)" \
        "$suite" "$rootfs" "$(mirror)" >"$folder/debootstrap.log" 2>&1 ||
        fail "debootstrap failed" "see $folder/debootstrap.log"
    mkdir "$rootfs/app"
    tar -C "$rootfs" --exclude './dev/*' --exclude './var/cache/apt/*' --exclude './var/lib/apt/lists/*' \
        -cf "$1.part" .
    mv "$1.part" "$1"
    rm -rf --one-file-system "$rootfs"
}

provide_base() {
    ! docker image inspect "$image" >/dev/null 2>&1 || return 0
    mkdir -p "$folder"
    tarball=$folder/$(echo "$image" | tr '/:' '--').tar
    if [ ! -f "$tarball" ] && ! may_install; then
        docker buildx build --quiet --load --build-arg "packages=$packages" --tag "$image" "$root/tools/images/base"
        return
    fi
    [ -f "$tarball" ] || bootstrap_base "$tarball"
    docker import --change 'WORKDIR /app' "$tarball" "$image" >/dev/null
}

case ${1:-} in
    "") ;;
    --stop) stop && exit ;;
    *) echo "usage: install-docker.sh [--stop]" >&2 && exit 2 ;;
esac
! own_engine_runs || [ ! -f "$folder/env" ] || . "$folder/env"
if usable; then
    [ "${DOCKER_CONFIG:-}" = "$folder/config" ] || rm -f "$folder/env"
    echo "docker: the engine that answers is used"
else
    provide_engine
    echo "docker: \`. .cache/docker/env\` leads to the engine"
fi
provide_base
echo "docker: $image is there"
