"""Group-relative advantages: each rollout is compared with the others of its task, not with a learned critic.

An advantage function takes the rewards of a group and its rollouts, in the same order, and returns one number for each.
`grpo.advantage` selects one of `ADVANTAGES` or names a user-defined function with the same signature.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from dockyard.config import GRPOConfig
from dockyard.errors import DockyardError
from dockyard.extension import failed_call, load_function
from dockyard.types import Group, Rollout

_EPSILON = 1e-6
_ALIKE = 1e-9
"""Rewards that differ by no more than this are equal up to rounding."""
_BUFFER_SHARE = 5

type AdvantageFunction = Callable[[Sequence[float], Sequence[Rollout]], Sequence[float]]


def std_advantage(rewards: Sequence[float], rollouts: Sequence[Rollout]) -> Sequence[float]:
    """(reward - group mean) / (sample standard deviation of the group + 1e-6), as in GRPO."""
    differences = _differences(rewards)
    if not differences.any():
        return differences.tolist()
    return (differences / (np.std(rewards, ddof=1) + _EPSILON)).tolist()


def mean_advantage(rewards: Sequence[float], rollouts: Sequence[Rollout]) -> Sequence[float]:
    """Reward - group mean, as in Dr. GRPO."""
    return _differences(rewards).tolist()


def leave_one_out_advantage(rewards: Sequence[float], rollouts: Sequence[Rollout]) -> Sequence[float]:
    """Reward - mean of the other rollouts, as in RLOO."""
    return (_differences(rewards) * len(rewards) / max(len(rewards) - 1, 1)).tolist()


ADVANTAGES: dict[str, AdvantageFunction] = {
    "std": std_advantage,
    "mean": mean_advantage,
    "leave_one_out": leave_one_out_advantage,
}
"""The built-in values of `grpo.advantage`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A rollout with a reward, and its advantage over its group."""

    rollout: Rollout
    advantage: float


def load_advantage(config: GRPOConfig) -> AdvantageFunction:
    """The function that `grpo.advantage` selects. A wrong reference or signature is a UsageError."""
    if config.advantage in ADVANTAGES:
        return ADVANTAGES[config.advantage]
    return load_function(config.advantage, "grpo.advantage", std_advantage)


def scored(group: Group, config: GRPOConfig) -> list[Scored]:
    """The rollouts with a reward and their advantages; empty if there are fewer than two to compare."""
    rollouts = [rollout for rollout in group.rollouts if rollout.reward is not None]
    if len(rollouts) < 2:
        return []
    rewards = [
        (rollout.training_reward or 0.0) - _overlong_penalty(rollout.num_sampled, config) for rollout in rollouts
    ]
    advantages = _advantages(rewards, rollouts, group.task, config)
    return [Scored(rollout=rollout, advantage=value) for rollout, value in zip(rollouts, advantages, strict=True)]


def has_signal(group: Group, config: GRPOConfig) -> bool:
    """Whether any rollout of the group has an advantage."""
    return any(item.advantage for item in scored(group, config))


def _advantages(rewards: list[float], rollouts: list[Rollout], task: str, config: GRPOConfig) -> Sequence[float]:
    function = load_advantage(config)
    if config.advantage in ADVANTAGES:
        return function(rewards, rollouts)
    try:
        result: Any = function(rewards, rollouts)
    except Exception as error:  # the function is the user's
        raise failed_call(error, config.advantage, "grpo.advantage", f"a group of task `{task}`") from error
    return _checked(result, len(rewards), task, config.advantage)


def _checked(result: Any, count: int, task: str, reference: str) -> list[float]:
    """The result of a user's function as numbers. Anything but `count` finite numbers is an error."""
    try:
        values = None if isinstance(result, str | Mapping | Set) else [as_number(value) for value in result]
    except (TypeError, ValueError):
        values = None
    if values is None or len(values) != count or not all(map(math.isfinite, values)):
        raise DockyardError(
            f"`grpo.advantage` is `{reference}`, which returned `{result!r}` for a group of task `{task}`",
            hint=f"it must return a list of {count} finite numbers, one for each rollout of the group",
        )
    return values


def as_number(value: Any) -> float:
    """The number that a user's function returned. Text raises TypeError, although `float` would read it."""
    if isinstance(value, str):
        raise TypeError
    return float(value)


def _differences(rewards: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Each reward minus their mean: exactly 0 where the rewards are equal up to rounding."""
    values = np.array(rewards, dtype=np.float64)
    if len(values) < 2 or values.max() - values.min() <= _ALIKE:
        return np.zeros(len(values))
    return values - values.mean()


def _overlong_penalty(num_sampled: int, config: GRPOConfig) -> float:
    """DAPO's penalty: 0 up to the buffer, then rising linearly to 1 at `overlong_length`."""
    if config.overlong != "penalty" or config.overlong_length is None:
        return 0.0
    buffer = config.overlong_buffer or max(1, config.overlong_length // _BUFFER_SHARE)
    return min(1.0, max(0.0, (num_sampled - (config.overlong_length - buffer)) / buffer))
