"""Lock a run folder, claim one for a new run, and delete a run.

The kernel releases the lock when its process ends. The lock file is removed only together with its folder, by the
process that holds it. A process that locks a removed file tries again, so that no two processes hold the same folder.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.durable import make_folder
from dockyard.run_dir.paths import RunPaths

logger = logging.getLogger(__name__)


def claim_folder(paths: RunPaths, *, overwrite: bool) -> int:
    """Make and lock a folder for a new run, and return the lock. `overwrite` deletes a run that is already there."""
    if paths.root.exists() and not paths.root.is_dir():
        raise UsageError(f"`{paths.root}` is a file, not a folder", hint="choose another `--run_dir`")
    make_folder(paths.root, hint="choose another `--run_dir`")
    _refuse_foreign_files(paths)
    lock = take_lock(paths.lock)
    if not paths.config.exists():
        return lock
    if not overwrite:
        os.close(lock)
        hint = f"`--resume {paths.root}` continues it, `--run_dir DIR` starts another, `--overwrite` deletes it first"
        raise UsageError(f"`{paths.root}` already holds a run", hint=hint)
    logger.warning("deleting the run in %s", paths.root)
    delete_run(paths)
    return lock


def _refuse_foreign_files(paths: RunPaths) -> None:
    """Only a folder with our lock file is a run: never delete `tasks` or `config.toml` of another program."""
    found = [path.name for path in paths.contents if path.exists()]
    if found and not paths.lock.exists():
        names = ", ".join(f"`{name}`" for name in found)
        raise UsageError(f"`{paths.root}` is not a run, but holds {names}", hint="choose another `--run_dir`")


def delete_run(paths: RunPaths, *, keep: Collection[Path] = ()) -> None:
    """Delete everything that belongs to the run except its lock file."""
    for path in paths.contents:
        if path in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_if_empty(paths: RunPaths) -> None:
    """Remove the folder of a deleted run if it holds nothing but the lock, which this process holds."""
    if list(paths.root.iterdir()) == [paths.lock]:
        paths.lock.unlink()
        with suppress(OSError):  # another process has claimed it by now
            paths.root.rmdir()


def take_lock(path: Path) -> int:
    """Lock the file and return its descriptor. Closing the descriptor releases the lock."""
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
    if not _is_at(path, descriptor):  # its holder removed it after it was opened here
        os.close(descriptor)
        return take_lock(path)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
