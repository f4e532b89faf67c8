"""Rows of SWE-bench become tasks, and bad rows are named."""

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from harbor.models.task.task import Task as HarborTask
from pyarrow import parquet
from swebench_rows import GOLD, MARKS, SCRIPT, row, write_rows

from dockyard.cli import main
from dockyard.errors import UsageError
from dockyard.tasks.folder import WrittenTasks, load_tasks
from dockyard.tasks.split import Selection
from dockyard.tasks.swebench import write_swebench_tasks
from dockyard.tasks.swebench.harness import find_harness
from dockyard.tasks.swebench.instance import eval_script


def convert(tmp_path: Path, *rows: dict[str, Any] | str, **options: Any) -> WrittenTasks:
    return write_swebench_tasks(tmp_path / "tasks", dataset=write_rows(tmp_path, *rows), **options)


def reason(written: WrittenTasks) -> str:
    assert written.names == []
    [skipped] = written.skipped
    return f"{skipped.where} {skipped.why}"


def test_a_row_becomes_a_task_that_harbor_reads(tmp_path: Path):
    written = convert(tmp_path, row())
    folder = tmp_path / "tasks" / "django__django-1"
    assert (written.names, written.skipped) == (["django__django-1"], [])
    assert [task.name for task in load_tasks(tmp_path / "tasks")] == ["django__django-1"]
    task = HarborTask(folder)
    assert task.config.environment.docker_image == "swebench/sweb.eval.x86_64.django_1776_django-1:latest"
    assert "It costs $5 {here}." in task.instruction
    metadata = tomllib.loads((folder / "task.toml").read_text())["metadata"]
    assert metadata["source"] == "swebench"
    assert (metadata["repo"], metadata["instance_id"]) == ("django/django", "django__django-1")
    assert (folder / "solution" / "gold.patch").read_text() == GOLD
    assert all(os.access(folder / name, os.X_OK) for name in ("tests/test.sh", "solution/solve.sh"))


