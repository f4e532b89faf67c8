"""Write files and folders so that `kill -9` leaves them complete or absent, and lines so that complete ones are kept.

A line is complete once its newline is written. Data after the last newline is a torn write: readers skip it, and the
next append removes it.
"""

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from dockyard.errors import DockyardError, UsageError

_DRAFT, _OLD = ".draft", ".old"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SAYS_FULL = tuple(text for code in _FULL for text in (os.strerror(code), f"(os error {code})"))
_FREE_SPACE = "free some disk space, then `dockyard train --resume RUN_DIR`"
_ALMOST_FULL_BYTES = 64 * 2**20
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """Turn the errors of a full or read-only disk into a DockyardError with a hint."""
    try:
        yield
    except OSError as error:
        reason = f"cannot write `{path}`: {error.strerror}"
        if error.errno in _FULL:
            raise DockyardError(reason, hint=_FREE_SPACE) from error
        if error.errno in _FORBIDDEN:
            raise DockyardError(reason, hint="check who owns the folder, or choose another `--run_dir`") from error
        raise
    except Exception as error:  # torch and safetensors have errors of their own for a full disk
        says_full = any(text in str(error) for text in _SAYS_FULL)
        if isinstance(error, DockyardError) or not (says_full or _is_full(path)):
            raise
        reason = f"cannot write `{path}`: no space left on its disk"
        raise DockyardError(reason, hint=_FREE_SPACE) from error


def _is_full(path: Path) -> bool:
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(folder).free < _ALMOST_FULL_BYTES


def make_folder(path: Path, *, hint: str) -> None:
    """Make a folder that the user named, and its parents. `hint` belongs to the error if that is impossible."""
    refuse_below_file(path, hint=hint)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        message = f"`{path}` cannot be made in `{_above(path)}`: no folder can be made there"
        raise UsageError(message, hint=hint) from error


def refuse_below_file(path: Path, *, hint: str) -> None:
    """Raise UsageError if the folder cannot be made because one of its parents is a file."""
    if not _above(path).is_dir():
        raise UsageError(f"`{path}` cannot be made in `{_above(path)}`: it is a file", hint=hint)


def _above(path: Path) -> Path:
    """Return the nearest parent that exists."""
    return next(parent for parent in path.absolute().parents if parent.exists())


def append_line(path: Path, line: bytes) -> None:
    """Append one line and wait until it is on disk. If the disk is full, the file keeps its earlier lines."""
    if b"\n" in line:
        raise ValueError("a line cannot contain a newline")
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            end = _cut_torn_line(descriptor)
            try:
                _write_at(descriptor, line + b"\n", end)
                os.fsync(descriptor)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)
        if end == 0:
            sync_folder(path.parent)


def read_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file, or an empty list if the file does not exist."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return data.split(b"\n")[:-1]


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file. After a crash it has either the old or the new content."""
    draft = _beside(path, _DRAFT)
    with disk_errors(path):
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def whole_folder(path: Path) -> Generator[Path]:
    """Yield a folder to fill. It is renamed to `path` at the end of the block, and deleted if the block raises."""
    draft = _beside(path, _DRAFT)
    try:
        with disk_errors(path):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            yield draft
            _sync_tree(draft)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _swap(draft, path)


def remove_folder(path: Path) -> None:
    """Delete a folder. It loses its name first, so that an interrupted deletion leaves no incomplete folder."""
    draft = _beside(path, _DRAFT)
    shutil.rmtree(draft, ignore_errors=True)
    path.rename(draft)
    shutil.rmtree(draft)


def remove_drafts(folder: Path) -> None:
    """Delete the remains of interrupted writes, and restore a folder that was about to be replaced."""
    for left in folder.glob(f".*{_OLD}"):
        original = left.with_name(left.name.removeprefix(".").removesuffix(_OLD))
        if original.exists():
            shutil.rmtree(left)
        else:
            left.rename(original)
    for left in folder.glob(f".*{_DRAFT}"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _swap(draft: Path, path: Path) -> None:
    old = _beside(path, _OLD)
    if path.exists():
        path.rename(old)
    draft.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _cut_torn_line(descriptor: int) -> int:
    """Truncate the file after its last newline, and return that offset."""
    size = end = os.fstat(descriptor).st_size
    block = 1 << 16
    while end > 0 and os.pread(descriptor, 1, end - 1) != b"\n":
        start = max(0, end - block)
        end = start + os.pread(descriptor, end - start, start).rfind(b"\n") + 1
    if end < size:
        os.ftruncate(descriptor, end)
    return end


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def _sync_tree(folder: Path) -> None:
    for parent, _, names in folder.walk(top_down=False):
        for name in names:
            with (parent / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(parent)
