"""Translate the paths of the processes in a sandbox without namespaces, by ptrace: each sandbox has an /app of its own.

A seccomp filter stops a process at calls with a path. If the path is elsewhere outside, the translated path is written
to memory that the tracer made the process map, and the argument is restored when the call returns. For files this is a
convenience, not the security boundary: a program could change the path meanwhile, and Landlock decides what it may
open. Changes that Landlock does not control (modes, times) are made by the tracer itself, on a file that it checked.

x86-64 only. Runs where a sandbox is started, with the standard library only.
"""

import ctypes
import os
import struct
from _collections_abc import Callable

from dockyard.rollout.sandbox.paths import Paths

PTRACE = 101
PEEK, POKE, CONT, GETREGS, SETREGS, SYSCALL = 2, 5, 7, 12, 13, 24
GETEVENTMSG, SEIZE, LISTEN = 0x4201, 0x4206, 0x4208
OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x80 | 0x100000  # sysgood, fork, vfork, clone, exec, seccomp, exitkill
EVENT_FORK, EVENT_VFORK, EVENT_CLONE, EVENT_EXEC, EVENT_SECCOMP, EVENT_STOP = 1, 2, 3, 4, 7, 128
SYSCALL_STOP = 5 | 0x80
STOPPING_SIGNALS = (19, 20, 21, 22)
WALL = 0x40000000
R10, R9, R8, RAX, RDX, RSI, RDI, ORIG_RAX, RIP = 7, 8, 9, 10, 12, 13, 14, 15, 16
ARGS = (RDI, RSI, RDX, R10, R8, R9)
PATH_MAX = 4096
PAGE = 4096
WORD = 8
SCRATCH_BYTES = 16 * PAGE
TEXT_BYTES = 3 * PATH_MAX
MAX_ARGUMENTS = (SCRATCH_BYTES - TEXT_BYTES - 2 * PATH_MAX) // WORD
MAX_INTERPRETERS = 8
MMAP, READ_WRITE, PRIVATE_ANONYMOUS = 9, 3, 0x22
CLONE_THREAD = 0x10000
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH = -100, 0x100, 0x1000
AF_UNIX = 1
EPERM, EAGAIN, EACCES, EFAULT = 1, 11, 13, 14
MASK = (1 << 64) - 1

type PathArguments = tuple[tuple[int, int | None], ...]
LINK_TARGET = -1
"""Instead of a folder: only an absolute path is translated. A relative one starts at the folder of the link."""
FIRST: PathArguments = ((0, None),)
BOTH: PathArguments = ((0, None), (1, None))
AT: PathArguments = ((1, 0),)
BOTH_AT: PathArguments = ((1, 0), (3, 2))
SYMLINK: PathArguments = ((0, LINK_TARGET), (1, None))
SYMLINK_AT: PathArguments = ((0, LINK_TARGET), (2, 1))
PLAIN = (
    # open stat lstat access truncate chdir mkdir rmdir creat unlink mknod statfs
    dict.fromkeys((2, 4, 6, 21, 76, 80, 83, 84, 85, 87, 133, 137), FIRST)
    # getxattr lgetxattr listxattr llistxattr
    | dict.fromkeys((191, 192, 194, 195), FIRST)
    # openat mkdirat mknodat newfstatat unlinkat faccessat execveat statx faccessat2
    | dict.fromkeys((257, 258, 259, 262, 263, 269, 322, 332, 439), AT)
    # rename link; renameat linkat renameat2; symlink symlinkat
    | {82: BOTH, 86: BOTH, 264: BOTH_AT, 265: BOTH_AT, 316: BOTH_AT, 88: SYMLINK, 266: SYMLINK_AT}
)
"""System call -> the arguments that are paths, each with the argument that is its folder."""
READLINK, READLINKAT, GETCWD, EXECVE, CONNECT, BIND, SENDTO = 89, 267, 79, 59, 42, 49, 44
CHMOD, FCHMOD, FCHMODAT, FCHMODAT2, UTIMENSAT = 90, 91, 268, 452, 280
CHANGES = (CHMOD, FCHMOD, FCHMODAT, FCHMODAT2, UTIMENSAT)
INOTIFY_ADD_WATCH = 254
CLONE, FORK, VFORK = 56, 57, 58
NEW_PROCESS = (CLONE, FORK, VFORK)
OF_A_PROCESS = {302: RDI, 203: RDI, 144: RDI, 142: RDI, 314: RDI, 141: RSI}
"""prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr setpriority -> the target's register."""
SOCKETS = (CONNECT, BIND, SENDTO)
TRACED = frozenset(
    (*PLAIN, READLINK, READLINKAT, GETCWD, EXECVE, *CHANGES, *NEW_PROCESS, INOTIFY_ADD_WATCH, CONNECT, BIND)
)
"""Calls that are traced whatever their arguments are; `seccomp` selects some others by their arguments."""

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall  # not the library's `ptrace`, which does not distinguish a word that was read from an error
_syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_syscall.restype = ctypes.c_long


