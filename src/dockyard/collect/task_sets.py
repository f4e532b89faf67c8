"""The tasks of a run: those it trains on and those it is evaluated on.

Tasks made from the rows of a dataset are written once, inside the run's folder, and so is the split into training and
held-out tasks. A resumed run reads both.
"""

from dataclasses import dataclass

from dockyard.config import RunConfig
from dockyard.errors import DockyardError
from dockyard.run_dir.run import RunDir
from dockyard.tasks.folder import load_tasks
from dockyard.tasks.sources import SourceRequest, find_source
from dockyard.tasks.split import read_split, split_tasks, write_split
from dockyard.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSets:
    """The training tasks and the held-out tasks of a run."""

    train: list[Task]
    heldout: list[Task]


def check_tasks(config: RunConfig) -> None:
    """Raise the errors that can be found before the run's folder is created."""
    find_source(config.tasks.source).check(config.tasks)
    if config.tasks.heldout:
        load_tasks(config.tasks.heldout)


def task_sets(run: RunDir) -> TaskSets:
    """Return the tasks of a run, after downloading or writing them if necessary. `recorded` has no training tasks."""
    tasks = run.config.tasks
    heldout = load_tasks(tasks.heldout) if tasks.heldout else []
    request = SourceRequest(settings=tasks, seed=run.config.seed, folder=run.paths.tasks)
    found = find_source(tasks.source).open(request)
    if found.heldout is not None:
        return TaskSets(train=found.train, heldout=found.heldout)
    if tasks.heldout_share and found.train:
        return _split(run, found.train)
    return TaskSets(train=found.train, heldout=heldout)


def _split(run: RunDir, tasks: list[Task]) -> TaskSets:
    """Split as recorded in the run; the first time, draw the split and record it."""
    file = run.paths.split
    if not file.exists():
        write_split(file, split_tasks(tasks, heldout_share=run.config.tasks.heldout_share, seed=run.config.seed))
    split = read_split(file)
    held, kept = set(split.heldout), set(split.train)
    if lost := (held | kept) - {task.name for task in tasks}:
        hint = "restore them, or start another run"
        raise DockyardError(f"`{file}` names tasks that are no longer there: {', '.join(sorted(lost)[:5])}", hint=hint)
    return TaskSets(
        train=[task for task in tasks if task.name in kept], heldout=[task for task in tasks if task.name in held]
    )
