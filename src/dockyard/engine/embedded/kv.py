"""The KV pool: keys and values of requests being decoded, and of finished ones as a prefix cache.

Every layer has a pool of tokens. Each sequence owns a region and fills it from the left. `Regions` allocates them,
`Finished` is the prefix cache, and `KVPool` has the tensors. All of it belongs to one version of the weights; the
engine clears it when new weights arrive.
"""

import math
import os
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dockyard.config import EngineConfig
from dockyard.types import IntArray, common_prefix

_REGION_TOKENS = 16
"""Regions start at multiples of it: with another alignment, products may differ in the last digit."""


def rounded_up(num_tokens: int) -> int:
    """Round up to whole units of a region."""
    return -(-num_tokens // _REGION_TOKENS) * _REGION_TOKENS


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

    def __iter__(self) -> Iterator[Known]:
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


SCRATCH = Region(0, 16)
"""A region without an owner, for the unused rows of a batch."""
_FIRST_TOKENS = 1024
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one token's keys and values in one layer."""

    num_layers: int
    num_heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of a pool in tokens."""

    first: int
    """At the first request."""
    most: int
    finished: int
    """The most tokens of finished sequences that are kept."""

    @property
    def longest(self) -> int:
        """The longest sequence that fits if it has the pool to itself."""
        return max(0, self.most - SCRATCH.size)


def pool_size(shape: KVShape, config: EngineConfig) -> PoolSize:
    """The size of a pool. It starts large, because growing copies it and invalidates CUDA graphs."""
    most_bytes = _automatic_bytes(shape.device) if config.kv_cache_gb is None else int(config.kv_cache_gb * 2**30)
    most = most_bytes // shape.token_bytes // SCRATCH.size * SCRATCH.size
    first = min(config.max_batch * _FIRST_TOKENS, most // 4)
    finished = 0 if config.deterministic else config.prefix_cache_mb * 2**20 // shape.token_bytes
    return PoolSize(first=min(rounded_up(first), most), most=most, finished=finished)


def _automatic_bytes(device: torch.device) -> int:
    """Half of the free memory of a GPU, or half of a machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class KVPool:
    """Allocates regions. It grows up to its limit, then evicts finished sequences."""

    def __init__(self, shape: KVShape, size: PoolSize) -> None:
        self.shape = shape
        self._size = size
        self.layers: list[Tensor] = [self._empty(0) for _ in range(shape.num_layers)]
        """The tensor of each layer: `[keys and values, tokens, heads, dim]`."""
        self.num_moves = 0
        """How often the tensors were reallocated, which invalidates recorded addresses."""
        self._regions = Regions()
        self._finished = Finished()
        self._begin()

    @property
    def finished(self) -> Iterable[Known]:
        return self._finished

    @property
    def num_tokens(self) -> int:
        """The current size."""
        return self._regions.size

    @property
    def num_free(self) -> int:
        return self._regions.num_free

    def take(self, num_tokens: int, *, besides: Known | None = None) -> Region | None:
        """Allocate a region, evicting finished sequences other than `besides` if necessary; None if it does not fit."""
        while (region := self._regions.take(num_tokens)) is None:
            if not self._grow(rounded_up(num_tokens)) and not self._forget_oldest(besides):
                return None
        return region

    def resize(self, region: Region, used: int, num_tokens: int) -> Region | None:
        """Extend or move a region whose first `used` tokens are in use; None if that fails, and it is unchanged."""
        if (longer := self._regions.extend(region, num_tokens)) is not None:
            return longer
        if (longer := self.take(num_tokens)) is None:
            return None
        self.copy(region, longer, used)
        self.give_back(region)
        return longer

    def copy(self, source: Region, target: Region, num_tokens: int) -> None:
        """Copy the first tokens of one region to the beginning of another."""
        for layer in self.layers:
            known = layer[:, source.start : source.start + num_tokens]
            layer[:, target.start : target.start + num_tokens] = known

    def give_back(self, region: Region) -> None:
        self._regions.give_back(region)

    def keep(self, ids: IntArray, region: Region) -> None:
        """Keep a sequence whose request is done, for prompts that begin with it."""
        if len(ids) == 0 or self._size.finished < rounded_up(len(ids)):
            self.give_back(region)
            return
        self._finished.add(Known(ids, self._regions.shrink(region, len(ids))))
        while self._finished.num_tokens > self._size.finished:
            self._forget_oldest(None)

    def touch(self, known: Known) -> None:
        """Mark a finished sequence as recently used."""
        self._finished.touch(known)

    def withdraw(self, known: Known) -> None:
        """Give the region of a finished sequence to the caller, who continues it."""
        self._finished.remove(known)

    def clear(self) -> None:
        """Free everything, including regions in use."""
        self._finished.clear()
        self._regions = Regions()
        self._begin()

    def _begin(self) -> None:
        size = min(layer.shape[1] for layer in self.layers)
        self._regions.grow(size)
        if size:
            self._regions.take(SCRATCH.size)

    def _grow(self, num_tokens: int) -> bool:
        """Grow the pool, by a gap of this size if the limit allows it. Returns False if it cannot grow."""
        old = self._regions.size
        size = min(max(2 * old, (old or SCRATCH.size) + num_tokens, self._size.first), self._size.most)
        if size <= old:
            return False
        try:
            for index, layer in enumerate(self.layers):
                self.layers[index] = self._empty(size)
                self.layers[index][:, :old] = layer[:, :old]
        except torch.OutOfMemoryError:  # layers that did grow are larger than needed, which is harmless
            return False
        finally:
            self.num_moves += 1
        self._regions.grow(size)
        if old == 0:
            self._regions.take(SCRATCH.size)
        return True

    def _empty(self, num_tokens: int) -> Tensor:
        """Zeros: tokens that are not written yet may be multiplied by 0, and must not be infinite."""
        size = (2, num_tokens, self.shape.num_heads, self.shape.head_dim)
        if num_tokens and self.shape.device.type == "cpu":
            return _untouched_zeros(math.prod(size) * self.shape.dtype.itemsize).view(self.shape.dtype).view(size)
        return torch.zeros(size, device=self.shape.device, dtype=self.shape.dtype)

    def _forget_oldest(self, besides: Known | None) -> bool:
        if (known := self._finished.oldest(besides)) is None:
            return False
        self._finished.remove(known)
        self.give_back(known.region)
        return True


def _untouched_zeros(num_bytes: int) -> Tensor:
    """Numpy's zeros, unlike torch's, take no memory until they are written to. Aligned as torch's are.

    Where memory is aligned otherwise, products may differ in their last digit from those of another run.
    """
    spare = np.zeros(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -spare.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(spare[start : start + num_bytes])
