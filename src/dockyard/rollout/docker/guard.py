"""Make a container safe for grading, using nothing that its agent could have changed.

The container is frozen; another one, from the task's own image, empties the verifier's folders and restores the trusted
files through /proc/1/root; then every process is killed, including PID 1, into which an agent may have planted code,
and the container starts again. A frozen process runs nothing between the signal and its end.

TOOLS that the image has in a folder of PATH are restored there, and copies that the agent put into other folders of
PATH are removed. A tool that the image lacks is kept, because the task may be to install it. FILES are patterns: files
of the image are restored, others are removed. A task whose correct solution changes these needs the seal `processes`;
a task that must not trust packages either needs `strict`, or a separate verifier.
"""

# pyright: reportMissingTypeStubs=false

import logging
import re
from collections.abc import Awaitable, Callable, Iterable

from harbor.environments.base import SandboxBuildFailedError

from dockyard.config import Seal
from dockyard.rollout.blame import SealError
from dockyard.rollout.docker.docker_cli import DockerError, State, ask, require_running
from dockyard.rollout.verifier import ABOVE_TESTS

PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Folders in addition to those of the image's own PATH."""

_SHELLS = "sh bash dash ash busybox env su sudo"
_COREUTILS = (
    "[ arch b2sum base32 base64 basename cat chgrp chmod chown chroot cksum comm cp csplit cut date dd df dir dirname "
    "du echo expand expr factor false fmt fold head hostid id install join link ln logname ls md5sum mkdir mkfifo "
    "mknod mktemp mv nice nl nohup nproc numfmt od paste pathchk pr printenv printf pwd readlink realpath rm rmdir "
    "seq sha1sum sha224sum sha256sum sha384sum sha512sum shred shuf sleep sort split stat stdbuf stty sum sync tac "
    "tail tee test timeout touch tr true truncate tsort tty uname unexpand uniq unlink users vdir wc who whoami yes"
)
_TEXT = "grep egrep fgrep sed awk gawk mawk find xargs diff cmp tar gzip gunzip zcat jq which"
_PROCESSES = "kill ps pgrep pkill top pidof setsid"
_LANGUAGES = "python python3 python3.[0-9]* pip pip3 pytest perl node npm npx uv uvx"
_FETCHING = "curl wget git apt apt-get dpkg apk dnf yum"
TOOLS = tuple(f"{_SHELLS} {_COREUTILS} {_TEXT} {_PROCESSES} {_LANGUAGES} {_FETCHING}".split())

