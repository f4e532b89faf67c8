import asyncio
import re
from pathlib import Path

import pytest
from gateway_fakes import FakeEngine
from trials import attempt_at, trial_runner

from dockyard.config import AgentConfig
from dockyard.errors import DockyardError
from dockyard.tasks.folder import load_tasks
from dockyard.tasks.generated import DEMO_KINDS, write_demo_tasks
from dockyard.tasks.order import due, num_steps
from dockyard.types import Task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    write_demo_tasks(path, num_train=60, num_heldout=36, seed=3)
    return path


async def rewards(tasks: list[Task], agent: str, folder: Path) -> list[float | None]:
    async with trial_runner(FakeEngine(), folder, AgentConfig(name=agent)) as runner:
        rollouts = await asyncio.gather(*(runner.run(attempt_at(task, task.name)) for task in tasks))
    return [rollout.reward for rollout in rollouts]


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")
async def test_every_kind_is_solved_by_its_solution_and_not_by_doing_nothing(folder: Path, tmp_path: Path):
    tasks = load_tasks(folder / "heldout")[:6] + load_tasks(folder / "train")[:6]
    assert {task.kind for task in tasks} == set(DEMO_KINDS)
    assert await rewards(tasks, "oracle", tmp_path / "oracle") == [1.0] * 12
    assert await rewards(tasks, "nop", tmp_path / "nop") == [0.0] * 12


def said(folder: Path) -> tuple[set[str], set[str], set[str]]:
    """The file names, the other words that are not in every instruction, and the phrasings of all tasks."""
    names: set[str] = set()
    phrasings: set[str] = set()
    words: set[str] = set()
    for task in load_tasks(folder):
        text = (task.path / "instruction.md").read_text()
        names |= set(re.findall(r"\w+\.txt", text))
        files = (task.path / "environment" / "files").glob("*.txt")
        content = [word for file in files for word in file.read_text().split()]
        if match := re.search(r"the (?:word|folder) (\w+)|folder (\w+)", text):
            content.append(match[1] or match[2])
        words |= set(content)
        phrasing = re.sub(r"\w+\.txt", "FILE", text)
        for word in content:
            phrasing = re.sub(rf"\b{word}\b", "WORD", phrasing)
        phrasings.add(phrasing)
    return names, words, phrasings


def test_heldout_tasks_share_no_word_file_name_or_phrasing_with_training(folder: Path):
    train, heldout = said(folder / "train"), said(folder / "heldout")
    for seen, unseen in zip(train, heldout, strict=True):
        assert len(unseen) >= 10
        assert not seen & unseen


def test_the_same_seed_writes_the_same_tasks_and_another_writes_others(folder: Path, tmp_path: Path):
    def instructions(path: Path) -> list[str]:
        return [(task.path / "instruction.md").read_text() for task in load_tasks(path / "heldout")]

    write_demo_tasks(tmp_path / "same", num_train=60, num_heldout=36, seed=3)
    write_demo_tasks(tmp_path / "other", num_train=60, num_heldout=36, seed=4)
    assert instructions(tmp_path / "same") == instructions(folder)
    assert instructions(tmp_path / "other") != instructions(folder)


def turn(tasks: list[Task], step: int, seed: int = 1, *, by_pass: bool = False) -> list[Task]:
    return due(tasks, step, 6, seed, kind_of=lambda task: task.kind, by_pass=by_pass)


def test_each_step_has_the_kinds_in_turn_and_no_task_twice_before_all_were_used(folder: Path):
    tasks = load_tasks(folder / "train")
    steps = [turn(tasks, step) for step in range(10)]
    assert all({task.kind for task in step} == set(DEMO_KINDS) for step in steps)
    assert len({task.name for step in steps for task in step}) == 60
    assert turn(tasks, 0, seed=2) != steps[0]
    assert turn(tasks, 10) != steps[0]


def test_no_step_goes_beyond_the_end_of_a_pass(folder: Path):
    tasks = load_tasks(folder / "train")[:7]
    assert num_steps(7, 6, 2) == 4
    names = [[task.name for task in turn(tasks, step, by_pass=True)] for step in range(4)]
    assert [len(step) for step in names] == [6, 1, 6, 1]
    assert sorted(names[0] + names[1]) == sorted(names[2] + names[3]) == sorted(task.name for task in tasks)
    assert names[0] != names[2]


def test_one_task_folder_is_a_list_of_one(folder: Path):
    [task] = load_tasks(next((folder / "train").iterdir()))
    assert task.kind in DEMO_KINDS


def test_a_task_without_tests_is_named_with_what_it_lacks(tmp_path: Path):
    write_demo_tasks(tmp_path, num_train=4, num_heldout=4)
    broken = sorted((tmp_path / "train").iterdir())[2]
    (broken / "tests" / "test.sh").unlink()
    with pytest.raises(DockyardError, match=re.escape(f"`{broken}` has no `tests/test.sh`")):
        load_tasks(tmp_path / "train")


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_folder_without_tasks_is_refused(tmp_path: Path, name: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DockyardError, match=name) as caught:
        load_tasks(tmp_path / name)
    assert "dockyard tasks demo" in caught.value.hint


def test_a_task_toml_that_is_not_toml_is_named(tmp_path: Path):
    write_demo_tasks(tmp_path, num_train=4, num_heldout=4)
    file = next((tmp_path / "train").iterdir()) / "task.toml"
    file.write_text("[task\n")
    with pytest.raises(DockyardError, match=re.escape(str(file))):
        load_tasks(tmp_path / "train")
