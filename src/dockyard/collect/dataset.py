"""A dataset by its folder, or by its name in one of Harbor's registries, becomes tasks on this machine."""

# pyright: reportMissingTypeStubs=false

from collections.abc import Sequence
from pathlib import Path

from harbor.models.dataset_item import DownloadedDatasetItem
from harbor.registry.client.factory import RegistryClientFactory

from dockyard.errors import DockyardError
from dockyard.tasks import load_tasks
from dockyard.types import Task


async def load_dataset(dataset: str | Path, *, registry: Path | None = None) -> list[Task]:
    """The tasks in this folder, or of `name@version` in this `registry.json`; without one, in Harbor's own."""
    if isinstance(dataset, Path) or _is_folder(dataset):
        return load_tasks(Path(dataset).expanduser())  # noqa: ASYNC240 - nothing else runs yet
    items = await _download(dataset, registry)
    return [task for item in items for task in load_tasks(item.downloaded_path)]


def _is_folder(name: str) -> bool:
    return Path(name).expanduser().is_dir()


async def _download(name: str, registry: Path | None) -> Sequence[DownloadedDatasetItem]:
    where = f"`{registry}`" if registry else "Harbor's registry"
    try:
        client = RegistryClientFactory.create(registry_path=registry)
        return await client.download_dataset(name)
    except Exception as error:  # Harbor raises whatever its clients raise; the name and the registry are the user's
        raise DockyardError(
            f"the dataset `{name}` could not be had from {where}: {type(error).__name__}: {error}",
            hint="name a folder of tasks instead, or `registry_path` with a `registry.json` that lists local tasks",
        ) from error
