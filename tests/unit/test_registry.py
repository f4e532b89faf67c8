"""Datasets by folder, by `registry.json`, from what is kept, from the hosted registry; and which tasks of them."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from harbor.registry.client.json import JsonRegistryClient
from harbor.registry.client.package import PackageDatasetClient

from dockyard.errors import DockyardError, UsageError
from dockyard.tasks import registry as module
from dockyard.tasks.registry import check_reach, fetch_and_keep, find_kept, load_dataset
from dockyard.tasks.split import Selection, select_tasks
from dockyard.types import Task


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCKYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DOCKYARD_REGISTRY", raising=False)


def write_task(folder: Path, metadata: str = "") -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text("echo 1\n")
    (folder / "instruction.md").write_text(f"{folder.name}\n")
    (folder / "task.toml").write_text(f'[task]\nname = "tests/{folder.name}"\n[metadata]\n{metadata}\n')
    return folder


def write_tasks(folder: Path, *names: str) -> Path:
    for name in names:
        write_task(folder / name)
    return folder


def write_registry(file: Path, folder: Path, *, name: str = "mine", versions: tuple[str, ...] = ("1.0",)) -> Path:
    tasks = [{"name": path.name, "path": str(path)} for path in sorted(folder.iterdir())]
    about = [{"name": name, "version": version, "description": "", "tasks": tasks} for version in versions]
    file.write_text(json.dumps(about))
    return file


def names(tasks: list[Task]) -> list[str]:
    return [task.name for task in tasks]


async def test_a_dataset_is_a_folder_by_its_path_or_as_text(tmp_path: Path):
    folder = write_tasks(tmp_path / "tasks", "a", "b")
    assert names(await load_dataset(folder)) == names(await load_dataset(str(folder))) == ["a", "b"]
    assert names(await load_dataset(folder / "b")) == ["b"]
    with pytest.raises(DockyardError, match="`.*none` is not a folder of tasks"):
        await load_dataset(tmp_path / "none")


async def test_a_dataset_is_a_name_in_a_registry_file(tmp_path: Path):
    file = write_registry(tmp_path / "registry.json", write_tasks(tmp_path / "tasks", "a", "b"))
    assert names(await load_dataset("mine@1.0", registry=file)) == names(await load_dataset("mine", registry=file))
    with pytest.raises(
        DockyardError, match="`mine@2.0` could not be loaded from .*Version 2.0 of dataset mine not found"
    ):
        await load_dataset("mine@2.0", registry=file)
    with pytest.raises(DockyardError, match="could not be loaded from `.*none.json`: FileNotFoundError"):
        await load_dataset("mine@1.0", registry=tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("[{")
    with pytest.raises(DockyardError, match="could not be loaded from `.*broken.json`: JSONDecodeError"):
        await load_dataset("mine@1.0", registry=tmp_path / "broken.json")


async def test_the_environment_may_name_the_registry_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write_registry(tmp_path / "registry.json", write_tasks(tmp_path / "tasks", "a"))
    monkeypatch.setenv("DOCKYARD_REGISTRY", str(file))
    assert names(await load_dataset("mine@1.0")) == ["a"]


async def test_what_is_not_a_name_is_refused():
    for name in ("../x", "a b@1.0", "a/b/c@1", "", "x@../y"):
        with pytest.raises(DockyardError, match="is neither a folder nor the name of a dataset"):
            await load_dataset(name)


async def test_a_kept_dataset_needs_no_registry_and_may_hold_links(tmp_path: Path):
    tasks = write_tasks(tmp_path / "tasks", "a", "b")
    kept = module.kept_datasets() / "swebench-verified@1.0"
    kept.mkdir(parents=True)
    for path in tasks.iterdir():
        (kept / path.name).symlink_to(path)
    assert names(await load_dataset("swebench-verified@1.0")) == ["a", "b"]
    shutil.rmtree(tasks / "b")
    with pytest.raises(DockyardError, match="`.*/b` is a broken link .1 in `swebench-verified@1.0`."):
        await load_dataset("swebench-verified@1.0")


async def test_what_was_downloaded_is_kept_and_loaded_without_the_registry(tmp_path: Path):
    tasks = write_tasks(tmp_path / "tasks", "a", "b")
    hosted = JsonRegistryClient(path=write_registry(tmp_path / "r.json", tasks, versions=("1.0", "1.10", "1.9")))
    assert (await fetch_and_keep("mine@1.0", hosted)).name == "mine@1.0"
    assert (await fetch_and_keep("mine", hosted)).name == "mine@1.10"
    shutil.rmtree(tasks)
    assert names(await load_dataset("mine@1.0")) == ["a", "b"]
    assert find_kept("mine") == module.kept_datasets() / "mine@1.10"
    assert find_kept("mine@1.9") is None
    assert sorted(path.name for path in module.kept_datasets().iterdir()) == ["mine@1.0", "mine@1.10"]


async def test_a_download_that_fails_keeps_nothing(tmp_path: Path):
    tasks = write_tasks(tmp_path / "tasks", "a", "b")
    hosted = JsonRegistryClient(path=write_registry(tmp_path / "r.json", tasks))
    shutil.rmtree(tasks / "b")
    with pytest.raises(FileNotFoundError):
        await fetch_and_keep("mine@1.0", hosted)
    assert find_kept("mine@1.0") is None


def test_a_dataset_of_an_organisation_is_asked_for_elsewhere():
    assert isinstance(module._hosted_client("org/name@1"), PackageDatasetClient)
    assert not isinstance(module._hosted_client("name@1"), PackageDatasetClient)


async def test_a_host_that_does_not_answer_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match="Connect call failed|refused"):
        await check_reach("http://127.0.0.1:1")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        await check_reach(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    await check_reach("http://127.0.0.1:1")  # the proxy may know a way


async def test_without_network_and_copy_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harbor.registry.client.harbor.config.HARBOR_SUPABASE_URL", "http://127.0.0.1:1")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DockyardError, match="`terminal-bench@2.0` is not in the cache, .*Harbor's .* reached") as error:
        await load_dataset("terminal-bench@2.0")
    assert "DOCKYARD_REGISTRY" in error.value.hint
    assert str(tmp_path / "cache" / "datasets" / "terminal-bench@2.0") in error.value.hint


async def test_tasks_are_chosen_by_their_metadata_else_by_their_names(tmp_path: Path):
    folder = write_tasks(tmp_path / "tasks", "django__django-11099", "psf__requests-1", "plain", "sphinx-doc__sphinx-7")
    write_task(folder / "z", 'repo = "django/django"\ninstance_id = "mine-1"')
    tasks = await load_dataset(folder)
    django = select_tasks(tasks, Selection(repos=("django/django",)), "tasks")
    assert names(django) == ["django__django-11099", "z"]
    assert names(select_tasks(tasks, Selection(repos=("sphinx-doc/sphinx",)), "tasks")) == ["sphinx-doc__sphinx-7"]
    assert names(select_tasks(tasks, Selection(ids=("mine-1", "plain")), "tasks")) == ["plain", "z"]
    assert names(select_tasks(tasks, Selection(limit=2), "tasks")) == ["django__django-11099", "plain"]
    with pytest.raises(UsageError, match="`tasks` has no id `psf__requests-2`") as error:
        select_tasks(tasks, Selection(ids=("psf__requests-2",)), "tasks")
    assert "psf__requests-1" in error.value.hint
