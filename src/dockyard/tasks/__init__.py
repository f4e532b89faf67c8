"""Where tasks come from: folders in Harbor's format, or the demo's generator."""

import random
import tomllib
from pathlib import Path
from typing import Any

from dockyard.errors import DockyardError
from dockyard.types import Task

_HARBORS_TIMEOUT_S = 600.0  # of builds and verifiers, where a task names none
_NEEDED = ("task.toml", "instruction.md", "tests/test.sh")


def load_tasks(folder: Path) -> list[Task]:
    """The task in this folder, or the tasks in its sub-folders. Broken ones are an error that names them all."""
    if not folder.is_dir():
        raise DockyardError(f"`{folder}` is not a folder of tasks", hint="`dockyard tasks demo DIR` writes some")
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    paths = [folder] if (folder / "task.toml").exists() else inside
    broken = [f"`{path}` has no `{name}`" for path in paths for name in _needed(path) if not (path / name).is_file()]
    if broken:
        shown = "; ".join(broken[:5]) + (f"; and {len(broken) - 5} more" if len(broken) > 5 else "")
        raise DockyardError(shown, hint="a Harbor task has `task.toml`, `instruction.md` and `tests/test.sh`")
    if not paths:
        raise DockyardError(f"`{folder}` holds no tasks", hint="`dockyard tasks demo DIR` writes some")
    return [_read(path) for path in paths]


def _needed(path: Path) -> list[str]:
    """A task of several steps has an instruction for each, and tests for each or for all."""
    if not (path / "task.toml").is_file():
        return list(_NEEDED)
    steps = [f"steps/{step.get('name')}" for step in _settings(path).get("steps", [])]
    if not steps:
        return list(_NEEDED)
    shared = (path / "tests/test.sh").is_file()
    return [f"{step}/{name}" for step in steps for name in _NEEDED[1:] if not (shared and name == "tests/test.sh")]


def _settings(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((path / "task.toml").read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DockyardError(
            f"`{path / 'task.toml'}` is not valid TOML: {error}", hint="mend it, then try again"
        ) from None


def _read(path: Path) -> Task:
    settings = _settings(path)
    return Task(
        name=path.name,
        path=path,
        kind=str(settings.get("metadata", {}).get("kind", "")),
        agent_timeout_s=settings.get("agent", {}).get("timeout_sec"),
        build_timeout_s=settings.get("environment", {}).get("build_timeout_sec") or _HARBORS_TIMEOUT_S,
        verifier_timeout_s=settings.get("verifier", {}).get("timeout_sec") or _HARBORS_TIMEOUT_S,
    )


def tasks_of_step(tasks: list[Task], step: int, count: int, seed: int) -> list[Task]:
    """Which tasks a step attempts: each once before any again, in an order of the seed's, the kinds taking turns."""
    chosen: list[Task] = []
    for position in range(step * count, (step + 1) * count):
        epoch, index = divmod(position, len(tasks))
        chosen.append(_shuffled(tasks, random.Random(f"{seed}-{epoch}"))[index])
    return chosen


def _shuffled(tasks: list[Task], rng: random.Random) -> list[Task]:
    by_kind: dict[str, list[Task]] = {}
    for task in tasks:
        by_kind.setdefault(task.kind, []).append(task)
    for members in by_kind.values():
        rng.shuffle(members)
    rounds = max(len(members) for members in by_kind.values())
    return [members[turn] for turn in range(rounds) for members in by_kind.values() if turn < len(members)]
