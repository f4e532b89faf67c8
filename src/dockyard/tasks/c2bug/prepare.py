"""From a row and its repository to what a task holds: a patch that makes the bug, one that mends it, the tests."""

from dataclasses import dataclass

from dockyard.tasks.c2bug.grading.clean import CONFIGS
from dockyard.tasks.c2bug.schema import Bug, RowError
from dockyard.tasks.c2bug.tests import beside, command_of, files_of, folders_of, is_test_file, sources_of
from dockyard.tasks.repository import HEAD, GitError, Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that is the same however the task's files are laid out."""

    commit: str
    base: str
    """The tree before the bug. Every bug of a commit shares it."""
    bug_patch: str
    """From there to what the agent sees: the bug is in, the tests that show it are out."""
    gold_patch: str
    """From what the agent sees to the mended code."""
    replaced: list[str]
    """Files and folders that are removed for grading, and put back from `tests`."""
    kept: list[str]
    """What could steer a test run and belongs to the repository. Anything else that could is removed for grading."""
    tests: bytes
    """An archive."""
    command: str


@dataclass(frozen=True, slots=True)
class _Trees:
    commit: str
    base: str
    buggy: str
    fixed: str
    tested: str
    """The mended code with its tests."""


def prepare(bug: Bug, repository: Repository) -> Prepared:
    """What does not fit together is an error that says why."""
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
    return Prepared(
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
        raise RowError("its patch changes nothing")
    tested = _applied(repository, fixed, bug.test_patch, "test patch") if bug.test_patch.strip() else fixed
    return _Trees(commit, base, buggy, fixed, tested)


def _commit(bug: Bug, repository: Repository) -> str:
    try:
        return repository.commit(bug.base_commit or HEAD)
    except GitError:
        raise RowError(f"its repository has no commit `{bug.base_commit}`") from None


def _around(repository: Repository, base: str, gold: str) -> tuple[str, str]:
    """Whether the base commit is the one with the bug or the one without: the gold patch fits one of them."""
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
    """Those the row names, and those that hold its tests. A doctest's file is code, not a test."""
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
        raise RowError("its patch changes nothing but the tests that grade it")


def _of(places: list[str], there: set[str]) -> list[str]:
    return [place for place in places if place in there or any(path.startswith(f"{place}/") for path in there)]
