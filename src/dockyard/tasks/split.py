"""Select tasks, and split off held-out ones. The same seed gives the same split in any order, on any machine.

Duplicates stay on one side of the split. Each kind of task, and each repository, is held out in proportion.
"""

import difflib
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.durable import write_atomically
from dockyard.tasks.duplicates import duplicate_classes
from dockyard.tasks.folder import task_settings
from dockyard.types import Task


class Split(BaseModel):
    """Names of tasks, with what they were drawn by."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    heldout_share: float
    train: tuple[str, ...]
    heldout: tuple[str, ...]


def split_tasks(tasks: Sequence[Task], *, heldout_share: float, seed: int) -> Split:
    """Hold out about this share of the tasks: at least one if any, and never all."""
    if not 0 <= heldout_share < 1:
        hint = "a share of 0.1 holds out every tenth task"
        raise DockyardError(f"`heldout_share` is {heldout_share}, not a number from 0 and below 1", hint=hint)
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
    """As JSON, for `read_split`."""
    write_atomically(file, split.model_dump_json(indent=2).encode() + b"\n")


def read_split(file: Path) -> Split:
    """What `write_split` wrote."""
    hint = "begin another run, which draws its own"
    try:
        return Split.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DockyardError(f"`{file}` cannot be read: {error.strerror}", hint=hint) from error
    except ValidationError as error:
        raise DockyardError(f"`{file}` is no split of tasks: {error.errors()[0]['msg']}", hint=hint) from error


def _refuse_same_names(tasks: Sequence[Task]) -> None:
    twice = [name for name, count in Counter(task.name for task in tasks).items() if count > 1]
    if twice:
        names = ", ".join(f"`{name}`" for name in sorted(twice)[:5])
        raise DockyardError(f"more than one task is named {names}", hint="rename their folders")


def _draw(classes: list[list[Task]], share: float, seed: int) -> list[list[Task]]:
    """Every so-many-th of the classes, once they are sorted by stratum and, within, at random."""
    count = _count(len(classes), share)
    strata = {members[0].name: _stratum(members[0]) for members in classes}
    line = sorted(
        classes,
        key=lambda members: (_random(seed, strata[members[0].name]), _random(seed, f"task {members[0].name}")),
    )
    start = _random(seed, "start") % max(len(line), 1)
    # Whole numbers only, so that no machine rounds otherwise: exactly `count` places see the quotient rise.
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
        hint = "add tasks, or name held-out ones by `--tasks.heldout DIR`"
        raise DockyardError(f"{num_classes} different tasks cannot be split", hint=hint)
    return min(max(round(num_classes * share), 1), num_classes - 1)


def _stratum(task: Task) -> str:
    metadata = task_settings(task.path).get("metadata", {})
    return f"{task.kind}\n{metadata.get('repo', '')}"


def _random(seed: int, name: str) -> int:
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest())


_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Takes everything unless told otherwise."""

    repos: tuple[str, ...] = ()
    """As `owner/name`. Empty: any."""
    ids: tuple[str, ...] = ()
    """Of instances. Empty: any."""
    limit: int | None = None
    """At most so many. None: all."""
    seed: int | None = None
    """Of the order in which the limit takes them. None keeps the order they come in."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"the limit is {self.limit}, not a whole number from 1", hint="leave it out to take all")

    def known(self, there: Collection[str]) -> tuple[Self, tuple[str, ...]]:
        """The same without ids that are not there, and those; as it is where none of them is."""
        found = tuple(name for name in self.ids if name in there)
        return (replace(self, ids=found), tuple(set(self.ids) - set(found))) if found else (self, ())

    def apply[T](
        self, items: Sequence[T], *, id_of: Callable[[T], str], repo_of: Callable[[T], str], where: str
    ) -> list[T]:
        """The chosen ones. A repository or an id that `where` does not have is an error that names what is near."""
        self._check("repository", self.repos, {repo_of(item) for item in items}, where)
        self._check("id", self.ids, {id_of(item) for item in items}, where)
        chosen = [
            item
            for item in items
            if (not self.repos or repo_of(item) in self.repos) and (not self.ids or id_of(item) in self.ids)
        ]
        if not chosen:
            raise UsageError(f"nothing of `{where}` is chosen", hint="`--repo` and `--id` must hold together")
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
        hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(f'`{name}`' for name in shown)}{more}"
        names = ", ".join(f"`{name}`" for name in missing)
        raise UsageError(f"`{where}` has no {what} {names}", hint=hint)