_LOADER = tuple(
    f"{folder}/{name}"
    for folder in ("/lib", "/lib64", "/lib/*-linux-gnu", "/usr/lib", "/usr/lib64", "/usr/lib/*-linux-gnu")
    for name in "ld-*.so* libc.so* libdl.so.* libm.so.* libpthread.so.* libtinfo.so.* libselinux.so.*".split()
)
_SYSTEM = tuple(
    f"/etc/{name}" for name in "bash.bashrc bashrc environment ld.so.preload pip.conf profile profile.d/*".split()
)
_HOME = tuple(
    f"{home}/{name}"
    for home in ("/root", "/home/*")
    for name in (
        *".bash_login .bash_profile .bashrc .curlrc .profile .wgetrc".split(),
        *".config/pip/pip.conf .config/uv/uv.toml .local/bin/env .pip/pip.conf".split(),
        ".local/lib/python3*/site-packages/sitecustomize.py",
        ".local/lib/python3*/site-packages/usercustomize.py",
    )
)
_PYTHON_FOLDERS = tuple(
    f"{root}/python3*/{folder}"
    for root in ("/usr/lib", "/usr/local/lib")
    for folder in ("", "dist-packages/", "site-packages/")
)
_PYTHON = tuple(f"{folder}{name}.py" for folder in _PYTHON_FOLDERS for name in ("sitecustomize", "usercustomize"))
FILES = (*_SYSTEM, *_HOME, *_PYTHON, *_LOADER, *ABOVE_TESTS)
MORE_FILES = (
    *"/etc/apt/apt.conf /etc/apt/apt.conf.d/* /etc/gitconfig /etc/npmrc /etc/uv/uv.toml".split(),
    *"/root/.gitconfig /root/.config/git/config /root/.npmrc /home/*/.gitconfig /home/*/.npmrc".split(),
    *"/etc/ld.so.cache /etc/ld.so.conf /etc/ld.so.conf.d/*".split(),
    "/root/.local/lib/python3*/site-packages/*.pth",
    "/home/*/.local/lib/python3*/site-packages/*.pth",
    *(f"{folder}*.pth" for folder in _PYTHON_FOLDERS),
)
"""Restored by `strict` only, with every library and module that the agent changed and every name of TOOLS that the
image lacks: correct solutions change these too, by `pip install`, `git config`, or `make install` and `ldconfig`."""
_LIBRARY = re.compile(r"/(usr/(local/)?)?lib(32|64|x32)?/.*(\.so(\.[\w.]+)?|\.pyc?)$")
_CLEAN = r"""
IFS='
'
set -f # patterns are taken as they are, but for the words of the loops that switch it off
root=/proc/1/root
kill -9 -1
fail() { echo "$1" >&2; exit 1; }
# The time of the last change of a file cannot be set by anyone: what has the image's was never touched.
marks() { (cd "$1" && shift && stat -c '%n %Z %s %f' -- "$@" 2>/dev/null); }
is_there() { [ -e "$1" ] || [ -L "$1" ]; }
empty() {
  if command -v find >/dev/null; then find "$1" -mindepth 1 -delete; return; fi
  set +f
  rm -rf -- "$1"/* "$1"/.[!.]* "$1"/..?*
  set -f
}
copied=
follow() {
  set -- "$1" "$1"
  while [ -L "$1" ]; do
    set -- "$(readlink "$1")" "$1"
    case $1 in /*) ;; *) set -- "${2%/*}/$1" "$1" ;; esac
    copied="$copied$1$IFS"
  done
}
[ -d $root/. ] || fail "the container cannot be looked into"

for place in $parents; do
  set +f
  for path in $root$place; do
    set -f
    own=${path#$root}
    if [ -L "$own" ]; then
      [ -L "$path" ] && [ "$(readlink "$own")" = "$(readlink "$path")" ] && continue
      rm -rf -- "$path" && cp -a -- "$own" "$path" || fail "the agent replaced $own, which cannot be restored"
      echo "$own"
    elif [ -L "$path" ]; then
      ! is_there "$own" || fail "the agent replaced $own by a link"
      rm -f -- "$path"
    fi
  done
done

for folder in $private; do
  mkdir -p -- "$root$folder" && empty "$root$folder" || fail "$folder cannot be emptied"
  if [ -d "$folder" ]; then cp -a -- "$folder/." "$root$folder/" || fail "$folder cannot be restored"; fi
done
chmod 777 "$root/logs/verifier"

known=
for folder in $folders; do
  for tool in $tools; do
    set +f
    for path in $folder/$tool ${new:+$root$folder/$tool}; do
      set -f
      if is_there "$path"; then known="$known${path##*/}$IFS"; fi
    done
  done
done
for folder in $folders; do
  [ ! -L "$folder" ] && [ -d "$root$folder" ] || continue
  ours= theirs=
  for name in $known; do
    if is_there "$root$folder/$name"; then theirs="$theirs$name$IFS"; fi
    is_there "$folder/$name" || continue
    ours="$ours$name$IFS"
    follow "$folder/$name"
  done
  if [ "$ours" = "$theirs" ] && [ "$(marks "$folder" $ours)" = "$(marks "$root$folder" $ours)" ]; then continue; fi
  echo "tools in $folder"
  (cd "$root$folder" && rm -rf -- $theirs) || fail "$folder cannot be cleaned"
  [ -z "$ours" ] || (cd "$folder" && cp -a -- $ours "$root$folder/") || fail "the tools in $folder cannot be restored"
done

for pattern in $files; do
  set +f
  for path in $root$pattern; do
    set -f
    is_there "$path" && ! is_there "${path#$root}" || continue
    echo "${path#$root}"
    rm -rf -- "$path" || fail "${path#$root} cannot be removed"
  done
  set +f
  for path in $pattern; do
    set -f
    is_there "$path" || continue
    copied="$copied$path$IFS"
    follow "$path"
  done
done
straight=
for path in $copied; do
  rest=${path#/}
  [ -L "/${rest%%/*}" ] || straight="$straight.$path$IFS"
done
[ "$(marks / $straight)" != "$(marks $root/ $straight)" ] || exit 0
for path in $straight; do
  if [ "$(marks / "$path")" != "$(marks $root/ "$path")" ]; then echo "${path#.}"; fi
  path=${path#.}
  mkdir -p -- "$root${path%/*}" && rm -rf -- "$root$path" && cp -a -- "$path" "$root$path" ||
    fail "$path cannot be restored"
done
"""

