"""Copy and remove files inside a sandbox, for the driver. Runs in a fork of PID 1, which is faster than a new program.

Files are passed as a stream of records in a memory file: a header, a name, the contents. The driver packs and unpacks
the same records, but does not trust those that come out of a sandbox.
"""

import os
import struct
from _collections_abc import Callable

# Every start of a sandbox waits for these imports.

HEADER = struct.Struct(">cIqQI4071x")
"""Kind, permissions, modification time in ns, size of the contents, size of the name.

A header is as large as the smallest file on a disk: a download is too large if it would not fit into the sandbox again.
"""
FILE, FOLDER, LINK, END = b"f", b"d", b"l", b"e"
NO_LIMIT = 1 << 62
CHUNK_BYTES = 1 << 20
TYPE, REGULAR, DIRECTORY = 0o170000, 0o100000, 0o040000
OPEN_MODE = 0o1777


class ErrandError(RuntimeError):
    """Why a file operation failed."""


class FileRecord:
    """A file, folder or link. Its contents follow in the stream."""

    __slots__ = ("changed_ns", "kind", "mode", "name", "size")

    def __init__(self, kind: bytes, mode: int, changed_ns: int, size: int, name: bytes) -> None:
        self.kind = kind
        self.mode = mode
        self.changed_ns = changed_ns
        self.size = size
        self.name = os.fsdecode(name)


def is_file(info: os.stat_result) -> bool:
    return info.st_mode & TYPE == REGULAR


def is_folder(info: os.stat_result) -> bool:
    return info.st_mode & TYPE == DIRECTORY


def next_record(stream: int) -> FileRecord | None:
    header = os.read(stream, HEADER.size)
    if len(header) < HEADER.size:
        raise ErrandError("the stream of files was cut off")
    kind, mode, changed_ns, size, name_size = HEADER.unpack(header)
    if kind == END:
        return None
    return FileRecord(kind, mode, changed_ns, size, os.read(stream, min(name_size, CHUNK_BYTES)))


def append(stream: int, kind: bytes, name: str, mode: int, changed_ns: int, *, content: bytes = b"") -> None:
    encoded = os.fsencode(name)
    write_all(stream, HEADER.pack(kind, mode, changed_ns, len(content), len(encoded)) + encoded + content)


def append_file(stream: int, name: str, mode: int, changed_ns: int, source: int, *, limit: int = NO_LIMIT) -> None:
    """Append a file. The header is written last, with the number of bytes that were read."""
    encoded = os.fsencode(name)
    start = os.lseek(stream, 0, os.SEEK_CUR)
    content = os.lseek(stream, HEADER.size + len(encoded), os.SEEK_CUR)
    try:
        size = copy(source, stream, limit - content)
    except OSError:
        os.lseek(stream, start, os.SEEK_SET)  # drop the incomplete record
        raise
    check_room(stream, limit)
    os.pwrite(stream, HEADER.pack(FILE, mode, changed_ns, size, len(encoded)) + encoded, start)


def append_end(stream: int) -> None:
    write_all(stream, HEADER.pack(END, 0, 0, 0, 0))


def check_room(stream: int, limit: int) -> None:
    if os.lseek(stream, 0, os.SEEK_CUR) >= limit:
        raise ErrandError(f"larger than the sandbox's {limit >> 20} MB of storage")


def copy(source: int, target: int, at_most: int) -> int:
    """Copy at most `at_most` bytes and return how many there were."""
    left = at_most
    while left > 0 and (data := os.read(source, min(left, CHUNK_BYTES))):
        write_all(target, data)
        left -= len(data)
    return at_most - left


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def make_folder(path: str) -> None:
    os.makedirs(path, exist_ok=True)


def write_folder(stream: int, folder: str) -> None:
    """Write the stream's records into the folder. Existing files and links are replaced, not followed."""
    os.makedirs(folder, exist_ok=True)
    folders: list[tuple[str, FileRecord]] = []
    while record := next_record(stream):
        path = os.path.join(folder, record.name)
        write(stream, record, path)
        if record.kind == FOLDER:
            folders.append((path, record))
    for path, record in reversed(folders):  # last, because the permissions may forbid writing
        os.chmod(path, record.mode)
        os.utime(path, ns=(record.changed_ns, record.changed_ns))


