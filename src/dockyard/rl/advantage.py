"""Group-relative advantages: each rollout is compared with the others of its task, not with a learned critic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dockyard.config import GRPOConfig
from dockyard.types import Group, Rollout

_EPSILON = 1e-6
_ALIKE = 1e-9
"""Rewards that differ by no more than this are equal up to rounding."""
_BUFFER_SHARE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A rollout with a reward, and its advantage over its group."""

    rollout: Rollout
    advantage: float


def scored(group: Group, config: GRPOConfig) -> list[Scored]:
    """The rollouts with a reward and their advantages; none if there are fewer than two to compare."""
    rollouts = [rollout for rollout in group.rollouts if rollout.reward is not None]
    if len(rollouts) < 2:
        return []
    rewards = [(rollout.reward or 0.0) - _overlong_penalty(rollout.num_sampled, config) for rollout in rollouts]
    advantages = group_advantages(rewards, config.advantage)
    return [Scored(rollout=rollout, advantage=value) for rollout, value in zip(rollouts, advantages, strict=True)]


def has_signal(group: Group, config: GRPOConfig) -> bool:
    """Whether any rollout of the group has an advantage."""
    return any(item.advantage for item in scored(group, config))


def group_advantages(rewards: Sequence[float], kind: Literal["std", "mean", "leave_one_out"] = "std") -> list[float]:
    """The reward of each rollout relative to the mean of its group.

    `std` divides by the sample standard deviation (ddof 1); `leave_one_out` compares with the mean of the others.
    In a group of one, and in one whose rewards are equal, every advantage is 0.
    """
    if len(rewards) < 2 or max(rewards) - min(rewards) <= _ALIKE:
        return [0.0] * len(rewards)
    values = np.array(rewards, dtype=np.float64)
    centred = values - values.mean()
    if kind == "std":
        centred = centred / (values.std(ddof=1) + _EPSILON)
    elif kind == "leave_one_out":
        centred = centred * len(values) / (len(values) - 1)
    return centred.tolist()


def _overlong_penalty(num_sampled: int, config: GRPOConfig) -> float:
    """DAPO's penalty: 0 up to the buffer, then rising linearly to 1 at `overlong_length`."""
    if config.overlong != "penalty" or config.overlong_length is None:
        return 0.0
    buffer = config.overlong_buffer or max(1, config.overlong_length // _BUFFER_SHARE)
    return min(1.0, max(0.0, (num_sampled - (config.overlong_length - buffer)) / buffer))
