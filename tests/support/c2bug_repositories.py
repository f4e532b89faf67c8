"""Small real git repositories, made of PyPI's source packages, and bugs in them as a C2Bug-shaped dataset.

Which tests a bug breaks was measured: `python tests/support/c2bug_repositories.py` does it again, in the image, and
writes `tests/data/c2bug.json`.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from docker_engine import BASE, docker

IMAGE = "dockyard/c2bug:1"  # the number rises when the packages change
PACKAGES = ("pytest==8.4.2", "Django==5.2.8", "djangorestframework==3.16.0")
MEASURED = Path(__file__).parents[1] / "data" / "c2bug.json"
_PYTHON = "3.13"  # of the base image
_DOCKERFILE = f"""FROM {BASE}
COPY site /usr/local/lib/python{_PYTHON}/dist-packages
RUN ln -s /usr/bin/python3 /usr/local/bin/python
"""
_MOST_KEPT = 20
_DATE = "2024-01-01T00:00:00Z"
_AUTHOR = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in {"NAME": "t", "EMAIL": "t@t", "DATE": _DATE}.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A package that is a repository here."""

    repo: str
    package: str
    place: str
    """In the folder of repositories."""
    command: str
    """Runs all tests."""
    in_rows: bool = False
    """Whether rows have to say how tests are run."""