logger = logging.getLogger(__name__)


async def seal(
    container: str,
    labels: Iterable[str],
    *,
    start: Callable[[], Awaitable[object]],
    private: Iterable[str],
    level: Seal,
) -> list[str]:
    """Seal the container and return what was restored.

    `start` starts the stopped container again; `labels` are arguments for `docker run`.
    """
    state = await require_running(container)
    try:
        await _freeze(container, state)
        changed = await _changed(container) if level == "strict" else []
        script = read_script(state, private, level, changed)
        said = await ask("run", "--rm", *labels, *_guard_args(container), state.image, "-s", stdin=script.encode())
        await ask("kill", container)
        await ask("wait", container)
    except DockerError as error:
        await require_running(container)
        raise SealError(f"the environment cannot be made safe for grading: {error}") from error
    try:
        await start()
    except (DockerError, SandboxBuildFailedError) as error:
        raise SealError(f"the environment does not start again for grading: {error}") from error
    return said.splitlines()


async def _freeze(container: str, state: State) -> None:
    try:
        if not state.is_paused:
            await ask("pause", container)
    except DockerError as error:
        await require_running(container)
        logger.warning("sealing without freezing, because this engine cannot pause containers: %s", error)


def _guard_args(container: str) -> list[str]:
    return [
        *("--interactive", "--entrypoint", "/bin/sh", "--user", "0:0", "--workdir", "/"),
        *("--cap-add", "SYS_PTRACE"),  # to access a container whose PID 1 is not root
        *("--pid", f"container:{container}", "--network", "none", "--read-only"),
    ]


async def _changed(container: str) -> list[str]:
    """Return libraries and modules that differ from the image, according to the engine; of new files only bytecode."""
    lines = (await ask("diff", container)).splitlines()
    paths = [line[2:] for line in lines if line[:2] in ("C ", "D ") or line.endswith(".pyc")]
    return [path for path in paths if _LIBRARY.match(path) and _is_plain(path)]


def read_script(state: State, private: Iterable[str], level: Seal = "standard", changed: Iterable[str] = ()) -> str:
    """Return the script that the guard container runs. `changed` are further files to restore."""
    env = state.env
    folders = list(dict.fromkeys([*filter(_is_plain, env.get("PATH", "").split(":")), *PATH]))
    files = [*FILES, *filter(_is_plain, [env.get("BASH_ENV", ""), env.get("ENV", ""), *state.programs])]
    if level == "strict":
        files += [*MORE_FILES, *changed]
    if level == "processes":
        folders, files = [], []
    values = {
        "parents": sorted({parent for place in (*folders, *files, *private) for parent in parents(place)}),
        "private": private,
        "folders": folders,
        "tools": (*TOOLS, *(word for word in state.programs if _is_plain(f"/{word}") and "/" not in word)),
        "new": ["yes"] if level == "strict" else [],
        "files": files,
    }
    return "\n".join(f"{name}='{'\n'.join(words)}'" for name, words in values.items()) + _CLEAN


def parents(path: str) -> list[str]:
    """Return the path and the folders that lead to it. The agent may have replaced each of them by a link."""
    parts = path.strip("/").split("/")
    return ["/" + "/".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _is_plain(path: str) -> bool:
    """Whether the path can stand unquoted in a word list. The image names these paths, so an agent cannot hide one."""
    return path.startswith("/") and not set(path) & set(" '\"\n\t*?[]\\$`")
