"""The columns of a C2Bug dataset, and the contents of one row."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from dockyard.errors import UsageError
from dockyard.tasks.rows import Column, DatasetRow, match_columns, read_list, unknown_layout

_BASE = Column(
    name="base_commit",
    about="the commit that the patch belongs to",
    aliases=("commit", "base_sha", "commit_sha", "commit_hash"),
    needed=False,
)
_BUG = Column(
    name="bug_patch",
    about="injects the bug",
    aliases=("buggy_patch", "bug_diff", "inject_patch", "mutation_patch"),
    needed=False,
)
_GOLD = Column(
    name="gold_patch",
    about="fixes the bug",
    aliases=("golden_patch", "fix_patch", "solution_patch", "reference_patch"),
    needed=False,
)
_TESTS = (
    Column(
        name="fail_to_pass",
        about="the tests that the bug breaks",
        aliases=("FAIL_TO_PASS", "f2p", "failing_tests"),
        needed=False,
    ),
    Column(
        name="pass_to_pass",
        about="the tests that must still pass",
        aliases=("PASS_TO_PASS", "p2p", "passing_tests"),
        needed=False,
    ),
    Column(
        name="test_files",
        about="test files to run",
        aliases=("test_file", "test_paths", "tests", "tests_to_run"),
        needed=False,
    ),
    Column(
        name="test_command",
        about="the command that runs the tests",
        aliases=("test_cmd", "test_cmds", "test_commands"),
        needed=False,
    ),
    Column(name="test_patch", about="adds the hidden tests", aliases=("tests_patch",), needed=False),
)
COLUMNS = (
    Column(name="instance_id", about="a name for the bug", aliases=("task_id", "bug_id", "id")),
    Column(name="repo", about="the repository as `owner/name`", aliases=("repository", "repo_name")),
    _BASE,
    _BUG,
    _GOLD,
    Column(
        name="problem_statement",
        about="the instruction for the agent",
        aliases=("issue", "issue_text", "problem", "instruction", "description"),
    ),
    *_TESTS,
    Column(
        name="image",
        about="the container image to start from",
        aliases=("docker_image", "image_name", "base_image"),
        needed=False,
    ),
    Column(
        name="install",
        about="commands that install what the tests need",
        aliases=("install_commands", "install_command", "install_cmd", "setup_commands"),
        needed=False,
    ),
    Column(
        name="clone_url",
        about="where the repository is: a URL, a checkout or a bundle",
        aliases=("repo_url", "git_url", "bundle", "repo_path"),
        needed=False,
    ),
    Column(name="workdir", about="where the repository is put", aliases=("repo_dir", "working_dir"), needed=False),
)
_PATCH = "patch"
"""In SWE-bench the patch that fixes a bug, in SWE-smith the patch that injects it."""
_SHOWN = 100


class RowError(Exception):
    """Why a row cannot become a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One row."""

    instance_id: str
    repo: str
    base_commit: str | None
    """None: the HEAD of the repository, as in SWE-smith, which has one repository per commit."""
    bug_patch: str
    gold_patch: str
    """One of the two may be empty: it is the reverse of the other."""
    problem_statement: str
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    test_files: tuple[str, ...] = ()
    test_command: str = ""
    test_patch: str = ""
    image: str = ""
    install: str = ""
    clone_url: str = ""
    workdir: str = ""


def match_layout(found: Collection[str], mapping: Mapping[str, str], where: str) -> dict[str, str]:
    """Map Dockyard's columns to the dataset's. Missing required columns are an error with an example of `--map`."""
    matched = match_columns(COLUMNS, found, mapping, where)
    is_smith = False
    if not {"bug_patch", "gold_patch"} & set(matched) and _PATCH in found and _PATCH not in mapping.values():
        ours = _what_patch_is(found, where)
        matched[ours] = _PATCH
        is_smith = ours == "bug_patch"
    if not {"bug_patch", "gold_patch"} & set(matched):
        raise unknown_layout(COLUMNS, found, [_BUG, _GOLD], where)
    if "base_commit" not in matched and not is_smith:
        raise unknown_layout(COLUMNS, found, [_BASE], where)
    if not {column.name for column in _TESTS} - {"pass_to_pass"} & set(matched):
        raise unknown_layout(COLUMNS, found, _TESTS, where)
    return matched


def _what_patch_is(found: Collection[str], where: str) -> str:
    """Decide by the columns that only one of the two datasets has. Raise if that is not possible."""
    if {"base_commit", "test_patch"} <= set(found):
        return "gold_patch"
    if "image_name" in found and not {"base_commit", "test_patch"} & set(found):
        return "bug_patch"
    raise UsageError(
        f"`{where}` has a column `patch`: it may inject the bug (as in SWE-smith) or fix it (as in SWE-bench)",
        hint="choose one: `--map bug_patch=patch` or `--map gold_patch=patch`",
    )


def check_patches(
    rows: Iterable[DatasetRow], columns: Mapping[str, str], mapping: Mapping[str, str], found: Collection[str]
) -> None:
    """Raise if there is also a `patch` that differs from the matched patches, unless the user mapped one."""
    theirs = [columns[name] for name in ("bug_patch", "gold_patch") if name in columns]
    if _PATCH not in found or _PATCH in theirs or {"bug_patch", "gold_patch"} & mapping.keys():
        return
    for row in rows:
        if row.values.get(_PATCH) and row.values[_PATCH] not in [row.values.get(name) for name in theirs]:
            known = " and ".join(f"`{name}`" for name in theirs)
            ours = "bug_patch" if "bug_patch" in columns else "gold_patch"
            raise UsageError(
                f"{row.place} has a `patch` that differs from its {known}: it is unclear which one to use",
                hint=f"`--map bug_patch=patch` or `--map gold_patch=patch`; `--map {ours}={theirs[0]}` ignores it",
            )


def read_bug(row: DatasetRow, columns: Mapping[str, str]) -> Bug:
    """Read a row. Errors name the column that cannot be read."""
    cells = {ours: row.values.get(theirs) for ours, theirs in columns.items()}
    texts = {name: _text(cells.get(name), columns.get(name, name)) for name in _TEXTS}
    lists = {name: _names(cells.get(name), columns.get(name, name)) for name in _LISTS}
    commands = {name: "\n".join(_words(cells.get(name), columns.get(name, name))) for name in _COMMANDS}
    for name in ("instance_id", "repo", "problem_statement"):
        if not texts[name].strip():
            raise RowError(f"its `{columns[name]}` is empty")
    if "base_commit" in columns and not texts["base_commit"].strip():
        raise RowError(f"its `{columns['base_commit']}` is empty")
    if not texts["bug_patch"].strip() and not texts["gold_patch"].strip():
        raise RowError("it has no patch")
    base = texts.pop("base_commit").strip() or None
    return Bug(base_commit=base, **texts, **commands, **lists)  # pyright: ignore[reportArgumentType]


_TEXTS = (
    *("instance_id", "repo", "base_commit", "bug_patch", "gold_patch", "problem_statement"),
    *("test_patch", "image", "clone_url", "workdir"),
)
_LISTS = ("fail_to_pass", "pass_to_pass", "test_files")
_COMMANDS = ("install", "test_command")


def _text(value: Any, column: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise RowError(f"its `{column}` is {type(value).__name__}, not text")


def _names(value: Any, column: str) -> tuple[str, ...]:
    """Read names of tests and files. Unlike commands, they start with `[` only if they are a list."""
    if isinstance(value, str) and value.lstrip().startswith("[") and read_list(value) is None:
        raise RowError(f"its `{column}` starts like a list but is not one: `{value[:_SHOWN]}`")
    return _words(value, column)


def _words(value: Any, column: str) -> tuple[str, ...]:
    """Read a list, a list in a string, or lines."""
    if isinstance(value, str):
        listed = read_list(value) if value.lstrip().startswith("[") else None
        value = value.splitlines() if listed is None else listed
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise RowError(f"its `{column}` is {type(value).__name__}, neither text nor a list")
    words = [word for word in cast("list[Any]", value) if word is not None]
    if not all(isinstance(word, str) for word in words):
        raise RowError(f"its `{column}` is a list that contains something other than text")
    return tuple(word for word in words if word.strip())
