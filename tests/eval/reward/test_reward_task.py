"""`align eval reward`: the same numbers as scoring one by one, curves, and reward against KL over a run's policies."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from align.core.errors import UserError
from align.core.statistics import kendall_tau
from align.core.tensor_ops import Padded
from align.data.records import Ranking
from align.eval.core.results import read_evaluations
from align.eval.reward.curves import policies_of
from align.eval.reward.preferences import calibration_and_length_intervals
from align.eval.reward.settings import RewardEvalConfig
from align.eval.reward.task import run_reward_eval
from align.ppo import PPOConfig, run_ppo
from align.reward.checkpoint import load_reward_model
from align.reward.rankings import ScoredRanking

RANKINGS = [
    {"prompt": "Hi", "responses": ["a", "bb", "ccc"], "ranks": [1, 2, 3], "category": "x"},
    {"prompt": "Count", "responses": ["1 2", "no"], "ranks": [2, 1], "category": "y"},
    {"prompt": "Who?", "responses": ["me", "you there", "them"], "ranks": [1, 2, 2], "category": "x"},
]


@pytest.fixture
def settings(tmp_path, reward_folders):
    (tmp_path / "rankings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RANKINGS))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in RANKINGS))
    given = {"reward_model": reward_folders["tiny-llama"], "gold_model": reward_folders["tiny-gpt2"]}
    given |= {"preferences": str(tmp_path / "rankings.jsonl"), "prompts": str(tmp_path / "prompts.jsonl")}
    return given | {"output": str(tmp_path / "out"), "dtype": "float32", "resamples": 100, "max_new_tokens": 5}


def figures(evaluation):
    return {figure.name: figure for figure in evaluation.figures}


def test_accuracy_and_order_are_those_of_single_rows(settings):
    proxy, gold = run_reward_eval(RewardEvalConfig(**settings))
    assert (proxy.model, gold.model) == ("tiny-llama", "tiny-gpt2")
    found = load_reward_model(settings["reward_model"], "float32")
    right, taus = [], []
    for row in RANKINGS:
        record, tokenization = Ranking.from_row(row), found.loaded.tokenization
        prompt, rewards = tokenization.prompt_ids(record.prompt), []
        for text in record.responses:
            both = Padded.from_lists([prompt]), Padded.from_lists([tokenization.response_ids(text)])
            rewards.append(float(found.model(*both)) - found.mean)
        taus.append(kendall_tau(record.ranks, rewards))
        pairs = [(i, j) for i, a in enumerate(record.ranks) for j, b in enumerate(record.ranks) if a < b]
        right += [rewards[i] > rewards[j] for i, j in pairs]
    assert figures(proxy)["accuracy"].value == pytest.approx(np.mean(right))
    assert figures(proxy)["accuracy"].n == 6
    assert figures(proxy)["Kendall's tau"].value == pytest.approx(np.mean(taus))
    table = proxy.tables["by category"]
    assert [(row["category"], row["pairs"]) for row in table] == [("x", 5), ("y", 1)]
    assert sum(row["pairs"] for row in proxy.tables["calibration"]) == 6
    assert proxy.figures[0].scorer != gold.figures[0].scorer


def test_rewards_of_other_preferences_in_a_folder_are_not_reused(settings, tmp_path):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "rankings.jsonl"
    path.write_text(json.dumps(RANKINGS[0]) + "\n")
    config = RewardEvalConfig(**settings | {"preferences": str(tmp_path / "folder"), "gold_model": ""})
    run_reward_eval(config)
    path.write_text(json.dumps(RANKINGS[0] | {"responses": ["a", "bb", "other"]}) + "\n")
    with pytest.raises(UserError, match="holds results with preferences_sha256"):
        run_reward_eval(config)


def test_the_curve_of_best_of_n(settings, sharp_folders):
    config = RewardEvalConfig(**settings | {"preferences": ""}, models=[sharp_folders["tiny-llama"]], samples=8)
    (found,) = run_reward_eval(config)
    curve = found.tables["curve"]
    assert [row["n"] for row in curve] == [1, 2, 4, 8]
    rewards = [row["reward"] for row in curve]
    assert rewards == sorted(rewards)
    path = Path(settings["output"]) / "best-of-n-tiny-llama-by-tiny-llama.jsonl"
    kept = [json.loads(line)["rewards"] for line in path.read_text().splitlines()[1:]]
    assert [len(row) for row in kept] == [8, 8, 8]
    assert figures(found)["reward, best of 1"].value == pytest.approx(np.mean(kept))
    assert figures(found)["reward, best of 8"].value == pytest.approx(np.max(kept, axis=1).mean())
    assert "1.20 nats" in figures(found)["gold, best of 8"].note  # log 8 - 7/8
    assert read_evaluations(Path(settings["output"]) / "best-of-n.json") == [found]


def test_reward_against_kl_over_the_policies_of_a_run(settings, sharp_folders, tmp_path):
    ppo = PPOConfig(
        model=sharp_folders["tiny-llama"],
        reward_model=settings["reward_model"],
        prompts=settings["prompts"],
        validation_prompts=settings["prompts"],
        output_dir=str(tmp_path / "ppo"),
        updates=2,
        rollout_size=4,
        max_new_tokens=5,
        evaluate_every=1,
        keep_policies=True,
        learning_rate=1e-3,
        dtype="float32",
        log_to=["none"],
    )
    run_ppo(ppo)
    config = RewardEvalConfig(**settings | {"preferences": ""}, frontier=str(tmp_path / "ppo"))
    found = run_reward_eval(config)
    assert [each.model for each in found] == ["tiny-llama", "update-000001", "update-000002"]
    kl = [figures(each)["KL"].value for each in found]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert min(kl[1:]) > 1e-5
    assert all({"reward", "gold"} <= figures(each).keys() for each in found)
    assert found[0].tables["reward against KL"][0]["policy"] == "tiny-llama"


def test_mistakes(settings, tmp_path):
    with pytest.raises(UserError, match="reward_model is '', but must be given"):
        RewardEvalConfig()
    with pytest.raises(UserError, match=r"gold_model is .* another model than reward_model"):
        RewardEvalConfig(reward_model="a", gold_model="a")
    with pytest.raises(UserError, match="no policies/ in it; train with keep_policies"):
        policies_of(str(tmp_path))
    shutil.copytree(settings["reward_model"], tmp_path / "policies" / "update-000001")
    with pytest.raises(UserError, match="not the settings of a PPO run"):
        policies_of(str(tmp_path))


def test_intervals_draw_whole_rankings_again():
    # Two rankings, each with a length correlation of its own: +1 and -1. Of the four equally likely draws of two, one is
    # all of the first and one all of the second, so the middle 95 % reaches both.
    up = ScoredRanking((1, 2), (1.0, 0.0), (9, 5))
    down = ScoredRanking((1, 2), (0.0, 1.0), (9, 5))
    found = calibration_and_length_intervals([up, down], 400)
    assert found["length"] == pytest.approx((-1.0, 1.0))
    # Both say 0.731, sigmoid(1): one of each is right half of the time, two of the second never.
    said = 1 / (1 + math.exp(-1))
    assert found["calibration"] == pytest.approx((said - 0.5, said))
