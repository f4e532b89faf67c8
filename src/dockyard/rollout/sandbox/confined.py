"""A sandbox without namespaces: Landlock, seccomp, a user of its own, and paths that a tracer translates.

For containers, where bubblewrap may make no namespaces. Nothing has to be installed and no privilege is needed; root
helps, because each sandbox then runs as a user of its own. `watcher` says which processes there are.
"""

import fcntl
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir

from dockyard.errors import DockyardError
from dockyard.rollout.sandbox import file_ops, landlock
from dockyard.rollout.sandbox.launch import (
    ETC_OF_HOST,
    FOLDERS,
    LOADER,
    OPEN_FOLDERS,
    PYTHON_FLAGS,
    TOP_FOLDERS,
    SandboxLaunch,
    SandboxLimits,
    bundle,
    etc_files,
    held_files,
    outside_user,
)

MODULES = ("file_ops", "server", "landlock", "paths", "tracer", "seccomp", "watcher")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
TERMINALS = ("ptmx", "pts")
PREFIX = "dy-"
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
ABI_VARIABLE = "DOCKYARD_LANDLOCK_ABI"
"""An environment variable that makes the kernel's Landlock look older: what holds then can be tested."""


def landlock_abi() -> int:
    """Of this kernel; 0 where it has no Landlock."""
    return min(landlock.abi(), int(os.environ.get(ABI_VARIABLE) or 1 << 20))


@contextmanager
def prepare_launch(*, server_socket: int, limits: SandboxLimits, network: bool) -> Generator[SandboxLaunch]:
    """The file descriptors that the launch refers to live as long as this block."""
    with held_files() as files:
        python, env = files.python()
        values = _values(limits, network=network, user=outside_user())
        loader = LOADER.format(code=files.hold(bundle(MODULES, values)))
        args = ("sandbox", *PYTHON_FLAGS, "-c", loader, str(server_socket))
        yield SandboxLaunch(args=args, executable=python, env=env, pass_fds=(server_socket, *files.fds))


def _values(limits: SandboxLimits, *, network: bool, user: int | None) -> dict[str, object]:
    """What the watcher is told, in plain values."""
    devices = (*DEVICES, *(TERMINALS if user is not None else ()))
    tops = [name for name in TOP_FOLDERS if Path("/", name).is_dir()]
    etc = [name for name in ETC_OF_HOST if Path("/etc", name).exists()]
    links = {
        **{f"root/{name}": os.readlink(f"/{name}") for name in tops if Path("/", name).is_symlink()},
        **{f"etc/{name}": f"/etc/{name}" for name in etc},
        **{f"dev/{name}": f"/dev/{name}" for name in devices if Path("/dev", name).exists()},
        "dev/fd": "/proc/self/fd",
        "root/var/run": "../run",
        **{f"dev/{name}": f"/proc/self/fd/{fd}" for fd, name in enumerate(("stdin", "stdout", "stderr"))},
    }
    placeholders = ("usr", "proc", "etc", "dev", *(name for name in tops if not Path("/", name).is_symlink()))
    return {
        "folder": f"{_place()}/{PREFIX}{secrets.token_hex(6)}",
        "user": user,
        "abi": landlock_abi(),
        "network": network,
        "folders": [*FOLDERS, "/logs/verifier", "/tests", *(f"/{name}" for name in placeholders)],
        "open_folders": list(OPEN_FOLDERS),
        "etc": etc_files(network=network, user=os.geteuid() if user is None else user),
        "links": links,
        "devices": [f"/dev/{name}" for name in devices],
        "shared": [
            *("usr", "proc", *tops),
            *(f"etc/{name}" for name in etc),
            *(f"dev/{name}" for name in devices),
        ],
        "readable": ["/usr", "/proc", *(f"/{name}" for name in tops), *(f"/etc/{name}" for name in etc)],
        "max_processes": limits.max_processes,
        "max_memory_bytes": limits.memory_bytes,
        "storage_bytes": limits.storage_bytes,
    }


def remove_leftovers() -> None:
    """Folders of sandboxes whose watcher was killed: each holds a lock on its own for as long as it lives."""
    for path in sorted(Path(_place()).glob(f"{PREFIX}*")):
        with suppress(OSError):
            if path.lstat().st_uid != os.geteuid():
                continue
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file_ops.empty(str(path))
                path.rmdir()
            finally:
                os.close(folder)


def _place() -> str:
    """A folder for the sandboxes' files: open to every user, on a file system that runs programs, of a short name."""
    for place in dict.fromkeys((*PLACES[:2], gettempdir(), PLACES[2])):
        if os.access(place, os.W_OK | os.X_OK) and not os.statvfs(place).f_flag & os.ST_NOEXEC:
            return place
    raise DockyardError(
        f"none of {', '.join(PLACES)} can hold a sandbox's files", hint="make /tmp writable, without `noexec`"
    )
