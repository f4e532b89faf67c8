"""Groups of rollouts as sequences to train on: which of them count, and what each of their tokens weighs."""

from collections.abc import Sequence

import numpy as np

from dockyard.config import GRPOConfig
from dockyard.rl.advantage import Scored, scored
from dockyard.rl.pack import Example
from dockyard.types import Group, Segment

_DEFAULT = GRPOConfig()


def examples_of(groups: Sequence[Group], config: GRPOConfig = _DEFAULT, *, with_idle: bool) -> list[Example]:
    """What to train on. All segments of a rollout share its advantage, and all its tokens weigh the same.

    Rollouts without advantage move nothing but the KL penalty, so they count and are left out unless `with_idle`.
    """
    counted = [item for group in groups for item in _counted(group, config)]
    num_tokens = sum(item.rollout.num_sampled for item in counted)
    examples: list[Example] = []
    for item in counted:
        rollout, advantage = item.rollout, item.advantage
        if rollout.num_sampled == 0 or (advantage == 0 and not with_idle):
            continue
        lengths = {"rollout": rollout.num_sampled, "constant": config.constant_length}
        divisor = num_tokens if config.aggregation == "token" else lengths[config.aggregation] * len(counted)
        weight = 1.0 / divisor
        examples += [_example(segment, advantage, weight) for segment in rollout.segments if segment.sampled.any()]
    return examples


def _counted(group: Group, config: GRPOConfig) -> list[Scored]:
    """The rollouts whose loss is taken, and which the mean is over. The others were still compared with."""
    items = scored(group, config)
    if (config.zero_variance == "exclude" or config.dynamic_sampling) and not any(item.advantage for item in items):
        return []
    if config.overlong == "mask":
        items = [item for item in items if not item.rollout.cut_short]
    return items


def _example(segment: Segment, advantage: float, weight: float) -> Example:
    targets = np.flatnonzero(segment.sampled).astype(np.int32)
    assert targets[0] > 0  # nothing comes before the first token that could have drawn it
    return Example(
        token_ids=segment.token_ids,
        targets=targets,
        old_logprobs=None if segment.logprobs is None else segment.logprobs[targets],
        advantage=advantage,
        weight=weight,
    )
