"""Start, watch and end a sandbox without namespaces: three processes, each more restricted than the one before.

The watcher has the driver's rights and runs no code of the task: it creates the sandbox's folder, measures what the
sandbox uses, ends it when the driver has ended or a limit is exceeded, and removes the folder. The tracer, its child,
has dropped access to all files except those of the sandbox and, if possible, the driver's user. The server, the
tracer's child, works as in every sandbox; a child of it starts the commands, so that they reach neither server nor
tracer.

Runs with the standard library only, from code that the driver passes.
"""

import fcntl
import os
import resource
import select
import sys
import time

from dockyard.rollout.sandbox import file_ops, landlock, seccomp, server
from dockyard.rollout.sandbox.paths import Paths
from dockyard.rollout.sandbox.tracer import Tracer

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
CAPABILITIES = 64
CHECK_S = 0.5
LONGEST_GAP_S = 10.0
DEEPEST = 500
"""The maximum depth of folders: one is open for each level while their sizes are added up."""
SIGKILL = 9
BLOCK_BYTES = 512
ENTRY_BYTES = 1024  # counted for every entry, also an empty file: its name and its metadata
SPARE_BYTES = 1 << 20
"""In addition to a task's storage: a download of all of it is one memory file, including headers."""


class Settings:
    """The driver's settings. Not a dataclass: importing that would take longer than the rest of the start."""

    folder: str
    user: int | None
    abi: int
    network: bool
    folders: list[str]
    open_folders: list[str]
    etc: dict[str, str]
    links: dict[str, str]
    """From names in the sandbox's folder to what is shared with the host."""
    devices: list[str]
    shared: list[str]
    readable: list[str]
    max_processes: int
    max_memory_bytes: int
    storage_bytes: int

    def __init__(self, values: dict[str, object]) -> None:
        vars(self).update(values)


def main(settings: Settings, server_socket: int) -> None:
    os.setsid()  # otherwise Ctrl-C would end it before it has cleaned up
    server.call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        make_folder(settings)
        run(settings, server_socket)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        if os.path.isdir(settings.folder):
            file_ops.empty(settings.folder)
            os.rmdir(settings.folder)


def run(settings: Settings, server_socket: int) -> None:
    """Run the sandbox until all of its processes have ended."""
    ended, held = os.pipe()
    tracer = os.fork()
    if tracer == 0:
        os.close(ended)
        trace(settings, server_socket)
    os.close(held)
    os.close(server_socket)
    try:
        if reason := watch(settings, tracer, ended):
            os.write(2, reason.encode() + b"\n")
    finally:
        os.kill(tracer, SIGKILL)  # the kernel kills the processes that it traces
        reap_all()


def make_folder(settings: Settings) -> None:
    """Create the sandbox's own files. Only what a task may write belongs to its user."""
    os.umask(0o022)
    folder = settings.folder
    os.mkdir(folder, 0o711)
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX)  # as long as this process lives
    for name in ("root", "etc", "dev"):
        os.mkdir(f"{folder}/{name}")
    for path in (*settings.folders, *settings.open_folders):
        os.makedirs(f"{folder}/root{path}", exist_ok=True)
    os.mkdir(f"{folder}/dev/shm")
    for path in (*(f"{folder}/root{path}" for path in settings.open_folders), f"{folder}/dev/shm"):
        os.chmod(path, 0o1777)
    for name, text in settings.etc.items():
        with open(f"{folder}/etc/{name}", "w") as file:
            file.write(text)
    for path, target in settings.links.items():
        os.makedirs(os.path.dirname(f"{folder}/{path}"), exist_ok=True)
        os.symlink(target, f"{folder}/{path}")
    if settings.user is not None:
        give_away(f"{folder}/root", settings.user)
        os.chown(f"{folder}/dev/shm", settings.user, settings.user)
    os.chmod(f"{folder}/root", 0o700 if settings.user is not None else 0o755)


def give_away(folder: str, user: int) -> None:
    for place, names, _ in os.walk(folder):
        os.chown(place, user, user)
        for name in names:
            os.chown(os.path.join(place, name), user, user, follow_symlinks=False)


def watch(settings: Settings, tracer: int, ended: int) -> str | None:
    """Wait until the sandbox has ended or must be ended. Return the limit that it exceeded, if that is the reason."""
    events = select.poll()
    events.register(0, select.POLLIN)  # held open by the driver as long as it lives
    events.register(ended, select.POLLIN)
    next_walk = time.monotonic()
    while not events.poll(CHECK_S * 1000):
        if takes_more(descendants(tracer), settings.max_memory_bytes):
            return f"its processes took more than {settings.max_memory_bytes >> 20} MB of memory"
        if (begin := time.monotonic()) >= next_walk:
            try:
                if used_bytes(settings.folder, most := 2 * settings.storage_bytes) > most:
                    return f"its files took more than {most >> 20} MB"
            except RecursionError:
                return f"its folders were nested more than {DEEPEST} deep"
            next_walk = begin + min(20 * (time.monotonic() - begin), LONGEST_GAP_S)
    return None


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    pending = [pid]
    while pending:
        process = pending.pop()
        try:
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children", "rb") as file:
                    pending += map(int, file.read().split())
        except OSError:  # it ended meanwhile
            continue
        found.append(process)
    return found


