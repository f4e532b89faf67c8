"""The sources of tasks, by the name that `tasks.source` has in a run file.

A source is an object with the methods of `TaskOpener`. A new one is a module and a line in `SOURCES`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from dockyard.config import TasksConfig
from dockyard.errors import DockyardError
from dockyard.run_dir.durable import whole_folder
from dockyard.tasks.folder import WrittenTasks, load_tasks
from dockyard.tasks.split import Selection
from dockyard.types import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """What a source needs to open the tasks of a run."""

    settings: TasksConfig
    seed: int
    folder: Path
    """Where a source writes the tasks that it makes. It belongs to the run."""

    @property
    def selection(self) -> Selection:
        """The tasks that the settings choose. Without a limit they keep their order."""
        settings = self.settings
        return Selection(
            repos=(settings.repo,) if settings.repo else (),
            ids=settings.ids,
            limit=settings.limit,
            seed=self.seed if settings.limit else None,
        )

    def warn_if_fewer(self, num_found: int, where: str) -> None:
        """Log a warning when there are fewer tasks than `tasks.limit` asks for."""
        if self.settings.limit and num_found < self.settings.limit:
            logger.warning("%d tasks were asked for; `%s` has %d", self.settings.limit, where, num_found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTasks:
    """The tasks that a source provides."""

    train: list[Task]
    heldout: list[Task] | None = None
    """None: the source does not hold out tasks itself. `tasks.heldout` and `tasks.heldout_share` decide."""


class TaskOpener(Protocol):
    """A source of tasks."""

    def check(self, settings: TasksConfig) -> None:
        """Raise an error if the source cannot be opened. Called before the run's folder is created."""
        ...

    def open(self, request: SourceRequest) -> SourceTasks:
        """Return the tasks, which may be downloaded or written first. A resumed run gets the same ones."""
        ...


SOURCES = {
    "folder": "dockyard.tasks.registry:FOLDER",
    "harbor": "dockyard.tasks.registry:HARBOR",
    "demo": "dockyard.tasks.generated:DEMO",
    "trail": "dockyard.tasks.generated:TRAIL",
    "swebench": "dockyard.tasks.swebench:SOURCE",
    "c2bug": "dockyard.tasks.c2bug:SOURCE",
    "recorded": "dockyard.tasks.sources:RECORDED",
}
"""Name -> `module:name` of the object that opens the source. The module is imported when the source is used."""


def find_source(name: str) -> TaskOpener:
    """Return the source with this name."""
    module, _, attribute = SOURCES[name].partition(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """Tasks that are written from the rows of a dataset, once per run."""

    write: Callable[[Path, SourceRequest], WrittenTasks]

    def check(self, settings: TasksConfig) -> None:
        """Rows are checked when they are written."""

    def open(self, request: SourceRequest) -> SourceTasks:
        folder = request.folder / request.settings.source
        if not folder.is_dir():
            with whole_folder(folder) as draft:
                self._write(draft, request)
        return SourceTasks(train=load_tasks(folder))

    def _write(self, folder: Path, request: SourceRequest) -> None:
        written = self.write(folder, request)
        if not written.names:
            raise DockyardError(written.table(), hint="`dockyard tasks check` and the rows named above say more")
        for row in written.skipped:
            logger.warning("%s: %s", row.where, row.why)
        request.warn_if_fewer(len(written.names), request.settings.dataset or request.settings.source)


@dataclass(frozen=True, slots=True)
class Recorded:
    """No tasks to attempt: the run trains on recorded rollouts."""

    def check(self, settings: TasksConfig) -> None:
        """The recording is read by the trainer."""

    def open(self, request: SourceRequest) -> SourceTasks:
        return SourceTasks(train=[])


RECORDED = Recorded()
