import math
import random
from collections import Counter
from itertools import combinations, permutations

import krippendorff
import pandas as pd
import pytest
from crowdkit.aggregation.classification.dawid_skene import OneCoinDawidSkene
from hypothesis import given, settings
from hypothesis import strategies as st

from annotation_ui.reports.agreement import (
    agreement_sums,
    fleiss_kappa,
    krippendorff_alpha,
    mean_of_sums,
    units_of,
)
from annotation_ui.reports.labeler_report import reliability_interval
from annotation_ui.reports.reliability import (
    ITERATIONS,
    estimate_reliability,
    patterns_by_unit,
    preference_matrices,
    preference_rows,
)
from annotation_ui.tasks import TASKS
from annotation_ui.tasks.rankings import BETTER, TIE, WORSE, pairwise_agreement

# Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability": 4 observers, 12 units, some missing.
_ = None
OBSERVERS = {
    "A": [1, 2, 3, 3, 2, 1, 4, 1, 2, _, _, _],
    "B": [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, _, 3],
    "C": [_, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, _],
    "D": [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, _],
}
UNITS = {unit: {o: v[unit] for o, v in OBSERVERS.items() if v[unit] is not None} for unit in range(12)}


def patterns(values):
    """The patterns of unit -> labeler -> value."""
    return Counter(tuple(sorted(unit.values())) for unit in values.values())


@pytest.mark.parametrize(("level", "published"), [("nominal", 0.743), ("ordinal", 0.815)])
def test_alpha_of_krippendorffs_own_example(level, published):
    found = krippendorff_alpha(patterns(UNITS), level)
    assert found is not None
    assert math.isclose(found, published, abs_tol=0.0006)


# Fleiss (1971), "Measuring nominal scale agreement among many raters", table 1: 30 patients, 6 raters, 5 diagnoses.
DIAGNOSES = [
    (0, 0, 0, 6, 0), (0, 3, 0, 0, 3), (0, 1, 4, 0, 1), (0, 0, 0, 0, 6), (0, 3, 0, 3, 0), (2, 0, 4, 0, 0),
    (0, 0, 4, 0, 2), (2, 0, 3, 1, 0), (2, 0, 0, 4, 0), (0, 0, 0, 0, 6), (1, 0, 0, 5, 0), (1, 1, 0, 4, 0),
    (0, 3, 3, 0, 0), (1, 0, 0, 5, 0), (0, 2, 0, 3, 1), (0, 0, 5, 0, 1), (3, 0, 0, 1, 2), (5, 1, 0, 0, 0),
    (0, 2, 0, 4, 0), (1, 0, 2, 0, 3), (0, 0, 0, 0, 6), (0, 1, 0, 5, 0), (0, 2, 0, 1, 3), (2, 0, 0, 4, 0),
    (1, 0, 0, 4, 1), (0, 5, 0, 1, 0), (4, 0, 0, 0, 2), (0, 2, 0, 4, 0), (1, 0, 5, 0, 0), (0, 0, 0, 0, 6),
]  # fmt: skip
# The worked example of Wikipedia's "Fleiss' kappa": 10 subjects, 14 raters, 5 categories.
SUBJECTS = [
    (0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1),
    (7, 7, 0, 0, 0), (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7),
]  # fmt: skip


@pytest.mark.parametrize(("counts", "published"), [(DIAGNOSES, 0.430), (SUBJECTS, 0.210)])
def test_kappa_of_published_examples(counts, published):
    values = {
        subject: {
            f"rater {number}": str(category)
            for number, category in enumerate(c for c, count in enumerate(row) for _ in range(count))
        }
        for subject, row in enumerate(counts)
    }
    found = fleiss_kappa(patterns(values))
    assert found is not None
    assert math.isclose(found, published, abs_tol=0.0006)


VALUES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=2, max_size=20)


@settings(deadline=None)
@given(VALUES, st.sampled_from(["nominal", "ordinal"]))
def test_alpha_is_that_of_the_library(units, level):
    found = krippendorff_alpha(Counter(tuple(sorted(values)) for values in units), level)
    compared = [values for values in units if len(values) > 1]
    domain = sorted({value for values in compared for value in values})
    if len(domain) < 2:
        assert found is None
        return
    counts = [[values.count(value) for value in domain] for values in compared]
    expected = krippendorff.alpha(value_counts=counts, level_of_measurement=level, value_domain=domain)
    assert found == pytest.approx(expected, abs=1e-9)


def test_kappa_and_alpha_where_there_is_little_to_compare():
    assert fleiss_kappa({}) is None
    assert fleiss_kappa({("x",): 3}) is None
    assert fleiss_kappa({("x", "x"): 2}) is None
    assert krippendorff_alpha({(1,): 2}, "ordinal") is None
    assert krippendorff_alpha({(1, 1): 1}, "ordinal") is None
    full = {("x", "x"): 1, ("y", "y"): 1}
    assert fleiss_kappa({**full, ("x",): 1, ("x", "x", "y"): 1}) == pytest.approx(1.0)
    assert fleiss_kappa({**full, ("x", "y"): 0}) == pytest.approx(1.0)


