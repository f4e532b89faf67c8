"""Turn a row and its repository into the contents of a task: a patch with the bug, a patch with the fix, the tests.

A test is named as in pytest, `tests/test_a.py::test_b`, or as in unittest, `test_b (tests.test_a.Class)`.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from dockyard.tasks.c2bug.grading.clean import CONFIGS
from dockyard.tasks.c2bug.schema import Bug, RowError
from dockyard.tasks.repository import HEAD, GitError, Repository

_FOLDERS = ("test", "tests")
_FILE = re.compile(r"test_.*\.py|.*_tests?\.py|tests?\.py|conftest\.py")
_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
_ROOTS = ("", "tests/", "test/", "src/")
_RUNNERS = {"django/django": "python tests/runtests.py --verbosity 2 --parallel 1"}
"""Repositories with their own test runner."""


def is_pytest_id(test: str) -> bool:
    return "::" in test or test.endswith(".py")


def unittest_label(test: str) -> str | None:
    """Return the dotted name of a test that unittest prints. Newer versions print the method twice."""
    found = _UNITTEST.fullmatch(test)
    if found is None:
        return None
    name, path = found.groups()
    return path if path.endswith(f".{name}") else f"{path}.{name}"


def is_test_file(path: str) -> bool:
    """Decide by the name of the file or of a parent folder."""
    parts = PurePosixPath(path).parts
    return bool(_FILE.fullmatch(parts[-1])) or any(part in _FOLDERS for part in parts[:-1])


def files_of(tests: Iterable[str], there: Collection[str]) -> list[str]:
    """Return the files that contain these tests, if they are among the repository's files `there`."""
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
    """Return what is restored for grading: for each file the outermost test folder that contains no sources."""
    return list(dict.fromkeys(_folder_of(file, sources) for file in files))


def _folder_of(file: str, sources: Collection[str]) -> str:
    parts = PurePosixPath(file).parts
    for length in range(1, len(parts)):
        folder = "/".join(parts[:length])
        if parts[length - 1] in _FOLDERS and not any(source.startswith(f"{folder}/") for source in sources):
            return folder
    return file


def sources_of(touched: Collection[str], run: Collection[str]) -> list[str]:
    """Return the files to fix: the touched files that are not tests, or if all are tests, those that are not run."""
    sources = [path for path in touched if not is_test_file(path)]
    return sources or [path for path in touched if path not in run]


def beside(restored: Iterable[str], there: Iterable[str]) -> list[str]:
    """Return the repository's own files and folders in the parent folders of these paths."""
    folders = {parent for place in ("x", *restored) for parent in PurePosixPath(place).parents}
    places = {place for path in there for place in (PurePosixPath(path), *PurePosixPath(path).parents)}
    return sorted(str(place) for place in places if place.parts and place.parent in folders)


def command_of(bug: Bug, run: Sequence[str]) -> str:
    """Return the row's own command, or the command of the runner that the test names belong to."""
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
        raise RowError(f"the form of the test `{odd}` is unknown: add a `test_command` that runs it")
    if not run:
        raise RowError("none of its test files is in the repository, and it has no `test_command`")
    return f"python -m pytest {_quoted(run)}"


def _django_label(file: str) -> str:
    return file.removeprefix("tests/").removesuffix(".py").replace("/", ".")


