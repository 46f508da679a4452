"""The study of reward models: its data and figures by hand, and all of it on the tiny model."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from align.data.records import Ranking
from align.reward.metrics import ScoredRanking
from benchmarks.studies import reward_models
from benchmarks.studies.preference_data import disjoint_pairs, ranks_of

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("preference", "ranks"),
    [
        ((1, 1, 1, 1, 1, 1), (1, 2, 3, 4)),
        ((2, 2, 2, 2, 2, 2), (4, 3, 2, 1)),
        ((0, 1, 1, 1, 1, 0), (1, 1, 2, 2)),  # the first two are equal, and so are the last two
        ((1, 2, 1, 1, 1, 1), (1, 1, 1, 2)),  # a circle: 1 > 2 > 3 > 1, and each of them beats 4
    ],
)
def test_ranks_are_by_the_number_of_wins(preference, ranks):
    assert ranks_of(preference) == ranks


def test_pairs_read_each_response_once_in_the_rankings_order():
    ranking = Ranking(prompt="p", responses=tuple("abcdefghi"), ranks=(1, 2, 2, 2, 3, 4, 5, 5, 9))
    rank = dict(zip(ranking.responses, ranking.ranks, strict=True))
    for seed in range(20):
        pairs = disjoint_pairs(ranking, np.random.default_rng(seed))
        texts = [text for pair in pairs for text in pair.responses]
        assert len(set(texts)) == len(texts) >= 6
        for pair in pairs:
            assert (rank[pair.responses[0]] < rank[pair.responses[1]]) == (pair.ranks == (1, 2))
            assert rank[pair.responses[0]] != rank[pair.responses[1]]


def test_an_ensemble_orders_by_the_mean_reward():
    """Differences of 3 and -1: one of two is right, and so is their mean."""
    members = [[ScoredRanking((1, 2), rewards, (5, 5))] for rewards in ((3.0, 0.0), (0.0, 1.0))]
    assert reward_models.ensemble(members)[0].rewards == (1.5, 0.5)
    assert [reward_models.accuracy([member])["accuracy"] for member in members] == [1.0, 0.0]
    both = reward_models.accuracy(members)
    assert both["accuracy"] == 1.0
    assert both["calibration_error"] == pytest.approx(1 - 1 / (1 + np.exp(-1.0)))  # it says 73 %, and is right


@pytest.mark.full
@pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is absent: the real preferences are not part of the project")
def test_the_study_runs_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    sizes = ["--pairs", "16", "16", "--k9", "8", "4", "--k4", "8", "4", "--seeds", "0", "1"]
    paths = ["--data", str(SHARED), "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["study", "--model", "tiny-llama", *paths, *sizes])
    reward_models.main()
    found = json.loads((tmp_path / "results" / "figures.json").read_text())
    assert {"people-16-ours-0", "people-16-trl-0", "people-16-ours-ensemble", "k9-rankings-8-ours-0"} <= set(found)
    ours, trl = found["people-16-ours-0"], found["people-16-trl-0"]
    assert ours["pairs"] == trl["pairs"] == 16
    assert ours["updates"] == trl["updates"] == 2
    assert ours["tokens"] < trl["tokens"]  # a prompt is read once
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
    reward_models.main()
    assert {path: path.stat().st_mtime_ns for path in times} == times