def takes_more(pids: list[int], limit: int) -> bool:
    """Whether the processes use more memory that is not backed by a file on a disk.

    The fast sum counts a page once for each process that shares it, so it is used only if it is below the limit.
    """
    if sum(kilobytes(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:")) for pid in pids) << 10 <= limit:
        return False
    shares = (b"Pss_Anon:", b"Pss_Shmem:")
    return sum(kilobytes(f"/proc/{pid}/smaps_rollup", shares) for pid in pids) << 10 > limit


def kilobytes(file: str, lines: tuple[bytes, ...]) -> int:
    """Return the sum of these lines of a file in /proc."""
    try:
        with open(file, "rb") as content:
            return sum(int(line.split()[1]) for line in content if line.startswith(lines))
    except (OSError, ValueError):  # the process ended meanwhile
        return 0


class Folder:
    """A folder that is being walked, by a descriptor: its path may be too long, or lead elsewhere meanwhile."""

    def __init__(self, name: str, parent: int | None = None) -> None:
        self._closed: tuple[int, int] | None = None
        flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self.fd = os.open(name, os.O_RDONLY | flags, dir_fd=parent)
        except PermissionError:  # the task removed the permissions to hide the contents
            place = os.open(name, os.O_PATH | flags, dir_fd=parent)
            try:
                self._closed = place, os.fstat(place).st_mode & 0o7777
                os.chmod(f"/proc/self/fd/{place}", 0o700)
                self.fd = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                os.close(place)
                raise
        self.folders: list[str] = []

    def measure(self) -> int:
        """Return the size of its own entries, and collect its subfolders in `folders`."""
        total = 0
        try:
            names = os.listdir(self.fd)
        except OSError:  # the other folders are still counted
            return 0
        for name in names:
            try:
                info = os.lstat(name, dir_fd=self.fd)
            except OSError:  # removed meanwhile
                continue
            total += info.st_blocks * BLOCK_BYTES + ENTRY_BYTES
            if file_ops.is_folder(info):
                self.folders.append(name)
        return total

    def close(self) -> None:
        os.close(self.fd)
        if self._closed:
            place, mode = self._closed
            os.chmod(f"/proc/self/fd/{place}", mode)
            os.close(place)


def used_bytes(folder: str, enough: int) -> int:
    """Return the disk space of all files below, counted up to `enough`. Raise RecursionError if they are too deep."""
    walk = [Folder(folder)]
    total = walk[-1].measure()
    try:
        while walk and total <= enough:
            if not walk[-1].folders:
                walk.pop().close()
                continue
            if len(walk) > DEEPEST:
                raise RecursionError
            try:
                walk.append(Folder(walk[-1].folders.pop(), walk[-1].fd))
            except OSError:  # removed meanwhile
                continue
            total += walk[-1].measure()
    finally:
        for place in reversed(walk):
            place.close()
    return total


def reap_all() -> None:
    """Wait for all children. Orphans become children of this process, so then no process of the sandbox is left."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def trace(settings: Settings, server_socket: int) -> None:
    """Be the tracer. Never returns."""
    code = 1
    try:
        with open("/proc/self/oom_score_adj", "wb") as file:
            file.write(b"1000")  # when the host runs out of memory, it kills sandboxes before the trainer
        if settings.user is not None:
            become(settings.user)
        server.call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)  # and the processes that it traces end with it
        largest = settings.storage_bytes + SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        landlock.restrict_files(rules(settings), settings.abi)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)  # a command could open it again and so keep it open
        go, begin = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(begin)
            os.read(go, 1)
            serve(settings, server_socket)
        os.close(server_socket)
        writable = tuple(f"{settings.folder}/{name}".encode() for name in ("root", "dev/shm"))
        shared = tuple(f"/{name}".encode() for name in settings.shared)
        tracer = Tracer(paths(settings), writable, shared, settings.max_processes)
        tracer.seize(child)
        os.close(begin)
        tracer.run()
        code = 0
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(code)


def become(user: int) -> None:
    """Change permanently to a user that owns only the sandbox."""
    for capability in range(CAPABILITIES):
        server.call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    server.call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise it cannot be traced; Landlock excludes other tracers


def serve(settings: Settings, server_socket: int) -> None:
    """Be the server. Never returns."""
    try:
        root = os.stat(f"{settings.folder}/root").st_ino
        own_user = settings.user is not None
        seccomp.apply(seccomp.build(network=settings.network, own_user=own_user))
        landlock.stand_apart(settings.abi)
        has_scopes = settings.abi >= landlock.ABI_OF_SCOPES
        if os.stat("/").st_ino != root:
            raise OSError("ptrace does not let paths be translated here")
        server.run_confined(server_socket, lambda: landlock.stand_apart(settings.abi), has_scopes=has_scopes)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(1)


def rules(settings: Settings) -> list[tuple[str, int]]:
    folder = settings.folder
    return [
        (f"{folder}/root", landlock.ALL),
        (f"{folder}/dev/shm", landlock.ALL),
        (f"{folder}/etc", landlock.READ),
        (f"{folder}/dev", landlock.READ),
        *((path, landlock.READ) for path in settings.readable),
        *((path, landlock.DEVICE | landlock.READ_DIR) for path in settings.devices),
    ]


def paths(settings: Settings) -> Paths:
    folder = settings.folder.encode()
    moved = {b"etc": folder + b"/etc", b"dev": folder + b"/dev"}
    return Paths(folder + b"/root", moved, frozenset(map(str.encode, settings.shared)))


if __name__ == "__main__":
    main(Settings(globals()["SETTINGS"]), int(sys.argv[1]))
