"""Files into and out of a sandbox, and out of a container: packed on one side, unpacked on the other.

Never by path from outside: the host would follow links that the agent made. Links are dropped on the way out, because
Harbor reads downloaded paths on the host. A sandbox speaks the records of `file_ops`, a container tar.
"""

import fcntl
import os
import shutil
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dockyard.rollout.sandbox import file_ops

PATH_MAX = 4096
SPARE_BYTES = 1 << 14
"""The sandbox sees that there is no room left after at most one more header, name, and end."""


class Stream:
    """Records in memory. Closed with the last reference: a thread may still be at it when its caller is cancelled."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("files", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def __del__(self) -> None:
        os.close(self.fd)

    @classmethod
    def with_room_for(cls, max_bytes: int) -> "Stream":
        """For the sandbox to write to. The kernel sees to it that it does not grow further."""
        stream = cls()
        os.ftruncate(stream.fd, max_bytes + SPARE_BYTES)
        return stream._seal(fcntl.F_SEAL_GROW)

    def finish(self) -> "Stream":
        """For the sandbox to read. Nobody can change it any more."""
        file_ops.append_end(self.fd)
        return self._seal(fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)

    def records(self) -> Iterator[file_ops.FileRecord]:
        """Whose contents can be read until the next is asked for."""
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
    """A file or folder of the host and its place inside."""

    source: Path
    target: str
    mode: int | None = None
    """Permissions instead of the source's."""


class Download:
    """A sink that keeps at most `max_bytes` in a file."""

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self.file = file
        self.max_bytes = max_bytes
        self._size = 0

    @property
    def is_full(self) -> bool:
        return self._size >= self.max_bytes

    def write(self, data: bytes, /) -> bool:
        data = data[: self.max_bytes - self._size]
        self._size += len(data)
        self.file.write(data)
        return self.is_full  # a file with holes may claim to be of any size


def pack(entries: Iterable[Entry]) -> Stream:
    """Targets are relative to where it is unpacked."""
    stream = Stream()
    for entry in entries:
        _append(stream, entry.source, entry.target.lstrip("/"), entry.mode)
    return stream.finish()


def pack_contents(folder: Path) -> Stream:
    """What is in the folder, without the folder itself, whose permissions must not reach the target's."""
    return pack(Entry(source=child, target=child.name) for child in sorted(folder.iterdir()))


def pack_file(source: Path) -> Stream:
    """One file, or the one that a link leads to."""
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
    """Files and folders only, whose path is not too long; names that lead out of `target` are errors."""
    target.mkdir(parents=True, exist_ok=True)
    for record in stream.records():
        if len(os.fsencode(target)) + len(os.fsencode(record.name)) + 2 > PATH_MAX:
            continue
        if not set(record.name.split("/")).isdisjoint(("", ".", "..")) or "\0" in record.name:
            raise RuntimeError(f"`{record.name}` is no name for a download")
        path = target / record.name
        if record.kind == file_ops.FOLDER:
            path.mkdir(parents=True, exist_ok=True)
        elif record.kind == file_ops.FILE:
            _save(stream, record, path)
            path.chmod(_safe_permissions(record.mode))
            os.utime(path, ns=(record.changed_ns, record.changed_ns))


def unpack_record(stream: Stream, target: Path) -> None:
    """The only file, into `target`."""
    for record in stream.records():
        _save(stream, record, target)


def _save(stream: Stream, record: file_ops.FileRecord, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb", buffering=0) as file:
        if file_ops.copy(stream.fd, file.fileno(), record.size) != record.size:
            raise RuntimeError(f"`{record.name}` was cut off")


def _safe_permissions(mode: int) -> int:
    """Others may not write, nor anyone become someone else by it; the owner always may."""
    return (mode & 0o755 if mode & 0o100 else mode & 0o644) | 0o600


def unpack(archive: IO[bytes], target: Path) -> None:
    """Files and folders only; names that lead out of `target` are errors."""
    archive.seek(0)
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=archive, mode="r:") as members:
        for member in members:
            if member.isreg() or member.isdir():
                members.extract(member, target, filter="data")


def unpack_one(archive: IO[bytes], target: Path) -> None:
    """The only member, which must be a file, into `target`, or into it under its own name if that is a folder."""
    archive.seek(0)
    with tarfile.open(fileobj=archive, mode="r:") as members:
        member = members.next()
        content = members.extractfile(member) if member is not None and member.isreg() else None
        if member is None or content is None:
            raise RuntimeError("not a file")
        target = target / member.name if target.is_dir() else target
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as copy:
            shutil.copyfileobj(content, copy)
