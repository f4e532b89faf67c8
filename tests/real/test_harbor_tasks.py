"""The tasks under `datasets/harbor_tasks` in real sandboxes: they can be solved, and their graders cannot be fooled."""

import shutil
from pathlib import Path

import pytest
from harbor_task_attacks import NAMES, PROGRAMS, TASKS, earned, write_attacks

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float | None]:
    folder = tmp_path_factory.mktemp("attacks")
    write_attacks(folder / "in")
    shutil.copytree(TASKS / "fix-calculator", folder / "in" / "honest")
    return {name: oracle for name, (oracle, _) in earned(folder / "in", folder).items()}


def test_each_task_is_solved_by_its_solution_and_not_by_doing_nothing(tmp_path: Path):
    assert earned(TASKS, tmp_path) == dict.fromkeys(NAMES, (1.0, 0.0))


@pytest.mark.parametrize("name", sorted({*PROGRAMS, "shadows"} - {"kills_the_grader"}))
def test_a_program_that_attacks_its_grader_earns_nothing(name: str, rewards: dict[str, float | None]):
    assert rewards[name] == 0.0


def test_a_program_that_kills_its_grader_earns_nothing(rewards: dict[str, float | None]):
    assert rewards["kills_the_grader"] in (0.0, None)  # None: graded by nobody, on a kernel that lets it do so


def test_an_honest_program_beside_the_attacks_earns_the_reward(rewards: dict[str, float | None]):
    assert rewards["honest"] == 1.0


def test_every_task_has_the_same_grader():
    assert len({(TASKS / name / "tests" / "grade.py").read_bytes() for name in NAMES}) == 1
