"""A Harbor task folder is written whole or not at all."""

import logging
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dockyard.errors import UsageError
from dockyard.run_dir.durable import whole_folder

logger = logging.getLogger(__name__)

LONGEST_NAME = 200
"""Of a task: file systems take 255 bytes, and drafts need a few."""
_SOURCES = ("c2bug", "swebench")


class OccupiedError(Exception):
    """Where the task belongs there is something else."""


def check_out(folder: Path) -> None:
    """Tasks can be written there."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UsageError(f"`{there}` is a file, not a folder for tasks", hint="choose another folder")


def put_task(folder: Path, files: Mapping[str, str | bytes | Path]) -> None:
    """Write a task of a dataset. One of an earlier run is replaced, and nothing else is."""
    if folder.is_symlink() or not _is_free(folder):
        if _source_of(folder) not in _SOURCES:
            raise OccupiedError(
                f"`{folder}` is there and was not made from a dataset: remove it, or choose another folder"
            )
        logger.info("replaced %s", folder)
    write_task(folder, files)


def _is_free(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _source_of(folder: Path) -> str | None:
    """The word that our templates put into every task."""
    try:
        metadata = tomllib.loads((folder / "task.toml").read_text())["metadata"]
        return None if folder.is_symlink() else metadata["source"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write_task(folder: Path, files: Mapping[str, str | bytes | Path]) -> None:
    """Files by their path inside the folder, as their content or as the file to copy. `.sh` files are executable.

    A folder that is already there is replaced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as draft:
        for name, content in files.items():
            _write(draft / name, content)


def _write(file: Path, content: str | bytes | Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        shutil.copyfile(content, file)
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    if file.suffix == ".sh":
        file.chmod(0o755)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that became no task."""

    where: str
    """The file and row, or the instance."""
    why: str


@dataclass(slots=True)
class WrittenTasks:
    """What became of a dataset's rows."""

    folder: Path
    names: list[str] = field(default_factory=list[str])
    skipped: list[Skipped] = field(default_factory=list[Skipped])
    limit: int | None = None
    """How many were asked for. None: all."""

    @property
    def is_full(self) -> bool:
        """Whether no more are wanted."""
        return self.limit is not None and len(self.names) >= self.limit

    def table(self) -> str:
        """For people: how many, and each row that was left out with its reason."""
        short = "" if self.limit is None or self.is_full else f" (the limit was {self.limit})"
        lines = [f"{self.folder}: {len(self.names)} tasks written{short}, {len(self.skipped)} rows skipped"]
        return "\n".join([*lines, *(f"  {row.where}: {row.why}" for row in self.skipped)])