class Tracer:
    """Follows one process and its descendants until the last has ended."""

    def __init__(
        self, paths: Paths, writable: tuple[bytes, ...], shared: tuple[bytes, ...], max_processes: int
    ) -> None:
        """`writable` and `shared` are folders, by their names outside.

        Modes and times of files in `writable` may be changed. Files in both may be watched.
        """
        self._paths = paths
        self._writable = writable
        self._watchable = (*writable, *shared)
        self._max_processes = max_processes
        self._registers = (ctypes.c_uint64 * 27)()
        self._registers_at = ctypes.addressof(self._registers)
        self._word = ctypes.c_uint64()
        self._word_at = ctypes.addressof(self._word)
        self._threads: set[int] = set()
        self._begun_early: set[int] = set()
        """Threads that ran, ended or started another program before the event of their parent arrived."""
        self._replaced_early: set[int] = set()
        """The ones among them that run another program."""
        self._forking: set[int] = set()
        """Threads in a call that creates another thread, which is counted before it exists."""
        self._unreaped: set[int] = set()
        """Processes that have ended. The kernel keeps each until its parent waits for it."""
        self._servers: set[int] = set()
        """Forks of the first process that run no other program."""
        self._group: dict[int, int] = {}
        """The first thread of its process, for each other thread."""
        self._threading: set[int] = set()
        """Processes in a call that creates a thread."""
        self._scratch: dict[int, int] = {}
        """The address of the memory that each thread has mapped for the tracer."""
        self._spare: dict[int, list[int]] = {}
        """Such memory of threads that have ended, for other threads of their process."""
        self._on_return: dict[int, Callable[[int], None]] = {}

    def seize(self, pid: int) -> None:
        if _syscall(PTRACE, SEIZE, pid, 0, OPTIONS) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"ptrace: {os.strerror(code)}")
        self._threads.add(pid)
        self._servers.add(pid)

    def run(self) -> None:
        """Return when no process is left to follow."""
        while True:
            try:
                pid, status = os.waitpid(-1, WALL)
            except ChildProcessError:
                return
            if status & 0xFF != 0x7F:
                self._ended(pid)
            else:
                self._stopped(pid, status >> 8 & 0xFF, status >> 16)

    def _stopped(self, pid: int, signal: int, event: int) -> None:
        self._forking.discard(pid)
        if event == EVENT_SECCOMP:
            self._entered(pid)
        elif signal == SYSCALL_STOP:
            self._returned(pid)
        elif event in (EVENT_FORK, EVENT_VFORK, EVENT_CLONE):
            self._announce(pid)
        elif event == EVENT_STOP:
            self._begun_or_halted(pid, signal)
        elif event == EVENT_EXEC:
            self._replaced(pid)
        else:
            self._request(CONT, pid, 0 if event else signal)

    def _begun_or_halted(self, pid: int, signal: int) -> None:
        if pid not in self._threads:
            self._threads.add(pid)
            self._begun_early.add(pid)
        self._request(LISTEN if signal in STOPPING_SIGNALS else CONT, pid)

    def _announce(self, pid: int) -> None:
        """Register a new process or thread.

        A process has a copy of its parent's scratch memory, or shares it while the parent waits. A thread needs its
        own, and so does a process that started before the event of its parent arrived.
        """
        child = self._message(pid)
        begun, replaced = child in self._begun_early, child in self._replaced_early
        self._begun_early.discard(child)
        self._replaced_early.discard(child)
        if not begun:
            self._threads.add(child)
        if child in self._threads and not replaced:
            self._adopt(pid, child, begun=begun)
        self._threading.discard(pid)
        self._request(CONT, pid)

    def _adopt(self, pid: int, child: int, *, begun: bool) -> None:
        if pid in self._servers:
            self._servers.add(child)
        if pid in self._threading:
            self._group[child] = self._group.get(pid, pid)
        elif pid in self._scratch and not begun:
            self._scratch[child] = self._scratch[pid]

    def _replaced(self, pid: int) -> None:
        """Forget what is known of a process that started another program. A thread that did gets the process's id."""
        former = self._message(pid)
        self._forget(former)
        self._forget(pid)
        self._threads.add(pid)
        if pid in self._begun_early:
            self._replaced_early.add(pid)
        self._request(CONT, pid)

    def _ended(self, pid: int) -> None:
        if pid not in self._threads:
            self._begun_early.add(pid)
        if pid not in self._group:  # the kernel keeps no threads
            self._unreaped.add(pid)
        self._forget(pid)

    def _forget(self, pid: int) -> None:
        self._threads.discard(pid)
        self._forking.discard(pid)
        self._servers.discard(pid)
        self._threading.discard(pid)
        self._on_return.pop(pid, None)
        self._spare.pop(pid, None)
        scratch, group = self._scratch.pop(pid, None), self._group.pop(pid, None)
        if group in self._threads and scratch is not None:
            self._spare.setdefault(group, []).append(scratch)

    def _entered(self, pid: int) -> None:
        self._request(GETREGS, pid, self._registers_at)
        registers = list(self._registers)
        number = registers[ORIG_RAX]
        if (arguments := PLAIN.get(number)) is not None:
            self._send_elsewhere(pid, registers, arguments)
        elif number in NEW_PROCESS:
            self._begin_process(pid, registers)
        elif number == EXECVE:
            self._execute(pid, registers)
        elif number == GETCWD:
            self._resume_until_return(pid, lambda pid: self._rename_result(pid, registers[RDI], has_end=True))
        elif number in (READLINK, READLINKAT):
            self._read_link(pid, registers, *((FIRST, RSI, RDX) if number == READLINK else (AT, RDX, R10)))
        elif number in CHANGES:
            self._change(pid, registers, AT_FDCWD if number == CHMOD else _signed(registers[RDI]))
        elif number in SOCKETS:
            self._address(pid, registers, *((R8, R9) if number == SENDTO else (RSI, RDX)))
        elif number == INOTIFY_ADD_WATCH:
            self._watch(pid, registers)
        elif number in OF_A_PROCESS:
            self._allow_for_own(pid, registers)
        else:
            self._request(CONT, pid)

    def _returned(self, pid: int) -> None:
        if then := self._on_return.pop(pid, None):
            then(pid)
        self._request(CONT, pid)

    def _resume_until_return(self, pid: int, then: Callable[[int], None]) -> None:
        self._on_return[pid] = then
        self._request(SYSCALL, pid)

    def _answer(self, pid: int, registers: list[int], result: int) -> None:
        """Return a result without making the call. Errors are negative."""
        self._set(pid, registers, {ORIG_RAX: MASK, RAX: result & MASK})
        self._request(CONT, pid)

    def _send_elsewhere(self, pid: int, registers: list[int], arguments: PathArguments) -> None:
        """Replace the paths among the arguments by their names outside, for the duration of the call."""
        changed: dict[int, bytes] = {}
        for argument, folder in arguments:
            path = self._string(pid, registers[ARGS[argument]])
            if path is None:
                self._answer(pid, registers, -EFAULT)
                return
            if path and (folder != LINK_TARGET or path[:1] == b"/"):
                at = AT_FDCWD if folder in (None, LINK_TARGET) else _signed(registers[ARGS[folder]])
                outside = self._paths.outside_from(path, lambda at=at: _folder(pid, at))
                if outside is not None:
                    changed[ARGS[argument]] = outside + b"\0"
        if changed:
            self._call_with(pid, registers, changed)
        else:
            self._request(CONT, pid)

    def _call_with(
        self, pid: int, registers: list[int], data: dict[int, bytes], values: dict[int, int] | None = None
    ) -> None:
        """Continue the call with some arguments pointing to other data, and restore them when it returns."""
        place = self._scratch_of(pid)
        if place is None:
            self._map_scratch(pid, registers)
            return
        changed = dict(values or {})
        for register, content in data.items():
            if not self._write(pid, place, content):  # the process has unmapped it
                self._map_scratch(pid, registers)
                return
            changed[register] = place
            place += len(content) + 7 & ~7
        self._set(pid, registers, changed)

        def put_back(pid: int) -> None:
            self._request(GETREGS, pid, self._registers_at)
            self._set(pid, list(self._registers), {register: registers[register] for register in changed})

        self._resume_until_return(pid, put_back)

    def _scratch_of(self, pid: int) -> int | None:
        if pid not in self._scratch and (spare := self._spare.get(self._group.get(pid, pid))):
            self._scratch[pid] = spare.pop()
        return self._scratch.get(pid)

    def _map_scratch(self, pid: int, registers: list[int]) -> None:
        """Make the process map memory for the tracer, and then repeat its call."""
        wanted = {RDI: 0, RSI: SCRATCH_BYTES, RDX: READ_WRITE, R10: PRIVATE_ANONYMOUS, R8: MASK, R9: 0}
        self._set(pid, registers, {ORIG_RAX: MMAP, **wanted})

        def call_again(pid: int) -> None:
            self._request(GETREGS, pid, self._registers_at)
            if self._registers[RAX] < MASK - PAGE:
                self._scratch[pid] = self._registers[RAX]
                self._set(pid, registers, {RAX: registers[ORIG_RAX], RIP: registers[RIP] - 2})
            else:  # no memory: the call fails
                self._set(pid, registers, {RAX: self._registers[RAX]})

        self._resume_until_return(pid, call_again)

    def _begin_process(self, pid: int, registers: list[int]) -> None:
        """Allow a new process unless there are too many. Servers are not limited: they must be able to kill others."""
        if pid not in self._servers and self._is_full():
            self._answer(pid, registers, -EAGAIN)
            return
        self._forking.add(pid)
        self._threading.discard(pid)
        if registers[ORIG_RAX] == CLONE and registers[RDI] & CLONE_THREAD:
            self._threading.add(pid)
        self._request(CONT, pid)

    def _is_full(self) -> bool:
        """Whether the maximum number of processes is reached. Zombies are included."""
        alive = len(self._threads) + len(self._forking)
        if alive + len(self._unreaped) < self._max_processes:
            return False
        self._unreaped = {pid for pid in self._unreaped if _is_zombie(pid)}
        return alive + len(self._unreaped) >= self._max_processes

    def _allow_for_own(self, pid: int, registers: list[int]) -> None:
        """Allow a call for another process only if that is in this sandbox too, and not a server."""
        whom = _signed(registers[OF_A_PROCESS[registers[ORIG_RAX]]])
        if whom == 0 or (whom in self._threads and whom not in self._servers):
            self._request(CONT, pid)
        else:
            self._answer(pid, registers, -EPERM)

    def _rename_result(self, pid: int, buffer: int, *, has_end: bool = False) -> None:
        """Translate the path that the call has written to its name inside."""
        self._request(GETREGS, pid, self._registers_at)
        size = self._registers[RAX]
        if not 0 < size <= PATH_MAX:
            return
        found = self._read(pid, buffer, size)
        path = found.rstrip(b"\0") if has_end else found
        inside = self._paths.inside(path)
        if inside != path and self._write(pid, buffer, inside + b"\0" * has_end):
            self._set(pid, list(self._registers), {RAX: len(inside) + has_end})

    def _read_link(self, pid: int, registers: list[int], arguments: PathArguments, buffer: int, size: int) -> None:
        """Read a link in the tracer, because the name outside may be too long for the buffer.

        Links in /proc are read by the process itself, because they differ between processes.
        """
        [(argument, folder)] = arguments
        path = self._string(pid, registers[ARGS[argument]])
        at = AT_FDCWD if folder is None else _signed(registers[ARGS[folder]])
        place = self._place(pid, path, at) if path else None
        if not path or place is None or (place.startswith(b"/proc/") and path[:1] == b"/"):
            self._resume_until_return(pid, lambda pid: self._rename_result(pid, registers[buffer]))
            return
        try:
            found = self._paths.inside(os.readlink(place))[: registers[size]]
            result = len(found) if self._write(pid, registers[buffer], found) else -EFAULT
        except OSError as error:
            result = -(error.errno or EACCES)
        self._answer(pid, registers, result)

    def _change(self, pid: int, registers: list[int], at: int) -> None:
        """Change a file's mode or times, which Landlock does not control, if it is one of the sandbox's own."""
        number = registers[ORIG_RAX]
        path_at = registers[RDI] if number == CHMOD else registers[RSI]
        is_open = number == FCHMOD or (number == UTIMENSAT and path_at == 0)
        path = b"" if is_open else self._string(pid, path_at)
        flags = registers[R10] if number in (UTIMENSAT, FCHMODAT2) and not is_open else 0
        if (not path and not is_open) or flags & AT_EMPTY_PATH:
            self._answer(pid, registers, -EFAULT if path is None else -EACCES)
            return
        try:
            place = self._place(pid, path, at) if path else f"/proc/{pid}/fd/{at}".encode()
            own = os.O_NOFOLLOW if flags & AT_SYMLINK_NOFOLLOW else 0  # a link's own times
            file = os.open(place, os.O_PATH | os.O_CLOEXEC | own)
            try:
                self._answer(pid, registers, self._change_open(pid, registers, file))
            finally:
                os.close(file)
        except OSError as error:
            self._answer(pid, registers, -(error.errno or EACCES))

    def _change_open(self, pid: int, registers: list[int], file: int) -> int:
        """Return the result of the call on an open file, which can no longer be replaced."""
        name = f"/proc/self/fd/{file}".encode()
        real = os.readlink(name)
        if not _is_below(real, self._writable):
            return -EPERM
        if registers[ORIG_RAX] == UTIMENSAT:
            times = self._read(pid, registers[RDX], 32) if registers[RDX] else None
            if times == b"":
                return -EFAULT
            result = _syscall(UTIMENSAT, AT_FDCWD, _address_of(name + b"\0"), times and _address_of(times), 0)
            return result if result == 0 else -ctypes.get_errno()
        mode = registers[RSI] if registers[ORIG_RAX] in (CHMOD, FCHMOD) else registers[RDX]
        os.chmod(name, mode & 0o7777)
        return 0

    def _place(self, pid: int, path: bytes, at: int) -> bytes:
        """Return the name outside of any path, in a form that the tracer itself can use."""
        outside = self._paths.outside_from(path, lambda: _folder(pid, at))
        if outside is not None or path[:1] == b"/":
            return outside or path
        return f"/proc/{pid}/{_link(at)}/".encode() + path

    def _watch(self, pid: int, registers: list[int]) -> None:
        """Allow inotify, which Landlock does not control, only for files of the sandbox or of shared folders."""
        path = self._string(pid, registers[RSI])
        if not path:
            self._request(CONT, pid)
            return
        try:
            real = os.path.realpath(self._place(pid, path, AT_FDCWD))
        except OSError as error:
            self._answer(pid, registers, -(error.errno or EACCES))
            return
        if _is_below(real, self._watchable):
            self._call_with(pid, registers, {RSI: real + b"\0"})
        else:
            self._answer(pid, registers, -EACCES)

    def _address(self, pid: int, registers: list[int], address: int, size: int) -> None:
        """Translate the address of a socket in the file system."""
        given = self._read(pid, registers[address], registers[size]) if 3 <= registers[size] <= 128 else b""
        if given[:2] == struct.pack("=H", AF_UNIX) and given[2:3] not in (b"", b"\0"):
            outside = self._paths.outside_from(given[2:].partition(b"\0")[0], lambda: _folder(pid, AT_FDCWD))
            if outside is not None:
                moved = given[:2] + outside + b"\0"
                self._call_with(pid, registers, {address: moved}, {size: len(moved)})
                return
        self._request(CONT, pid)

    def _execute(self, pid: int, registers: list[int]) -> None:
        """Start a program. A script's interpreter is resolved here: the kernel would use names outside for both."""
        path = self._string(pid, registers[RDI])
        if path is None:
            self._answer(pid, registers, -EFAULT)
            return
        outside = self._paths.outside_from(path, lambda: _folder(pid, AT_FDCWD)) if path else None
        if not path or (outside is None and path[:1] == b"/"):
            self._request(CONT, pid)
            return
        words: list[bytes] = []
        place = outside or self._place(pid, path, AT_FDCWD)
        while len(words) < MAX_INTERPRETERS and (line := _shebang(place)):
            words = [*line, *(words or [path])]
            place = self._paths.outside(words[0]) or words[0]
        arguments = self._pointers(pid, registers[RSI]) if words else []
        if words and len(arguments) + len(words) < MAX_ARGUMENTS:
            self._interpret(pid, registers, words, arguments[1:], place)
        elif outside is not None:
            self._call_with(pid, registers, {RDI: outside + b"\0"})
        else:
            self._request(CONT, pid)

    def _interpret(
        self, pid: int, registers: list[int], words: list[bytes], arguments: list[int], program: bytes
    ) -> None:
        """Run `program` with these words before the arguments."""
        place = self._scratch_of(pid)
        if place is None:
            self._map_scratch(pid, registers)
            return
        begin = place + SCRATCH_BYTES - TEXT_BYTES
        table, text = b"", b""
        for word in words:
            table += struct.pack("=Q", begin + len(text))
            text += word + b"\0"
        table += struct.pack(f"={len(arguments) + 1}Q", *arguments, 0)
        self._write(pid, begin, text[:TEXT_BYTES])
        self._call_with(pid, registers, {RDI: program + b"\0", RSI: table})

    def _pointers(self, pid: int, address: int) -> list[int]:
        """Return a list of addresses without the 0 that ends it, at most as many as can be passed on."""
        found: list[int] = []
        while len(found) < MAX_ARGUMENTS and (word := self._peek(pid, address + WORD * len(found))):
            found.append(word)
        return found

    def _string(self, pid: int, address: int) -> bytes | None:
        """Return the bytes at the address up to a zero; None if they cannot be read or are too long for a path."""
        found = b""
        at = address & -WORD
        while len(found) < PATH_MAX:
            word = self._peek(pid, at)
            if word is None:
                return None
            data = word.to_bytes(WORD, "little")
            piece, end, _ = (data if at >= address else data[address - at :]).partition(b"\0")
            found += piece
            if end:
                return found
            at += WORD
        return None

    def _read(self, pid: int, address: int, size: int) -> bytes:
        """Return the bytes at the address; none if not all can be read."""
        found = b""
        for at in range(address & -WORD, address + size, WORD):
            word = self._peek(pid, at)
            if word is None:
                return b""
            found += word.to_bytes(WORD, "little")
        return found[address % WORD :][:size]

    def _write(self, pid: int, address: int, data: bytes) -> bool:
        """Write bytes as whole words, keeping the bytes before and after them."""
        begin, end = address & -WORD, -(-(address + len(data)) // WORD) * WORD
        before = self._read(pid, begin, address - begin)
        after = self._read(pid, address + len(data), end - address - len(data))
        words = before + data + after
        if len(words) != end - begin:
            return False
        return all(
            _syscall(PTRACE, POKE, pid, begin + at, int.from_bytes(words[at : at + WORD], "little")) == 0
            for at in range(0, len(words), WORD)
        )

    def _peek(self, pid: int, address: int) -> int | None:
        return self._word.value if _syscall(PTRACE, PEEK, pid, address, self._word_at) == 0 else None

    def _set(self, pid: int, registers: list[int], changed: dict[int, int]) -> None:
        self._registers[:] = registers
        for register, value in changed.items():
            self._registers[register] = value
        self._request(SETREGS, pid, self._registers_at)

    def _message(self, pid: int) -> int:
        value = ctypes.c_ulong()
        self._request(GETEVENTMSG, pid, ctypes.addressof(value))
        return value.value

    def _request(self, request: int, pid: int, data: int = 0) -> None:
        """Send a ptrace request. If the process has ended meanwhile, that is reported next."""
        _syscall(PTRACE, request, pid, 0, data)


def _address_of(data: bytes) -> int:
    """Return the address in this process. `data` must outlive the call that uses it."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _signed(value: int) -> int:
    """Convert a register to an int of 32 bits, for a descriptor or process id."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _is_below(path: bytes, folders: tuple[bytes, ...]) -> bool:
    return any(path == folder or path.startswith(folder + b"/") for folder in folders)


def _link(descriptor: int) -> str:
    """Return the name in /proc/PID of a folder that a process has open, or is in."""
    return "cwd" if descriptor == AT_FDCWD else f"fd/{descriptor}"


def _folder(pid: int, descriptor: int) -> bytes | None:
    """Return the name outside of such a folder; None if it is too long, or there is none."""
    try:
        return os.readlink(f"/proc/{pid}/{_link(descriptor)}".encode())
    except OSError:
        return None


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return False


def _shebang(path: bytes) -> list[bytes] | None:
    """Return a script's interpreter and its argument; None for files that are not scripts or not executable."""
    if not os.access(path, os.X_OK):
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        begin = os.read(file, 256)
    except OSError:
        return None
    finally:
        os.close(file)
    line = begin[2:].partition(b"\n")[0].strip(b" \t").replace(b"\t", b" ") if begin[:2] == b"#!" else b""
    program, _, argument = line.partition(b" ")
    return [word for word in (program, argument.strip(b" ")) if word] or None
