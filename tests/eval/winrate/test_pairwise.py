"""Win rates, length control and Bradley-Terry on numbers worked out by hand."""

import math

import numpy as np
import pytest

from align.eval.winrate.bradley_terry import fit_bradley_terry, strengths
from align.eval.winrate.judges import judge_both_orders
from align.eval.winrate.length_control import fit_logistic, length_controlled_win_rate
from align.eval.winrate.pairwise import PairwiseComparison, pair_table, win_rate
from align.eval.winrate.task import model_figures


def comparisons(outcomes, first="a", second="b", lengths=(5, 5)):
    return [PairwiseComparison(str(number), first, second, outcome, lengths) for number, outcome in enumerate(outcomes)]


def test_a_tie_is_half_and_sides_do_not_matter():
    mixed = [*comparisons([1, 1, 0.5]), PairwiseComparison("x", "b", "a", 0, (5, 5))]
    assert win_rate(mixed, "a", 100)[0] == pytest.approx(3.5 / 4)
    assert win_rate(mixed, "b", 100)[0] == pytest.approx(0.5 / 4)


def test_comparisons_of_one_prompt_hang_together():
    apart = comparisons([1, 0] * 20)
    together = [PairwiseComparison(str(number // 20), "a", "b", number // 20, (5, 5)) for number in range(40)]
    assert win_rate(apart, "a", 500)[1] > 0.3
    assert win_rate(together, "a", 500)[1:] == (0, 1)


# ----------------------------------------------------------------------------------------------------------- strengths


def test_three_wins_to_one_are_log_3_apart():
    (found,) = fit_bradley_terry(np.array([[[0, 3], [1, 0]]], dtype=float))
    assert found == pytest.approx([math.log(3) / 2, -math.log(3) / 2], abs=1e-6)


def test_strengths_that_made_the_table_come_back():
    true = np.array([0.9, 0.1, -1.0])
    chance = 1 / (1 + np.exp(true[None] - true[:, None]))
    games = np.array([[0, 8, 2], [8, 0, 30], [2, 30, 0]])
    assert fit_bradley_terry((games * chance)[None])[0] == pytest.approx(true, abs=1e-6)


def test_who_never_loses_gets_the_limit_and_nothing_breaks():
    found = fit_bradley_terry(np.array([[[0, 4], [0, 0]], [[0, 0], [0, 0]]], dtype=float))
    assert np.isfinite(found).all()
    assert found[0, 0] - found[0, 1] >= 10
    assert found[1] == pytest.approx([0, 0])


def test_intervals_of_strengths_hold_the_value_and_shrink():
    few, many = (strengths(comparisons([1, 1, 1, 0] * n), ["a", "b"], 300) for n in (5, 50))
    for found in (few, many):
        assert found["a"][0] == pytest.approx(math.log(3) / 2, abs=1e-6)
        assert found["a"][1] < found["a"][0] < found["a"][2]
    assert many["a"][2] - many["a"][1] < (few["a"][2] - few["a"][1]) / 2


# -------------------------------------------------------------------------------------------------------------- length


def test_logistic_regression_by_hand():
    """Two groups of 100: 30 of 100 at x = -1, 60 of 100 at x = 1: a and b solve a - b = logit 0.3, a + b = logit 0.6."""
    outcomes, x = np.array([0.3, 0.6]), np.array([-1.0, 1.0])
    low, high = math.log(0.3 / 0.7), math.log(0.6 / 0.4)
    (found,) = fit_logistic(outcomes, x, np.array([[1e5, 1e5]]))
    assert found == pytest.approx([(low + high) / 2, (high - low) / 2], abs=1e-5)


def test_a_model_that_wins_by_length_alone_is_even_at_equal_length():
    """It wins 90 of 100 where it is longer, 10 of 100 where it is as much shorter, and it is longer three times in four."""
    rows = [(30, 270, 30, 10), (10, 10, 90, -10)]
    found = []
    for _, won, lost, longer in rows:
        found += [PairwiseComparison(f"{longer}{n}", "a", "b", float(n < won), (20 + longer, 20)) for n in range(won + lost)]
    assert win_rate(found, "a", 100)[0] == pytest.approx(0.7)
    rate, low, high = length_controlled_win_rate(found, "a", 200)
    # tanh(d / sd) is not symmetric in general, but here d has two values of one size: the fit is exact up to the prior.
    assert rate == pytest.approx(0.5, abs=0.002)
    assert low < 0.5 < high
    assert high - low < 0.3


def test_without_differences_in_length_control_changes_nothing():
    rows = comparisons([1, 1, 1, 0] * 25)
    assert length_controlled_win_rate(rows, "a", 100)[0] == pytest.approx(0.75, abs=0.001)
    sure = length_controlled_win_rate(comparisons([1] * 20), "a", 100)
    assert 0.99 < sure[0] < 1


# ---------------------------------------------------------------------------------------------------------------- judge


def test_both_orders_are_asked_and_a_flip_is_a_tie():
    asked = []

    def ask(rows):
        asked.extend(rows)
        known = {("good", "bad"): 1.0, ("bad", "good"): 0.0, ("x", "y"): 1.0, ("y", "x"): 0.9}
        return [known.get((first, second), 0.5) for _, first, second in rows]

    rows = [(0, "good", "bad"), (1, "bad", "good"), (2, "x", "y"), (3, "p", "q"), (4, "same", "same")]
    assert judge_both_orders(ask, rows) == [(1, False), (0, False), (0.5, True), (0.5, False), (0.5, False)]
    assert len(asked) == 8
    assert asked[:2] == [(0, "good", "bad"), (0, "bad", "good")]


def test_one_verdict_and_one_tie_are_a_verdict():
    assert judge_both_orders(lambda rows: [0.5, 0.0], [(0, "a", "b")]) == [(1, False)]


def test_the_table_of_a_model():
    rows = [*comparisons([1, 0.5, 1, 0]), PairwiseComparison("f", "a", "b", 0.5, (1, 9), flipped=True)]
    named = {figure.name: figure for figure in model_figures(rows, "a", 200, "judge 1")}
    assert named["win rate"].value == pytest.approx(3 / 5)
    assert named["ties"].value == pytest.approx(2 / 5)
    assert named["position flips"].value == pytest.approx(1 / 5)
    assert {figure.scorer for figure in named.values()} == {"judge 1"}
    (row,) = pair_table(rows, ["a", "b"], 200)
    assert (row["won"], row["tied"], row["lost"]) == (2, 2, 1)
    assert model_figures(rows, "c", 200, "j")[0].value is None
