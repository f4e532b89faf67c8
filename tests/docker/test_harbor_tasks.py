"""The tasks under `datasets/harbor_tasks` in real containers, where their programs run as another user."""

import shutil
from pathlib import Path

import pytest
from docker_engine import BASE
from harbor_task_attacks import NAMES, PROGRAMS, TASKS, earned, write_attack

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")

ATTACKS = ("pays_from_the_background", "reads_the_tests", "rewrites_the_tests", "kills_the_grader")


def test_tasks_are_solved_by_their_solutions_and_attacks_on_their_grader_earn_nothing(tmp_path: Path):
    tasks = tmp_path / "in"
    for name in NAMES:
        shutil.copytree(TASKS / name, tasks / name)
    for name in ATTACKS:
        write_attack(tasks / name, {"calc.py": PROGRAMS[name]})
    for file in tasks.glob("*/environment/Dockerfile"):
        file.write_text(file.read_text().replace("python:3.12-slim", BASE))  # nothing is pulled
    seen = earned(tasks, tmp_path, "--environment.type=docker", "--rollout.concurrency=3")
    assert seen == dict.fromkeys(NAMES, (1.0, 0.0)) | dict.fromkeys(ATTACKS, (0.0, 0.0))