SOURCES = (
    Source(
        repo="pytoolz/toolz", package="toolz==1.0.0", place="pytoolz__toolz", command="python -m pytest toolz/tests"
    ),
    Source(
        repo="andialbrecht/sqlparse",
        package="sqlparse==0.5.3",
        place="sqlparse.bundle",
        command="python -m pytest tests",
    ),
    Source(
        repo="danthedeckie/simpleeval",
        package="simpleeval==1.0.3",
        place="danthedeckie/simpleeval",
        command="python -m unittest -v test_simpleeval",
    ),
    Source(
        repo="jazzband/django-taggit",
        package="django-taggit==5.0.1",
        place="django-taggit",
        command="python -m django test --settings tests.settings --verbosity 2",
        in_rows=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One line of a repository, and the bug that stands there instead."""

    id: str
    repo: str
    file: str
    right: str
    wrong: str
    problem: str
    shape: str = "bug"
    """Which columns of the row say it: the `bug` or the `gold` patch or `both`, test `files` or a `command` without
    names of tests, or a test `patch`."""


EDITS = (
    Edit(
        id="toolz-unique-key",
        repo="pytoolz/toolz",
        file="toolz/itertoolz.py",
        right="            if val not in seen:\n                seen_add(val)",
        wrong="            if val not in seen:\n                seen_add(item)",
        problem="`unique(seq, key=...)` yields items although another one with the same key came before.",
    ),
    Edit(
        id="toolz-merge-sorted-key",
        repo="pytoolz/toolz",
        file="toolz/itertoolz.py",
        right="                key2 = key(val2)\n                if key2 < key1:",
        wrong="                if key2 < key1:",
        problem="`merge_sorted` with a `key` returns items out of order.",
        shape="both",
    ),
    Edit(
        id="toolz-valfilter",
        repo="pytoolz/toolz",
        file="toolz/dicttoolz.py",
        right="        if predicate(v):",
        wrong="        if not predicate(v):",
        problem="`valfilter` keeps the items that its predicate rejects.",
        shape="files",
    ),
    Edit(
        id="toolz-keymap",
        repo="pytoolz/toolz",
        file="toolz/dicttoolz.py",
        right="    rv.update(zip(map(func, d.keys()), d.values()))",
        wrong="    rv.update(zip(d.keys(), map(func, d.values())))",
        problem="`keymap` applies its function to the values.",
        shape="patch",
    ),
    Edit(
        id="sqlparse-keyword-case",
        repo="andialbrecht/sqlparse",
        file="sqlparse/formatter.py",
        right="    if kwcase not in [None, 'upper', 'lower', 'capitalize']:",
        wrong="    if kwcase not in [None, 'upper', 'capitalize']:",
        problem="`format(sql, keyword_case='lower')` raises `SQLParseError`.",
        shape="gold",
    ),
    Edit(
        id="sqlparse-truncate-strings",
        repo="andialbrecht/sqlparse",
        file="sqlparse/filters/tokens.py",
        right="inner[:self.width], self.char",
        wrong="inner[:self.width - 1], self.char",
        problem="`truncate_strings` cuts off one character more than it should.",
        shape="both",
    ),
    Edit(
        id="sqlparse-remove-quotes",
        repo="andialbrecht/sqlparse",
        file="sqlparse/utils.py",
        right="""    if val[0] in ('"', "'", '`') and val[0] == val[-1]:""",
        wrong="""    if val[0] in ('"', "'") and val[0] == val[-1]:""",
        problem="Identifiers quoted by backticks keep their quotes in `get_name()`.",
    ),
    Edit(
        id="sqlparse-split-parentheses",
        repo="andialbrecht/sqlparse",
        file="sqlparse/engine/statement_splitter.py",
        right="        elif ttype is T.Punctuation and value == ')':\n            return -1",
        wrong="        elif ttype is T.Punctuation and value == ')':\n            return 0",
        problem="Statements after one with parentheses are not split off any more.",
        shape="gold",
    ),
    Edit(
        id="simpleeval-chained-comparison",
        repo="danthedeckie/simpleeval",
        file="simpleeval.py",
        right="            left = right\n            right = self._eval(comp)",
        wrong="            left, right = self._eval(node.left), self._eval(comp)",
        problem="`1 < 3 < 2` is true.",
    ),
    Edit(
        id="simpleeval-or",
        repo="danthedeckie/simpleeval",
        file="simpleeval.py",
        right="                if to_return:\n                    break",
        wrong="                if not to_return:\n                    break",
        problem="`or` does not return the first value that is true.",
        shape="gold",
    ),
    Edit(
        id="simpleeval-keyword-arguments",
        repo="danthedeckie/simpleeval",
        file="simpleeval.py",
        right="**dict(self._eval(k) for k in node.keywords)",
        wrong="**dict(self._eval(k) for k in node.keywords[:1])",
        problem="A function gets its first keyword argument only.",
    ),
    Edit(
        id="simpleeval-conditional",
        repo="danthedeckie/simpleeval",
        file="simpleeval.py",
        right="self._eval(node.body) if self._eval(node.test) else self._eval(node.orelse)",
        wrong="self._eval(node.orelse) if self._eval(node.test) else self._eval(node.body)",
        problem="`a if condition else b` takes the wrong one of the two.",
        shape="command",
    ),
    Edit(
        id="taggit-quoted-names",
        repo="jazzband/django-taggit",
        file="taggit/utils.py",
        right="""        if "," in name or " " in name:""",
        wrong="""        if "," in name:""",
        problem="Tags with spaces lose their quotes when their names are put together for editing.",
    ),
    Edit(
        id="taggit-unicode-slugs",
        repo="jazzband/django-taggit",
        file="taggit/models.py",
        right="            slug = slugify(tag, allow_unicode=True)",
        wrong="            slug = slugify(tag)",
        problem="The slug of a tag loses every letter that is not in ASCII.",
        shape="both",
    ),
    Edit(
        id="taggit-repeated-words",
        repo="jazzband/django-taggit",
        file="taggit/utils.py",
        right='        words = list(set(split_strip(tagstring, " ")))',
        wrong='        words = split_strip(tagstring, " ")',
        problem="A word that stands twice between spaces becomes two tags.",
        shape="gold",
    ),
    Edit(
        id="taggit-order",
        repo="jazzband/django-taggit",
        file="taggit/models.py",
        right="        return self.name.lower() < other.name.lower()",
        wrong="        return self.name < other.name",
        problem="Sorting tags puts all that begin with a capital letter first.",
    ),
)
_HIDDEN_TEST = "toolz/tests/test_keymap_again.py"
_HIDDEN = (
    'from toolz import keymap\n\n\ndef test_keys_only():\n    assert keymap(str.upper, {"a": "b"}) == {"A": "b"}\n'
)


def write_dataset(folder: Path) -> tuple[Path, Path]:
    """A JSONL file of all bugs, and the folder with the repositories."""
    repositories = folder / "repositories"
    measured = json.loads(MEASURED.read_text())
    rows = [row for source in SOURCES for row in _rows(source, repositories, measured)]
    file = folder / "bugs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, repositories


def build_image() -> str:
    """The image in which the repositories' tests run, built once per engine."""
    there = subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, timeout=600)
    if there.returncode:
        with tempfile.TemporaryDirectory() as context:
            shutil.copytree(_site(), Path(context, "site"))
            Path(context, "Dockerfile").write_text(_DOCKERFILE)
            docker("build", "--quiet", "--tag", IMAGE, context)
    return IMAGE


def make_repository(source: Source, place: Path) -> str:
    """A git repository, or a bundle of one, with one commit; its id."""
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch, "checkout")
        _unpack(source.package, checkout)
        git(checkout, "init", "--quiet")
        git(checkout, "add", "--all", "--force")
        git(checkout, "commit", "--quiet", "--message", source.package)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.suffix == ".bundle":
            git(checkout, "bundle", "create", "--quiet", str(place), "HEAD", "--all")
        else:
            shutil.copytree(checkout, place)
        return git(checkout, "rev-parse", "HEAD").strip()


def git(folder: Path, *args: str) -> str:
    env = {**os.environ, **_AUTHOR, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _rows(source: Source, repositories: Path, measured: dict[str, Any]) -> list[dict[str, Any]]:
    commit = make_repository(source, repositories / source.place)
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch)
        _unpack(source.package, checkout)
        git(checkout, "init", "--quiet")
        git(checkout, "add", "--all", "--force")
        return [_row(source, edit, commit, checkout, measured[edit.id]) for edit in EDITS if edit.repo == source.repo]


