"""Which policy of a run is kept."""

import math
import random

import pytest

from align.ppo.selection import Candidate, is_new_best, replaces


def test_any_higher_mean_will_do_without_a_test() -> None:
    assert is_new_best([-9.0], None)
    assert not is_new_best([math.nan, 1.0], None)
    assert is_new_best([1.0, 3.1], [2.0, 2.0])
    assert not is_new_best([1.0, 3.0], [2.0, 2.0])  # of equal means the first stays
    assert not is_new_best([math.nan, 9.0], [2.0, 2.0])


def test_the_paired_test_by_hand() -> None:
    # Differences 1, 2, 3, 2: mean 2, standard deviation sqrt(2 / 3), standard error sqrt(1 / 6) = 0.408; 2 / 0.408 = 4.9.
    kept, scores = [10.0, -10.0, 0.0, 5.0], [11.0, -8.0, 3.0, 7.0]
    assert is_new_best(scores, kept, 0.95)  # 1.645
    assert is_new_best(scores, kept, 0.999999)  # 4.75
    assert not is_new_best(scores, kept, 0.999999, evaluations=10)  # 5.2
    assert not is_new_best([11.0, -11.0, 0.1, 5.0], kept, 0.95)  # 0.025 with an error of 0.41


@pytest.mark.parametrize("evaluations", [1, 5, 20])
def test_a_policy_that_is_no_better_seldom_replaces_the_kept_one(evaluations: int) -> None:
    """Over whole runs of policies that are all the same, a tenth or fewer replace the first at confidence 0.9."""
    random.seed(0)
    replaced = 0
    for _ in range(300):
        kept = [random.gauss(0, 1) for _ in range(48)]
        runs = ([random.gauss(0, 1) for _ in range(48)] for _ in range(evaluations))
        replaced += any(is_new_best(scores, kept, 0.9, evaluations) for scores in runs)
    assert replaced < 0.15 * 300


def test_budgets_come_before_scores() -> None:
    low, high = Candidate(1, [0.0, 0.1]), Candidate(2, [5.0, 5.1])
    over = Candidate(3, [9.0, 9.1], within_budgets=False)
    assert replaces(high, low)
    assert not replaces(over, low)
    assert replaces(low, over)
    assert replaces(low, over, 0.95, 10)
    assert not replaces(Candidate(4, [math.nan, 0.0]), over)
    assert replaces(over, Candidate(5, [8.0, 8.1], within_budgets=False))
    assert replaces(over, None)
