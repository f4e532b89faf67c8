"""Files into and out of a sandbox, as the records of `file_ops`: packed on one side, unpacked on the other.

Files are never copied by path from outside, because the host would follow links that the agent created. Links are not
downloaded, because Harbor reads downloaded paths on the host.
"""

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dockyard.rollout.sandbox import file_ops

PATH_MAX = 4096
SPARE_BYTES = 1 << 14
"""The sandbox notices that there is no room left after at most one more header, name, and end."""


class Stream:
    """Records in memory. Closed with the last reference, because a thread may still use it after a cancellation."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("files", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def __del__(self) -> None:
        os.close(self.fd)

    @classmethod
    def with_room_for(cls, max_bytes: int) -> "Stream":
        """Create a stream for the sandbox to write to. The kernel prevents it from growing further."""
        stream = cls()
        os.ftruncate(stream.fd, max_bytes + SPARE_BYTES)
        return stream._seal(fcntl.F_SEAL_GROW)

    def finish(self) -> "Stream":
        """Make the stream ready for the sandbox to read. Nothing can change it any more."""
        file_ops.append_end(self.fd)
        return self._seal(fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)

    def records(self) -> Iterator[file_ops.FileRecord]:
        """Yield the records. The contents of a record can be read until the next one is requested."""
        os.lseek(self.fd, 0, os.SEEK_SET)
        while record := file_ops.next_record(self.fd):
            end = os.lseek(self.fd, 0, os.SEEK_CUR) + record.size
            yield record
            os.lseek(self.fd, end, os.SEEK_SET)

    def _seal(self, seals: int) -> "Stream":
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        os.lseek(self.fd, 0, os.SEEK_SET)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file or folder of the host and its path inside."""

    source: Path
    target: str
    mode: int | None = None
    """Permissions instead of the source's."""


def pack(entries: Iterable[Entry]) -> Stream:
    """Pack files and folders. Targets are relative to the folder into which they are unpacked."""
    stream = Stream()
    for entry in entries:
        _append(stream, entry.source, entry.target.lstrip("/"), entry.mode)
    return stream.finish()


def pack_contents(folder: Path) -> Stream:
    """Pack the folder's contents, without the folder itself: the target keeps its permissions."""
    return pack(Entry(source=child, target=child.name) for child in sorted(folder.iterdir()))


def pack_file(source: Path) -> Stream:
    """Pack one file, or the target of a link."""
    stream = Stream()
    _append_file(stream, source, source.name, None)
    return stream.finish()


def _append(stream: Stream, source: Path, name: str, mode: int | None) -> None:
    info = source.lstat()
    if stat.S_ISDIR(info.st_mode):
        file_ops.append(stream.fd, file_ops.FOLDER, name, _permissions(info, mode), info.st_mtime_ns)
        for child in sorted(source.iterdir()):
            _append(stream, child, f"{name}/{child.name}", mode)
    elif stat.S_ISLNK(info.st_mode):
        target = os.fsencode(source.readlink())
        file_ops.append(stream.fd, file_ops.LINK, name, 0, info.st_mtime_ns, content=target)
    elif stat.S_ISREG(info.st_mode):
        _append_file(stream, source, name, mode)


def _append_file(stream: Stream, source: Path, name: str, mode: int | None) -> None:
    with source.open("rb", buffering=0) as file:
        info = os.fstat(file.fileno())
        file_ops.append_file(stream.fd, name, _permissions(info, mode), info.st_mtime_ns, file.fileno())


def _permissions(info: os.stat_result, mode: int | None) -> int:
    return stat.S_IMODE(info.st_mode) if mode is None else mode


def unpack_records(stream: Stream, target: Path) -> None:
    """Unpack files and folders whose path is not too long. Names that lead out of `target` are errors."""
    target.mkdir(parents=True, exist_ok=True)
    for record in stream.records():
        if len(os.fsencode(target)) + len(os.fsencode(record.name)) + 2 > PATH_MAX:
            continue
        if not set(record.name.split("/")).isdisjoint(("", ".", "..")) or "\0" in record.name:
            raise RuntimeError(f"`{record.name}` is not a valid name for a download")
        path = target / record.name
        if record.kind == file_ops.FOLDER:
            path.mkdir(parents=True, exist_ok=True)
        elif record.kind == file_ops.FILE:
            _save(stream, record, path)
            path.chmod(_safe_permissions(record.mode))
            os.utime(path, ns=(record.changed_ns, record.changed_ns))


def unpack_record(stream: Stream, target: Path) -> None:
    """Unpack the only file to `target`."""
    for record in stream.records():
        _save(stream, record, target)


def _save(stream: Stream, record: file_ops.FileRecord, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb", buffering=0) as file:
        if file_ops.copy(stream.fd, file.fileno(), record.size) != record.size:
            raise RuntimeError(f"`{record.name}` was cut off")


def _safe_permissions(mode: int) -> int:
    """Return the permissions without set-user-id and write access of others. The owner can always read and write."""
    return (mode & 0o755 if mode & 0o100 else mode & 0o644) | 0o600
