"""Select tasks, and split off held-out ones. The same seed gives the same split in any order, on any machine.

Duplicates stay on one side of the split. Each kind of task, and each repository, is held out in proportion.
"""

import difflib
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.durable import write_atomically
from dockyard.tasks.duplicates import duplicate_classes
from dockyard.tasks.folder import task_settings
from dockyard.types import Task

logger = logging.getLogger(__name__)

_INSTANCE = re.compile(r"(?P<owner>.+?)__(?P<name>.+)-\d+")
"""SWE-bench's names, such as `django__django-11099`."""


class Split(BaseModel):
    """Names of training and held-out tasks, with the parameters of the draw."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    heldout_share: float
    train: tuple[str, ...]
    heldout: tuple[str, ...]


def split_tasks(tasks: Sequence[Task], *, heldout_share: float, seed: int) -> Split:
    """Hold out about this share of the tasks: at least one if the share is not 0, and never all."""
    if not 0 <= heldout_share < 1:
        hint = "a share of 0.1 holds out every tenth task"
        raise DockyardError(f"`heldout_share` is {heldout_share}, which must be at least 0 and below 1", hint=hint)
    _refuse_same_names(tasks)
    classes = duplicate_classes(sorted(tasks, key=lambda task: task.name))
    drawn = {task.name for members in _draw(classes, heldout_share, seed) for task in members}
    names = sorted(task.name for task in tasks)
    return Split(
        seed=seed,
        heldout_share=heldout_share,
        train=tuple(name for name in names if name not in drawn),
        heldout=tuple(name for name in names if name in drawn),
    )


def write_split(file: Path, split: Split) -> None:
    """Write the split as JSON."""
    write_atomically(file, split.model_dump_json(indent=2).encode() + b"\n")


def read_split(file: Path) -> Split:
    """Read a split that `write_split` wrote."""
    hint = "start another run, which draws a new split"
    try:
        return Split.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DockyardError(f"`{file}` cannot be read: {error.strerror}", hint=hint) from error
    except ValidationError as error:
        raise DockyardError(f"`{file}` is not a split of tasks: {error.errors()[0]['msg']}", hint=hint) from error


def _refuse_same_names(tasks: Sequence[Task]) -> None:
    twice = [name for name, count in Counter(task.name for task in tasks).items() if count > 1]
    if twice:
        names = ", ".join(f"`{name}`" for name in sorted(twice)[:5])
        raise DockyardError(f"more than one task is named {names}", hint="rename their folders")


def _draw(classes: list[list[Task]], share: float, seed: int) -> list[list[Task]]:
    """Sort the classes by stratum, at random within each, and take classes at equal distances."""
    count = _count(len(classes), share)
    strata = {members[0].name: _stratum(members[0]) for members in classes}
    line = sorted(
        classes,
        key=lambda members: (_random(seed, strata[members[0].name]), _random(seed, f"task {members[0].name}")),
    )
    start = _random(seed, "start") % max(len(line), 1)
    # Integers only, so that rounding cannot differ between machines: the quotient increases at exactly `count` places.
    places = [start + index * count for index in range(len(line))]
    return [
        members
        for place, members in zip(places, line, strict=True)
        if (place + count) // len(line) > place // len(line)
    ]


def _count(num_classes: int, share: float) -> int:
    if share == 0:
        return 0
    if num_classes < 2:
        hint = "add tasks, or set `--tasks.heldout DIR`"
        raise DockyardError(f"{num_classes} different tasks cannot be split", hint=hint)
    return min(max(round(num_classes * share), 1), num_classes - 1)


def _stratum(task: Task) -> str:
    return f"{task.kind}\n{_metadata(task).get('repo', '')}"


def _random(seed: int, name: str) -> int:
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest())


_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which tasks or rows to use. The default selects all."""

    repos: tuple[str, ...] = ()
    """Repositories as `owner/name`. Empty: any."""
    ids: tuple[str, ...] = ()
    """Instance ids. Empty: any."""
    limit: int | None = None
    """Maximum number. None: all."""
    seed: int | None = None
    """Seed of the order to which the limit is applied. None: the original order."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"the limit is {self.limit}; it must be at least 1", hint="remove it to use all")

    def known(self, there: Collection[str]) -> tuple[Self, tuple[str, ...]]:
        """Return a selection without the missing ids, and these ids. If all are missing, the selection is unchanged."""
        found = tuple(name for name in self.ids if name in there)
        return (replace(self, ids=found), tuple(set(self.ids) - set(found))) if found else (self, ())

    def apply[T](
        self, items: Sequence[T], *, id_of: Callable[[T], str], repo_of: Callable[[T], str], where: str
    ) -> list[T]:
        """Return the selected items. A repository or id that `where` lacks is an error that suggests a similar name."""
        self._check("repository", self.repos, {repo_of(item) for item in items}, where)
        self._check("id", self.ids, {id_of(item) for item in items}, where)
        chosen = [
            item
            for item in items
            if (not self.repos or repo_of(item) in self.repos) and (not self.ids or id_of(item) in self.ids)
        ]
        if not chosen:
            raise UsageError(f"nothing in `{where}` is selected", hint="no item matches both `--repo` and `--id`")
        if self.seed is not None:
            random.Random(self.seed).shuffle(chosen)
        return chosen[: self.limit]

    def _check(self, what: str, wanted: Sequence[str], there: set[str], where: str) -> None:
        missing = [name for name in wanted if name not in there]
        if not missing:
            return
        near = [match for name in missing for match in difflib.get_close_matches(name, there, 1)]
        shown = sorted(there)[:_SHOWN]
        more = f" and {len(there) - len(shown)} more" if len(there) > len(shown) else ""
        hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(f'`{name}`' for name in shown)}{more}"
        names = ", ".join(f"`{name}`" for name in missing)
        raise UsageError(f"`{where}` has no {what} {names}", hint=hint)


def select_tasks(tasks: list[Task], selection: Selection, where: str) -> list[Task]:
    """Return the selected tasks, by repository and instance id in `task.toml`, or else by name."""
    about = {task.path: _metadata(task) for task in tasks}

    def id_of(task: Task) -> str:
        return str(about[task.path].get("instance_id") or task.name)

    def repo_of(task: Task) -> str:
        return str(about[task.path].get("repo") or _repo_in(task.name))

    known, missing = selection.known({id_of(task) for task in tasks})
    for name in missing:
        logger.warning("`%s` has no id `%s`", where, name)
    return known.apply(tasks, id_of=id_of, repo_of=repo_of, where=where)


def _metadata(task: Task) -> dict[str, Any]:
    return task_settings(task.path).get("metadata", {})


def _repo_in(name: str) -> str:
    match = _INSTANCE.fullmatch(name)
    return f"{match['owner']}/{match['name']}" if match else ""
