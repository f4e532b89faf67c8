"""Groups whose rewards differ: they alone say which way to go. Made until a step has enough of them, and counted."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from dockyard.config import GRPOConfig
from dockyard.rl.advantage import has_signal
from dockyard.rollout.order import Order
from dockyard.types import Group, Rollout

logger = logging.getLogger(__name__)


class Collector(Protocol):
    """Makes the rollouts of an order."""

    async def collect(self, order: Order, on_finish: Callable[[Rollout], None]) -> tuple[Group, ...]: ...


async def collect_signal(
    pool: Collector,
    order: Order,
    config: GRPOConfig,
    on_finish: Callable[[Rollout], None],
    on_further: Callable[[int], None],
) -> tuple[Group, ...]:
    """This order's groups, and further ones of its spare tasks until as many have a signal as were ordered.

    Those without one are returned too: they belong to the step's record. Which tasks follow is decided by rewards
    alone, so a resumed run reads back the same groups. `on_further` is told how many rollouts come on top.
    """
    groups = await pool.collect(order, on_finish)
    if not order.spare:
        return groups
    wanted = len(order.tasks)
    while order.spare and (missing := wanted - _num_with_signal(groups, config)):
        order = order.further(missing)
        on_further(len(order.tasks) * order.group_size)
        groups += await pool.collect(order, on_finish)
    found = _num_with_signal(groups, config)
    if found < wanted:
        message = "%s: %d of %d wanted groups have rewards that differ, after %d were made: it learns from those"
        logger.warning(message, order.phase, found, wanted, len(groups))
    return groups


def group_metrics(groups: Sequence[Group], config: GRPOConfig) -> dict[str, float]:
    """A step's groups in numbers."""
    return {
        "group/count": float(len(groups)),
        "group/zero_variance": float(len(groups) - _num_with_signal(groups, config)),
        "group/resampled": float(sum(group.spare for group in groups)),
    }


def _num_with_signal(groups: Sequence[Group], config: GRPOConfig) -> int:
    return sum(has_signal(group, config) for group in groups)
