"""Issues in the shape of SWE-bench over the repositories of the C2Bug tests, on images named as the public ones are.

Each issue is two bugs of one repository, and comes with a test for each, so that half a fix is possible.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from c2bug_repositories import SOURCES, build_image, git, make_repository
from docker_engine import docker
from swebench_rows import MARKS

from dockyard.tasks.swebench.instance import public_image

WORK = "/testbed"
type ParseLog = Callable[[str], dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """Two bugs, how their tests are run, and code with which an agent may meddle."""

    instance_id: str
    repo: str
    source: str
    """The file with the bugs."""
    bugs: tuple[tuple[str, str], tuple[str, str]]
    """What is right, and what stands there instead."""
    problem: str
    test_file: str
    new_tests: str
    """Added at the end of the test file; `before` stands behind it."""
    before: str = ""
    test_cmd: str
    log_parser: str
    claim: str
    """How the runner says that a test passed."""
    target: str
    """Replaces what is broken by `{do}`."""
    spare: str
    """Replaces something else that is tested by `{do}`."""
    with_script: bool = True
    """Whether the row carries the whole script."""


ISSUES = (
    Issue(
        instance_id="pytoolz__toolz-1",
        repo="pytoolz/toolz",
        source="toolz/itertoolz.py",
        bugs=(
            ("                seen_add(val)", "                seen_add(item)"),
            ("                key2 = key(val2)\n                if key2 < key1:", "                if key2 < key1:"),
        ),
        problem="`unique` and `merge_sorted` forget their key.",
        test_file="toolz/tests/test_itertoolz.py",
        new_tests="""

def test_unique_by_key_again():
    assert list(unique([1, -1, 2], key=abs)) == [1, 2]


def test_merge_sorted_by_key_again():
    assert list(merge_sorted([3, 1], [4, 2], key=lambda x: -x)) == [4, 3, 2, 1]
""",
        test_cmd="python -m pytest -rA toolz/tests/test_itertoolz.py",
        log_parser="parse_log_pytest",
        claim="PASSED {test}",
        target="def unique(seq, key=None):\n    {do}\n",
        spare="def frequencies(seq):\n    {do}\n",
    ),
    Issue(
        instance_id="danthedeckie__simpleeval-2",
        repo="danthedeckie/simpleeval",
        source="simpleeval.py",
        bugs=(
            ("            left = right\n            right = self._eval(comp)", "            right = self._eval(comp)"),
            ("                if to_return:\n", "                if not to_return:\n"),
        ),
        problem="`1 < 3 < 2` is true, and `or` does not return the first value that is true.",
        test_file="test_simpleeval.py",
        before='\n\nif __name__ == "__main__":',
        new_tests="""

class TestAgain(DRYTest):
    def test_chain(self):
        self.t("1 < 3 < 2", False)

    def test_or(self):
        self.t("0 or 7 or 8", 7)
""",
        test_cmd="python -m pytest -rA -p no:cacheprovider test_simpleeval.py",
        log_parser="parse_log_pytest_v2",
        claim="PASSED {test}",
        target="def _other(self, node):\n    {do}\nSimpleEval._eval_boolop = _other\n",
        spare="def _spare(self, node):\n    {do}\nSimpleEval._eval_ifexp = _spare\n",
        with_script=False,
    ),
    Issue(
        instance_id="jazzband__django-taggit-3",
        repo="jazzband/django-taggit",
        source="taggit/utils.py",
        bugs=(
            ('        if "," in name or " " in name:', '        if "," in name:'),
            (
                "                saw_loose_comma = True\n            to_be_split",
                "                pass\n            to_be_split",
            ),
        ),
        problem="Names with spaces are not quoted; a comma behind an open quote does not separate tags.",
        test_file="tests/tests.py",
        new_tests="""

class AgainTests(SimpleTestCase):
    def test_names_with_spaces_are_quoted(self):
        self.assertEqual(edit_string_for_tags([Tag(name="a b"), Tag(name="c")]), '"a b", c')

    def test_open_quotes_do_not_hide_commas(self):
        self.assertEqual(parse_tags('one two "thr,ee'), ["ee", "one two", "thr"])
""",
        test_cmd="python -m django test --settings tests.settings --verbosity 2"
        " tests.tests.TagStringParseTestCase tests.tests.AgainTests",
        log_parser="parse_log_django",
        claim="{test} ... ok",
        target="def _parse_tags(tagstring):\n    {do}\n",
        spare='def split_strip(string, delimiter=","):\n    if delimiter == " ":\n        {do}\n'
        "    return [word.strip() for word in string.split(delimiter) if word.strip()]\n",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An issue with its row, its image being there, and a fix for the first of its bugs."""

    issue: Issue
    row: dict[str, Any]
    half: str


