"""An order of tasks: prefer those that are solved about half of the time, because their rewards differ the most.

dockyard train run.toml --tasks.order order:near_half
"""

import random
from collections.abc import Sequence
from statistics import fmean

from dockyard.tasks.order import Attempted
from dockyard.types import Task


def near_half(tasks: Sequence[Task], history: Sequence[Attempted], count: int, rng: random.Random) -> Sequence[Task]:
    rewards: dict[str, list[float]] = {}
    for attempted in history:
        known = [reward for reward in attempted.rewards if reward is not None]
        rewards[attempted.task] = [*rewards.get(attempted.task, []), *known]

    def distance(task: Task) -> float:
        return abs(fmean(rewards[task.name]) - 0.5) if rewards.get(task.name) else 0.0  # new tasks come first

    ranked = sorted(rng.sample(tasks, len(tasks)), key=distance)
    return [ranked[place % len(ranked)] for place in range(count)]
