"""Landlock: a process drops its access to all files except those it names, for itself and its descendants.

Each version of the interface (the ABI) added rights; a right that a kernel does not know cannot be dropped. Runs where
a sandbox is started, with the standard library only.
"""

import ctypes
import os

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION = 1
PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_BLOCK = 1 << 11
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2
READ = READ_FILE | READ_DIR | EXECUTE
DEVICE = READ_FILE | WRITE_FILE | IOCTL_DEV
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""The rights that a rule for anything but a folder may contain."""
ALL = (1 << 16) - 1
ABI_OF_SCOPES = 6
PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


class LandlockError(OSError):
    """The kernel refused."""


def _call(number: int, *args: object) -> int:
    result = _libc.syscall(ctypes.c_long(number), *args)
    if result < 0:
        code = ctypes.get_errno()
        raise LandlockError(code, os.strerror(code))
    return result


def abi() -> int:
    """Return the version that this kernel supports; 0 without Landlock."""
    try:
        return _call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION))
    except LandlockError:
        return 0


def known_rights(version: int) -> int:
    """Return all rights on files that this version of the interface can restrict."""
    unknown = (REFER if version < 2 else 0) | (TRUNCATE if version < 3 else 0) | (IOCTL_DEV if version < 5 else 0)
    return ALL & ~unknown


def restrict_files(rules: list[tuple[str, int]], version: int) -> None:
    """Keep these rights below these paths, and none anywhere else. Paths that do not exist are ignored."""
    known = known_rights(version)
    ruleset = _new_ruleset(known, 0)
    try:
        for path, rights in rules:
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            kept = rights & known & (ALL if os.path.isdir(path) else FILE_RIGHTS)
            beneath = kept.to_bytes(8, "little") + place.to_bytes(4, "little")
            _call(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(PATH_BENEATH), beneath, ctypes.c_uint32(0))
            os.close(place)
        _enforce(ruleset)
    finally:
        os.close(ruleset)


def stand_apart(version: int) -> None:
    """Enter a new domain: from now on this process can trace no process outside it, and from ABI 6 on signal none."""
    scopes = SCOPE_SIGNALS | SCOPE_ABSTRACT_SOCKETS if version >= ABI_OF_SCOPES else 0
    ruleset = _new_ruleset(MAKE_BLOCK, scopes)
    try:
        _enforce(ruleset)
    finally:
        os.close(ruleset)


def _new_ruleset(rights: int, scopes: int) -> int:
    body = rights.to_bytes(8, "little") + (0).to_bytes(8, "little") + scopes.to_bytes(8, "little")
    size = 24 if scopes else 8  # an older kernel does not know the later fields
    return _call(CREATE_RULESET, body, ctypes.c_size_t(size), ctypes.c_uint32(0))


def _enforce(ruleset: int) -> None:
    _libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    _call(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
