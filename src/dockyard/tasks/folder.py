"""Read and write task folders in Harbor's format. A folder is written whole or not at all."""

import logging
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.durable import whole_folder
from dockyard.types import Task

logger = logging.getLogger(__name__)

_HARBORS_TIMEOUT_S = 600.0  # Harbor's default for builds and verifiers
_NEEDED = ("task.toml", "instruction.md", "tests/test.sh")
_LAYOUT = "a Harbor task has `task.toml`, `instruction.md` and `tests/test.sh`"
_FIX = "fix the file, then try again"
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenTask:
    """A folder that is not a valid task."""

    path: Path
    problems: tuple[str, ...]
    """Each one names the file."""
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The valid and the broken tasks of a folder."""

    tasks: list[Task]
    broken: list[BrokenTask]


def load_tasks(folder: Path) -> list[Task]:
    """Return the task in this folder, or the tasks in its subfolders. Raise an error that names all broken tasks."""
    return _all_valid(survey_tasks(folder))


def load_task_folders(paths: Sequence[Path]) -> list[Task]:
    """Return the tasks in these folders, one in each. Raise an error that names all broken tasks."""
    return _all_valid(_survey(paths))


def survey_tasks(folder: Path) -> Survey:
    """Return the valid and the broken tasks of a folder. Raise an error if it has neither."""
    if not folder.is_dir():
        raise DockyardError(f"`{folder}` is not a folder of tasks", hint="`dockyard tasks demo DIR` writes some")
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    paths = [folder] if (folder / "task.toml").exists() else inside
    if not paths:
        raise DockyardError(f"`{folder}` has no tasks", hint="`dockyard tasks demo DIR` writes some")
    return _survey(paths)


def _all_valid(found: Survey) -> list[Task]:
    if found.broken:
        problems = [problem for task in found.broken for problem in task.problems]
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise DockyardError("; ".join(problems[:_SHOWN]) + more, hint=found.broken[0].hint)
    return found.tasks


def _survey(paths: Sequence[Path]) -> Survey:
    found = [_read_or_explain(path) for path in paths]
    return Survey(
        tasks=[item for item in found if isinstance(item, Task)],
        broken=[item for item in found if isinstance(item, BrokenTask)],
    )


def task_settings(path: Path) -> dict[str, Any]:
    """Return the contents of the folder's `task.toml`."""
    file = path / "task.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DockyardError(f"`{file}` is not valid TOML: {error}", hint=_FIX) from None
    except OSError as error:
        raise DockyardError(f"`{file}` cannot be read: {error.strerror}", hint=_FIX) from None


def _read_or_explain(path: Path) -> Task | BrokenTask:
    try:
        missing = tuple(f"`{path}` has no `{name}`" for name in _needed(path) if not (path / name).is_file())
        return BrokenTask(path=path, problems=missing, hint=_LAYOUT) if missing else _read(path)
    except DockyardError as error:
        return BrokenTask(path=path, problems=(error.message,), hint=error.hint)


def _needed(path: Path) -> list[str]:
    """Return the required files. A task with several steps has instructions per step, and tests per step or for all."""
    if not (path / "task.toml").is_file():
        return list(_NEEDED)
    steps = [f"steps/{name}" for name in _step_names(path)]
    if not steps:
        return list(_NEEDED)
    shared = (path / "tests/test.sh").is_file()
    return [f"{step}/{name}" for step in steps for name in _NEEDED[1:] if not (shared and name == "tests/test.sh")]


def _step_names(path: Path) -> list[str]:
    steps = task_settings(path).get("steps", [])
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in cast(list[Any], steps)):
        raise DockyardError(f"`steps` in `{path / 'task.toml'}` is `{steps}`, not a list of tables", hint=_FIX)
    return [str(step.get("name")) for step in cast(list[dict[str, Any]], steps)]


def _read(path: Path) -> Task:
    return Task(
        name=path.name,
        path=path,
        kind=str(_table(path, "metadata").get("kind", "")),
        agent_timeout_s=_seconds(path, "agent", "timeout_sec"),
        build_timeout_s=_seconds(path, "environment", "build_timeout_sec") or _HARBORS_TIMEOUT_S,
        verifier_timeout_s=_seconds(path, "verifier", "timeout_sec") or _HARBORS_TIMEOUT_S,
    )


def _table(path: Path, name: str) -> dict[str, Any]:
    value = task_settings(path).get(name, {})
    if not isinstance(value, dict):
        raise DockyardError(f"`{name}` in `{path / 'task.toml'}` is `{value}`, not a table", hint=_FIX)
    return cast(dict[str, Any], value)


def _seconds(path: Path, table: str, name: str) -> float | None:
    value = _table(path, table).get(name)
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise DockyardError(
            f"`{table}.{name}` in `{path / 'task.toml'}` is `{value}`, not a number of seconds", hint=_FIX
        )
    return value


LONGEST_NAME = 200
"""Of a task. File systems allow 255 bytes, and temporary names need a few."""
_SOURCES = ("c2bug", "swebench")


class OccupiedError(Exception):
    """The task's place is occupied by something else."""


def check_out(folder: Path) -> None:
    """Raise an error if tasks cannot be written to this folder."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UsageError(f"`{there}` is a file, not a folder", hint="choose another folder")


def put_task(folder: Path, files: Mapping[str, str | bytes | Path]) -> None:
    """Write a task made from a dataset. Only an earlier version of such a task is replaced."""
    if folder.is_symlink() or not _is_free(folder):
        if _source_of(folder) not in _SOURCES:
            raise OccupiedError(
                f"`{folder}` exists and was not made from a dataset: remove it, or choose another folder"
            )
        logger.info("replaced %s", folder)
    write_task(folder, files)


def _is_free(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _source_of(folder: Path) -> str | None:
    """Return `metadata.source` of `task.toml`, which Dockyard's templates set."""
    try:
        metadata = tomllib.loads((folder / "task.toml").read_text())["metadata"]
        return None if folder.is_symlink() else metadata["source"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write_task(folder: Path, files: Mapping[str, str | bytes | Path]) -> None:
    """Write a task folder. `files` maps paths to contents or to files to copy. `.sh` files become executable.

    An existing folder is replaced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as draft:
        write_files(draft, files)


def write_files(folder: Path, files: Mapping[str, str | bytes | Path]) -> None:
    """Write files to a folder as `write_task` does, in place and without waiting for the disk."""
    for name, content in files.items():
        _write(folder / name, content)


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
    """A row from which no task was written."""

    where: str
    """File and row, or the instance."""
    why: str


@dataclass(slots=True)
class WrittenTasks:
    """The tasks that were written from a dataset's rows, and the rows that were skipped."""

    folder: Path
    names: list[str] = field(default_factory=list[str])
    skipped: list[Skipped] = field(default_factory=list[Skipped])
    limit: int | None = None
    """The requested number of tasks. None: all."""

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self.limit is not None and len(self.names) >= self.limit

    def table(self) -> str:
        """Return the number of tasks, and each skipped row with its reason, as text."""
        short = "" if self.limit is None or self.is_full else f" (the limit was {self.limit})"
        lines = [f"{self.folder}: {len(self.names)} tasks written{short}, {len(self.skipped)} rows skipped"]
        return "\n".join([*lines, *(f"  {row.where}: {row.why}" for row in self.skipped)])
