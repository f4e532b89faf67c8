"""The seccomp filter of a sandbox without namespaces: system calls that are refused, and those that the tracer checks.

It is built instruction by instruction, for x86-64 only, like the numbers in `tracer`. Runs where a sandbox is started,
with the standard library only.
"""

import ctypes
import os
import struct

from dockyard.rollout.sandbox.tracer import ARGS as ARGUMENTS
from dockyard.rollout.sandbox.tracer import CLONE, OF_A_PROCESS, SENDTO, TRACED

ARCH_X86_64 = 0xC000003E
ALLOW, TRACE, ERRNO, KILL = 0x7FFF0000, 0x7FF00000, 0x00050000, 0x80000000
NOTHING, EPERM, EINVAL, EAFNOSUPPORT, ENOSYS = 0, 1, 22, 97, 38
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, ARGS = 0, 4, 16
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
AF_UNIX = 1
SOCK_DGRAM = 2  # a bit that SOCK_STREAM (1) and SOCK_SEQPACKET (5) do not have
CLONE_UNTRACED, CLONE_NAMESPACES = 0x00800000, 0x7E020000
SOCKET, SOCKETPAIR, PRCTL, SETPRIORITY, SECCOMP = 41, 53, 157, 141, 317
SECCOMP_SET_MODE_FILTER = 1
PR_SET_DUMPABLE = 4
"""Reported as successful but not done: a process that is not dumpable cannot be traced."""

UNKNOWN = (
    {425: "io_uring_setup", 426: "io_uring_enter", 427: "io_uring_register", 437: "openat2"}
    | {435: "clone3"}  # a filter cannot read its flags
    | {132: "utime", 235: "utimes", 261: "futimesat"}
    | {319: "memfd_create", 447: "memfd_secret"}  # memory that belongs to no process and could not be counted
)
"""Answered as by a kernel that does not have them: programs fall back to other calls."""
FIRST_UNKNOWN = 463
"""Calls from this number on are answered in the same way: they are newer than this list, or of another ABI."""
FORBIDDEN = (
    {101: "ptrace", 310: "process_vm_readv", 311: "process_vm_writev", 312: "kcmp", 438: "pidfd_getfd"}
    | {155: "pivot_root", 161: "chroot", 163: "acct", 165: "mount", 166: "umount2", 167: "swapon", 168: "swapoff"}
    | {248: "add_key", 249: "request_key", 250: "keyctl", 298: "perf_event_open", 321: "bpf", 323: "userfaultfd"}
    | {303: "name_to_handle_at", 304: "open_by_handle_at", 272: "unshare", 308: "setns", 300: "fanotify_init"}
    | {428: "open_tree", 429: "move_mount", 430: "fsopen", 431: "fsconfig", 432: "fsmount", 442: "mount_setattr"}
    | {256: "migrate_pages", 279: "move_pages", 251: "ioprio_set", 134: "uselib", 135: "personality"}
    # Objects that outlive a sandbox, or are shared by all processes of a user.
    | {29: "shmget", 30: "shmat", 31: "shmctl", 64: "semget", 65: "semop", 66: "semctl", 220: "semtimedop"}
    | {68: "msgget", 69: "msgsnd", 70: "msgrcv", 71: "msgctl", 240: "mq_open", 241: "mq_unlink"}
    # Not restricted by Landlock.
    | {188: "setxattr", 189: "lsetxattr", 197: "removexattr", 198: "lremovexattr"}
)
PRETENDED = {92: "chown", 93: "fchown", 94: "lchown", 260: "fchownat"}
"""Reported as successful but not done: there is only one user, named root."""


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _answer(number: int, action: int) -> bytes:
    """Answer one call, whatever its arguments are."""
    return _step(JUMP_EQUAL, number, 0, 1) + _step(RETURN, action)


