"""Divide sequences into trees: rows that continue a common prefix, which is computed once for all of them.

The activations of a row are freed before the next row starts. So any number of rollouts can share their first prompt:
memory holds the prefix and one row at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dockyard.rl.pack import Example, PackedRow, divide, in_order, lay_out, pack, sizes
from dockyard.types import IntArray

_WORTH_A_PASS = 512
"""Tokens of a prefix. Fewer are faster to compute with every row than in a pass of their own."""
_DEPTH = 100
"""The largest number of nested branches to consider. There are more if each sequence begins with the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Rows that continue one prefix."""

    prefix: IntArray
    """The token ids that all rows begin with; empty for a single row."""
    rows: tuple[PackedRow, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The cheapest way to run some neighbouring examples."""

    cost: int
    """In tokens."""
    trees: list[tuple[int, int, int]]
    """Of each tree: its first example, one past its last, and the length of the prefix."""
    others: list[int]
    """Examples that are packed into rows without a prefix."""


def plant(examples: Sequence[Example], max_tokens: int) -> list[Tree]:
    """Divide examples into trees with rows of at most `max_tokens` tokens, longer only where `pack` allows it."""
    ordered = in_order(examples)
    lengths, shared = sizes(ordered)
    best = _best(lengths, shared, 0, len(ordered), max_tokens) if ordered else _Plan(0, [], [])
    trees: list[Tree] = []
    for first, last, prefix in best.trees:
        own, known = _without(lengths, shared, first, last, prefix)
        bounds = [(first + start, first + stop) for start, stop in divide(own, known, max_tokens)]
        rows = lay_out(ordered, bounds, prefix)
        trees.append(Tree(prefix=ordered[first].token_ids[:prefix], rows=tuple(rows)))
    alone = pack([ordered[index] for index in best.others], max_tokens)
    return trees + [Tree(prefix=np.zeros(0, dtype=np.int32), rows=(row,)) for row in alone]


def _best(lengths: list[int], shared: list[int], first: int, last: int, max_tokens: int, depth: int = 0) -> _Plan:
    """The cheapest of: rows without a prefix, one prefix for all, and a plan for each part that begins differently."""
    indices = list(range(first, last))
    num_rows, cost = _rows(lengths, shared, first, last, 0, max_tokens)
    plain = _Plan(cost, [], indices)
    if num_rows == 1:
        return plain
    least = min(shared[first + 1 : last])
    prefix = min(least, min(lengths[first:last]) - 1)  # at least one token of each is left
    plans = [plain]
    if prefix >= _WORTH_A_PASS:
        _, own = _rows(lengths, shared, first, last, prefix, max_tokens)
        plans.append(_Plan(prefix + _WORTH_A_PASS + own, [(first, last, prefix)], []))
    if depth == _DEPTH:
        return min(plans, key=lambda found: found.cost)
    bounds = [first, *(index for index in indices[1:] if shared[index] == least), last]
    parts = [_best(lengths, shared, *part, max_tokens, depth + 1) for part in pairwise(bounds)]
    plans.append(
        _Plan(
            sum(part.cost for part in parts),
            [tree for part in parts for tree in part.trees],
            [index for part in parts for index in part.others],
        )
    )
    return min(plans, key=lambda found: found.cost)  # the first, if there are several


def _rows(
    lengths: list[int], shared: list[int], first: int, last: int, prefix: int, max_tokens: int
) -> tuple[int, int]:
    """The number of rows without the prefix, and their number of tokens."""
    own, known = _without(lengths, shared, first, last, prefix)
    bounds = divide(own, known, max_tokens)
    return len(bounds), sum(own) - sum(known) + sum(known[start] for start, _ in bounds)


def _without(lengths: list[int], shared: list[int], first: int, last: int, prefix: int) -> tuple[list[int], list[int]]:
    """Lengths, and lengths shared with the example before, without the prefix."""
    known = [0, *(count - prefix for count in shared[first + 1 : last])]
    return [length - prefix for length in lengths[first:last]], known
