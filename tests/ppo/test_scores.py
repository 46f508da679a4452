"""Scores: ensembles of reward models, and the penalty for a missing end."""

import pytest
import torch

from align.ppo.scores import apply_missing_eos, combine_rewards, disagreement

REWARDS = torch.tensor([[1.0, -2.0], [2.0, -2.0], [6.0, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("rule", "weight", "expected"),
    [
        ("mean", 9.0, [3.0, -2.0]),
        ("wco", 9.0, [1.0, -2.0]),
        # Variance over members: (4 + 1 + 9) / 3 = 14/3; where all agree nothing is taken off.
        ("uwo", 0.3, [3.0 - 0.3 * 14 / 3, -2.0]),
        ("uwo", 0.0, [3.0, -2.0]),
    ],
)
def test_rules_by_hand(rule, weight, expected):
    assert combine_rewards(REWARDS, rule, weight).tolist() == pytest.approx(expected, abs=1e-12)


def test_disagreement_by_hand():
    assert disagreement(REWARDS).tolist() == pytest.approx([(14 / 3) ** 0.5, 0.0], abs=1e-12)


@pytest.mark.parametrize(
    ("rule", "penalty", "expected"),
    [
        ("replace", -1.0, [3.0, -1.0, -1.0]),
        ("replace", 0.5, [3.0, 0.5, 0.5]),
        ("lower", -1.0, [3.0, 1.0, -6.0]),  # 2 - 1 and -5 - 1
        ("lower", 1.0, [3.0, 1.0, -6.0]),  # the size counts, not the sign
        ("keep", -1.0, [3.0, 2.0, -5.0]),
    ],
)
def test_penalties_for_a_missing_end(rule, penalty, expected):
    scores = torch.tensor([3.0, 2.0, -5.0])
    assert apply_missing_eos(scores, torch.tensor([True, False, False]), rule, penalty).tolist() == expected
