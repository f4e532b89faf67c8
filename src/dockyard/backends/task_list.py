"""A run's tasks as a file: found once by whoever starts the run, read by all its processes, on any host."""

from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dockyard.collect.task_sets import TaskSets, task_sets
from dockyard.errors import DockyardError
from dockyard.run_dir import RunDir, task_list_file
from dockyard.run_dir.durable import write_atomically
from dockyard.types import Task

_FORMAT = TypeAdapter(TaskSets)


def write_task_list(run: RunDir) -> TaskSets:
    """The run's tasks, found and written down; those of a resumed run are as they were."""
    if not run.task_list.exists():
        found = task_sets(run)
        anywhere = TaskSets(train=_anchored(found.train), heldout=_anchored(found.heldout))
        write_atomically(run.task_list, _FORMAT.dump_json(anywhere, indent=1))
    return read_task_list(run.path)


def read_task_list(folder: Path) -> TaskSets:
    """The tasks of the run in this folder."""
    file = task_list_file(folder)
    try:
        return _FORMAT.validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        hint = "`dockyard backend` writes it when it starts a run"
        raise DockyardError(f"`{file}` is no list of tasks: {error}", hint=hint) from None


def _anchored(tasks: list[Task]) -> list[Task]:
    return [replace(task, path=task.path.absolute()) for task in tasks]
