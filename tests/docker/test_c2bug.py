"""C2Bug tasks over four real repositories, in real containers: the solution earns everything, nothing else anything."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from c2bug_repositories import EDITS, IMAGE, build_image, write_dataset
from docker_engine import docker

from dockyard.collect.api import HarborConfig, HarborRolloutGenerator
from dockyard.tasks.c2bug import write_c2bug_tasks

pytestmark = [
    pytest.mark.filterwarnings("default", "ignore:.*checksum.*:DeprecationWarning"),  # litellm has many
]

FOR_TRICKS = "toolz-valfilter"  # its tests have no names: that they end well is enough
IN_THE_ROOT = "simpleeval-or"  # its tests are one file in the root
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
    "another module of the standard library": "echo 'import os; os._exit(0)' >argparse.py",
    "a package that pytest loads": """
        mkdir evil.dist-info && printf '[pytest11]\\nevil = evil\\n' >evil.dist-info/entry_points.txt
        printf 'Name: evil\\nVersion: 1\\n' >evil.dist-info/METADATA && echo 'import os; os._exit(0)' >evil.py""",
}
ON_TESTS_IN_THE_ROOT = {
    "a package in place of tests": """
        mkdir test_simpleeval && cat >test_simpleeval/__init__.py <<'END'
import os, sys
for label in sys.argv[1:]:
    path, _, name = label.rpartition(".")
    print(f"{name} ({path}) ... ok", file=sys.stderr)
sys.stderr.flush()
os._exit(0)
END""",
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

SMITH = "c2bug-smith:test"
WITH_REPOSITORY = f"""FROM {IMAGE}
COPY repository /testbed
RUN echo old >/testbed/old.py && cd /testbed && git add old.py && git -c user.name=t -c user.email=t@t commit -qm old \\
    && echo built >/testbed/built.so \\
    && mkdir -p /opt/miniconda3/bin /opt/miniconda3/envs/testbed/bin \\
    && mv /usr/local/bin/python /opt/miniconda3/envs/testbed/bin/ \\
    && echo 'PATH=/opt/miniconda3/envs/$1/bin:$PATH' >/opt/miniconda3/bin/activate
"""
COPIES = "python -c ''; for copy in build/lib /usr/local/lib; do mkdir -p $copy && cp -r toolz $copy/; done"
WITHOUT_COPIES = """#!/bin/bash
cd /testbed || exit 1
[ "$(git rev-list --all --count)" = 1 ] && [ ! -e old.py ] && [ -e built.so ] || exit 1
[ -z "$(find / -xdev -name test_itertoolz.py -not -path '/tests/*')" ] || exit 1
! grep -rq 'seen_add(val)' /testbed /usr/local/lib/toolz || exit 1
grep -q 'seen_add(item)' /usr/local/lib/toolz/itertoolz.py || exit 1
git apply /solution/gold.patch
"""


@pytest.fixture
def image_with_repository(engine: None, tmp_path: Path) -> Iterator[str]:
    """As SWE-smith's are: the repository with its past, and a conda environment."""
    build_image()
    _, repositories = write_dataset(tmp_path / "context")
    shutil.copytree(repositories / "pytoolz__toolz", tmp_path / "context" / "repository")
    (tmp_path / "context" / "Dockerfile").write_text(WITH_REPOSITORY)
    docker("build", "--quiet", "--tag", SMITH, str(tmp_path / "context"))
    yield SMITH
    docker("image", "rm", "--force", SMITH)


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


each_repository = pytest.mark.parametrize(
    "bugs",
    [
        pytest.param(sorted({edit.repo: edit.id for edit in EDITS}.values()), id="one of each"),
        pytest.param([edit.id for edit in EDITS], id="all", marks=pytest.mark.soak),
    ],
)


@each_repository
def test_the_solution_of_a_bug_earns_everything_and_doing_nothing_earns_nothing(
    bugs: list[str], tasks: Path, tmp_path: Path
):
    for bug in bugs:
        shutil.copytree(tasks / bug, tmp_path / "tasks" / bug)
    assert rewards("oracle", tmp_path / "tasks", tmp_path) == dict.fromkeys(bugs, 1.0)
    assert rewards("nop", tmp_path / "tasks", tmp_path) == dict.fromkeys(bugs, 0.0)


def test_tricks_with_tests_earn_nothing_and_the_agent_sees_no_past(tasks: Path, tmp_path: Path):
    tricks = dict.fromkeys(TRICKS, FOR_TRICKS) | dict.fromkeys(ON_TESTS_IN_THE_ROOT, IN_THE_ROOT)
    scripts = {
        name: f"#!/bin/bash\ncd /testbed || exit 1\n{trick}\n"
        for name, trick in (TRICKS | ON_TESTS_IN_THE_ROOT).items()
    }
    for name, script in (scripts | {"as promised": AS_PROMISED}).items():
        task = tmp_path / "tasks" / name.replace(" ", "-")
        shutil.copytree(tasks / tricks.get(name, "toolz-unique-key"), task)
        (task / "solution" / "solve.sh").write_text(script)
    expected = {name.replace(" ", "-"): 0.0 for name in tricks} | {"as-promised": 1.0}
    assert rewards("oracle", tmp_path / "tasks", tmp_path) == expected


def test_an_image_may_have_the_repository_and_copies_of_it_and_shows_neither(
    image_with_repository: str, tmp_path: Path
):
    dataset, repositories = write_dataset(tmp_path)
    row = next(
        row for row in map(json.loads, dataset.read_text().splitlines()) if row["instance_id"] == "toolz-unique-key"
    )
    smith = {name: row[name] for name in ("instance_id", "repo", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")}
    smith |= {"patch": row["bug_patch"], "image_name": image_with_repository, "install": COPIES}
    (tmp_path / "smith.jsonl").write_text(json.dumps(smith))
    tasks = tmp_path / "tasks"
    write_c2bug_tasks(tasks, dataset=str(tmp_path / "smith.jsonl"), repositories=repositories)
    (tasks / "toolz-unique-key" / "solution" / "solve.sh").write_text(WITHOUT_COPIES)
    assert rewards("oracle", tasks, tmp_path) == {"toolz-unique-key": 1.0}
    assert rewards("nop", tasks, tmp_path) == {"toolz-unique-key": 0.0}
