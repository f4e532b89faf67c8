"""Which tokens of a pool are taken, and by what. No torch: only numbers."""

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass

from dockyard.types import IntArray, common_prefix

_ALIGNMENT = 16
"""Regions begin at multiples of it: where memory is aligned otherwise, products may differ in their last digit."""


def rounded_up(num_tokens: int) -> int:
    """To whole units of a region."""
    return -(-num_tokens // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """Adjacent tokens of a pool."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Regions:
    """A line of tokens, parts of which are taken."""

    def __init__(self) -> None:
        self.size = 0
        self._holes: list[Region] = []

    @property
    def num_free(self) -> int:
        return sum(hole.size for hole in self._holes)

    def grow(self, size: int) -> None:
        """Make the line this long."""
        added = Region(self.size, size)
        self.size = size
        self.give_back(added)

    def take(self, num_tokens: int) -> Region | None:
        """A region for so many tokens out of the smallest hole that has them, or None."""
        size = rounded_up(num_tokens)
        holes = [hole for hole in self._holes if hole.size >= size]
        if not holes:
            return None
        hole = min(holes, key=lambda hole: hole.size)
        return self._cut(hole, Region(hole.start, hole.start + size))

    def extend(self, region: Region, num_tokens: int) -> Region | None:
        """The same region with room for so many tokens, if what comes after it is free."""
        longer = Region(region.start, region.start + rounded_up(num_tokens))
        if longer.stop <= region.stop:
            return region
        for hole in self._holes:
            if hole.start == region.stop and hole.stop >= longer.stop:
                self._cut(hole, Region(hole.start, longer.stop))
                return longer
        return None

    def shrink(self, region: Region, num_tokens: int) -> Region:
        """The beginning of a region; the rest is free again."""
        shorter = Region(region.start, region.start + rounded_up(num_tokens))
        self.give_back(Region(shorter.stop, region.stop))
        return shorter

    def give_back(self, region: Region) -> None:
        if region.size <= 0:
            return
        start, stop = region.start, region.stop
        for hole in [hole for hole in self._holes if hole.stop == start or hole.start == stop]:
            self._holes.remove(hole)
            start, stop = min(start, hole.start), max(stop, hole.stop)
        insort(self._holes, Region(start, stop))

    def _cut(self, hole: Region, part: Region) -> Region:
        self._holes.remove(hole)
        if part.stop < hole.stop:
            insort(self._holes, Region(part.stop, hole.stop))
        return part


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A sequence whose keys and values lie at the beginning of a region."""

    ids: IntArray
    region: Region


class Finished:
    """Sequences that stay in the pool after their request, for prompts that begin with them; oldest first."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Known] = OrderedDict()
        self.num_tokens = 0

    def __iter__(self):
        return iter(self._known.values())

    def add(self, known: Known) -> None:
        """As the newest."""
        self._known[known.region.start] = known
        self.num_tokens += known.region.size

    def touch(self, known: Known) -> None:
        """It was of use, so it goes last."""
        self._known.move_to_end(known.region.start)

    def remove(self, known: Known) -> None:
        del self._known[known.region.start]
        self.num_tokens -= known.region.size

    def oldest(self, besides: Known | None = None) -> Known | None:
        return next((known for known in self if known is not besides), None)

    def clear(self) -> None:
        self._known.clear()
        self.num_tokens = 0


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is known of a prompt: its first `length` tokens are those of `known`."""

    length: int
    known: Known

    @property
    def whole(self) -> bool:
        """Whether all that is known is of use, as when a rollout comes back with its next turn."""
        return self.length == len(self.known.ids)


def longest_beginning(ids: IntArray, sources: list[Known]) -> Beginning | None:
    """The source with most of what `ids` begins with; never all of it, since one token must be run."""
    best = None
    for known in sources:
        length = common_prefix(known.ids, ids[:-1])
        if length > (best.length if best else 0):
            best = Beginning(length, known)
    return best
