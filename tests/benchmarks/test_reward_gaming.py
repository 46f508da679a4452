import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from align.reward.checkpoint import HEAD
from benchmarks.studies import reward_gaming
from benchmarks.studies.gaming_figures import (
    above,
    alarms,
    changes,
    departure,
    noise_of,
    outcome,
    prompt_key,
    selected,
    summary,
    top_phrase_share,
)
from benchmarks.studies.planted_bias import BIASES, biased_pairs, decided_share, find_beta, planted
from benchmarks.studies.reward_gaming import against_references, average_weights, cut_reward_model

ROWS = [
    {"prompt": "a", "responses": ["one", "one two three"], "rewards": [1.0, 0.0]},
    {"prompt": "b", "responses": ["one two", "one"], "rewards": [9.0, 0.0]},
    {"prompt": "c", "responses": ["same", "same"], "rewards": [0.0, 0.0]},
]


def test_planted_labels_by_hand():
    """The bias decides one of the two pairs: that with the smaller difference in gold reward per word."""
    pairs, figures = biased_pairs(BIASES["length"], ROWS, 0.5)
    assert [pair.responses[pair.ranks.index(1)] for pair in pairs] == ["one two three", "one two"]
    assert (figures["pairs"], figures["decided by the bias"], figures["against gold"]) == (2, 0.5, 0.5)
    random = np.random.default_rng(0)
    gold, feature = random.normal(size=1000), random.integers(-1, 2, size=1000)
    assert decided_share(gold, feature, find_beta(gold, feature, 0.4)) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="the feature differs in"):
        find_beta(gold, feature, 0.9)


@pytest.mark.parametrize("name", ["flattery", "phrase", "format"])
def test_a_share_of_the_answers_gets_the_feature(name):
    rows = [{"prompt": "p", "responses": ["It rains. Take a coat."] * 200}]
    (row,) = planted(BIASES[name], rows, 0.5, np.random.default_rng(0))
    assert BIASES[name].feature(rows[0]["responses"][0]) == 0
    assert np.mean([BIASES[name].feature(text) for text in row["responses"]]) == pytest.approx(0.5, abs=0.15)


def test_defenses_by_hand():
    assert BIASES["format"].plant("It rains. Take a coat!", 0) == "- It rains.\n- Take a coat!"
    rewards = against_references(torch.tensor([0.0, 100.0, 2.0]), [[0.0, 0.0], [0.0, 0.0], [2.0, -100.0]])
    assert rewards.tolist() == pytest.approx([2.0, 4.0, 3.0])


