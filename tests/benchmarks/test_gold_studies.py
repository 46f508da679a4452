"""The studies with a gold model: their labels and fits by hand, and each of them on the tiny model."""

import json
import sys

import numpy as np
import pytest

from benchmarks.studies import overoptimization
from benchmarks.studies.gold import gold_pairs
from benchmarks.studies.runner import figures_of

ROWS = [
    {"prompt": "a", "responses": ["x", "y"], "rewards": [1.0, 2.0]},
    {"prompt": "b", "responses": ["same", "same"], "rewards": [1.0, 1.0]},
    {"prompt": "c", "responses": ["p", "q"], "rewards": [0.5, 0.5]},
]


@pytest.mark.parametrize(("noise", "best"), [(0.0, "y"), (1.0, "x")])
def test_a_pair_has_the_gold_models_order_or_the_wrong_one(noise, best):
    """Equal texts and equal rewards teach nothing, and are left out."""
    (pair,) = gold_pairs(ROWS, noise, np.random.default_rng(0))
    assert pair.responses[pair.ranks.index(1)] == best


def test_a_quarter_of_many_pairs_is_wrong():
    rows = [{"prompt": str(n), "responses": ["bad", "good"], "rewards": [0.0, 1.0]} for n in range(2000)]
    wrong = [pair.responses[pair.ranks.index(1)] == "bad" for pair in gold_pairs(rows, 0.25, np.random.default_rng(1))]
    assert np.mean(wrong) == pytest.approx(0.25, abs=0.04)  # four standard errors


@pytest.mark.parametrize(
    ("fit", "form"), [(overoptimization.fit_ppo, np.log), (overoptimization.fit_best_of_n, lambda d: d)], ids=["ppo", "bon"]
)
def test_planted_constants_come_back(fit, form):
    points = [{"d": d, "gain": d * (1.3 - 0.4 * form(d))} for d in (0.3, 0.9, 1.7, 2.6)]
    assert fit(points) == pytest.approx((1.3, 0.4))


@pytest.fixture(scope="module")
def sft(sharp_folders):
    return sharp_folders["tiny-llama"]


def run(monkeypatch, study, folder, *words):
    paths = ["--runs", str(folder / "runs"), "--results", str(folder / "results")]
    monkeypatch.setattr(sys, "argv", ["study", *paths, *words])
    study.main()
    return json.loads((folder / "results" / "figures.json").read_text())


@pytest.mark.slow
def test_the_study_runs_and_go_on_where_they_stopped(tmp_path, sft, monkeypatch, capsys):
    words = ("--sft", sft, "--size", "tiny", "--limit", "12", "--seeds")
    climb = (*words, "0", "--samples", "2", "--judge", str(tmp_path / "runs" / "gold" / "model"))
    found = run(monkeypatch, overoptimization, tmp_path, *climb)
    assert set(found["conditions"]) == {"single, noise 0.25", "wco, noise 0.25", "single, noise 0"}
    assert [point["update"] for point in found["curves"]["wco-noise0.25-seed0"]] == [0, 1, 2]
    assert found["curves"]["wco-noise0.25-seed0"][0]["kl"] == pytest.approx(0, abs=1e-6)
    assert found["curves"]["wco-noise0.25-seed0"][0]["win rate"] == 0.5  # against itself
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/model/*")}
    assert run(monkeypatch, overoptimization, tmp_path, *climb) == found
    assert {path: path.stat().st_mtime_ns for path in times} == times  # nothing was trained twice

    assert (tmp_path / "results" / "curves.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("gain_low", "rates", "lengths", "collapsed"),
    [
        (0.1, [1, 0.5], (4, 4), False),
        (-0.1, [1, 1], (4, 4), True),
        (0.1, [0, 0.5], (4, 4), True),
        (0.1, [1, 1], (4, 1), True),
    ],
)
def test_what_counts_as_a_collapse(gain_low, rates, lengths, collapsed):
    from align.eval.policy_comparison import PolicyComparison, PolicyResponses

    before, after = (PolicyResponses(["t"], [0.0], [[1] * length], [True]) for length in lengths)
    comparison = PolicyComparison([], 1, before, after, 0.5, gain_low, 1.0, 2.0)
    assert figures_of(comparison, np.array(rates, dtype=float))["collapsed"] is collapsed
