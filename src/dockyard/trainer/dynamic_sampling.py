"""Dynamic sampling: make groups until a step has enough whose rewards differ. Only those have a policy gradient."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from dockyard.config import GRPOConfig
from dockyard.rl.advantage import has_signal
from dockyard.rollout.plan import RolloutPlan
from dockyard.types import Group, Rollout

logger = logging.getLogger(__name__)


class Collector(Protocol):
    """Makes the rollouts of a plan. `RolloutPool` does."""

    async def collect(self, plan: RolloutPlan, on_finish: Callable[[Rollout], None]) -> tuple[Group, ...]: ...


async def collect_signal(
    pool: Collector,
    plan: RolloutPlan,
    config: GRPOConfig,
    on_finish: Callable[[Rollout], None],
    on_further: Callable[[int], None],
) -> tuple[Group, ...]:
    """Collect this plan's groups, and groups of its spare tasks until as many have a signal as the plan has tasks.

    Groups without a signal are returned as well, for the step's record. Rewards alone decide which tasks follow, so a
    resumed run reads the same groups. `on_further` is called with the number of additional rollouts.
    """
    groups = await pool.collect(plan, on_finish)
    if not plan.spare:
        return groups
    wanted = len(plan.tasks)
    while plan.spare and (missing := wanted - _num_with_signal(groups, config)):
        plan = plan.further(missing)
        on_further(len(plan.tasks) * plan.group_size)
        groups += await pool.collect(plan, on_finish)
    found = _num_with_signal(groups, config)
    if found < wanted:
        message = "%s: %d of %d wanted groups have rewards that differ, after %d were made; the update uses those"
        logger.warning(message, plan.phase, found, wanted, len(groups))
    return groups


def group_metrics(groups: Sequence[Group], config: GRPOConfig) -> dict[str, float]:
    """The metrics of a step's groups."""
    return {
        "group/count": float(len(groups)),
        "group/zero_variance": float(len(groups) - _num_with_signal(groups, config)),
        "group/resampled": float(sum(group.spare for group in groups)),
    }


def _num_with_signal(groups: Sequence[Group], config: GRPOConfig) -> int:
    return sum(has_signal(group, config) for group in groups)
