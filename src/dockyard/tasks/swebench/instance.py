"""Read and validate one row of SWE-bench: its columns, its checks and the script that runs its tests."""

import difflib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from string import Template
from typing import Any, cast

from dockyard.tasks.folder import LONGEST_NAME
from dockyard.tasks.rows import Column, DatasetRow, match_columns, read_list, unknown_layout
from dockyard.tasks.swebench.harness import SwebenchHarness

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-zA-Z][\w./-]*")
_IMAGE = re.compile(r"[a-z0-9][\w./:@-]*")


class UnusableRowError(Exception):
    """The row cannot become a task. The message is the reason and follows the row's position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance of SWE-bench."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    image: str
    grading: dict[str, Any]
    """The row for SWE-bench's `make_test_spec`, without the solution."""


def public_image(instance_id: str) -> str:
    """Return the name of an instance's public image, in which `__` is not allowed."""
    return f"swebench/sweb.eval.x86_64.{instance_id.lower().replace('__', '_1776_')}:latest"


def read_instance(row: DatasetRow, names: Mapping[str, str], harness: SwebenchHarness) -> Instance:
    """Read and validate a row. The first problem is raised as the reason for skipping it."""
    cells = _Cells(row, names)
    instance_id = cells.word("instance_id", _NAME)
    if len(instance_id) > LONGEST_NAME:
        raise UnusableRowError(f"has an `{names['instance_id']}` of more than {LONGEST_NAME} characters")
    repo = cells.word("repo", _REPO)
    base_commit = cells.word("base_commit", _COMMIT)
    image = cells.word("image", _IMAGE) if cells.has("image") else public_image(instance_id)
    if _assets(cells.get("image_assets")):
        raise UnusableRowError(f"needs files that a patch cannot contain (`{names['image_assets']}`)")
    return Instance(
        instance_id=instance_id,
        repo=repo,
        base_commit=base_commit,
        problem_statement=cells.text("problem_statement"),
        patch=cells.text("patch"),
        image=image,
        grading={
            "instance_id": instance_id,
            "image": image,
            "repo": repo,
            "version": str(cells.get("version") or ""),
            "FAIL_TO_PASS": _some(cells, "FAIL_TO_PASS"),
            "PASS_TO_PASS": cells.tests("PASS_TO_PASS"),
            "log_parser": cells.one_of("log_parser", harness.log_parsers),
            "eval_type": _eval_type(cells, repo, harness),
            "eval_script": _script(cells, base_commit, harness),
        },
    )


@dataclass(frozen=True, slots=True)
class _Cells:
    """A row's values by Dockyard's column names. Errors use the dataset's names."""

    row: DatasetRow
    names: Mapping[str, str]

    def get(self, name: str) -> Any:
        return self.row.values.get(self.names[name]) if name in self.names else None

    def has(self, name: str) -> bool:
        return self.get(name) not in (None, "")

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value.strip():
            raise UnusableRowError(f"has no `{self.names[name]}`" if value in (None, "") else self._not_text(name))
        return value

    def word(self, name: str, pattern: re.Pattern[str]) -> str:
        value = self.text(name).strip()
        if not pattern.fullmatch(value):
            raise UnusableRowError(f"has `{value}` as `{self.names[name]}`, which is not a valid {name}")
        return value

    def one_of(self, name: str, known: frozenset[str]) -> str:
        value = self.text(name)
        if value not in known:
            near = difflib.get_close_matches(value, sorted(known), 1)
            also = f"; did you mean `{near[0]}`?" if near else f"; it has {', '.join(sorted(known))}"
            raise UnusableRowError(f"names the {name} `{value}`, which `swebench` does not have{also}")
        return value

    def tests(self, name: str) -> list[str]:
        """Return a list, which SWE-bench's own files store as a string."""
        value = self.get(name)
        if isinstance(value, str):
            value = read_list(value)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in cast("list[Any]", value)):
            raise UnusableRowError(f"has no list of tests as `{self.names[name]}`")
        return cast("list[str]", value)

    def _not_text(self, name: str) -> str:
        return f"has {type(self.get(name)).__name__} as `{self.names[name]}` where text is expected"


def _some(cells: _Cells, name: str) -> list[str]:
    tests = cells.tests(name)
    if not tests:
        raise UnusableRowError(f"has an empty `{cells.names[name]}`: no test would show whether it is resolved")
    return tests


