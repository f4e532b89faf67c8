"""The files of one task."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dockyard.tasks.c2bug.prepare import Prepared
from dockyard.tasks.c2bug.schema import Bug, RowError
from dockyard.tasks.c2bug.template import fill

DEFAULT_IMAGE = "python:3.12"
DEFAULT_INSTALL = "python -m pip install --editable . pytest"
"""Where a row names neither an image nor commands."""
DEFAULT_WORKDIR = "/testbed"
_GRADING = Path(__file__).parent / "grading"
_SOLVE = "#!/bin/bash\ncd {workdir} && git apply --whitespace=nowarn /solution/gold.patch\n"
_TITLE_LENGTH = 100
_PLAIN = re.compile(r"[\w./:@-]+")


def task_name(instance_id: str) -> str:
    """The instance's id, as far as it can name a folder."""
    return re.sub(r"[^\w.-]+", "-", instance_id, flags=re.ASCII).strip(".-")


def task_files(
    bug: Bug, prepared: Prepared, repository: Path, template: Mapping[str, str], image: str | None
) -> dict[str, str | bytes | Path]:
    """By their path in the task's folder. `repository` is the archive of the code before the bug."""
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


def _tests(bug: Bug, prepared: Prepared) -> dict[str, str | bytes | Path]:
    must_pass = list(dict.fromkeys((*bug.fail_to_pass, *bug.pass_to_pass)))
    named = {"tests/tests.json": json.dumps(must_pass, indent=1)} if must_pass else {}  # else the exit status counts
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
    """It stands in a Dockerfile."""
    if not _PLAIN.fullmatch(value):
        raise RowError(f"its `{column}` is `{value}`, which no Dockerfile can name")
    return value


def _title(statement: str) -> str:
    return statement.strip().splitlines()[0][:_TITLE_LENGTH]


def _lines(words: Iterable[str]) -> str:
    return "".join(f"{word}\n" for word in words)


def _bytes(patch: str) -> bytes:
    """As git gave it."""
    return patch.encode(errors="surrogateescape")
