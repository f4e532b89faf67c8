"""C2Bug: what a row needs, what it becomes, how it is graded, and how a row that becomes nothing is named."""

import io
import json
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from c2bug_repositories import git

from dockyard.cli import main
from dockyard.errors import DockyardError, UsageError
from dockyard.tasks.c2bug import write_c2bug_tasks
from dockyard.tasks.c2bug.grading import clean as clean_up
from dockyard.tasks.c2bug.grading import dockyard_report, grade
from dockyard.tasks.c2bug.prepare import beside, command_of, files_of, folders_of
from dockyard.tasks.c2bug.schema import Bug, RowError, match_layout
from dockyard.tasks.c2bug.task import FILES, TEMPLATE
from dockyard.tasks.folder import WrittenTasks, load_tasks
from dockyard.tasks.split import Selection

ROOT = Path(__file__).parents[2]
CODE = {
    "calc.py": "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n",
    "tests/test_calc.py": "from calc import double\n\n\ndef test_double():\n    assert double(2) == 4\n",
    "tests/test_half.py": "from calc import half\n\n\ndef test_half():\n    assert half(2) == 1\n",
    "tests/conftest.py": "",
    "pyproject.toml": "[project]\nname = 'calc'\n",
}
BUG = (
    "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n"
    "@@ -1,3 +1,3 @@\n def double(x):\n-    return 2 * x\n+    return 3 * x\n \n"
)
GOLD = BUG.replace("-    return 2 * x\n+    return 3 * x", "-    return 3 * x\n+    return 2 * x")
ON_TESTS = (
    "diff --git a/tests/test_calc.py b/tests/test_calc.py\n--- a/tests/test_calc.py\n+++ b/tests/test_calc.py\n"
    "@@ -4,2 +4,2 @@\n def test_double():\n-    assert double(2) == 4\n+    assert double(2) == 5\n"
)
ROW: dict[str, Any] = {
    "instance_id": "calc-1",
    "repo": "me/calc",
    "base_commit": "main",
    "bug_patch": BUG,
    "problem_statement": 'Doubling "triples"\nas of \\today é.',
    "FAIL_TO_PASS": '["tests/test_calc.py::test_double"]',
    "PASS_TO_PASS": ["tests/test_half.py::test_half"],
}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repositories")
    checkout = folder / "me__calc"
    checkout.mkdir()
    git(checkout, "init", "--quiet", "--initial-branch=main")
    for name, text in CODE.items():
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text(text)
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "all")
    git(checkout, "branch", "buggy")
    git(checkout, "checkout", "--quiet", "buggy")
    (checkout / "calc.py").write_text(CODE["calc.py"].replace("2 * x", "3 * x"))
    git(checkout, "commit", "--quiet", "--all", "--message", "a bug")
    git(checkout, "checkout", "--quiet", "main")
    return folder


def write(folder: Path, repositories: Path, *rows: dict[str, Any], **more: Any) -> WrittenTasks:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_c2bug_tasks(folder / "tasks", dataset=str(folder / "rows.jsonl"), repositories=repositories, **more)


