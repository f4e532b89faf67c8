"""The allocator of the KV pool: which tokens of it are in use, and by which sequence. It does not need torch."""

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass

from dockyard.types import IntArray, common_prefix

_ALIGNMENT = 16
"""Regions start at multiples of it: with another alignment, products may differ in the last digit."""


def rounded_up(num_tokens: int) -> int:
    """Round up to whole units of a region."""
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
    """The tokens of a pool, parts of which are in use."""

    def __init__(self) -> None:
        self.size = 0
        self._holes: list[Region] = []

    @property
    def num_free(self) -> int:
        return sum(hole.size for hole in self._holes)

    def grow(self, size: int) -> None:
        """Grow the pool to this size."""
        added = Region(self.size, size)
        self.size = size
        self.give_back(added)

    def take(self, num_tokens: int) -> Region | None:
        """Allocate a region for `num_tokens` from the smallest gap that fits; None if there is none."""
        size = rounded_up(num_tokens)
        holes = [hole for hole in self._holes if hole.size >= size]
        if not holes:
            return None
        hole = min(holes, key=lambda hole: hole.size)
        return self._cut(hole, Region(hole.start, hole.start + size))

    def extend(self, region: Region, num_tokens: int) -> Region | None:
        """Extend a region in place if the tokens after it are free; None otherwise."""
        longer = Region(region.start, region.start + rounded_up(num_tokens))
        if longer.stop <= region.stop:
            return region
        for hole in self._holes:
            if hole.start == region.stop and hole.stop >= longer.stop:
                self._cut(hole, Region(hole.start, longer.stop))
                return longer
        return None

    def shrink(self, region: Region, num_tokens: int) -> Region:
        """Shrink a region to its beginning and free the rest."""
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
    """A sequence whose keys and values are at the beginning of a region."""

    ids: IntArray
    region: Region


class Finished:
    """Sequences that stay in the pool after their request, as a prefix cache; least recently used first."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Known] = OrderedDict()
        self.num_tokens = 0

    def __iter__(self):
        return iter(self._known.values())

    def add(self, known: Known) -> None:
        """Add a sequence as the most recently used."""
        self._known[known.region.start] = known
        self.num_tokens += known.region.size

    def touch(self, known: Known) -> None:
        """Mark a sequence as the most recently used."""
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
    """The cached prefix of a prompt: its first `length` tokens are those of `known`."""

    length: int
    known: Known

    @property
    def whole(self) -> bool:
        """Whether the whole cached sequence is used, as when a rollout continues with its next turn."""
        return self.length == len(self.known.ids)


def longest_beginning(ids: IntArray, sources: list[Known]) -> Beginning | None:
    """The source with the longest prefix of `ids`, but never all of it, because one token must be computed."""
    best = None
    for known in sources:
        length = common_prefix(known.ids, ids[:-1])
        if length > (best.length if best else 0):
            best = Beginning(length, known)
    return best