def write_file(stream: int, path: str) -> None:
    """Write the stream's only file to the path, or under its own name into the path if that is a folder."""
    record = next_record(stream)
    if record is not None:
        write(stream, record, os.path.join(path, record.name) if os.path.isdir(path) else path)


def write(stream: int, record: FileRecord, path: str) -> None:
    parent = os.path.dirname(path) or "/"
    if not os.path.isdir(parent):
        os.makedirs(parent)
    try:
        if record.kind == FOLDER:
            write_empty_folder(path)
        elif record.kind == LINK:
            remove(path)
            os.symlink(os.read(stream, record.size), path)
        else:
            write_contents(stream, record, path)
    except OSError as error:
        error.filename = path  # the error of a full disk has none
        raise


def write_empty_folder(path: str) -> None:
    """Create the folder, with permissions that let this process write into it until all files are there."""
    if os.path.islink(path) or not os.path.isdir(path):
        remove(path)
        os.mkdir(path)
    os.chmod(path, 0o700)


def write_contents(stream: int, record: FileRecord, path: str) -> None:
    remove(path)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        copy(stream, file, record.size)
        os.fchmod(file, record.mode)
        os.utime(file, ns=(record.changed_ns, record.changed_ns))
    finally:
        os.close(file)


def remove(path: str) -> None:
    """Remove a file, a link or an empty folder, if it exists."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        os.rmdir(path)


def read_file(stream: int, path: str, limit: int) -> None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block
    except (FileNotFoundError, NotADirectoryError):
        raise ErrandError(f"not a file: {path}") from None
    info = os.fstat(file)
    if not is_file(info):
        raise ErrandError(f"not a file: {path}")
    append_file(stream, "", info.st_mode & 0o7777, info.st_mtime_ns, file, limit=limit)
    append_end(stream)


def read_folder(stream: int, folder: str, limit: int) -> None:
    """Append the readable files and folders. The limit is checked, because a sparse file may claim any size."""
    pending = [("", name) for name in os.listdir(folder)]
    while pending:
        check_room(stream, limit)
        place, name = pending.pop()
        inner = os.path.join(place, name)
        path = os.path.join(folder, inner)
        try:
            info = os.lstat(path)
            if is_folder(info):
                append(stream, FOLDER, inner, info.st_mode & 0o7777, info.st_mtime_ns)
                pending += [(inner, below) for below in os.listdir(path)]
            elif is_file(info):
                append_readable(stream, inner, path, limit)
        except OSError:
            continue
    check_room(stream, limit)
    append_end(stream)


def append_readable(stream: int, name: str, path: str, limit: int) -> None:
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        info = os.fstat(file)
        if is_file(info):  # it may have been replaced meanwhile
            append_file(stream, name, info.st_mode & 0o7777, info.st_mtime_ns, file, limit=limit)
    finally:
        os.close(file)


def wipe(folders: list[str], open_folders: list[str], gone: list[str]) -> None:
    """Empty the folders, also where one was replaced by something else, and remove the paths in `gone`."""
    for folder in folders:
        if os.path.islink(folder) or not os.path.isdir(folder):
            remove(folder)
            os.makedirs(folder)
        empty(folder)
    for folder in open_folders:
        os.chmod(folder, OPEN_MODE)
    for path in gone:
        if os.path.isdir(path) and not os.path.islink(path):
            empty(path)
        remove(path)


def empty(folder: str) -> None:
    """Remove everything in the folder, however deep: by descriptors and `..`, without long paths or many open files."""
    here = enter(folder, None)
    levels = [remove_files(here)]
    while True:
        if levels[-1]:
            below = enter(levels[-1][-1], here)
            levels.append(remove_files(below))
        else:
            levels.pop()
            if not levels:
                break
            below = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
            os.rmdir(levels[-1].pop(), dir_fd=below)
        os.close(here)
        here = below
    os.close(here)


def enter(folder: str, parent: int | None) -> int:
    mode = os.stat(folder, dir_fd=parent).st_mode & 0o7777
    if mode & 0o700 != 0o700:
        os.chmod(folder, mode | 0o700, dir_fd=parent)
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def remove_files(folder: int) -> list[str]:
    """Remove all files and return the names of the remaining folders."""
    folders: list[str] = []
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders


ERRANDS: dict[str, Callable[..., None]] = {
    errand.__name__: errand for errand in (make_folder, write_folder, write_file, read_file, read_folder, wipe)
}