def in_container(task: Path, folder: Path) -> Path:
    """The repository as the image has it."""
    with tarfile.open(task / "environment" / "repository.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    if (task / "environment" / "bug.patch").stat().st_size:
        git(folder, "apply", str(task / "environment" / "bug.patch"))
    return folder


def test_a_row_becomes_a_task_with_the_bug_in_and_its_tests_out(tmp_path: Path, repositories: Path):
    written = write(tmp_path, repositories, ROW)
    assert (written.names, written.skipped) == (["calc-1"], [])
    [task] = load_tasks(tmp_path / "tasks")
    code = in_container(task.path, tmp_path / "code")
    assert "3 * x" in (code / "calc.py").read_text()
    assert not (code / "tests" / "test_calc.py").exists()
    assert (code / "tests" / "test_half.py").exists()
    git(code, "apply", str(task.path / "solution" / "gold.patch"))
    assert (code / "calc.py").read_text() == CODE["calc.py"]
    with tarfile.open(task.path / "tests" / "files.tar.gz") as archive:
        assert {"tests/test_calc.py", "tests/conftest.py", "pyproject.toml"} < set(archive.getnames())
        assert "calc.py" not in archive.getnames()
    assert json.loads((task.path / "tests" / "tests.json").read_text()) == [
        "tests/test_calc.py::test_double",
        "tests/test_half.py::test_half",
    ]
    assert (task.path / "tests" / "run.sh").read_text() == "python -m pytest tests/test_calc.py tests/test_half.py\n"


def test_a_task_says_what_it_is(tmp_path: Path, repositories: Path):
    write(tmp_path, repositories, ROW)
    task = tmp_path / "tasks" / "calc-1"
    settings = tomllib.loads((task / "task.toml").read_text())
    assert {"source": "c2bug", "repo": "me/calc", "instance_id": "calc-1"}.items() <= settings["metadata"].items()
    assert settings["task"]["description"] == 'Doubling "triples"'
    assert ROW["problem_statement"] in (task / "instruction.md").read_text()
    assert load_tasks(task)[0].kind == "me/calc"


@pytest.mark.parametrize(
    "patches",
    [
        {"bug_patch": BUG, "gold_patch": GOLD},
        {"bug_patch": None, "gold_patch": GOLD},
        {"bug_patch": "", "gold_patch": GOLD, "base_commit": "buggy"},
    ],
    ids=["both", "gold on the mended commit", "gold on the commit with the bug"],
)
def test_either_patch_is_enough(tmp_path: Path, repositories: Path, patches: dict[str, Any]):
    assert write(tmp_path, repositories, ROW | patches).skipped == []
    task = tmp_path / "tasks" / "calc-1"
    code = in_container(task, tmp_path / "code")
    assert "3 * x" in (code / "calc.py").read_text()
    git(code, "apply", str(task / "solution" / "gold.patch"))
    assert (code / "calc.py").read_text() == CODE["calc.py"]


def test_tests_that_a_patch_adds_are_not_in_the_image(tmp_path: Path, repositories: Path):
    row = ROW | {"test_patch": ON_TESTS}
    assert write(tmp_path, repositories, row).skipped == []
    code = in_container(tmp_path / "tasks" / "calc-1", tmp_path / "code")
    assert (code / "tests" / "test_calc.py").read_text() == CODE["tests/test_calc.py"]
    with tarfile.open(tmp_path / "tasks" / "calc-1" / "tests" / "files.tar.gz") as archive:
        member = archive.extractfile("tests/test_calc.py")
        assert member is not None
        assert b"== 5" in member.read()


def test_without_names_of_tests_the_command_must_end_well(tmp_path: Path, repositories: Path):
    row = ROW | {"FAIL_TO_PASS": None, "PASS_TO_PASS": None, "test_cmd": ["make build", "make test"]}
    assert write(tmp_path, repositories, row).skipped == []
    tests = tmp_path / "tasks" / "calc-1" / "tests"
    assert (tests / "run.sh").read_text() == "set -eo pipefail\nmake build\nmake test\n"
    assert not (tests / "tests.json").exists()
    assert "tests\n" in (tests / "replaced.txt").read_text()  # all there are: nobody knows which are run


BAD_ROWS = {
    "its bug patch does not apply: ": {"bug_patch": BUG.replace("2 * x", "4 * x")},
    "its gold patch does not apply: ": {"gold_patch": BUG},
    "its gold patch does not apply, nor does its reverse": {"bug_patch": "", "gold_patch": BUG.replace("2 *", "4 *")},
    "its repository has no commit `0000": {"base_commit": "0" * 40},
    "cannot be read: ": {"clone_url": "file:///nowhere"},
    "its patch changes only the tests": {"bug_patch": ON_TESTS},
    "it has no patch": {"bug_patch": " "},
    "its `problem_statement` is empty": {"problem_statement": None},
    "its `repo` is empty": {"repo": ""},
    "its `base_commit` is list, not text": {"base_commit": []},
    "its `image` is `a b`": {"image": "a b"},
    "the form of the test `a test` is unknown": {"FAIL_TO_PASS": ["a test"]},
    "none of its test files is in the repository": {"FAIL_TO_PASS": ["nowhere.py::test_x"], "PASS_TO_PASS": []},
    "its test file `nowhere.py` is not in the repository": {"test_files": ["nowhere.py"]},
    "its `FAIL_TO_PASS` starts like a list but is not one: `['a' 'b']`": {"FAIL_TO_PASS": "['a' 'b']"},
    "its `PASS_TO_PASS` starts like a list": {"PASS_TO_PASS": "[" * 100_000},
    "its `PASS_TO_PASS` is a list that contains something other than text": {"PASS_TO_PASS": [["a::b"]]},
    "its `test_command` is dict, neither text nor a list": {"test_command": {}},
    "its `instance_id` is too long for a folder name: more than 200": {"instance_id": "x" * 201},
    "surrogates not allowed": {"problem_statement": "\ud800"},
    "null byte": {"base_commit": "a\0b"},
    "cannot be read": {"clone_url": "x" * 5000},
}


def test_each_bad_row_is_named_with_its_reason_and_the_rest_is_written(tmp_path: Path, repositories: Path):
    bad = [ROW | {"instance_id": f"bad-{number}"} | wrong for number, wrong in enumerate(BAD_ROWS.values())]
    again, last = ROW | {"problem_statement": "Again."}, ROW | {"instance_id": "calc-2"}
    written = write(tmp_path, repositories, ROW, *bad, again, last)
    assert written.names == ["calc-1", "calc-2"]
    reasons = {row.where.partition(" row ")[2].partition(" ")[0]: row.why for row in written.skipped}
    for number, reason in enumerate(BAD_ROWS, start=2):
        assert reason in reasons[str(number)]
    assert reasons[str(len(BAD_ROWS) + 2)] == f"`calc-1` is also in `{tmp_path}/rows.jsonl` row 1"
    assert sorted(path.name for path in (tmp_path / "tasks").iterdir()) == ["calc-1", "calc-2"]
    assert f"2 tasks written, {len(BAD_ROWS) + 1} rows skipped" in written.table()


def test_a_list_of_tests_may_be_written_as_python_does(tmp_path: Path, repositories: Path):
    tests = ["tests/test_calc.py::test_double['a', \"b\"]", "tests/test_calc.py::test_double"]
    assert write(tmp_path, repositories, ROW | {"FAIL_TO_PASS": repr(tests), "PASS_TO_PASS": "[]"}).skipped == []
    assert json.loads((tmp_path / "tasks" / "calc-1" / "tests" / "tests.json").read_text()) == tests


def test_a_command_may_begin_with_a_bracket(tmp_path: Path, repositories: Path):
    assert write(tmp_path, repositories, ROW | {"test_command": "[ -e x ] || make\nmake test"}).skipped == []
    script = (tmp_path / "tasks" / "calc-1" / "tests" / "run.sh").read_text()
    assert script == "[ -e x ] || make\nmake test\n"


def test_the_limit_counts_tasks_and_not_bad_rows(tmp_path: Path, repositories: Path):
    bad = [ROW | {"instance_id": f"bad-{number}", "bug_patch": "nonsense"} for number in range(3)]
    good = [ROW | {"instance_id": f"good-{number}"} for number in range(3)]
    written = write(tmp_path, repositories, *bad, *good, selection=Selection(limit=2))
    assert (written.names, len(written.skipped), written.is_full) == (["good-0", "good-1"], 3, True)
    fewer = write(tmp_path, repositories, *bad, *good, selection=Selection(limit=5))
    assert (len(fewer.names), fewer.is_full) == (3, False)
    assert "3 tasks written (the limit was 5), 3 rows skipped" in fewer.table()


def test_only_tasks_that_came_from_a_dataset_are_replaced(tmp_path: Path, repositories: Path):
    write(tmp_path, repositories, ROW)
    theirs = tmp_path / "tasks" / "calc-2"
    theirs.mkdir()
    (theirs / "task.toml").write_text('[metadata]\nsource = "me"\n')
    written = write(tmp_path, repositories, ROW | {"problem_statement": "New."}, ROW | {"instance_id": "calc-2"})
    assert written.names == ["calc-1"]
    assert "New." in (tmp_path / "tasks" / "calc-1" / "instruction.md").read_text()
    assert [row.why.partition(": ")[0] for row in written.skipped] == [
        f"`{theirs}` exists and was not made from a dataset"
    ]
    assert [file.name for file in theirs.iterdir()] == ["task.toml"]


@pytest.mark.parametrize("place", ["tasks", "tasks/inside"])
def test_a_file_is_no_place_for_tasks(tmp_path: Path, place: str):
    (tmp_path / "tasks").write_text("")
    with pytest.raises(UsageError, match=r"`.*/tasks` is a file"):
        write_c2bug_tasks(tmp_path / place, dataset="never read")


def test_a_patch_beside_the_others_must_say_the_same(tmp_path: Path, repositories: Path):
    assert write(tmp_path, repositories, ROW | {"gold_patch": GOLD, "patch": GOLD}).skipped == []
    other = ROW | {"gold_patch": GOLD, "patch": "something else"}
    with pytest.raises(
        UsageError, match="row 1 has a `patch` that differs from its `bug_patch` and `gold_patch`"
    ) as error:
        write(tmp_path, repositories, other)
    assert "`--map bug_patch=bug_patch` ignores it" in error.value.hint
    assert write(tmp_path, repositories, other, mapping={"bug_patch": "bug_patch"}).names == ["calc-1"]


def test_the_command_ends_with_1_when_nothing_was_written(
    tmp_path: Path, repositories: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "rows.jsonl"
    words = ["tasks", "c2bug", str(tmp_path / "out"), "--dataset", str(file), "--repositories", str(repositories)]
    file.write_text(json.dumps(ROW | {"bug_patch": "nonsense"}) + "\n{\n")
    assert main(words) == 1
    said = capsys.readouterr().err
    assert f"`{file}` row 2: is not valid JSON" in said
    assert f"`{file}` row 1 (`calc-1`): its bug patch does not apply" in said
    file.write_text(json.dumps(ROW) + "\n{\n")
    assert main(words) == 0
    assert "1 tasks written, 1 rows skipped" in capsys.readouterr().err
    assert main([*words, "--id", "calc-7"]) == 2
    assert "has no id `calc-7`" in capsys.readouterr().err


def test_a_dataset_of_corrupt_lines_only_writes_nothing(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("{\n")
    written = write_c2bug_tasks(tmp_path / "tasks", dataset=str(tmp_path / "rows.jsonl"))
    assert (written.names, len(written.skipped)) == ([], 1)


def test_rows_are_chosen_by_repository_id_and_number(tmp_path: Path, repositories: Path):
    rows = [ROW | {"instance_id": f"calc/{number}"} for number in range(4)]
    by_id = write(tmp_path, repositories, *rows, selection=Selection(ids=("calc/2",)))
    assert by_id.names == ["calc-2"]
    with_unknown = write(tmp_path, repositories, *rows, selection=Selection(ids=("calc/2", "calc/7")))
    assert (with_unknown.names, with_unknown.skipped[0].why) == (["calc-2"], "has no id `calc/7`")
    seeded = write(tmp_path, repositories, *rows, selection=Selection(repos=("me/calc",), limit=2, seed=1))
    assert len(seeded.names) == 2
    with pytest.raises(UsageError, match="has no repository `you/calc`"):
        write(tmp_path, repositories, *rows, selection=Selection(repos=("you/calc",)))


def test_a_folder_of_repositories_that_is_not_there_is_an_error(tmp_path: Path):
    with pytest.raises(DockyardError, match="is not a folder of repositories"):
        write(tmp_path, tmp_path / "nowhere", ROW)


SHARED = ("instance_id", "repo", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")


def test_swe_bench_calls_the_gold_patch_patch_and_swe_smith_the_bug():
    swe_bench = match_layout([*SHARED, "base_commit", "patch", "test_patch", "version"], {}, "x")
    assert (swe_bench["gold_patch"], "bug_patch" in swe_bench) == ("patch", False)
    swe_smith = match_layout([*SHARED, "patch", "image_name"], {}, "x")
    assert (swe_smith["bug_patch"], swe_smith["image"], "gold_patch" in swe_smith) == ("patch", "image_name", False)


def test_a_patch_that_may_be_either_is_refused():
    with pytest.raises(UsageError, match="it may inject the bug") as error:
        match_layout([*SHARED, "base_commit", "patch"], {}, "x")
    assert "--map bug_patch=patch` or `--map gold_patch=patch" in error.value.hint
    assert match_layout([*SHARED, "base_commit", "patch"], {"bug_patch": "patch"}, "x")["bug_patch"] == "patch"


@pytest.mark.parametrize(
    ("lacking", "columns"),
    [
        ("`bug_patch`, `gold_patch`", [*SHARED, "base_commit"]),
        ("`base_commit`", [*SHARED, "bug_patch"]),
        ("`fail_to_pass`", ["instance_id", "repo", "problem_statement", "base_commit", "bug_patch"]),
        ("`instance_id`, `repo`, `problem_statement`", ["a", "b"]),
    ],
)
def test_an_unknown_layout_is_shown_with_the_columns_found_and_needed(lacking: str, columns: list[str]):
    with pytest.raises(UsageError, match=f"has no column {lacking}") as error:
        match_layout(columns, {}, "rows.parquet")
    assert all(f"`{column}`" in error.value.message for column in columns)
    assert "--map " in error.value.hint


def test_swe_smith_rows_take_the_repository_at_its_head(tmp_path: Path, repositories: Path):
    row = {name: value for name, value in ROW.items() if name not in ("base_commit", "bug_patch")}
    assert write(tmp_path, repositories, row | {"patch": BUG, "image_name": "me/image"}).skipped == []
    task = tmp_path / "tasks" / "calc-1"
    assert (task / "environment" / "Dockerfile").read_text().startswith("FROM me/image\n")
    assert "3 * x" in (in_container(task, tmp_path / "code") / "calc.py").read_text()


def test_an_image_of_the_users_takes_the_place_of_the_rows(tmp_path: Path, repositories: Path):
    write(tmp_path, repositories, ROW | {"image": "theirs"}, image="ours:1")
    environment = tmp_path / "tasks" / "calc-1" / "environment"
    assert (environment / "Dockerfile").read_text().startswith("FROM ours:1\n")
    assert (environment / "install.sh").read_text() == "\n"
    write(tmp_path, repositories, ROW)
    assert "pip install" in (environment / "install.sh").read_text()
    write(tmp_path, repositories, ROW | {"install": ["apt-get install x", "pip install ."]})
    assert (environment / "install.sh").read_text() == "apt-get install x\npip install .\n"


def test_the_template_may_be_the_users(tmp_path: Path, repositories: Path):
    template = tmp_path / "template"
    template.mkdir()
    for name in FILES[:3]:
        (template / name).write_text((TEMPLATE / name).read_text())
    with pytest.raises(UsageError, match="has no `test.sh`"):
        write(tmp_path, repositories, ROW, template=template)
    (template / "test.sh").write_text("echo {{ problem_statement }} {{color}}\n")
    with pytest.raises(UsageError, match="`test.sh` of the template uses `color`, which does not exist"):
        write(tmp_path, repositories, ROW, template=template)
    (template / "test.sh").write_text("echo {{problem_statement}} ${#x}\n")
    write(tmp_path, repositories, ROW | {"problem_statement": "it's {{ repo }}"}, template=template)
    assert (tmp_path / "tasks" / "calc-1" / "tests" / "test.sh").read_text() == "echo 'it'\"'\"'s {{ repo }}' ${#x}\n"


def test_the_template_of_the_example_is_ours():
    example = ROOT / "examples" / "harbor" / "c2bug_template"
    assert sorted(path.name for path in example.iterdir()) == sorted(FILES)
    assert all((example / name).read_text() == (TEMPLATE / name).read_text() for name in FILES)


def bug(**values: Any) -> Bug:
    needed: dict[str, Any] = dict.fromkeys(("instance_id", "base_commit", "bug_patch", "gold_patch"), "x")
    needed |= {"repo": "me/x", "problem_statement": "x", **values}
    return Bug(**needed)


def test_tests_are_run_by_the_runner_that_their_names_belong_to():
    dotted = ("test_a (pkg.test_x.C)", "test_b (pkg.test_x.C.test_b)")
    assert command_of(bug(fail_to_pass=dotted), []) == "python -m unittest -v pkg.test_x.C.test_a pkg.test_x.C.test_b"
    django = command_of(bug(repo="django/django", fail_to_pass=dotted[:1]), [])
    assert django == "python tests/runtests.py --verbosity 2 --parallel 1 pkg.test_x.C.test_a"
    assert command_of(bug(repo="django/django"), ["tests/admin/tests.py"]).endswith(" admin.tests")
    assert command_of(bug(fail_to_pass=("a b.py::t[x y]",)), ["a b.py"]) == "python -m pytest 'a b.py'"
    with pytest.raises(RowError, match="form of the test .* is unknown"):
        command_of(bug(fail_to_pass=(*dotted, "a.py::t")), ["a.py"])


def test_the_files_of_tests_are_found_by_both_kinds_of_names():
    there = ["tests/admin/tests.py", "tests/forms/__init__.py", "test_root.py", "src/pkg/mod.py"]
    names = [
        "test_a (admin.tests.C)",
        "test_b (forms.C.test_b)",
        "test_c (test_root.C)",
        "src/pkg/mod.py::mod.f",
        "n.py",
    ]
    assert files_of(names, there) == [
        "tests/admin/tests.py",
        "tests/forms/__init__.py",
        "test_root.py",
        "src/pkg/mod.py",
    ]


def clean(folder: Path, restored: list[str], kept: list[str]) -> str:
    """What is left in the folder, and what was said."""
    (folder / "lists").mkdir()
    (folder / "lists" / "replaced").write_text("".join(f"{name}\n" for name in restored))
    (folder / "lists" / "kept").write_text("".join(f"{name}\n" for name in kept))
    command = [sys.executable, "-I", clean_up.__file__, "../lists/replaced", "../lists/kept"]
    return subprocess.run(command, cwd=folder / "code", capture_output=True, text=True, timeout=600, check=True).stdout


STEERING = (
    *(f"{folder}{name}" for folder in ("", "lib/") for name in clean_up.CONFIGS),
    *("argparse.py", "lib/decimal.py", "json.so", "pytest/__init__.py", "sitecustomize.py", "__init__.py"),
    *("test_x/__init__.py", "lib/test_y.so", "tests.py"),
    *("evil.dist-info/entry_points.txt", "src/evil.EGG-INFO/entry_points.txt"),
)
HARMLESS = (
    *("new_module.py", "json.txt", "pkg/types.py", "pkg/__init__.py", "build/lib/x.py", "lib/helper/__init__.py"),
    *("mine.egg-info/entry_points.txt", "node_modules/setup.cfg"),
)


def test_what_steers_a_test_run_is_removed_where_the_agent_put_it(tmp_path: Path):
    restored = ["tests/test_z.py", "test_x.py", "lib/test_y.py", "pkg/test_p.py"]
    for name in (*STEERING, *HARMLESS, *restored):
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text("[pytest11]" if "evil" in name else "[console_scripts]")
    said = clean(tmp_path, ["tests", *restored[1:]], beside(restored, (*restored, "pkg/__init__.py")))
    left = {file.relative_to(tmp_path / "code").as_posix() for file in (tmp_path / "code").rglob("*") if file.is_file()}
    assert left == {*HARMLESS, *restored}
    assert "removed argparse.py: it is not part of the repository\n" in said


def test_what_the_repository_has_is_kept_whatever_its_name(tmp_path: Path):
    names = [name for name in STEERING if not name.startswith(("test_x/", "src/"))]
    for name in names:
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text("[pytest11]")
    assert clean(tmp_path, ["lib/test_y.py"], beside(["lib/test_y.py"], names)) == ""


def test_what_is_put_back_never_holds_what_is_to_be_mended():
    files = ["tests/unit/tests/test_a.py", "pkg/test/tests/test_b.py", "test_c.py"]
    assert folders_of(files, ["pkg/test/client.py"]) == ["tests", "pkg/test/tests", "test_c.py"]


LOG = """Creating test database for alias 'default' ...
test_one (app.tests.C.test_one) ... ok
test_two (app.tests.C.test_two)
Says what it does ... and how. ... ok
test_three (app.tests.C.test_three) ... prints ... something
ok
test_four (app.tests.C.test_four) ... FAIL
test_five (app.tests.C.test_five) ... skipped 'no database'
test_six (app.tests.C.test_six) ... expected failure
test_seven (app.tests.C.test_seven) ... ok
test_eight (app.tests.C.test_eight) ... ERROR
ok
======================================================================
FAIL: test_four (app.tests.C.test_four)
----------------------------------------------------------------------
FAIL: test_seven (app.tests.C.test_seven) (i=1)
"""


def test_results_of_unittest_are_read_from_what_it_prints():
    passed = grade.passed_by_log(LOG)
    good = [f"test_{name} (app.tests.C)" for name in ("one", "two", "three", "six")]
    bad = [f"test_{name} (app.tests.C)" for name in ("four", "five", "seven", "eight", "none")]
    assert all(grade.is_passed(test, {}, passed) for test in good)
    assert grade.is_passed("test_one (app.tests.C.test_one)", {}, passed)
    assert grade.is_passed("Says what it does ... and how.", {}, passed)
    assert not any(grade.is_passed(test, {}, passed) for test in bad)


SUITE = """
import pytest

def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert False
@pytest.mark.xfail(run=False)
def test_not_run(): assert False
@pytest.fixture
def broken():
    yield
    assert False
def test_teardown(broken): pass
@pytest.mark.parametrize("x", ["a b", "é"])
def test_many(x): pass
class TestClass:
    def test_in(self): pass
"""


def test_results_of_pytest_come_exactly_from_our_plugin(tmp_path: Path):
    (tmp_path / "test_x.py").write_text(SUITE)
    environment = {
        "PYTHONPATH": str(Path(dockyard_report.__file__).parent),
        "DOCKYARD_REPORT": str(tmp_path / "report"),
        "PYTEST_ADDOPTS": "-p dockyard_report",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_x.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=600,
    )
    report = grade.passed_by_report((tmp_path / "report").read_text().splitlines())
    good = [
        "test_good",
        "test_expected",
        "test_not_run",
        "test_many[a b]",
        "test_many",
        "TestClass",
        "TestClass::test_in",
    ]
    bad = ["test_bad", "test_skipped", "test_teardown", "test_many[c]", "test_man", "test_none"]
    assert [name for name in good if not grade.is_passed(f"test_x.py::{name}", report, {})] == []
    assert [name for name in bad if grade.is_passed(f"test_x.py::{name}", report, {})] == []
    assert not grade.is_passed("test_x.py", report, {})


def test_the_grader_ends_well_only_when_all_tests_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tests, log = tmp_path / "tests.json", tmp_path / "log"
    log.write_text(LOG)
    tests.write_text(json.dumps(["test_one (app.tests.C)"]))
    assert grade.main(str(tests), str(tmp_path / "none"), str(log)) == 0
    tests.write_text(json.dumps(["test_one (app.tests.C)", "test_four (app.tests.C)"]))
    assert grade.main(str(tests), str(tmp_path / "none"), str(log)) == 1
    assert "1 of 2 tests passed\nnot passed: test_four (app.tests.C)\n" in capsys.readouterr().out
    tests.write_text("[]")
    assert grade.main(str(tests), str(tmp_path / "none"), str(log)) == 1


def test_archives_hold_no_past(tmp_path: Path, repositories: Path):
    write(tmp_path, repositories, ROW)
    data = (tmp_path / "tasks" / "calc-1" / "environment" / "repository.tar.gz").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert not any(name.startswith(".git/") for name in archive.getnames())
