"""Which files of a repository are its tests, which of them a bug's tests are in, and how those are run.

A test is named as pytest does, `tests/test_a.py::test_b`, or as unittest does, `test_b (tests.test_a.Class)`.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePosixPath

from dockyard.tasks.c2bug.schema import Bug, RowError

_FOLDERS = ("test", "tests")
_FILE = re.compile(r"test_.*\.py|.*_tests?\.py|tests?\.py|conftest\.py")
_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
_ROOTS = ("", "tests/", "test/", "src/")
_RUNNERS = {"django/django": "python tests/runtests.py --verbosity 2 --parallel 1"}
"""Repositories whose tests have a runner of their own."""


def is_pytest_id(test: str) -> bool:
    return "::" in test or test.endswith(".py")


def unittest_label(test: str) -> str | None:
    """The dotted name of a test that unittest prints; newer versions print its method twice."""
    found = _UNITTEST.fullmatch(test)
    if found is None:
        return None
    name, path = found.groups()
    return path if path.endswith(f".{name}") else f"{path}.{name}"


def is_test_file(path: str) -> bool:
    """By its name, or a folder above it."""
    parts = PurePosixPath(path).parts
    return bool(_FILE.fullmatch(parts[-1])) or any(part in _FOLDERS for part in parts[:-1])


def files_of(tests: Iterable[str], there: Collection[str]) -> list[str]:
    """The files that hold these tests, as far as a repository with these files has them."""
    found = (_file_of(test, there) for test in tests)
    return list(dict.fromkeys(file for file in found if file is not None))


def _file_of(test: str, there: Collection[str]) -> str | None:
    if is_pytest_id(test):
        file = test.partition("::")[0]
        return file if file in there else None
    parts = (unittest_label(test) or "").split(".")
    modules = ("/".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
    places = (f"{root}{module}{end}" for module in modules for root in _ROOTS for end in (".py", "/__init__.py"))
    return next((place for place in places if place in there), None)


def folders_of(files: Sequence[str], sources: Collection[str]) -> list[str]:
    """What is put back for grading: the outermost folder of tests around each file that holds none of the sources."""
    return list(dict.fromkeys(_folder_of(file, sources) for file in files))


def _folder_of(file: str, sources: Collection[str]) -> str:
    parts = PurePosixPath(file).parts
    for length in range(1, len(parts)):
        folder = "/".join(parts[:length])
        if parts[length - 1] in _FOLDERS and not any(source.startswith(f"{folder}/") for source in sources):
            return folder
    return file


def sources_of(touched: Collection[str], run: Collection[str]) -> list[str]:
    """What is to be mended, of the files that the patch touches; all of it, where it touches nothing but tests."""
    sources = [path for path in touched if not is_test_file(path)]
    return sources or [path for path in touched if path not in run]


def beside(restored: Iterable[str], there: Iterable[str]) -> list[str]:
    """What the repository itself has in the folders above these places: files and folders."""
    folders = {parent for place in ("x", *restored) for parent in PurePosixPath(place).parents}
    places = {place for path in there for place in (PurePosixPath(path), *PurePosixPath(path).parents)}
    return sorted(str(place) for place in places if place.parts and place.parent in folders)


def command_of(bug: Bug, run: Sequence[str]) -> str:
    """The row's own command, or that of the runner to which the tests' names belong."""
    if bug.test_command:
        return bug.test_command
    tests = (*bug.fail_to_pass, *bug.pass_to_pass)
    labels = [unittest_label(test) for test in tests]
    if tests and all(labels):
        runner = _RUNNERS.get(bug.repo, "python -m unittest -v")
        return f"{runner} {_quoted(label for label in labels if label)}"
    if bug.repo in _RUNNERS and not tests:
        return f"{_RUNNERS[bug.repo]} {_quoted(map(_django_label, run))}"
    if not all(map(is_pytest_id, tests)):
        odd = next(test for test in tests if not is_pytest_id(test))
        raise RowError(f"the test `{odd}` is of no form known: name a `test_command` that runs it")
    if not run:
        raise RowError("none of its test files is in the repository, and it has no `test_command`")
    return f"python -m pytest {_quoted(run)}"


def _django_label(file: str) -> str:
    return file.removeprefix("tests/").removesuffix(".py").replace("/", ".")


def _quoted(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(word) for word in dict.fromkeys(words))
