"""Which tasks are the same task."""

import os
from pathlib import Path

import pytest

from dockyard.tasks.duplicates import Duplicate, content_digest, duplicate_classes, find_duplicates
from dockyard.tasks.folder import load_tasks, write_task
from dockyard.tasks.generated import write_demo_tasks
from dockyard.types import Task

FILES: dict[str, str | bytes] = {
    "task.toml": 'schema_version = "1.4"\n[task]\nname = "test/task"\n',
    "instruction.md": "Fix the bug in `parse_date`.\n",
    "environment/Dockerfile": "FROM scratch\nCOPY app.py /app/\n",
    "environment/app.py": "x = 1\n",
    "tests/test.sh": "cd /app\npytest\n",
    "solution/solve.sh": "patch app.py\n",
}


def task(folder: Path, changed: dict[str, str | bytes | None] | None = None) -> Task:
    """The task above with other files; None leaves one out."""
    files = {name: text for name, text in (FILES | (changed or {})).items() if text is not None}
    write_task(folder, files)
    return load_tasks(folder)[0]


def relation(tmp_path: Path, changed: dict[str, str | bytes | None]) -> str:
    found = find_duplicates([task(tmp_path / "a"), task(tmp_path / "b", changed)])
    assert all((item.task, item.of) == ("b", "a") for item in found)
    return {(): "none", (True,): "exact", (False,): "near"}[tuple(item.exact for item in found)]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "exact"),
        ({"instruction.md": "Fix  the bug\nin `parse_date`."}, "exact"),
        ({"tests/test.sh": "cd /app\n\n  pytest"}, "exact"),
        ({"solution/solve.sh": "another way\n"}, "exact"),
        ({"task.toml": f"{FILES['task.toml']}[metadata]\nkind = 'other'\n"}, "exact"),
        ({"instruction.md": "- fix the bug in **parse_date**!\n"}, "near"),
        ({"tests/test.sh": "cd /app\npytest -x\n"}, "near"),
        ({"environment/app.py": "x = 2\n"}, "near"),
        ({"tests/test.sh": "make test\n", "solution/solve.sh": "patch other.py\n"}, "none"),
        ({"environment/app.py": "x = 2\n", "tests/test.sh": "make test\n"}, "near"),
        ({"environment/app.py": "x = 2\n", "solution/solve.sh": "patch other.py\n"}, "none"),
        ({"environment/app.py": "x = 2\n", "solution/solve.sh": None}, "none"),
        ({"task.toml": f"{FILES['task.toml']}[environment]\ndocker_image = 'i'\n", "solution/solve.sh": "a"}, "none"),
        ({"instruction.md": "Fix the bug in `parse_time`.\n"}, "none"),
        ({"instruction.md": "Fix `parse_date` in the bug.\n"}, "none"),
    ],
)
def test_two_tasks_are_exact_near_or_no_duplicates(
    tmp_path: Path, changed: dict[str, str | bytes | None], expected: str
):
    assert relation(tmp_path, changed) == expected


def test_instructions_that_differ_in_a_sign_are_not_the_same(tmp_path: Path):
    one, other = (task(tmp_path / name, {"instruction.md": f"Keep rows where x {name} y."}) for name in "<>")
    assert find_duplicates([one, other]) == []


def test_duplicates_of_duplicates_are_one_class_whose_first_is_kept(tmp_path: Path):
    first = task(tmp_path / "a", {"environment/app.py": "x = 2\n"})
    apart = task(tmp_path / "b", {"solution/solve.sh": "another way\n"})
    assert find_duplicates([first, apart]) == []
    between = task(tmp_path / "c")
    assert find_duplicates([first, apart, between]) == [
        Duplicate(task="b", of="a", exact=False),
        Duplicate(task="c", of="a", exact=False),
    ]
    assert duplicate_classes([first, apart, between]) == [[first, apart, between]]


def test_steps_are_compared_as_tasks_are(tmp_path: Path):
    toml = f'{FILES["task.toml"]}[[steps]]\nname = "one"\n'
    steps = {f"steps/one/{name}": text for name, text in FILES.items() if name != "task.toml"}
    gone = dict.fromkeys(FILES)
    same = [task(tmp_path / name, gone | steps | {"task.toml": toml}) for name in "ab"]
    other = task(tmp_path / "c", gone | steps | {"task.toml": toml, "steps/one/instruction.md": "Something else."})
    assert [(item.task, item.exact) for item in find_duplicates([*same, other])] == [("b", True)]


def test_binary_files_are_compared_byte_by_byte(tmp_path: Path):
    data = b"\0one  two"
    one = task(tmp_path / "a", {"environment/data": data, "solution/solve.sh": None})
    other = task(tmp_path / "b", {"environment/data": data.replace(b"  ", b" "), "solution/solve.sh": None})
    assert find_duplicates([one, other]) == []


def test_links_that_lead_nowhere_and_pipes_stop_nothing(tmp_path: Path):
    tasks = [task(tmp_path / name) for name in "ab"]
    for one in tasks:
        (one.path / "environment" / "link").symlink_to("/nowhere")
        os.mkfifo(one.path / "environment" / "pipe")
    assert [item.exact for item in find_duplicates(tasks)] == [True]


def test_the_demo_has_no_duplicates(tmp_path: Path):
    write_demo_tasks(tmp_path, num_train=60, num_heldout=36)
    assert find_duplicates([*load_tasks(tmp_path / "train"), *load_tasks(tmp_path / "heldout")]) == []


def test_the_digest_of_tasks_changes_with_any_byte_and_not_with_their_place(tmp_path: Path):
    before = content_digest([task(tmp_path / "here" / "a")])
    assert content_digest([task(tmp_path / "there" / "a")]) == before
    assert content_digest([task(tmp_path / "b")]) != before
    assert content_digest([task(tmp_path / "c" / "a", {"solution/solve.sh": "patch  app.py\n"})]) != before