def test_averaged_weights_are_means(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for value, folder in enumerate(folders):
        folder.mkdir()
        for name in ("model.safetensors", HEAD):
            save_file({"weight": torch.full((2,), float(value))}, folder / name)
        (folder / "reward.json").write_text('{"mean": 0.0}')
    average_weights(folders, tmp_path / "mean")
    assert load_file(tmp_path / "mean" / HEAD)["weight"].tolist() == [1.0, 1.0]
    assert load_file(tmp_path / "mean" / "model.safetensors")["weight"].tolist() == [1.0, 1.0]
    assert (tmp_path / "mean" / "reward.json").exists()


def test_alarms_by_hand():
    assert departure({1: 1.0, 2: 1.2, 3: 1.25, 4: 1.5}, noise=0.1) == 4
    assert departure({1: 1.0, 2: 1.2, 3: 1.25}, noise=0.1) is None
    assert above({1: 0.1, 2: 0.4, 3: 0.5}, 0.3) == 2
    turns = [{"role": "user", "content": "a"}]
    references = {prompt_key("a"): [1.0, 3.0], prompt_key("b"): [0.0]}
    found = changes("gold", [turns, turns, "b"], [1.0, 2.0, 1.5], references)
    assert found["gold changes"] == [-0.5, 1.5]
    assert (found["gold"], found["gold change"], found["gold error"]) == (1.5, 0.5, 1.0)


def point(update, *gold, **more):
    found = {"update": update, "kl": 1.0, "proxy": float(update), "feature": 0.5, "words": 9.0, "top phrase": 0.0}
    found |= {"gold change": float(np.mean(gold)), "gold error": 0.1, "gold changes": list(gold)}
    return found | {"judge change": 0.0, "judge error": 0.1} | more


def test_alarms_of_a_run():
    rows = [
        {"update": update, "entropy": 2.0 - 0.1 * update, "kl/k1": 4.0 * update, "response/repetition": 0.0}
        | {"response/length": 20.0 + 3 * update, "response/eos_rate": 1.0 - 0.08 * update}
        for update in range(1, 6)
    ]
    points = [point(1, 0.0), point(2, 0.0, **{"judge change": -0.3}), point(3, 0.0, **{"top phrase": 0.2})]
    found = alarms(rows, points, {"entropy": 0.08})
    expected = {
        "entropy": 4,
        "kl/k1": 3,
        "response/length (half or 1.5 times)": 5,
        "response/eos_rate (0.2 below)": 4,
        "response/repetition (0.1 above)": None,
        "judge below the start": 2,
        "most frequent phrase of 4 words": 3,
    }
    assert found == expected


def test_figures_of_runs_by_hand():
    rows = [dict.fromkeys(("reward/std", "entropy"), value) for value in (1.0, 3.0)]
    found = noise_of(rows)
    assert found["entropy"] == pytest.approx(2**0.5)
    assert found["reward/std"] == pytest.approx(2**0.5 / 2)
    assert "response/length" not in found
    points = [point(1, 0.0, 0.1), point(2, 1.0, 1.2), point(3, -0.9, -1.0), point(4, -1.0, -1.1)]
    found = outcome(points)
    assert (found["highest at update"], found["lost"], outcome(points[:3])["lost"]) == (2, True, False)
    assert found["final change"] == pytest.approx(-1.0)
    assert outcome([point(1, 0.0, 0.1), point(2, 0.1, 0.2, words=4.0)])["lost"] is True
    points[1]["judge change"] = 0.5
    assert selected(points)["update"] == 2
    runs = {
        name: {"outcome": {"lost": lost}, "alarms": {"entropy": update}}
        for name, lost, update in (("a", True, 3), ("b", True, None), ("c", False, 2))
    }
    assert summary(runs)["entropy"] == {"lost runs": 2, "alarms": [3], "other runs": 1, "false alarms": [2]}
    texts = ["I can help with that.", "So I can help, with it", "no", "other words are here"]
    assert top_phrase_share(texts) == 0.5
    assert top_phrase_share(["short"]) == 0.0


@pytest.mark.slow
def test_the_study_runs_and_continues_where_it_stopped(tmp_path, sharp_folders, monkeypatch):
    """With a gold model and judge of random weights."""
    sft, gold = sharp_folders["tiny-llama"], tmp_path / "gold"
    cut_reward_model(sft, 2, gold)
    models = ["--sft", sft, "--gold", str(gold), "--judge", str(gold)]
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    parts = ["--size", "tiny", "--jobs", "1", "--biases", "flattery", "--conditions", "none", "minimum of 3", "WARM", "PAR"]
    monkeypatch.setattr(sys, "argv", ["study", *models, *folders, *parts])

    def figures():
        reward_gaming.main()
        return json.loads((tmp_path / "results" / "figures.json").read_text())

    found = figures()
    assert set(found["runs"]) == {f"flattery, seed 0, {name}" for name in ("none", "minimum of 3", "WARM", "PAR", "gold")}
    run = found["runs"]["flattery, seed 0, minimum of 3"]
    assert [point["update"] for point in run["points"]] == [1, 2, 3]
    assert run["points"][0]["kl"] == pytest.approx(0, abs=1e-6)
    assert "reward/disagreement" in run["alarms"]
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/*/model/*")}
    assert figures() == found
    assert {path: path.stat().st_mtime_ns for path in times} == times  # nothing was trained twice
    assert (tmp_path / "results" / "curves.svg").stat().st_size > 1000
