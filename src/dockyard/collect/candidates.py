"""The tasks of a folder before any of them is run: which can be, and what is wrong with the others."""

# pyright: reportMissingTypeStubs=false

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbor.models.task.task import Task as HarborTask
from pydantic import ValidationError

from dockyard.collect.quality import Fault, TaskReport
from dockyard.tasks import survey_tasks, task_settings
from dockyard.tasks.duplicates import content_digest
from dockyard.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Every task of a folder."""

    folder: Path
    tasks: list[Task]
    """That can be run."""
    reports: dict[str, TaskReport]
    """Of all, by name."""
    digest: str
    """Of all that can be read."""


def find_candidates(folder: Path) -> Candidates:
    """Broken folders and tasks without a solution are named, and the rest can be run."""
    found = survey_tasks(folder)
    reports = {
        item.path.name: TaskReport(task=item.path.name, path=str(item.path)).blamed(
            Fault.BROKEN, "; ".join(item.problems)
        )
        for item in found.broken
    }
    reports |= {task.name: _first_look(task) for task in found.tasks}
    return Candidates(
        folder=folder,
        tasks=[task for task in found.tasks if reports[task.name].ok],
        reports=reports,
        digest=content_digest(found.tasks),
    )


def _first_look(task: Task) -> TaskReport:
    report = TaskReport(task=task.name, path=str(task.path))
    try:
        as_harbor = HarborTask(task.path)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        return report.blamed(Fault.BROKEN, f"`{where}` in `{task.path / 'task.toml'}`: {first['msg']}")
    except (OSError, ValueError, RuntimeError) as error:  # what Harbor itself takes for a task it cannot run
        return report.blamed(Fault.BROKEN, str(error))
    return _second_look(task, as_harbor, report)


def _second_look(task: Task, as_harbor: HarborTask, report: TaskReport) -> TaskReport:
    full: Any = task_settings(task.path).get("metadata", {}).get("max_reward", 1.0)
    if not isinstance(full, int | float) or not math.isfinite(full) or full <= 0:
        where = f"`metadata.max_reward` in `{task.path / 'task.toml'}`"
        return report.blamed(Fault.BROKEN, f"{where} is `{full}`, not a number above 0")
    empty = [path for path in _instructions(as_harbor) if not path.read_text(errors="replace").strip()]
    if empty:
        return report.blamed(Fault.BROKEN, f"`{empty[0]}` is empty")
    report = TaskReport(task=task.name, path=str(task.path), full_reward=float(full))
    missing = _missing_solution(as_harbor)
    return report.blamed(Fault.NO_SOLUTION, f"`{missing}` does not exist") if missing else report


def _instructions(task: HarborTask) -> list[Path]:
    steps = [task.paths.step_instruction_path(step.name) for step in task.config.steps or []]
    return steps or [task.paths.instruction_path]


def _missing_solution(task: HarborTask) -> Path | None:
    """Where `oracle` would look in vain. A step without a solution of its own uses the task's."""
    system, paths = task.config.environment.os, task.paths
    steps = [step.name for step in task.config.steps or []]
    own = [step for step in steps if paths.step_solution_dir(step).exists()]
    for step in own:
        if paths.discovered_step_solve_path_for(step, system) is None:
            return paths.step_solve_path_for(step, system)
    shared = paths.discovered_solve_path_for(system)
    needed = len(own) < len(steps) or not steps
    return paths.solve_path_for(system) if needed and shared is None else None
