"""Where tasks come from: folders in Harbor's format, registries, rows of datasets, or the demo's generator."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dockyard.errors import DockyardError
from dockyard.types import Task

_HARBORS_TIMEOUT_S = 600.0  # of builds and verifiers, where a task names none
_NEEDED = ("task.toml", "instruction.md", "tests/test.sh")
_LAYOUT = "a Harbor task has `task.toml`, `instruction.md` and `tests/test.sh`"
_MEND = "mend it, then try again"
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenTask:
    """A folder that should be a task and is not."""

    path: Path
    problems: tuple[str, ...]
    """Each names the file."""
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a folder of tasks holds."""

    tasks: list[Task]
    broken: list[BrokenTask]


def load_tasks(folder: Path) -> list[Task]:
    """The task in this folder, or the tasks in its sub-folders. Broken ones are an error that names them all."""
    found = survey_tasks(folder)
    if found.broken:
        problems = [problem for task in found.broken for problem in task.problems]
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise DockyardError("; ".join(problems[:_SHOWN]) + more, hint=found.broken[0].hint)
    return found.tasks


def survey_tasks(folder: Path) -> Survey:
    """The tasks that can be read, and those that cannot. A folder without any of either is an error."""
    if not folder.is_dir():
        raise DockyardError(f"`{folder}` is not a folder of tasks", hint="`dockyard tasks demo DIR` writes some")
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    paths = [folder] if (folder / "task.toml").exists() else inside
    if not paths:
        raise DockyardError(f"`{folder}` holds no tasks", hint="`dockyard tasks demo DIR` writes some")
    found = [_read_or_say_why(path) for path in paths]
    return Survey(
        tasks=[item for item in found if isinstance(item, Task)],
        broken=[item for item in found if isinstance(item, BrokenTask)],
    )


def task_settings(path: Path) -> dict[str, Any]:
    """What the `task.toml` in this folder says."""
    file = path / "task.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DockyardError(f"`{file}` is not valid TOML: {error}", hint=_MEND) from None
    except OSError as error:
        raise DockyardError(f"`{file}` cannot be read: {error.strerror}", hint=_MEND) from None


def _read_or_say_why(path: Path) -> Task | BrokenTask:
    try:
        missing = tuple(f"`{path}` has no `{name}`" for name in _needed(path) if not (path / name).is_file())
        return BrokenTask(path=path, problems=missing, hint=_LAYOUT) if missing else _read(path)
    except DockyardError as error:
        return BrokenTask(path=path, problems=(error.message,), hint=error.hint)


def _needed(path: Path) -> list[str]:
    """A task of several steps has an instruction for each, and tests for each or for all."""
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
        raise DockyardError(f"`steps` in `{path / 'task.toml'}` is `{steps}`, not a list of tables", hint=_MEND)
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
        raise DockyardError(f"`{name}` in `{path / 'task.toml'}` is `{value}`, not a table", hint=_MEND)
    return cast(dict[str, Any], value)


def _seconds(path: Path, table: str, name: str) -> float | None:
    value = _table(path, table).get(name)
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise DockyardError(
            f"`{table}.{name}` in `{path / 'task.toml'}` is `{value}`, not a number of seconds", hint=_MEND
        )
    return value
