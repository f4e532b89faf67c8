"""Held-out tasks: drawn by a seed, the same anywhere, with nothing on both sides."""

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dockyard.errors import DockyardError
from dockyard.tasks.folder import load_tasks, write_task
from dockyard.tasks.split import Split, read_split, split_tasks, write_split
from dockyard.types import Task


def make(folder: Path, name: str, *, repo: str = "", kind: str = "", same_as: str = "") -> Task:
    metadata = f'[metadata]\nrepo = "{repo}"\nkind = "{kind}"\n'
    files = {"task.toml": metadata, "instruction.md": f"Mend {same_as or name}.", "tests/test.sh": "true"}
    write_task(folder / name, files)
    return load_tasks(folder / name)[0]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    """Of two repositories and one kind without any, four of them duplicates of each other."""
    folder = tmp_path_factory.mktemp("tasks")
    django = [make(folder, f"django-{index}", repo="django/django") for index in range(40)]
    flask = [make(folder, f"flask-{index}", repo="pallets/flask") for index in range(20)]
    shell = [make(folder, f"shell-{index}", kind="shell") for index in range(10)]
    same = [make(folder, f"same-{index}", repo="pallets/flask", same_as="it") for index in range(4)]
    return [*django, *flask, *shell, *same]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.9, 0.99]), order=st.randoms())
def test_every_task_is_on_one_side_whatever_the_order_and_duplicates_are_on_the_same(
    tasks: list[Task], seed: int, share: float, order: random.Random
):
    split = split_tasks(tasks, heldout_share=share, seed=seed)
    shuffled = list(tasks)
    order.shuffle(shuffled)
    assert split_tasks(shuffled, heldout_share=share, seed=seed) == split
    assert sorted([*split.train, *split.heldout]) == sorted(task.name for task in tasks)
    assert split.train
    assert split.heldout
    together = {name in split.heldout for name in (f"same-{index}" for index in range(4))}
    assert len(together) == 1


@pytest.mark.parametrize("seed", range(5))
def test_each_repository_and_kind_is_held_out_in_proportion(tasks: list[Task], seed: int):
    alone = [task for task in tasks if not task.name.startswith("same")]
    held = Counter(name.partition("-")[0] for name in split_tasks(alone, heldout_share=0.2, seed=seed).heldout)
    assert held == {"django": 8, "flask": 4, "shell": 2}


def test_many_small_repositories_still_give_the_whole_share(tmp_path: Path):
    small = [make(tmp_path, f"task-{index}", repo=f"owner/{index}") for index in range(30)]
    drawn = [split_tasks(small, heldout_share=0.1, seed=seed).heldout for seed in range(20)]
    assert {len(names) for names in drawn} == {3}
    assert len({name for names in drawn for name in names}) > 15


def test_the_draw_is_the_same_on_every_machine(tasks: list[Task]):
    alone = [task for task in tasks if task.kind == "shell"]
    assert split_tasks(alone, heldout_share=0.3, seed=7).heldout == ("shell-2", "shell-3", "shell-7")


def test_other_seeds_draw_other_tasks(tasks: list[Task]):
    assert len({split_tasks(tasks, heldout_share=0.1, seed=seed).heldout for seed in range(10)}) == 10


def test_a_share_of_nothing_holds_nothing_out(tasks: list[Task]):
    assert split_tasks(tasks, heldout_share=0, seed=0).heldout == ()


@pytest.mark.parametrize("share", [-0.1, 1, 2, float("nan")])
def test_a_share_that_is_none_is_refused(tasks: list[Task], share: float):
    with pytest.raises(DockyardError, match="`heldout_share` is"):
        split_tasks(tasks, heldout_share=share, seed=0)


def test_what_is_all_one_task_cannot_be_split(tasks: list[Task]):
    with pytest.raises(DockyardError, match="1 different tasks cannot be split"):
        split_tasks([task for task in tasks if task.name.startswith("same")], heldout_share=0.5, seed=0)


def test_two_tasks_of_one_name_cannot_be_told_apart(tasks: list[Task], tmp_path: Path):
    with pytest.raises(DockyardError, match="more than one task is named `django-3`"):
        split_tasks([*tasks, make(tmp_path, "django-3")], heldout_share=0.5, seed=0)


def test_a_split_is_read_back_as_it_was_written(tasks: list[Task], tmp_path: Path):
    split = split_tasks(tasks, heldout_share=0.15, seed=3)
    write_split(tmp_path / "split.json", split)
    assert read_split(tmp_path / "split.json") == split
    assert (split.seed, split.heldout_share) == (3, 0.15)
    assert isinstance(split, Split)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seed": 1}', '{"seed":1,"heldout_share":0.1,"train":[],"more":1}'])
def test_a_file_that_is_no_split_is_named(tmp_path: Path, text: str):
    file = tmp_path / "split.json"
    file.write_text(text)
    with pytest.raises(DockyardError, match="split.json` is not a split of tasks"):
        read_split(file)
    with pytest.raises(DockyardError, match="none.json` cannot be read"):
        read_split(tmp_path / "none.json")
