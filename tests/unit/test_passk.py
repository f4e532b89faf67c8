"""pass@k by hand, and intervals that cover what they claim to."""

import math
from itertools import combinations

import numpy as np
import pytest

from dockyard.collect.passk import beta_cdf, beta_quantile, interval, pass_at_k, powers_up_to, score_tasks, t_quantile


@pytest.mark.parametrize(
    ("num", "passed", "k", "expected"),
    [(4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 2, 2, 5 / 6), (5, 2, 3, 9 / 10), (4, 1, 4, 1), (4, 0, 4, 0), (3, 3, 1, 1)],
)
def test_pass_at_k_is_as_computed_by_hand(num: int, passed: int, k: int, expected: float):
    assert pass_at_k(num, passed, k) == pytest.approx(expected)


def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass():
    passed = [True, False, True, False, False, False]
    for k in range(1, 7):
        draws = list(combinations(passed, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_too_few_rollouts_is_refused():
    with pytest.raises(ValueError, match="pass@5 needs at least 5 rollouts, but there are 4"):
        pass_at_k(4, 1, 5)


def test_k_goes_by_powers_of_two():
    assert [powers_up_to(most) for most in (1, 2, 3, 4, 9)] == [[1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_the_beta_distribution_has_its_known_values():
    assert beta_cdf(0.3, 1, 1) == pytest.approx(0.3)
    assert beta_cdf(0.2, 3, 5) == pytest.approx(sum(math.comb(7, i) * 0.2**i * 0.8 ** (7 - i) for i in range(3, 8)))
    assert beta_cdf(0.9, 0.5, 0.5) == pytest.approx(2 / math.pi * math.asin(math.sqrt(0.9)))
    assert beta_quantile(0.975, 1, 3) == pytest.approx(1 - 0.025 ** (1 / 3))
    assert beta_quantile(beta_cdf(0.031, 40, 1200.5), 40, 1200.5) == pytest.approx(0.031)


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (9, 2.26216), (1000, 1.96234)])
def test_students_distribution_has_its_tabled_values(freedom: int, expected: float):
    assert t_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-5)


def test_one_rollout_a_task_gives_the_exact_binomial_interval():
    score = interval([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], most_draws=10)
    assert (score.mean, score.num_tasks) == (0.2, 10)
    assert (score.low, score.high) == (pytest.approx(0.02521, abs=1e-5), pytest.approx(0.55610, abs=1e-5))


@pytest.mark.parametrize("rollouts", [1, 8])
def test_where_every_task_agrees_the_interval_is_that_of_as_many_tasks_however_often_they_were_tried(rollouts: int):
    none, every = interval([0.0] * 3, most_draws=3 * rollouts), interval([1.0] * 3, most_draws=3 * rollouts)
    assert (none.low, none.high) == (0, pytest.approx(1 - 0.025 ** (1 / 3)))
    assert (every.low, every.high) == (pytest.approx(0.025 ** (1 / 3)), 1)


def test_a_single_task_says_next_to_nothing_about_others():
    score = interval([0.5], most_draws=8)
    assert (score.low, score.high) < (0.05, 1.0)
    assert score.high > 0.95


def test_rollouts_of_one_task_are_no_independent_evidence():
    alike, mixed = interval([1.0, 0.0] * 8, most_draws=128), interval([0.5, 0.5] * 8, most_draws=128)
    assert alike.mean == mixed.mean == 0.5
    assert alike.high - alike.low > 2 * (mixed.high - mixed.low)


def test_a_task_without_rollouts_enough_is_left_out_of_a_larger_k():
    scores = score_tasks([[1.0, 0.0, 0.0, 0.0], [1.0], []])
    assert scores is not None
    assert {k: (score.mean, score.num_tasks) for k, score in scores.passes.items()} == {
        1: (pytest.approx(0.625), 2),
        2: (pytest.approx(0.5), 1),
        4: (pytest.approx(1.0), 1),
    }


def test_a_part_of_a_reward_is_no_pass_but_counts_in_the_mean():
    scores = score_tasks([[0.5, 1.0], [0.5, 0.5]])
    assert scores is not None
    assert (scores.passes[1].mean, scores.reward.mean) == (0.25, 0.625)


def test_rewards_may_lie_beyond_0_and_1():
    scores = score_tasks([[-1.0, 3.0], [-1.0, -1.0]])
    assert scores is not None
    assert scores.reward.mean == pytest.approx(0)
    assert -1 <= scores.reward.low < 0 < scores.reward.high <= 3


def test_there_is_no_score_where_nothing_has_a_reward():
    assert score_tasks([[], []]) is None
    assert score_tasks([]) is None


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.3), (1.0, 20.0), (5.0, 5.0)], ids=["easy-or-hard", "hard", "alike"])
@pytest.mark.parametrize(("tasks", "rollouts", "k"), [(3, 4, 1), (8, 1, 1), (8, 4, 4), (20, 4, 1)])
def test_intervals_cover_the_truth_as_often_as_they_claim(a: float, b: float, tasks: int, rollouts: int, k: int):
    """Tasks whose chance of a pass is drawn from a beta distribution; the true pass@k is known in closed form."""
    truth = 1 - math.prod((b + i) / (a + b + i) for i in range(k))
    rng, repeats, covered = np.random.default_rng(0), 120, 0
    for _ in range(repeats):
        passed = rng.binomial(rollouts, rng.beta(a, b, tasks))
        score = interval([pass_at_k(rollouts, int(c), k) for c in passed], most_draws=tasks * rollouts / k)
        covered += score.low <= truth <= score.high
    assert covered / repeats > 0.92