def _eval_type(cells: _Cells, repo: str, harness: SwebenchHarness) -> str:
    """Use SWE-bench's own list of repositories if the row has no value."""
    if cells.has("eval_type"):
        return cells.one_of("eval_type", frozenset(harness.eval_types))
    return "fail_only" if repo in harness.fail_only_repos else "pass_and_fail"


def _script(cells: _Cells, base_commit: str, harness: SwebenchHarness) -> str:
    if cells.has("eval_script"):
        script = cells.text("eval_script")
        for marker in harness.markers:
            if marker not in script:
                raise UnusableRowError(f"has a `{cells.names['eval_script']}` that does not print `{marker}`")
        return script
    if not cells.has("test_cmd"):
        wanted = " or ".join(f"`{cells.names[name]}`" for name in ("eval_script", "test_cmd") if name in cells.names)
        raise UnusableRowError(f"has no {wanted}: there is no way to run its tests")
    return eval_script(
        base_commit=base_commit,
        test_patch=cells.text("test_patch"),
        test_cmd=cells.text("test_cmd"),
        markers=harness.markers,
    )


def _assets(value: Any) -> bool:
    """Whether there are assets: a dict of lists, or its JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return bool(value.strip())
    return isinstance(value, dict) and any(cast("dict[str, Any]", value).values())


DEFAULT_DATASET = "SWE-bench/SWE-bench_Verified"

_EVAL_SCRIPT = Column(
    name="eval_script",
    about=f"the script that runs the tests, as in `{DEFAULT_DATASET}`; or `test_cmd` in its place",
    needed=False,
)
_PARSER = Column(name="log_parser", about="which of SWE-bench's parsers reads the tests' output", needed=False)
COLUMNS = (
    Column(name="instance_id", about="the task's name, such as `django__django-11099`"),
    Column(name="repo", about="the repository, as `owner/name`"),
    Column(name="base_commit", about="the commit that the image holds"),
    Column(name="problem_statement", about="the issue"),
    Column(name="patch", about="the change that resolves it", aliases=("gold_patch",)),
    Column(name="test_patch", about="the tests that come with it"),
    Column(name="FAIL_TO_PASS", about="tests that it fixes, a list or its JSON", aliases=("fail_to_pass",)),
    Column(name="PASS_TO_PASS", about="tests that it must not break", aliases=("pass_to_pass",)),
    _EVAL_SCRIPT,
    Column(name="test_cmd", about="the whole command that runs the tests", aliases=("test_command",), needed=False),
    _PARSER,
    Column(name="eval_type", about="whether passing tests are in the output, or failing ones only", needed=False),
    Column(name="image", about="the image with the repository", aliases=("image_name", "docker_image"), needed=False),
    Column(name="version", about="of the repository", needed=False),
    Column(name="image_assets", about="files that a patch cannot contain", needed=False),
)


def match(found: Collection[str], mapping: Mapping[str, str], where: str) -> dict[str, str]:
    """Map Dockyard's names to the dataset's. The test command and the log parser are required and never guessed."""
    names = match_columns(COLUMNS, found, mapping, where)
    missing = [] if {"eval_script", "test_cmd"} & names.keys() else [_EVAL_SCRIPT]
    missing += [] if "log_parser" in names else [_PARSER]
    if missing:
        raise unknown_layout(COLUMNS, found, missing, where)
    return names


# `cut` takes the path from git's `added<tab>deleted<tab>path`. A file that the commit lacks is new in the patch.
_SCRIPT = Template("""\
#!/bin/bash
set -uxo pipefail
if [ -f /opt/miniconda3/bin/activate ]; then
    source /opt/miniconda3/bin/activate testbed
fi
cd /testbed
git config --global --add safe.directory /testbed
tests=$$(mktemp)
cat >"$$tests" <<'$end'
$test_patch
$end
git apply --numstat -z "$$tests" | cut -z -f 3 | while IFS= read -r -d '' file; do
    git checkout $base_commit -- "$$file" || rm -rf "$$file"
done
git apply --verbose "$$tests"
: '$begin_mark'
$test_cmd
: '$end_mark'
""")


def eval_script(*, base_commit: str, test_patch: str, test_cmd: str, markers: tuple[str, ...]) -> str:
    """Return a script that restores the test files of the commit, applies the test patch and runs the tests."""
    begin_mark, end_mark = markers
    return _SCRIPT.substitute(
        base_commit=base_commit,
        test_patch=test_patch.removesuffix("\n"),
        test_cmd=test_cmd.strip("\n"),
        begin_mark=begin_mark,
        end_mark=end_mark,
        end=f"EOF_{blake2b(test_patch.encode(), digest_size=8).hexdigest()}",
    )
