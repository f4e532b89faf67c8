"""Rows that begin with the same tokens, which are run once for all of them and kept until the last one is done.

What a row's tokens leave behind for the backward pass is gone before the next row begins. So the rollouts of a group,
or of a whole step, share their first prompt however many they are: there is never more at a time than one row and it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dockyard.rl.pack import Example, PackedRow, divide, in_order, lay_out, pack, sizes
from dockyard.types import IntArray

_WORTH_A_PASS = 512
"""Tokens. Fewer are run faster with every row than in a pass of their own."""
_DEPTH = 100
"""How many branchings above one another are looked at. There are more where each sequence begins the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Rows over one trunk."""

    trunk: IntArray
    """The token ids they all begin with. None, where there is one row that stands alone."""
    rows: tuple[PackedRow, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.trunk) + sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How some neighbouring examples are best run."""

    cost: int
    """In tokens."""
    trees: list[tuple[int, int, int]]
    """First, one past the last, and the tokens of their trunk."""
    others: list[int]
    """Which are to be packed with whatever else there is."""


def plant(examples: Sequence[Example], max_tokens: int) -> list[Tree]:
    """All examples in rows of at most `max_tokens` tokens (`pack` has the exception) over as few trunks as is best."""
    ordered = in_order(examples)
    lengths, shared = sizes(ordered)
    best = _best(lengths, shared, 0, len(ordered), max_tokens) if ordered else _Plan(0, [], [])
    trees: list[Tree] = []
    for first, last, trunk in best.trees:
        own, known = _without(lengths, shared, first, last, trunk)
        bounds = [(first + start, first + stop) for start, stop in divide(own, known, max_tokens)]
        rows = lay_out(ordered, bounds, trunk)
        trees.append(Tree(trunk=ordered[first].token_ids[:trunk], rows=tuple(rows)))
    alone = pack([ordered[index] for index in best.others], max_tokens)
    return trees + [Tree(trunk=np.zeros(0, dtype=np.int32), rows=(row,)) for row in alone]


def _best(lengths: list[int], shared: list[int], first: int, last: int, max_tokens: int, depth: int = 0) -> _Plan:
    """The cheapest of: rows without a trunk, one trunk for all, and each part by itself that begins otherwise."""
    indices = list(range(first, last))
    num_rows, cost = _rows(lengths, shared, first, last, 0, max_tokens)
    plain = _Plan(cost, [], indices)
    if num_rows == 1:
        return plain
    least = min(shared[first + 1 : last])
    trunk = min(least, min(lengths[first:last]) - 1)  # of each at least one token is left
    plans = [plain]
    if trunk >= _WORTH_A_PASS:
        _, own = _rows(lengths, shared, first, last, trunk, max_tokens)
        plans.append(_Plan(trunk + _WORTH_A_PASS + own, [(first, last, trunk)], []))
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


def _rows(lengths: list[int], shared: list[int], first: int, last: int, trunk: int, max_tokens: int) -> tuple[int, int]:
    """How many rows these make without their trunk, and of how many tokens in all."""
    own, known = _without(lengths, shared, first, last, trunk)
    bounds = divide(own, known, max_tokens)
    return len(bounds), sum(own) - sum(known) + sum(known[start] for start, _ in bounds)


def _without(lengths: list[int], shared: list[int], first: int, last: int, trunk: int) -> tuple[list[int], list[int]]:
    """Lengths, and beginnings in common with the one before, from the trunk's end on."""
    known = [0, *(count - trunk for count in shared[first + 1 : last])]
    return [length - trunk for length in lengths[first:last]], known
