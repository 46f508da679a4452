"""Which candidate is kept: by hand."""

import math

import pytest

from align.rules.scoring import best_response, geometric_mean


def test_geometric_mean():
    assert geometric_mean([0.5, 0.5]) == pytest.approx(0.5)
    assert geometric_mean([0.9, 0.4, 0.2]) == pytest.approx((0.9 * 0.4 * 0.2) ** (1 / 3))
    assert geometric_mean([0.0, 1.0]) == 0.0
    assert geometric_mean([]) == 1.0


def test_a_filter_keeps_the_highest_reward_among_those_that_obey():
    rewards, follows = [3.0, 2.0, 1.0], [[0.1, 0.9], [0.8, 0.7], [0.9, 0.9]]
    assert best_response(rewards, follows, "filter", 0.5) == 1  # the first has sqrt(.09) = .3
    assert best_response(rewards, follows, "filter", 0.85) == 2
    assert best_response(rewards, follows, "filter", 0.2) == 0


def test_where_no_candidate_obeys_the_most_obedient_is_kept():
    assert best_response([9.0, 1.0], [[0.1], [0.2]], "filter", 0.5) == 1


def test_the_product_by_hand():
    # Mean reward 1: sigmoid(2) = .8808, sigmoid(0) = .5, sigmoid(-2) = .1192.
    rewards = [3.0, 1.0, -1.0]
    assert best_response(rewards, [[0.5], [0.9], [1.0]], "multiply", 0.5) == 1  # .4404, .4500, .1192
    assert best_response(rewards, [[0.52], [0.9], [1.0]], "multiply", 0.5) == 0  # .4580
    assert 1 / (1 + math.exp(-2)) * 0.52 == pytest.approx(0.4580, abs=1e-4)


def test_rules_alone_and_rewards_alone():
    assert best_response([0.0, 0.0], [[0.2], [0.7]], "multiply", 0.5) == 1
    assert best_response([1.0, 2.0, 2.0], [[], [], []], "filter", 0.5) == 1
    assert best_response([-1000.0, 1000.0], [[0.5], [0.5]], "multiply", 0.5) == 1
