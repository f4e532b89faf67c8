"""What a sandbox looks like inside, and how one is started: the parts that both mechanisms share."""

import marshal
import os
import secrets
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path, PurePosixPath

TOP_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
VISIBLE = ("/usr", *(f"/{name}" for name in TOP_FOLDERS))
"""Folders of the host that every sandbox can read."""
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
"""Runs the last module as a program. The others are found by it under the names they have here."""
_starts = count(secrets.randbelow(1 << 20))


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLaunch:
    """How to start one sandbox: the arguments of `subprocess` by their own names."""

    args: tuple[str, ...]
    executable: str
    env: dict[str, str]
    pass_fds: tuple[int, ...]
    user: int | None = None
    """Outside. None keeps the driver's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a sandbox may use in all."""

    storage_bytes: int
    memory_bytes: int
    """Enforced as a sum without namespaces only; with them it bounds each process."""
    max_processes: int


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether the path is one of the folders or in one of them."""
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def etc_files(*, network: bool, user: int = 0) -> dict[str, str]:
    """The files of /etc that are not the host's. `user` is called root."""
    resolver = Path("/etc/resolv.conf")
    files = {name: text.format(user=user) for name, text in _ETC.items()}
    return files | ({"resolv.conf": resolver.read_text()} if network and resolver.is_file() else {})


def outside_user() -> int | None:
    """A user that owns nothing, when the driver is root: a sandbox started by root could read root's files.

    Its own per sandbox. None in a container that maps no other users: its root is nobody outside.
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
    """Modules of this package, compiled here for the same interpreter there."""
    folder = Path(__file__).parent
    return tuple(
        (f"{_PACKAGE}.{name}", marshal.dumps(compile((folder / f"{name}.py").read_text(), f"{name}.py", "exec")))
        for name in names
    )


def bundle(names: tuple[str, ...], values: dict[str, object]) -> int:
    """A file in memory for `LOADER`: the modules, the last of which is run, and what it is told."""
    modules = [(name, marshal.loads(code)) for name, code in program(*names)]
    return in_memory(marshal.dumps((values, modules)))


@contextmanager
def held_files() -> Generator["HeldFiles"]:
    """File descriptors for a launch, which live as long as this block."""
    held = HeldFiles()
    try:
        yield held
    finally:
        for fd in held.fds:
            os.close(fd)


class HeldFiles:
    """Programs and folders under the driver's home may be closed to a sandbox's user: it gets them as descriptors."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def hold(self, fd: int) -> int:
        self.fds.append(fd)
        return fd

    def path_of(self, path: str) -> str:
        return f"/proc/self/fd/{self.hold(os.open(path, os.O_PATH))}"

    def python(self) -> tuple[str, dict[str, str]]:
        """The Python behind the virtual environment, and the variables that it needs."""
        prefix = self.path_of(sys.base_prefix)
        installed = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
        program = str(installed if installed.exists() else Path(sys.executable).resolve())
        return self.path_of(program), {"PYTHONHOME": prefix, "LD_LIBRARY_PATH": f"{prefix}/lib"}


def in_memory(data: bytes) -> int:
    """A file descriptor from which `data` can be read."""
    fd = os.memfd_create("data", os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
