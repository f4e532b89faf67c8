"""Compare each rollout with a quantile of its group instead of the mean, which a few extreme rewards can move far.

`--grpo.advantage examples.extend.advantage:advantage` from the root of the repository.
"""

from collections.abc import Sequence

import numpy as np

from dockyard import Rollout

QUANTILE = 0.4  # lower: more rollouts are reinforced; higher: more are suppressed


def advantage(rewards: Sequence[float], rollouts: Sequence[Rollout]) -> Sequence[float]:
    spread = float(np.std(rewards))
    if spread == 0:
        return [0.0] * len(rewards)
    baseline = float(np.quantile(rewards, QUANTILE))
    return [(reward - baseline) / spread for reward in rewards]
