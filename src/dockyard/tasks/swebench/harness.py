"""The grading part of the installed `swebench` package, as files that run standalone inside a container.

Its modules are copied unchanged, except `swebench/harness/__init__.py`, which imports Docker and Modal: it is empty.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dockyard.errors import DockyardError, UsageError
from dockyard.tasks.folder import write_task

TEMPLATE = Path(__file__).parent / "template"
_GRADER = TEMPLATE / "tests" / "grade.py"
_MODULES = ("__init__.py", "types.py", "utils.py", "harness/utils.py", "harness/grading.py", "harness/infra_failure.py")
_PACKAGES = ("harness/constants", "harness/log_parsers")
_MAJOR = "5"
_INSTALL = "`pip install 'dockyard[swebench]'`"
_ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import grade
grade.import_harness()
from swebench.harness.constants import END_TEST_OUTPUT, FAIL_ONLY_REPOS, START_TEST_OUTPUT, EvalType
from swebench.harness.log_parsers import PARSER_REGISTRY
print(json.dumps({
    "log_parsers": sorted(PARSER_REGISTRY),
    "eval_types": [each.value for each in EvalType],
    "fail_only_repos": sorted(FAIL_ONLY_REPOS),
    "markers": [START_TEST_OUTPUT, END_TEST_OUTPUT],
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwebenchHarness:
    """The grader's files and the values that it supports."""

    version: str
    files: dict[str, str | Path]
    """By path relative to the grader."""
    log_parsers: frozenset[str]
    eval_types: tuple[str, ...]
    fail_only_repos: frozenset[str]
    """Repositories whose logs name failing tests only."""
    markers: tuple[str, ...]
    """Lines that enclose the output of the tests."""


def find_harness() -> SwebenchHarness:
    """Return the harness of the installed package, after a trial run: it must work standalone."""
    spec = importlib.util.find_spec("swebench")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("SWE-bench tasks need the package `swebench`, which is not installed", hint=_INSTALL)
    version = importlib.metadata.version("swebench")
    if version.partition(".")[0] != _MAJOR:
        raise UsageError(f"the installed `swebench` is {version}; {_MAJOR}.x is required", hint=_INSTALL)
    return _tried(Path(spec.submodule_search_locations[0]), version)


def _files(package: Path) -> Iterator[tuple[str, str | Path]]:
    inside = [package / name for name in _MODULES]
    inside += [file for folder in _PACKAGES for file in sorted((package / folder).glob("*.py"))]
    for file in inside:
        yield f"swebench/{file.relative_to(package).as_posix()}", file
    for file in importlib.metadata.files("swebench") or []:
        if file.name == "LICENSE":
            yield "swebench/LICENSE", Path(str(file.locate()))


@cache
def _tried(package: Path, version: str) -> SwebenchHarness:
    files = {**dict(_files(package)), "swebench/harness/__init__.py": ""}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "tests")
        try:
            write_task(folder, {**files, "grade.py": _GRADER})
        except FileNotFoundError as error:
            raise _unusable(version, f"it has no `{error.filename}`") from None
        command = [sys.executable, "-I", "-S", "-B", "-c", _ASK, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _unusable(version, (done.stderr.strip().splitlines() or ["no error message"])[-1])
    said = json.loads(done.stdout)
    return SwebenchHarness(
        version=version,
        files=files,
        log_parsers=frozenset(said["log_parsers"]),
        eval_types=tuple(said["eval_types"]),
        fail_only_repos=frozenset(said["fail_only_repos"]),
        markers=tuple(said["markers"]),
    )


def _unusable(version: str, reason: str) -> DockyardError:
    return DockyardError(f"the harness of `swebench` {version} does not run standalone: {reason}", hint=_INSTALL)