def test_pairwise_agreement_by_hand():
    assert pairwise_agreement([1, 2, 3], [1, 2, 3]) == 1
    assert pairwise_agreement([1, 2, 3], [3, 2, 1]) == 0
    assert pairwise_agreement([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 3)  # the tied pair differs
    sums = agreement_sums({"a": [1, 2, 3], "b": [1, 2, 3], "c": [3, 2, 1]}, pairwise_agreement)
    assert sums == {"a": (1.0, 2), "b": (1.0, 2), "c": (0.0, 2)}
    alone = agreement_sums({"a": [1, 2, 3]}, pairwise_agreement)
    assert mean_of_sums([*sums.values(), *alone.values()]) == pytest.approx(1 / 3)
    assert mean_of_sums(alone.values()) is None


def test_rankings_become_one_unit_per_response():
    answers = {"a": {"ranks": [1, 2], "ratings": [3, 4]}, "b": {"ranks": [2, 1], "ratings": [5, None]}}
    assert [(unit.scale, unit.level, unit.values) for unit in units_of(TASKS["rank"], answers)] == [
        ("ranks", "ordinal", {"a": 1, "b": 2}),
        ("ranks", "ordinal", {"a": 2, "b": 1}),
        ("ratings", "ordinal", {"a": 3, "b": 5}),
        ("ratings", "ordinal", {"a": 4}),
    ]


def test_aggregation_by_hand():
    blank = {"ratings": [None, None, None], "flags": [[], [], []]}
    answers = [
        {**blank, "ranks": [1, 2, 3], "ratings": [7, None, 2], "flags": [["sexual"], [], []]},
        {**blank, "ranks": [1, 3, 2], "ratings": [4, None, 3], "flags": [["sexual", "violent"], [], []]},
    ]
    combined = TASKS["rank"].combine(answers)
    assert combined == {"ranks": [1, 2, 2], "ratings": [6, None, 3], "flags": [["sexual"], [], []]}
    judged = [{"verdicts": {"r": {"verdict": v, "note": v[0]}}} for v in ("violates", "follows")]
    assert TASKS["rules"].combine(judged) == {"verdicts": {"r": {"verdict": "unsure", "note": "v; f"}}}
    assert TASKS["compare"].combine([{"choice": "A"}, {"choice": "A"}, {"choice": "B"}]) == {"choice": "A"}
    assert TASKS["compare"].combine([{"choice": "A"}, {"choice": "B"}]) == {"choice": "tie"}
    assert TASKS["demonstrate"].combine([{"completion": "x"}, {"completion": "y"}]) is None


def test_an_answer_that_ties_counts_as_much_as_any_other():
    """Two of three rank I below eight that they tie (places 4.5 and 9), one ranks I > A > ... > H: means 5.67 and more."""
    blank = {"ratings": [None] * 9, "flags": [[]] * 9}
    answers = [{**blank, "ranks": [1] * 8 + [2]}] * 2 + [{**blank, "ranks": [*range(2, 10), 1]}]
    # doubled places: A to H 9 + 9 + 2 * (2 ... 9) = 22 ... 36; I 18 + 18 + 2 = 38
    assert TASKS["rank"].combine(answers)["ranks"] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert TASKS["rank"].combine([{**blank, "ranks": [1, 1, 2, 3, 3, 3, 4, 5, 5]}])["ranks"] == [1, 1, 2, 3, 3, 3, 4, 5, 5]


def simulate(rng, accuracies, units, per_unit):
    """Units with three answers and, on each, `per_unit` labelers that are right as often as their accuracy says."""
    truth = {unit: rng.choice("abc") for unit in range(units)}
    rows = []
    for unit, right in truth.items():
        for name in rng.sample(sorted(accuracies), per_unit):
            answer = right if rng.random() < accuracies[name] else rng.choice([a for a in "abc" if a != right])
            rows.append((unit, name, answer))
    return rows, truth


def estimated(rows):
    """(labeler -> reliability, unit -> posterior) of rows (unit, labeler, answer)."""
    by_unit = patterns_by_unit(rows)
    found = estimate_reliability(Counter(by_unit.values()))
    return found.labelers, {unit: found.posteriors[answers] for unit, answers in by_unit.items() if found.posteriors}


def test_accuracies_are_found_again_and_posteriors_beat_the_majority():
    accuracies = {"ann": 0.95, "bob": 0.85, "cy": 0.75, "dot": 0.5}
    rows, truth = simulate(random.Random(3), accuracies, 600, 3)
    found, posteriors = estimated(rows)
    assert found == pytest.approx(accuracies, abs=0.05)
    log_loss = -sum(math.log(max(posteriors[unit][truth[unit]], 1e-6)) for unit in truth) / len(truth)
    votes = {unit: [answer for other, _, answer in rows if other == unit] for unit in truth}
    majority = -sum(math.log(max(votes[u].count(truth[u]) / 3, 1e-6)) for u in truth) / len(truth)
    assert log_loss < 0.3 < majority
    assert all(sum(answers.values()) == pytest.approx(1) for answers in posteriors.values())


@pytest.mark.parametrize("per_unit", [2, 3])
def test_the_estimate_is_that_of_crowd_kit(per_unit):
    """Which reads each judgment, where equal patterns of answers are read once here."""
    rows, _ = simulate(random.Random(per_unit), {"ann": 0.9, "bob": 0.8, "cy": 0.6, "dot": 0.7}, 100, per_unit)
    model = OneCoinDawidSkene(n_iter=ITERATIONS, tol=-math.inf).fit(pd.DataFrame(rows, columns=["task", "worker", "label"]))
    labelers, posteriors = estimated(rows)
    assert labelers == pytest.approx(model.skills_.to_dict(), abs=2e-3)
    for unit, answers in model.probas_.to_dict("index").items():
        assert posteriors[unit] == pytest.approx(answers, abs=2e-2)


def test_units_with_one_answer_get_a_posterior_but_do_not_make_a_labeler_known():
    rows, _ = simulate(random.Random(7), {"ann": 0.9, "bob": 0.8, "cy": 0.6}, 300, 3)
    alone = [(f"alone {number}", "solo", "a") for number in range(20)]
    cy_alone = [(f"cy {number}", "cy", random.Random(number).choice("abc")) for number in range(300)]
    labelers, posteriors = estimated([*rows, *alone, *cy_alone])
    assert set(labelers) == {"ann", "bob", "cy"}
    assert labelers["cy"] == pytest.approx(0.6, abs=0.08)  # what nobody else judged adds nothing
    assert 0.4 < max(posteriors["cy 1"].values()) < 0.8


def test_nothing_shared_or_one_answer_only_is_no_estimate():
    for rows in ([], [(1, "ann", "a"), (2, "bob", "b")], [(1, "ann", "a"), (1, "bob", "a")]):
        assert estimated(rows) == ({}, {})


def test_preference_rows_by_hand():
    rows = {(unit, labeler): answer for unit, labeler, answer in preference_rows({7: {"ann": [2, 1, 2]}})}
    assert rows == {
        ((7, 0, 1), "ann"): WORSE, ((7, 1, 0), "ann"): BETTER, ((7, 0, 2), "ann"): TIE,
        ((7, 2, 0), "ann"): TIE, ((7, 1, 2), "ann"): BETTER, ((7, 2, 1), "ann"): WORSE,
    }  # fmt: skip


def test_preferences_are_the_posteriors_of_every_order():
    rng = random.Random(13)
    orders = list(permutations([1, 2, 3]))
    rankings = {
        item: {
            "ann": [1, 2, 3],
            "bob": [1, 2, 3] if rng.random() < 0.9 else [2, 1, 3],
            "cy": list(rng.choice(orders)),
        }
        for item in range(60)
    }
    rankings["split"] = {"bob": [1, 2, 2], "cy": [2, 1, 3]}
    _, posteriors = estimated(preference_rows(rankings))
    matrices = preference_matrices(rankings)
    assert matrices.keys() == rankings.keys()
    for item, matrix in matrices.items():
        for i, j in combinations(range(3), 2):
            answers = posteriors[item, i, j]
            assert (matrix[i][j], matrix[j][i]) == pytest.approx((answers[BETTER], answers[WORSE]), abs=1e-4)
    split = matrices["split"]
    assert split[0][1] > 0.9 > 0.1 > split[1][0]  # bob is right more often than cy
    assert split[1][2] > split[2][1]  # he tied them, which hardly ever happens here; cy has an opinion


def test_without_an_item_that_two_ranked_there_are_no_preferences():
    assert preference_matrices({1: {"ann": [1, 2]}, 2: {"bob": [2, 1]}}) == {}


def test_the_interval_of_a_reliability_covers_the_true_one():
    accuracies, covered, widths = {"ann": 0.95, "bob": 0.85, "cy": 0.7}, [], {30: [], 200: []}
    for seed in range(12):
        for units in widths:
            drawn, _ = simulate(random.Random(seed), accuracies, units, 3)
            rows = [((unit, "question"), labeler, answer) for unit, labeler, answer in drawn]
            labelers, _ = estimated(rows)
            for labeler, accuracy in accuracies.items():
                low, high = reliability_interval(labelers[labeler], units)
                assert low <= labelers[labeler] <= high
                covered.append(low <= accuracy <= high)
                widths[units].append(high - low)
    assert sum(covered) / len(covered) > 0.85
    assert sum(widths[200]) < 0.6 * sum(widths[30])


def test_the_interval_by_hand():
    low, high = reliability_interval(5 / 6, 6)  # Clopper and Pearson: 5 of 6
    assert (low, high) == pytest.approx((0.35877, 0.99579), abs=1e-4)
    assert reliability_interval(1.0, 3) == pytest.approx((0.29240, 1.0), abs=1e-4)
