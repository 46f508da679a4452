import re
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from annotation_ui.lead_tabs.overview import ratings_chart
from annotation_ui.reports.ratings import Z95, mean_and_half_width, ratings_by_model
from tests.annotation_ui.running import add_batch, add_users, do, read


def rows(*models, count=2):
    return [("t", {"prompt": f"p{n}", "responses": ["a", "b"], "model": list(models) or None}) for n in range(count)]


def rate(judgments, user, *ratings):
    do(judgments, user, "rank", {"ranks": [1, 2], "ratings": list(ratings), "flags": [[], []]})


def test_ratings_by_hand(database, judgments):
    add_batch(database, rows("new", "old"), labelers_per_item=2)
    ann, bob = add_users(database, "ann", "bob")
    rate(judgments, ann, 7, 3)
    rate(judgments, ann, 4, None)
    rate(judgments, bob, 6, 1)
    new, old = read(database, ratings_by_model)
    assert (new["model"], new["counts"], new["ratings"]) == ("new", [0, 0, 0, 1, 0, 1, 1], 3)
    mean = 17 / 3  # items: 7 + 6 and 4
    half = Z95 * sqrt(((13 - 2 * mean) ** 2 + (4 - mean) ** 2) * 2) / 3
    assert (new["mean"], new["low"], new["high"]) == tuple(round(value, 3) for value in (mean, mean - half, mean + half))
    assert (old["counts"], old["mean"], old["low"]) == ([1, 0, 1, 0, 0, 0, 0], 2, None)  # one item has no interval


def test_known_items_are_left_out_and_equal_responses_count_for_each_model(database, judgments):
    known = ("t", {"prompt": "p", "responses": ["a", "b"], "gold": {"ranks": [1, 2]}, "training": True})
    add_batch(database, [known, ("t", {"prompt": "q", "responses": ["a", "b", "a"], "model": ["x", "y", "z"]})])
    add_batch(database, rows(count=1), priority=-1)
    (ann,) = add_users(database, "ann")
    for ratings in ((1, 1), (5, 2), (3, 3)):
        rate(judgments, ann, *ratings)
    assert {row["model"]: row["mean"] for row in read(database, ratings_by_model)} == {
        "x": 5, "y": 2, "z": 5, "(no name)": 3,
    }  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=100, max_size=150))
def test_the_standard_error_is_that_of_a_bootstrap_over_items(groups):
    mean, half = mean_and_half_width(groups)
    values = [value for group in groups for value in group]
    sums, counts = np.array([sum(group) for group in groups]), np.array([len(group) for group in groups])
    drawn = np.random.default_rng(0).integers(len(groups), size=(4000, len(groups)))
    bootstrap = sums[drawn].sum(1) / counts[drawn].sum(1)
    assert mean == pytest.approx(np.mean(values))
    assert half == pytest.approx(Z95 * bootstrap.std(), rel=0.1, abs=1e-9)


def test_the_chart_shows_the_distribution_the_mean_and_the_interval():
    row = {"model": "<b>", "counts": [1, 0, 0, 0, 0, 0, 3], "ratings": 4, "mean": 5.5, "low": 4, "high": 7.2}
    html = ratings_chart([row, {**row, "model": "one", "low": None, "high": None}], "none")
    assert re.findall(r'class="rating-(\d)" style="flex: (\d)"', html) == [("1", "1"), ("7", "3")] * 2
    assert "5.50 (4.00 to 7.20)" in html
    assert re.findall(r'interval" style="left: ([0-9.]+)%; width: ([0-9.]+)%', html) == [
        ("50.0", "50.0")
    ]  # within the scale
    assert re.findall(r'mean" style="left: ([0-9.]+)%', html) == ["75.0"] * 2
    assert "1: 1, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 7: 3" in html  # read aloud
    assert "<b>" not in html
    assert ratings_chart([], "none") == '<p class="empty">none</p>'
