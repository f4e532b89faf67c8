"""Gives the processes of a confined sandbox paths of their own, by ptrace: each sees /app and finds its own.

A seccomp filter stops a process at calls that name a path. Where the path is elsewhere, it is written anew into a page
that the process was made to map for that, and the argument is put back when the call returns. This is a convenience,
not the boundary: a process with threads could change the path in between. What it may reach is up to Landlock.

x86-64 only. Runs where a sandbox is started, on the standard library alone.
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
SIGTRAP, SYSCALL_STOP = 5, 5 | 0x80
STOPPING_SIGNALS = (19, 20, 21, 22)
WALL = 0x40000000
R10, R9, R8, RAX, RDX, RSI, RDI, ORIG_RAX, RIP = 7, 8, 9, 10, 12, 13, 14, 15, 16
ARGS = (RDI, RSI, RDX, R10, R8, R9)
PATH_MAX = 4096
PAGE = 4096
WORD = 8
SCRATCH_BYTES = 16 * PAGE
MMAP, READ_WRITE, PRIVATE_ANONYMOUS = 9, 3, 0x22
AT_FDCWD = -100
AF_UNIX = 1
EAGAIN = 11
MAX_ARGUMENTS = 1 << 12
MAX_INTERPRETERS = 8
TEXT_BYTES = 3 * PATH_MAX
MASK = (1 << 64) - 1

type Arguments = tuple[tuple[int, int | None], ...]
FIRST: Arguments = ((0, None),)
SECOND: Arguments = ((1, None),)
BOTH: Arguments = ((0, None), (1, None))
AT: Arguments = ((1, 0),)
BOTH_AT: Arguments = ((1, 0), (3, 2))
SYMLINK_AT: Arguments = ((0, None), (2, 1))
PLAIN = (
    # open stat lstat access truncate chdir mkdir rmdir creat unlink chmod chown lchown utime mknod statfs utimes
    dict.fromkeys((2, 4, 6, 21, 76, 80, 83, 84, 85, 87, 90, 92, 94, 132, 133, 137, 235), FIRST)
    # setxattr lsetxattr getxattr lgetxattr listxattr llistxattr removexattr lremovexattr
    | dict.fromkeys((188, 189, 191, 192, 194, 195, 197, 198), FIRST)
    # openat mkdirat mknodat fchownat futimesat newfstatat unlinkat fchmodat faccessat utimensat execveat
    | dict.fromkeys((257, 258, 259, 260, 261, 262, 263, 268, 269, 280, 322), AT)
    # statx faccessat2 fchmodat2
    | dict.fromkeys((332, 439, 452), AT)
    # inotify_add_watch; rename link; renameat linkat renameat2; symlink symlinkat, whose links hold names outside
    | {254: SECOND, 82: BOTH, 86: BOTH, 264: BOTH_AT, 265: BOTH_AT, 316: BOTH_AT, 88: BOTH, 266: SYMLINK_AT}
)
"""The arguments of a call that are paths, each with the argument that is its folder."""
READLINK, READLINKAT, GETCWD, EXECVE, CONNECT, BIND = 89, 267, 79, 59, 42, 49
NEW_PROCESS = (56, 57, 58)  # clone fork vfork
TRACED = frozenset((*PLAIN, READLINK, READLINKAT, GETCWD, EXECVE, CONNECT, BIND, *NEW_PROCESS))

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall  # not the library's `ptrace`, which cannot tell a word that was read from an error
_syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_syscall.restype = ctypes.c_long


class Tracer:
    """Follows one process and all it starts until the last has ended."""

    def __init__(self, paths: Paths, max_processes: int) -> None:
        self._paths = paths
        self._max_processes = max_processes
        self._registers = (ctypes.c_uint64 * 27)()
        self._registers_at = ctypes.addressof(self._registers)
        self._word = ctypes.c_uint64()
        self._word_at = ctypes.addressof(self._word)
        self._threads: set[int] = set()
        self._servers: set[int] = set()
        """What was forked from the first process and runs no other program."""
        self._scratch: dict[int, int] = {}
        self._on_return: dict[int, Callable[[int], None]] = {}

    def seize(self, pid: int) -> None:
        if _syscall(PTRACE, SEIZE, pid, 0, OPTIONS) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"ptrace: {os.strerror(code)}")
        self._threads.add(pid)
        self._servers.add(pid)

    def run(self) -> None:
        """Returns when no process is left to follow."""
        while True:
            try:
                pid, status = os.waitpid(-1, WALL)
            except ChildProcessError:
                return
            if status & 0xFF != 0x7F:
                self._forget(pid)
            else:
                self._stopped(pid, status >> 8 & 0xFF, status >> 16)

    def _stopped(self, pid: int, signal: int, event: int) -> None:
        if event == EVENT_SECCOMP:
            self._entered(pid)
        elif signal == SYSCALL_STOP:
            self._returned(pid)
        elif event in (EVENT_FORK, EVENT_VFORK, EVENT_CLONE):
            self._announce(pid, event)
        elif event == EVENT_STOP:
            self._begun_or_halted(pid, signal)
        elif event == EVENT_EXEC:
            self._replaced(pid)
        else:
            self._request(CONT, pid, 0 if event else signal)

    def _begun_or_halted(self, pid: int, signal: int) -> None:
        self._threads.add(pid)
        self._request(LISTEN if signal in STOPPING_SIGNALS else CONT, pid)

    def _announce(self, pid: int, event: int) -> None:
        """A new process has its parent's page, by copy or while the parent waits; a new thread needs its own.

        So does one that began before its parent could tell of it.
        """
        child = self._message(pid)
        if pid in self._servers:
            self._servers.add(child)
        if event != EVENT_CLONE and pid in self._scratch and child not in self._threads:
            self._scratch[child] = self._scratch[pid]
        self._request(CONT, pid)

    def _replaced(self, pid: int) -> None:
        """By another program. If it was a thread that called, it has the process's own number from now on."""
        former = self._message(pid)
        if former != pid:
            self._forget(former)
        self._servers.discard(pid)
        self._scratch.pop(pid, None)
        self._on_return.pop(former, None)  # the new program has no arguments to be put back
        self._request(CONT, pid)

    def _forget(self, pid: int) -> None:
        self._threads.discard(pid)
        self._servers.discard(pid)
        self._scratch.pop(pid, None)
        self._on_return.pop(pid, None)

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
            arguments, buffer = (FIRST, RSI) if number == READLINK else (AT, RDX)
            self._send_elsewhere(pid, registers, arguments, lambda pid: self._rename_result(pid, registers[buffer]))
        else:
            self._address(pid, registers)

    def _returned(self, pid: int) -> None:
        if then := self._on_return.pop(pid, None):
            then(pid)
        self._request(CONT, pid)

    def _resume_until_return(self, pid: int, then: Callable[[int], None]) -> None:
        self._on_return[pid] = then
        self._request(SYSCALL, pid)

    def _send_elsewhere(
        self,
        pid: int,
        registers: list[int],
        arguments: Arguments,
        then: Callable[[int], None] | None = None,
    ) -> None:
        """Replace the paths among the arguments of a call by their names outside, as long as it runs."""
        changed: dict[int, bytes] = {}
        for argument, folder in arguments:
            path = self._string(pid, registers[ARGS[argument]])
            if path:
                at = AT_FDCWD if folder is None else _signed(registers[ARGS[folder]])
                outside = self._paths.outside_from(path, lambda at=at: _folder(pid, at))
                if outside is not None:
                    changed[ARGS[argument]] = outside + b"\0"
        if changed:
            self._call_with(pid, registers, changed, then=then)
        elif then:
            self._resume_until_return(pid, then)
        else:
            self._request(CONT, pid)

    def _call_with(
        self,
        pid: int,
        registers: list[int],
        data: dict[int, bytes],
        values: dict[int, int] | None = None,
        then: Callable[[int], None] | None = None,
    ) -> None:
        """Let the call go on with other data behind some arguments, and put the arguments back when it returns."""
        place = self._scratch.get(pid)
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
            if then:
                then(pid)
            self._request(GETREGS, pid, self._registers_at)
            self._set(pid, list(self._registers), {register: registers[register] for register in changed})

        self._resume_until_return(pid, put_back)

    def _map_scratch(self, pid: int, registers: list[int]) -> None:
        """Make the process map a page for us, then call again what it was about to call."""
        wanted = {RDI: 0, RSI: SCRATCH_BYTES, RDX: READ_WRITE, R10: PRIVATE_ANONYMOUS, R8: MASK, R9: 0}
        self._set(pid, registers, {ORIG_RAX: MMAP, **wanted})

        def call_again(pid: int) -> None:
            self._request(GETREGS, pid, self._registers_at)
            if self._registers[RAX] < MASK - PAGE:
                self._scratch[pid] = self._registers[RAX]
                self._set(pid, registers, {RAX: registers[ORIG_RAX], RIP: registers[RIP] - 2})
            else:  # no memory: so the call fails
                self._set(pid, registers, {RAX: self._registers[RAX]})

        self._resume_until_return(pid, call_again)

    def _begin_process(self, pid: int, registers: list[int]) -> None:
        """Unless there are too many. Servers are not bound: they must be able to start what ends the others."""
        if pid in self._servers or len(self._threads) < self._max_processes:
            self._request(CONT, pid)
            return
        self._set(pid, registers, {ORIG_RAX: MASK, RAX: MASK + 1 - EAGAIN})
        self._request(CONT, pid)

    def _rename_result(self, pid: int, buffer: int, *, has_end: bool = False) -> None:
        """A path that the call has written gets its name inside."""
        self._request(GETREGS, pid, self._registers_at)
        size = self._registers[RAX]
        if not 0 < size <= PATH_MAX:
            return
        found = self._read(pid, buffer, size)
        path = found.rstrip(b"\0") if has_end else found
        inside = self._paths.inside(path)
        if inside != path and self._write(pid, buffer, inside + b"\0" * has_end):
            self._set(pid, list(self._registers), {RAX: len(inside) + has_end})

    def _address(self, pid: int, registers: list[int]) -> None:
        """Of a socket in the file system: the second argument, with its size in the third."""
        size = registers[RDX]
        address = self._read(pid, registers[RSI], size) if 3 < size <= 110 else b""
        if address[:2] == struct.pack("=H", AF_UNIX) and address[2:3] == b"/":
            outside = self._paths.outside(address[2:].partition(b"\0")[0])
            if outside is not None:
                moved = address[:2] + outside + b"\0"
                self._call_with(pid, registers, {RSI: moved}, {RDX: len(moved)})
                return
        self._request(CONT, pid)

    def _execute(self, pid: int, registers: list[int]) -> None:
        """A script's interpreter is found here: the kernel would look for it, and name the script, outside."""
        path = self._string(pid, registers[RDI])
        outside = self._paths.outside_from(path, lambda: _folder(pid, AT_FDCWD)) if path else None
        if not path or (outside is None and path[:1] == b"/"):
            self._request(CONT, pid)
            return
        words: list[bytes] = []
        place = outside or _folder(pid, AT_FDCWD) + b"/" + path
        while len(words) < MAX_INTERPRETERS and (line := _shebang(place)):
            words = [*line.split(None, 1), *(words or [path])]
            place = self._paths.outside(words[0]) or words[0]
        if words:
            self._interpret(pid, registers, words, place)
        elif outside is not None:
            self._call_with(pid, registers, {RDI: outside + b"\0"})
        else:
            self._request(CONT, pid)

    def _interpret(self, pid: int, registers: list[int], words: list[bytes], program: bytes) -> None:
        """Run the program at `program` with these words in place of the first argument."""
        arguments = self._pointers(pid, registers[RSI])
        if pid not in self._scratch:
            self._map_scratch(pid, registers)
            return
        begin = self._scratch[pid] + SCRATCH_BYTES - TEXT_BYTES
        table, text = b"", b""
        for word in words:
            table += struct.pack("=Q", begin + len(text))
            text += word + b"\0"
        table += struct.pack(f"={len(arguments[1:]) + 1}Q", *arguments[1:], 0)
        self._write(pid, begin, text[:TEXT_BYTES])
        self._call_with(pid, registers, {RDI: program + b"\0", RSI: table})

    def _pointers(self, pid: int, address: int) -> list[int]:
        """A list of addresses that ends with 0, without the 0."""
        found: list[int] = []
        while len(found) < MAX_ARGUMENTS and (word := self._peek(pid, address + WORD * len(found))):
            found.append(word)
        return found

    def _string(self, pid: int, address: int) -> bytes:
        """What is at the address up to a zero; nothing where it cannot be read or is too long for a path."""
        found = b""
        at = address & -WORD
        while address and len(found) < PATH_MAX:
            word = self._peek(pid, at)
            if word is None:
                return b""
            data = word.to_bytes(WORD, "little")
            piece, end, _ = (data if found or at >= address else data[address - at :]).partition(b"\0")
            found += piece
            if end:
                return found
            at += WORD
        return b""

    def _read(self, pid: int, address: int, size: int) -> bytes:
        """Nothing where not all of it can be read."""
        found = b""
        for at in range(address & -WORD, address + size, WORD):
            word = self._peek(pid, at)
            if word is None:
                return b""
            found += word.to_bytes(WORD, "little")
        return found[address % WORD :][:size]

    def _write(self, pid: int, address: int, data: bytes) -> bool:
        """Whole words, with what is there before and after."""
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
        """Of a process that may be gone by now: then its end is reported next."""
        _syscall(PTRACE, request, pid, 0, data)


def _signed(value: int) -> int:
    """A folder's descriptor is an int of 32 bits."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _folder(pid: int, descriptor: int) -> bytes:
    """The name outside of a folder that a process has open, or is in."""
    name = "cwd" if descriptor == AT_FDCWD else f"fd/{descriptor}"
    try:
        return os.readlink(f"/proc/{pid}/{name}".encode())
    except OSError:
        return b"/"


def _shebang(path: bytes) -> bytes | None:
    """What a script names as its interpreter; None for other files, and where the kernel would refuse to run it."""
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
    return begin[2:].partition(b"\n")[0].strip() or None if begin[:2] == b"#!" else None
