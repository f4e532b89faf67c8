"""Which of many tasks to take: of these repositories, these ids, so many of them in an order of the seed's."""

import difflib
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

from dockyard.errors import UsageError

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