def build(issue: Issue, parse_log: ParseLog) -> Built:
    """As in SWE-bench: run the tests without and with the fix to find those that it fixes or keeps passing."""
    source = next(each for each in SOURCES if each.repo == issue.repo)
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch, "checkout")
        make_repository(source, checkout)
        right = (checkout / issue.source).read_text()
        half = _replaced(right, *issue.bugs[1])
        (checkout / issue.source).write_text(_replaced(half, *issue.bugs[0]))
        git(checkout, "commit", "--quiet", "--all", "--amend", "--message", "base")
        base = git(checkout, "rev-parse", "HEAD").strip()
        gold_patch, half_patch = (_patch(checkout, issue.source, text) for text in (right, half))
        test_patch = _patch(checkout, issue.test_file, _with_new_tests(checkout / issue.test_file, issue))
        _build_image(checkout, issue.instance_id)
    script = _script(issue, base, test_patch)
    row: dict[str, Any] = {
        "instance_id": issue.instance_id,
        "repo": issue.repo,
        "base_commit": base,
        "problem_statement": issue.problem,
        "patch": gold_patch,
        "test_patch": test_patch,
        "version": source.package.partition("==")[2],
        "log_parser": issue.log_parser,
        **({"eval_script": script} if issue.with_script else {"test_cmd": issue.test_cmd}),
        **_measure(issue.instance_id, script, gold_patch, parse_log),
    }
    return Built(issue=issue, row=row, half=half_patch)


def run_in(image: str, files: dict[str, str | Path], command: str, out: Path) -> None:
    """Run a command in a container that reaches nothing. What it leaves in /out is copied to `out`."""
    container = docker("create", "--network", "none", "--workdir", WORK, image, "bash", "-c", f"mkdir /out; {command}")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for place, content in files.items():
                file = content if isinstance(content, Path) else Path(scratch, Path(place).name)
                if isinstance(content, str):
                    file.write_text(content)
                docker("cp", str(file), f"{container}:{place}")
        subprocess.run(["docker", "start", "--attach", container], capture_output=True, check=True, timeout=1200)
        docker("cp", f"{container}:/out/.", str(out))
    finally:
        docker("rm", "--force", "--volumes", container)


def _replaced(text: str, right: str, wrong: str) -> str:
    assert text.count(right) == 1, right
    return text.replace(right, wrong)


def _patch(checkout: Path, file: str, text: str) -> str:
    (checkout / file).write_text(text)
    patch = git(checkout, "diff")
    git(checkout, "reset", "--quiet", "--hard")
    return patch


def _with_new_tests(file: Path, issue: Issue) -> str:
    text = file.read_text()
    end = text.rindex(issue.before) if issue.before else len(text)
    return text[:end].rstrip("\n") + "\n" + issue.new_tests + text[end:]


def _build_image(checkout: Path, instance_id: str) -> None:
    with tempfile.TemporaryDirectory() as context:
        shutil.copytree(checkout, Path(context, "testbed"))
        Path(context, "Dockerfile").write_text(f"FROM {build_image()}\nCOPY testbed {WORK}\nWORKDIR {WORK}\n")
        docker("build", "--quiet", "--tag", public_image(instance_id), context)


def _script(issue: Issue, base: str, test_patch: str) -> str:
    """In the manner of the scripts that SWE-bench publishes."""
    return f"""#!/bin/bash
set -uxo pipefail
cd {WORK}
git config --global --add safe.directory {WORK}
git status
git -c core.fileMode=false diff {base}
git checkout {base} {issue.test_file}
git apply -v - <<'EOF_114'
{test_patch}
EOF_114
: '{MARKS[0]}'
{issue.test_cmd}
: '{MARKS[1]}'
git checkout {base} {issue.test_file}
"""


def _measure(instance_id: str, script: str, gold: str, parse_log: ParseLog) -> dict[str, str]:
    files: dict[str, str | Path] = {"/eval.sh": script, "/gold.patch": gold}
    command = "bash /eval.sh >/out/before 2>&1; git apply /gold.patch && bash /eval.sh >/out/after 2>&1"
    with tempfile.TemporaryDirectory() as out:
        run_in(public_image(instance_id), files, command, Path(out))
        before, after = (_passing(parse_log(Path(out, name).read_text())) for name in ("before", "after"))
    assert before, "no test passes before the fix"
    return {
        "FAIL_TO_PASS": json.dumps(sorted(after - before)),
        "PASS_TO_PASS": json.dumps(sorted(after & before)),
    }


def _passing(results: dict[str, str]) -> set[str]:
    return {test for test, result in results.items() if result == "PASSED"}