def _answer_by(number: int, *tests: tuple[int, int, int], then: int, otherwise: int) -> bytes:
    """Answer one call: `then` if the lower halves of arguments pass all tests (argument, comparison, value)."""
    steps = [_step(JUMP_EQUAL, number, 0, 2 * len(tests) + 2)]
    for left, (arg, comparison, value) in zip(range(len(tests) - 1, -1, -1), tests, strict=True):
        steps += [_step(LOAD, ARGS + 8 * arg), _step(comparison, value, 0, 2 * left + 1)]
    return b"".join(steps) + _step(RETURN, then) + _step(RETURN, otherwise)


def _answer_for(number: int, actions: dict[int, int]) -> bytes:
    """Answer one call by the lower half of its first argument. Other values of it are allowed."""
    steps = b"".join(_step(JUMP_EQUAL, value, 0, 1) + _step(RETURN, action) for value, action in actions.items())
    return _step(JUMP_EQUAL, number, 0, 2 * len(actions) + 2) + _step(LOAD, ARGS) + steps + _step(RETURN, ALLOW)


def build(*, network: bool, own_user: bool) -> bytes:
    """Return the filter in the kernel's format."""
    steps = [
        _step(LOAD, ARCH) + _step(JUMP_EQUAL, ARCH_X86_64, 1, 0) + _step(RETURN, KILL),
        _step(LOAD, NUMBER) + _step(JUMP_GREATER_EQUAL, FIRST_UNKNOWN, 0, 1) + _step(RETURN, ERRNO | ENOSYS),
        *(_answer(number, ERRNO | ENOSYS) for number in UNKNOWN),
        *(_answer(number, ERRNO | EPERM) for number in FORBIDDEN),
        *(_answer(number, ERRNO | NOTHING) for number in PRETENDED),
        # For all processes of a user, or of a process group.
        _answer_by(SETPRIORITY, (0, JUMP_GREATER_EQUAL, 1), then=ERRNO | EPERM, otherwise=TRACE),
        *(
            _answer_by(number, (ARGUMENTS.index(register), JUMP_EQUAL, 0), then=ALLOW, otherwise=TRACE)
            for number, register in OF_A_PROCESS.items()
        ),
        # A filter of the task could answer before this one and so hide calls from the tracer.
        _answer_by(SECCOMP, (0, JUMP_EQUAL, SECCOMP_SET_MODE_FILTER), then=ERRNO | EINVAL, otherwise=ALLOW),
        _answer_for(PRCTL, {PR_SET_DUMPABLE: ERRNO | NOTHING, PR_SET_SECCOMP: ERRNO | EINVAL}),
        _answer_by(CLONE, (0, JUMP_ANY_BIT, CLONE_UNTRACED | CLONE_NAMESPACES), then=ERRNO | EPERM, otherwise=TRACE),
        *(_answer(number, TRACE) for number in sorted(TRACED - {CLONE})),
        _answer_by(SENDTO, (4, JUMP_EQUAL, 0), then=ALLOW, otherwise=TRACE),
        *_sockets(network=network, own_user=own_user),
    ]
    return b"".join(steps) + _step(RETURN, ALLOW)


def _sockets(*, network: bool, own_user: bool) -> list[bytes]:
    """Restrict sockets, because Landlock does not restrict sockets that are files.

    If a sandbox has its own user, the permissions of such files do. Otherwise only socket pairs are allowed.
    """
    if network:
        return []
    if own_user:
        return [_answer_by(SOCKET, (0, JUMP_EQUAL, AF_UNIX), then=ALLOW, otherwise=ERRNO | EAFNOSUPPORT)]
    datagrams = _answer_by(SOCKETPAIR, (1, JUMP_ANY_BIT, SOCK_DGRAM), then=ERRNO | EAFNOSUPPORT, otherwise=ALLOW)
    return [_answer(SOCKET, ERRNO | EAFNOSUPPORT), datagrams]


def apply(program: bytes) -> None:
    """Apply the filter to this process and its descendants. Needs `no_new_privs`, which Landlock sets."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    if libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.c_char_p(header), 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")