def _quoted(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(word) for word in dict.fromkeys(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBug:
    """The contents of a task, independent of the template."""

    commit: str
    base: str
    """The tree before the bug. All bugs of a commit share it."""
    bug_patch: str
    """From the base to what the agent sees: with the bug, without the tests that reveal it."""
    gold_patch: str
    """From what the agent sees to the fixed code."""
    replaced: list[str]
    """Files and folders that are restored from `tests` for grading."""
    kept: list[str]
    """The repository's own files that can influence a test run. Other such files are removed for grading."""
    tests: bytes
    """An archive of the test files."""
    command: str


@dataclass(frozen=True, slots=True)
class _Trees:
    commit: str
    base: str
    buggy: str
    fixed: str
    tested: str
    """The fixed code with its tests."""


def prepare(bug: Bug, repository: Repository) -> PreparedBug:
    """Apply the patches and derive the contents of a task. Raise RowError if the row is inconsistent."""
    trees = _trees(bug, repository)
    there = set(repository.paths(trees.tested))
    touched = repository.changed(trees.buggy, trees.fixed)
    patched = repository.changed(trees.fixed, trees.tested)
    shown = _test_files(bug, bug.fail_to_pass, there)
    run = list(dict.fromkeys([*_test_files(bug, (*bug.fail_to_pass, *bug.pass_to_pass), there), *_run_of(patched)]))
    sources = sources_of(touched, run)
    known = run or [path for path in there if is_test_file(path)]
    replaced = sorted({*folders_of(sorted(known), sources), *patched})
    _check_sources(sources, replaced)
    configs = [path for path in there if path.rpartition("/")[2] in CONFIGS]
    restored = sorted({*replaced, *(path for path in configs if path not in touched)})
    hidden = [] if bug.test_patch.strip() else [path for path in shown if path not in sources]
    agents = repository.without(trees.buggy, hidden)
    return PreparedBug(
        commit=trees.commit,
        base=trees.base,
        bug_patch=repository.diff(trees.base, agents),
        gold_patch=repository.diff(agents, repository.without(trees.fixed, hidden)),
        replaced=restored,
        kept=sorted({*configs, *beside(restored, there)}),
        tests=repository.archive(trees.tested, _of(restored, there)),
        command=command_of(bug, run),
    )


def _trees(bug: Bug, repository: Repository) -> _Trees:
    commit = _commit(bug, repository)
    base = repository.tree(commit)
    if bug.bug_patch.strip():
        buggy = _applied(repository, base, bug.bug_patch, "bug patch")
        fixed = _applied(repository, buggy, bug.gold_patch, "gold patch") if bug.gold_patch.strip() else base
    else:
        buggy, fixed = _around(repository, base, bug.gold_patch)
    if buggy == fixed:
        raise RowError("its patch has no effect")
    tested = _applied(repository, fixed, bug.test_patch, "test patch") if bug.test_patch.strip() else fixed
    return _Trees(commit, base, buggy, fixed, tested)


def _commit(bug: Bug, repository: Repository) -> str:
    try:
        return repository.commit(bug.base_commit or HEAD)
    except GitError:
        raise RowError(f"its repository has no commit `{bug.base_commit}`") from None


def _around(repository: Repository, base: str, gold: str) -> tuple[str, str]:
    """Return the trees with and without the bug. The base commit is the one to which the gold patch applies."""
    try:
        return base, repository.apply(base, gold)
    except GitError as error:
        try:
            return repository.apply(base, gold, reverse=True), base
        except GitError:
            raise RowError(f"its gold patch does not apply, nor does its reverse: {error}") from None


def _applied(repository: Repository, tree: str, patch: str, name: str) -> str:
    try:
        return repository.apply(tree, patch)
    except GitError as error:
        raise RowError(f"its {name} does not apply: {error}") from None


def _test_files(bug: Bug, tests: tuple[str, ...], there: set[str]) -> list[str]:
    """Return the files that the row names and those that contain its tests. A doctest's file is code, not a test."""
    missing = [name for name in bug.test_files if not files_of([name], there) and name not in there]
    if missing and not bug.test_patch.strip():
        raise RowError(f"its test file `{missing[0]}` is not in the repository")
    named = files_of((name for name in bug.test_files if name not in missing), there)
    return [*named, *(file for file in files_of(tests, there) if is_test_file(file) and file not in named)]


def _run_of(patched: list[str]) -> list[str]:
    return [path for path in patched if is_test_file(path) and path.endswith(".py")]


def _check_sources(sources: list[str], replaced: list[str]) -> None:
    covered = [path for path in sources if any(path == place or path.startswith(f"{place}/") for place in replaced)]
    if len(covered) == len(sources):
        raise RowError("its patch changes only the tests that grade it")


def _of(places: list[str], there: set[str]) -> list[str]:
    return [place for place in places if place in there or any(path.startswith(f"{place}/") for path in there)]
