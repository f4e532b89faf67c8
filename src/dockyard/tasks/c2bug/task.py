"""Write the files of one task. Users may replace four of them by templates with `{{ name }}` placeholders."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dockyard.errors import UsageError
from dockyard.tasks.c2bug.prepare import PreparedBug
from dockyard.tasks.c2bug.schema import Bug, RowError

TEMPLATE = Path(__file__).parent / "template"
FILES = ("Dockerfile", "instruction.md", "task.toml", "test.sh")
_PLACE = re.compile(r"\{\{ *(\w+) *\}\}")
_DELETE = "\x7f"


def read_template(folder: Path | None) -> dict[str, str]:
    """Return the template files' texts by name."""
    folder = folder or TEMPLATE
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"the template `{folder}` has no `{missing[0]}`",
            hint=f"it needs {', '.join(FILES)}; start with `cp -rL examples/harbor/c2bug_template DIR`",
        )
    return {name: (folder / name).read_text() for name in FILES}


def fill(template: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Fill in the placeholders, quoted as strings in TOML and as words in shell scripts."""
    return {name: _fill(name, text, values) for name, text in template.items()}


def _fill(name: str, text: str, values: Mapping[str, str]) -> str:
    quote = _quote_for(name)

    def value(place: re.Match[str]) -> str:
        if place[1] not in values:
            known = ", ".join(f"`{each}`" for each in values)
            raise UsageError(
                f"`{name}` of the template uses `{place[1]}`, which does not exist", hint=f"available are {known}"
            )
        return quote(values[place[1]])

    return _PLACE.sub(value, text)


def _quote_for(name: str) -> Callable[[str], str]:
    if name.endswith(".toml"):
        return lambda value: json.dumps(value, ensure_ascii=False).replace(_DELETE, "\\u007f")
    return shlex.quote if name.endswith(".sh") else str


DEFAULT_IMAGE = "python:3.12"
DEFAULT_INSTALL = "python -m pip install --editable . pytest"
"""Used if a row has neither an image nor install commands."""
DEFAULT_WORKDIR = "/testbed"
_GRADING = Path(__file__).parent / "grading"
_SOLVE = "#!/bin/bash\ncd {workdir} && git apply --whitespace=nowarn /solution/gold.patch\n"
_TITLE_LENGTH = 100
_PLAIN = re.compile(r"[\w./:@-]+")


def task_name(instance_id: str) -> str:
    """Return the instance's id without characters that a folder name cannot have."""
    return re.sub(r"[^\w.-]+", "-", instance_id, flags=re.ASCII).strip(".-")


def task_files(
    bug: Bug, prepared: PreparedBug, repository: Path, template: Mapping[str, str], image: str | None
) -> dict[str, str | bytes | Path]:
    """Return files by path in the task's folder. `repository` is the archive of the code before the bug."""
    workdir = _plain(bug.workdir or DEFAULT_WORKDIR, "workdir")
    values = {
        "task": f"c2bug/{task_name(bug.instance_id)}",
        "title": _title(bug.problem_statement),
        "instance_id": bug.instance_id,
        "repo": bug.repo,
        "base_commit": prepared.commit,
        "problem_statement": bug.problem_statement.strip(),
        "image": _plain(image or bug.image or DEFAULT_IMAGE, "image"),
        "workdir": workdir,
    }
    filled = fill(template, values)
    return {
        "task.toml": filled["task.toml"],
        "instruction.md": filled["instruction.md"],
        "environment/Dockerfile": filled["Dockerfile"],
        "environment/repository.tar.gz": repository,
        "environment/install.sh": f"{bug.install or ('' if image or bug.image else DEFAULT_INSTALL)}\n",
        "environment/bug.patch": _bytes(prepared.bug_patch),
        "environment/bug.sh": _GRADING / "bug.sh",
        "solution/solve.sh": _SOLVE.format(workdir=workdir),
        "solution/gold.patch": _bytes(prepared.gold_patch),
        "tests/test.sh": filled["test.sh"],
        **_tests(bug, prepared),
    }


def _tests(bug: Bug, prepared: PreparedBug) -> dict[str, str | bytes | Path]:
    must_pass = list(dict.fromkeys((*bug.fail_to_pass, *bug.pass_to_pass)))
    named = (
        {"tests/tests.json": json.dumps(must_pass, indent=1)} if must_pass else {}
    )  # otherwise the exit status decides
    return {
        **named,
        "tests/run.sh": f"{'' if must_pass else 'set -eo pipefail\n'}{prepared.command}\n",
        "tests/files.tar.gz": prepared.tests,
        "tests/replaced.txt": _lines(prepared.replaced),
        "tests/kept.txt": _lines(prepared.kept),
        "tests/clean.py": _GRADING / "clean.py",
        "tests/grade.py": _GRADING / "grade.py",
        "tests/plugin/dockyard_report.py": _GRADING / "dockyard_report.py",
    }


def _plain(value: str, column: str) -> str:
    """Check that the value can be used in a Dockerfile."""
    if not _PLAIN.fullmatch(value):
        raise RowError(f"its `{column}` is `{value}`, which cannot be used in a Dockerfile")
    return value


def _title(statement: str) -> str:
    return statement.strip().splitlines()[0][:_TITLE_LENGTH]


def _lines(words: Iterable[str]) -> str:
    return "".join(f"{word}\n" for word in words)


def _bytes(patch: str) -> bytes:
    """Return the bytes that git printed."""
    return patch.encode(errors="surrogateescape")
