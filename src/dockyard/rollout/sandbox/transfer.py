"""Files into and out of a sandbox, as tar archives that are packed and unpacked on the two sides.

Never by path from outside: the host would follow links that the agent made. Links are dropped on the way out, because
Harbor reads downloaded paths on the host.
"""

import fcntl
import os
import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

WRITE_FILE = """
if [ -d "$1" ]; then set -- "$1/$2" "$2" "$3"; fi
mkdir -p -- "$(dirname -- "$1")" && cat >"$1" && chmod -- "$3" "$1"
"""
READ_FILE = """
[ -f "$1" ] || { echo "not a file: $1" >&2; exit 1; }
cat -- "$1" | head -c "$2" || [ $? = 141 ]
"""
WRITE_FOLDER = 'mkdir -p -- "$1" && exec tar -xf - -C "$1"'
READ_FOLDER = 'tar -cf - --hard-dereference --ignore-failed-read -C "$1" . | head -c "$2" || [ $? = 141 ]'
"""141: cut off by `head`, which the size of what arrived will tell."""


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


def contents(folder: Path) -> list[Entry]:
    """What is in the folder, without the folder itself, whose permissions must not reach the target's."""
    return [Entry(source=child, target=child.name) for child in sorted(folder.iterdir())]


def permissions(source: Path) -> str:
    return format(source.stat().st_mode & 0o777, "o")


def pack(entries: Iterable[Entry]) -> int:
    """A file descriptor to read the archive from. Targets are relative to where it is unpacked."""
    fd = os.memfd_create("upload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for entry in entries:

            def adjust(member: tarfile.TarInfo, mode: int | None = entry.mode) -> tarfile.TarInfo:
                member.mode = member.mode if mode is None else mode
                return member

            archive.add(entry.source, arcname=entry.target.lstrip("/"), filter=adjust)
    return _sealed(fd)


def pack_file(source: Path) -> int:
    """A file descriptor to read the contents from. A copy: the sandbox could reopen the original for writing."""
    fd = os.memfd_create("upload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file, source.open("rb") as original:
        shutil.copyfileobj(original, file)
    return _sealed(fd)


def save(file: IO[bytes], target: Path) -> None:
    file.seek(0)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as copy:
        shutil.copyfileobj(file, copy)


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


def _sealed(fd: int) -> int:
    """Nobody can write to it or make it grow any more, and it is read from the start."""
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
