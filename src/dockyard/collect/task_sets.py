"""A run's tasks, wherever they come from: which it learns from, and which it is tested on.

What is made from rows of a dataset is written once, inside the run's folder, and so is what was held out: a resumed run
finds both as they were.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dockyard.config import RunConfig
from dockyard.errors import DockyardError
from dockyard.run_dir.durable import whole_folder
from dockyard.run_dir.run import RunDir
from dockyard.tasks.folder import WrittenTasks
from dockyard.tasks.generated import WriteTasks, write_demo_tasks, write_trail_tasks
from dockyard.tasks.sources import load_tasks
from dockyard.tasks.split import Selection, read_split, split_tasks, write_split
from dockyard.types import Task

logger = logging.getLogger(__name__)

_HARBOR_DATASET = "swebench-verified@1.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSets:
    """Both halves of a run's tasks."""

    train: list[Task]
    heldout: list[Task]


def check_tasks(config: RunConfig) -> None:
    """Find what must fail before a run's folder is made. What rows become is seen when they are written there."""
    match config.tasks.source:
        case "folder":
            load_tasks(_train_folder(config))
        case "harbor":
            _of_registry(config)
        case _:
            pass
    if config.tasks.heldout:
        load_tasks(config.tasks.heldout)


def task_sets(run: RunDir) -> TaskSets:
    """The tasks of a run, made or fetched if need be. `recorded` has none to learn from but its rollouts."""
    tasks = run.config.tasks
    heldout = load_tasks(tasks.heldout) if tasks.heldout else []
    match tasks.source:
        case "recorded":
            return TaskSets(train=[], heldout=heldout)
        case "demo":
            return _generated(run, write_demo_tasks)
        case "trail":
            return _generated(run, write_trail_tasks)
        case "folder":
            chosen = _select(run.config, load_tasks(_train_folder(run.config)), str(tasks.train))
        case "harbor":
            chosen = _select(run.config, _of_registry(run.config), tasks.dataset or _HARBOR_DATASET)
        case "swebench" | "c2bug":
            chosen = _of_rows(run)
    return _split(run, chosen) if tasks.heldout_share else TaskSets(train=chosen, heldout=heldout)


def _generated(run: RunDir, write: WriteTasks) -> TaskSets:
    tasks = run.config.tasks
    write(run.paths.tasks, num_train=tasks.num_train, num_heldout=tasks.num_heldout, seed=run.config.seed)
    return TaskSets(train=load_tasks(run.paths.tasks / "train"), heldout=load_tasks(run.paths.tasks / "heldout"))


def _train_folder(config: RunConfig) -> Path:
    assert config.tasks.train is not None  # load_run_config refuses the source `folder` without it
    return config.tasks.train


def _of_registry(config: RunConfig) -> list[Task]:
    from dockyard.tasks.registry import load_dataset  # late: Harbor's clients take a second to import

    return asyncio.run(load_dataset(config.tasks.dataset or _HARBOR_DATASET, registry=config.tasks.registry))


def _selection(config: RunConfig) -> Selection:
    repos = (config.tasks.repo,) if config.tasks.repo else ()
    seed = config.seed if config.tasks.limit else None  # all of them stay in their order
    return Selection(repos=repos, ids=config.tasks.ids, limit=config.tasks.limit, seed=seed)


def _select(config: RunConfig, tasks: list[Task], where: str) -> list[Task]:
    from dockyard.tasks.registry import select_tasks

    chosen = select_tasks(tasks, _selection(config), where)
    _say_if_fewer(config, len(chosen), where)
    return chosen


def _say_if_fewer(config: RunConfig, there: int, where: str) -> None:
    if config.tasks.limit and there < config.tasks.limit:
        logger.warning("%d tasks were asked for; `%s` has %d", config.tasks.limit, where, there)


def _of_rows(run: RunDir) -> list[Task]:
    """Rows become task folders in the run's own."""
    folder = run.paths.tasks / run.config.tasks.source
    if not folder.is_dir():
        with whole_folder(folder) as draft:
            written = _writer(run.config)(draft)
            if not written.names:
                raise DockyardError(written.table(), hint="`dockyard tasks check` and the rows named above say more")
            for row in written.skipped:
                logger.warning("%s: %s", row.where, row.why)
            _say_if_fewer(run.config, len(written.names), run.config.tasks.dataset or run.config.tasks.source)
    return load_tasks(folder)


def _writer(config: RunConfig) -> Callable[[Path], WrittenTasks]:
    tasks, selection = config.tasks, _selection(config)
    if tasks.source == "swebench":
        from dockyard.tasks import swebench

        dataset = tasks.dataset or swebench.DEFAULT_DATASET
        return lambda folder: swebench.write_swebench_tasks(
            folder, dataset=dataset, split=tasks.split, selection=selection, mapping=tasks.map
        )
    from dockyard.tasks import c2bug

    dataset = tasks.dataset or c2bug.DEFAULT_DATASET
    return lambda folder: c2bug.write_c2bug_tasks(
        folder,
        dataset=dataset,
        split=tasks.split,
        selection=selection,
        mapping=tasks.map,
        repositories=tasks.repositories,
        image=tasks.image,
    )


def _split(run: RunDir, tasks: list[Task]) -> TaskSets:
    """As recorded, or drawn now and recorded."""
    file = run.paths.split
    if not file.exists():
        write_split(file, split_tasks(tasks, heldout_share=run.config.tasks.heldout_share, seed=run.config.seed))
    split = read_split(file)
    held, kept = set(split.heldout), set(split.train)
    if lost := (held | kept) - {task.name for task in tasks}:
        hint = "bring them back, or begin another run"
        raise DockyardError(f"`{file}` names tasks that are no longer there: {', '.join(sorted(lost)[:5])}", hint=hint)
    return TaskSets(
        train=[task for task in tasks if task.name in kept], heldout=[task for task in tasks if task.name in held]
    )
