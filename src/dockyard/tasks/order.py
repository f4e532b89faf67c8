"""The order of tasks, or of recorded groups, which the seed determines."""

import random
from collections.abc import Callable, Sequence
from math import ceil

from dockyard.config import RunConfig


def num_steps(num_items: int, count: int, passes: int) -> int:
    """Return the number of steps of this many passes. No step crosses the end of a pass."""
    return passes * ceil(num_items / count)


def with_steps(config: RunConfig, num_items: int) -> RunConfig:
    """Set `steps` from the number of passes, if the settings count passes."""
    if not config.counts_passes:
        return config
    steps = num_steps(num_items, config.grpo.tasks_per_step, config.tasks.passes or 1)
    return config.model_copy(update={"steps": steps})


def due[T](
    items: Sequence[T], step: int, count: int, seed: int, *, kind_of: Callable[[T], str], by_pass: bool = False
) -> list[T]:
    """Return the items of a step. Each occurs once per pass, in an order set by the seed, with alternating kinds.

    With `by_pass` the last step of a pass takes the remaining items, instead of continuing with the next pass.
    """
    if by_pass:
        epoch, place = divmod(step, num_steps(len(items), count, 1))
        return _shuffled(items, seed, epoch, kind_of)[place * count : (place + 1) * count]
    places = [divmod(position, len(items)) for position in range(step * count, (step + 1) * count)]
    return [_shuffled(items, seed, epoch, kind_of)[index] for epoch, index in places]


def spare[T](
    items: Sequence[T], step: int, count: int, seed: int, *, kind_of: Callable[[T], str], taken: Sequence[T]
) -> list[T]:
    """Return replacements for groups without a training signal, first those that the step has not `taken`."""
    drawn: list[T] = []
    for epoch in range(ceil(count / len(items))):
        drawn += sorted(_shuffled(items, f"{seed}-spare-{step}", epoch, kind_of), key=lambda item: item in taken)
    return drawn[:count]


def _shuffled[T](items: Sequence[T], seed: int | str, epoch: int, kind_of: Callable[[T], str]) -> list[T]:
    rng = random.Random(f"{seed}-{epoch}")
    by_kind: dict[str, list[T]] = {}
    for item in items:
        by_kind.setdefault(kind_of(item), []).append(item)
    for members in by_kind.values():
        rng.shuffle(members)
    rounds = max(len(members) for members in by_kind.values())
    return [members[turn] for turn in range(rounds) for members in by_kind.values() if turn < len(members)]
