"""A row of SWE-bench, checked."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from dockyard.tasks.folder import LONGEST_NAME
from dockyard.tasks.rows import Row, read_list
from dockyard.tasks.swebench.harness import Harness
from dockyard.tasks.swebench.script import eval_script

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-zA-Z][\w./-]*")
_IMAGE = re.compile(r"[a-z0-9][\w./:@-]*")


class UnusableRowError(Exception):
    """The row cannot become a task. Its text is the reason, as it follows the row's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What SWE-bench knows of one issue."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    image: str
    grading: dict[str, Any]
    """The row as SWE-bench's `make_test_spec` takes it, without the solution."""


def public_image(instance_id: str) -> str:
    """Where SWE-bench publishes the image of an instance; `__` may not stand in a name there."""
    return f"swebench/sweb.eval.x86_64.{instance_id.lower().replace('__', '_1776_')}:latest"


def read_instance(row: Row, names: Mapping[str, str], harness: Harness) -> Instance:
    """The row's values under our names. The first thing that is wrong with it is the reason it is not used."""
    cells = _Cells(row, names)
    instance_id = cells.word("instance_id", _NAME)
    if len(instance_id) > LONGEST_NAME:
        raise UnusableRowError(f"has an `{names['instance_id']}` of more than {LONGEST_NAME} characters")
    repo = cells.word("repo", _REPO)
    base_commit = cells.word("base_commit", _COMMIT)
    image = cells.word("image", _IMAGE) if cells.has("image") else public_image(instance_id)
    if _assets(cells.get("image_assets")):
        raise UnusableRowError(f"needs files that no patch can carry (`{names['image_assets']}`)")
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
    """A row's values by our names; what is wrong with one is said by theirs."""

    row: Row
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
            raise UnusableRowError(f"has `{value}` as `{self.names[name]}`, which is no {name}")
        return value

    def one_of(self, name: str, known: frozenset[str]) -> str:
        value = self.text(name)
        if value not in known:
            near = difflib.get_close_matches(value, sorted(known), 1)
            also = f"; did you mean `{near[0]}`?" if near else f"; there are {', '.join(sorted(known))}"
            raise UnusableRowError(f"names the {name} `{value}`, which `swebench` does not have{also}")
        return value

    def tests(self, name: str) -> list[str]:
        """A list, or one in a string as in SWE-bench's own files."""
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
        raise UnusableRowError(f"has an empty `{cells.names[name]}`: nothing would tell whether it is resolved")
    return tests


def _eval_type(cells: _Cells, repo: str, harness: Harness) -> str:
    """By SWE-bench's own list of repositories where the row does not say."""
    if cells.has("eval_type"):
        return cells.one_of("eval_type", frozenset(harness.eval_types))
    return "fail_only" if repo in harness.fail_only_repos else "pass_and_fail"


def _script(cells: _Cells, base_commit: str, harness: Harness) -> str:
    if cells.has("eval_script"):
        script = cells.text("eval_script")
        for marker in harness.markers:
            if marker not in script:
                raise UnusableRowError(f"has a `{cells.names['eval_script']}` that never says `{marker}`")
        return script
    if not cells.has("test_cmd"):
        wanted = " or ".join(f"`{cells.names[name]}`" for name in ("eval_script", "test_cmd") if name in cells.names)
        raise UnusableRowError(f"has no {wanted}: how its tests are run is not known")
    return eval_script(
        base_commit=base_commit,
        test_patch=cells.text("test_patch"),
        test_cmd=cells.text("test_cmd"),
        markers=harness.markers,
    )


def _assets(value: Any) -> bool:
    """A dict of lists, or its JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return bool(value.strip())
    return isinstance(value, dict) and any(cast("dict[str, Any]", value).values())