def test_solution_and_tests_are_only_where_the_agent_does_not_see_them(tmp_path: Path):
    convert(tmp_path, row(eval_script=SCRIPT % "HIDDEN"))
    folder = tmp_path / "tasks" / "django__django-1"
    seen = {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*") if file.is_file()}
    assert [name for name, text in seen.items() if "GOLD" in text] == ["solution/gold.patch"]
    assert [name for name, text in seen.items() if "HIDDEN" in text] == ["tests/instance.json"]


def test_the_harness_is_copied_as_it_is_and_runs_without_other_packages(tmp_path: Path):
    convert(tmp_path, row())
    spec = importlib.util.find_spec("swebench")
    assert spec is not None
    assert spec.origin is not None
    package, copy = Path(spec.origin).parent, tmp_path / "tasks" / "django__django-1" / "tests" / "swebench"
    files = [file.relative_to(copy) for file in copy.rglob("*.py") if file != copy / "harness" / "__init__.py"]
    assert len(files) > 10
    assert all((copy / file).read_bytes() == (package / file).read_bytes() for file in files)
    assert "MIT License" in (copy / "LICENSE").read_text()


def test_an_image_of_the_row_is_used_under_any_of_its_names(tmp_path: Path):
    convert(tmp_path, row(image_name="mine/image:1"))
    assert 'docker_image = "mine/image:1"' in (tmp_path / "tasks" / "django__django-1" / "task.toml").read_text()
    assert (tmp_path / "tasks/django__django-1/environment/Dockerfile").read_text().startswith("FROM mine/image:1\n")


def test_columns_may_be_called_otherwise(tmp_path: Path):
    odd = row(eval_script=..., log_parser=..., run=SCRIPT % "true", parser="parse_log_django")
    with pytest.raises(
        UsageError, match=r"no column `eval_script`, `log_parser`\ncolumns found: `instance_id`, "
    ) as error:
        convert(tmp_path, odd)
    assert "--map eval_script=" in error.value.hint
    assert convert(tmp_path, odd, mapping={"eval_script": "run", "log_parser": "parser"}).names == ["django__django-1"]


def test_rows_that_do_not_say_how_tests_are_run_are_refused_with_the_columns(tmp_path: Path):
    older = row(eval_script=..., log_parser=..., created_at="2020")
    with pytest.raises(UsageError, match="`eval_script` .*or `test_cmd`") as error:
        convert(tmp_path, older)
    assert "`created_at`" in error.value.message
    with pytest.raises(UsageError, match="has no column `log_parser`"):
        convert(tmp_path, row(log_parser=..., eval_script=..., test_cmd="pytest"))


def test_a_parquet_without_the_columns_is_refused_by_name(tmp_path: Path):
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"question": ["a"], "answer": ["b"]}), file)
    with pytest.raises(UsageError, match=r"`.*rows.parquet` has no column `instance_id`.*\ncolumns found: `question`"):
        write_swebench_tasks(tmp_path / "tasks", dataset=str(file))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"log_parser": "parse_log_pytst"}, "names the log_parser `parse_log_pytst`.*did you mean `parse_log_pytest"),
        ({"log_parser": None}, "has no `log_parser`"),
        ({"eval_type": "all"}, "names the eval_type `all`"),
        ({"eval_script": "pytest"}, "`eval_script` that does not print `>>>>> Start Test Output`"),
        ({"eval_script": None}, "has no `eval_script`: there is no way to run its tests"),
        ({"instance_id": "../evil"}, "has `../evil` as `instance_id`, which is not a valid instance_id"),
        ({"instance_id": None}, "has no `instance_id`"),
        ({"repo": "django"}, "has `django` as `repo`"),
        ({"base_commit": "a; rm -rf /"}, "has `a; rm -rf /` as `base_commit`"),
        ({"image": "x\nRUN evil"}, "as `image`, which is not a valid image"),
        ({"patch": ""}, "has no `patch`"),
        ({"patch": 7}, "has int as `patch` where text is expected"),
        ({"problem_statement": "  "}, "`problem_statement`"),
        ({"FAIL_TO_PASS": "[]"}, "has an empty `FAIL_TO_PASS`"),
        ({"FAIL_TO_PASS": "test_a, test_b"}, "has no list of tests as `FAIL_TO_PASS`"),
        ({"PASS_TO_PASS": [1]}, "has no list of tests as `PASS_TO_PASS`"),
        ({"instance_id": "x" * 201}, "has an `instance_id` of more than 200 characters"),
        ({"problem_statement": "\ud800"}, "has text that is not valid UTF-8"),
        ({"patch": "\ud800"}, "has text that is not valid UTF-8"),
        ({"FAIL_TO_PASS": "['a' 'b']"}, "has no list of tests as `FAIL_TO_PASS`"),
        ({"FAIL_TO_PASS": "[" * 100_000}, "has no list of tests as `FAIL_TO_PASS`"),
        ({"image_assets": "[" * 100_000}, "needs files that a patch cannot contain"),
        ({"image_assets": '{"test_patch": [{"path": "a.png"}]}'}, "needs files that a patch cannot contain"),
    ],
)
def test_a_bad_row_is_named_with_its_reason_and_the_rest_is_written(tmp_path: Path, changes: dict[str, Any], why: str):
    written = convert(tmp_path, "", row(**changes), row(instance_id="x__y-2"))
    assert written.names == ["x__y-2"]
    written.names.clear()
    assert_matches(rf"`.*rows.jsonl` row 2 .*{why}", reason(written))


def test_lists_that_pandas_wrote_are_read(tmp_path: Path):
    convert(tmp_path, row(FAIL_TO_PASS="['test_a', 'test_c']"))
    grading = json.loads((tmp_path / "tasks" / "django__django-1" / "tests" / "instance.json").read_text())
    assert grading["instance"]["FAIL_TO_PASS"] == ["test_a", "test_c"]


def test_the_limit_counts_tasks_and_not_bad_rows(tmp_path: Path):
    good = [row(instance_id=f"x__y-{number}") for number in range(3)]
    written = convert(tmp_path, row(patch=""), *good, selection=Selection(limit=2))
    assert (written.names, len(written.skipped)) == (["x__y-0", "x__y-1"], 1)
    assert "3 tasks written (the limit was 4)" in convert(tmp_path, *good, selection=Selection(limit=4)).table()


def test_what_is_in_the_way_of_a_task_is_left(tmp_path: Path):
    (tmp_path / "tasks" / "x__y-1").mkdir(parents=True)
    (tmp_path / "tasks" / "x__y-1" / "mine").write_text("")
    assert "x__y-1` exists and was not made from a dataset" in reason(convert(tmp_path, row(instance_id="x__y-1")))
    with pytest.raises(UsageError, match="is a file"):
        write_swebench_tasks(tmp_path / "tasks" / "x__y-1" / "mine", dataset="never read")


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text, re.DOTALL), text


def test_lines_that_are_no_rows_and_ids_that_come_twice_are_named(tmp_path: Path):
    written = convert(tmp_path, row(), '{"instance_id": ', row(), row(instance_id="a__b-1"))
    assert written.names == ["django__django-1", "a__b-1"]
    corrupt, twice = (f"{skipped.where} {skipped.why}" for skipped in written.skipped)
    assert_matches("row 2 is not valid JSON", corrupt)
    assert_matches("row 3 has the same id `django__django-1` as an earlier row", twice)
    assert "2 tasks written, 2 rows skipped" in written.table()


