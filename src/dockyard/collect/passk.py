"""pass@k and mean reward with confidence intervals that hold for few tasks too. Pure functions.

A score is a mean over tasks: of 1 - C(n-c, k) / C(n, k) for pass@k, where c of a task's n rollouts passed (unbiased for
any n >= k), or of the task's mean reward. Rollouts of one task resemble each other, so tasks are what was sampled, and
the interval says what other tasks of the same sort would give. It is the exact binomial one (Clopper-Pearson) for as
many independent draws as the spread between tasks shows the data to be worth (Korn and Graubard's effective sample
size): never fewer than there are tasks, never more than there are rollouts, and fewer where a spread was estimated from
few tasks. So with one rollout a task it is the exact interval, and where every task failed, or passed, it is the exact
interval for that many tasks and not a point: 0 of 3 tasks means "up to 71 %".
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from dockyard.collect.beta import beta_quantile, t_quantile
from dockyard.types import Rollout

PASS_REWARD = 1.0
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A mean over tasks."""

    mean: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the rollouts of some tasks came to."""

    reward: Score
    passes: dict[int, Score]
    """By k."""


def score_rollouts(rollouts: Iterable[Rollout], kind: str | None = None) -> Scores | None:
    """The scores of the tasks of one kind, or of all. Rollouts that were lost count nowhere."""
    by_task: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None and kind in (None, rollout.kind):
            by_task.setdefault(rollout.task, []).append(rollout.reward)
    return score_tasks(list(by_task.values()))


def score_tasks(rewards: Sequence[Sequence[float]]) -> Scores | None:
    """The scores of tasks, each given as the rewards of its rollouts. None when nobody has a reward."""
    attempted = [task for task in rewards if task]
    if not attempted:
        return None
    most = max(map(len, attempted))
    passes = {k: _pass_score(attempted, k) for k in powers_up_to(most)}
    return Scores(reward=_reward_score(attempted), passes=passes)


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, ... as far as `most`."""
    return [2**exponent for exponent in range(most.bit_length())]


def pass_at_k(num_rollouts: int, num_passed: int, k: int) -> float:
    """The probability that k rollouts drawn from these without putting any back hold one that passed."""
    if not 1 <= k <= num_rollouts:
        raise ValueError(f"pass@{k} needs at least {k} rollouts, and there are {num_rollouts}")
    return 1 - math.comb(num_rollouts - num_passed, k) / math.comb(num_rollouts, k)


def _pass_score(rewards: Sequence[Sequence[float]], k: int) -> Score:
    """Over the tasks with rollouts enough."""
    tasks = [task for task in rewards if len(task) >= k]
    values = [pass_at_k(len(task), sum(reward >= PASS_REWARD for reward in task), k) for task in tasks]
    return interval(values, most_draws=sum(len(task) / k for task in tasks))


def _reward_score(rewards: Sequence[Sequence[float]]) -> Score:
    """On a scale from 0 to 1, or as far as rewards were seen beyond it."""
    every = [reward for task in rewards for reward in task]
    bottom, top = min(0.0, *every), max(1.0, *every)
    width = top - bottom
    score = interval([(fmean(task) - bottom) / width for task in rewards], most_draws=len(every))
    return Score(
        mean=bottom + width * score.mean,
        low=bottom + width * score.low,
        high=bottom + width * score.high,
        num_tasks=score.num_tasks,
    )


def interval(values: Sequence[float], *, most_draws: float) -> Score:
    """The mean of values between 0 and 1, one a task, with its interval (see the top of this file)."""
    mean = min(max(fmean(values), 0.0), 1.0)
    draws = _effective_draws(values, mean, most_draws)
    passed, failed, tail = mean * draws, (1 - mean) * draws, (1 - CONFIDENCE) / 2
    return Score(
        mean=mean,
        low=beta_quantile(tail, passed, failed + 1) if passed > 0 else 0.0,
        high=beta_quantile(1 - tail, passed + 1, failed) if failed > 0 else 1.0,
        num_tasks=len(values),
    )


def _effective_draws(values: Sequence[float], mean: float, most: float) -> float:
    """As many independent draws as would estimate this mean as well as these tasks do."""
    count = len(values)
    if count < 2 or mean in (0, 1):
        return float(count)
    spread = variance(values) / count
    worth = min(mean * (1 - mean) / spread, most) if spread else most
    upper = 1 - (1 - CONFIDENCE) / 2
    unsure = t_quantile(upper, max(most - 1, 1)) / t_quantile(upper, count - 1)
    return min(max(worth * unsure**2, count), most)
