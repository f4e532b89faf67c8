"""The grader that a SWE-bench task carries, run as a process of its own."""

import json
import subprocess
from pathlib import Path
from typing import Any

from swebench_rows import SCRIPT, row, write_rows

from dockyard.tasks.swebench import write_swebench_tasks


def graded(tmp_path: Path, *args: str, timeout_s: int | None = None, **changes: Any) -> dict[str, Any]:
    """What the task's own tests say, run here as they are in a container."""
    assert write_swebench_tasks(tmp_path / "tasks", dataset=write_rows(tmp_path, row(**changes))).names
    tests = tmp_path / "tasks" / "django__django-1" / "tests"
    if timeout_s:
        task = json.loads((tests / "instance.json").read_text())
        (tests / "instance.json").write_text(json.dumps(task | {"timeout_s": timeout_s}))
    out = tmp_path / "out"
    command = ["bash", str(tests / "test.sh"), "--out", str(out), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    assert (out / "reward.txt").read_text() == f"{int(report['resolved'])}\n"
    assert not list(tests.rglob("__pycache__"))
    return report | {"said": done.stdout, "log": (out / "test_output.txt")}


def test_the_tests_of_a_task_run_the_script_and_write_reward_and_report(tmp_path: Path):
    good = graded(tmp_path, eval_script=SCRIPT % "echo PASSED test_a; echo PASSED test_b")
    assert good["resolved"]
    assert good["said"] == "django__django-1: resolved (FAIL_TO_PASS 1 of 1, PASS_TO_PASS 1 of 1)\n"
    bad = graded(tmp_path, eval_script=SCRIPT % "echo PASSED test_a; echo FAILED test_b; false")
    assert not bad["resolved"]
    assert bad["tests_status"]["PASS_TO_PASS"]["failure"] == ["test_b"]


def test_a_run_that_fails_while_it_claims_success_is_not_resolved(tmp_path: Path):
    assert not graded(tmp_path, eval_script=SCRIPT % "echo PASSED test_a; echo PASSED test_b; false")["resolved"]


def test_output_that_is_no_text_and_a_child_that_goes_on_do_not_disturb(tmp_path: Path):
    script = SCRIPT % r"setsid sleep 90 & sleep 0.1; printf '\xff\xfe\n'; echo PASSED test_a; echo PASSED test_b"
    report = graded(tmp_path, eval_script=script, timeout_s=60)
    assert report["resolved"]
    assert "��" in report["log"].read_text()


def test_tests_that_never_end_are_not_resolved(tmp_path: Path):
    report = graded(tmp_path, eval_script=SCRIPT % "echo PASSED test_a; sleep 60", timeout_s=1)
    assert not report["resolved"]
    assert report["log"].read_text().endswith(">>>>> Tests Timed Out\nTimeout error: 1 seconds exceeded.\n")
    assert "not resolved (tests_timed_out)" in report["said"]


def test_a_log_that_the_parser_stumbles_over_is_not_resolved(tmp_path: Path):
    report = graded(tmp_path, eval_script=SCRIPT % "echo FAIL:", log_parser="parse_log_django")
    assert not report["resolved"]
    assert report["error"].startswith("IndexError")