def _row(source: Source, edit: Edit, commit: str, checkout: Path, tests: dict[str, list[str]]) -> dict[str, Any]:
    bug, gold = _patches(checkout, edit)
    row: dict[str, Any] = {
        "instance_id": edit.id,
        "repo": source.repo,
        "base_commit": commit,
        "bug_patch": bug if edit.shape != "gold" else None,
        "gold_patch": gold if edit.shape in ("gold", "both") else None,
        "problem_statement": edit.problem,
        "FAIL_TO_PASS": json.dumps(tests["fail_to_pass"]),
        "PASS_TO_PASS": json.dumps(tests["pass_to_pass"]),
        "test_command": source.command if source.in_rows else None,
        "test_files": None,
        "test_patch": None,
        "image": IMAGE,
    }
    files = sorted({test.partition("::")[0] for test in tests["fail_to_pass"]})
    named: dict[str, dict[str, Any]] = {
        "files": {"FAIL_TO_PASS": None, "PASS_TO_PASS": None, "test_files": files},
        "command": {"FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]", "test_command": source.command},
        "patch": {"FAIL_TO_PASS": [f"{_HIDDEN_TEST}::test_keys_only"], "test_patch": _new_file(_HIDDEN_TEST, _HIDDEN)},
    }
    return row | named.get(edit.shape, {})


def _patches(checkout: Path, edit: Edit) -> tuple[str, str]:
    """The patch that introduces the bug, and the patch that fixes it."""
    file = checkout / edit.file
    text = file.read_text()
    assert text.count(edit.right) == 1, f"{edit.id}: {text.count(edit.right)} times in {edit.file}"
    file.write_text(text.replace(edit.right, edit.wrong))
    bug, gold = git(checkout, "diff"), git(checkout, "diff", "-R")
    file.write_text(text)
    return bug, gold


def _new_file(path: str, text: str) -> str:
    lines = text.splitlines()
    added = "".join(f"+{line}\n" for line in lines)
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n{added}"


def _cache() -> Path:
    default = Path(__file__).parents[2] / ".cache" / "tests"
    folder = Path(os.environ.get("DOCKYARD_TEST_CACHE") or default) / "c2bug"
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / ".gitignore").write_text("*\n")
    return folder


def _unpack(package: str, folder: Path) -> None:
    with tarfile.open(_sdist(package)) as archive:
        members = archive.getmembers()
        for member in members:
            member.name = member.name.partition("/")[2] or "."
        archive.extractall(folder, members, filter="data")


def _sdist(package: str) -> Path:
    """Fetched once."""
    kept = _cache() / f"{package}.tar.gz"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
            _pip("download", "--no-deps", "--no-binary=:all:", "--dest", scratch, package)
            next(Path(scratch).glob("*.tar.gz")).rename(kept)
    return kept


def _site() -> Path:
    """What the repositories' tests import, for the image's Python."""
    kept = _cache() / f"site-{_PYTHON}-{'-'.join(PACKAGES)}"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
            site = Path(scratch, "site")
            only_wheels = ["--only-binary=:all:", "--python-version", _PYTHON, "--no-compile"]
            _pip("install", "--target", str(site), *only_wheels, *PACKAGES)
            try:
                site.rename(kept)
            except OSError:  # another process was faster
                if not kept.exists():
                    raise
    return kept


def _pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr


def measure() -> dict[str, dict[str, list[str]]]:
    """Each bug's broken tests, and some that it leaves alone, by running all tests with and without it."""
    measured: dict[str, dict[str, list[str]]] = {}
    for source in SOURCES:
        with tempfile.TemporaryDirectory() as scratch:
            checkout = Path(scratch)
            _unpack(source.package, checkout)
            before = _passing(checkout, source.command)
            for edit in EDITS:
                if edit.repo == source.repo:
                    file = checkout / edit.file
                    text = file.read_text()
                    file.write_text(text.replace(edit.right, edit.wrong))
                    after = _passing(checkout, source.command)
                    file.write_text(text)
                    broken, kept = sorted(before - after), sorted(before & after)
                    step = max(1, len(kept) // _MOST_KEPT)
                    measured[edit.id] = {"fail_to_pass": broken, "pass_to_pass": kept[::step][:_MOST_KEPT]}
    return measured


def _passing(checkout: Path, command: str) -> set[str]:
    """By the log, as pytest or unittest write it."""
    shell = f"cp -r /from /code && cd /code && PYTEST_ADDOPTS=-vv {command} 2>&1; true"
    log = docker("run", "--rm", "--network", "none", "--volume", f"{checkout}:/from:ro", IMAGE, "bash", "-c", shell)
    return {*_pytests(log.splitlines()), *_unittests(log.splitlines())}


def _pytests(lines: Sequence[str]) -> set[str]:
    return {line.rpartition(" PASSED")[0] for line in lines if "::" in line and " PASSED" in line}


def _unittests(lines: Sequence[str]) -> set[str]:
    """The first line of a test's description may stand between its name and its result."""
    named = ((line if line.startswith("test_") else before) for before, line in pairwise(("", *lines)))
    results = zip(named, lines, strict=True)
    return {
        name.removesuffix(" ... ok") for name, line in results if name.startswith("test_") and line.endswith(" ... ok")
    }


if __name__ == "__main__":
    from docker_engine import use_engine

    use_engine()
    build_image()
    MEASURED.write_text(json.dumps(measure(), indent=1) + "\n")
