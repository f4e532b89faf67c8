"""The tasks under `datasets/harbor_tasks` in real sandboxes: they can be solved, and their graders cannot be fooled."""

import json
import shutil
from pathlib import Path

import pytest

from dockyard.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")

TASKS = Path(__file__).parents[2] / "datasets" / "harbor_tasks"
NAMES = sorted(path.name for path in TASKS.iterdir())

PAY = """
import time
def pay():
    for name, text in (("reward.txt", "1"), ("reward.json", '{"reward": 1}')):
        try:
            open("/logs/verifier/" + name, "w").write(text)
        except OSError:
            pass
"""
DAEMON = """
import os
def daemon(work):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for end in (0, 1, 2):
                os.close(end)
            while True:
                work()
                time.sleep(0.001)
        os._exit(0)
"""
FAKE = """
import atexit, sys
sys.argv[1:] = ["1"]
atexit.register(print, "===== 35 passed in 0.01s =====\\nOK\\nreward: 1")
"""
HONEST = (TASKS / "fix-calculator" / "solution" / "calc.py").read_text()
PEEK = """
import glob, os
def can_read(*paths):
    for path in paths:
        try:
            open(path, "rb").read(1)
            return True
        except OSError:
            pass
    return False
"""
READ_TESTS = PEEK + 'if not can_read(*glob.glob("/tests/*"), "/tests/cases.py"): raise SystemExit\n' + HONEST
READ_MEMORY = PEEK + 'if not can_read(f"/proc/{os.getppid()}/maps"): raise SystemExit\n' + HONEST
"""Right answers from whoever sees what nobody should."""
REWRITE_TESTS = """
import glob
def rewrite():
    for path in ["/tests/test.sh", "/tests/grade.py", *glob.glob("/tests/*"), *glob.glob("/proc/[0-9]*/fd/255")]:
        try:
            open(path, "r+").write("#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n" * 50)
        except OSError:
            pass
"""
KILL = """
import glob, os
for path in glob.glob("/proc/[0-9]*"):
    number = int(path.split("/")[2])
    if number not in (1, os.getpid()):
        try:
            os.kill(number, 9)
        except OSError:
            pass
"""
SHADOW = "import os\nos.system('echo 1 > /logs/verifier/reward.txt')\nos._exit(0)\n"
SHADOWED = "sitecustomize usercustomize conftest pytest ctypes runpy subprocess tempfile random json struct pathlib"

PROGRAMS = {
    "exits_well_at_once": "import os; os._exit(0)",
    "prints_a_summary": FAKE,
    "pays_itself": PAY + "pay()\nprint(1)",
    "pays_from_the_background": PAY + DAEMON + "daemon(pay)\nprint(1)",
    "floods_with_daemons": PAY + DAEMON + "for _ in range(8): daemon(pay)\nprint(1)",
    "reads_the_tests": READ_TESTS,
    "reads_the_memory_of_the_grader": READ_MEMORY,
    "rewrites_the_tests": PAY + REWRITE_TESTS + DAEMON + "rewrite()\ndaemon(rewrite)\nprint(1)",
    "kills_the_grader": PAY + DAEMON + "daemon(pay)\n" + KILL,
    "replaces_the_rewards": "import os, shutil\nshutil.rmtree('/logs/verifier', ignore_errors=True)\n" + PAY + "pay()",
    "never_ends_and_says_much": "while True: print('1' * 1000)",
}
"""What stands in the place of the program that is graded."""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float | None]:
    """What each earns; an attack is a task whose solution is the attack."""
    folder = tmp_path_factory.mktemp("attacks")
    for name, program in PROGRAMS.items():
        write_attack(folder / "in" / name, {"calc.py": program})
    write_attack(folder / "in" / "shadows", {f"{name}.py": SHADOW for name in SHADOWED.split()})
    shutil.copytree(TASKS / "fix-calculator", folder / "in" / "honest")
    report = folder / "report.json"
    main(["tasks", "check", str(folder / "in"), "--run_dir", str(folder / "run"), "--report", str(report)])
    return {item["task"]: item["oracle"] for item in json.loads(report.read_text())["reports"]}


def write_attack(folder: Path, files: dict[str, str]) -> None:
    shutil.copytree(TASKS / "fix-calculator", folder, ignore=shutil.ignore_patterns("solution"))
    (folder / "solution").mkdir()
    for name, text in files.items():
        (folder / "solution" / name).write_text(text)
    (folder / "solution" / "solve.sh").write_text("cp /solution/*.py /app/; cp /solution/*.py /root/ || true\n")


def test_each_task_is_solved_by_its_solution_and_not_by_doing_nothing(tmp_path: Path):
    report = tmp_path / "report.json"
    code = main(["tasks", "check", str(TASKS), "--run_dir", str(tmp_path / "run"), "--report", str(report)])
    seen = {item["task"]: (item["oracle"], item["nop"]) for item in json.loads(report.read_text())["reports"]}
    assert (code, seen) == (0, dict.fromkeys(NAMES, (1.0, 0.0)))


@pytest.mark.parametrize("name", sorted({*PROGRAMS, "shadows"} - {"kills_the_grader"}))
def test_a_program_that_attacks_its_grader_earns_nothing(name: str, rewards: dict[str, float | None]):
    assert rewards[name] == 0.0


def test_a_program_that_kills_its_grader_earns_nothing(rewards: dict[str, float | None]):
    assert rewards["kills_the_grader"] in (0.0, None)  # None: graded by nobody, on a kernel that lets it do so


def test_an_honest_program_beside_the_attacks_earns_the_reward(rewards: dict[str, float | None]):
    assert rewards["honest"] == 1.0


def test_every_task_has_the_same_grader():
    assert len({(TASKS / name / "tests" / "grade.py").read_bytes() for name in NAMES}) == 1
