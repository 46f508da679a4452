"""The best of n: against every subset, and numbers by hand."""

from itertools import combinations

import numpy as np
import pytest

from align.eval.reward.curves import expected_best, kl_bound, sizes_on_curve


def test_two_of_three_by_hand():
    """Of 1, 2 and 4, the pairs have the maxima 2, 4 and 4."""
    rewards = np.array([4.0, 1.0, 2.0])
    assert expected_best(rewards, rewards, 2) == pytest.approx(10 / 3)
    assert expected_best(rewards, rewards, 1) == pytest.approx(7 / 3)
    assert expected_best(rewards, rewards, 3) == 4


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_the_closed_form_is_the_mean_over_all_subsets(n):
    generator = np.random.default_rng(3)
    rewards, gold = generator.normal(size=7), generator.normal(size=7)
    chosen = [max(subset, key=lambda i: rewards[i]) for subset in combinations(range(7), n)]
    assert expected_best(rewards, rewards, n) == pytest.approx(np.mean([rewards[i] for i in chosen]))
    assert expected_best(rewards, gold, n) == pytest.approx(np.mean([gold[i] for i in chosen]))


def test_equal_rewards_share_their_chances():
    """1 is never the best of two; the two 5s are it equally often, whatever their order."""
    for gold in ([0.0, 2.0, 4.0], [0.0, 4.0, 2.0]):
        assert expected_best(np.array([1.0, 5.0, 5.0]), np.array(gold), 2) == pytest.approx(3.0)


def test_gold_that_agrees_rises_and_gold_that_does_not_stays():
    rewards = np.random.default_rng(0).normal(size=64)
    curve = [expected_best(rewards, rewards, n) for n in sizes_on_curve(64)]
    assert curve == sorted(curve)
    assert curve[-1] == pytest.approx(rewards.max())
    assert expected_best(rewards, np.full(64, 2.0), 16) == pytest.approx(2.0)


def test_the_bound_on_kl():
    assert kl_bound(1) == 0
    assert kl_bound(2) == pytest.approx(0.6931 - 0.5, abs=1e-4)
    assert kl_bound(64) == pytest.approx(4.1589 - 63 / 64, abs=1e-4)


def test_the_places_on_the_curve():
    assert sizes_on_curve(64) == [1, 2, 4, 8, 16, 32, 64]
    assert sizes_on_curve(6) == [1, 2, 4, 6]
