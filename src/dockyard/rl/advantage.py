"""Group-relative advantages: each rollout is compared with the others of its task, not with a learned critic."""

import numpy as np

_EPSILON = 1e-6


def group_advantages(rewards: list[float]) -> list[float]:
    """How much better than its group each rollout did, in sample standard deviations (ddof 1).

    A group of one, or one in which all did equally well, teaches nothing: 0 for each.
    """
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    values = np.array(rewards, dtype=np.float64)
    centred = values - values.mean()
    return (centred / (values.std(ddof=1) + _EPSILON)).tolist()
