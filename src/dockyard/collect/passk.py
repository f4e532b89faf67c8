"""pass@k and mean reward with confidence intervals that are valid for few tasks. Pure functions.

A score is a mean over tasks: of 1 - C(n-c, k) / C(n, k) for pass@k, where c of a task's n rollouts passed (unbiased for
any n >= k), or of the task's mean reward. Rollouts of one task are correlated, so the tasks are the sample, and the
interval is for the mean over all tasks of the same kind. It is the exact binomial interval (Clopper-Pearson) for the
effective sample size of Korn and Graubard, which follows from the variance between tasks: at least the number of tasks,
at most the number of rollouts, and reduced if the variance was estimated from few tasks. With one rollout per task this
is the exact interval. If every task failed, or every task passed, it is the exact interval for the number of tasks: 0
of 3 tasks gives an upper bound of 71 %.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from dockyard.types import Rollout

_TINY = 1e-300
_CLOSE = 1e-14
_HALVINGS = 200


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return the distribution function of a beta variable: the regularised incomplete beta function."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # here the fraction below converges slowly, but that of the mirror image does not
        return 1 - beta_cdf(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _continued_fraction(x, a, b))


def _continued_fraction(x: float, a: float, b: float) -> float:
    """Return 1 + d1/(1 + d2/(1 + ...)), computed by Lentz's method."""
    value, upper, lower = 1.0, 1.0, 0.0
    for number in range(1, 10_000):
        half, odd = divmod(number, 2)
        if odd:
            term = -(a + half) * (a + b + half) / ((a + 2 * half) * (a + 2 * half + 1)) * x
        else:
            term = half * (b - half) / ((a + 2 * half - 1) * (a + 2 * half)) * x
        lower = 1 / (1 + term * lower or _TINY)
        upper = 1 + term / upper or _TINY
        value *= upper * lower
        if abs(upper * lower - 1) < _CLOSE:
            break
    return value


def beta_quantile(probability: float, a: float, b: float) -> float:
    """Return the value that a beta variable does not exceed with the given probability."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if beta_cdf(middle, a, b) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t distribution, for a probability above one half."""
    x = beta_quantile(2 * (1 - probability), freedom / 2, 0.5)
    return math.sqrt(freedom * (1 - x) / x)


PASS_REWARD = 1.0
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A mean over tasks, with its confidence interval."""

    mean: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of a set of tasks."""

    reward: Score
    passes: dict[int, Score]
    """pass@k by k."""


def score_numbers(scores: Scores) -> dict[str, float]:
    """The scores as numbers by name: `reward`, `reward_low`, `reward_high`, `pass@1`, `pass@1_low`, ..."""
    named = {"reward": scores.reward, **{f"pass@{k}": score for k, score in scores.passes.items()}}
    numbers: dict[str, float] = {}
    for name, score in named.items():
        numbers |= {name: score.mean, f"{name}_low": score.low, f"{name}_high": score.high}
    return numbers


def score_rollouts(rollouts: Iterable[Rollout], kind: str | None = None) -> Scores | None:
    """Return the scores of the tasks of one kind, or of all tasks. Lost rollouts are not counted."""
    by_task: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None and kind in (None, rollout.kind):
            by_task.setdefault(rollout.task, []).append(rollout.reward)
    return score_tasks(list(by_task.values()))


def score_tasks(rewards: Sequence[Sequence[float]]) -> Scores | None:
    """Return the scores of tasks, each given as the rewards of its rollouts; None if there are no rewards."""
    attempted = [task for task in rewards if task]
    if not attempted:
        return None
    most = max(map(len, attempted))
    passes = {k: _pass_score(attempted, k) for k in powers_up_to(most)}
    return Scores(reward=_reward_score(attempted), passes=passes)


def powers_up_to(most: int) -> list[int]:
    """Return the powers of 2 up to `most`: 1, 2, 4, ..."""
    return [2**exponent for exponent in range(most.bit_length())]


def pass_at_k(num_rollouts: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of k rollouts, drawn from these without replacement, passed."""
    if not 1 <= k <= num_rollouts:
        raise ValueError(f"pass@{k} needs at least {k} rollouts, but there are {num_rollouts}")
    return 1 - math.comb(num_rollouts - num_passed, k) / math.comb(num_rollouts, k)


def _pass_score(rewards: Sequence[Sequence[float]], k: int) -> Score:
    """Return pass@k over the tasks that have at least k rollouts."""
    tasks = [task for task in rewards if len(task) >= k]
    values = [pass_at_k(len(task), sum(reward >= PASS_REWARD for reward in task), k) for task in tasks]
    return interval(values, most_draws=sum(len(task) / k for task in tasks))


def _reward_score(rewards: Sequence[Sequence[float]]) -> Score:
    """Return the mean reward. Its scale is from 0 to 1, extended to the lowest and highest reward seen."""
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
    """Return the mean of values between 0 and 1, one per task, with its interval (see the top of this file)."""
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
    """Return the effective sample size: how many independent draws would give a mean of the same variance."""
    count = len(values)
    if count < 2 or mean in (0, 1):
        return float(count)
    spread = variance(values) / count
    worth = min(mean * (1 - mean) / spread, most) if spread else most
    upper = 1 - (1 - CONFIDENCE) / 2
    unsure = t_quantile(upper, max(most - 1, 1)) / t_quantile(upper, count - 1)
    return min(max(worth * unsure**2, count), most)
