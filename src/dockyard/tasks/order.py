"""Whose turn it is: tasks, or groups of recorded ones, in an order of the seed's."""

import random
from collections.abc import Callable, Sequence


def due[T](
    items: Sequence[T], step: int, count: int, seed: int, *, kind_of: Callable[[T], str], passes: int | None = None
) -> list[T]:
    """What a step attempts: each once before any again, in an order of the seed's, the kinds taking turns.

    With `passes` the last step takes what is left of them, and those after it nothing.
    """
    end = (step + 1) * count if passes is None else min((step + 1) * count, passes * len(items))
    chosen: list[T] = []
    for position in range(step * count, end):
        epoch, index = divmod(position, len(items))
        chosen.append(_shuffled(items, random.Random(f"{seed}-{epoch}"), kind_of)[index])
    return chosen


def _shuffled[T](items: Sequence[T], rng: random.Random, kind_of: Callable[[T], str]) -> list[T]:
    by_kind: dict[str, list[T]] = {}
    for item in items:
        by_kind.setdefault(kind_of(item), []).append(item)
    for members in by_kind.values():
        rng.shuffle(members)
    rounds = max(len(members) for members in by_kind.values())
    return [members[turn] for turn in range(rounds) for members in by_kind.values() if turn < len(members)]
