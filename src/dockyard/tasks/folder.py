"""A Harbor task folder is written whole or not at all."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dockyard.run_dir.durable import whole_folder


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
class Written:
    """What became of a dataset's rows."""

    folder: Path
    names: list[str] = field(default_factory=list[str])
    skipped: list[Skipped] = field(default_factory=list[Skipped])

    def table(self) -> str:
        """For people: how many, and each row that was left out with its reason."""
        lines = [f"{self.folder}: {len(self.names)} tasks written, {len(self.skipped)} rows skipped"]
        return "\n".join([*lines, *(f"  {row.where}: {row.why}" for row in self.skipped)])
