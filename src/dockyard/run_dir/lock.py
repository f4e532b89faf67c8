"""One process per run folder. The kernel releases the lock when its process ends, however it ends.

The lock file stays: removing it would let two processes hold locks on two files of the same name.
"""

import fcntl
import os
from pathlib import Path

from dockyard.errors import DockyardError


def take_lock(path: Path) -> int:
    """Lock the file and return its descriptor; closing that releases the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise DockyardError(
            f"`{path.parent}` is in use by process {holder or '(unknown)'}",
            hint="wait for it or stop it, or choose another `--run_dir`",
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
