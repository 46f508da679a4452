import math

import numpy as np
import pytest

from align.core.errors import UserError
from align.core.statistics import (
    design_effect,
    difference_interval,
    kendall_tau,
    mean_interval,
    resample,
    share_interval,
    statistic_interval,
)


def test_the_interval_of_a_mean_by_hand():
    values = np.tile([0.0, 1.0], 200)  # sd 0.5, n 400: 0.5 +- 1.96 * 0.025
    low, high = mean_interval(values, 4000)
    assert low == pytest.approx(0.451, abs=0.004)
    assert high == pytest.approx(0.549, abs=0.004)
    # Ten groups of 40 equal values know no more than ten values: sd 0.5, n 10.
    group = np.repeat(np.arange(10), 40)
    low, high = mean_interval(group % 2, 4000, group)
    assert (low, high) == pytest.approx(mean_interval(np.arange(10) % 2, 4000))
    assert high - low > 0.5


def test_any_statistic_and_samples_without_one():
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert statistic_interval(lambda drawn: values[drawn].max(1), 4) == (2.0, 4.0)
    rare = np.array([np.nan, 5.0])
    # A quarter of the samples holds the first item alone and has no mean of the rest.
    with np.errstate(all="ignore"):
        assert statistic_interval(lambda drawn: np.where((drawn == 1).any(1), rare[1], np.nan), 2) == (5.0, 5.0)


def test_the_draws_do_not_depend_on_how_many_are_held_at_once(monkeypatch):
    whole = resample(lambda drawn: drawn.sum(1), 10, 300)
    monkeypatch.setattr("align.core.statistics.CHUNK", 25)
    assert (resample(lambda drawn: drawn.sum(1), 10, 300) == whole).all()


def test_a_group_weighs_as_much_as_it_holds():
    # Nine right pairs in one ranking, one wrong pair in the other. Two drawn of two give 1 (a quarter of the time),
    # 9/10 (half) or 0 (a quarter): the median is .9, where a mean of the rankings' means would give .5.
    values, group = np.array([1.0] * 9 + [0.0]), np.array([0] * 9 + [1])
    assert mean_interval(values, 4001, group, level=0.0) == pytest.approx((0.9, 0.9))


@pytest.mark.parametrize(
    ("yes", "n", "low", "high"),
    [
        (0, 10, 0.0, 1 - 0.025 ** (1 / 10)),  # P(none of 10) = (1 - p)^10
        (10, 10, 0.025 ** (1 / 10), 1.0),
        (1, 2, 1 - 0.975**0.5, 0.975**0.5),
        (5, 10, 0.1871, 0.8129),  # Clopper and Pearson's table
        (1, 20, 0.0013, 0.2487),
    ],
)
def test_the_interval_of_a_share_is_that_of_clopper_and_pearson(yes, n, low, high):
    assert share_interval([1] * yes + [0] * (n - yes)) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [10, 16, 30])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95])
def test_a_share_is_covered_at_least_as_often_as_stated(n, share):
    """Exact, not simulated: the sum over counts of their binomial probability where the interval holds the share."""
    covered = 0.0
    for yes in range(n + 1):
        low, high = share_interval([1] * yes + [0] * (n - yes))
        covered += (low <= share <= high) * math.comb(n, yes) * share**yes * (1 - share) ** (n - yes)
    assert covered >= 0.95


@pytest.mark.parametrize(
    ("win", "tie", "alike"),
    [
        *((win, tie, 0) for win, tie in ((0.45, 0.1), (0.1, 0.8), (0.3, 0.65), (0.02, 0.96))),
        *((share, 0, alike) for share in (0.1, 0.5, 0.95) for alike in (0.3, 0.99)),
    ],
)
def test_win_rates_with_ties_and_shares_of_grouped_values_are_covered(win, tie, alike):
    """16 comparisons, or 12 rankings of 4 pairs with the intraclass correlation `alike`."""
    generator, covered, group, scale = np.random.default_rng(1), 0, np.repeat(np.arange(12), 4), 1 / (alike or 1) - 1
    for _ in range(400):
        if alike:
            values = generator.random(48) < generator.beta(win * scale, (1 - win) * scale, 12)[group]
        else:
            values = generator.choice([1.0, 0.5, 0.0], size=16, p=[win, tie, 1 - win - tie])
        low, high = share_interval(values, group if alike else None)
        covered += low <= win + tie / 2 <= high
    assert covered / 400 >= 0.93  # 0.95 less two standard errors


def test_groups_that_agree_within_count_once():
    group = np.repeat(np.arange(10), 6)
    assert design_effect(group % 2, group) == pytest.approx(6)
    assert design_effect(np.arange(60) % 2) == pytest.approx(1)
    assert share_interval([1] * 60, group) == pytest.approx(share_interval([1] * 10))
    assert share_interval([1, 1, 1], [7, 7, 7]) == pytest.approx((0.025, 1.0))


def test_a_difference_of_shares_without_a_difference_has_a_width():
    low, high = difference_interval([0.0] * 16)
    assert -0.25 < low < -0.1
    assert high == pytest.approx(-low)
    assert difference_interval([1.0] * 10) == pytest.approx((2 * 0.025**0.1 - 1, 1.0))


@pytest.mark.parametrize(
    ("interval", "values", "why"),
    [
        *((mean_interval, values, "finite") for values in ([], [1.0, math.nan], [math.inf])),
        *((share_interval, values, "from 0 to 1") for values in ([], [0.5, 1.1], [-0.1], [math.nan])),
    ],
)
def test_values_without_an_interval_are_refused(interval, values, why):
    with pytest.raises(UserError, match=why):
        interval(values)


def test_rewards_of_equal_responses_that_differ_by_rounding_are_ties():
    assert kendall_tau([1, 2, 2], [3.0, 1.0, 1.0 + 1e-7]) == kendall_tau([1, 2, 2], [3.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert kendall_tau([1, 2], [1.0, 1.0 + 1e-7]) == 0.0