def test_rows_are_chosen_by_repository_id_number_and_seed(tmp_path: Path):
    rows = [row(instance_id=f"a__b-{n}", repo="a/b") for n in range(6)] + [row()]
    assert convert(tmp_path, *rows, selection=Selection(repos=("django/django",))).names == ["django__django-1"]
    assert convert(tmp_path, *rows, selection=Selection(ids=("a__b-3",))).names == ["a__b-3"]
    seeded = [convert(tmp_path, *rows, selection=Selection(limit=3, seed=seed)).names for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    with pytest.raises(UsageError, match="has no id `a__b-9`"):
        convert(tmp_path, *rows, selection=Selection(ids=("a__b-9",)))


def test_repositories_whose_logs_name_failures_only_are_graded_so(tmp_path: Path):
    convert(tmp_path, row(instance_id="chartjs__Chart.js-1", repo="chartjs/Chart.js"), row())
    assert instance_of(tmp_path, "chartjs__Chart.js-1")["eval_type"] == "fail_only"
    assert instance_of(tmp_path, "django__django-1")["eval_type"] == "pass_and_fail"


def instance_of(tmp_path: Path, name: str) -> dict[str, Any]:
    return json.loads((tmp_path / "tasks" / name / "tests" / "instance.json").read_text())["instance"]


def test_without_the_package_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "swebench", None)
    with pytest.raises(UsageError, match="need the package `swebench`") as error:
        convert(tmp_path, row())
    assert "dockyard[swebench]" in error.value.hint


def test_the_command_exits_0_with_tasks_and_1_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good, out = write_rows(tmp_path, row(), row(instance_id="a__b-1", repo="a/b")), str(tmp_path / "out")
    words = ["tasks", "swebench", out, "--dataset", good, "--repo", "django/django", "--limit", "1", "--seed", "3"]
    assert main(words) == 0
    assert "1 tasks written, 0 rows skipped" in capsys.readouterr().err
    assert main(["tasks", "swebench", out, "--dataset", write_rows(tmp_path, row(patch=""))]) == 1
    assert "row 1: has no `patch`" in capsys.readouterr().err
    assert main(["tasks", "swebench", out, "--dataset", write_rows(tmp_path, row()), "--map", "patsh=patch"]) == 2
    assert "did you mean `patch`?" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["tasks", "swebench", out, "--dataset", str(tmp_path / "empty.jsonl")]) == 1
    assert "is empty: it has no rows" in capsys.readouterr().err


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *settings, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_a_script_made_of_the_command_puts_back_what_the_agent_did_to_the_tests(tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    git(work, "init")
    (work / "test_old.sh").write_text("echo old\n")
    git(work, "add", ".")
    git(work, "commit", "-m", "base")
    base = git(work, "rev-parse", "HEAD").strip()
    (work / "test_old.sh").write_text("echo $one 'two'\n")
    (work / "test new.sh").write_text("echo new\n")
    git(work, "add", ".")
    test_patch = git(work, "diff", "--cached")
    git(work, "reset", "--hard", base)
    (work / "test_old.sh").write_text("echo cheated\n")
    (work / "test new.sh").write_text("echo cheated\n")
    command = "one=1\n. ./test_old.sh\n. './test new.sh'"
    script = eval_script(base_commit=base, test_patch=test_patch, test_cmd=command, markers=MARKS)
    script = script.replace("/testbed", str(work)).replace("--global ", "")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == ["1 two", "new"]
    said = done.stderr
    assert said.index(MARKS[0]) < said.index("+ one=1") < said.index(MARKS[1])


def test_an_image_without_a_new_enough_python_is_told_apart(tmp_path: Path):
    convert(tmp_path, row())
    test_sh = tmp_path / "tasks" / "django__django-1" / "tests" / "test.sh"
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    lines = test_sh.read_text().splitlines()
    [loop] = [number for number, line in enumerate(lines) if line.startswith("for python in ")]
    lines[loop] = f"for python in /nowhere/python3 {old}; do"
    test_sh.write_text("\n".join(lines))
    done = subprocess.run(["bash", str(test_sh), "--out", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no Python 3.10 or later" in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_the_installed_harness_knows_is_found_out():
    harness = find_harness()
    assert {"parse_log_pytest", "parse_log_django"} <= harness.log_parsers
    assert harness.markers == MARKS
