"""Load tasks from a folder or from a dataset of one of Harbor's registries.

Downloads from the hosted registry are kept under the dataset's name, so that the next run needs no network.
"""

# pyright: reportMissingTypeStubs=false

import asyncio
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

from dockyard.cache import cache_dir
from dockyard.config import TasksConfig
from dockyard.errors import DockyardError
from dockyard.run_dir.durable import whole_folder
from dockyard.tasks.folder import load_tasks
from dockyard.tasks.sources import SourceRequest, SourceTasks
from dockyard.tasks.split import select_tasks
from dockyard.types import Task

if TYPE_CHECKING:
    from harbor.registry.client.base import BaseRegistryClient

logger = logging.getLogger(__name__)

REGISTRY_VARIABLE = "DOCKYARD_REGISTRY"
DEFAULT_DATASET = "swebench-verified@1.0"
_REACH_S = 5.0
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w.:-]+)?")


async def load_dataset(dataset: str | Path, *, registry: Path | None = None) -> list[Task]:
    """Return the tasks of a folder, or of `name@version` from `registry.json`, the cache, or Harbor's registry.

    Without `registry` the variable `DOCKYARD_REGISTRY` may name a file.
    """
    if isinstance(dataset, Path) or _is_folder(dataset):
        return load_tasks(Path(dataset).expanduser())  # noqa: ASYNC240 - nothing else is running yet
    if not _NAME.fullmatch(dataset):
        hint = "use the path of a folder of tasks, or a dataset as `name@version`"
        raise DockyardError(f"`{dataset}` is neither a folder nor the name of a dataset", hint=hint)
    file = registry or _registry_of_environment()
    if file:
        return await _listed(dataset, file)
    kept = find_kept(dataset)
    return _load_kept(kept) if kept else await _hosted(dataset)


def kept_datasets() -> Path:
    """Return the cache: a folder per `name@version` with task folders or links. `DOCKYARD_CACHE` moves it."""
    return cache_dir() / "datasets"


def find_kept(dataset: str) -> Path | None:
    """Return the cached folder of a dataset. Without a version, the newest cached one."""
    label = _label(dataset)
    exact = kept_datasets() / label
    if "@" in label or exact.is_dir():
        return exact if exact.is_dir() else None
    versions = {path.name.partition("@")[2]: path for path in kept_datasets().glob(f"{label}@*") if path.is_dir()}
    if not versions:
        return None
    from harbor.registry.client.base import resolve_version

    newest = versions[resolve_version(list(versions))]
    logger.info("using `%s` from `%s`", dataset, newest)
    return newest


