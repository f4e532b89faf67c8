"""The sources of tasks, by the name that `tasks.source` has in a run file.

A source is an object with the methods of `TaskOpener`, and a line in `SOURCES`. `module:Class` names a class of the
user's with the methods of `TaskProvider`, which the built-in `GeneratedTasks` has too.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, cast

from pydantic import BaseModel, ConfigDict

from dockyard.config import TasksConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.extension import RESTART, failed_call, load_methods
from dockyard.run_dir.durable import disk_errors, whole_folder, write_atomically
from dockyard.tasks.duplicates import content_digest
from dockyard.tasks.folder import WrittenTasks, load_task_folders, load_tasks
from dockyard.tasks.split import Selection, select_tasks
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
    """Return the source with this name, or the one for a user-defined class `module:Class`."""
    module, _, attribute = SOURCES.get(name, "dockyard.tasks.sources:CUSTOM").partition(":")
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


class TaskProvider(Protocol):
    """Provides the tasks of a run. The class that `tasks.source = "module:Class"` names has these methods.

    A run calls each of them once, before its first rollout, and records what they return. `folder` is an empty folder
    of the run for tasks that the provider writes. It may also return task folders elsewhere.
    """

    def train(self, folder: Path, seed: int) -> Sequence[Path]:
        """Return the folders of the training tasks. The same seed should give the same tasks."""
        ...

    def heldout(self, folder: Path, seed: int) -> Sequence[Path]:
        """Return the folders of the held-out tasks, or an empty list. Not called if the settings hold out tasks."""
        ...


@dataclass(frozen=True, slots=True)
class ProvidedTasks:
    """The tasks of a `TaskProvider`, which is called once per run. A resumed run reads the recorded list."""

    provider: Callable[[TasksConfig], TaskProvider]
    """Creates the provider, or raises an error if its class is wrong."""

    def check(self, settings: TasksConfig) -> None:
        self.provider(settings)

    def open(self, request: SourceRequest) -> SourceTasks:
        settings, file = request.settings, request.folder / "provided.json"
        if not file.exists():
            provided = self._provide(request)
            write_atomically(file, provided.model_dump_json(indent=1).encode())
        provided = _Provided.model_validate_json(file.read_bytes())
        found = _unchanged(request.folder, (*provided.train, *(provided.heldout or ())))
        train = select_tasks(found[: len(provided.train)], request.selection, settings.source)
        request.warn_if_fewer(len(train), settings.source)
        return SourceTasks(train=train, heldout=None if provided.heldout is None else found[len(provided.train) :])

    def _provide(self, request: SourceRequest) -> "_Provided":
        settings, provider = request.settings, self.provider(request.settings)
        train = _provided_tasks(provider.train, "train", request)
        if not train:
            raise UsageError(
                f"`tasks.source` is `{settings.source}`, whose `train` returned no tasks",
                hint="return at least one task folder",
            )
        settings_hold_out = settings.heldout is not None or settings.heldout_share > 0
        heldout = None if settings_hold_out else _provided_tasks(provider.heldout, "heldout", request)
        names = Counter(task.path.name for task in (*train, *(heldout or ())))
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise UsageError(
                f"`tasks.source` is `{settings.source}`, which returned more than one task named `{twice[0]}`",
                hint="give each task folder a name of its own",
            )
        return _Provided(train=train, heldout=heldout)


class _ProvidedTask(BaseModel):
    """A task that a provider returned."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    """Relative to the folder of the run's tasks if the task is in it."""
    digest: str
    """Of all its files."""


class _Provided(BaseModel):
    """The record of what a provider returned."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: tuple[_ProvidedTask, ...]
    heldout: tuple[_ProvidedTask, ...] | None
    """None: the settings decide which tasks are held out."""


type _Provide = Callable[[Path, int], Sequence[Path]]


def _provided_tasks(
    provide: _Provide, side: Literal["train", "heldout"], request: SourceRequest
) -> tuple[_ProvidedTask, ...]:
    """Call a provider with an empty folder, and check the tasks that it returns."""
    source, folder = request.settings.source, request.folder / side
    try:
        with disk_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)  # without a record it is the remains of an interrupted run
            folder.mkdir(parents=True)
            returned = provide(folder, request.seed)
    except DockyardError:
        raise
    except Exception as error:  # user-defined code
        message = failed_call(error, f"{source}.{side}", "tasks.source", "the tasks of this run").message
        raise DockyardError(message, hint=f"fix it, then start the run again ({RESTART})") from error
    paths = [path.absolute() for path in _as_paths(returned, source, side)]
    tasks = load_task_folders(paths)
    places = [path.relative_to(request.folder) if path.is_relative_to(request.folder) else path for path in paths]
    return tuple(
        _ProvidedTask(path=place, digest=content_digest([task])) for place, task in zip(places, tasks, strict=True)
    )


def _as_paths(returned: object, source: str, side: str) -> list[Path]:
    shown = str(returned)[:60]
    if isinstance(returned, list | tuple):
        items = cast(Sequence[object], returned)
        paths = [item for item in items if isinstance(item, Path)]
        if len(paths) == len(items):
            return paths
    raise UsageError(
        f"`tasks.source` is `{source}`, whose `{side}` returned `{shown}`; it must return a list of paths",
        hint="return the `Path` of each task folder",
    )


def _unchanged(folder: Path, provided: Sequence[_ProvidedTask]) -> list[Task]:
    """Load the tasks. Raise an error if one differs from what the run recorded when it began."""
    tasks = load_task_folders([folder / item.path for item in provided])
    changed = [
        str(task.path) for task, item in zip(tasks, provided, strict=True) if content_digest([task]) != item.digest
    ]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise DockyardError(
            f"the task `{changed[0]}`{more} changed since this run began", hint="restore it, or start another run"
        )
    return tasks


def _load_provider(settings: TasksConfig) -> TaskProvider:
    return load_methods(settings.source, "tasks.source", TaskProvider, kwargs=settings.kwargs)


CUSTOM = ProvidedTasks(_load_provider)
