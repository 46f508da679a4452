import math
from dataclasses import replace

import numpy as np
import pytest

from align.eval.pairwise import PairwiseComparison, fit, length_controlled_measurement, pair_table, win_rate
from align.eval.winrate import judge_both_orders, model_measurements


def comparisons(outcomes, first="a", second="b", lengths=(5, 5)):
    return [PairwiseComparison(str(number), first, second, outcome, lengths) for number, outcome in enumerate(outcomes)]


def test_a_tie_is_half_and_sides_do_not_matter():
    mixed = [*comparisons([1, 1, 0.5]), PairwiseComparison("x", "b", "a", 0, (5, 5))]
    assert win_rate(mixed, "a")[0] == pytest.approx(3.5 / 4)
    assert win_rate(mixed, "b")[0] == pytest.approx(0.5 / 4)


def test_comparisons_of_one_prompt_depend_on_each_other():
    apart = comparisons([1, 0] * 20)
    together = [PairwiseComparison(str(number // 20), "a", "b", number // 20, (5, 5)) for number in range(40)]
    assert win_rate(apart, "a")[1] > 0.3
    # Two prompts that disagree: one success of two, by Clopper and Pearson 0.0126 to 0.9874 (1 - sqrt(0.975)).
    assert win_rate(together, "a")[1:] == pytest.approx((1 - math.sqrt(0.975), math.sqrt(0.975)))


def test_logistic_regression_by_hand():
    """3 of 10 at x = -1, 6 of 10 at x = 1: with Firth's penalty, half an observation is added to each cell."""
    outcomes, x = np.array([0.3, 0.6]), np.array([-1.0, 1.0])
    low, high = math.log(3.5 / 7.5), math.log(6.5 / 4.5)
    found = fit(x, outcomes, np.full(2, 10.0))
    assert found == pytest.approx([(low + high) / 2, (high - low) / 2], abs=1e-6)


def test_a_model_that_wins_by_length_alone_is_even_at_equal_length():
    """It wins 90 of 100 where it is longer, 10 of 100 where it is as much shorter, and it is longer three times in four."""
    rows = [(30, 270, 30, 10), (10, 10, 90, -10)]
    found = []
    for _, won, lost, longer in rows:
        found += [PairwiseComparison(f"{longer}{n}", "a", "b", float(n < won), (20 + longer, 20)) for n in range(won + lost)]
    assert win_rate(found, "a")[0] == pytest.approx(0.7)
    measurement = length_controlled_measurement(found, "a", "judge")
    # tanh(d / sd) is not symmetric in general, but here d has two values of one size: the fit is exact up to the prior.
    assert measurement.value == pytest.approx(0.5, abs=0.005)
    assert measurement.low < 0.5 < measurement.high
    assert measurement.high - measurement.low < 0.3


def test_where_length_control_has_nothing_to_fit():
    rows = comparisons([1, 1, 1, 0] * 25)
    equal = length_controlled_measurement(rows, "a", "judge")  # of equal length: the win rate itself
    assert (equal.value, equal.low, equal.high) == win_rate(rows, "a")
    few = length_controlled_measurement(comparisons([1, 0] * 8), "a", "judge")
    assert (few.value, few.note) == (None, "needs 30 prompts or more")
    longer = length_controlled_measurement(comparisons([1, 0] * 20, lengths=(9, 5)), "a", "judge")
    assert longer.value is None
    assert "every answer is longer" in longer.note


def test_length_that_separates_wins_from_losses_leaves_a_wide_interval():
    """The longer answer always wins, and the model is longer in 12 of 32: nothing shows the rate at equal length well."""
    lengths = [(20 + n, 20) for n in range(1, 13)] + [(20, 20 + n) for n in range(1, 21)]
    rows = [PairwiseComparison(str(n), "a", "b", float(pair[0] > pair[1]), pair) for n, pair in enumerate(lengths)]
    measurement = length_controlled_measurement(rows, "a", "judge")
    assert win_rate(rows, "a")[0] == 0.375
    assert measurement.low < 0.2
    assert measurement.high > 0.8


def test_the_length_controlled_interval_covers_the_true_rate():
    generator, covered = np.random.default_rng(0), 0
    for _ in range(40):
        extra = generator.normal(30, 60, 40).round()
        won = generator.random(40) < 1 / (1 + np.exp(0.5 - 2 * np.tanh(extra / extra.std())))
        rows = [PairwiseComparison(str(n), "a", "b", float(won[n]), (500 + int(extra[n]), 500)) for n in range(40)]
        measurement = length_controlled_measurement(rows, "a", "judge")
        covered += measurement.low <= 1 / (1 + math.exp(0.5)) <= measurement.high
    assert covered >= 35  # 38 expected, two standard errors are 2.8


def test_both_orders_are_asked_and_a_flip_is_a_tie():
    asked = []

    def judge(*columns):
        rows = list(zip(*columns, strict=True))
        asked.extend(rows)
        known = {("good", "bad"): 1.0, ("bad", "good"): 0.0, ("x", "y"): 1.0, ("y", "x"): 0.9}
        return [known.get((first, second), 0.5) for _, first, second in rows]

    rows = [(0, "good", "bad"), (1, "bad", "good"), (2, "x", "y"), (3, "p", "q"), (4, "same", "same")]
    assert judge_both_orders(judge, rows) == [(1, False), (0, False), (0.5, True), (0.5, False), (0.5, False)]
    assert judge_both_orders(lambda *columns: [0.5, 0.0], [(0, "a", "b")]) == [(1, False)]  # a tie and a verdict
    assert len(asked) == 8
    assert asked[:2] == [(0, "good", "bad"), (0, "bad", "good")]


def test_the_table_of_a_model():
    rows = [*comparisons([1, 0.5, 1, 0]), PairwiseComparison("f", "a", "b", 0.5, (1, 9), flipped=True)]
    named = {measurement.name: measurement for measurement in model_measurements(rows, "a", "judge 1")}
    assert named["win rate"].value == pytest.approx(3 / 5)
    assert named["ties"].value == pytest.approx(2 / 5)
    assert named["position flips"].value == pytest.approx(1 / 5)
    assert {measurement.scorer for measurement in named.values()} == {"judge 1"}
    (row,) = pair_table(rows, ["a", "b"])
    assert (row["won"], row["tied"], row["lost"]) == (2, 2, 1)


def test_the_length_of_the_baselines_answer_controls_for_the_prompt():
    """Prompts with short answers of the baseline are won more often, and there the model's answer is nearly as long."""
    generator = np.random.default_rng(3)
    baseline = generator.lognormal(7.3, 0.5, 800).round()
    extra = (-0.6 * baseline + generator.normal(0, 400, 800)).round()
    size = np.tanh((baseline - baseline.mean()) / baseline.std())
    odds = -0.5 + 1.5 * np.tanh(extra / extra.std(ddof=1)) - 1.2 * (size - size.mean())
    rows = [
        PairwiseComparison(str(n), "base", "m", 1 / (1 + math.exp(odds[n])), (int(baseline[n]), int(baseline[n] + extra[n])))
        for n in range(800)
    ]
    model, other = (length_controlled_measurement(rows, name, "judge", "base") for name in ("m", "base"))
    expected = 1 / (1 + math.exp(0.5))
    assert model.value == pytest.approx(expected, abs=0.01)
    assert model.low < expected < model.high
    assert (other.value, other.low, other.high) == pytest.approx((1 - model.value, 1 - model.high, 1 - model.low), abs=1e-4)
    equal = [replace(row, lengths=(2000, 2000 + int(d))) for row, d in zip(rows, extra, strict=True)]
    uncontrolled = length_controlled_measurement(equal, "m", "judge", "base")
    assert abs(uncontrolled.value - expected) > 0.05


def test_a_value_far_from_the_data_is_marked():
    lengths = [(500, 500 - n) for n in range(-1, 49)]
    rows = [PairwiseComparison(str(n), "base", "m", n % 3 / 2, pair) for n, pair in enumerate(lengths)]
    assert "2.0% of the answers" not in length_controlled_measurement(rows[:20], "m", "judge", "base").note
    assert "4.0% of the answers" in length_controlled_measurement(rows, "m", "judge", "base").note