async def fetch_and_keep(dataset: str, client: "BaseRegistryClient") -> Path:
    """Download a dataset and keep a copy. Harbor's own cache has no names, and `harbor cache clean` empties it."""
    from harbor.registry.client.base import EmptyDatasetError

    about = await client.get_dataset_metadata(dataset)
    if not about.task_ids:
        raise EmptyDatasetError(dataset)
    items = await client.download_dataset(dataset)
    folder = kept_datasets() / _label(dataset if "@" in dataset else f"{dataset}@{about.version}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as draft:
        for item in items:
            shutil.copytree(item.downloaded_path, draft / item.id.get_name().rpartition("/")[2])
    logger.info("saved %d tasks of `%s` in `%s`", len(items), dataset, folder)
    return folder


async def check_reach(url: str, timeout_s: float = _REACH_S) -> None:
    """Fail early where the client would retry for a long time. Not checked behind a proxy."""
    parts = urlsplit(url)
    if parts.scheme in getproxies():
        return
    port = parts.port or (80 if parts.scheme == "http" else 443)
    async with asyncio.timeout(timeout_s):
        _, writer = await asyncio.open_connection(parts.hostname, port)
    writer.close()


def _is_folder(name: str) -> bool:
    return name != "" and Path(name).expanduser().is_dir()


def _registry_of_environment() -> Path | None:
    named = os.environ.get(REGISTRY_VARIABLE)
    return Path(named).expanduser() if named else None


def _label(dataset: str) -> str:
    return dataset.replace("/", "__")


async def _listed(dataset: str, registry: Path) -> list[Task]:
    try:
        folders = await _folders(dataset, registry)
    except Exception as error:  # Harbor's clients may raise anything; name and registry are user input
        raise DockyardError(
            f"the dataset `{dataset}` could not be loaded from `{registry}`: {_reason(error)}",
            hint="its entries need `name`, `version`, `description` and `tasks`, each task `name` and `path`",
        ) from error
    tasks = [task for folder in folders for task in _load_or_name(folder, dataset)]
    if not tasks:
        hint = "use another dataset, or fix the paths in the `registry.json`"
        raise DockyardError(f"the dataset `{dataset}` in `{registry}` has no tasks on this machine", hint=hint)
    return tasks


async def _folders(dataset: str, registry: Path) -> list[Path]:
    """Return the listed folders if all tasks are local; otherwise download the dataset."""
    from harbor import LocalTaskId
    from harbor.registry.client.factory import RegistryClientFactory

    client = RegistryClientFactory.create(registry_path=registry)
    ids = (await client.get_dataset_metadata(dataset)).task_ids
    local = [task_id.path for task_id in ids if isinstance(task_id, LocalTaskId)]
    if len(local) == len(ids):
        return [_place(path, registry) for path in local]
    return [item.downloaded_path for item in await client.download_dataset(dataset)]


def _place(path: Path, registry: Path) -> Path:
    """Resolve a path relative to the current folder, as Harbor does, or else to the registry's folder."""
    return path if path.exists() else registry.absolute().parent / path


def _load_or_name(folder: Path, dataset: str) -> list[Task]:
    """Return no tasks, with a warning, if the task is broken or missing."""
    try:
        return load_tasks(folder)
    except DockyardError as error:
        logger.warning("skipped a task of `%s`: %s", dataset, error.message)
        return []


def _load_kept(folder: Path) -> list[Task]:
    dead = [path for path in sorted(folder.iterdir()) if path.is_symlink() and not path.exists()]
    if dead:
        raise DockyardError(
            f"`{dead[0]}` is a broken link ({len(dead)} in `{folder.name}`)",
            hint=f"fix the links, or remove `{folder}` to download the dataset again",
        )
    return load_tasks(folder)


async def _hosted(dataset: str) -> list[Task]:
    from harbor.registry.client.harbor.config import HARBOR_SUPABASE_URL

    hint = (
        f"use a folder of tasks, set {REGISTRY_VARIABLE} to a `registry.json` that lists local tasks, "
        f"or put task folders in `{kept_datasets() / _label(dataset)}`"
    )
    try:
        await check_reach(HARBOR_SUPABASE_URL)
    except OSError as error:  # includes asyncio's timeout
        raise DockyardError(
            f"the dataset `{dataset}` is not in the cache, and Harbor's registry cannot be reached: {_reason(error)}",
            hint=hint,
        ) from error
    try:
        return load_tasks(await fetch_and_keep(dataset, _hosted_client(dataset)))
    except DockyardError:
        raise
    except Exception as error:  # as above
        raise DockyardError(
            f"the dataset `{dataset}` could not be loaded from Harbor's registry: {_reason(error)}", hint=hint
        ) from error


def _hosted_client(dataset: str) -> "BaseRegistryClient":
    """Harbor serves datasets of organizations, `org/name`, by another client."""
    from harbor.registry.client.factory import RegistryClientFactory
    from harbor.registry.client.package import PackageDatasetClient

    return PackageDatasetClient() if "/" in dataset else RegistryClientFactory.create()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


@dataclass(frozen=True, slots=True)
class TaskFolders:
    """Tasks that exist as folders, of which the settings select some."""

    find: Callable[[TasksConfig], list[Task]]
    name_of: Callable[[TasksConfig], str]
    """The name by which messages refer to them."""

    def check(self, settings: TasksConfig) -> None:
        self.find(settings)

    def open(self, request: SourceRequest) -> SourceTasks:
        where = self.name_of(request.settings)
        chosen = select_tasks(self.find(request.settings), request.selection, where)
        request.warn_if_fewer(len(chosen), where)
        return SourceTasks(train=chosen)


def _in_folder(settings: TasksConfig) -> list[Task]:
    assert settings.train is not None  # load_run_config refuses the source `folder` without it
    return load_tasks(settings.train)


def _in_registry(settings: TasksConfig) -> list[Task]:
    return asyncio.run(load_dataset(settings.dataset or DEFAULT_DATASET, registry=settings.registry))


FOLDER = TaskFolders(_in_folder, lambda settings: str(settings.train))
HARBOR = TaskFolders(_in_registry, lambda settings: settings.dataset or DEFAULT_DATASET)
