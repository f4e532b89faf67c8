"""C2Bug tasks over four real repositories, in real containers: the solution earns everything, nothing else anything."""

import shutil
from pathlib import Path

import pytest
from c2bug_repositories import EDITS, build_image, write_dataset

from dockyard.collect.generator import HarborConfig, HarborRolloutGenerator
from dockyard.tasks.c2bug import write_c2bug_tasks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default", "ignore:.*checksum.*:DeprecationWarning"),  # litellm has many
]

FOR_TRICKS = "toolz-valfilter"  # its tests have no names: that they end well is enough
TRICKS = {
    "tests that are emptied": """
        for name in test_curried test_dicttoolz; do echo 'def test(): pass' >toolz/tests/$name.py; done""",
    "a conftest that lets everything pass": """
        cat >conftest.py <<'END'
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = "passed"
END
        cp conftest.py toolz/ && cp conftest.py toolz/tests/""",
    "another pytest": "echo 'raise SystemExit(0)' >pytest.py",
    "settings that run no test": "printf '[pytest]\\naddopts = --collect-only\\n' >pytest.ini",
    "settings where others have none": "printf '[pytest]\\naddopts = --collect-only\\n' >toolz/tests/pytest.ini",
}
AS_PROMISED = """#!/bin/bash
cd /testbed || exit 1
[ "$(git rev-list --all --count)" = 1 ] || exit 1
[ -z "$(git status --porcelain)" ] || exit 1
[ ! -e toolz/tests/test_itertoolz.py ] && [ -e toolz/tests/test_dicttoolz.py ] || exit 1
[ ! -e /c2bug ] && [ ! -e /tests/files.tar.gz ] || exit 1
! grep -rq 'seen_add(val)' . || exit 1
git apply /solution/gold.patch
"""


@pytest.fixture(scope="module")
def tasks(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build_image()
    folder = tmp_path_factory.mktemp("c2bug")
    dataset, repositories = write_dataset(folder)
    written = write_c2bug_tasks(folder / "tasks", dataset=str(dataset), repositories=repositories)
    assert written.skipped == []
    assert len(written.names) == len(EDITS)
    return folder / "tasks"


def rewards(agent: str, tasks: Path, folder: Path) -> dict[str, float | None]:
    config = HarborConfig(agent=agent, environment="docker", n_concurrent=4, output_dir=folder / agent)
    rollouts = HarborRolloutGenerator(config).generate(tasks)
    return {rollout.task: rollout.reward for rollout in rollouts}


def test_the_solution_of_every_bug_earns_everything(tasks: Path, tmp_path: Path):
    assert rewards("oracle", tasks, tmp_path) == {edit.id: 1.0 for edit in EDITS}


def test_doing_nothing_about_any_bug_earns_nothing(tasks: Path, tmp_path: Path):
    assert rewards("nop", tasks, tmp_path) == {edit.id: 0.0 for edit in EDITS}


def test_tricks_with_tests_earn_nothing_and_the_agent_sees_no_past(tasks: Path, tmp_path: Path):
    scripts = {name: f"#!/bin/bash\ncd /testbed || exit 1\n{trick}\n" for name, trick in TRICKS.items()}
    for name, script in (scripts | {"as promised": AS_PROMISED}).items():
        task = tmp_path / "tasks" / name.replace(" ", "-")
        shutil.copytree(tasks / (FOR_TRICKS if name in TRICKS else "toolz-unique-key"), task)
        (task / "solution" / "solve.sh").write_text(script)
    expected = {name.replace(" ", "-"): 0.0 for name in TRICKS} | {"as-promised": 1.0}
    assert rewards("oracle", tmp_path / "tasks", tmp_path) == expected
