import math

import pytest
import torch

from align.core.statistics import correlation, kendall_tau, pair_calibration, pair_calibration_error
from align.reward.rankings import ScoredRanking, chance_warning, mean_loss, pairs_and_differences, ranking_metrics


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def logit(probability):
    return math.log(probability / (1 - probability))


@pytest.mark.parametrize(
    ("ranks", "rewards", "expected"),
    [
        ([1, 2, 3], [3.0, 2.0, 1.0], 1.0),
        ([1, 2, 3], [1.0, 2.0, 3.0], -1.0),
        ([1, 2, 3], [3.0, 1.0, 2.0], 1 / 3),  # two pairs agree, one does not: (2 - 1) / 3
        ([1, 1, 2], [5.0, 3.0, 1.0], 2 / math.sqrt(2 * 3)),  # two pairs agree; 2 of 3 ranked apart, 3 of 3 rewarded apart
        ([1, 1, 2], [5.0, 5.0, 1.0], 1.0),  # tied alike
        ([1, 2, 3, 4], [1.0, 1.0, 0.0, 0.0], 4 / math.sqrt(6 * 4)),  # four agree, two pairs of rewards are tied
        ([1, 2], [1.0, 1.0], 0.0),  # nothing to go by
    ],
)
def test_kendall_tau_by_hand(ranks, rewards, expected):
    assert kendall_tau(ranks, rewards) == pytest.approx(expected, abs=1e-15)


def test_calibration_by_hand():
    # Stated .92 three times (two right), .57 twice (one right): bins of width .05 from .9 and from .55.
    difference = doubles([logit(0.92), logit(0.92), -logit(0.92), logit(0.57), -logit(0.57)])
    low, high = pair_calibration(difference)
    assert low == pytest.approx((0.57, 0.5, 2))
    assert high == pytest.approx((0.92, 2 / 3, 3))
    # (2 x |.57 - .5| + 3 x |.92 - .6666667|) / 5 = (.14 + .76) / 5
    assert pair_calibration_error(difference) == pytest.approx(0.18, abs=1e-12)


@pytest.mark.parametrize(
    ("differences", "bins", "error"),
    [
        ([0.0, 0.0], [(0.5, 0.5, 2)], 0.0),  # equal rewards are half right
        ([1e6, -1e6], [(1.0, 0.5, 2)], 0.5),  # certainty falls into the last bin
        ([1e6, 1e6], [(1.0, 1.0, 2)], 0.0),
        ([-1e6], [(1.0, 0.0, 1)], 1.0),
        ([], [], 0.0),
    ],
)
def test_calibration_at_the_edges(differences, bins, error):
    assert pair_calibration(doubles(differences)) == bins
    assert pair_calibration_error(doubles(differences)) == error


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0], 1.0),
        ([1.0, 2.0, 3.0], [5.0, 3.0, 1.0], -1.0),
        # Centered: -1, 0, 1 and -1, 1, 0: product 1, norms sqrt(2) each.
        ([1.0, 2.0, 3.0], [1.0, 3.0, 2.0], 0.5),
        ([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], 0.0),
        ([1.0], [1.0], 0.0),
    ],
)
def test_correlation_by_hand(left, right, expected):
    assert correlation(doubles(left), doubles(right)) == pytest.approx(expected, abs=1e-12)


def test_summary_by_hand():
    metrics = ranking_metrics(
        [
            ScoredRanking(ranks=(1, 2, 3), rewards=(2.0, 0.0, 1.0), lengths=(4, 2, 3)),
            ScoredRanking(ranks=(2, 1), rewards=(1.0, 1.0), lengths=(3, 3)),
        ]
    )
    # Pairs: 2 over 0 right, 2 over 1 right, 0 over 1 wrong, 1 over 1 undecided: (1 + 1 + 0 + .5) / 4.
    assert metrics["accuracy"] == 0.625
    assert metrics["pairs"] == 4
    # By distance: one rank apart are the first, the third and the last: (1 + 0 + .5) / 3; two apart the second.
    assert metrics["accuracy/distance_1"] == 0.5
    assert metrics["accuracy/distance_2"] == 1.0
    # -log sigmoid of 2, 1, -1: .1269280, .3132617, 1.3132617, their mean .5844838; of 0: .6931472; mean of both.
    assert metrics["loss"] == pytest.approx(0.6388155, abs=1e-7)
    assert metrics["kendall_tau"] == pytest.approx((1 / 3 + 0) / 2)
    assert metrics["reward/mean"] == 1.0  # (2 + 0 + 1 + 1 + 1) / 5
    assert metrics["reward/std"] == pytest.approx(math.sqrt(2 / 5))
    assert metrics["length_correlation"] == pytest.approx(1.0)  # each length is the reward + 2
    # Stated: sigmoid 2 = .8807971 (right), twice sigmoid 1 = .7310586 (one of two right), .5 (half right).
    # (|.8807971 - 1| + 2 |.7310586 - .5| + 0) / 4 = (.1192029 + .4621172) / 4
    assert metrics["calibration_error"] == pytest.approx(0.1453300, abs=1e-7)
    assert metrics["accuracy/low"] <= metrics["accuracy"] <= metrics["accuracy/high"]
    # Two rankings say little: the interval is nearly as wide as that of two values.
    assert metrics["accuracy/low"] < 0.2
    assert metrics["accuracy/high"] > 0.95


def test_summary_of_a_model_that_is_always_right():
    metrics = ranking_metrics([ScoredRanking((1, 2, 3, 4), (9.0, 6.0, 3.0, 0.0), (1, 1, 1, 1))] * 3)
    assert metrics["accuracy"] == metrics["accuracy/high"] == 1.0
    assert metrics["accuracy/low"] == pytest.approx(0.025 ** (1 / 3))  # three rankings, by Clopper and Pearson
    assert metrics["kendall_tau"] == 1.0
    assert metrics["length_correlation"] == 0.0
    assert {name for name in metrics if "distance" in name} == {f"accuracy/distance_{d}" for d in (1, 2, 3)}


@pytest.mark.parametrize(("difference", "warns"), [(0.5, False), (0.0, False), (-0.1, True), (-9.0, True)])
def test_a_loss_above_that_of_equal_rewards_is_a_warning(difference, warns):
    rows = [ScoredRanking((1, 2), (difference, 0.0), (1, 1))]
    loss = mean_loss(rows, pairs_and_differences(rows)[0])
    assert loss == pytest.approx(math.log(1 + math.exp(-difference)))
    assert bool(chance_warning(loss - 1e-9)) == warns
    assert not chance_warning(None)
